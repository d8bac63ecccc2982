"""``pack`` and ``unpack``: one long integer of Python's is the definition."""

from random import Random

import numpy as np
import torch

import fixedpoint_kernels as fk
from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Failure

_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def pack(chance: Random) -> None:
    """Codes of any dtype, too wide ones among them, to bytes and back."""
    bits, n = chance.randint(1, 32), min(draw.size(chance), 20_000)
    dtype, signed = chance.choice(_DTYPES), chance.random() < 0.5
    raw = np.frombuffer(chance.randbytes(8 * n), np.uint64).astype(dtype)
    shape = draw.shape_of(chance, n)
    x = torch.from_numpy(raw.reshape(shape).copy())
    if not dtype.startswith("uint") or dtype == "uint8":
        x = draw.odd(chance, x)
    data = oracle.pack([int(code) for code in raw], bits)
    packed = fk.pack(x, bits)
    oracle.same(draw.content(packed), np.frombuffer(data, np.uint8), "pack")
    got = fk.unpack(packed, bits, shape, signed=signed)
    if got.dtype is not _smallest(bits, signed):
        raise Failure(f"unpack gave {got.dtype} for {bits} bits, signed={signed}")
    want = np.array(oracle.unpack(data, bits, n, signed), np.int64).reshape(shape)
    oracle.same(draw.content(got).astype(np.int64), want, "unpack")


def _smallest(bits: int, signed: bool) -> torch.dtype:
    if bits <= 8:
        return torch.int8 if signed else torch.uint8
    if bits <= 15 + signed:
        return torch.int16
    return torch.int32 if bits <= 31 + signed else torch.int64
