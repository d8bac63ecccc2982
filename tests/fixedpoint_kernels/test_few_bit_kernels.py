"""Encoding and decoding: three executions, the same bits."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels import few_bit
from fixedpoint_kernels.few_bit import cpu, gpu, named, operators, reference
from fixedpoint_kernels.few_bit.table import number
from fixedpoint_kernels.llvm import lookup
from fixedpoint_kernels.llvm.entries import entries_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 3e38]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def table_of(name, bits):
    return named.table_of(*named.resolve(name), bits, "uniform")


def planes_of(x, table, implementation=reference):
    tiles = (x.numel() + 1023) // 1024
    planes = torch.empty(tiles * 32 * table.bits, dtype=torch.int32, device=x.device)
    implementation.encode(x, planes, table)
    return planes


EXECUTIONS = (cpu, "cpu"), (gpu, DEVICE)


def assert_same(x, table, grad=None, dtype=torch.float32, executions=EXECUTIONS):
    """Compare both kernels with the reference, on poisoned memory."""
    grad = torch.randn(x.numel()) if grad is None else grad
    planes = planes_of(x, table)
    expected = torch.empty(x.numel(), dtype=dtype)
    reference.decode(grad, planes, expected, table)
    for implementation, device in executions:
        again = planes_of(x.to(device), table, implementation)
        torch.testing.assert_close(again.cpu(), planes, rtol=0, atol=0)
        product = torch.empty(x.numel(), dtype=dtype, device=device)
        implementation.decode(grad.to(device), again, product, table)
        torch.testing.assert_close(product.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    return expected


def with_special(n):
    x = 4 * torch.randn(n)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)[:n]
    return x


def test_tiny_numbers_of_bfloat16():
    """Below float32's normal numbers, where the interpreter's own conversion loses bits."""
    tiny = torch.tensor([-6.4e-39, 1e-39, -1e-40, 9.2e-41, 1.1e-38]).bfloat16()
    assert tiny.count_nonzero() == 5
    for dtype in (torch.bfloat16, torch.float64):
        assert_same(torch.ones(5), table_of("tanh", 3), grad=tiny, dtype=dtype)
    borders = tiny.float().sort().values.numpy()
    table = number(borders, np.arange(6), np.arange(1, 7, dtype=np.float32))
    assert_same(tiny, table, grad=torch.ones(5))


@pytest.mark.parametrize("name", ["gelu", "tanh", "relu6", "selu"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_kernels_equal_the_reference(name, bits):
    x, table = with_special(1027), table_of(name, bits)
    product = assert_same(x, table, grad=torch.ones(1027))
    assert np.array_equal(product.numpy(), table(x.numpy()))


@pytest.mark.parametrize("n", [1, 5, 1023, 1024, 2048, 5000])
def test_every_size(n):
    assert_same(with_special(n), table_of("silu", 3))


@settings(max_examples=40 * settings().max_examples // 100)
@given(data=st.data())
def test_kernels_equal_the_reference_everywhere(data):
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    borders = sorted(set(data.draw(st.lists(finite, min_size=1, max_size=40))))
    levels = data.draw(st.lists(finite, min_size=2, max_size=20))
    ranks = data.draw(
        st.lists(
            st.integers(0, len(levels) - 1), min_size=len(borders) + 1, max_size=len(borders) + 1
        )
    )
    table = number(np.array(borders), np.array(ranks), np.array(levels))
    at_borders = st.sampled_from([*borders, *SPECIAL])
    x = data.draw(st.lists(st.one_of(st.floats(width=32), at_borders), min_size=1, max_size=60))
    product = assert_same(torch.tensor(x), table, grad=torch.ones(len(x)))
    assert np.array_equal(product.numpy(), table(np.array(x, np.float32)))


@pytest.mark.parametrize(
    ("borders", "is_indexed"),
    [
        (np.linspace(-9, 9, 32), True),  # one more than registers hold
        (np.cumsum(np.random.default_rng(0).uniform(0.1, 1, 511)) - 100, True),
        (np.geomspace(1e-40, 3e38, 200), False),  # most of them in one part of the axis
        (np.linspace(-3e38, 3e38, 40), False),  # the difference is not a float32
        (np.arange(1, 60) * 1e-45, False),  # nor is its reciprocal
        (np.linspace(1, 1 + 63 * 2**-23, 64), True),
    ],
    ids=["least", "most", "far", "wide", "narrow", "neighbours"],
)
def test_many_borders(borders, is_indexed):
    borders = borders.astype(np.float32)
    ranks = np.arange(len(borders) + 1) % 200
    table = number(borders, ranks, np.linspace(-1, 1, 200))
    assert (lookup.index_of(table) is not None) == is_indexed
    beside = [np.nextafter(borders, np.float32(to)) for to in (-np.inf, np.inf)]
    x = np.concatenate([borders, *beside, np.array(SPECIAL, np.float32)])
    product = assert_same(torch.from_numpy(x), table, grad=torch.ones(len(x)))
    assert np.array_equal(product.numpy(), table(x))


@pytest.mark.parametrize("has_avx512", [True, False])
@pytest.mark.parametrize(
    ("name", "bits"), [("gelu", 3), ("gelu", 4), ("sigmoid", 4), ("softsign", 4)]
)
def test_up_to_31_borders_with_and_without_permutations(monkeypatch, name, bits, has_avx512):
    if has_avx512 and not lookup.has_avx512():
        pytest.skip("needs AVX-512")
    for module in (lookup, cpu):
        monkeypatch.setattr(module, "has_avx512", lambda: has_avx512)
    monkeypatch.setattr(cpu, "_encoding", lookup.encoding_of)  # without what is remembered
    monkeypatch.setattr(cpu, "_decoding", cpu._decoding.__wrapped__)
    table = table_of(name, bits)
    beside = [np.nextafter(table.borders, np.float32(to)) for to in (-np.inf, np.inf)]
    x = np.concatenate([table.borders, *beside, np.array(SPECIAL, np.float32)])
    assert_same(torch.from_numpy(x), table, executions=EXECUTIONS[:1])


@pytest.mark.parametrize("weight", named.SHIPPED_WEIGHTS)
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "tanhshrink", "softsign"])
def test_codes_of_magnitudes(name, weight):
    """The same on both sides of 0: a negative number at a border lies beyond it, a positive one does not."""
    bits = 3 if name == "softsign" else 4
    table = named.table_of(*named.resolve(name), bits, weight)
    entries, _ = cpu._encoding(table)
    if entries_of(table) and weight == "uniform":
        assert [own.dtype for own in entries] == [np.int32]
    beside = [np.nextafter(table.borders, np.float32(to)) for to in (-np.inf, np.inf)]
    x = np.concatenate([table.borders, *beside, np.array(SPECIAL, np.float32)])
    nan = np.array([0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    x = torch.from_numpy(np.concatenate([x, nan, np.linspace(-12, 12, 4001, dtype=np.float32)]))
    assert_same(x, table, executions=EXECUTIONS[:1])


def test_tables_that_only_look_even():
    borders = np.array([-8, -7.7, -1, -0.7, -0.4, 0.4, 0.7, 1, 7.7, 8], np.float32)
    ranks = np.array([5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 6])
    table = number(borders, ranks, np.linspace(-1, 1, 7))
    entries = entries_of(table)
    assert entries is None or {own.dtype for own in entries} == {np.dtype(np.uint32)}
    beside = [np.nextafter(borders, np.float32(to)) for to in (-np.inf, np.inf)]
    assert_same(torch.from_numpy(np.concatenate([borders, *beside])), table)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_without_permutations(monkeypatch, bits):
    monkeypatch.setattr(cpu, "has_avx512", lambda: False)
    monkeypatch.setattr(cpu, "_decoding", cpu._decoding.__wrapped__)
    assert_same(with_special(1100), table_of("gelu", bits), executions=EXECUTIONS[:1])


@pytest.mark.parametrize("weight", named.SHIPPED_WEIGHTS)
@pytest.mark.parametrize("name", named.SHIPPED)
def test_no_shipped_table_needs_a_search(name, weight):
    for bits in range(5, 9):
        table = named.table_of(*named.resolve(name), bits, weight)
        assert len(table.borders) <= 31 or lookup.index_of(table) is not None


@pytest.mark.parametrize(("x", "out"), list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_every_dtype(x, out):
    for bits in (3, 6):
        values, grad = with_special(1030).to(x), torch.randn(1030).to(out)
        assert_same(values, table_of("gelu", bits), grad=grad, dtype=x)


@pytest.mark.parametrize("bits", [1, 3, 4, 6])
def test_the_parallel_kernel_equals_the_reference(bits):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same(with_special(60_001), table_of("gelu", bits), executions=EXECUTIONS[:1])
    finally:
        torch.set_num_threads(threads)


def test_layout():
    """Element 32 * row + column of a tile is bit ``row`` of the words of ``column``."""
    x = torch.zeros(2048)
    x[1024 + 32 * 5 + 7] = 1.0
    planes = planes_of(x, table_of("relu", 1), cpu)
    assert planes.nonzero().tolist() == [[32 + 7]]
    assert planes[32 + 7] == 1 << 5


def test_a_level_of_zero_gives_zero_like_torch():
    table = table_of("relu", 1)
    grad = torch.tensor([float("inf"), float("nan"), float("inf")])
    product = assert_same(torch.tensor([-1.0, -1.0, 1.0]), table, grad=grad)
    assert product.tolist() == [0.0, 0.0, float("inf")]


def test_operators():
    x = with_special(1500).view(3, 500)
    key = operators.register(table_of("gelu", 3))
    torch.library.opcheck(torch.ops.fixedpoint_kernels.few_bit_encode.default, (x, key))
    planes = operators.encode(x, key)
    decode = torch.ops.fixedpoint_kernels.few_bit_decode.default
    torch.library.opcheck(decode, (torch.randn(3, 500), planes, key, torch.bfloat16))
    transposed = operators.encode(x.t(), key)
    assert torch.equal(transposed, operators.encode(x.t().contiguous(), key))
    assert operators.encode(x[:0], key).shape == (0,)
    with pytest.raises(TypeError, match=r"floating tensor, got torch\.int64"):
        operators.encode(x.long(), key)


def test_levels_of_neighbours_differ_in_one_bit():
    table = few_bit.solve("gelu", 4)
    codes = table.codes.astype(int)
    assert {int(c).bit_count() for c in codes[1:] ^ codes[:-1]} == {1}


@pytest.mark.gpu
def test_same_bits_on_both_devices():
    x, key = with_special(100_003), operators.register(table_of("gelu", 3))
    planes = operators.encode(x.cuda(), key)
    assert torch.equal(planes.cpu(), operators.encode(x, key))
    grad = torch.randn(100_003)
    product = operators.decode(grad.cuda(), planes, key, torch.float32)
    assert torch.equal(product.cpu(), operators.decode(grad, planes.cpu(), key, torch.float32))
