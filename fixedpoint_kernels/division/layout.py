"""How compressed activations lie in memory."""

import math
import operator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

BITS = 0, 1, 2, 4, 8
FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
_MAX_SLOTS = 128
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Layout:
    """What the three tensors of compressed activations mean.

    Args:
        shape: Of the activations.
        dtype: Of the activations.
        block: Edge of the blocks whose means are kept; None: no means.
        bits: Of a quantised residual; 0: none.
        spatial: How many trailing dimensions make up a plane.
        is_channels_last: Whether the activations' memory format is channels last.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int | None
    bits: int
    spatial: int
    is_channels_last: bool = False

    @classmethod
    def checked(cls, x: Tensor, block: int | None, bits: int, spatial: int | None) -> "Layout":
        """Return the layout of a compressed ``x``.

        Raises:
            TypeError: ``x`` is not a floating tensor, or a number is not an integer.
            ValueError: ``block``, ``bits`` or ``spatial`` is out of range.
        """
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            came = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"compress needs a float tensor of 16, 32 or 64 bits, got {came}")
        spatial = default_spatial(x.dim()) if spatial is None else _whole("spatial", spatial)
        block = None if block is None else _whole("block", block)
        bits = _whole("bits", bits)
        _check_numbers(block, bits, spatial, x.dim())
        return cls(tuple(x.shape), x.dtype, block, bits, spatial, _is_channels_last(x))

    def check(self) -> None:
        """Raise unless the numbers are those of some activations.

        Raises:
            TypeError: ``dtype`` is not floating.
            ValueError: ``shape``, ``block``, ``bits`` or ``spatial`` is out of range, or tensors of
                so many dimensions are never channels last.
        """
        if self.dtype not in FLOATS:
            raise TypeError(f"activations must be floats of 16, 32 or 64 bits, got {self.dtype}")
        if min(self.shape, default=0) < 0:
            raise ValueError(
                f"the shape of activations must have no negative size, got {self.shape}"
            )
        _check_numbers(self.block, self.bits, self.spatial, len(self.shape))
        if self.is_channels_last and len(self.shape) not in _FORMATS:
            raise ValueError(
                f"only tensors of {list(_FORMATS)} dimensions may be channels last, got {self.shape}"
            )

    @cached_property
    def memory_format(self) -> torch.memory_format:
        """Torch's name of the order in memory."""
        return _FORMATS[len(self.shape)] if self.is_channels_last else torch.contiguous_format

    @cached_property
    def sides(self) -> tuple[int, int, int]:
        """Depth, height and width of a plane; those it has not are 1."""
        sides = self.shape[len(self.shape) - self.spatial :]
        return (1,) * (3 - self.spatial) + tuple(sides)  # pyright: ignore[reportReturnType]

    @cached_property
    def elements(self) -> int:
        """Of a plane."""
        return math.prod(self.sides)

    @cached_property
    def planes(self) -> int:
        """Of the activations; none where they have no elements."""
        count = math.prod(self.shape[: len(self.shape) - self.spatial])
        return count if self.elements > 0 else 0

    @cached_property
    def edges(self) -> tuple[int, int, int]:
        """Depth, height and width of a whole block."""
        depth, height, width = (side if self.block is None else self.block for side in self.sides)
        sides = self.sides
        return min(depth, sides[0]), min(height, sides[1]), min(width, sides[2])

    @cached_property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks along depth, height and width; those at the edge are cut."""
        edges, sides = self.edges, self.sides
        return (
            -(sides[0] // -max(edges[0], 1)),
            -(sides[1] // -max(edges[1], 1)),
            -(sides[2] // -max(edges[2], 1)),
        )

    @cached_property
    def slots(self) -> int:
        """How many partial sums a block's sum has; see ``reference``."""
        return min(_MAX_SLOTS, 1 << max(0, self.edges[2] - 1).bit_length())

    @cached_property
    def inverses(self) -> tuple[tuple[float, float], ...]:
        """For each side, 1 over the edge of a whole block, and of the last one."""
        return tuple(
            (1.0 / edge, 1.0 / (side - edge * (count - 1)))
            for side, edge, count in zip(self.sides, self.edges, self.blocks, strict=True)
        )

    @cached_property
    def geometry(
        self,
    ) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int], int]:
        """Sides, edges, blocks and slots for a kernel: without means, a plane is one row."""
        if self.block is None:
            row = 1, 1, self.elements
            return row, row, (1, 1, 1), 1
        return self.sides, self.edges, self.blocks, self.slots

    @cached_property
    def planes_of_whole_bytes(self) -> int:
        """Return how many planes have codes that end at a whole byte: 1, 2, 4 or 8."""
        return 8 // math.gcd(8, self.elements * self.bits)

    @cached_property
    def inverse_levels(self) -> float:
        """1 over the largest code."""
        return 1 / max(1, 2**self.bits - 1)

    @cached_property
    def is_one_pixel(self) -> bool:
        """Whether each plane is one element, its own mean, and nothing else is kept."""
        return self.elements == 1 and self.block is not None

    @cached_property
    def has_codes(self) -> bool:
        """Whether residuals are kept."""
        return self.bits > 0 and not self.is_one_pixel

    @cached_property
    def means_shape(self) -> tuple[int, int]:
        """Of the block means."""
        return self.planes, 0 if self.block is None else math.prod(self.blocks)

    @cached_property
    def codes_shape(self) -> tuple[int]:
        """Bytes of the codes: they lie one behind the other through the whole tensor."""
        elements = self.planes * self.elements if self.has_codes else 0
        return ((elements * self.bits + 7) // 8,)

    @cached_property
    def ranges_shape(self) -> tuple[int, int]:
        """Of the smallest residuals and steps."""
        return self.planes if self.has_codes else 0, 2


@dataclass(frozen=True)
class Compressed:
    """Activations in few bits; ``division.decompress`` gives them back.

    To take it apart and put it together: ``Compressed(*compressed.tensors, compressed.layout)``.

    Args:
        means: Block means, bfloat16, shape ``(planes, blocks)``.
        codes: Quantised residuals, uint8, LSB first, in row-major order of the activations.
        ranges: Smallest residual and step of each plane, bfloat16, shape ``(planes, 2)``.
        layout: The rest: plain numbers.
    """

    means: Tensor
    codes: Tensor
    ranges: Tensor
    layout: Layout

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means, codes and ranges."""
        return self.means, self.codes, self.ranges

    @property
    def size_bytes(self) -> int:
        """Bytes of the three tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the activations."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        return self.layout.dtype

    def without_means(self) -> "Compressed":
        """Return the high-frequency part alone: residuals, without the means they belong to.

        Raises:
            ValueError: There are no residuals.
        """
        if not self.layout.has_codes:
            raise ValueError(
                f"these activations have no residuals: shape {self.shape}, {self.layout}"
            )
        means = self.means.new_empty((self.layout.planes, 0))
        return Compressed(means, self.codes, self.ranges, replace(self.layout, block=None))


def default_spatial(dimensions: int) -> int:
    """Return how many trailing dimensions make up a plane: batch and channels do not."""
    return dimensions if dimensions < 2 else max(1, min(dimensions - 2, 3))


def _is_channels_last(x: Tensor) -> bool:
    if x.dim() not in _FORMATS or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=_FORMATS[x.dim()])


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def _check_numbers(block: int | None, bits: int, spatial: int, dimensions: int) -> None:
    if block is not None and block < 1:
        raise ValueError(f"block must be 1 or more, or None for no means, got block={block}")
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, got bits={bits}")
    if block is None and bits == 0:
        raise ValueError("activations without means and bits keep nothing, got block=None, bits=0")
    if not 0 <= spatial <= min(3, dimensions):
        raise ValueError(
            f"spatial must be 0 to {min(3, dimensions)} for a tensor of {dimensions} dimensions, "
            f"got spatial={spatial}"
        )
