"""Call the registered operators by hand with whatever fits their schema; run by test_memory.py.

What they take must be what the reference makes of it; all else must end in an exception.
"""

import random

import torch

from fixedpoint_kernels import FixedPoint, division, observer, pack, unpack
from fixedpoint_kernels.division import reference as divided
from fixedpoint_kernels.few_bit import named, operators
from fixedpoint_kernels.few_bit import reference as coded
from fixedpoint_kernels.packing import reference as packed_by
from fixedpoint_kernels.philox import Key

OPS = torch.ops.fixedpoint_kernels
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8]
DTYPES += [torch.bool, torch.complex64, torch.int64]
TABLES = [
    operators.register(named.table_of(*named.resolve("gelu"), bits, "uniform")) for bits in (1, 3)
]
NUMBERS = [-(2**62), -9, -1, 0, 1, 2, 3, 4, 8, 31, 2**31, 2**40, 2**62]
ROLL = random.Random(0)


def size():
    return ROLL.choice([0, 1, 2, 3, 7, 31, 32, 96, 128, 1023, 1024, 1025])


def tensor(dtype=None, shape=None):
    """Return a tensor with any strides: with gaps, expanded, transposed."""
    if shape is None:
        shape = [size() for _ in range(ROLL.choice([1, 1, 1, 2, 2, 3, 4]))]
    while torch.Size(shape).numel() > 5000:
        shape = [max(1, n // 2) for n in shape]
    dtype = ROLL.choice(DTYPES) if dtype is None or ROLL.random() < 0.1 else dtype
    x = torch.randn(shape).mul(9).to(dtype)
    way = ROLL.random()
    if way < 0.2:
        x = torch.stack([x, x], -1)[..., 0]
    elif way < 0.3 and x.dim() > 1:
        x = x.transpose(0, -1)
    elif way < 0.4 and x.dim():
        x = x[:1].expand(x.shape)
    return x.to("meta") if ROLL.random() < 0.05 else x


def key():
    return ROLL.choice([*TABLES, *TABLES, *TABLES, "no such table", ""])


def encode():
    x, table = tensor(torch.float32), key()
    got = OPS.few_bit_encode(x, table)
    expected = torch.empty_like(got)
    coded.encode(x.contiguous(), expected, operators.registered(table))
    return got, expected


def decode():
    grad, table, dtype = tensor(torch.float32), key(), ROLL.choice(DTYPES[:5])
    words = -(-grad.numel() // 1024) * 32 * (1 if table == TABLES[0] else 3)
    words = ROLL.choice([words, words, words, words - 1, words + 32, words // 2, 0])
    planes = tensor(torch.int32, [max(words, 0)])
    got = OPS.few_bit_decode(grad, planes, table, dtype)
    expected = torch.empty_like(got)
    coded.decode(grad.contiguous(), planes.contiguous(), expected, operators.registered(table))
    return got, expected


def value_and_encode():
    kind = ROLL.choice(["gelu", "elu", "nothing"])
    return OPS.few_bit_value_and_encode(tensor(torch.float32), key(), kind, 0.0, 0.0, 0.0)


def number(*usual):
    return ROLL.choice(usual) if ROLL.random() < 0.8 else ROLL.choice(NUMBERS)


def compress():
    x = tensor(torch.float32)
    numbers = number(8, None, 1000), number(2), number(0, 7), number(1), number(1, 0, 2)
    got = OPS.division_compress(x, *numbers)
    block, bits, seed, stream, spatial = numbers
    layout = division.Layout.checked(x, block, bits, spatial)
    if x.is_meta or layout.is_one_pixel or not layout.planes:
        return None
    expected = [torch.empty_like(part) for part in got]
    divided.compress(x.contiguous(), *expected, layout, Key(seed, stream))
    return got, tuple(expected)


def decompress():
    shape = [ROLL.choice([1, 2, 3, 8, 9, 17, 40]) for _ in range(ROLL.choice([1, 2, 3, 4]))]
    block, bits, spatial = ROLL.choice([8, None]), 2, ROLL.choice([1, min(2, len(shape))])
    layout = division.Layout(tuple(shape), torch.float32, block, bits, spatial)
    parts = []
    dtypes = torch.bfloat16, torch.uint8, torch.bfloat16
    for name, dtype in zip(("means", "codes", "ranges"), dtypes, strict=True):
        wanted = list(getattr(layout, f"{name}_shape"))
        if ROLL.random() < 0.1:
            wanted[ROLL.randrange(len(wanted))] = size()
        parts.append(tensor(dtype, wanted))
    if ROLL.random() < 0.2:
        shape[ROLL.randrange(len(shape))] = ROLL.choice(NUMBERS)
    rest = number(block), number(bits), number(spatial)
    numbers = shape, ROLL.choice(DTYPES[:5]), *rest, ROLL.random() < 0.3
    got = OPS.division_decompress(*parts, *numbers)
    layout = division.Layout(tuple(shape), *numbers[1:])
    if got.is_meta or layout.is_one_pixel or not layout.planes:
        return None
    expected = torch.empty(layout.shape, dtype=layout.dtype)
    divided.decompress(*(part.contiguous() for part in parts), expected, layout)
    return got, expected


def pack_codes():
    codes, bits = tensor(torch.int32), number(1, 3, 8, 32)
    got = pack(codes, bits)
    expected = torch.empty_like(got)
    packed_by.pack(codes.to(torch.int64).flatten(), expected, bits)
    return got, expected


def unpack_codes():
    bits, count = number(1, 3, 8), size()
    packed = tensor(torch.uint8, [-(-count * bits // 8) if 0 < bits < 33 else size()])
    shape = ROLL.choice([count, count, [count, 1], -1, [2**62, 2**62], [0, 2**62], 1.5])
    got = unpack(packed, bits, shape)
    expected = torch.empty_like(got)
    packed_by.unpack(packed.contiguous(), expected.view(-1), bits, True)
    return got, expected


def masked_gradient():
    grad = tensor(torch.float32)
    ste_mask = tensor(torch.uint8, list(grad.shape) if ROLL.random() < 0.7 else None)
    got = observer.mask_and_observe(grad, ste_mask, clip=True)
    expected = torch.where(ste_mask % 2 == 1, grad, 0)
    return got[0], expected


def observed_values():
    x = tensor(torch.float32)
    got = observer.round_and_observe(x, ROLL.choice([FixedPoint(8, 4), None, "<8, 4>"]))
    if x.is_meta:
        return None
    return got[2].sum(), torch.tensor(x.numel())


CALLS = encode, decode, decode, value_and_encode, compress, decompress, decompress
CALLS += pack_codes, unpack_codes, masked_gradient, observed_values


def main():
    taken = dict.fromkeys(CALLS, 0)
    refused = dict.fromkeys(CALLS, 0)
    for _ in range(3000):
        call = ROLL.choice(CALLS)
        try:
            found = call()
        except (TypeError, ValueError, RuntimeError, OverflowError, NotImplementedError):
            refused[call] += 1
            continue
        taken[call] += 1
        if found is not None:
            compare(call, *found)
    for call in CALLS:
        print(f"{call.__name__}: {taken[call]} taken, {refused[call]} refused")
    assert all(taken[call] > 20 for call in CALLS if call is not value_and_encode), taken
    assert all(refused.values())
    print(f"{sum(taken.values()) + sum(refused.values())} cases")


def compare(call, got, expected):
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple | list) else [(got, expected)]
    for actual, other in pairs:
        if not actual.is_meta:
            torch.testing.assert_close(
                actual, other, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{call.__name__}: {m}"
            )


if __name__ == "__main__":
    main()
