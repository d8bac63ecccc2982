"""MSGD: stochastic gradient descent that finds each layer's fixed-point format as it trains."""

from marvin import tensorboard
from marvin.activations import QuantizedActivations, fake_quantize, quantize_activations
from marvin.base import QuantizingOptimizer
from marvin.checkpoint import load_sharded, save_sharded
from marvin.init import tnvs_
from marvin.loss_budget import LossBudgetPolicy, StaticPolicy
from marvin.marvin_policy import MarvinPolicy
from marvin.muppet import MuppetPolicy
from marvin.optimizer import MSGD
from marvin.policy import FixedPolicy, Policy
from marvin.quantized import Quantized
from marvin.stored import StoredCodes, store_codes
from marvin.trace import Switch

__all__ = [
    "MSGD",
    "FixedPolicy",
    "LossBudgetPolicy",
    "MarvinPolicy",
    "MuppetPolicy",
    "Policy",
    "Quantized",
    "QuantizedActivations",
    "QuantizingOptimizer",
    "StaticPolicy",
    "StoredCodes",
    "Switch",
    "fake_quantize",
    "load_sharded",
    "quantize_activations",
    "save_sharded",
    "store_codes",
    "tensorboard",
    "tnvs_",
]
