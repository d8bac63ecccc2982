"""Classes of other packages, known by name: nothing of theirs is imported.

A class is looked up by its path, ``module.Class``, or by the class itself; one that inherits its
``forward`` counts as the same. What no entry knows still keeps less through the functions that it
calls; an entry makes it a layer of the report and of plans, and may keep less than its calls do.
"""

from functools import lru_cache
from typing import Literal, NamedTuple, TypeGuard, get_args
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fixedpoint_kernels.few_bit.named import NAMES

__all__ = ["Known", "known", "register"]

Kind = Literal["activation", "rms_norm", "recompute", "calls"]


class Known(NamedTuple):
    """What a class does.

    Args:
        kind: ``"activation"``: a function of one element; ``"rms_norm"``: divides rows by their root
            mean square and multiplies by ``weight``; ``"recompute"``: runs again in the backward
            pass; ``"calls"``: what its forward calls.
        name: Of an activation, one of ``few_bit.NAMES``; ``""``: its table is solved for.
        eps: The attribute of an RMS norm that is added to the mean square.
        offset: Added to the weight of an RMS norm.
    """

    kind: Kind
    name: str = ""
    eps: str = "eps"
    offset: float = 0.0


_entries: dict[str, Known] = {}


def register(
    cls: type[nn.Module] | str,
    kind: Kind,
    *,
    name: str = "",
    eps: str = "eps",
    offset: float = 0.0,
) -> None:
    """Tell ``convert`` and ``plan`` what a class of modules does.

    ``marvin.integer`` takes activations and RMS norms into chains by it, where the class's own code computes that.

        forward_save.register("mine.models.FastGELU", "activation", name="gelu_tanh")
        forward_save.register(MyNorm, "rms_norm", eps="epsilon")

    Args:
        cls: The class, or its path as text: ``module.Class``.
        kind: ``"activation"``: a function of one element, of the input alone. ``"rms_norm"``: the
            last dimension is divided by the root of its mean square plus ``eps``, and multiplied by
            ``weight``. ``"recompute"``: its forward takes one tensor and draws no random numbers;
            it runs again in the backward pass, from the input in few bits. ``"calls"``: its forward calls functions that can keep less, and it is to be
            one layer of reports and plans.
        name: Of an activation, one of ``few_bit.NAMES``; without it, the table is solved for on the
            module's own forward, in float64.
        eps: The attribute that has the number added to the mean square.
        offset: Added to ``weight``, as Gemma's norms do with 1.

    Raises:
        TypeError: ``cls`` is neither a class nor a text.
        ValueError: ``kind`` or ``name`` is unknown, or a path has no module.
    """
    if not isinstance(cls, str | type):
        raise TypeError(f"cls must be a class, or its path as text, got {type(cls).__name__}")
    if isinstance(cls, str) and "." not in cls:
        raise ValueError(f"a class must be told with its module, 'module.Class', got {cls!r}")
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if name and name not in NAMES:
        raise ValueError(f"the name must be one of {', '.join(NAMES)}, got {name!r}")
    _entries[cls if isinstance(cls, str) else _path(cls)] = Known(kind, name, eps, offset)
    _lookup.cache_clear()


def known(module: nn.Module) -> Known | None:
    """Return what the class of a module does, or that of the base whose forward it has."""
    found = _lookup(type(module)) or _copied_norm(module)
    if found is None or found.kind != "rms_norm" or is_parametrized(module, "weight"):
        return found  # asking for a weight that is computed would compute it
    return None if getattr(module, "weight", None) is None else found  # the class may do without


_copied: WeakKeyDictionary[type[nn.Module], Known | None] = WeakKeyDictionary()
_EPSILONS = "variance_epsilon", "eps"


