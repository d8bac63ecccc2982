"""MSGD: stochastic gradient descent that finds each layer's fixed-point format as it trains."""

import warnings
from typing import Any

from marvin import integer, tensorboard
from marvin.activations import QuantizedActivations
from marvin.checkpoint import load_sharded, save_sharded
from marvin.conversion import prepare, quantize_activations
from marvin.freezing import freeze
from marvin.init import tnvs_
from marvin.loss_budget import LossBudgetPolicy, StaticPolicy
from marvin.marvin_policy import MarvinPolicy
from marvin.muppet import MuppetPolicy
from marvin.optimizer import MSGD
from marvin.policy import FixedPolicy, Policy
from marvin.quantized import Quantized
from marvin.stored import StoredCodes, store_codes
from marvin.straight_through import fake_quantize
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
    "StaticPolicy",
    "StoredCodes",
    "Switch",
    "fake_quantize",
    "freeze",
    "integer",
    "load_sharded",
    "prepare",
    "quantize_activations",
    "save_sharded",
    "store_codes",
    "tensorboard",
    "tnvs_",
]

_RENAMED = {"QuantizingOptimizer": "Quantized"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(
            f"marvin.{name} is now marvin.{_RENAMED[name]}", DeprecationWarning, stacklevel=2
        )
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module 'marvin' has no attribute {name!r}")
