"""What is refused: hyper-parameters out of range, and optimizers and steps that do not work."""

import inspect
import math
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict
from torch.utils import data

from fixedpoint_kernels._torch_private.compiling import uncompiled
from fixedpoint_kernels._torch_private.optimizers import is_ready, step_hooks_of

__all__ = [
    "MARVIN",
    "OPTIONS",
    "SGD",
    "Checks",
    "Group",
    "OwnMode",
    "OwnStep",
    "Settings",
    "check_batches",
    "check_dtypes",
    "check_groups",
    "check_loss",
    "check_mode",
    "check_model",
    "check_not_exported",
    "check_one_input",
    "check_params",
    "check_settings",
    "check_step",
    "check_uncompiled",
    "check_untraced",
    "check_values",
    "check_wrapped",
    "closure_needed",
    "guard_step",
    "is_exported",
    "is_traced",
    "misspelt",
    "without_values",
]

_MODES = "train", "eval"  # methods of optimizers that evaluate other weights than they train
_FLOATS = torch.float32, torch.bfloat16, torch.float16
# hyper-parameters by name, each of its own type: what torch gives for a parameter group
Group = dict[str, Any]
Settings = Mapping[str, Any]
_Rule = tuple[str, Callable[[Settings], bool], str]


def _whole(name: str) -> _Rule:
    return name, lambda s: isinstance(s[name], Integral), "a whole number of bits"


@dataclass(frozen=True)
class Checks:
    """What some hyper-parameters must be.

    Args:
        at_least_0: Names of numbers that are 0 or more.
        choices: Names, and the values allowed.
        rules: Name, test of all settings, and the requirement in words.
    """

    at_least_0: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str | bool, ...]] = field(default_factory=dict)
    rules: tuple[_Rule, ...] = ()


OPTIONS = Checks(
    ("l1", "seed"),
    {
        "l1_params": ("weights", "all"),
        "one_dim": ("previous", "float"),
        "master_init": ("float", "quantized"),
        "nonfinite": ("raise", "skip"),
        "compact_state": (False, True),
        "normalize_gradients": (False, True),
        "quantize_gradients": (False, True),
    },
)
SGD = Checks(
    ("lr", "weight_decay"),
    rules=(("momentum", lambda s: 0 <= s["momentum"] < 1, "0 or more and below 1"),),
)
MARVIN = Checks(
    ("strategy_margin",),
    {
        "lookback_rounding": ("ceil", "nearest"),
        "strategy": ("adaptive", "min", "mean", "max"),
        "strategy_loss": ("last", "short"),
        "kl_direction": ("pq", "qp"),
        "kl_counts": ("expected", "sampled"),
        "pushdown_range": ("current", "full"),
        "pushup": ("adapt", "marvin"),
        "symmetric": (False, True),
    },
    (
        ("max_wl", lambda s: 3 <= s["max_wl"] <= 32, "3 to 32 bits"),
        ("init_wl", lambda s: 2 <= s["init_wl"] <= s["max_wl"], "2 bits to max_wl"),
        ("init_fl", lambda s: 0 <= s["init_fl"] < s["init_wl"], "0 or more and below init_wl"),
        ("min_fl", lambda s: 0 <= s["min_fl"] < s["max_wl"], "0 or more and below max_wl"),
        (
            "buffer_bits",
            lambda s: 1 <= s["buffer_bits"] <= s["max_wl"] - s["min_fl"],
            "1 to max_wl - min_fl bits",
        ),
        (
            "lookback",
            lambda s: _is_range(s["lookback"], 1),
            "two step counts, 1 <= lower <= upper",
        ),
        (
            "resolution",
            lambda s: _is_range(s["resolution"], 2),
            "two bin counts, 2 <= lower <= upper",
        ),
        ("lookback_momentum", lambda s: 0 < s["lookback_momentum"] <= 1, "above 0 and at most 1"),
        ("kl_smoothing", lambda s: s["kl_smoothing"] > 0, "above 0"),
        ("kl_eps", lambda s: s["kl_eps"] == "noise" or _is_number(s["kl_eps"]), '>= 0 or "noise"'),
        *map(_whole, ("max_wl", "init_wl", "init_fl", "min_fl", "buffer_bits")),
    ),
)


