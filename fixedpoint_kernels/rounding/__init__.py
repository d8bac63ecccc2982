"""Fixed-point rounding: what the functions promise, their checks, and the choice of device."""

import math
from collections.abc import Sequence
from operator import attrgetter, index, is_
from types import UnionType
from typing import get_args

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels.formats import BlockFloat, FixedPoint, Minifloat
from fixedpoint_kernels.memory import (
    PLAIN,
    Places,
    are_apart,
    check_apart,
    check_memory,
    is_exported,
    is_float32,
    places_of,
)
from fixedpoint_kernels.operators import kernels_for
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding import reference
from fixedpoint_kernels.rounding.reference import Rounding
from fixedpoint_kernels.strides import is_dense, laid, memory_order

__all__ = ["Rounding", "decode", "encode", "quantize", "quantize_many", "quantize_with_mask"]
__all__ += ["check_floating", "check_values", "keep_inside"]

_DTYPE, _SHAPE, _IS_CPU = attrgetter("dtype"), attrgetter("shape"), attrgetter("is_cpu")
_REQUIRES_GRAD = attrgetter("requires_grad")
_FLOATS = torch.float32, torch.bfloat16, torch.float16
_ROUNDINGS = get_args(Rounding)
kernels_of = kernels_for("rounding")


