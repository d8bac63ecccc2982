"""The optimizer inside of a ``Quantized``: which are refused, and who may step, save and load it."""

import inspect
import weakref
from collections.abc import Mapping

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from fixedpoint_kernels._torch_private.optimizers import is_ready, step_hooks_of
from marvin.settings import Group

__all__ = [
    "OwnMode",
    "OwnStep",
    "check_groups",
    "check_mode",
    "check_step",
    "check_wrapped",
    "closure_needed",
    "guard_step",
]

_MODES = "train", "eval"  # methods of optimizers that evaluate other weights than they train


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
    """Refuses steps and states of a wrapped optimizer that its ``Quantized`` does not ask for itself.

    Its own state is that of masters, which its groups hold only while ``Quantized`` works with it.

    Attributes:
        is_open: Whether ``Quantized`` works with it.
        owner: The ``Quantized``.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.owner: weakref.ref[Optimizer] | None = None

    def __getstate__(self) -> StateDict:
        return {"is_open": False, "owner": None}

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        """See ``torch.optim.Optimizer.register_step_pre_hook``."""
        self._refuse(optimizer, "step", "moves masters by", "step(loss=loss)")

    def save(self, optimizer: Optimizer) -> None:
        """See ``torch.optim.Optimizer.register_state_dict_pre_hook``."""
        self._refuse(optimizer, "state_dict", "has the masters of", "state_dict()")

    def load(self, optimizer: Optimizer, _: StateDict) -> None:
        """See ``torch.optim.Optimizer.register_load_state_dict_pre_hook``."""
        what, why = "load_state_dict", "has the masters of"
        also = f"; load a state of {type(optimizer).__name__} alone before that line"
        self._refuse(optimizer, what, why, "load_state_dict(state)", also)

    def _refuse(self, optimizer: Optimizer, what: str, why: str, call: str, also: str = "") -> None:
        """Refuse a call, if the ``Quantized`` is there and does not make it.

        Raises:
            RuntimeError: So it is.
        """
        owner = self.owner and self.owner()
        if owner is not None and not self.is_open:
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{what} must be that of {type(owner).__name__}, which {why} this {name}, got the {name}'s "
                f"own: write optimizer.{call}, where optimizer = marvin.Quantized(...){also}"
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
    """Let no one but ``owner`` step, save and load the optimizer that it wraps, and its modes be the owner's."""
    for name in _MODES:
        if hasattr(type(wrapped), name):
            setattr(wrapped, name, OwnMode(name, owner))
    guard: OwnStep | None = next(step_hooks_of(wrapped, OwnStep), None)
    if guard is None:  # copies of an optimizer have no hooks
        guard = OwnStep()
        wrapped.register_step_pre_hook(guard)
        wrapped.register_state_dict_pre_hook(guard.save)
        wrapped.register_load_state_dict_pre_hook(guard.load)
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
