"""DIVISION's promises: sizes, errors, edge cases, and what torch sees of its operators."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixedpoint_kernels import division
from fixedpoint_kernels.division import operators
from perfmodel.forward_save import Division, conv_block_ratio, linear_block_ratio

NAN, INF = float("nan"), float("inf")
BITS = 1, 2, 4, 8
SHAPES = [
    (),
    (1,),
    (130,),
    (5, 7),
    (2, 3, 16),
    (2, 3, 7, 7),
    (3, 2, 14, 9),
    (2, 2, 32, 32),
    (4, 5, 1, 1),
    (2, 1, 5, 6, 9),
    (2, 1, 2, 3, 4, 5),
    (0, 3, 4, 4),
    (2, 3, 0, 4),
]


def roundtrip(x, **options):
    return division.decompress(division.compress(x, **options))


def bound_of(x, compressed):
    """One step of its plane for each element, and a few roundings of float32."""
    steps = compressed.ranges[:, 1].float()
    return steps.repeat_interleave(compressed.layout.elements).view(x.shape) + 1e-6 * x.abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_size_and_error(shape, bits):
    x = torch.randn(shape) + 3
    compressed = division.compress(x, bits=bits, seed=1)
    assert compressed.size_bytes == Division(8, bits).size_bytes(shape)
    y = division.decompress(compressed)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    if compressed.layout.elements == 1:
        assert torch.equal(y, x.bfloat16().float())
    elif x.numel():
        assert ((y - x).abs() <= bound_of(x, compressed)).all()


@pytest.mark.parametrize(("side", "ratio"), [(7, 10.346), (14, 12.36), (28, 12.90), (56, 13.04)])
def test_equation_54(side, ratio):
    """Convolution and batch norm keep a map each, ReLU a bit an element, for 9 bytes in all.

    Equation 54 spreads the means over whole blocks: where they are cut, more are kept.
    """
    shape = (16, 4, side, side)
    elements = 16 * 4 * side**2
    kept = 2 * division.compress(torch.randn(shape)).size_bytes + elements / 8
    blocks = -(side // -8)
    more = 4 * (blocks**2 - side**2 / min(8, side) ** 2) / side**2
    assert 9 / (kept / elements - more) == pytest.approx(ratio, rel=5e-4)
    assert conv_block_ratio(side) == pytest.approx(ratio, rel=5e-4)


@pytest.mark.parametrize(("features", "ratio"), [(64, 8.89), (128, 9.41)])
def test_equation_56(features, ratio):
    kept = division.compress(torch.randn(32, features), block=16).size_bytes + 32 * features / 8
    assert 5 * 32 * features / kept == pytest.approx(ratio, rel=5e-4)
    assert linear_block_ratio(features, 16) == pytest.approx(ratio, rel=5e-4)
    for of in (conv_block_ratio, linear_block_ratio):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            of(0)


@pytest.mark.parametrize(("sides", "block"), [((14, 9), 8), ((7, 7), 8), ((30, 21), 12)], ids=str)
def test_means_are_of_the_elements_a_block_has(sides, block):
    x = torch.randn(2, 3, *sides)
    means = division.compress(x, block=block).means
    pooled = torch.nn.functional.avg_pool2d(
        x.double(), [min(block, side) for side in sides], ceil_mode=True, count_include_pad=False
    )
    # half a unit in the last of 8 places, and sums of float32
    torch.testing.assert_close(
        means.double(), pooled.view(means.shape), rtol=2.0**-8, atol=1e-6, check_dtype=False
    )


@given(data=st.data())
def test_error_is_below_a_step(data):
    """Whatever the values: at most a step, and roundings of float32 to the plane's largest."""
    sides = data.draw(st.tuples(st.integers(1, 12), st.integers(2, 12)))
    finite = st.floats(-(2.0**60), 2.0**60, width=32)
    few = data.draw(st.lists(finite, min_size=1, max_size=sides[0] * sides[1]))
    x = torch.tensor(few).repeat(sides[0] * sides[1])[: sides[0] * sides[1]].view(1, 1, *sides)
    block = data.draw(st.one_of(st.integers(1, 13), st.none()))
    compressed = division.compress(x, block=block, bits=data.draw(st.sampled_from(BITS)))
    error = (division.decompress(compressed).double() - x.double()).abs().max()
    assert error <= compressed.ranges[0, 1].double() + 2.0**-20 * x.abs().max().double()


