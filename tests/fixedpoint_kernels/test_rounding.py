import io
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels import (
    BlockFloat,
    FixedPoint,
    Minifloat,
    decode,
    encode,
    pack,
    quantize,
    quantize_block,
    quantize_many,
    quantize_with_mask,
    unpack,
)
from fixedpoint_kernels.memory import places_of
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding import cpu, gpu, keep_inside, reference
from fixedpoint_kernels.threads import is_parallel

FORMATS = [FixedPoint(2, 0), FixedPoint(8, 4), FixedPoint(8, -1), FixedPoint(16, 12)]
FORMATS += [FixedPoint(32, 31), FixedPoint(8, 4, symmetric=True)]
UNSIGNED = [FixedPoint(1, 0, signed=False), FixedPoint(6, 9, signed=False)]
UNSIGNED += [FixedPoint(8, -1, signed=False), FixedPoint(31, 12, signed=False)]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 0.5, -0.5, 1.5]
fls = st.integers(-31, 31)
formats = st.builds(FixedPoint, st.integers(2, 32), fls, st.booleans()) | st.builds(
    FixedPoint, st.integers(1, 31), fls, signed=st.just(False)
)
below_2_63 = st.integers(0, 2**63 - 1)
keys = st.builds(Key, below_2_63, below_2_63, st.integers(0, 2**62 - 1))


def run(implementation, x, fmt, rounding, key, *, dtype=None):
    y = torch.empty_like(x, dtype=dtype)
    inside = torch.empty_like(x, dtype=torch.bool)
    implementation.quantize(x, y, inside, fmt, rounding, key)
    return y, inside


def assert_same(implementation, x, fmt, rounding, key, *, dtype=None):
    actual = run(implementation, x, fmt, rounding, key, dtype=dtype)
    expected = run(reference, x, fmt, rounding, key, dtype=dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def values(shape, device="cpu"):
    x = torch.randn(shape) * 4
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)[: x.numel()]
    return x.to(device)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("fmt", FORMATS + UNSIGNED, ids=str)
@pytest.mark.parametrize("shape", [(1,), (1023,), (3, 7, 5), (2, 2049)], ids=str)
def test_kernels_equal_the_reference(shape, fmt, rounding, device):
    assert_same(cpu, values(shape), fmt, rounding, Key(7, 2**40 + 3))
    assert_same(gpu, values(shape, device), fmt, rounding, Key(7, 2**40 + 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int32], ids=str)
def test_kernels_equal_the_reference_in_other_types(dtype, device):
    fmt = FixedPoint(8, 4) if dtype is torch.int8 else FixedPoint(20, 11)
    x = values((1025,)).to(dtype if dtype.is_floating_point else torch.float32)
    assert_same(cpu, x, fmt, "stochastic", Key(1, 0), dtype=dtype)
    assert_same(gpu, x.to(device), fmt, "stochastic", Key(1, 0), dtype=dtype)


@pytest.mark.parametrize("fmt", [*UNSIGNED, FixedPoint(15, 7, signed=False)], ids=str)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_kernels_give_the_reference_s_unsigned_codes(fmt, rounding, device):
    x = torch.cat([values((1025,)), torch.rand(300) * 1.1 * fmt.max])
    dtype = encode(x[:1], fmt).dtype
    assert_same(cpu, x, fmt, rounding, Key(1, 0), dtype=dtype)
    assert_same(gpu, x.to(device), fmt, rounding, Key(1, 0), dtype=dtype)


def test_the_parallel_kernel_equals_the_serial_one():
    x = values((60_001,))
    assert_same(cpu, x, FORMATS[1], "stochastic", Key(3, 0))


