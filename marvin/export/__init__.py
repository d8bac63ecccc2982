"""Deploy a trained network: files for other runtimes, and the proof that they compute the same.

``packed`` stores weights as integers of their own word length. ``describe`` turns a model into a
``Network`` of exact operations and roundings, which ``integer`` computes in int64, ``verify``
compares with its simulation in float32, and ``onnx``, ``qonnx`` and ``hls4ml`` write.
"""

from marvin.export.deploy import Deployed, Options, deploy
from marvin.export.errors import ExportError
from marvin.export.frozen import load_frozen
from marvin.export.network import Network
from marvin.export.observe import Formats, calibrate
from marvin.export.sums import round_sums
from marvin.export.trace import describe
from marvin.export.verify import compare, verify
from marvin.export.weights import (
    formats_of_weights,
    masters_of,
    nearest_weights,
    weight_formats,
)

__all__ = [
    "Deployed",
    "ExportError",
    "Formats",
    "Network",
    "Options",
    "calibrate",
    "compare",
    "deploy",
    "describe",
    "formats_of_weights",
    "load_frozen",
    "masters_of",
    "nearest_weights",
    "round_sums",
    "verify",
    "weight_formats",
]