def check_settings(settings: Settings, checks: Checks) -> None:
    """Refuse settings that are out of range.

    Raises:
        TypeError: A setting that must be a number is not one.
        ValueError: With the name, what is required and what came.
    """
    for name in checks.at_least_0:
        value = settings[name]
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of {value.numel()}")
        if not isinstance(value, int | float | torch.Tensor):
            raise TypeError(f"{name} must be a number, got {name}={value!r}")
        if not value >= 0:
            raise ValueError(f"{name} must be 0 or more, got {name}={value}")
        if value == math.inf:
            raise ValueError(f"{name} must be finite, got {name}={value}")
    for name, choices in checks.choices.items():
        if settings[name] not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {settings[name]!r}")
    for rule in checks.rules:
        _check_rule(settings, rule)


def _check_rule(settings: Settings, rule: _Rule) -> None:
    try:
        is_met = rule[1](settings)
    except TypeError as error:  # of comparing it, or taking it apart
        raise TypeError(_refusal(settings, rule)) from error
    if not is_met:
        raise ValueError(_refusal(settings, rule))


def _refusal(settings: Settings, rule: _Rule) -> str:
    """Return what is required and what came, with the settings that the requirement names."""
    name, _, requirement = rule
    message = f"{name} must be {requirement}, got {name}={settings[name]!r:.200}"
    words = dict.fromkeys(re.findall(r"\w+", requirement))
    if others := [f"{n}={settings[n]!r:.200}" for n in words if n in settings and n != name]:
        message += f" with {', '.join(others)}"
    return message


def misspelt(group: Group, known: Collection[str], settings: Collection[str]) -> dict[str, str]:
    """Return what a parameter group has that nobody reads and that looks like a setting, with that setting.

    A group may have more than settings: ``initial_lr`` and ``max_momentum`` of schedulers, names. So a name counts
    that is nearly one of ``settings``, or begins as one and ends as another.

    Args:
        group: A parameter group.
        known: What is read.
        settings: Names of settings.
    """
    words = [name.split("_") for name in settings]
    firsts, lasts = {own[0] for own in words}, {own[-1] for own in words}
    found: dict[str, str] = {}
    for name in sorted(group.keys() - {"params", "param_names", *known}):
        own = name.split("_")
        if "lr" in own or "momentum" in own:
            continue
        is_mixed = len(own) > 1 and own[0] in firsts and own[-1] in lasts
        if near := get_close_matches(name, sorted(settings), 1, 0.0 if is_mixed else 0.85):
            found[name] = near[0]
    return found


def check_model(model: object, call: str) -> None:
    """Refuse what is no model where one comes first.

    Args:
        model: What came.
        call: How it is written, such as ``"freeze(model)"``.

    Raises:
        TypeError: It is no ``torch.nn.Module``, or a parameter has no shape yet.
    """
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"a model (torch.nn.Module) must come first, got {got}: write {call}")
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(p):
            raise TypeError(
                f"a model must have parameters with a shape, got an {type(p).__name__} at {name!r}: run "
                f"the model once on a sample, then write {call}"
            )


def check_values(model: nn.Module) -> None:
    """Refuse a model whose weights have no values for now, where these are to be copied or encoded.

    Raises:
        ValueError: ``marvin.store_codes`` keeps codes in their place.
    """
    for name, p in model.named_parameters():
        if p.numel() > 1 and not any(p.stride()):
            raise without_values(name)


def without_values(name: str) -> ValueError:
    """Return the error of a model that is to be copied while codes are in the place of a weight."""
    return ValueError(
        f"a model must have values of its weights, got codes in the place of {name}: call remove() "
        "of what marvin.store_codes returned first"
    )