@left_uncompiled
def quantize(  # noqa: PLR0913  noise has three coordinates
    x: Tensor,
    fmt: FixedPoint | Minifloat,
    *,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
    offset: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Round ``x`` to numbers of ``fmt``.

    ``"stochastic"`` goes up with a probability equal to the distance from the number below, in
    units of ``fmt.lsb``: unbiased inside the range (to 2**-24 of an lsb), and a number of the
    format never moves. ``"nearest"`` sends ties to the even code. Then values outside the range
    saturate; NaN stays NaN and infinities saturate. A result is never -0.0. Of a ``Minifloat``,
    ``lsb`` is the step between its numbers where ``x`` lies.

    The noise of element ``i``, counted in row-major order whatever the strides, is a function of
    ``(seed, stream, offset + i)`` alone (``fixedpoint_kernels.philox``): every device gives the
    same bits, and no generator of the user's is touched. Where a tensor is spread over devices,
    each gives its part's first position as ``offset``, and has the bits of the whole tensor.

    Args:
        x: Values, any shape and strides, float32, bfloat16 or float16.
        fmt: The target format. Above 24 bits beside the sign, saturation stops at the largest
            code that float32 holds.
        rounding: ``"stochastic"`` or ``"nearest"``.
        seed: Of the noise, 0 to 2**63 - 1; unused by ``"nearest"``.
        stream: Which of the seed's independent streams, 0 to 2**63 - 1.
        offset: Position of the first element in the stream, 0 to 2**62 - 1.
        out: Where to write, shape and device of ``x``, any of the dtypes above; may be ``x``, else
            it shares no memory with it.

    Returns:
        ``out``, or a tensor of the shape and dtype of ``x``, with the strides of ``torch.empty_like(x)``. Arithmetic is
        float32; a result that its dtype does not hold (more than 8 significant bits in bfloat16, 11 in
        float16) is rounded to it.

    Raises:
        TypeError: ``x`` is not floating, or ``fmt`` neither ``FixedPoint`` nor ``Minifloat``; ``x`` or ``out`` does
            not lie in memory (sparse, fake, a subclass such as ``DTensor``).
        ValueError: ``rounding``, ``seed``, ``stream``, ``offset`` or ``out`` is not as above; the
            storage of ``x`` or ``out`` was freed.
        RuntimeError: ``x`` or ``out`` requires a gradient: rounding has none
            (``marvin.fake_quantize`` is the straight-through estimator). ``out`` overlaps ``x`` in
            part, or itself.

    Source:
        MARViN, section 3.2 (Gupta et al., 2015). Differs: steps of ``lsb`` where the paper
        prints steps of 1; the fraction is compared with the noise, because the usual
        ``floor(x + u)`` is biased in float32 and moves representable numbers.
    """
    check_values(x, "quantize")
    _check_mode(fmt, rounding)
    key = Key.checked(seed, stream, offset)
    if out is None:
        return _made(x, fmt, rounding, key)[0]
    _check_out(out, x)
    check_apart([x], [out])
    _run(x, out, None, fmt, rounding, key)
    _mark_changed([out])
    return out


@left_uncompiled
def quantize_with_mask(
    x: Tensor,
    fmt: FixedPoint | Minifloat,
    *,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Round as ``quantize`` does, and say in the same pass which elements did not saturate.

    Returns:
        The rounded values, and a bool tensor of the same shape: true where the rounded value
        was inside the range (or NaN), false where it was clamped.

    Raises:
        TypeError, ValueError, RuntimeError: As ``quantize``.
    """
    check_values(x, "quantize_with_mask")
    _check_mode(fmt, rounding)
    y, inside = _made(x, fmt, rounding, Key.checked(seed, stream), is_masked=True)
    assert inside is not None  # it was asked for
    return y, inside


@left_uncompiled
def quantize_many(  # noqa: PLR0913  noise has three coordinates
    xs: Sequence[Tensor],
    fmts: Sequence[FixedPoint | Minifloat],
    *,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
    offsets: Sequence[int] | None = None,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Round many tensors, each to a format of its own, in one launch.

    Tensor ``j`` gets the bits of
    ``quantize(xs[j], fmts[j], seed=seed, stream=stream + j, offset=offsets[j])``.

    Args:
        xs: Values, on one device; one launch where all are float32 and contiguous, as is ``out``,
            and all formats fixed point.
        fmts: One format a tensor.
        rounding: ``"stochastic"`` or ``"nearest"``.
        seed: Of the noise.
        stream: Of the first tensor.
        offsets: Of each tensor; None: all 0.
        out: Where to write, one tensor each; each may be its own input, else it shares no memory
            with any input or other output.

    Returns:
        ``out``, or new tensors like ``xs``.

    Raises:
        TypeError: ``xs`` or ``fmts`` is no list, or as ``quantize``.
        RuntimeError: As ``quantize``.
        ValueError: Lengths or devices differ, or as ``quantize``.
    """
    _check_list("tensors", xs)
    _check_list("formats", fmts)
    outs = None if out is None else list(out)
    positions = (0,) * len(xs) if offsets is None else tuple(map(index, offsets))
    count = len(xs) if outs is None else len(outs)
    if not len(xs) == len(fmts) == count == len(positions):
        raise ValueError(
            "quantize_many needs one format, one output and one offset a tensor, got "
            f"{len(xs)} tensors, {len(fmts)} formats, {count} outputs, {len(positions)} offsets"
        )
    if not xs:
        return []
    Key.checked(seed, stream + len(xs) - 1, max(positions))
    first = Key.checked(seed, stream, min(positions))
    is_fixed = set(map(type, fmts)) == {FixedPoint} and not is_exported()
    for fmt in fmts[:1] if is_fixed else fmts:
        _check_mode(fmt, rounding)
    places = _one_launch(xs, outs) if is_fixed else None
    if places is None:
        _check_each(xs, outs)
    if outs is not None:
        _mark_changed(outs)
    if places is None and outs is None:
        rows = zip(xs, fmts, _keys(first, positions), strict=True)
        return [_made(x, fmt, rounding, key)[0] for x, fmt, key in rows]
    ys = [torch.empty_like(x) for x in xs] if outs is None else outs
    if places is not None and type(ys[0]) in PLAIN:  # no mode makes others
        if outs is None:
            places = places._replace(ys=tuple(map(Tensor.data_ptr, ys)))
        kernels = kernels_of(xs[0])  # of a CPU or a GPU: other devices have no places
        kernels.quantize_many(places, fmts, rounding, first, positions, xs[0].device)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return ys
    for x, y, fmt, key in zip(xs, ys, fmts, _keys(first, positions), strict=True):
        _run(x, y, None, fmt, rounding, key)
    return ys


def _keys(first: Key, positions: Sequence[int]) -> list[Key]:
    return [Key(first.seed, first.stream + j, at) for j, at in enumerate(positions)]


def keep_inside(x: Tensor, inside: Tensor) -> Tensor:
    """Return ``x`` where ``inside``, a mask as ``quantize_with_mask`` makes one, and 0 elsewhere.

    It is ``torch.where``, in a third of its time on a CPU, where nothing asks for its gradient.
    """
    is_plain = is_float32(x, inside.shape, is_dense=False) and is_dense(x)
    if not is_plain or torch.is_grad_enabled():
        return torch.where(inside, x, x.new_zeros(()))
    from fixedpoint_kernels.rounding import cpu

    y, order = torch.empty_like(x), memory_order(x)
    cpu.keep_inside(laid(x, order), laid(inside, order), laid(y, order))
    return y


@left_uncompiled
def encode(
    x: Tensor,
    fmt: FixedPoint,
    *,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
) -> Tensor:
    """Round as ``quantize`` does, and return the integer codes.

    Returns:
        Codes, shape of ``x``, in the smallest of int8, int16 and int32 that holds ``fmt.wl``
        bits; unsigned ones in that of uint8, int16 and int32, as ``unpack`` gives them.
        ``decode`` gives the values. NaN becomes code 0.

    Raises:
        TypeError, ValueError, RuntimeError: As ``quantize``.
    """
    check_values(x, "encode")
    _check_mode(fmt, rounding, FixedPoint)
    return _made(x, fmt, rounding, Key.checked(seed, stream), _code_dtype(fmt))[0]


def decode(codes: Tensor, fmt: FixedPoint, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of integer codes: ``codes * fmt.lsb``.

    Args:
        codes: Integers, any shape. One that the format does not have is not refused, and gives a
            value outside of it: on a GPU, finding one would make the host wait for the device.
        fmt: Their format.
        dtype: Of the result: float32, which holds codes of up to 25 bits, float64, which holds all of them, or
            bfloat16 or float16, to which values are rounded.

    Raises:
        TypeError: ``codes`` are not a tensor of integers, ``fmt`` is no ``FixedPoint``, or ``dtype`` is none of these.
    """
    if not isinstance(codes, Tensor):
        raise TypeError(
            f"decode needs a tensor of integers, got {type(codes).__name__}: write "
            "torch.as_tensor(codes)"
        )
    if codes.dtype.is_floating_point or codes.dtype is torch.bool or codes.is_complex():
        raise TypeError(f"decode needs integer codes, got {codes.dtype}")
    _check_format(fmt, FixedPoint)
    if dtype not in (*_FLOATS, torch.float64):
        raise TypeError(
            f"dtype must be float32, float64, bfloat16 or float16, got {dtype!r}: codes are whole numbers already"
        )
    wide = torch.promote_types(dtype, torch.float32)  # float16 does not hold a code above 65,504
    return (codes.to(wide) * fmt.lsb).to(dtype)


def _code_dtype(fmt: FixedPoint) -> torch.dtype:
    if fmt.wl <= 8:
        return torch.int8 if fmt.signed else torch.uint8
    return torch.int16 if fmt.max_code < 2**15 else torch.int32


def _made(
    x: Tensor,
    fmt: FixedPoint | Minifloat,
    rounding: Rounding,
    key: Key,
    dtype: torch.dtype | None = None,
    *,
    is_masked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return new tensors, rounded, and where nothing was clamped; of exports, operators that make them."""
    if is_exported():
        return _of_operators(x, fmt, rounding, key, dtype or x.dtype)
    y = torch.empty_like(x, dtype=dtype)
    inside = torch.empty_like(x, dtype=torch.bool) if is_masked else None
    _run(x, y, inside, fmt, rounding, key)
    return y, inside


def _of_operators(
    x: Tensor, fmt: FixedPoint | Minifloat, rounding: Rounding, key: Key, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what operators of PyTorch round, which exports see, and where nothing was clamped."""
    y, inside = reference.rounded(x, fmt, rounding, key, dtype)
    return (y + 0.0 if _may_vanish(fmt, dtype) else y), inside


def _run(
    x: Tensor,
    y: Tensor,
    inside: Tensor | None,
    fmt: FixedPoint | Minifloat,
    rounding: Rounding,
    key: Key,
) -> None:
    """Round into ``y`` and ``inside`` of any strides."""
    if is_exported():
        y.copy_(_of_operators(x, fmt, rounding, key, y.dtype)[0])
        return
    x = x.resolve_neg() if x.is_neg() else x
    if rounding == "stochastic" and _run_turned(x, y, inside, fmt, key):
        return
    order = memory_order(x) if rounding == "nearest" else None  # noise goes by their own order
    x, y = laid(x, order), laid(y, order)
    inside = None if inside is None else laid(inside, order)
    is_direct = y.is_contiguous() and not y.is_neg()
    target = y if is_direct else torch.empty_like(y, memory_format=torch.contiguous_format)
    mask = inside
    if inside is not None and not inside.is_contiguous():
        mask = torch.empty_like(inside, memory_format=torch.contiguous_format)
    if x.numel():
        kernels_of(x).quantize(x.contiguous(), target, mask, fmt, rounding, key)
    if target is not y:
        y.copy_(target)
    if _may_vanish(fmt, y.dtype):
        y.add_(0.0)  # -0.0 becomes 0.0
    if inside is not None and mask is not None and mask is not inside:
        inside.copy_(mask)


def _may_vanish(fmt: FixedPoint | Minifloat, dtype: torch.dtype) -> bool:
    """Say whether numbers of ``fmt`` may become 0 in ``dtype``, and with their sign -0.0."""
    if not dtype.is_floating_point or dtype is torch.float32:
        return False
    limits = torch.finfo(dtype)
    return fmt.lsb < limits.smallest_normal * limits.eps


def _run_turned(
    x: Tensor, y: Tensor, inside: Tensor | None, fmt: FixedPoint | Minifloat, key: Key
) -> bool:
    """Round with noise where memory has one dimension last that is not: channels last.

    Returns:
        Whether it could. What it cannot is copied, rounded, and copied back.
    """
    is_known = x.is_cpu and x.dtype is y.dtype is torch.float32 and not y.is_neg()
    if not is_known or x.is_contiguous() or not x.numel() or x.stride() != y.stride():
        return False
    if inside is not None and inside.stride() != x.stride():
        return False
    order = memory_order(x)
    if order is None or x.shape[order[-1]] < 16:  # so few are faster copied
        return False
    if order[:-1] != tuple(i for i in range(x.dim()) if i != order[-1]):
        return False
    from fixedpoint_kernels.rounding.cpu import quantize_turned

    last = order[-1]
    sizes = (math.prod(x.shape[:last]), math.prod(x.shape[last + 1 :]), x.shape[last])
    x, y = (value.permute(order).view(sizes) for value in (x, y))
    inside = None if inside is None else inside.permute(order).view(sizes)
    quantize_turned(x, y, inside, fmt, key)
    return True


def _one_launch(xs: Sequence[Tensor], out: Sequence[Tensor] | None) -> Places | None:
    """Return where tensors lie if one kernel takes all: float32, contiguous, on one device.

    One attribute of all tensors at a time: tensor by tensor took as long as the rounding itself.
    """
    is_in_place = out is not None and all(map(is_, xs, out))
    tensors = [*xs] if out is None or is_in_place else [*xs, *out]
    is_alike = (
        set(map(type, tensors)) <= PLAIN
        and set(map(_DTYPE, tensors)) == {torch.float32}
        and (all(map(_IS_CPU, tensors)) or _are_on_one_gpu(tensors))
        and not (torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)))
    )
    if not is_alike or not (out is None or is_in_place or _have_same_shapes(xs, out)):
        return None
    places = places_of(xs, tensors[len(xs) :])
    if places is None or out is None:
        return places
    if is_in_place:
        places = places._replace(ys=places.xs)
    return places if are_apart(places) else None


def _have_same_shapes(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    try:
        return list(map(_SHAPE, xs)) == list(map(_SHAPE, ys))
    except RuntimeError:  # nested tensors have none
        return False


def _are_on_one_gpu(tensors: list[Tensor]) -> bool:
    return tensors[0].is_cuda and len({x.device for x in tensors}) == 1


def _check_list(name: str, given: object) -> None:
    if not isinstance(given, Sequence):  # a tensor is none
        raise TypeError(
            f"quantize_many needs a list of {name}, got {type(given).__name__}: write "
            "quantize_many([x], [fmt])"
        )


def _check_each(xs: Sequence[Tensor], out: Sequence[Tensor] | None) -> None:
    """Check many tensors as ``quantize`` checks one."""
    for x in xs:
        check_values(x, "quantize_many")
    if len({x.device for x in xs}) > 1:
        devices = sorted({str(x.device) for x in xs})
        raise ValueError(f"quantize_many needs one device, got {devices}")
    if out is not None:
        for x, y in zip(xs, out, strict=True):
            _check_out(y, x)
        check_apart(xs, out)


def check_values(x: Tensor, name: str) -> None:
    """Raise unless ``x`` can be rounded.

    Raises:
        TypeError: ``x`` is not a float32, bfloat16 or float16 tensor, or does not lie in memory.
        ValueError: The storage of ``x`` was freed.
        RuntimeError: ``x`` requires a gradient.
    """
    check_floating(x, name)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no gradient, and got a tensor that requires one: detach it, use "
            "torch.no_grad(), or marvin.fake_quantize for a straight-through estimator"
        )
    if not is_exported():  # then the reference rounds
        check_memory(x)


def check_floating(x: object, name: str) -> None:
    """Raise unless ``x`` is a tensor of a dtype that is rounded.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} needs a float32, bfloat16 or float16 tensor, got {type(x).__name__}: write "
            "torch.as_tensor(x)"
        )
    if x.dtype not in _FLOATS:
        instead = "" if x.is_complex() else ": write x.float()"
        raise TypeError(
            f"{name} needs a float32, bfloat16 or float16 tensor, got {x.dtype}{instead}"
        )


def _check_mode(
    fmt: object, rounding: Rounding, kinds: UnionType | type = FixedPoint | Minifloat
) -> None:
    _check_format(fmt, kinds)
    if rounding not in _ROUNDINGS:
        raise ValueError(f"rounding must be one of {_ROUNDINGS}, got {rounding!r}")


def _check_format(fmt: object, kinds: UnionType | type) -> None:
    if not isinstance(fmt, kinds):
        instead = ": write quantize_block(x, fmt)" if isinstance(fmt, BlockFloat) else ""
        raise TypeError(
            f"the format must be a FixedPoint, such as FixedPoint(8, 4), got {fmt!r:.60}{instead}"
        )


def _mark_changed(tensors: Sequence[Tensor]) -> None:
    """Tell autograd of a write that it cannot see, as every in-place operation does."""
    if any(map(Tensor.is_inference, tensors)):
        tensors = [x for x in tensors if not x.is_inference()]
    increment_version(tensors)


def _check_out(out: Tensor, x: Tensor) -> None:
    if out is not x and not is_exported():
        check_memory(out, "out")
    if out.shape != x.shape or out.device != x.device or out.dtype not in _FLOATS:
        raise ValueError(
            f"out must be a floating tensor of shape {tuple(x.shape)} on {x.device}, "
            f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "out must not require a gradient, for rounding has none: detach it, or use "
            "torch.no_grad()"
        )
