"""Which tensors a kernel may read and write by address, and which of them share memory.

A tensor need not be what its address says: a negation may be waiting, its storage may be freed, and
some have no memory at all. Whatever is given to a kernel goes through ``in_memory`` or, many
tensors at once, ``places_of``.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import add, attrgetter, ge, gt, le
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fixedpoint_kernels._torch_private.modes import is_fake, is_wrapped

__all__ = [
    "PLAIN",
    "Places",
    "are_apart",
    "are_float32",
    "check_apart",
    "check_memory",
    "in_memory",
    "is_exported",
    "is_float32",
    "joined",
    "places_of",
    "places_on_cpu",
]

PLAIN = {Tensor, Parameter}  # what has memory of its own and no rules of its own
_DISPATCH = attrgetter("__torch_dispatch__")
_IS_NESTED = attrgetter("is_nested")
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")
_SHAPE = attrgetter("shape")


class Places(NamedTuple):
    """Where contiguous tensors lie: addresses of inputs and outputs, elements of each pair."""

    xs: tuple[int, ...]
    ys: tuple[int, ...]
    elements: tuple[int, ...]
    itemsize: int


def is_exported() -> bool:
    """Say whether ``torch.export`` or ``torch.jit`` makes a program of operators: it sees nothing of kernels."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def in_memory(x: Tensor, name: str = "x") -> Tensor:
    """Return ``x`` as its address gives it: a negation that waits (``z.conj().imag``) is done.

    Raises:
        TypeError, ValueError, RuntimeError: As ``check_memory``.
    """
    check_memory(x, name)
    return x.resolve_neg() if x.is_neg() else x


def check_memory(x: Tensor, name: str = "x") -> None:
    """Raise unless the elements of ``x`` lie in memory where its address and strides say.

    Other devices than CPU and CUDA have no kernels of ours: there torch reads, and checks.

    Raises:
        TypeError: ``x`` is no tensor; it is sparse, nested, fake, functional, inside
            ``torch.func``, or of a subclass with operators of its own.
        ValueError: The storage of ``x`` was freed, or is too small.
        RuntimeError: ``torch.jit`` traces: its program would have memory that nobody wrote.
    """
    if torch.jit.is_tracing():
        raise RuntimeError(
            f"{name} must be given to a kernel outside of torch.jit.trace and torch.onnx.export(dynamo="
            "False): they see operators alone, and their program would have memory that nobody wrote"
        )
    if _is_plain(x):
        return
    _check_kind(x, name)
    if not (x.is_cpu or x.is_cuda):
        return
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{name} must be a dense tensor, got a {kind} one: give its values")
    try:
        held = x.untyped_storage().nbytes()
    except RuntimeError as error:  # a tensor inside of torch.func has none
        raise TypeError(_TRANSFORMED.format(name)) from error
    first = x.storage_offset() * x.itemsize
    needed = first + _extent(x) * x.itemsize if x.numel() else 0
    if held < needed:
        raise ValueError(
            f"{name} must lie in its storage, got one that ends at byte {needed} of {held}: its "
            "storage was freed or made smaller by resize_"
        )
    if needed and x.data_ptr() == first:
        raise TypeError(
            f"{name} must be a tensor that lies in memory, got one without an address (a "
            "functional tensor, or a zero of forward-mode differentiation): add 0 to it"
        )


