"""A first convolution of stride 2, over blocks of 2x2 pixels.

ONNX Runtime multiplies bytes fast where channels are a multiple of 4, and images have 1 or 3. A block of
2x2 pixels has 4 times as many, and a window of 7x7 pixels lies within 4x4 blocks.
"""

import math

import numpy as np

from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import Conv

__all__ = ["SIDE", "in_blocks"]

SIDE = 2  # pixels of a block
_LARGEST_WINDOW = 49  # pixels; under larger ones, products of matrices are as fast
_MORE = 1.1  # times as many products as with channels of 0 up to a multiple of 4


def in_blocks(op: Conv, codes: Codes, sides: tuple[int, ...]) -> tuple[Codes, list[int]] | None:
    """Return weights of the same convolution over blocks, stride 1, and its paddings as ONNX has them.

    Channel ``c`` of the pixel in row ``i`` and column ``j`` of a block is channel
    ``(2 * i + j) * channels + c`` of the block.

    Args:
        op: The convolution; its groups are 1.
        codes: Its weights, shape ``(channels out, channels in, rows, columns)``.
        sides: Of its input.

    Returns:
        None where channels are a multiple of 4 already, the sides are not even, the stride is not 2, or
        blocks have too much to multiply.
    """
    count, channels, *kernel = codes.shape
    missing = -channels % 4
    is_even = len(sides) == 2 and not any(side % SIDE for side in sides)
    if not missing or not is_even or {*op.stride} != {SIDE} or {*op.dilation} != {1}:
        return None
    before = [-(-pad // SIDE) for pad in op.padding]  # blocks
    shifts = [SIDE * ahead - pad for ahead, pad in zip(before, op.padding, strict=True)]
    rows, columns = (-(-(k + shift) // SIDE) for k, shift in zip(kernel, shifts, strict=True))
    products = SIDE * SIDE * channels * rows * columns
    padded = (channels + missing) * math.prod(kernel)
    if math.prod(kernel) > _LARGEST_WINDOW or products > _MORE * padded:
        return None
    after = [
        (side + 2 * pad - k) // SIDE + blocks - ahead - side // SIDE
        for side, pad, k, blocks, ahead in zip(
            sides, op.padding, kernel, (rows, columns), before, strict=True
        )
    ]
    if min(after) < 0:  # no window reaches the last block
        return None
    whole = np.zeros((count, channels, SIDE * rows, SIDE * columns), codes.dtype)
    whole[:, :, shifts[0] : shifts[0] + kernel[0], shifts[1] : shifts[1] + kernel[1]] = codes
    parts = whole.reshape(count, channels, rows, SIDE, columns, SIDE).transpose(0, 3, 5, 1, 2, 4)
    return parts.reshape(count, -1, rows, columns), [*before, *after]
