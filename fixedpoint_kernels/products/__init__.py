"""Integer products of codes: convolutions and linear layers, forward and backward.

from fixedpoint_kernels import products
y = products.convolve(x, weight, exponents=-12, padding=1)      # x uint8 or int8, weight int8
grad, exponents = products.round_per_sample(dy, seed=seed, stream=step)
dx = products.convolve_input_gradient(grad, weight, x.shape[2:], exponents=exponents, padding=1)
dw = products.convolve_weight_gradient(x, grad, (3, 3), exponents=exponents, padding=1)
products.path()                                                 # which instructions, and why

Sums are exact integers, in every execution: no order of additions and no number of threads changes
a bit, and none wraps. A result is the sum, or the sum rounded to float32 and multiplied by a power
of two.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fixedpoint_kernels.products import operators  # noqa: F401  registers them
from fixedpoint_kernels.products.paths import FORCED, Path, force, path

__all__ = [
    "FORCED",
    "Path",
    "Statistics",
    "convolve",
    "convolve_input_gradient",
    "convolve_weight_gradient",
    "convolve_with_statistics",
    "force",
    "linear",
    "linear_input_gradient",
    "linear_weight_gradient",
    "path",
    "round_per_sample",
]

_OPS = torch.ops.fixedpoint_kernels
_Numbers = int | Sequence[int]


class Statistics(NamedTuple):
    """Exact sums over all samples and places, one for each output channel, int64.

    They are of the integers before exponents. The sum of squares is ``high * 2**32 + low``, with
    ``low`` below 2**32: it may be longer than int64.
    """

    sums: Tensor
    high: Tensor
    low: Tensor

    @property
    def squares(self) -> Tensor:
        """The sums of squares, rounded to float64."""
        return self.high.double() * 2.0**32 + self.low.double()


def convolve(  # noqa: PLR0913  a convolution's own numbers
    x: Tensor,
    weight: Tensor,
    *,
    exponents: int | Tensor | None = None,
    stride: _Numbers = 1,
    padding: _Numbers = 0,
    dilation: _Numbers = 1,
    groups: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Convolve codes with codes.

    The integer sums are exact. With ``exponents`` each is rounded to float32, to nearest with ties
    to even, and multiplied by ``2**exponent``; bfloat16 is made from that float32. So a float32
    result is the exact product wherever the sum has 24 bits or fewer.

    Args:
        x: Codes, (samples, channels, height, width) or (samples, channels, length), int8 or uint8,
            any strides; channels last is read as it lies. The border has code 0.
        weight: Codes, (outputs, channels / groups, kernel height, kernel width), or without height,
            int8.
        exponents: One, or int32, one for each output channel, -126 to 127; 128 stands for infinity,
            as ``round_per_sample`` gives it. None: the sums themselves.
        stride: As ``torch.nn.functional.conv2d`` takes it: one number, or one for each dimension.
        padding: So too.
        dilation: So too.
        groups: So too.
        dtype: Of the result: float32 or bfloat16 with exponents (default float32), int32 or int64
            without (default int32).

    Returns:
        (samples, outputs, height, width), or without height; channels last.

    Raises:
        TypeError: A dtype is not as above, or a tensor does not lie in memory.
        ValueError: A shape or number does not fit, or int32 could not hold a sum of so many
            products (``shapes.LONGEST_SUM``, 65,793); the storage of a tensor was freed.
    """
    window = _window(x, stride, padding, dilation, groups)
    parts = _with_height(x), _with_height(weight), _exponents(exponents, x), window
    y = _OPS.products_convolve.default(*parts, _dtype(dtype, exponents))
    return y if x.dim() == 4 else y.squeeze(2)


def convolve_with_statistics(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor,
    *,
    exponents: int | Tensor | None = None,
    stride: _Numbers = 1,
    padding: _Numbers = 0,
    dilation: _Numbers = 1,
    groups: int = 1,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Statistics]:
    """Convolve as ``convolve`` does, and add up each output channel for batch norm.

    Returns:
        The result, and the sums and sums of squares of the integers before rounding.

    Raises:
        TypeError: As ``convolve``.
        ValueError: As ``convolve``; sums must fit in int32 for any dtype.
    """
    window = _window(x, stride, padding, dilation, groups)
    parts = _with_height(x), _with_height(weight), _exponents(exponents, x), window
    operator = _OPS.products_convolve_with_statistics.default
    y, statistics = operator(*parts, _dtype(dtype, exponents))
    return (y if x.dim() == 4 else y.squeeze(2)), Statistics(*statistics.unbind())