def _check_kind(x: object, name: str) -> None:
    """Refuse what is no tensor of memory whatever its address says."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if is_fake(x):
        raise TypeError(
            f"{name} must be a tensor that lies in memory, got a FakeTensor, which has no values, as in "
            "torch.export: call it outside, or give the tensor that was there before"
        )
    if _DISPATCH(type(x)) is not _DISPATCH(Tensor):
        raise TypeError(
            f"{name} must be a tensor that lies in memory, got a {type(x).__name__}, which only "
            "its own operators can read: give the tensor that it holds"
        )


_TRANSFORMED = (
    "{} must be a tensor that lies in memory, got one inside of torch.func, whose "
    "transforms (vmap, grad, jvp) kernels cannot see: call it outside of them"
)


def check_untransformed(**tensors: Tensor | None) -> None:
    """Refuse tensors inside of ``torch.func`` before an ``autograd.Function`` of ours does, with what torch says.

    Raises:
        TypeError: One is; the error has its name.
    """
    for name, x in tensors.items():
        if x is not None and is_wrapped(x):
            raise TypeError(_TRANSFORMED.format(name))


def _is_plain(x: Tensor) -> bool:
    """Say whether ``x`` is dense and known to lie in memory, from as little as that takes."""
    if type(x) not in PLAIN:
        return False
    try:
        first = x.storage_offset() * x.itemsize
        held = x.untyped_storage().nbytes()
        is_dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
        is_held = is_dense and held >= first + x.nbytes and x.data_ptr() > first
    except RuntimeError:  # of what has no storage, or no strides
        return False
    return is_held and not x.is_nested


def is_float32(x: Tensor, shape: Sequence[int], *, is_dense: bool = True) -> bool:
    """Say whether ``x`` is plain float32 of this shape, with memory on a CPU.

    Args:
        x: May be what modules have as parameters or buffers.
        shape: That it must have, with elements.
        is_dense: Whether it must be contiguous.
    """
    if type(x) not in PLAIN or x.shape != shape or x.dtype is not torch.float32:
        return False
    return x.is_cpu and (not is_dense or x.is_contiguous()) and _have_addresses([x])


def are_float32(xs: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> bool:
    """Say of many tensors what ``is_float32`` says of one that need not be contiguous; an attribute of all at a time."""
    is_plain = set(map(type, xs)) <= PLAIN and set(map(_DTYPE, xs)) <= {torch.float32}
    if not is_plain or list(map(_SHAPE, xs)) != [*shapes]:
        return False
    return all(map(_IS_CPU, xs)) and _have_addresses(xs)


def _have_addresses(xs: Sequence[Tensor]) -> bool:
    """Say whether tensors have memory, and are what it says: no negation waits."""
    try:
        return all(map(Tensor.data_ptr, xs)) and not any(map(Tensor.is_neg, xs))  # 0: freed
    except RuntimeError:  # inside of torch.func, or of a gradient of many at once, they have none
        return False


def places_of(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    lies: Callable[[Tensor], bool] = Tensor.is_contiguous,
) -> Places | None:
    """Return where contiguous tensors lie: inputs, and as many outputs of the same shapes or none.

    One attribute of all tensors at a time: ``check_memory`` of each took as long as rounding.

    Args:
        xs: Inputs, at least one.
        ys: Outputs; both are of one dtype, on one device.
        lies: What each must be: contiguous, or ``is_dense``.

    Returns:
        None where ``check_memory`` would refuse one, or one is negated or does not lie so.
    """
    tensors, item = [*xs, *ys], xs[0].itemsize
    try:
        if any(map(Tensor.is_neg, tensors)) or any(map(_IS_NESTED, xs)):
            return None
        if not all(map(lies, tensors)):
            return None
        held = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))
        first = [item * n for n in map(Tensor.storage_offset, tensors)]
        found = tuple(map(Tensor.data_ptr, tensors))
        elements = tuple(map(Tensor.numel, xs))
    except RuntimeError:  # of what has no storage, or no strides
        return None
    sizes = [item * n for n in elements] * (2 if ys else 1)
    if not all(map(ge, held, map(add, first, sizes))):
        return None
    if not all(map(gt, found, first)) and any(
        n and at <= start for n, at, start in zip(sizes, found, first, strict=True)
    ):
        return None
    return Places(found[: len(xs)], found[len(xs) :], elements, item)


def joined(parts: Sequence[Places | None]) -> Places | None:
    """Return the places of several lists of inputs as those of one; None where one is not known."""
    known = [own for own in parts if own is not None]
    if len(known) < len(parts) or not parts:
        return None
    if len(parts) == 1:
        return known[0]
    xs = tuple(chain.from_iterable(own.xs for own in known))
    elements = tuple(chain.from_iterable(own.elements for own in known))
    return Places(xs, (), elements, known[0].itemsize)


@lru_cache(maxsize=16)  # the same parameters come step after step
def are_apart(places: Places) -> bool:
    """Say whether outputs share memory with nothing but their own inputs; if not, they may."""
    xs, ys, elements, item = places
    inputs = [(x, item * n) for x, y, n in zip(xs, ys, elements, strict=True) if x != y]
    outputs = [(y, item * n) for y, n in zip(ys, elements, strict=True)]
    return _are_disjoint(outputs + inputs)


def check_apart(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Refuse outputs that share memory with each other, or with another input than their own.

    Torch refuses the same of ``out=``. An output may be its own input, with the same strides.

    Raises:
        RuntimeError: Memory is shared.
    """
    if torch.compiler.is_exporting():  # nothing has an address
        return
    for y in ys:
        if not (y.is_contiguous() or _is_spread(y)) and _bytes_of([y]) < y.nbytes:
            raise RuntimeError(
                f"out must have memory of its own for each element, got strides {y.stride()} for "
                f"shape {tuple(y.shape)}: give a clone() of it"
            )
    pairs = zip(xs, ys, strict=True)
    inputs = [(x, False) for x, y in pairs if not _is_same(x, y)]
    if len(ys) == 1 and (not inputs or _are_far(xs[0], ys[0])):
        return
    for group in _neighbours([*((y, True) for y in ys), *inputs]):
        written = sum(x.nbytes for x, is_output in group if is_output)
        read = _bytes_of([x for x, is_output in group if not is_output])
        if _bytes_of([x for x, _ in group]) < written + read:
            raise RuntimeError(
                "out must share no memory with an input or another output, unless it is its own "
                "input, got tensors that overlap: give a clone() of one of them"
            )


