"""Where values lie: one array for each length of word, shared by values that are not needed together."""

from collections.abc import Sequence
from dataclasses import dataclass

from marvin.export.targets.c.words import bits_of, size_of

__all__ = ["Buffer", "Memory", "plan"]


@dataclass(eq=False)
class Buffer:
    """Memory of one value.

    Args:
        word: Its C type.
        count: Of codes.
        first: Step that writes it.
        last: Last step that reads it.
        offset: In its array, in codes; found by ``plan``.
    """

    word: str
    count: int
    first: int
    last: int
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes."""
        return self.count * size_of(self.word)


@dataclass(frozen=True)
class Memory:
    """All buffers.

    Args:
        counts: Length of the array of each word length, by bits.
        peak_bytes: Largest sum of buffers that are needed at one time: no plan needs less.
    """

    counts: dict[int, int]
    peak_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(count * bits // 8 for bits, count in self.counts.items())


def plan(buffers: Sequence[Buffer]) -> Memory:
    """Give each buffer its place, the largest first, at the lowest offset that is free all the time.

    There is an array for each length of word, because C allows no memory to have two types.
    """
    counts: dict[int, int] = {}
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: -b.count):
        bits = bits_of(buffer.word)
        others = [b for b in placed if bits_of(b.word) == bits]
        others = [b for b in others if b.first <= buffer.last and buffer.first <= b.last]
        buffer.offset = 0
        for other in sorted(others, key=lambda b: b.offset):
            if buffer.offset + buffer.count <= other.offset:
                break
            buffer.offset = max(buffer.offset, other.offset + other.count)
        counts[bits] = max(counts.get(bits, 0), buffer.offset + buffer.count)
        placed.append(buffer)
    times = {b.first for b in buffers}
    peaks = [sum(b.size_bytes for b in buffers if b.first <= t <= b.last) for t in times]
    return Memory(dict(sorted(counts.items())), max(peaks, default=0))
