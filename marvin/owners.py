"""Which optimizer owns a parameter: the one that was made for it last."""

from collections.abc import Mapping
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from marvin.masters import WithMasters

__all__ = [
    "check_owner",
    "check_pair",
    "claim",
    "give_back",
    "other_owners",
    "owner_of",
    "owners_of",
]


class _Owners(WeakValueDictionary[int, Optimizer]):
    """Which optimizer was made last for a parameter, by the parameter's id."""

    claims = 0  # how often optimizers became owners


_OWNERS = _Owners()


def owner_of(parameter: Tensor) -> WithMasters | None:
    """Return the optimizer that was made last for a parameter; None if none on masters was."""
    found = _OWNERS.get(id(parameter))
    return found if isinstance(found, WithMasters) and parameter in found else None


def check_pair(model: object, optimizer: object, call: str) -> None:
    """Refuse a model and an optimizer that came in another order, or do not belong together.

    Args:
        model: What came in the place of the model.
        optimizer: What came in that of its optimizer.
        call: How it is written, such as ``"marvin.MasterAverage(model, optimizer)"``.

    Raises:
        TypeError: These are no model and no optimizer, or it is one that a ``Quantized`` wraps.
        ValueError: The optimizer has no parameter of the model.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            "a model (torch.nn.Module) must come first and its optimizer second, got "
            f"{type(model).__name__} and {type(optimizer).__name__}: write {call}"
        )
    own = [p for group in optimizer.param_groups for p in group["params"]]
    owner = next(filter(None, map(owner_of, own)), None)
    kind = type(optimizer).__name__
    if owner is not None and owner.optimizer is optimizer:
        raise TypeError(
            f"the optimizer must be the {type(owner).__name__}, which has the masters, got the {kind} that it "
            f"wraps: write {call}, where optimizer = marvin.Quantized(...)"
        )
    if {*own}.isdisjoint(model.parameters()):
        raise ValueError(
            f"the optimizer must have parameters of the model, got a {kind} of others: make it of "
            "model.named_parameters(), after fully_shard and whatever else replaces them"
        )


def owners_of(optimizer: WithMasters) -> dict[int, Optimizer]:
    """Return the optimizers that were made last for this one's parameters, for ``give_back``."""
    found = ((id(p), _OWNERS.get(id(p))) for p in optimizer._layout.names)
    return {key: owner for key, owner in found if owner is not None}


def other_owners(optimizer: WithMasters) -> set[Optimizer]:
    """Return the others that were made last for some of this one's parameters."""
    return {_OWNERS.get(id(p), optimizer) for p in optimizer._layout.names} - {optimizer}


def claim(optimizer: WithMasters) -> None:
    """Let an optimizer own its parameters from now on."""
    _OWNERS.update({id(p): optimizer for p in optimizer._layout.names})
    _OWNERS.claims += 1
    optimizer._claims = _OWNERS.claims


def give_back(owners: Mapping[int, Optimizer]) -> None:
    """Let parameters be those of the optimizers that they had; see ``owners_of``."""
    _OWNERS.update(owners)


def check_owner(optimizer: WithMasters) -> None:
    """Refuse to step parameters that another optimizer was made for since.

    Raises:
        RuntimeError: There is one; the message names a parameter.
    """
    if optimizer._claims == _OWNERS.claims:  # no optimizer was made since
        return
    for p, name in optimizer._layout.names.items():
        if _OWNERS.get(id(p), optimizer) is not optimizer:
            raise RuntimeError(
                f"a parameter must have one optimizer, got another {type(optimizer).__name__} made "
                f"for {name} since: step that one, and drop this one"
            )
    optimizer._claims = _OWNERS.claims