@settings(max_examples=40 * settings().max_examples // 100)
@given(
    fmt=formats,
    key=keys,
    rounding=st.sampled_from(["stochastic", "nearest"]),
    x=st.lists(st.floats(width=32), min_size=1, max_size=9),
)
def test_kernels_equal_the_reference_everywhere(fmt, key, rounding, x):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert_same(cpu, torch.tensor(x), fmt, rounding, key)
    assert_same(gpu, torch.tensor(x, device=device), fmt, rounding, key)


@pytest.mark.parametrize("implementation", [cpu, gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_many_equals_one_by_one(implementation, rounding, device):
    where = "cpu" if implementation is cpu else device
    xs = [values((n,), where) for n in (1, 5000, 1024, 3)]
    fmts, ys = [*FORMATS[1:3], *UNSIGNED[:2]], [torch.empty_like(x) for x in xs]
    offsets = 0, 4097, 2**33 + 2, 131
    device = xs[0].device
    places = places_of(xs, ys)
    implementation.quantize_many(places, fmts, rounding, Key(5, 2**33), offsets, device)
    for j, (x, y, fmt) in enumerate(zip(xs, ys, fmts, strict=True)):
        expected, _ = run(reference, x, fmt, rounding, Key(5, 2**33 + j, offsets[j]))
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_many_takes_mixed_tensors_and_empty_lists():
    xs = [torch.randn(3, 4).t(), torch.randn(5).bfloat16(), torch.empty(0), torch.tensor(0.3)]
    ys = quantize_many(xs, [FORMATS[1]] * 4, seed=2, stream=9)
    for j, (x, y) in enumerate(zip(xs, ys, strict=True)):
        expected = quantize(x, FORMATS[1], seed=2, stream=9 + j)
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert quantize_many([], []) == []


@pytest.mark.parametrize("implementation", [reference, cpu, gpu], ids=["torch", "cpu", "gpu"])
def test_parts_of_a_tensor_are_rounded_as_the_whole(implementation, device):
    x = values((9500,), "cpu" if implementation is not gpu else device)
    whole, mask = run(reference, x, FORMATS[1], "stochastic", Key(7, 3, 2**34 - 9))
    for begin, end in [(0, 1), (1, 5), (5, 133), (133, 9216), (9216, 9500)]:
        key = Key(7, 3, 2**34 - 9 + begin)
        part, inside = run(implementation, x[begin:end].clone(), FORMATS[1], "stochastic", key)
        torch.testing.assert_close(part, whole[begin:end], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(inside, mask[begin:end], rtol=0, atol=0)


@settings(max_examples=30 * settings().max_examples // 100)
@given(cuts=st.lists(st.integers(0, 700), min_size=1, max_size=4), first=st.integers(0, 2**61))
def test_many_parts_are_rounded_as_the_whole(cuts, first):
    x, borders = torch.linspace(-9, 9, 700), sorted({0, 700, *cuts})
    whole = quantize(x, FORMATS[1], seed=1, offset=first)
    for begin, end in itertools.pairwise(borders):
        part = x[begin:end].clone()
        (many,) = quantize_many([part], [FORMATS[1]], seed=1, offsets=[first + begin])
        one = quantize(part, FORMATS[1], seed=1, offset=first + begin)
        torch.testing.assert_close((many, one), (whole[begin:end],) * 2, rtol=0, atol=0)


def test_other_offsets_are_other_noise():
    x = torch.full((4096,), 0.3)
    assert not torch.equal(quantize(x, FORMATS[1]), quantize(x, FORMATS[1], offset=4096))
    with pytest.raises(ValueError, match="offset=-1"):
        quantize(x, FORMATS[1], offset=-1)
    with pytest.raises(ValueError, match="2 offsets"):
        quantize_many([x], [FORMATS[1]], offsets=[0, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decode([1, 2], FixedPoint(8, 4)), r"got list: write torch\.as_tensor\(codes\)"),
        (
            lambda: decode(torch.tensor([1]), 8),
            r"the format must be a FixedPoint, such as .* got 8",
        ),
        (
            lambda: quantize_many(torch.ones(2), [FixedPoint(8, 4)]),
            "needs a list of tensors, got Ten",
        ),
        (
            lambda: quantize_many([torch.ones(2)], FixedPoint(8, 4)),
            "needs a list of formats, got Fix",
        ),
    ],
)
def test_what_is_no_tensor_list_or_format_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_many_refuses_other_lengths():
    with pytest.raises(ValueError, match="1 tensors, 2 formats, 1 outputs"):
        quantize_many([torch.ones(1)], FORMATS[:2])


def test_philox_known_answers():
    # Random123's kat_vectors for philox4x32-10; the counter holds (block, stream)
    zeros = reference.philox.words(4, Key(0, 0)).tolist()
    assert zeros == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0.03, 0),
        (0.032, 1 / 16),
        (7.99, 7.9375),
        (8.0, 7.9375),
        (-8.1, -8),
        (-0.03125, 0),
        (0.03125, 0),
        (0.09375, 2 / 16),
    ],
)
def test_golden_nearest_values(x, expected):
    y = quantize(torch.tensor([x]), FixedPoint(8, 4), rounding="nearest")
    assert y.item() == expected
    assert math.copysign(1, y.item()) == (1 if expected >= 0 else -1)  # never -0.0


@pytest.mark.parametrize("x", [0.03, -0.3, 2**20 / 16 + 0.25 / 16, -(2**18) + 0.03125])
def test_stochastic_rounding_is_unbiased(x):
    fmt, n = FixedPoint(32, 4), 100_000
    values = torch.full((n,), x)
    up = values[0].double().item() / fmt.lsb % 1
    mean = quantize(values, fmt, seed=1).double().mean().item()
    std = fmt.lsb * math.sqrt(up * (1 - up) / n)
    assert abs(mean - values[0].double().item()) < 5 * std


@given(fmt=formats, data=st.data(), key=keys)
def test_numbers_of_the_format_stay(fmt, data, key):
    code = data.draw(st.integers(max(fmt.min_code, -(2**24)), min(fmt.max_code, 2**24)))
    x = torch.full((5,), code * fmt.lsb)
    torch.testing.assert_close(
        quantize(x, fmt, seed=key.seed, stream=key.stream), x, rtol=0, atol=0
    )


@given(fmt=formats, x=st.floats(-1e9, 1e9, width=32), seed=st.integers(0, 99))
def test_error_is_below_one_step_or_saturated(fmt, x, seed):
    y = quantize(torch.tensor([x]), fmt, seed=seed).double().item()
    assert fmt.min <= y <= fmt.max
    assert y / fmt.lsb == round(y / fmt.lsb)
    if fmt.min <= x <= fmt.max and fmt.wl <= 25:
        assert abs(y - x) <= fmt.lsb * (1 if abs(x) < fmt.lsb else 1 - 2**-24)


@pytest.mark.parametrize(
    ("x", "expected"), [(-0.0, 0), (-0.3, 0), (-9.0, 0), (0.4, 0.5), (0.625, 0.5), (7.9, 3.75)]
)
def test_golden_unsigned_values(x, expected):
    y = quantize(torch.tensor([x]), FixedPoint(4, 2, signed=False), rounding="nearest")
    assert y.item() == expected
    assert math.copysign(1, y.item()) == 1


@given(fmt=formats, x=st.floats(width=32, allow_nan=False))
def test_codes_decode_to_the_rounded_value(fmt, x):
    x = torch.tensor([x])
    codes = encode(x, fmt, seed=4)
    dtypes = {1: torch.int8 if fmt.signed else torch.uint8, 2: torch.int16}
    spare = not fmt.signed and fmt.wl > 8  # int16 and int32 have a sign bit
    assert codes.dtype == dtypes.get(-(-(fmt.wl + spare) // 8), torch.int32)
    assert unpack(pack(codes, fmt.wl), fmt.wl, 1, signed=fmt.signed).tolist() == codes.tolist()
    assert fmt.min_code <= codes.item() <= fmt.max_code
    torch.testing.assert_close(decode(codes, fmt), quantize(x, fmt, seed=4), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("fmt", "values"),
    [(FixedPoint(32, 16), [1.5, -1000.25, 30000.0]), (FixedPoint(16, 16, signed=False), [0.9999])],
)
def test_codes_decode_to_what_a_narrow_dtype_holds(fmt, values, dtype):
    codes = encode(torch.tensor(values), fmt, rounding="nearest")
    wanted = torch.tensor([code * fmt.lsb for code in codes.tolist()], dtype=dtype)
    torch.testing.assert_close(decode(codes, fmt, dtype=dtype), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e5m2, None, "float32"])
def test_codes_decode_to_floats_alone(dtype):
    with pytest.raises(
        TypeError, match=r"dtype must be float32, float64, bfloat16 or float16, got"
    ):
        decode(torch.tensor([1]), FixedPoint(8, 4), dtype=dtype)


def test_nan_has_code_zero_and_stays_nan():
    x = torch.tensor([math.nan])
    assert encode(x, FORMATS[1]).item() == 0
    assert quantize(x, FORMATS[1]).isnan().all()


def test_saturation_keeps_inside_the_widest_format():
    fmt = FixedPoint(32, 0)
    x = torch.tensor([math.inf, -math.inf, 2.0**31])
    assert encode(x, fmt).tolist() == [2**31 - 128, -(2**31), 2**31 - 128]
    fmt = FixedPoint(31, 0, signed=False)
    assert encode(x, fmt).tolist() == [2**31 - 128, 0, 2**31 - 128]


def test_mask_says_what_was_clamped():
    x = torch.tensor([8.0, 7.9375, -8.0, -8.5, math.nan, math.inf])
    _, inside = quantize_with_mask(x, FixedPoint(8, 4), rounding="nearest")
    assert inside.tolist() == [False, True, True, False, True, False]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_strides_change_no_bit(rounding):
    x, options = torch.randn(2, 3, 4, 5) * 9, {"seed": 3, "rounding": rounding}
    for view in (
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(1, 3).contiguous().transpose(1, 3),
        x[:, 1:],
        x[..., ::2],
        x[:, :1].permute(3, 1, 0, 2),
        torch._neg_view(x.contiguous(memory_format=torch.channels_last)),
        torch.randn(9).as_strided((3, 3), (2, 2)),  # overlaps itself
    ):
        whole = view.contiguous()
        expected, wanted = quantize_with_mask(whole, FORMATS[1], **options)
        y, inside = quantize_with_mask(view, FORMATS[1], **options)
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        assert torch.equal(inside, wanted)
        assert y.stride() == inside.stride() == torch.empty_like(view).stride()
        assert torch.equal(
            encode(view, FORMATS[1], **options), encode(whole, FORMATS[1], **options)
        )
        outs = [torch.empty(view.shape), torch.empty_like(view), spread(view)]
        if view.stride() != (2, 2):
            outs.append(torch.empty_strided(view.shape, view.stride()))
        for out in outs:
            quantize(view, FORMATS[1], out=out, **options)
            torch.testing.assert_close(out, expected, rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(8, 40), st.integers(1, 20), st.integers(1, 20)),
    key=keys,
    fmt=formats | st.sampled_from([*FORMATS, Minifloat(4, 3)]),
    last=st.integers(0, 3),
)
def test_noise_goes_by_the_place_in_the_tensor_not_in_memory(sizes, key, fmt, last):
    own = torch.randn(sizes) * 4
    lies = own.movedim(last, -1).contiguous().movedim(-1, last)
    options = {"seed": key.seed, "stream": key.stream}
    y, inside = quantize_with_mask(own, fmt, **options)
    moved = quantize(own, fmt, offset=key.offset, **options)
    assert_equal(quantize_with_mask(lies, fmt, **options), (y, inside))
    assert_equal(quantize(lies, fmt, offset=key.offset, **options), moved)
    assert_equal(quantize(lies, fmt, **options, out=lies), y)  # over what it reads


@pytest.mark.parametrize("threads", [1, 2])
def test_many_images_with_channels_last(threads):
    own = torch.randn(16, 20, 31, 17) * 4  # more elements than one thread takes
    own.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    images = own.contiguous(memory_format=torch.channels_last)
    expected = run(reference, own, FORMATS[1], "stochastic", Key(3, 2))
    moved, _ = run(reference, own, FORMATS[1], "stochastic", Key(3, 2, 77))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert is_parallel(own.numel()) == (threads > 1)
        y, inside = quantize_with_mask(images, FORMATS[1], seed=3, stream=2)
        assert_equal(quantize(images, FORMATS[1], seed=3, stream=2, offset=77), moved)
    finally:
        torch.set_num_threads(before)
    assert_equal((y, inside), expected)
    assert y.stride() == inside.stride() == images.stride()


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_what_was_clamped_becomes_zero():
    x, inside = values((8, 16, 33, 31)), torch.rand(8, 16, 33, 31) > 0.3
    expected = torch.where(inside, x, 0.0)
    orders = torch.contiguous_format, torch.channels_last
    for order, other in itertools.product(orders, orders):
        given, mask = x.clone(memory_format=order), inside.clone(memory_format=other)
        with torch.no_grad():
            assert_equal(keep_inside(given, mask), expected)
            assert order is not other or keep_inside(given, mask).stride() == given.stride()
        given.requires_grad_()
        keep_inside(given, mask).sum().backward()
        assert torch.equal(given.grad, inside.float())
    with torch.no_grad():
        assert_equal(keep_inside(torch._neg_view(x), inside), torch.where(inside, -x, 0.0))
        assert_equal(keep_inside(x[:, :, ::2], inside[:, :, ::2]), expected[:, :, ::2])
        assert_equal(keep_inside(x.double(), inside), expected.double())
        assert keep_inside(torch.ones(0, 3), torch.ones(0, 3) > 0).shape == (0, 3)
        assert_equal(torch.vmap(keep_inside)(x, inside), expected)


def spread(x):
    """Return room of the shape of ``x``, with more between its elements."""
    return torch.full((*x.shape, 2), -7.0)[..., 0]


def test_expanded_and_empty_tensors():
    expanded = torch.tensor([[0.3]]).expand(4, 5)
    expected = quantize(expanded.contiguous(), FORMATS[1], seed=3)
    torch.testing.assert_close(quantize(expanded, FORMATS[1], seed=3), expected, rtol=0, atol=0)
    assert quantize(torch.empty(0, 3), FORMATS[1]).shape == (0, 3)


def test_out_may_be_the_input():
    x = torch.randn(100)
    expected = quantize(x, FORMATS[1])
    assert quantize(x, FORMATS[1], out=x) is x
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_autograd_sees_that_out_changed():
    weight = torch.ones(3, requires_grad=True)
    loss = weight.square().sum()
    with torch.no_grad():
        quantize_many([weight * 2], [FORMATS[1]], out=[weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_users_generator_is_left_alone():
    before = torch.get_rng_state()
    quantize(torch.ones(8), FORMATS[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_and_streams_differ():
    x = torch.full((1000,), 0.3)
    draws = [quantize(x, FORMATS[1], seed=s, stream=t) for s, t in [(0, 0), (1, 0), (0, 1)]]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"x": torch.arange(3)}, TypeError, r"float16 tensor, got torch\.int64"),
        ({"x": [1.0]}, TypeError, "float16 tensor, got list"),
        ({"fmt": (8, 4)}, TypeError, r"must be a FixedPoint, such as .*, got \(8, 4\)"),
        ({"rounding": "up"}, ValueError, "rounding must be one of .* got 'up'"),
        ({"seed": -1}, ValueError, "seed and stream must be 0 to"),
        ({"seed": 1.5}, TypeError, r"must be integers, got seed=1\.5, stream=0, .*: write int"),
        ({"out": torch.ones(2)}, ValueError, r"out must be a floating tensor of shape \(3,\)"),
        ({"x": torch.ones(3, requires_grad=True)}, RuntimeError, "has no gradient"),
    ],
)
def test_bad_input_is_named(kwargs, error, message):
    kwargs = {"x": torch.ones(3), "fmt": FORMATS[1], **kwargs}
    with pytest.raises(error, match=message):
        quantize(kwargs.pop("x"), kwargs.pop("fmt"), **kwargs)


@pytest.mark.gpu
def test_same_bits_on_both_devices():
    x = values((100_000,))
    for fmt in FORMATS:
        expected = quantize(x, fmt, seed=5)
        actual = quantize(x.cuda(), fmt, seed=5).cpu()
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(
    ("fmt", "dtype", "x"),
    [
        (FixedPoint(2, 31), torch.float16, -(2.0**-24)),
        (FixedPoint(8, 31), torch.float16, -(2.0**-30)),
        (FixedPoint(8, 25), torch.float16, -(2.0**-25)),
        (Minifloat(8, 7), torch.float16, -1e-30),
    ],
    ids=str,
)
def test_what_its_dtype_does_not_hold_is_0_without_a_sign(fmt, dtype, x, rounding, device):
    x = torch.full((300,), x, device=device)
    for y in (torch.empty_like(x, dtype=dtype), x.new_empty(600, dtype=dtype)[::2]):
        quantize(x, fmt, rounding=rounding, out=y)
        assert not y.any()
        assert not y.signbit().any()
    own, _ = quantize_with_mask(x.to(dtype), fmt, rounding=rounding)
    assert not own[own == 0].signbit().any()


FOLLOWED = {
    "quantize": lambda x, options: quantize(x, FixedPoint(8, 4), **options),
    "into an output": lambda x, options: quantize(
        x, FixedPoint(8, 4), out=torch.zeros_like(x), **options
    ),
    "mask": lambda x, options: quantize_with_mask(x, FixedPoint(8, 4), **options),
    "many": lambda x, options: tuple(
        quantize_many([x, -x], [FixedPoint(8, 4), FixedPoint(4, 1)], **options)
    ),
    "codes": lambda x, options: encode(x, FixedPoint(8, 4), **options),
    "minifloat": lambda x, options: quantize(x, Minifloat(4, 3), **options),
    "block": lambda x, options: quantize_block(x, BlockFloat(6), per_sample=True, **options),
}


class Rounding(torch.nn.Module):
    def __init__(self, run, options):
        super().__init__()
        self.run, self.options = run, options

    def forward(self, x):
        return self.run(x, self.options)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["trace", "export"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_traces_and_exports_round_what_they_are_given(name, rounding, way):
    model = Rounding(FOLLOWED[name], {"rounding": rounding, "seed": 3, "stream": 1})
    samples, x = torch.randn(5, 7), 9 * torch.randn(5, 7)
    if way == "trace":
        followed = torch.jit.trace(model, samples)
    else:
        followed = torch.export.export(model, (samples,)).module()
    torch.testing.assert_close(followed(x), model(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["quantize", "mask", "many", "codes"])
def test_files_of_onnx_round_what_they_are_given(name):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model, file = Rounding(FOLLOWED[name], {"rounding": "nearest"}), io.BytesIO()
    torch.onnx.export(model, (torch.randn(5, 7),), file, dynamo=False)
    session, x = onnxruntime.InferenceSession(file.getvalue()), 9 * torch.randn(5, 7)
    found = tuple(
        map(torch.from_numpy, session.run(None, {session.get_inputs()[0].name: x.numpy()}))
    )
    wanted = model(x)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
