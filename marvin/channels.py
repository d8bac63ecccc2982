"""Fixed point whose point is another in each channel of a weight."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.formats import LONGEST_FL

__all__ = ["ChannelFormat", "channel_format", "scale_of"]


@dataclass(frozen=True)
class ChannelFormat:
    """A word length for all channels, the first dimension, and a fractional length for each.

    Args:
        fmt: Of channels whose shift is 0.
        shifts: How many fractional bits more each channel has, 0 or more; at least one channel.

    Raises:
        TypeError: ``fmt`` is no ``FixedPoint``.
        ValueError: ``shifts`` are not a tuple of whole numbers as above.
    """

    fmt: FixedPoint
    shifts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.fmt, FixedPoint):
            raise TypeError(
                f"fmt must be a FixedPoint, such as FixedPoint(8, 4), got {self.fmt!r:.60}"
            )
        is_known = isinstance(self.shifts, tuple) and {*map(type, self.shifts)} == {int}
        if not is_known or min(self.shifts) < 0:
            raise ValueError(
                "shifts must be a tuple of a whole number for each channel, 0 or more, "
                f"got {self.shifts!r:.60}"
            )

    @property
    def wl(self) -> int:
        """Word length, bits."""
        return self.fmt.wl

    @property
    def fl(self) -> int:
        """Fewest fractional bits of a channel."""
        return self.fmt.fl

    def channel(self, index: int) -> FixedPoint:
        """Return the format of one channel.

        Raises:
            IndexError: There is no such channel.
        """
        if not -len(self.shifts) <= index < len(self.shifts):
            raise IndexError(
                f"index must be that of one of {len(self.shifts)} channels, got {index}"
            )
        return replace(self.fmt, fl=self.fl + self.shifts[index])

    def whole(self) -> FixedPoint:
        """Return the shortest format that has every value of every channel.

        Raises:
            ValueError: It would take more than 32 bits.
        """
        most = max(self.shifts)
        return replace(self.fmt, wl=self.wl + most, fl=self.fl + most, symmetric=False)


def channel_format(fmt: FixedPoint, lengths: Sequence[int | None]) -> ChannelFormat:
    """Return a format whose channels use the integer bits that they do not need as fractional ones.

    Args:
        fmt: Of a channel that needs them all.
        lengths: Integer bits that each channel needs, without the sign; None where all is 0.
    """
    most = LONGEST_FL - fmt.fl
    spare = (0 if bits is None else fmt.il - bits for bits in lengths)
    return ChannelFormat(fmt, tuple(min(max(bits, 0), most) for bits in spare))


def scale_of(fmt: ChannelFormat, x: Tensor, offset: int = 0) -> Tensor:
    """Return ``2**shift`` of each channel, to be multiplied with ``x``: exact, but for overflow.

    Args:
        fmt: The format.
        x: A tensor, or the part of one that begins at ``offset`` and has whole channels.
        offset: In elements.
    """
    first = offset * len(x) // x.numel() if x.numel() else 0
    shifts = fmt.shifts[first : first + len(x)]
    return _scales(shifts, x.device).view(-1, *[1] * (x.ndim - 1))


@lru_cache(maxsize=1024)
def _scales(shifts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(shifts, dtype=torch.float32, device="cpu").exp2().to(device)
