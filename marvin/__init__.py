"""MSGD: stochastic gradient descent that finds each layer's fixed-point format as it trains."""

from marvin import tensorboard
from marvin.activations import QuantizedActivations, fake_quantize, quantize_activations
from marvin.init import tnvs_
from marvin.optimizer import MSGD
from marvin.trace import Switch

__all__ = [
    "MSGD",
    "QuantizedActivations",
    "Switch",
    "fake_quantize",
    "quantize_activations",
    "tensorboard",
    "tnvs_",
]