def _is_same(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    if x.data_ptr() != y.data_ptr() or x.dtype != y.dtype:
        return False
    rows = zip(x.shape, x.stride(), y.stride(), strict=True)
    return x.stride() == y.stride() or all(a == b for n, a, b in rows if n > 1)


def _extent(x: Tensor) -> int:
    """Return how many elements of storage there are from the first to the last of ``x``."""
    if x.is_contiguous() or not x.numel():
        return x.numel()
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def _is_spread(x: Tensor) -> bool:
    """Say whether each dimension steps over all that smaller steps reach; else, who knows."""
    reach = 0
    for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and step <= reach:
            return False
        reach += (n - 1) * step
    return True


def _span(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), _extent(x) * x.itemsize


def _are_far(x: Tensor, y: Tensor) -> bool:
    (a, n), (b, m) = _span(x), _span(y)
    return a + n <= b or b + m <= a


def _are_disjoint(spans: Iterable[tuple[int, int]]) -> bool:
    """Say whether no two of ``(address, bytes)`` share a byte."""
    spans = [(start, n) for start, n in spans if n]
    starts, ends = sorted(start for start, _ in spans), sorted(start + n for start, n in spans)
    return all(map(le, ends, starts[1:]))


def _neighbours(tensors: Sequence[tuple[Tensor, bool]]) -> list[list[tuple[Tensor, bool]]]:
    """Return the groups of tensors that begin before another of the group ends."""
    spans = [_span(x) for x, _ in tensors]
    if _are_disjoint(spans):
        return []
    groups: list[list[tuple[Tensor, bool]]] = []
    end = 0
    for i in sorted(range(len(spans)), key=spans.__getitem__):
        start, size = spans[i]
        if size and start < end:
            groups[-1].append(tensors[i])
        elif size:
            groups.append([tensors[i]])
        end = max(end, start + size)
    return groups


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    """Count the bytes that tensors near each other have together; shared ones once."""
    if not tensors:
        return 0
    spans = [_span(x) for x in tensors]
    low, high = min(start for start, _ in spans), max(start + n for start, n in spans)
    unit = math.gcd(*(start - low for start, _ in spans), *(x.itemsize for x in tensors))
    marks = torch.zeros((high - low) // unit, dtype=torch.bool, device="cpu")
    for x, (start, _) in zip(tensors, spans, strict=True):
        item = x.itemsize // unit
        shape = [n if step else min(n, 1) for n, step in zip(x.shape, x.stride(), strict=True)]
        steps = [step * item for step in x.stride()]
        marks.as_strided((*shape, item), (*steps, 1), (start - low) // unit).fill_(True)
    return int(marks.count_nonzero()) * unit


def places_on_cpu(
    tensors: Sequence[Tensor], lies: Callable[[Tensor], bool] = Tensor.is_contiguous
) -> Places | None:
    """Return where plain float32 tensors on a CPU lie; None where one is something else.

    Args:
        tensors: At least one.
        lies: As of ``places_of``.
    """
    is_plain = set(map(type, tensors)) <= PLAIN and set(map(_DTYPE, tensors)) <= {torch.float32}
    return places_of(tensors, [], lies) if is_plain and all(map(_IS_CPU, tensors)) else None