def convolve_input_gradient(  # noqa: PLR0913
    grad: Tensor,
    weight: Tensor,
    size: Sequence[int],
    *,
    exponents: int | Tensor | None = None,
    stride: _Numbers = 1,
    padding: _Numbers = 0,
    dilation: _Numbers = 1,
    groups: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the gradient of ``convolve``'s input: exact sums of codes, as ``convolve`` has them.

    Args:
        grad: Codes of the output's gradient, int8, shape of the output.
        weight: As ``convolve`` took it.
        size: Height and width of the input, or its length.
        exponents: One, or int32, one for each sample.
        stride: As ``convolve`` took it.
        padding: So too.
        dilation: So too.
        groups: So too.
        dtype: As for ``convolve``.

    Raises:
        TypeError: As ``convolve``.
        ValueError: As ``convolve``.
    """
    window = _window(grad, stride, padding, dilation, groups)
    given = _sequence("size", size)
    numbers = given if grad.dim() == 4 else [1, *given]
    parts = _with_height(grad), _with_height(weight), _exponents(exponents, grad)
    operator = _OPS.products_input_gradient.default
    y = operator(*parts, numbers, window, _dtype(dtype, exponents))
    return y if grad.dim() == 4 else y.squeeze(2)


def convolve_weight_gradient(  # noqa: PLR0913
    x: Tensor,
    grad: Tensor,
    kernel: Sequence[int],
    *,
    exponents: int | Tensor | None = None,
    stride: _Numbers = 1,
    padding: _Numbers = 0,
    dilation: _Numbers = 1,
    groups: int = 1,
) -> Tensor:
    """Return the gradient of ``convolve``'s weight.

    The sums of each sample are exact integers. Moved by their exponents relative to the largest,
    they are added up in int64, without rounding; the total is rounded to float32 once and
    multiplied by a power of two. A sample whose exponent is more than ``shapes.shift_room`` below
    the largest (31 bits at 64,000 places in all, 30 at 128,000) adds nothing.

    Args:
        x: Codes, as ``convolve`` took them.
        grad: Codes of the output's gradient, int8.
        kernel: Height and width of the kernel, or its length.
        exponents: One, or int32, one for each sample. None: the sum of all samples, int64.
        stride: As ``convolve`` took it.
        padding: So too.
        dilation: So too.
        groups: So too.

    Returns:
        Shape of the weight, float32, or int64 without exponents.

    Raises:
        TypeError: As ``convolve``.
        ValueError: As ``convolve``.
    """
    window = _window(x, stride, padding, dilation, groups)
    given = _sequence("kernel", kernel)
    numbers = given if x.dim() == 4 else [1, *given]
    parts = _with_height(x), _with_height(grad), _exponents(exponents, x), numbers, window
    y = _OPS.products_weight_gradient.default(*parts)
    return y if x.dim() == 4 else y.squeeze(2)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    exponents: int | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply codes (..., inputs) with a weight (outputs, inputs): ``convolve``, with one place.

    Args:
        x: Codes, int8 or uint8.
        weight: Codes, int8.
        exponents: One, or int32, one for each output.
        dtype: As for ``convolve``.

    Returns:
        (..., outputs).

    Raises:
        TypeError: As ``convolve``.
        ValueError: As ``convolve``.
    """
    y = convolve(_as_map(x), _as_map(weight), exponents=exponents, dtype=dtype)
    return y.flatten(1).view(*x.shape[:-1], weight.shape[0])


def linear_input_gradient(
    grad: Tensor,
    weight: Tensor,
    *,
    exponents: int | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the gradient of ``linear``'s input.

    Args:
        grad: Codes of the output's gradient, (..., outputs), int8.
        weight: As ``linear`` took it.
        exponents: One, or int32, one for each sample: as many as there are rows before the last
            dimension, or so many that each has as many rows, one after the other.
        dtype: As for ``convolve``.

    Raises:
        TypeError: As ``convolve``.
        ValueError: As ``convolve``.
    """
    flat = _as_map(grad)
    own = _each_row(exponents, flat)
    y = convolve_input_gradient(flat, _as_map(weight), (1, 1), exponents=own, dtype=dtype)
    return y.flatten(1).view(*grad.shape[:-1], weight.shape[1])


def linear_weight_gradient(
    x: Tensor, grad: Tensor, *, exponents: int | Tensor | None = None
) -> Tensor:
    """Return the gradient of ``linear``'s weight; see ``convolve_weight_gradient``.

    Args:
        x: Codes, as ``linear`` took them.
        grad: Codes of the output's gradient, int8.
        exponents: As for ``linear_input_gradient``.

    Raises:
        TypeError: As ``convolve``.
        ValueError: As ``convolve``.
    """
    flat = _as_map(grad)
    own = _each_row(exponents, flat)
    return convolve_weight_gradient(_as_map(x), flat, (1, 1), exponents=own).flatten(1)


def round_per_sample(
    x: Tensor, *, seed: int = 0, stream: int = 0, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Round each sample stochastically to codes of its own power of two.

    A sample's exponent is the least ``e`` from -126 on with ``abs(x) <= 127 * 2**e`` throughout, so
    that no code is clamped. A value goes to one of its two neighbours with a probability in steps of
    1/256: it is rounded to the nearest 1/256 of a code first, ties to even, which is all that it
    differs from unbiased. What one sample holds does not move another: micro-batches and ranks give
    the same codes where ``first`` says how many samples came before.

    Element ``i`` of sample ``n``, counted with channels last whatever the strides, takes byte
    ``i & 3`` of word ``(first + n) * 4 * ceil(elements / 16) + (i >> 2)`` of the noise of
    ``(seed, stream)`` (``fixedpoint_kernels.philox``).

    Args:
        x: Values, (samples, channels, ...), float32, bfloat16 or float16.
        seed: Of the noise, 0 to 2**63 - 1.
        stream: Which of the seed's independent streams, 0 to 2**63 - 1.
        first: Samples before the first one.

    Returns:
        Codes -127 to 127, shape of ``x``, int8, channels last, and an int32 exponent for each
        sample. A sample with an infinity or NaN has codes 0 and exponent 128, whose power counts as
        infinite: what it is multiplied into becomes NaN.

    Raises:
        TypeError: ``x`` is not such a tensor, or a number is not an integer.
        ValueError: A number is out of range.
        RuntimeError: ``x`` requires a gradient: rounding has none.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"round_per_sample needs a floating tensor, got {type(x).__name__}: write torch.as_tensor(x)"
        )
    _check_whole(seed=seed, stream=stream, first=first)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "round_per_sample has no gradient, and got a tensor that requires one: detach it, or "
            "use torch.no_grad()"
        )
    return _OPS.products_round_per_sample.default(x, seed, stream, first)


def _window(
    x: Tensor, stride: _Numbers, padding: _Numbers, dilation: _Numbers, groups: int
) -> list[int]:
    """Return the numbers of a ``Window``, those of the height first."""
    _check_codes(x)
    _check_whole(groups=groups)
    dims = x.dim() - 2
    if dims not in (1, 2):
        raise ValueError(f"codes must have 3 or 4 dimensions, got shape {tuple(x.shape)}")
    numbers: list[int] = []
    for name, value, neutral in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
    ):
        own = [value] * dims if isinstance(value, int) else _sequence(name, value, "one number or ")
        if len(own) != dims:
            raise ValueError(f"{name} must be one number or {dims}, got {value}")
        numbers += own if dims == 2 else [neutral, *own]
    return [*numbers, groups]


def _sequence(name: str, value: object, other: str = "") -> list[int]:
    if not isinstance(value, Sequence):  # a torch.Size is one
        raise TypeError(
            f"{name} must be {other}a list of a number for each dimension, got {value!r:.60}"
        )
    return list(value)


def _check_codes(x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"codes must be a tensor, got {type(x).__name__}: write torch.as_tensor(codes)"
        )


def _check_whole(**numbers: object) -> None:
    for name, value in numbers.items():
        if not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a whole number, got {value!r:.60}")


def _with_height(x: Tensor) -> Tensor:
    _check_codes(x)
    return x.unsqueeze(2) if x.dim() == 3 else x


def _as_map(x: Tensor) -> Tensor:
    """Return rows of codes as maps of one place."""
    _check_codes(x)
    if x.dim() < 2:
        raise ValueError(f"codes must have 2 dimensions or more, got shape {tuple(x.shape)}")
    return x.reshape(-1, x.shape[-1], 1, 1)


def _exponents(exponents: int | Tensor | None, x: Tensor) -> Tensor | None:
    if isinstance(exponents, int):
        if not -126 <= exponents <= 128:
            raise ValueError(f"an exponent must be -126 to 128, got {exponents}")
        return torch.full((1,), exponents, dtype=torch.int32, device=x.device)
    if not isinstance(exponents, Tensor | None):
        raise TypeError(
            f"exponents must be one whole number, an int32 tensor or None, got {exponents!r:.60}"
        )
    return exponents


def _each_row(exponents: int | Tensor | None, rows: Tensor) -> int | Tensor | None:
    """Return exponents of samples as exponents of their rows."""
    if not isinstance(exponents, Tensor) or exponents.numel() in (1, len(rows)):
        return exponents
    if exponents.numel() == 0 or len(rows) % exponents.numel():
        raise ValueError(
            f"exponents must be as many as divide {len(rows)} rows, got {exponents.numel()}"
        )
    return exponents.flatten().repeat_interleave(len(rows) // exponents.numel())


def _dtype(dtype: torch.dtype | None, exponents: int | Tensor | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.int32 if exponents is None else torch.float32
