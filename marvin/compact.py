"""Masters, moments and windows in few bytes: where they lie, and how they get there and back.

A compact parameter has ``"master_codes"`` and ``"master_scales"`` in its state in place of
``"master"``; so has each tensor of the policy, and each moment in the wrapped optimizer's state. The
wrapped optimizer knows the master as a tensor of NaN that takes no memory; during its step it holds
the values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from fixedpoint_kernels._torch_private.tensors import foreach_add
from fixedpoint_kernels.compact import (
    Codes,
    Kind,
    Noise,
    Sum,
    add_many,
    check_codes,
    decode,
    encode,
    zeros,
)
from fixedpoint_kernels.norms import norms_many
from fixedpoint_kernels.philox import Key
from marvin.noise import Purpose, stream
from marvin.settings import Group
from marvin.shards import Shard, accumulate_dtype, local
from marvin.warned import warn_user

__all__ = [
    "SUFFIXES",
    "CompactMember",
    "CompactTensors",
    "add_to_tensors",
    "check_saved",
    "codes_of",
    "conform",
    "in_float",
    "is_compact",
    "key_of",
    "master_of",
    "moment_of",
    "names_of_master",
    "placeholder",
    "put_master",
    "put_tensors",
    "size_bytes",
    "tensors_of",
    "wants_compact",
]

_LEAST = 64  # elements of a row; scales of shorter ones would take too many bytes
SUFFIXES = _CODES, _SCALES = "_codes", "_scales"  # of names in a state
_MOMENTS: Mapping[str, tuple[Kind, int]] = {  # of torch's optimizers: kind, and lane of the noise
    "momentum_buffer": ("signed", 1),
    "exp_avg": ("signed", 1),
    "grad_avg": ("signed", 3),
    "exp_avg_sq": ("squares", 2),
    "max_exp_avg_sq": ("squares", 3),
    "square_avg": ("squares", 2),
    "acc_delta": ("squares", 3),
    "sum": ("squares", 2),
    "exp_inf": ("squares", 2),
}
_CENTERED = {"square_avg", "grad_avg"}  # of RMSprop; see ``_pack_moments``


class CompactMember(NamedTuple):
    """A parameter whose state is compact.

    Args:
        master: As the wrapped optimizer knows it.
        own: The parameter's state.
        shard: What this process holds of it.
        position: Among the optimizer's parameters; numbers its noise.
    """

    master: Tensor
    own: StateDict
    shard: Shard
    position: int


def wants_compact(group: Group, p: Tensor) -> bool:
    """Say whether a parameter's state is to be compact: rows of 64 elements or more."""
    return bool(group["compact_state"]) and p.ndim >= 2 and p.shape[1:].numel() >= _LEAST


def is_compact(own: StateDict) -> bool:
    """Say whether a parameter's state is compact."""
    return "master" + _CODES in own


def master_of(own: StateDict) -> Tensor:
    """Return a parameter's float32 master, as this process holds it."""
    return _decoded(own, "master", "fixed") if is_compact(own) else own["master"]


def names_of_master(own: StateDict) -> tuple[str, ...]:
    """Return under which names a parameter's state has the tensors of its master."""
    return ("master" + _CODES, "master" + _SCALES) if is_compact(own) else ("master",)


def put_master(own: StateDict, values: Tensor) -> None:
    """Give a parameter another master: rounded to nearest where it is compact."""
    if is_compact(own):
        _put(own, "master", encode(values, "fixed"))
    else:
        own["master"].copy_(values)


def placeholder(own: StateDict) -> Tensor:
    """Return what the wrapped optimizer knows as the master between two steps."""
    if not is_compact(own):
        return own["master"]
    codes = codes_of(own, "master").codes
    nan = torch.full((), torch.nan, dtype=torch.float32, device=codes.device)
    return nan.expand(codes.shape)


def codes_of(own: StateDict, name: str) -> Codes:
    """Return what this process holds of a compact tensor."""
    return Codes(local(own[name + _CODES]), local(own[name + _SCALES]))