def check_uncompiled(model: nn.Module, call: str) -> None:
    """Refuse what ``torch.compile`` or ``torch.jit`` returned where the model that it was given is meant.

    Raises:
        TypeError: It is that.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"the model must come as it was before torch.jit: write {call} with that model"
        )
    if uncompiled(model) is not model:
        raise TypeError(
            f"the model must come as it was before torch.compile: write {call} with that model, and "
            "compile it afterwards"
        )


def is_traced() -> bool:
    """Say whether ``torch.compile`` or ``torch.jit`` follows what is computed."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_exported() -> bool:
    """Say whether ``torch.export`` or ``torch.jit`` makes a program, which is for inference."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def check_untraced() -> None:
    """Refuse rounding in a trace of ``torch.jit``, which would keep the values of its sample.

    Raises:
        RuntimeError: There is such a trace.
    """
    if torch.jit.is_tracing():
        instead = "torch.jit.trace(marvin.freeze(model), sample), and torch.onnx.export or add_graph alike"
        raise _for_inference("trace", instead)


def check_not_exported() -> None:
    """Refuse to read formats in ``torch.export``, which has no values of them.

    Raises:
        RuntimeError: There is such an export.
    """
    if torch.compiler.is_exporting():
        raise _for_inference("export", "torch.export.export(marvin.freeze(model), (sample,))")


def _for_inference(verb: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"a model to {verb} must be one for inference, got one that an optimizer may change still: "
        f"write {instead}"
    )


def check_one_input(model: nn.Module) -> None:
    """Refuse a model that must be called with several tensors.

    Raises:
        ValueError: It must; names them.
    """
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in known if p.default is p.empty and p.kind in kinds]
    if len(needed) > 1:
        raise ValueError(
            f"the model must take one tensor, got forward({', '.join(needed)}): give one tensor that has them "
            f"all, and take it apart in forward, {needed[0]}[:, :4]"
        )


def check_batches(batches: object, call: str) -> None:
    """Refuse one batch where several are asked for: its samples would pass for batches.

    Raises:
        TypeError: It is a tensor, a data set, or nothing that can be gone through.
    """
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"batches must be a loader or a list of batches, got {type(batches).__name__}: write {call}"
        )
    if isinstance(batches, torch.Tensor):
        shape = tuple(batches.shape)
        raise TypeError(
            f"batches must be a loader or a list of batches, got one tensor of shape {shape}: "
            f"write {call}"
        )
    if isinstance(batches, data.Dataset) and not isinstance(batches, data.IterableDataset):
        raise TypeError(
            f"batches must be a loader or a list of batches, got {type(batches).__name__}, which has samples: write "
            "torch.utils.data.DataLoader(dataset, batch_size=32), or batch_size=None where these are batches"
        )


def check_params(params: object, call: str) -> None:
    """Refuse a model, a mapping of names, or nothing, in place of parameters.

    Raises:
        TypeError: It is one.
    """
    if not isinstance(params, Iterable | nn.Module):
        raise TypeError(f"parameters must come first, got {type(params).__name__}: write {call}")
    if isinstance(params, nn.Module | Mapping):
        what = "a mapping" if isinstance(params, Mapping) else "the model"
        raise TypeError(
            f"parameters must come first, got {what} ({type(params).__name__}): write {call}"
        )


def check_loss(loss: object) -> None:
    """Refuse what is no loss of a step.

    Raises:
        TypeError: It is no number and no tensor.
        ValueError: It is a tensor of more or fewer than one element.
    """
    if loss is None or isinstance(loss, Real):
        return
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"a loss must be a number or a tensor of one, got {type(loss).__name__}: "
            "write step(loss=loss)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"a loss must be one number, got a tensor of shape {tuple(loss.shape)}: "
            "write step(loss=loss.mean())"
        )


def check_dtypes(params: Iterable[torch.Tensor], who: str) -> None:
    """Refuse parameters that cannot be quantised, or have no shape yet.

    Raises:
        TypeError: With what is required and what came.
    """
    params = list(params)
    is_plain = {*map(type, params)} <= {torch.Tensor, torch.nn.Parameter}
    if (
        is_plain
        and {p.dtype for p in params}.issubset(_FLOATS)
        and not any(p.is_meta for p in params)
    ):
        return
    for p in params:
        if is_lazy(p):
            raise TypeError(
                f"{who} needs parameters with a shape, got an {type(p).__name__}: run the model once "
                "on a sample, then make the optimizer"
            )
        if p.is_meta:
            raise TypeError(
                f"{who} needs parameters with values, got one on the meta device: call "
                'model.to_empty(device="cpu") and load a state or start the weights, then make the optimizer'
            )
        if p.dtype not in _FLOATS:
            remedy = ": write model.float()" if p.dtype.is_floating_point else ""
            raise TypeError(
                f"{who} needs float32, bfloat16 or float16 parameters, got {p.dtype}{remedy}"
            )


def check_wrapped(optimizer: Optimizer, options: Mapping[str, object]) -> None:
    """Refuse what ``Quantized`` cannot wrap.

    Raises:
        TypeError: It is no optimizer, or passes all on to one.
        ValueError: Its step needs a closure or sparse gradients, its state is no optimizer's of torch, it has a
            hyper-parameter of ``options``, it deals out parameters, or another ``Quantized`` has it.
    """
    if not isinstance(optimizer, Optimizer):
        got = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(
            "Quantized needs an optimizer that was made of the model's parameters, such as "
            f"torch.optim.SGD(model.named_parameters(), lr=0.1), got {got}"
        )
    if not is_ready(optimizer):  # as of Accelerate and Opacus, which pass all on to another
        name = type(optimizer).__name__
        raise TypeError(
            f"Quantized needs the optimizer itself, got {name}, which is around one: write "
            f"{name}(marvin.Quantized(...)), or prepare(model, marvin.Quantized(...)), the other way round"
        )
    if any(step_hooks_of(optimizer, OwnStep)):
        name = type(optimizer).__name__
        raise ValueError(
            f"Quantized needs an optimizer of its own, got the {name} that another Quantized has: "
            f"make a new {name} of the model's parameters"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "Quantized needs an optimizer of dense gradients, got SparseAdam: write torch.optim.Adam, and "
            "nn.Embedding without sparse=True"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise closure_needed(optimizer)
    if all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step")):
        raise closure_needed(optimizer)
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise ValueError(
            "Quantized needs an optimizer of all parameters, got ZeroRedundancyOptimizer, which deals them "
            "out: give Quantized the optimizer inside of it, made of fully_shard(model)'s parameters"
        )
    _check_state_of(optimizer)
    if clash := sorted(set(optimizer.defaults) & set(options)):
        raise ValueError(
            f"{type(optimizer).__name__} must have no hyper-parameter of Quantized's or its "
            f"policy's, got {', '.join(clash)}"
        )


def _check_state_of(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state is no optimizer's of torch."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        found = optimizer.state_dict()
        if not {"state", "param_groups"}.issubset(found):
            raise ValueError(
                "Quantized needs an optimizer whose state_dict() has state and param_groups, got "
                f"{type(optimizer).__name__}'s with {', '.join(map(str, found))}: give "
                "marvin.Quantized(...) to an optimizer around others, such as Lookahead, in their place"
            )


def closure_needed(optimizer: Optimizer) -> ValueError:
    """Return the error of an optimizer that runs the model in its step, of which ``Quantized`` knows nothing."""
    name, around = type(optimizer).__name__, ""
    if hasattr(optimizer, "first_step"):  # as SAM has it
        around = (
            f": make it around Quantized, {name}(params, lambda groups, **options: "
            "marvin.Quantized(torch.optim.SGD(groups, **options), policy), lr=0.1)"
        )
    return ValueError(
        f"Quantized needs an optimizer whose step needs no closure, got {name}{around}"
    )


class OwnStep:
    """Refuses steps of a wrapped optimizer that its ``Quantized`` does not do itself.

    Attributes:
        is_open: Whether the step that comes is ``Quantized``'s.
        owner: The ``Quantized``.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.owner: weakref.ref[Optimizer] | None = None

    def __getstate__(self) -> StateDict:
        return {"is_open": False, "owner": None}

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        """See ``torch.optim.Optimizer.register_step_pre_hook``."""
        owner = self.owner and self.owner()
        if owner is not None and not self.is_open:
            raise RuntimeError(
                f"step must be that of {type(owner).__name__}, which moves masters by this "
                f"{type(optimizer).__name__}, got the {type(optimizer).__name__}'s own: write "
                "optimizer.step(loss=loss), where optimizer = marvin.Quantized(...)"
            )


