"""What fixed point saves: multiply-adds, size and memory, predicted and measured.

Loads no torch; what needs it loads it when called.
"""

from perfmodel import cost, memory
from perfmodel.layers import Layer, UnknownLayerError, layers

__all__ = ["Layer", "UnknownLayerError", "cost", "layers", "memory"]
