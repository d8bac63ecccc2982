"""Names of parameters, and which layer's format each takes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fixedpoint_kernels._torch_private.modules import own_parameters
from marvin.settings import Group
from marvin.shards import Shard, is_sharded, shard_of
from marvin.warned import listed

__all__ = [
    "ParameterTable",
    "carried_parameters",
    "computed_weights",
    "count_known",
    "held_by",
    "is_layer",
    "layout_of",
    "owners_of",
    "parameters_of",
    "parametrisations_of",
]

_INSIDE = "parametrizations"  # where torch puts them, in the layer


@dataclass(frozen=True)
class ParameterTable:
    """What is known of each parameter, in parameter order.

    Args:
        names: Its name, or its position.
        positions: Its place among all of them.
        groups: Its parameter group.
        owners: The layer whose format it takes; None if it stays float.
        layers: Position and weight of each layer.
        shards: What of it this process holds.
        held: What ``held_by`` says of the groups.
    """

    names: dict[Tensor, str]
    positions: dict[Tensor, int]
    groups: dict[Tensor, Group]
    owners: dict[Tensor, Tensor | None]
    layers: list[tuple[int, Tensor]]
    shards: dict[Tensor, Shard]
    held: list[tuple[int, list[int]]]


def layout_of(param_groups: Sequence[Group]) -> ParameterTable:
    """Return the layout of an optimizer's parameter groups.

    Raises:
        ValueError: Two parameters have one name, one is in a group twice, or one is sharded in a way that is not known.
    """
    groups = {p: group for group in param_groups for p in group["params"]}
    given: list[str | None] = []
    for group in param_groups:
        given += group.get("param_names", [None] * len(group["params"]))
    if len(given) > len(groups):
        params = [id(p) for group in param_groups for p in group["params"]]
        twice = [given[i] or str(i) for i, own in enumerate(params) if own in params[:i]]
        raise ValueError(
            f"a parameter must be given once, got {listed(twice)} again: write model.named_parameters(), which has "
            "weights that are shared once"
        )
    owners = owners_of(list(zip(given, groups, strict=True)))
    for p, group in groups.items():
        if not is_layer(p) and group["one_dim"] == "float":
            owners[p] = None
    names = [str(i) if name is None else name for i, name in enumerate(given)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"parameter names must be unique, got {sorted(twice)} more than once: of several models, "
            'write [("encoder." + name, p) for name, p in encoder.named_parameters()], of a layer in '
            "another's place, whose names stay in the optimizer, "
            f'model.fc.named_parameters(prefix="{_other_module(twice[0])}")'
        )
    return ParameterTable(
        names=dict(zip(groups, names, strict=True)),
        positions={p: i for i, p in enumerate(groups)},
        groups=groups,
        owners=owners,
        layers=[(i, p) for i, p in enumerate(groups) if is_layer(p)],
        shards={p: shard_of(p) for p in groups},
        held=held_by(param_groups),
    )


def held_by(param_groups: Sequence[Group]) -> list[tuple[int, list[int]]]:
    """Return the id of each group, and those of its parameters: others are other groups."""
    return [(id(group), list(map(id, group["params"]))) for group in param_groups]


def count_known(param_groups: Sequence[Group], names: Mapping[Tensor, str]) -> int:
    """Return how many groups hold the parameters that an optimizer has; behind them, groups may have others.

    Args:
        param_groups: What is in the place of the optimizer's groups.
        names: Of its parameters, in order.

    Raises:
        ValueError: They hold fewer of them, in another order, or others between them; or parameters were sharded since.
    """
    found = [p for group in param_groups for p in group["params"]]
    if list(map(id, found[: len(names)])) == list(map(id, names)):
        ends = list(accumulate((len(group["params"]) for group in param_groups), initial=0))
        if len(names) in ends:
            return ends.index(len(names))
    if any(map(is_sharded, found)) and not any(map(is_sharded, names)):
        raise ValueError(
            "parameters must be sharded before their optimizer is made, got DTensors in the place of "
            f"{listed([*names.values()])}: call fully_shard, then make the optimizer; where a trainer shards "
            "(Accelerate's FSDP2 plugin), take DistributedDataParallel there"
        )
    there = {id(p) for p in found}
    if gone := [name for p, name in names.items() if id(p) not in there]:
        raise ValueError(
            f"parameter groups must keep the optimizer's parameters, got groups without {listed(gone)}: write "
            "p.requires_grad_(False) for one that trains no more; change the values of one under torch.no_grad() "
            "(p.copy_(values)), or give a new one to optimizer.add_param_group"
        )
    if new := len([p for p in found if p not in names]):
        raise ValueError(
            f"new parameters must come behind the others, got {new} in or before a group that was there: "
            "write optimizer.add_param_group(group)"
        )
    wrong = [name for p, (own, name) in zip(found, names.items(), strict=False) if p is not own]
    raise ValueError(
        f"parameter groups must keep the order of the optimizer's parameters, got others in the place of "
        f"{listed(wrong)}: put the groups back, and change what they say (optimizer.param_groups[0]"
        '["lr"] = 0.1)'
    )


def is_layer(parameter: Tensor) -> bool:
    """Say whether a parameter has a format of its own: it has two or more dimensions."""
    return parameter.ndim >= 2


def computed_weights(module: nn.Module) -> list[str]:
    """Return the names of a module's weights that each call computes of other parameters.

    A parametrisation does so, and a hook of ``torch.nn.utils.weight_norm``, ``spectral_norm`` or
    ``prune``, which leaves a plain tensor beside ``weight_g`` and ``weight_v``, or ``weight_orig``.
    """
    if is_parametrized(module):
        return [*getattr(module, "parametrizations", {})]
    own = dict.fromkeys(
        name.rpartition("_")[0] for name, _ in module.named_parameters(recurse=False)
    )
    return [name for name in own if isinstance(vars(module).get(name), Tensor)]


def carried_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters of a module alone, in the order in which it carries their formats.

    Layers first, each by name. The order in which torch has them will not do: ``prune.remove`` and
    ``remove_parametrizations`` register a weight again, behind its bias.
    """
    return sorted(own_parameters(module), key=lambda own: (not is_layer(own[1]), own[0]))


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module by name: its own, and those of its weights' parametrisations."""
    found = dict(module.named_parameters(recurse=False))
    if is_parametrized(module):
        found |= getattr(module, _INSIDE).named_parameters(_INSIDE)
    return found