class OwnMode:
    """Stands for ``train`` or ``eval`` of a wrapped optimizer: calls that of its ``Quantized``.

    Outside of a step, the wrapped one's groups hold no masters, of which its state is: its own method would
    do nothing.

    Args:
        name: Of the method.
        owner: The ``Quantized``.
    """

    def __init__(self, name: str, owner: Optimizer) -> None:
        self.name = name
        self.owner: weakref.ref[Optimizer] | None = weakref.ref(owner)

    def __getstate__(self) -> StateDict:
        return {"name": self.name, "owner": None}

    def __call__(self) -> None:
        """Switch the weights.

        Raises:
            RuntimeError: The ``Quantized`` is gone.
        """
        owner = self.owner and self.owner()
        if owner is None:
            raise RuntimeError(
                f"{self.name}() must be that of a Quantized, which has the masters, got one of an optimizer "
                f"whose Quantized is gone: write optimizer.{self.name}(), where optimizer = "
                "marvin.Quantized(...)"
            )
        getattr(owner, self.name)()


def guard_step(owner: Optimizer, wrapped: Optimizer) -> OwnStep:
    """Let no one but ``owner`` step the optimizer that it wraps, and its modes be the owner's."""
    for name in _MODES:
        if hasattr(type(wrapped), name):
            setattr(wrapped, name, OwnMode(name, owner))
    guard: OwnStep | None = next(step_hooks_of(wrapped, OwnStep), None)
    if guard is None:  # copies of an optimizer have no hooks
        guard = OwnStep()
        wrapped.register_step_pre_hook(guard)
    guard.owner = weakref.ref(owner)
    return guard


