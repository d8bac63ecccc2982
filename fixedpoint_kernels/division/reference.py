"""DIVISION in plain PyTorch: the definition that the kernels are tested against.

Everything is float32, and a block's sum has one order, so that it does not depend on how a kernel
shares the work. First each of the block's columns is added up, in row-major order; then, into slot
``s`` of ``slots``, the sums of columns ``s``, ``s + slots``, ...; then neighbouring slots, and
neighbouring pairs of slots, until one number is left.
"""

import torch
from torch import Tensor

from fixedpoint_kernels import packing, philox
from fixedpoint_kernels.division.layout import Layout
from fixedpoint_kernels.philox import Key

_SMALLEST_STEP = 2.0**-126  # its inverse is finite


def compress(
    x: Tensor, means: Tensor, codes: Tensor, ranges: Tensor, layout: Layout, key: Key
) -> None:
    """See ``fixedpoint_kernels.division.compress``; ``x`` is contiguous and has elements."""
    residual = x.detach().float().view(layout.planes, *layout.sides)
    if layout.block is not None:
        means.copy_(_block_means(residual, layout))
        residual = residual - _spread(means, layout)
    if layout.has_codes:
        residual = residual.view(layout.planes, -1)
        ranges.copy_(_ranges(residual, layout.bits))
        low, step = ranges.float().unbind(1)
        inverse = torch.where(step > 0, 1 / step, 0.0)  # poisoned planes too get codes of 0
        noise = philox.uniform(x.numel(), key, x.device).view_as(residual)
        position = (residual - low[:, None]) * inverse[:, None]
        below = position.floor()
        rounded = below + (noise < position - below)
        integers = rounded.clamp(max=2.0**layout.bits - 1).nan_to_num(0.0).to(torch.uint8)
        codes.copy_(packing.pack(integers, layout.bits))


def decompress(means: Tensor, codes: Tensor, ranges: Tensor, out: Tensor, layout: Layout) -> None:
    """See ``fixedpoint_kernels.division.decompress``; ``out`` is contiguous and has elements."""
    values = torch.tensor(-0.0, device=out.device)  # to which -0 can be added, too
    if layout.has_codes:
        integers = packing.unpack(
            codes, layout.bits, (layout.planes, layout.elements), signed=False
        )
        low, step = ranges.float().unbind(1)
        values = low[:, None] + integers * step[:, None]
        values = values.view(layout.planes, *layout.sides)
    if layout.block is not None:
        values = values + _spread(means, layout)
    out.copy_(values.view(out.shape))


def _block_means(planes: Tensor, layout: Layout) -> Tensor:
    """Return the mean of each block of ``(planes, depth, height, width)``, not yet rounded."""
    depth, height, width = layout.edges
    whole = -(width // -layout.slots) * layout.slots
    padding = [0] * 6
    for i, (side, edge, count) in enumerate(
        zip(layout.sides, layout.edges, layout.blocks, strict=True)
    ):
        padding[5 - 2 * i] = count * edge - side
    padded = torch.nn.functional.pad(planes, padding).view(
        -1, layout.blocks[0], depth, layout.blocks[1], height, layout.blocks[2], width
    )
    padded = torch.nn.functional.pad(padded, (0, whole - width)).unflatten(-1, (-1, layout.slots))
    sums = padded.new_zeros((len(padded), *layout.blocks, layout.slots))
    for group in range(whole // layout.slots):
        columns = torch.zeros_like(sums)
        for z in range(depth):
            for y in range(height):
                columns = columns + padded[:, :, z, :, y, :, group]
        sums = sums + columns
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return (sums.squeeze(-1) * _inverse_counts(layout, sums)).view(layout.means_shape)


def _inverse_counts(layout: Layout, like: Tensor) -> Tensor:
    """Return 1 over the elements of each block, float32, shape of ``layout.blocks``."""
    along = []
    for count, (inner, last) in zip(layout.blocks, layout.inverses, strict=True):
        along.append(like.new_tensor([inner] * (count - 1) + [last]))
    return along[0][:, None, None] * along[1][:, None] * along[2]


def _spread(means: Tensor, layout: Layout) -> Tensor:
    """Repeat each mean over its block; shape ``(planes, depth, height, width)``, float32."""
    spread = means.float().view(-1, *layout.blocks)
    for axis, (side, edge) in enumerate(zip(layout.sides, layout.edges, strict=True), start=1):
        block = torch.arange(side, device=means.device) // edge
        spread = spread.index_select(axis, block)
    return spread


def _ranges(residual: Tensor, bits: int) -> Tensor:
    """Return the smallest residual and the step of each plane, numbers of bfloat16, or NaN."""
    low, high = residual.aminmax(dim=1)
    low = _rounded_down(low + 0.0)  # -0.0 becomes 0.0
    levels = 2.0**bits - 1
    width = high - low
    step = -_rounded_down(-(width * (1 / levels)))
    step = torch.where(width == 0, 0.0, step.clamp(min=_SMALLEST_STEP))
    is_finite = low.isfinite() & (levels * step).isfinite()
    return torch.stack([low, step], dim=1).where(is_finite[:, None], float("nan"))


def _rounded_down(x: Tensor) -> Tensor:
    """Return the largest number of bfloat16 that is not above ``x``."""
    bits = x.view(torch.int32)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF).view(torch.float32)
