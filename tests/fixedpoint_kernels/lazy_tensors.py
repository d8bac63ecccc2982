"""Give each function tensors whose memory is not what they are; run by test_memory.py."""

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fixedpoint_kernels as fk
from fixedpoint_kernels import division, histogram, observer
from fixedpoint_kernels.few_bit import named, operators

FMT = fk.FixedPoint(8, 4)
VALUES = torch.linspace(-3, 3, 48).view(6, 8)
CODES = torch.arange(-8, 8, dtype=torch.int8)
TABLE = operators.register(named.table_of(*named.resolve("gelu"), 3, "uniform"))
PLANES, KEPT = operators.encode(VALUES, TABLE), division.compress(VALUES)
STE_MASK = observer.round_and_observe(VALUES, FMT)[1]


class Wrapper(torch.Tensor):
    """A subclass that holds its values elsewhere."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError("only its own operators can read it")


def negated(x):
    return torch.complex(torch.zeros(x.shape), -x).conj().imag


def negated_without_gaps(x):
    return torch._neg_view(-x)  # as z.conj().imag of one element


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def freed_behind_an_offset(x):
    x = torch.cat([x.new_ones(64), x.flatten()])[64:].view(x.shape)
    x.untyped_storage().resize_(0)
    return x


def freed_with_gaps(x):
    x = torch.stack([x, x], -1)[..., 0]
    x.untyped_storage().resize_(0)
    return x


def one_byte_short(x):
    x = x.clone()
    x.untyped_storage().resize_(x.nbytes - 1)
    return x


def zero(x):
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)


def zero_behind_an_offset(x):
    return torch._efficientzerotensor((x.numel() + 9,), dtype=x.dtype)[9:].view(x.shape)


def nested(x):
    return torch.nested.nested_tensor([x.flatten()[:3], x.flatten()[3:]])


def jagged(x):
    parts = [x.flatten()[:3], x.flatten()[3:]]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def fake(x):
    return FakeTensorMode().from_tensor(x)


def batched(x):
    """Return a tensor that ``torch.func.vmap`` handed to a function, and took away again."""
    seen = []
    torch.func.vmap(lambda y: (seen.append(y), y)[1])(x[None])
    return seen[0]


KINDS = [
    negated,
    negated_without_gaps,
    freed,
    freed_behind_an_offset,
    freed_with_gaps,
    one_byte_short,
    zero,
]
KINDS += [zero_behind_an_offset, nested, jagged, fake, torch.Tensor.to_sparse, Wrapper]
KINDS += [batched, torch._to_functional_tensor, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn]


OF_THE_DISPATCHER = batched, fake, Wrapper, nested, jagged, torch._to_functional_tensor
"""What torch takes apart before an operator sees it, or refuses in its own words."""

OPERATORS = "few_bit encode", "few_bit decode", "planes", "compress", "means", "codes", "ranges"


def many(x):
    return fk.quantize_many([VALUES.clone(), x], [FMT, FMT])


def many_in_place(x):
    return fk.quantize_many([x, VALUES.clone()], [FMT, FMT], out=[x, torch.empty(6, 8)])


def many_to(out):
    return fk.quantize_many([VALUES, VALUES], [FMT, FMT], out=[torch.empty(6, 8), out])


def of_parts(i):
    def decompress(x):
        parts = list(KEPT.tensors)
        parts[i] = x
        return division.decompress(division.Compressed(*parts, KEPT.layout))

    return KEPT.tensors[i], decompress


FUNCTIONS = {
    "quantize": (VALUES, lambda x: fk.quantize(x, FMT)),
    "quantize, bfloat16": (VALUES.bfloat16(), lambda x: fk.quantize(x, FMT)),
    "quantize, out": (VALUES, lambda out: fk.quantize(VALUES, FMT, out=out)),
    "quantize_with_mask": (VALUES, lambda x: fk.quantize_with_mask(x, FMT)),
    "encode": (VALUES, lambda x: fk.encode(x, FMT)),
    "quantize_many": (VALUES, many),
    "quantize_many in place": (VALUES, many_in_place),
    "quantize_many, out": (VALUES, many_to),
    "quantize_block": (VALUES, lambda x: fk.quantize_block(x, fk.BlockFloat(8))),
    "pack": (CODES, lambda x: fk.pack(x, 4)),
    "unpack": (fk.pack(CODES, 4), lambda x: fk.unpack(x, 4, 16)),
    "round_and_observe": (VALUES, lambda x: observer.round_and_observe(x, FMT)),
    "mask_and_observe": (VALUES, lambda x: observer.mask_and_observe(x, STE_MASK, clip=True)),
    "ste_mask": (STE_MASK, lambda x: observer.mask_and_observe(VALUES, x, clip=True)),
    "histogram": (VALUES, lambda x: fk.histogram_candidates(x, [FMT], 10)),
    "expected": (VALUES, lambda x: fk.histogram_candidates(x, [FMT], 10, rounding="expected")),
    "bins": (VALUES, lambda x: histogram.bins_of(x, 10)),
    "few_bit encode": (VALUES, lambda x: operators.encode(x, TABLE)),
    "few_bit decode": (VALUES, lambda x: operators.decode(x, PLANES, TABLE, torch.float32)),
    "planes": (PLANES, lambda x: operators.decode(VALUES, x, TABLE, torch.float32)),
    "compress": (VALUES, lambda x: division.compress(x).tensors),
    "means": of_parts(0),
    "codes": of_parts(1),
    "ranges": of_parts(2),
}


NEGATED = negated, negated_without_gaps


def made(kind, x):
    """Return a tensor of a kind, or None where torch has none of such values."""
    if kind in NEGATED and not x.is_floating_point():
        return None
    try:
        return kind(x.clone())
    except Exception:
        return None


def is_lazy(x):
    return isinstance(x, FakeTensor) or (
        isinstance(x, torch.Tensor) and torch._is_functional_tensor(x)
    )


def what_is_wrong(function, x, lazy, kind, is_operator):
    """Return None where the result is right, or the refusal names the reason."""
    try:
        result = function(lazy)
    except (TypeError, ValueError) as error:
        is_named = any(word in str(error) for word in ("memory", "storage", "dense"))
        return None if is_named and kind not in NEGATED else f"refused: {error}"
    except Exception as error:
        if is_operator and kind in OF_THE_DISPATCHER:
            return None
        return f"{type(error).__name__}: {error}".splitlines()[0]
    parts = result if isinstance(result, tuple | list) else [result]
    if all(map(is_lazy, parts)):
        return None  # torch computed shapes alone, or will compute when it is asked to
    if kind not in (*NEGATED, zero, zero_behind_an_offset):
        return "taken"
    expected = function(x.clone() if kind in NEGATED else torch.zeros_like(x))
    expected = expected if isinstance(expected, tuple | list) else [expected]
    same = [
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(parts, expected, strict=True)
    ]
    return None if all(same) else "another result"


def main():
    count, wrong = 0, []
    for name, (x, function) in FUNCTIONS.items():
        for kind in KINDS:
            lazy = made(kind, x)
            if lazy is not None:
                print(name, getattr(kind, "__name__", kind), flush=True)
                reason = what_is_wrong(function, x, lazy, kind, name in OPERATORS)
                wrong += [f"{name}, {kind.__name__}: {reason}"] if reason else []
                count += 1
    print(*wrong, sep="\n")
    print(f"{count} cases")
    sys.exit(bool(wrong) or count < 250)


if __name__ == "__main__":
    main()