class CompactTensors(Mapping[str, Tensor]):
    """A policy's tensors of a layer whose state is compact, decoded when one is asked for.

    Args:
        own: The layer's state.
        key: Noise of what is added to them; None where nothing is.
        new: Those that have new values.
    """

    def __init__(
        self,
        own: StateDict,
        key: Key | None = None,
        new: Mapping[str, Tensor | Sum] = MappingProxyType({}),
    ) -> None:
        self.own, self.key, self.new = own, key, new

    def __getitem__(self, name: str) -> Tensor:
        value = self.new.get(name)
        if value is None:
            return _decoded(self.own, name, "signed")
        return decode(value.before, "signed") + value.x if isinstance(value, Sum) else value

    def __iter__(self) -> Iterator[str]:
        names = [name for name in _names(self.own) if name != "master"]
        return iter(dict.fromkeys([*names, *self.new]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def tensors_of(own: StateDict, new: Mapping[str, Tensor | Sum]) -> Mapping[str, Tensor]:
    """Return a policy's tensors of a layer, as the policy sees them in ``update``.

    Args:
        own: The layer's state.
        new: What has new values.
    """
    if is_compact(own):
        return CompactTensors(own, None, new)
    values = [*own.items(), *new.items()]
    return {k: v for k, v in values if k != "master" and isinstance(v, Tensor)}


def add_to_tensors(
    tensors: Sequence[Mapping[str, Tensor]], name: str, xs: Sequence[Tensor]
) -> tuple[Sequence[Tensor | Sum], Sequence[Tensor]]:
    """Add to one of a policy's tensors of each layer, out of place, and measure the sums.

    Where states are compact, all is done in one pass.

    Args:
        tensors: As ``Policy.measure`` gets them, one or more.
        name: Of the tensor.
        xs: Of each layer, float32.

    Returns:
        The sums, and their 2-norms, 0-d, ``accumulate_dtype``.
    """
    dtype = accumulate_dtype(xs[0].device)
    compact = [own for own in tensors if isinstance(own, CompactTensors)]
    if not compact:
        sums = foreach_add([own[name] for own in tensors], list(xs))
        return sums, norms_many(sums, dtype=dtype).unbind()
    lane = [*compact[0]].index(name)
    before: list[Codes | Tensor] = []
    noises: list[Noise | None] = []
    for own in tensors:
        is_coded = isinstance(own, CompactTensors)
        before.append(codes_of(own.own, name) if is_coded else own[name])
        noises.append(Noise(own.key, lane) if is_coded and own.key else None)
    sums, norms = add_many(before, xs, noises, dtype=dtype)
    return sums, norms.unbind()


def key_of(noise: Key, index: int, shard: Shard) -> Key:
    """Return the noise of a layer's own tensors, from that of states in a step and its position."""
    return Key(noise.seed, noise.stream + 2 * index + 1, shard.offset)


def put_tensors(
    own: StateDict, tensors: Mapping[str, Tensor | Sum], noise: Key, index: int, shard: Shard
) -> None:
    """Keep a policy's tensors of a layer; what else it had goes.

    Args:
        own: The layer's state.
        tensors: The new ones. Codes to which nothing was added stay as they are.
        noise: Of states in this step.
        index: Of the layer's weight among the optimizer's parameters.
        shard: What this process holds of it.
    """
    if not is_compact(own):
        for name in [k for k, v in own.items() if isinstance(v, Tensor) and k != "master"]:
            if name not in tensors:
                del own[name]
        own.update(tensors)
        return
    if isinstance(tensors, CompactTensors):
        changed = tensors.new
    else:
        changed = tensors
        for name in _names(own):
            if name != "master" and name not in tensors:
                del own[name + _CODES], own[name + _SCALES]
    for lane, (name, value) in enumerate(changed.items()):
        if isinstance(value, Sum):
            _put(own, name, value.codes)
        else:
            key = key_of(noise, index, shard)
            _put(own, name, encode(value, "signed", Noise(key, lane)))


def conform(own: StateDict, moments: StateDict, shard: Shard, wanted: bool) -> None:
    """Make a state compact, or float32; what is compact is rounded to nearest.

    Args:
        own: A parameter's state.
        moments: Its state in the wrapped optimizer.
        shard: What this process holds.
        wanted: Whether it is to be compact.
    """
    if is_compact(own) == wanted:
        return
    if wanted:
        names = [k for k, v in own.items() if isinstance(v, Tensor) and k != "master"]
        kinds: dict[str, Kind] = {"master": "fixed", **dict.fromkeys(names, "signed")}
        _pack_moments(moments, shard, None)
        _exchange(own, {n: encode(own[n], kind) for n, kind in kinds.items()})
        return
    names = _names(own)
    values = {n: _decoded(own, n, "fixed" if n == "master" else "signed") for n in names}
    _un_pack_moments(moments, shard)
    _exchange_back(own, values)


def check_saved(own: StateDict, moments: StateDict, shape: torch.Size) -> None:
    """Refuse codes that are not of a parameter: kernels would read memory behind them.

    Args:
        own: The parameter's state.
        moments: Its state in the wrapped optimizer.
        shape: Of the parameter; a policy's tensors may be several of it.

    Raises:
        ValueError: With the name of what does not fit.
    """
    parts: list[tuple[StateDict, str, Kind]] = [
        (own, name, "fixed" if name == "master" else "signed") for name in _names(own)
    ]
    known = (name for name in _names(moments) if name in _MOMENTS)
    parts.extend((moments, name, _MOMENTS[name][0]) for name in known)
    for state, name, kind in parts:
        codes, scales = state[name + _CODES], state.get(name + _SCALES)
        if not isinstance(codes, Tensor) or not isinstance(scales, Tensor):
            raise ValueError(f"{name} must have codes and scales, got no tensors of both")
        is_stack = state is own and name != "master" and codes.shape[1:] == shape
        try:
            check_codes(Codes(codes, scales), kind, codes.shape if is_stack else shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if strange := set(_names(moments)) - set(_MOMENTS):
        raise ValueError(f"moments must be of {', '.join(_MOMENTS)}, got {', '.join(strange)}")


def size_bytes(own: StateDict, moments: StateDict) -> int:
    """Return the bytes of a parameter's tensors, as this process holds them."""
    tensors = [*own.values(), *moments.values()]
    return sum(_bytes_of(local(x)) for x in tensors if isinstance(x, Tensor))


def _bytes_of(x: Tensor) -> int:
    flatten = getattr(x, "__tensor_flatten__", None)  # of tensors that are made of others
    names = flatten()[0] if flatten else ()
    return sum(_bytes_of(getattr(x, name)) for name in names) if names else x.nbytes


@contextmanager
def in_float(
    optimizer: Optimizer, members: Sequence[CompactMember], seed: int, step: int
) -> Iterator[None]:
    """Let the wrapped optimizer find masters and moments in float32, and keep what it leaves.

    Args:
        optimizer: The wrapped one.
        members: Parameters that it moves.
        seed: Of the noise.
        step: Number of the step.
    """
    for master, own, shard, _ in members:
        local(master).data = master_of(own)
        _un_pack_moments(optimizer.state.get(master, {}), shard)
    try:
        yield
    finally:
        for master, own, shard, position in members:
            key = Key(seed, stream(Purpose.STATES, step, 2 * position), shard.offset)
            _put(own, "master", encode(local(master), "fixed", Noise(key)))
            local(master).data = placeholder(own)
            if master in optimizer.state:
                _pack_moments(optimizer.state[master], shard, key)


def moment_of(state: StateDict, name: str, master: Tensor, shard: Shard) -> Codes:
    """Return what this process holds of a moment; one that is not begun is made.

    Args:
        state: Of a parameter, in the wrapped optimizer.
        name: Of the moment.
        master: Of its shape.
        shard: What this process holds.
    """
    if name in state and name + _CODES not in state:  # an interrupt left it in float32
        _pack_moments(state, shard, None)
    if name + _CODES not in state:
        _put(state, name, zeros(local(master), _MOMENTS[name][0]), shard)
    return codes_of(state, name)


def _pack_moments(state: StateDict, shard: Shard, key: Key | None) -> None:
    """Make the moments of a parameter compact; ``key``: noise, None for nearest.

    Centered RMSprop divides by the root of ``square_avg - grad_avg**2``. Of two tensors that are rounded
    by themselves that may be below 0: the codes of ``square_avg`` are those of the difference.
    """
    values: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.shape != shard.shape or name.endswith(_CODES):
            continue
        if name in _MOMENTS:
            values[name] = local(value)
            continue
        warn_user(f"compact_state keeps {', '.join(_MOMENTS)} in few bytes; {name} stays as it is")
    if values.keys() >= _CENTERED:
        mean = values["grad_avg"]
        values["square_avg"] = values["square_avg"].addcmul(mean, mean, value=-1.0).clamp_(min=0.0)
    found: dict[str, Codes] = {}
    for name, value in values.items():
        kind, lane = _MOMENTS[name]
        found[name] = encode(value, kind, None if key is None else Noise(key, lane))
    _exchange(state, found, shard)


def _un_pack_moments(state: StateDict, shard: Shard) -> None:
    values = {name: _decoded(state, name, _MOMENTS[name][0]) for name in _names(state)}
    if _CENTERED.issubset(values):
        values["square_avg"].addcmul_(values["grad_avg"], values["grad_avg"])
    _exchange_back(state, {name: shard.to_dtensor(value) for name, value in values.items()})


def _exchange(state: StateDict, codes: Mapping[str, Codes], shard: Shard | None = None) -> None:
    """Put codes in the place of values. An interrupt may leave both, and then the codes count."""
    new: StateDict = {}
    for name, own in codes.items():
        _put(new, name, own, shard)
    state.update(new)  # all at once
    for name in codes:
        state.pop(name, None)


def _exchange_back(state: StateDict, values: Mapping[str, Tensor]) -> None:
    """Put values in the place of codes. An interrupt may leave both, and then the codes count."""
    state.update(values)
    # codes of ``square_avg`` go first: they mean something else without those of ``grad_avg``
    for name in sorted(values, reverse=True):
        for suffix in SUFFIXES:
            state.pop(name + suffix, None)


def _names(state: StateDict) -> list[str]:
    """Return the names of what is compact in a state."""
    return [name.removesuffix(_CODES) for name in state if name.endswith(_CODES)]


def _decoded(own: StateDict, name: str, kind: Kind) -> Tensor:
    return decode(codes_of(own, name), kind)


def _put(own: StateDict, name: str, codes: Codes, shard: Shard | None = None) -> None:
    wrap = shard.to_dtensor if shard else lambda x: x
    own[name + _CODES], own[name + _SCALES] = wrap(codes.codes), wrap(codes.scales)