def check_groups(owner: Optimizer, wrapped: Optimizer, new: Group | None = None) -> None:
    """Refuse to go on where the wrapped optimizer got parameter groups that ``owner`` knows nothing of.

    Args:
        owner: A ``Quantized``.
        wrapped: Its optimizer.
        new: What comes as a group now, which may be the next one of the wrapped optimizer's.

    Raises:
        RuntimeError: There are such groups.
    """
    count = len(owner.param_groups)
    others = wrapped.param_groups[count:]
    if others and others[0] is not new:
        raise RuntimeError(
            f"parameter groups must be added to the {type(owner).__name__} optimizer: got "
            f"{len(others)} more in its {type(wrapped).__name__}, which do not train; write "
            "optimizer.add_param_group(group), where optimizer = marvin.Quantized(...), and now, for each "
            f"of these, optimizer.add_param_group(optimizer.optimizer.param_groups[{count}])"
        )


def check_step(closure: object) -> None:
    """Refuse a step that cannot be done.

    Raises:
        RuntimeError: A CUDA graph is being captured.
        TypeError: ``closure`` is no function, but a loss, say.
    """
    if closure is not None and not callable(closure):
        raise TypeError(
            f"step takes a closure, got {type(closure).__name__}: write step(loss=loss)"
        )
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step() decides on the host and must be outside of CUDA graphs: "
            "capture forward and backward alone"
        )


def check_mode(wrapped: Optimizer) -> None:
    """Refuse a step while the weights are those to evaluate.

    Raises:
        RuntimeError: They are.
    """
    groups = wrapped.param_groups
    if hasattr(type(wrapped), "train") and not all(g.get("train_mode", True) for g in groups):
        raise RuntimeError(
            f"step() must come in train mode, got {type(wrapped).__name__} in eval mode: write "
            "optimizer.train() before an epoch, and optimizer.eval() before the model is evaluated or saved"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value >= 0


def _is_range(bounds: Any, least: int) -> bool:
    lower, upper = bounds
    return isinstance(lower, int) and isinstance(upper, int) and least <= lower <= upper