def _copied_norm(module: nn.Module) -> Known | None:
    """Return what an RMS norm of transformers is: more than a hundred of its models have a copy of Llama's or Gemma's.

    A class of such a name counts where its first module computes it, on a few numbers.
    """
    cls = type(module)
    if cls in _copied:
        return _copied[cls]
    if not any(_is_named_so(base) and base.forward is cls.forward for base in cls.__mro__):
        return None
    own, names = dict(module.named_parameters()), [n for n in _EPSILONS if hasattr(module, n)]
    if own.keys() != {"weight"} or own["weight"].dim() != 1 or len(names) != 1:
        return None
    eps, features = getattr(module, names[0]), len(own["weight"])
    weight = torch.linspace(-1, 2, features, dtype=torch.float32, device="cpu")
    # own weights may have no values, and are no numbers while a model is traced
    alike = cls.__new__(cls)
    vars(alike).update(vars(module), weight=weight)
    x = torch.linspace(-9, 9, 2 * features, dtype=torch.float32, device="cpu").view(2, features)
    try:
        with torch.no_grad():
            y, plain = cls.forward(alike, x), F.rms_norm(x, weight.shape, None, eps)
            pairs = [(offset, y - plain * (weight + offset)) for offset in (0.0, 1.0)]
            fits = [offset for offset, error in pairs if (error.abs() < 1e-2).all()]
    except Exception:  # whatever code of others raises
        fits = []
    _copied[cls] = Known("rms_norm", eps=names[0], offset=fits[0]) if len(fits) == 1 else None
    return _copied[cls]


def _is_named_so(cls: type) -> TypeGuard[type[nn.Module]]:
    return cls.__module__.startswith("transformers.models.") and cls.__name__.endswith("RMSNorm")


@lru_cache(maxsize=1024)
def _lookup(cls: type[nn.Module]) -> Known | None:
    for base in cls.__mro__:
        if _path(base) in _entries and getattr(base, "forward", None) is cls.forward:
            return _entries[_path(base)]
    return None


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_ACTIVATIONS = {
    "transformers.activations": {
        "AccurateGELUActivation": "gelu_tanh",
        "ClippedGELUActivation": "",
        "FastGELUActivation": "gelu_tanh",
        "GELUActivation": "gelu",
        "GELUTanh": "gelu_tanh",
        "LaplaceActivation": "",
        "MishActivation": "mish",
        "NewGELUActivation": "gelu_tanh",
        "QuickGELUActivation": "",
        "SiLUActivation": "silu",
    },
    "timm.layers.activations": {
        "GELU": "gelu",
        "GELUTanh": "gelu_tanh",
        "HardMish": "",
        "HardSigmoid": "hardsigmoid",
        "HardSwish": "hardswish",
        "Mish": "mish",
        "QuickGELU": "",
        "Sigmoid": "sigmoid",
        "Swish": "silu",
        "Tanh": "tanh",
    },
}
_RMS_NORMS = {  # and the attribute that has their eps, and what is added to the weight
    "transformers.models.gemma.modeling_gemma.GemmaRMSNorm": ("eps", 1.0),
    "transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm": ("eps", 1.0),
    "transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm": ("eps", 1.0),
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": ("variance_epsilon", 0.0),
    "transformers.models.mt5.modeling_mt5.MT5LayerNorm": ("variance_epsilon", 0.0),
    "transformers.models.t5.modeling_t5.T5LayerNorm": ("variance_epsilon", 0.0),
}
_RECOMPUTED = (  # they make a weight of their own, as large as the parameter
    "timm.layers.std_conv.ScaledStdConv2d",
    "timm.layers.std_conv.ScaledStdConv2dSame",
    "timm.layers.std_conv.StdConv2d",
    "timm.layers.std_conv.StdConv2dSame",
)
_CALLS = (
    "peft.tuners.lora.layer.Linear",
    "timm.layers.norm.GroupNorm",
    "timm.layers.norm.GroupNorm1",
    "timm.layers.norm.LayerNorm",
    "timm.layers.norm.LayerNorm2d",
    "timm.layers.norm.RmsNorm",
    "timm.layers.norm.RmsNorm2d",
    "timm.layers.norm_act.BatchNormAct2d",
    "timm.layers.norm_act.GroupNormAct",
    "timm.layers.norm_act.LayerNormAct",
    "timm.layers.norm_act.LayerNormAct2d",
    "transformers.pytorch_utils.Conv1D",
)

for _module, _names in _ACTIVATIONS.items():
    for _class, _name in _names.items():
        register(f"{_module}.{_class}", "activation", name=_name)
for _class, (_eps, _offset) in _RMS_NORMS.items():
    register(_class, "rms_norm", eps=_eps, offset=_offset)
for _class in _RECOMPUTED:
    register(_class, "recompute")
for _class in _CALLS:
    register(_class, "calls")
