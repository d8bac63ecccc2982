"""What fixed point saves: multiply-adds, size and memory, predicted and measured.

Loads no torch; what needs it loads it when called.
"""

from perfmodel.layers import Layer, UnknownLayerError, layers

__all__ = ["Layer", "UnknownLayerError", "layers"]
