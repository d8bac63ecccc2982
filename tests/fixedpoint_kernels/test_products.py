import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fixedpoint_kernels import FixedPoint, products
from fixedpoint_kernels.products import cpu, paths, reference, shapes
from fixedpoint_kernels.products.blocks import blocks
from fixedpoint_kernels.products.instructions import GRAINS
from fixedpoint_kernels.products.shapes import LONGEST_SUM, Window
from fixedpoint_kernels.products.spots import spots
from fixedpoint_kernels.products.weight_rows import suits
from fixedpoint_kernels.scratch import Scratch

HERE = [name for name in paths.PATHS if name not in paths.unavailable()]
SHIFTS = st.sampled_from([0, 1, 4])  # of 8 bits, few are added up in int16 where there is no VNNI
FEW = settings(max_examples=25 * settings().max_examples // 100)


# images, inputs, outputs, size, kernel; stride, padding, dilation
SMALL = (
    ((40, 32, 40, (2, 2), (3, 3)), ((1, 1), (1, 1), (1, 1))),
    ((17, 8, 20, (4, 4), (5, 5)), ((1, 1), (2, 2), (1, 1))),
    ((21, 20, 16, (5, 4), (3, 3)), ((2, 1), (1, 1), (1, 1))),
    ((70, 4, 33, (3, 7), (3, 3)), ((1, 2), (2, 1), (2, 1))),
    ((9, 16, 48, (8, 8), (3, 3)), ((1, 1), (1, 1), (1, 1))),
    ((33, 12, 16, (2, 3), (3, 2)), ((3, 1), (2, 1), (1, 2))),
)
# the same, of which outputs have the places of inputs; then groups
ROWS = (
    ((7, 16, 16, (16, 16), (3, 3)), ((1, 1), (1, 1)), 1),
    ((5, 32, 48, (20, 16), (3, 3)), ((1, 1), (1, 1)), 1),
    ((3, 48, 32, (12, 20), (5, 3)), ((2, 1), (1, 1)), 1),  # rows of no 16 places
    ((9, 16, 32, (4, 4), (1, 1)), ((0, 0), (1, 1)), 1),  # images follow each other
    ((3, 16, 16, (24, 4), (3, 3)), ((1, 1), (1, 1)), 1),  # rows that are first and last at once
    ((3, 32, 16, (18, 16), (3, 3)), ((4, 4), (4, 4)), 1),  # taps that lie 4 places aside
    ((4, 16, 16, (2, 32), (3, 1)), ((1, 0), (1, 1)), 1),
    ((2, 32, 16, (150, 64), (3, 3)), ((1, 1), (1, 1)), 1),  # some rows at a time
    ((3, 64, 96, (16, 16), (3, 3)), ((1, 1), (1, 1)), 2),
    ((3, 64, 64, (16, 16), (3, 3)), ((1, 1), (1, 1)), 16),
)
BORDERED = (  # almost: too many columns, channels, places
    ((3, 16, 16, (16, 16), (5, 5)), ((2, 2), (1, 1)), 1),
    ((3, 17, 16, (16, 16), (3, 3)), ((1, 1), (1, 1)), 1),
    ((3, 16, 20, (16, 16), (3, 3)), ((1, 1), (1, 1)), 1),
    ((3, 16, 16, (15, 20), (3, 3)), ((1, 1), (1, 1)), 1),
    ((3, 16, 16, (16, 18), (3, 3)), ((1, 1), (1, 1)), 1),
    ((3, 16, 16, (16, 16), (3, 3)), ((0, 1), (1, 1)), 1),
    ((2, 32, 16, (250, 40), (3, 3)), ((1, 1), (1, 1)), 1),
)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_zero_by_chance():
    """Memory that kernels take holds anything."""
    own = Scratch.__enter__

    def filled(scratch):
        memory, address = own(scratch)
        memory[...] = 0x5A
        return memory, address

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scratch, "__enter__", filled)
        yield


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("outputs", [1, 15, 16, 20, 32])
@pytest.mark.parametrize("inputs", [1, 3, 4, 18, 32, 64])
def test_weights_are_laid_out_as_numpy_does(inputs, outputs, is_turned):
    taps, gap, all_taps = np.array([2, 0, 3]), 4, 4
    starts = np.arange(3) * (inputs + gap)
    depth = -((starts[-1] + inputs) // -4) * 4
    shape = (inputs, all_taps, outputs) if is_turned else (outputs, all_taps, inputs)
    weight = np.random.default_rng(0).integers(-127, 128, shape).astype(np.int8)
    by_output = weight.transpose(2, 1, 0) if is_turned else weight
    columns = np.zeros((-(outputs // -16) * 16, depth), np.int8)
    for tap, start in zip(taps, starts, strict=True):
        columns[:outputs, start : start + inputs] = by_output[:, tap]
    expected = columns.reshape(-1, 16, depth // 4, 4).transpose(0, 2, 1, 3)
    packed = np.full(expected.shape, 99, np.int8)
    sums = np.zeros(len(columns), np.int32)
    numbers = outputs, inputs, all_taps * shape[-1], is_turned
    cpu._pack(weight.ctypes.data, taps, starts, depth, *numbers, sums, packed.ctypes.data)
    assert (packed == expected).all()
    assert (sums == columns.sum(1, dtype=np.int32)).all()


def windowed(window):
    return {name: value for name, value in window.items() if name != "groups"}


def codes(*shape, dtype=torch.int8):
    low = 0 if dtype is torch.uint8 else -128
    return torch.randint(low, low + 256, shape, dtype=torch.int16).to(dtype)


def placed(x, weight, stride, padding, dilation, groups):
    """Yield matching parts of output, input and weight for each place of the kernel, in NumPy."""
    if any(padding):  # else views, to write to
        x = np.pad(x, [(0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2])
    reach = [d * (k - 1) for d, k in zip(dilation, weight[2:], strict=True)]
    height, width = (
        (n - r - 1) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True)
    )
    for i, j in itertools.product(range(weight[2]), range(weight[3])):
        rows = slice(i * dilation[0], i * dilation[0] + stride[0] * (height - 1) + 1, stride[0])
        columns = slice(j * dilation[1], j * dilation[1] + stride[1] * (width - 1) + 1, stride[1])
        for group in range(groups):
            yield i, j, group, x[:, group * weight[1] : (group + 1) * weight[1], rows, columns]


def oracle(x, weight, **window):
    """Convolve in NumPy's int64."""
    x, weight = x.numpy().astype(np.int64), weight.numpy().astype(np.int64)
    each = weight.shape[0] // window["groups"]
    parts = dict.fromkeys(range(window["groups"]), 0)
    for i, j, group, part in placed(x, weight.shape, **window):
        own = weight[group * each : (group + 1) * each, :, i, j]
        parts[group] = parts[group] + np.einsum("nchw,oc->nohw", part, own)
    total = np.concatenate(list(parts.values()), 1)
    return torch.from_numpy(total)


def oracle_input_gradient(grad, weight, size, **window):
    grad, weight = grad.numpy().astype(np.int64), weight.numpy().astype(np.int64)
    (top, left), each = window["padding"], weight.shape[0] // window["groups"]
    inputs = weight.shape[1] * window["groups"]
    x = np.zeros((len(grad), inputs, size[0] + 2 * top, size[1] + 2 * left), np.int64)
    for i, j, group, part in placed(x, weight.shape, **{**window, "padding": (0, 0)}):
        own = slice(group * each, (group + 1) * each)
        part += np.einsum("nohw,oc->nchw", grad[:, own], weight[own, :, i, j])
    return torch.from_numpy(x[:, :, top : top + size[0], left : left + size[1]])


def oracle_weight_gradient(x, grad, kernel, **window):
    """Return the sums of each sample, (samples, outputs, inputs, height, width)."""
    x, grad = x.numpy().astype(np.int64), grad.numpy().astype(np.int64)
    shape = grad.shape[1], x.shape[1] // window["groups"], *kernel
    each = shape[0] // window["groups"]
    total = np.zeros((len(x), *shape), np.int64)
    for i, j, group, part in placed(x, shape, **window):
        own = slice(group * each, (group + 1) * each)
        total[:, own, :, i, j] = np.einsum("nohw,nchw->noc", grad[:, own], part)
    return torch.from_numpy(total)


@st.composite
def problems(draw):
    """Draw codes of a convolution and its window: ragged, strided, dilated, padded, in groups."""
    number, pair = st.integers(1, 3), st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    window = {
        "stride": draw(pair),
        "padding": draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        "dilation": draw(pair),
        "groups": 1,
    }
    reach = [
        max(1, (k - 1) * d + 1 - 2 * p)
        for k, d, p in zip(kernel, window["dilation"], window["padding"], strict=True)
    ]
    size = [draw(st.integers(n, n + 9)) for n in reach]
    samples, channels = draw(number), draw(st.sampled_from([1, 3, 4, 16, 17, 20, 33]))
    outputs = draw(st.sampled_from([1, 5, 16, 20, 32, 49]))
    if draw(st.booleans()):  # of few channels each, or of one
        window["groups"] = draw(st.sampled_from([2, 3, 5, 17, 32, 50]))
        channels, outputs = draw(
            st.sampled_from([(1, 1), (1, 1), (1, 2), (2, 1), (4, 4), (3, 5), (8, 16), (20, 3)])
        )
    dtype = draw(st.sampled_from([torch.uint8, torch.int8]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    x = codes(samples, channels * window["groups"], *size, dtype=dtype)
    weight = codes(outputs * window["groups"], channels, *kernel)
    x, weight = x >> draw(SHIFTS), weight >> draw(SHIFTS)
    if draw(st.booleans()):
        x, weight = x.to(memory_format=torch.channels_last), weight.flip(0)
    return x, weight, window


@pytest.mark.parametrize("path", HERE)
@FEW
@given(problem=problems(), data=st.data())
def test_every_path_equals_an_oracle_in_numpy(path, problem, data):
    x, weight, window = problem
    sums = oracle(x, weight, **window)
    grad = codes(*sums.shape) >> data.draw(SHIFTS)
    lowest = data.draw(st.sampled_from([-60, -8]))
    by_output = torch.randint(-20, 5, (len(weight),), dtype=torch.int32)
    by_sample = torch.randint(lowest, 5, (len(x),), dtype=torch.int32)
    with products.force(path):
        assert torch.equal(products.convolve(x, weight, **window), sums.int())
        y, statistics = products.convolve_with_statistics(x, weight, exponents=by_output, **window)
        assert torch.equal(y, sums.float() * torch.exp2(by_output.float()).view(-1, 1, 1))
        assert_statistics(statistics, sums)
        expected = oracle_input_gradient(grad, weight, x.shape[2:], **window)
        back = products.convolve_input_gradient(
            grad, weight, x.shape[2:], exponents=by_sample, dtype=torch.bfloat16, **window
        )
        scale = torch.exp2(by_sample.float()).view(-1, 1, 1, 1)
        assert torch.equal(back, (expected.float() * scale).bfloat16())
        kernel = weight.shape[2:]
        own = oracle_weight_gradient(x, grad, kernel, **window)
        whole = products.convolve_weight_gradient(x, grad, kernel, **window)
        assert torch.equal(whole, own.sum(0))
        folded = products.convolve_weight_gradient(x, grad, kernel, exponents=by_sample, **window)
        assert folded.flatten().tolist() == folded_by_python(own, by_sample, grad)


def folded_by_python(sums, exponents, grad):
    """Fold in Python's integers and round once, to nearest with ties to even."""
    positions = grad.numel() // grad.shape[1]
    room = 62 - (255 * 128 * positions).bit_length()
    top = max(exponents.tolist())
    flat, result = sums.flatten(1).tolist(), []
    for column in zip(*flat, strict=True):
        terms = [
            value << room - top + e
            for value, e in zip(column, exponents.tolist(), strict=True)
            if room - top + e >= 0
        ]
        result.append(float(np.float32(sum(terms))) * 2.0 ** (top - room))
    return result


def assert_statistics(statistics, sums):
    values = sums.transpose(0, 1).flatten(1).tolist()
    assert statistics.sums.tolist() == [sum(row) for row in values]
    squares = [sum(v * v for v in row) for row in values]
    assert statistics.high.tolist() == [square >> 32 for square in squares]
    assert statistics.low.tolist() == [square & 0xFFFFFFFF for square in squares]
    assert statistics.squares.tolist() == [float(square) for square in squares]


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_sums_of_extreme_codes_never_wrap(path, dtype):
    places = 200_000  # 255 * 128 * 200,000 is three times int32
    largest = 255 if dtype is torch.uint8 else -128
    x, grad = torch.full((1, 2, places), largest, dtype=dtype), torch.full((1, 3, places), -128)
    grad = grad.to(torch.int8)
    with products.force(path):
        total = products.convolve_weight_gradient(x, grad, (1,))
        many = x.view(2, places // 100, 100).transpose(0, 1)
        also = products.convolve_weight_gradient(many, grad.view(3, -1, 100).transpose(0, 1), (1,))
        rows = products.linear_weight_gradient(x[0].t(), grad[0].t())
        long = products.linear(x[0], grad[0].contiguous(), exponents=0)
        exact = products.linear(x[0], grad[0].contiguous(), dtype=torch.int64)
    for result in (total.squeeze(2), also.squeeze(2), rows):
        assert result.tolist() == [[largest * -128 * places] * 2] * 3
    assert exact.tolist() == [[largest * -128 * places] * 3] * 2
    assert long.tolist() == [[float(np.float32(largest * -128 * places))] * 3] * 2


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (255, 128, 0),
        (255, 65, 0),
        (255, 64, 1),
        (128, 128, 0),
        (127, 128, 1),
        (127, 65, 1),
        (127, 64, 2),
        (63, 127, 2),
    ],
)
def test_sums_of_pairs_that_int16_just_holds(a, b, steps, path):
    assert shapes.steps_of_codes(a, b) == steps
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x = torch.full((2, 20, 6, 5), a, dtype=torch.uint8)
    signed = torch.full((2, 24, 6, 5), a - 128).to(torch.int8)  # as unsigned bytes, a
    small, grad = (torch.full((2, n, 6, 5), -b).to(torch.int8) for n in (20, 24))
    weight = torch.full((24, 20, 3, 3), -b).to(torch.int8)
    weight[::2] = min(b, 127)
    grad[:, ::3] = small[:, ::3] = min(b, 127)
    with products.force(path):
        ys = [products.convolve(n, weight, padding=1) for n in (x, small)]
        back = products.convolve_input_gradient(signed, weight, (6, 5), padding=1)
        own = products.convolve_weight_gradient(x, grad, (3, 3), padding=1)
    for n, y in zip((x, small), ys, strict=True):
        assert torch.equal(y.long(), oracle(n, weight, **window))
    assert torch.equal(back.long(), oracle_input_gradient(signed, weight, (6, 5), **window))
    assert torch.equal(own, oracle_weight_gradient(x, grad, (3, 3), **window).sum(0))


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("taps", [512, 600])
def test_channels_alone_at_extremes(taps, path):
    """Sums that float32 just holds, and longer ones; gradients over more places than it holds."""
    size = (taps, 1)
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 19}
    x = torch.full((2, 19, taps + 40, 30), 255, dtype=torch.uint8)
    x[:, :, 1:, 1:] -= 2 * torch.randint(0, 2, (taps + 39, 29)).to(torch.uint8)  # odd
    weight = torch.full((19, 1, *size), -127).to(torch.int8)
    grad = torch.full((2, 19, 41, 30), 127).to(torch.int8)
    exponents = torch.tensor([-3, -3], dtype=torch.int32)
    with products.force(path):
        y = products.convolve(x, weight, groups=19)
        back = products.convolve_input_gradient(grad, weight, x.shape[2:], groups=19)
        own = products.convolve_weight_gradient(x, grad, size, groups=19)
        scaled = products.convolve_weight_gradient(x, grad, size, exponents=exponents, groups=19)
    assert torch.equal(y.long(), oracle(x, weight, **window))
    expected = oracle_input_gradient(grad, weight, tuple(x.shape[2:]), **window)
    assert torch.equal(back.long(), expected)
    expected = oracle_weight_gradient(x, grad, size, **window).sum(0)
    assert torch.equal(own, expected)
    assert torch.equal(scaled, expected.float() / 8)


def test_formats_whose_sums_of_pairs_int16_holds():
    every = [FixedPoint(wl, 3, signed=signed) for wl in range(2, 9) for signed in (True, False)]
    for a, b in itertools.product(every, [fmt for fmt in every if fmt.signed]):
        unsigned = np.arange(a.min_code, a.max_code + 1) + 128 * a.signed  # as tiles take them
        signed = np.arange(b.min_code, b.max_code + 1)
        largest = 2 * np.abs(np.multiply.outer(unsigned, signed)).max()
        steps = shapes.steps_in_int16(a, b)
        assert steps * largest < 2**15
        assert steps == 2 or (steps + 1) * largest >= 2**15


@pytest.mark.parametrize("path", HERE)
def test_the_longest_sums_that_int32_holds(path):
    x = torch.full((2, LONGEST_SUM), 255, dtype=torch.uint8)
    weight = torch.full((17, LONGEST_SUM), -128, dtype=torch.int8)
    with products.force(path):
        y = products.linear(x, weight)
        _, statistics = products.convolve_with_statistics(
            x[:, :, None, None], weight[:, :, None, None]
        )
    assert y.unique().tolist() == [-128 * 255 * LONGEST_SUM]
    assert_statistics(statistics, y.long()[:, :, None, None])
    with pytest.raises(
        ValueError, match=r"65793 products or fewer, got 65794: use dtype=torch.int64"
    ):
        products.linear(x.new_zeros(1, LONGEST_SUM + 1), weight.new_zeros(1, LONGEST_SUM + 1))


@pytest.mark.parametrize("path", HERE)
def test_sums_that_float32_would_round(path):
    x, weight = torch.full((3, 5001), 255, dtype=torch.uint8), torch.full((2, 5001), -127)
    with products.force(path):
        y = products.linear(x, weight.to(torch.int8))
        own = products.linear_weight_gradient(
            y.new_full((5001, 2), 127).to(torch.int8), y.new_full((5001, 3), 125).to(torch.int8)
        )
    assert y.unique().tolist() == [-127 * 255 * 5001]  # odd, and above 2**24
    assert own.unique().tolist() == [127 * 125 * 5001]


@pytest.mark.parametrize("path", HERE)
def test_long_input_gradients_are_split(path):
    grad = torch.full((2, LONGEST_SUM + 9), -128, dtype=torch.int8)
    weight = torch.full((LONGEST_SUM + 9, 3), -128, dtype=torch.int8)
    with products.force(path):
        back = products.linear_input_gradient(grad, weight, dtype=torch.int64)
    assert back.unique().tolist() == [128 * 128 * (LONGEST_SUM + 9)]


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("case", SMALL)
def test_small_images_go_place_by_place(case, dtype, path):
    (images, inputs, outputs, size, kernel), (stride, padding, dilation) = case
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1}
    torch.manual_seed(0)
    x, weight = codes(images, inputs, *size, dtype=dtype), codes(outputs, inputs, *kernel)
    expected = oracle(x, weight, **window)
    grad = codes(*expected.shape)
    part = shapes.forward(Window(stride, padding, dilation), size, kernel)
    assert spots(part, size, inputs, 4) is not None
    exponents = torch.randint(-9, -4, (images,), dtype=torch.int32)
    with products.force(path):
        sums, statistics = products.convolve_with_statistics(x, weight, **windowed(window))
        dx = products.convolve_input_gradient(grad, weight, size, **windowed(window))
        scaled = products.convolve_input_gradient(
            grad, weight, size, exponents=exponents, **windowed(window)
        )
        dw = products.convolve_weight_gradient(
            x, grad, kernel, exponents=exponents, **windowed(window)
        )
    assert torch.equal(sums.long(), expected)
    assert_statistics(statistics, expected)
    expected = oracle_input_gradient(grad, weight, size, **window)
    assert torch.equal(dx.long(), expected)
    powers = 2.0 ** exponents.double()
    assert torch.equal(scaled, (expected * powers.view(-1, 1, 1, 1)).float())
    each = oracle_weight_gradient(x, grad, kernel, **window)
    assert torch.equal(dw, (each * powers.view(-1, 1, 1, 1, 1)).sum(0).float())  # exact in float64


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("case", ROWS + BORDERED)
def test_gradients_of_weights_from_rows_as_they_lie(case, dtype, path):
    (images, inputs, outputs, size, kernel), (padding, dilation), groups = case
    window = {"stride": (1, 1), "padding": padding, "dilation": dilation, "groups": groups}
    part = shapes.forward(Window((1, 1), padding, dilation, groups), size, kernel)
    grain = GRAINS.get(path, 0)
    cut = blocks(part, images, size, inputs, 1, LONGEST_SUM, grain if groups == 1 else 0)
    has_rows = suits(cut, part, outputs, dtype is torch.int8, grain)
    assert has_rows == (case in ROWS and dtype is torch.uint8 and grain == 4)
    torch.manual_seed(0)
    x, grad = codes(images, inputs, *size, dtype=dtype), codes(images, outputs, *part.counts)
    exponents = torch.randint(-9, -6, (images,), dtype=torch.int32)
    x[0], grad[0] = torch.iinfo(dtype).max, -128
    with products.force(path):
        dw = products.convolve_weight_gradient(
            x, grad, kernel, exponents=exponents, **windowed(window), groups=groups
        )
    each = oracle_weight_gradient(x, grad, kernel, **window)
    powers = 2.0 ** exponents.double()
    assert torch.equal(dw, (each * powers.view(-1, 1, 1, 1, 1)).sum(0).float())  # exact in float64


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "outputs", "stride"), [((16, 64, 12, 12), 128, 2), ((1, 128, 8, 8), 64, 1)]
)
def test_many_sums_and_few_positions(shape, outputs, stride, threads, path):
    """Jobs are larger then; of 2 threads one may have none."""
    x, places = codes(*shape, dtype=torch.uint8), -(shape[2] // -stride)
    grad = codes(len(x), outputs, places, places)
    exponents = torch.arange(len(x), dtype=torch.int32) % 3 - 9
    window = {"stride": (stride,) * 2, "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    own = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with products.force(path):
            whole, folded = (
                products.convolve_weight_gradient(x, grad, (3, 3), exponents=e, **windowed(window))
                for e in (None, exponents)
            )
    finally:
        torch.set_num_threads(own)
    each = oracle_weight_gradient(x, grad, (3, 3), **window)
    assert torch.equal(whole, each.sum(0))
    powers = 2.0 ** exponents.double()
    assert torch.equal(folded, (each * powers.view(-1, 1, 1, 1, 1)).sum(0).float())


@pytest.mark.parametrize("path", HERE)
def test_linear_layers_and_samples_of_several_rows(path):
    x, weight, grad = codes(4, 5, 37, dtype=torch.uint8), codes(21, 37), codes(4, 5, 21)
    exponents = torch.tensor([-3, 0, -40, 2], dtype=torch.int32)
    wide, scale = [t.double() for t in (x, weight, grad)], torch.exp2(exponents.double())
    with products.force(path):
        y = products.linear(x, weight, exponents=-4)
        back = products.linear_input_gradient(grad, weight, exponents=exponents)
        own = products.linear_weight_gradient(x, grad, exponents=exponents)
    assert torch.equal(y.double(), wide[0] @ wide[1].T / 16)
    assert torch.equal(back.double(), wide[2] @ wide[1] * scale[:, None, None])
    sums = (wide[2].mT @ wide[0]).long()
    expected = folded_by_python(sums, exponents, grad.flatten(0, 1))
    assert own.flatten().tolist() == expected


@pytest.mark.parametrize("path", HERE)
def test_one_dimension(path):
    x, weight = codes(3, 6, 50, dtype=torch.uint8), codes(7, 6, 5)
    window = {"stride": 2, "padding": 3, "dilation": 2}
    with products.force(path):
        y = products.convolve(x, weight, **window)
        grad = codes(*y.shape)
        back = products.convolve_input_gradient(grad, weight, (50,), **window)
        own = products.convolve_weight_gradient(x, grad, (5,), **window)
    inputs, weights = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.conv1d(inputs, weights, **window)
    assert torch.equal(y.double(), expected)
    expected.backward(grad.double())
    assert torch.equal(back.double(), inputs.grad)
    assert torch.equal(own.double(), weights.grad)


@pytest.mark.parametrize("path", HERE)
def test_what_is_not_finite_stays_so(path):
    dy = torch.randn(3, 4, 5, 5)
    dy[1, 2, 0, 0] = torch.inf
    grad, exponents = products.round_per_sample(dy)
    assert exponents[1] == 128
    assert not grad[1].any()
    x, weight = codes(3, 2, 10, 10), codes(4, 2, 2, 2)
    with products.force(path):
        back = products.convolve_input_gradient(
            grad, weight, (10, 10), exponents=exponents, stride=2
        )
        gaps = products.convolve_input_gradient(
            grad, weight, (11, 11), exponents=exponents, stride=2
        )
        own = products.convolve_weight_gradient(x, grad, (2, 2), exponents=exponents, stride=2)
    assert back[1].isnan().all()
    assert gaps[1].isnan().all()
    assert back[[0, 2]].isfinite().all()
    assert not own.isfinite().any()


def test_results_do_not_depend_on_threads(monkeypatch):
    from fixedpoint_kernels.products import cpu
    from fixedpoint_kernels.products.samples import cpu as samples

    x, weight, grad = codes(9, 16, 12, 12), codes(32, 16, 3, 3), torch.randn(9, 32, 12, 12)
    results = []
    for parallel in (False, True):
        for module in (cpu, samples):
            monkeypatch.setattr(module, "is_parallel", lambda n, parallel=parallel: parallel)
        rounded, exponents = products.round_per_sample(grad, seed=3)
        back = products.convolve_input_gradient(rounded, weight, (12, 12), padding=1)
        own = products.convolve_weight_gradient(x, rounded, (3, 3), exponents=exponents, padding=1)
        y, statistics = products.convolve_with_statistics(x, weight, exponents=-3, padding=1)
        results.append([rounded, exponents, back, own, y, *statistics])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("channels", "size", "multiple"), [(16, 32, 1), (32, 16, 1), (128, 4, 8)])
def test_threads_get_as_many_images(channels, size, multiple, threads):
    part = shapes.forward(Window((1, 1), (1, 1), (1, 1)), (size, size), (3, 3))
    for images in (1, 7, 16, 32, 100, 128, 130, 500):
        cut, whole = (
            blocks(part, images, (size, size), channels, n, grain=4) for n in (threads, 1)
        )
        firsts, counts = cut.jobs[:, 0], cut.jobs[:, 1]
        assert firsts.tolist() == list(range(0, images, cut.slots))
        assert counts.sum() == images
        most = min(whole.slots, images // (2 * threads)) if threads > 1 else whole.slots
        step = 1 if cut.spots is None else multiple  # with spots a row of a tile is an image
        most = max(most // step * step, 1)
        possible = range(most, most // 2, -step)
        assert cut.slots in possible
        assert busiest(images, cut.slots, threads) == min(
            busiest(images, own, threads) for own in possible
        )


def busiest(images, slots, threads):
    """Count the images of the thread that has most: of jobs, each has as many in a row."""
    jobs = [min(slots, images - first) for first in range(0, images, slots)]
    owners = [
        max(t for t in range(threads) if len(jobs) * t // threads <= k) for k in range(len(jobs))
    ]
    return max(
        sum(n for n, t in zip(jobs, owners, strict=True) if t == own) for own in range(threads)
    )


def test_operators_are_traced():
    x, weight = codes(2, 8, 6, 6), codes(8, 8, 3, 3)

    def step(x, weight, dy):
        y, statistics = products.convolve_with_statistics(x, weight, exponents=-9, padding=1)
        grad, exponents = products.round_per_sample(dy * y, seed=5)
        numbers = {"exponents": exponents, "padding": 1}
        back = products.convolve_input_gradient(grad, weight, (6, 6), **numbers)
        own = products.convolve_weight_gradient(x, grad, (3, 3), **numbers)
        return y, statistics.sums, back, own

    arguments = x, weight, torch.randn(2, 8, 6, 6)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(compiled(*arguments), step(*arguments), strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()


@pytest.mark.parametrize("name", ["convolve", "convolve_with_statistics", "input_gradient",
                                  "weight_gradient", "round_per_sample"])  # fmt: skip
def test_operators_keep_their_promises(name):
    x, weight, grad = codes(2, 4, 5, 5), codes(3, 4, 3, 3), codes(2, 3, 3, 3)
    exponents, window = torch.zeros(1, dtype=torch.int32), [1, 1, 0, 0, 1, 1, 1]
    arguments = {
        "convolve": (x, weight, exponents, window, torch.float32),
        "convolve_with_statistics": (x, weight, None, window, torch.int32),
        "input_gradient": (grad, weight, exponents, [5, 5], window, torch.bfloat16),
        "weight_gradient": (x, grad, exponents, [3, 3], window),
        "round_per_sample": (torch.randn(3, 4, 5), 1, 2, 3),
    }[name]
    operator = getattr(torch.ops.fixedpoint_kernels, f"products_{name}").default
    torch.library.opcheck(operator, arguments)


GOOD = codes(2, 4, 5, 5), codes(3, 4, 3, 3), codes(2, 3, 3, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, w, g: products.convolve(x.float(), w), TypeError, "x must be codes of"),
        (lambda x, w, g: products.convolve(x, w[:, :3]), ValueError, "needs 3 input channels, got 4"),
        (
            lambda x, w, g: products.convolve(x, w[:, :3, :1, :1]),
            ValueError,
            r"^a linear layer, or 1 x 1 convolution, with a weight of shape \(3, 3\) needs 3 input",
        ),
        (lambda x, w, g: products.convolve(x[0, 0], w), ValueError, "3 or 4 dimensions"),
        (lambda x, w, g: products.convolve(x, w, groups=3), ValueError, "needs 12 input channels"),
        (lambda x, w, g: products.convolve(x, w, stride=0), ValueError, "1 or more"),
        (lambda x, w, g: products.convolve(x, w, padding=(1,)), ValueError, "one number or 2"),
        (lambda x, w, g: products.convolve(x, w, dilation=3), ValueError, "smaller than a kernel"),
        (lambda x, w, g: products.convolve(x, w, exponents=200), ValueError, "-126 to 128, got 200"),
        (lambda x, w, g: products.convolve(x, w, dtype=torch.float32), TypeError, "need exponents"),
        (
            lambda x, w, g: products.convolve(x, w, exponents=torch.zeros(2, dtype=torch.int32)),
            ValueError,
            r"one for each output channel \(3\)",
        ),
        (
            lambda x, w, g: products.convolve(x, w, exponents=torch.zeros(3)),
            TypeError,
            "exponents must be int32, got torch.float32",
        ),
        (
            lambda x, w, g: products.convolve_input_gradient(g, w, (6, 5)),
            ValueError,
            r"grad must have the shape of the output, \(samples, 3, 4, 3\)",
        ),
        (
            lambda x, w, g: products.convolve_weight_gradient(x, g, (2, 3)),
            ValueError,
            "grad must have the shape of the output",
        ),
        (
            lambda x, w, g: products.convolve_weight_gradient(x[:1], g, (3, 3)),
            ValueError,
            "as many samples, got 1 and 2",
        ),
        (
            lambda x, w, g: products.convolve_weight_gradient(x, g.to(torch.uint8), (3, 3)),
            TypeError,
            "grad must be codes of torch.int8",
        ),
        (lambda x, w, g: products.round_per_sample(x), TypeError, "floating tensor, got torch.int8"),
        (
            lambda x, w, g: products.round_per_sample(torch.ones(2, requires_grad=True)),
            RuntimeError,
            "requires one",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_is_required(call, error, message):
    with pytest.raises(error, match=message):
        call(*GOOD)


@pytest.mark.parametrize("path", HERE)
def test_exponents_end_where_float32_does(path):
    x, weight, grad = codes(4, 3, 6, 6, dtype=torch.uint8), codes(4, 3, 3, 3), codes(4, 4, 6, 6)
    far = torch.tensor([-(2**31), -127, 129, 2**31 - 1], dtype=torch.int32)
    numbers = {"padding": 1}
    with products.force(path):
        found, ends = (
            (
                products.convolve(x, weight, exponents=e, **numbers),
                products.convolve_input_gradient(grad, weight, (6, 6), exponents=e, **numbers),
                products.convolve_weight_gradient(x, grad, (3, 3), exponents=e, **numbers),
            )
            for e in (far, far.clamp(-126, 128))
        )
    assert found[0][:, 3].isinf().any()
    assert found[0][:, 0].isfinite().all()
    for own, expected in zip(found, ends, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize(("far", "end"), [(-(2**31), -126), (129, 128), (2**31 - 1, 128)])
def test_one_exponent_ends_where_float32_does(path, far, end):
    x, weight = codes(2, 3, 6, 6, dtype=torch.uint8), codes(4, 3, 3, 3)
    with products.force(path):
        own, expected = (
            products.convolve(x, weight, exponents=torch.tensor([e], dtype=torch.int32))
            for e in (far, end)
        )
    torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("shape", [(0, 4, 5, 5), (2, 4, 5, 5)])
def test_empty_batches(shape, path):
    x, weight = codes(*shape)[:0], codes(3, 4, 3, 3)
    grad, exponents = codes(0, 3, 3, 3), torch.zeros(0, dtype=torch.int32)
    with products.force(path):
        assert products.convolve(x, weight).shape == (0, 3, 3, 3)
        assert products.convolve_input_gradient(grad, weight, (5, 5)).shape == (0, 4, 5, 5)
        own = products.convolve_weight_gradient(x, grad, (3, 3), exponents=exponents)
        assert torch.equal(own, torch.zeros(3, 4, 3, 3))
        assert not products.convolve_weight_gradient(x, grad, (3, 3)).any()


@pytest.mark.parametrize("path", HERE)
def test_images_of_padding_alone(path):
    x, weight = codes(2, 4, 0, 5), codes(3, 4, 3, 3)
    with products.force(path):
        y = products.convolve(x, weight, padding=2)
    assert torch.equal(y, torch.zeros(2, 3, 2, 7, dtype=torch.int32))


SCRIPT = """
import torch
from fixedpoint_kernels import FixedPoint, products
x = (torch.arange(2 * 20 * 9 * 9) % 251).to(torch.uint8).view(2, 20, 9, 9)
weight = (torch.arange(33 * 20 * 9) % 255 - 127).to(torch.int8).view(33, 20, 3, 3)
y = products.convolve(x, weight, padding=1)
grad = (y % 127).to(torch.int8)
own = products.convolve_weight_gradient(x, grad, (3, 3), padding=1)
back = products.convolve_input_gradient(grad, weight, (9, 9), padding=1)
print(products.path().name, y.long().square().sum().item(), own.sum().item(), back.sum().item())
"""


def run_script(**environment):
    """Run products in a process of its own; return its path and sums."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "FIXEDPOINT"))}
    kept |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "possible"),
    [
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"}, {"avx2", "stock", "float"}),
        ({"NUMBA_CPU_NAME": "generic"}, {"stock", "float"}),
        ({"NUMBA_DISABLE_JIT": "1", "FIXEDPOINT_KERNELS_PRODUCTS": "float"}, {"float"}),
    ],
    ids=["haswell", "generic", "no compilation"],
)
def test_a_process_falls_back_and_never_aborts(told, possible):
    namespace = {}
    with products.force("float"):
        exec(SCRIPT.replace("print(", "result = str, ("), namespace)
    expected = [str(value) for value in namespace["result"][1][1:]]
    path, *sums = run_script(**told)
    assert path == next(name for name in HERE if name in possible)
    assert sums == expected


def test_a_path_is_named_with_its_reason():
    assert products.path().name in paths.PATHS
    assert products.path().reason
    with products.force("float"):
        assert products.path() == products.Path("float", "it is forced")
    with pytest.raises(ValueError, match="must be one of"), products.force("sse"):
        pass


def test_a_path_that_is_not_possible_is_refused(monkeypatch):
    monkeypatch.setattr(paths, "unavailable", lambda: {"amx": "the processor lacks amx-int8"})
    message = "'amx' is not possible here: the processor lacks"
    with pytest.raises(ValueError, match=message), products.force("amx"):
        pass
    monkeypatch.setenv(paths.VARIABLE, "amx")
    with pytest.raises(ValueError, match="'amx' is not possible here"):
        products.convolve(*GOOD[:2])


@pytest.mark.slow
@pytest.mark.parametrize("path", [name for name in HERE if name in paths.OWN])
def test_two_threads_compute_the_same(path):
    """The tests run on one thread, for which other code is compiled."""
    script = Path(__file__).with_name("products_on_threads.py")
    both = {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}
    environment = {**os.environ, **both, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, script, path], env=environment, check=True)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((5, 3, 32, 32), (8, 8)), ((3, 20, 13, 9), (4, 2)), ((2, 1, 7, 7), (7, 7))],
)
def test_weights_of_patches(shape, kernel, path):
    """Kernels that lie side by side are multiplied as linear layers: rows and columns may be left."""
    x, sizes = codes(*shape), [n // k for n, k in zip(shape[2:], kernel, strict=True)]
    grad, exponents = products.round_per_sample(torch.randn(shape[0], 24, *sizes))
    for own in (None, exponents):
        with products.force(path):
            found = products.convolve_weight_gradient(x, grad, kernel, exponents=own, stride=kernel)
        wanted = reference.weight_gradient(x, grad, own, kernel, Window(kernel))
        assert torch.equal(found, wanted)


def test_codes_whose_memory_was_freed_are_refused():
    x, weight = torch.ones(1, 4, 4, 4, dtype=torch.int8), torch.ones(4, 4, 1, 1, dtype=torch.int8)
    freed = torch.ones(1, 4, 4, 4, dtype=torch.int8)
    freed.untyped_storage().resize_(0)
    for call in (
        lambda: products.convolve(freed, weight),
        lambda: products.convolve_with_statistics(freed, weight),
        lambda: products.convolve_input_gradient(freed, weight, (4, 4)),
        lambda: products.convolve_weight_gradient(x, freed, (1, 1)),
    ):
        with pytest.raises(ValueError, match="its storage was freed"):
            call()


_X, _W = torch.ones(1, 2, 4, 4, dtype=torch.int8), torch.ones(3, 2, 3, 3, dtype=torch.int8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: products.convolve(_X, _W, exponents=1.5), "exponents must be one whole number"),
        (lambda: products.convolve(_X, _W, exponents=[1]), "exponents must be one whole number"),
        (lambda: products.convolve(_X, _W, groups=1.0), "groups must be a whole number, got 1.0"),
        (lambda: products.convolve(_X, _W, stride=1.5), "stride must be one number or a list"),
        (lambda: products.convolve([1], _W), "codes must be a tensor, got list"),
        (lambda: products.convolve(_X, [1]), "codes must be a tensor, got list"),
        (lambda: products.linear([[1, 2]], _W[0, 0]), "codes must be a tensor, got list"),
        (lambda: products.convolve_input_gradient(_X, _W, 3), "size must be a list"),
        (lambda: products.convolve_weight_gradient(_X, _X, 2), "kernel must be a list"),
        (lambda: products.round_per_sample([1.0]), "needs a floating tensor, got list"),
        (lambda: products.round_per_sample(_X.float(), seed="a"), "seed must be a whole number"),
    ],
)
def test_what_is_no_tensor_or_no_number_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()
