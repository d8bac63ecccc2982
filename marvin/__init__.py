"""MSGD: stochastic gradient descent that finds each layer's fixed-point format as it trains."""

import sys
import warnings
from typing import TYPE_CHECKING, Any

from marvin.lazy import Alias, load

if TYPE_CHECKING:  # for readers; Python loads each when it is first used
    from marvin import integer, tensorboard
    from marvin.activations import QuantizedActivations
    from marvin.attention import spell_attention
    from marvin.averaging import MasterAverage
    from marvin.batch_norm import reestimate_batch_norm
    from marvin.calibration import calibrate
    from marvin.channels import ChannelFormat
    from marvin.checkpoint import load_sharded, save_sharded
    from marvin.conversion import prepare, quantize_activations
    from marvin.freezing import freeze
    from marvin.init import tnvs_
    from marvin.optimizer import MSGD
    from marvin.policies.base import FixedPolicy, Policy
    from marvin.policies.loss_budget import LossBudgetPolicy, StaticPolicy
    from marvin.policies.marvin import MarvinPolicy
    from marvin.policies.muppet import MuppetPolicy
    from marvin.policies.trace import Switch
    from marvin.quantized import Quantized
    from marvin.quantizer import Quantizer
    from marvin.state_rounding import round_state
    from marvin.stored import StoredCodes, store_codes
    from marvin.straight_through import fake_quantize

__all__ = [
    "MSGD",
    "ChannelFormat",
    "FixedPolicy",
    "LossBudgetPolicy",
    "MarvinPolicy",
    "MasterAverage",
    "MuppetPolicy",
    "Policy",
    "Quantized",
    "QuantizedActivations",
    "Quantizer",
    "StaticPolicy",
    "StoredCodes",
    "Switch",
    "calibrate",
    "fake_quantize",
    "freeze",
    "integer",
    "load_sharded",
    "prepare",
    "quantize_activations",
    "reestimate_batch_norm",
    "round_state",
    "save_sharded",
    "spell_attention",
    "store_codes",
    "tensorboard",
    "tnvs_",
]

_HOMES = {  # the module of each name
    "ChannelFormat": "channels",
    "FixedPolicy": "policies.base",
    "LossBudgetPolicy": "policies.loss_budget",
    "MSGD": "optimizer",
    "MarvinPolicy": "policies.marvin",
    "MasterAverage": "averaging",
    "MuppetPolicy": "policies.muppet",
    "Policy": "policies.base",
    "Quantized": "quantized",
    "QuantizedActivations": "activations",
    "Quantizer": "quantizer",
    "StaticPolicy": "policies.loss_budget",
    "StoredCodes": "stored",
    "Switch": "policies.trace",
    "calibrate": "calibration",
    "fake_quantize": "straight_through",
    "freeze": "freezing",
    "load_sharded": "checkpoint",
    "prepare": "conversion",
    "quantize_activations": "conversion",
    "reestimate_batch_norm": "batch_norm",
    "round_state": "state_rounding",
    "save_sharded": "checkpoint",
    "spell_attention": "attention",
    "store_codes": "stored",
    "tnvs_": "init",
}
_RENAMED = {"QuantizingOptimizer": "Quantized"}
_MOVED = {  # modules, and where they are now
    "adaptation": "policies.adaptation",
    "loss_budget": "policies.loss_budget",
    "marvin_policy": "policies.marvin",
    "muppet": "policies.muppet",
    "observations": "policies.observer",
    "policy": "policies",
    "push_down": "policies.push_down",
    "push_up": "policies.push_up",
    "range_policy": "policies.range_policy",
    "ranges": "policies.ranges",
    "record": "policies.records",
    "trace": "policies.trace",
}


for _name, _home in _MOVED.items():
    _alias = Alias(f"marvin.{_name}", f"marvin.{_home}", is_old=True)
    globals()[_name] = sys.modules[f"marvin.{_name}"] = _alias


def __getattr__(name: str) -> Any:
    if new := _RENAMED.get(name):
        warnings.warn(f"marvin.{name} is now marvin.{new}", DeprecationWarning, stacklevel=2)
        return load("marvin", _HOMES, new)
    globals()[name] = found = load("marvin", _HOMES, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