@pytest.mark.parametrize("bits", BITS)
def test_both_ends_of_the_range_are_kept(bits):
    """Of 1,000 planes none has values outside: the smallest is rounded down, the step up."""
    x = torch.randn(1000, 64)
    low, step = division.compress(x, block=None, bits=bits).ranges.double().unbind(1)
    values = x.double()
    assert (low <= values.amin(1)).all()
    assert (low + (2**bits - 1) * step >= values.amax(1) * (1 - 2.0**-22)).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("block", [8, None])
def test_a_plane_that_is_not_finite_is_nan_and_no_other(bad, block):
    x = torch.randn(2, 3, 9, 5)
    x[1, 1, 8, 4] = bad
    y = roundtrip(x, block=block)
    assert y[1, 1].isnan().all()
    y[1, 1] = 0
    assert y.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 0.1, 1e-40, -1e-40, 1e30])
def test_a_constant_plane(value):
    x = torch.full((2, 3, 9, 9), value)
    y = roundtrip(x)
    # what bfloat16 leaves of it, and what bfloat16 leaves of that, in four levels
    torch.testing.assert_close(y, x, rtol=2.0**-16, atol=1.2e-38)
    if value in (0.0, 1.0, -3.5):
        assert torch.equal(y, x)
        assert not division.compress(x).ranges.any()


def test_strides_and_memory_formats():
    x = torch.randn(2, 6, 9, 5)
    y = roundtrip(x)
    for same in (x.transpose(2, 3).contiguous().transpose(2, 3), torch.stack([x, x], -1)[..., 0]):
        assert torch.equal(roundtrip(same), y)
        assert roundtrip(same).is_contiguous()
    last = x.to(memory_format=torch.channels_last)
    assert torch.equal(roundtrip(last), y)
    assert roundtrip(last).stride() == last.stride()
    volume = torch.randn(2, 3, 4, 5, 6)
    last = volume.to(memory_format=torch.channels_last_3d)
    assert torch.equal(roundtrip(last), roundtrip(volume))
    assert roundtrip(last).stride() == last.stride()
    expanded = torch.randn(3, 1, 4).expand(3, 5, 4)
    assert torch.equal(roundtrip(expanded), roundtrip(expanded.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 40, 32, 31),  # tasks begin and end between channels
        (3, 3, 9, 5),
        (2, 17, 7, 7),
        (1, 40, 16, 5),
        (5, 64, 1, 33),
        (4, 100, 3, 3),
        (40, 2, 4, 4),
        (2, 18, 4, 5, 6),
    ],
)
@pytest.mark.parametrize(("block", "bits"), [(8, 2), (3, 1), (None, 4), (4, 8), (8, 0)])
def test_channels_last_have_the_bits_of_the_usual_order(shape, dtype, block, bits):
    x = torch.randn(shape).to(dtype)
    order = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    last = x.to(memory_format=order)
    kept = division.compress(x, block=block, bits=bits, seed=3)
    turned = division.compress(last, block=block, bits=bits, seed=3)
    for a, b in zip(kept.tensors, turned.tensors, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    back = division.decompress(turned)
    assert torch.equal(back, division.decompress(kept))
    assert back.is_contiguous(memory_format=order)
    for spatial in range(len(shape) - 1):  # channels may be part of a plane
        options = {"block": block, "bits": bits, "spatial": min(spatial, 3)}
        assert torch.equal(roundtrip(last, **options), roundtrip(x, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    x = torch.randn(2, 3, 9, 5).to(dtype)
    y = roundtrip(x)
    assert y.dtype == dtype
    assert torch.equal(y, roundtrip(x.float()).to(dtype))


def test_spatial():
    x = torch.randn(2, 3, 4, 6)
    rows, planes = division.compress(x, spatial=1), division.compress(x, spatial=2)
    assert rows.ranges.shape == (24, 2)
    assert planes.ranges.shape == (6, 2)
    assert division.compress(x, spatial=3).ranges.shape == (2, 2)
    assert division.compress(x, spatial=0).size_bytes == 2 * x.numel()


def test_parts_of_the_method():
    x = torch.randn(2, 3, 16, 16) + 5
    whole = division.compress(x)
    low = division.compress(x, bits=0)
    assert torch.equal(low.means, whole.means)
    assert low.size_bytes == 2 * whole.means.numel()
    high = whole.without_means()
    assert high.size_bytes == whole.size_bytes - low.size_bytes
    both = division.decompress(low) + division.decompress(high)
    assert torch.equal(both, division.decompress(whole))
    plain = division.compress(x, block=None)
    assert plain.size_bytes == 6 * (4 + 64)
    assert ((division.decompress(plain) - x).abs() <= bound_of(x, plain)).all()
    with pytest.raises(ValueError, match="no residuals"):
        low.without_means()


def test_taken_apart_and_put_together():
    compressed = division.compress(torch.randn(2, 3, 9, 5).bfloat16())
    again = division.Compressed(*compressed.tensors, compressed.layout)
    assert torch.equal(division.decompress(again), division.decompress(compressed))
    assert (again.shape, again.dtype) == ((2, 3, 9, 5), torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 3}, ValueError, r"bits must be one of .*, got bits=3"),
        ({"bits": 2.0}, TypeError, r"bits must be an integer, got 2.0"),
        ({"block": 0}, ValueError, r"block must be 1 or more.*, got block=0"),
        ({"block": 2.5}, TypeError, r"block must be an integer, got 2.5"),
        ({"block": None, "bits": 0}, ValueError, r"keep nothing"),
        ({"spatial": 4}, ValueError, r"spatial must be 0 to 3 .* 4 dimensions, got spatial=4"),
        ({"spatial": -1}, ValueError, r"got spatial=-1"),
        ({"seed": -1}, ValueError, r"seed and stream must be"),
    ],
)
def test_refused_options(options, error, message):
    with pytest.raises(error, match=message):
        division.compress(torch.zeros(2, 3, 4, 4), **options)


