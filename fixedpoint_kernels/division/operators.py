"""``compress`` and ``decompress`` as operators of PyTorch, which ``torch.compile`` keeps."""

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels.division.layout import Layout
from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.operators import define, kernels_for
from fixedpoint_kernels.philox import Key

kernels_of = kernels_for("division")


def compress(
    x: Tensor, block: int | None, bits: int, seed: int, stream: int, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``fixedpoint_kernels.division.compress``; return means, codes and ranges."""
    operator = torch.ops.fixedpoint_kernels.division_compress.default
    return operator(x, block, bits, seed, stream, spatial)


def decompress(  # noqa: PLR0913  an operator takes plain values
    means: Tensor,
    codes: Tensor,
    ranges: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    block: int | None,
    bits: int,
    spatial: int,
    is_channels_last: bool = False,
) -> Tensor:
    """See ``fixedpoint_kernels.division.decompress``; the last six are those of ``Layout``."""
    operator = torch.ops.fixedpoint_kernels.division_decompress.default
    parts = means, codes, ranges
    return operator(*parts, shape, dtype, block, bits, spatial, is_channels_last)


def _compress(
    x: Tensor, block: int | None, bits: int, seed: int, stream: int, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    x = in_memory(x)
    layout, key = _known(Layout.checked(x, block, bits, spatial)), Key.checked(seed, stream)
    means, codes, ranges = _empty_parts(x, layout)
    if layout.is_one_pixel:
        means.copy_(x.detach().reshape(means.shape))
    elif layout.planes:
        kernels = kernels_of(x)
        own = x if _knows_orders(kernels) else x.contiguous()
        kernels.compress(own, means, codes, ranges, layout, key)
    return means, codes, ranges


def _knows_orders(kernels: ModuleType) -> bool:
    """Say whether kernels take activations in any order in memory; others want the usual one."""
    return getattr(kernels, "KNOWS_ORDERS", False)


@lru_cache(maxsize=256)
def _known(layout: Layout) -> Layout:
    """Return a layout whose sizes are worked out already: the same shapes come in each step."""
    return layout


@lru_cache(maxsize=256)
def _restored(shape: tuple[int, ...], *numbers: Any) -> Layout:
    """Return a layout from its parts; see ``_known``."""
    layout = Layout(shape, *numbers)
    layout.check()
    return layout


def _fake_compress(
    x: Tensor, block: int | None, bits: int, seed: int, stream: int, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_parts(x, Layout.checked(x, block, bits, spatial))


def _decompress(means: Tensor, codes: Tensor, ranges: Tensor, *numbers: Any) -> Tensor:
    layout = _restored(tuple(numbers[0]), *numbers[1:])
    _check_devices((means, codes, ranges))
    names = "means", "codes", "ranges"
    means, codes, ranges = map(in_memory, (means, codes, ranges), names)
    _check_parts((means, codes, ranges), layout)
    kernels = kernels_of(means)
    order = layout.memory_format if _knows_orders(kernels) else torch.contiguous_format
    out = torch.empty(layout.shape, dtype=layout.dtype, device=means.device, memory_format=order)
    if layout.is_one_pixel:
        out.copy_(means.view(out.shape))
    elif layout.planes:
        parts = means.contiguous(), codes.contiguous(), ranges.contiguous()
        kernels.decompress(*parts, out, layout)
    return out.contiguous(memory_format=layout.memory_format)


def _fake_decompress(means: Tensor, codes: Tensor, ranges: Tensor, *numbers: Any) -> Tensor:
    layout = Layout(tuple(numbers[0]), *numbers[1:])
    layout.check()
    _check_devices((means, codes, ranges))
    out = means.new_empty(layout.shape, dtype=layout.dtype)
    return out.contiguous(memory_format=layout.memory_format)


define(
    "division_compress(Tensor x, int? block, int bits, SymInt seed, SymInt stream, int spatial)"
    " -> (Tensor, Tensor, Tensor)",
    _compress,
    _fake_compress,
)
define(
    "division_decompress(Tensor means, Tensor codes, Tensor ranges, SymInt[] shape,"
    " ScalarType dtype, int? block, int bits, int spatial, bool is_channels_last) -> Tensor",
    _decompress,
    _fake_decompress,
)


def _empty_parts(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(layout.means_shape, dtype=torch.bfloat16),
        x.new_empty(layout.codes_shape, dtype=torch.uint8),
        x.new_empty(layout.ranges_shape, dtype=torch.bfloat16),
    )


def _check_devices(parts: tuple[Tensor, ...]) -> None:
    if len({part.device for part in parts}) > 1:
        devices = [str(part.device) for part in parts]
        raise ValueError(
            f"the tensors of compressed activations must be on one device, got {devices}"
        )


def _check_parts(parts: tuple[Tensor, ...], layout: Layout) -> None:
    wanted = layout.means_shape, layout.codes_shape, layout.ranges_shape
    came = tuple(tuple(part.shape) for part in parts)
    dtypes = tuple(part.dtype for part in parts)
    if came != wanted or dtypes != (torch.bfloat16, torch.uint8, torch.bfloat16):
        raise ValueError(
            f"activations of shape {layout.shape} are kept as bfloat16, uint8 and bfloat16 tensors of "
            f"shapes {wanted}, got {dtypes} of shapes {came}"
        )
