"""Deploy a trained network: files for other runtimes, and the proof that they compute the same.

``packed`` stores weights as integers of their own word length. ``describe`` turns a model into a
``Network`` of exact operations and roundings, which ``integer`` computes in int64, ``verify``
compares with its simulation in float32, and ``onnx``, ``qonnx`` and ``hls4ml`` write.
"""

from marvin.export.errors import ExportError

__all__ = ["ExportError"]