def test_refused_tensors():
    with pytest.raises(TypeError, match=r"what division\.compress returned, got Tensor"):
        division.decompress(torch.ones(3))  # pyright: ignore
    for dtype in (torch.int32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"float tensor of 16, 32 or 64 bits, got {dtype}"):
            division.compress(torch.zeros(2, 2, dtype=dtype))
    with pytest.raises(TypeError, match="got list"):
        division.compress([1.0])
    with pytest.raises(RuntimeError, match="compress has no gradient"):
        division.compress(torch.zeros(2, 2, requires_grad=True))
    kept = division.compress(torch.zeros(2, 9))
    with pytest.raises(ValueError, match=r"\(2, 2\), \(5,\), \(2, 2\)\), got .*\(4,\)"):
        division.decompress(
            division.Compressed(kept.means, kept.codes[:4], kept.ranges, kept.layout)
        )


def test_noise_is_private_and_counted():
    x = torch.randn(64, 64)
    state = torch.get_rng_state()
    first = division.compress(x, seed=1, stream=2).codes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, division.compress(x, seed=1, stream=2).codes)
    assert not torch.equal(first, division.compress(x, seed=2, stream=2).codes)
    assert not torch.equal(first, division.compress(x, seed=1, stream=3).codes)
    assert torch.equal(first[: 32 * 16], division.compress(x[:32], seed=1, stream=2).codes)


@pytest.mark.parametrize("bits", BITS)
def test_unbiased(bits):
    """The mean over many streams is nearer to x than five of its standard deviations."""
    x, draws = torch.randn(4, 3, 8, 8), 400
    compressed = division.compress(x, bits=bits)
    total = sum(roundtrip(x, bits=bits, stream=stream).double() for stream in range(draws))
    step = compressed.ranges[:, 1].double().repeat_interleave(64).view(x.shape)
    low = compressed.ranges[:, 0].double().repeat_interleave(64).view(x.shape)
    mean = compressed.means.double().repeat_interleave(64).view(x.shape)
    fraction = ((x - mean - low) / step) % 1
    deviation = step * (fraction * (1 - fraction) / draws).sqrt()
    # 768 elements: one in 1e6 beyond 5 each; and noise of 24 bits, sums of float32
    assert ((total / draws - x).abs() <= 5 * deviation + step * 2.0**-20 + 1e-6).all()


def test_operators():
    compress = torch.ops.fixedpoint_kernels.division_compress.default
    decompress = torch.ops.fixedpoint_kernels.division_decompress.default
    for x in (torch.randn(2, 3, 9, 5), torch.randn(3, 4, 1, 1), torch.randn(0, 3, 4, 4)):
        torch.library.opcheck(compress, (x, 8, 2, 1, 0, 2))
        parts = operators.compress(x, 8, 2, 1, 0, 2)
        numbers = list(x.shape), torch.bfloat16, 8, 2, 2, False
        torch.library.opcheck(decompress, (*parts, *numbers))
    last = torch.ones(2, 3, 9, 5).to(memory_format=torch.channels_last)
    parts = operators.compress(last, None, 4, 1, 0, 2)
    numbers = list(last.shape), torch.float32, None, 4, 2, True
    torch.library.opcheck(decompress, (*parts, *numbers))


def test_compile_keeps_the_operators():
    def both(x, stream):
        kept = division.compress(x, stream=stream)
        return division.decompress(kept)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for stream in range(3):
        x = torch.randn(2 + stream, 3, 9, 5)
        assert torch.equal(compiled(x, stream), both(x, stream))
