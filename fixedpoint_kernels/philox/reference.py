"""Philox-4x32-10 in plain PyTorch: the definition that the kernels are tested against."""

import operator
from typing import NamedTuple

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10


class Key(NamedTuple):
    """Which noise a tensor gets: the stream of a seed, from element ``offset`` on."""

    seed: int
    stream: int
    offset: int = 0

    @classmethod
    def checked(cls, seed: int, stream: int, offset: int = 0) -> "Key":
        """Return a key.

        Raises:
            TypeError: One of them is not an integer.
            ValueError: One of them is below 0, or above 2**63 - 1 (``offset``: 2**62 - 1).
        """
        try:
            key = cls(operator.index(seed), operator.index(stream), operator.index(offset))
        except TypeError:
            raise TypeError(
                f"seed, stream and offset must be integers, got {seed=}, {stream=}, {offset=}: write "
                "int(...)"
            ) from None
        if not (0 <= key.seed < 2**63 and 0 <= key.stream < 2**63):
            raise ValueError(f"seed and stream must be 0 to 2**63 - 1, got {seed=}, {stream=}")
        if not 0 <= key.offset < 2**62:  # there is room for positions above
            raise ValueError(f"offset must be 0 to 2**62 - 1, got {offset=}")
        return key

    @property
    def lead(self) -> int:
        """Lanes of the first noise block that belong to elements before ``offset``."""
        return self.offset & 3

    def words(self) -> tuple[int, int, int, int]:
        """Return seed and stream as 32-bit words, low halves first."""
        return self.seed & _MASK, self.seed >> 32, self.stream & _MASK, self.stream >> 32


def uniform(n: int, key: Key, device: torch.device | str = "cpu") -> Tensor:
    """Draw ``n`` float32 values in [0, 1), shape ``(n,)``, those from ``key.offset`` on."""
    return (words(n, key, device) >> 8).to(torch.float32) * 2.0**-24


def words(n: int, key: Key, device: torch.device | str = "cpu") -> Tensor:
    """Draw ``n`` 32-bit words, shape ``(n,)``, int64; see ``fixedpoint_kernels.philox``."""
    first = key.offset >> 2
    last = (key.offset + n + 3) >> 2
    block = torch.arange(first, last, dtype=torch.int64, device=device)
    c0, c1 = block & _MASK, block >> 32
    k0, k1, s0, s1 = key.words()
    c2, c3 = torch.full_like(block, s0), torch.full_like(block, s1)
    for _ in range(_ROUNDS):
        hi0, lo0 = _multiply(c0, _MULTIPLIERS[0])
        hi1, lo1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return torch.stack([c0, c1, c2, c3], dim=1).flatten()[key.lead :][:n]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Multiply uint32 values held in int64; return the high and low 32 bits of the product."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    carry = high + (low >> 16)
    return carry >> 16, (carry << 16 | low & 0xFFFF) & _MASK
