"""DIVISION: activations kept for backward as block means and few-bit residuals.

from fixedpoint_kernels import division
kept = division.compress(x, block=8, bits=2, seed=seed, stream=step)
kept.size_bytes                       # about 1/14 of float32 activations
y = division.decompress(kept)         # shape, dtype and memory format of x
"""

import torch
from torch import Tensor

from fixedpoint_kernels.division import operators
from fixedpoint_kernels.division.layout import Compressed, Layout
from fixedpoint_kernels.philox import Key

__all__ = ["Compressed", "Layout", "compress", "decompress"]


def compress(
    x: Tensor,
    *,
    block: int | None = 8,
    bits: int = 2,
    seed: int = 0,
    stream: int = 0,
    spatial: int | None = None,
) -> Compressed:
    """Keep the means of blocks in bfloat16, and what they leave over in ``bits`` bits an element.

    A plane is what the last ``spatial`` dimensions span. It is cut into blocks of edge ``block``;
    those at the edge are smaller. What is left of an element after its block's mean, as rounded to
    bfloat16, is rounded stochastically to one of ``2**bits`` values, equal steps apart, from the
    smallest to the largest residual of the plane: the error is below one step, and unbiased. The
    noise of element ``i``, counted in row-major order whatever the strides, is a function of
    ``(seed, stream, i)`` alone (``fixedpoint_kernels.philox``).

    Each plane keeps its smallest residual, rounded down to bfloat16, and its step, rounded up. A
    plane that has an infinity or NaN, or whose sums or range float32 does not hold, becomes NaN as
    a whole; no other plane notices. With ``block``, a plane of one element is kept as bfloat16 and
    nothing else.

    Args:
        x: Values, any shape and strides, float32, bfloat16, float16, or float64, of which float32
            is taken.
        block: Edge of the blocks, 1 or more; None: no means are kept nor subtracted, which is
            plain quantisation with one range a plane.
        bits: 1, 2, 4 or 8; 0: means only.
        seed: Of the noise, 0 to 2**63 - 1.
        stream: Which of the seed's independent streams, 0 to 2**63 - 1.
        spatial: 0 to 3. Default: 1 for up to three dimensions, ``(batch, features)``, ``(batch,
            tokens, features)`` or ``(batch, channels, length)``, 2 for four, 3 for more.

    Returns:
        Three tensors and a layout, in ``2 * blocks + 4`` bytes a plane and ``bits`` bits an
        element.

    Raises:
        TypeError: ``x`` is not such a tensor, or does not lie in memory; a number is not an
            integer.
        ValueError: A number is out of range; the storage of ``x`` was freed.
        RuntimeError: ``x`` requires a gradient: this has none.

    Source:
        DIVISION, section 4. Differs: blocks are cut at the edge, where the released code leaves the
        rest out; residuals are taken against the rounded means.
    """
    layout = Layout.checked(x, block, bits, spatial)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "compress has no gradient, and got a tensor that requires one: detach it, or use "
            "torch.no_grad()"
        )
    key = Key.checked(seed, stream)
    means, codes, ranges = operators.compress(
        x.detach(), layout.block, layout.bits, key.seed, key.stream, layout.spatial
    )
    return Compressed(means, codes, ranges, layout)


def decompress(compressed: Compressed) -> Tensor:
    """Return the activations that ``compress`` was given, as far as its bits go.

    Returns:
        Shape, dtype and device of the activations; contiguous, or channels last where they were.

    Raises:
        TypeError: ``compressed`` is not what ``compress`` returned; a tensor does not lie in memory; a number of the layout is not an integer.
        ValueError: The tensors are not those of the layout, which may have numbers out of range;
            a storage was freed.
    """
    if not isinstance(compressed, Compressed):
        came = type(compressed).__name__
        raise TypeError(f"decompress takes what division.compress returned, got {came}")
    layout = compressed.layout
    return operators.decompress(
        *compressed.tensors,
        layout.shape,
        layout.dtype,
        layout.block,
        layout.bits,
        layout.spatial,
        layout.is_channels_last,
    )
