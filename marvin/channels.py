"""Fixed point whose point is another in each channel of a weight."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint

__all__ = ["ChannelFormat", "channel_format", "scale_of"]

_LONGEST_FL = 31


@dataclass(frozen=True)
class ChannelFormat:
    """A word length for all channels, the first dimension, and a fractional length for each.

    Args:
        fmt: Of channels whose shift is 0.
        shifts: How many fractional bits more each channel has, 0 or more.
    """

    fmt: FixedPoint
    shifts: tuple[int, ...]

    @property
    def wl(self) -> int:
        """Word length, bits."""
        return self.fmt.wl

    @property
    def fl(self) -> int:
        """Fewest fractional bits of a channel."""
        return self.fmt.fl

    def channel(self, index: int) -> FixedPoint:
        """Return the format of one channel."""
        return FixedPoint(self.wl, self.fl + self.shifts[index], self.fmt.symmetric)

    def whole(self) -> FixedPoint:
        """Return the shortest format that has every value of every channel.

        Raises:
            ValueError: It would take more than 32 bits.
        """
        most = max(self.shifts)
        return FixedPoint(self.wl + most, self.fl + most)


def channel_format(fmt: FixedPoint, lengths: Sequence[int | None]) -> ChannelFormat:
    """Return a format whose channels use the integer bits that they do not need as fractional ones.

    Args:
        fmt: Of a channel that needs them all.
        lengths: Integer bits that each channel needs, without the sign; None where all is 0.
    """
    most = _LONGEST_FL - fmt.fl
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