def parametrisations_of(model: nn.Module) -> set[nn.Module]:
    """Return the modules that compute weights of others, which have their parameters."""
    layers = filter(is_parametrized, model.modules())
    return {own for layer in layers for own in getattr(layer, _INSIDE).modules()}


def owners_of(parameters: Sequence[tuple[str | None, Tensor]]) -> dict[Tensor, Tensor | None]:
    """Return the layer whose format each parameter takes.

    A layer takes its own. Any other parameter takes that of the first layer in its module, its parametrisations
    included, else of the nearest layer before it, else of the first layer after it; None where there is none.

    Args:
        parameters: Names (None where unknown) and parameters, in parameter order.
    """
    first_in_module: dict[str, Tensor] = {}
    for name, p in parameters:
        if name is not None and is_layer(p):
            first_in_module.setdefault(_module(name), p)
    before = next((p for _, p in parameters if is_layer(p)), None)
    owners: dict[Tensor, Tensor | None] = {}
    for name, p in parameters:
        if is_layer(p):
            owners[p] = before = p
        else:
            owners[p] = first_in_module.get(_module(name), before) if name is not None else before
    return owners


def _other_module(name: str) -> str:
    return (_module(name) or "layer") + ".new"


def _module(name: str) -> str:
    owner, inside, _ = f".{name}".partition(f".{_INSIDE}.")
    return owner[1:] if inside else name.rpartition(".")[0]
