import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fixedpoint_kernels import FixedPoint, encode, quantize
from marvin.export import ExportError, integer, verify
from marvin.export.execute.arithmetic import round_codes, round_fraction, weigh
from marvin.export.execute.simulate import simulate
from marvin.export.graph.bounds import first_value, value_of
from marvin.export.graph.nodes import Add, AveragePool, Conv, Input, Linear, MaxPool, Network, Round


@given(
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=5),
    st.integers(-31, 62),
    st.integers(2, 32),
    st.integers(-31, 31),
    st.integers(1, 64),
)
def test_rounding_is_that_of_fractions(numbers, fl, wl, to, divisor):
    fmt = FixedPoint(wl, to)
    want = [round_fraction(Fraction(n, divisor) * Fraction(2) ** -fl, fmt) for n in numbers]
    for dtype in (np.int64, object):
        got = round_codes(np.array(numbers, dtype=dtype), fl, fmt, divisor)
        assert got.dtype == np.int64
        assert got.tolist() == want


@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=9), st.integers(2, 24))
def test_what_comes_in_is_rounded_as_training_does(numbers, wl):
    fmt, x = FixedPoint(wl, wl - 4), torch.tensor(numbers)
    want = encode(x, fmt, rounding="nearest")
    assert integer.encode_input(x, fmt).tolist() == want.tolist()


def by_hand(weight, x, stride, padding, dilation, groups):
    """Return a convolution of Python's integers, one product at a time."""
    out, channels, height, width = weight.shape
    padded = np.pad(
        np.array(x.tolist(), dtype=object), [(0, 0), (0, 0), *((p, p) for p in padding)]
    )
    sizes = [
        (padded.shape[2 + i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    ]
    y = np.zeros((len(x), out, *sizes), dtype=object)
    for n, o, i, j in itertools.product(*map(range, y.shape)):
        first, step = o // (out // groups) * channels, stride[1]
        y[n, o, i, j] = sum(
            int(weight[o, c, a, b])
            * int(padded[n, first + c, i * stride[0] + a * dilation[0], j * step + b * dilation[1]])
            for c, a, b in itertools.product(range(channels), range(height), range(width))
        )
    return y


@pytest.mark.parametrize(("wl", "activation"), [(4, 6), (8, 8), (24, 24), (32, 24), (32, 32)])
@pytest.mark.parametrize(
    "window", [((1, 1), (1, 1), (1, 1), 1), ((2, 1), (0, 2), (1, 2), 2)], ids=str
)
def test_convolutions_are_exact_at_any_word_length(wl, activation, window):
    chance = np.random.default_rng(0)
    weight = chance.integers(-(2 ** (wl - 1)), 2 ** (wl - 1), (4, 4 // window[3], 2, 3))
    weight[0] = -(2 ** (wl - 1))
    x = chance.integers(-(2 ** (activation - 1)), 2 ** (activation - 1), (2, 4, 5, 6))
    x[0] = -(2 ** (activation - 1))
    stride, padding, dilation, groups = window
    fmt = FixedPoint(wl, 0)
    codes = torch.from_numpy(weight)
    op = Conv("c", ("x",), codes, fmt, None, fmt, stride, padding, dilation, groups)
    assert (weigh(op, x) == by_hand(weight, x, *window)).all()


@pytest.mark.parametrize("terms", [5, 9000])
def test_linear_layers_are_exact_beyond_int64(terms):
    weight = torch.full((2, terms), -(2**31))
    weight[1, 1] = 1
    x = np.full((1, terms), -(2**31))
    op = Linear("l", ("x",), weight, FixedPoint(32, 0), None, FixedPoint(32, 0))
    assert weigh(op, x).tolist() == [[terms * 2**62, (terms - 1) * 2**62 - 2**31]]


def network_of(*ops):
    """Return a network of 32 bits whose values after the first layer do not fit in int64."""
    fmt = FixedPoint(32, 0)
    first = Conv(
        "c", ("r",), torch.full((1, 1, 2, 2), 2**31 - 1), fmt, None, fmt, (1, 1), (1, 1), (1, 1), 1
    )
    ops = Input("x", (), (1, 4, 4)), Round("r", ("x",), fmt), first, *ops
    values = {"r": first_value(ops[1], (1, 4, 4))}
    for op in ops[2:]:
        values[op.name] = value_of(op, [values[name] for name in op.inputs])
    return Network(ops, values, "trained")


def test_layers_take_sums_wider_than_int64():
    fmt = FixedPoint(32, 0)
    numbers = torch.full((1, 1, 2, 2), -(2**31)), fmt, None, fmt, (1, 1), (0, 0), (1, 1), 1
    network = network_of(Conv("d", ("c",), *numbers), Conv("e", ("d",), *numbers))
    codes = integer.run_all(network, torch.full((1, 1, 4, 4), 2.0**31))
    assert codes["c"][0, 0, 2, 2] == 4 * (2**31 - 1) ** 2
    window = codes["c"][0, 0, 1:3, 1:3].tolist()
    assert codes["d"][0, 0, 1, 1] == -(2**31) * sum(map(sum, window))
    window = codes["d"][0, 0, 1:3, 1:3].tolist()
    assert codes["e"][0, 0, 1, 1] == -(2**31) * sum(map(sum, window))


@pytest.mark.parametrize("sign", [1, -1])
def test_pools_put_zeros_around_sums_wider_than_int64(sign):
    fmt, pool = FixedPoint(32, -31), ((2, 2), (1, 1), (1, 1))
    network = network_of(
        AveragePool("a", ("c",), *pool, fmt),
        MaxPool("m", ("c",), *pool, (1, 1)),
        Add("s", ("m", "m")),
    )
    codes = integer.run_all(network, torch.full((1, 1, 4, 4), sign * 2.0**31))
    corner = codes["c"][0, 0, 0, 0]
    assert codes["a"][0, 0, 0, 0] == round(Fraction(corner, 4 * 2**31))
    assert codes["m"][0, 0, 0, 0] == corner
    assert codes["s"][0, 0, 0, 0] == 2 * corner
    assert not any(isinstance(code, np.integer) for code in codes["m"].ravel())


@pytest.mark.parametrize(("wl", "fl"), [(4, 2), (6, 3), (8, 5), (10, 6)])
def test_integers_and_float32_agree_while_the_bound_holds(digits, plain, wl, fl):
    # 10 bits: sums reach 54 * 2**18 in general and less than 2**24 with these weights
    for make in (digits, plain) if wl <= 8 else (plain,):
        _, network, x = make(wl, fl)
        rows = verify(network, x)
        assert all(row.is_exact for row in rows)
        assert [row.different for row in rows] == [0] * len(rows)


@pytest.mark.parametrize(("wl", "fl"), [(16, 12), (20, 14), (32, 26)])
def test_beyond_the_bound_float32_differs_and_float64_does_not(digits, wl, fl):
    _, network, x = digits(wl, fl)
    rows = verify(network, x)
    assert sum(row.different for row in rows) > 0
    first = next(row for row in rows if row.different)  # the others inherit
    assert not first.is_exact
    assert {row.is_bounded for row in rows} == {None, False}
    want = simulate(network, x, dtype=torch.float64)[network.output]
    if all(value.is_exact(53) for value in network.values.values()):
        torch.testing.assert_close(integer.run(network, x), want, rtol=0, atol=0)
    else:
        assert wl == 32


def test_bounds_hold_and_are_reached(plain):
    _, network, _ = plain(6, 3)
    torch.manual_seed(0)
    x = torch.randn(300, *network.input.shape).sign() * 1000
    for name, codes in integer.run_all(network, x).items():
        value = network.values[name]
        assert value.low <= codes.min()
        assert codes.max() <= value.high
        assert -(2 ** (value.bits - 1)) <= codes.min()
        assert codes.max() < 2 ** (value.bits - 1)
    assert network.values["0.in"].high == 31
    assert codes.shape[1:] == network.values[network.output].shape


def test_a_padded_maximum_is_never_the_padding(make):
    _, network, x = make(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(3, 2, padding=1)), (1, 5, 5)
    )
    rows = verify(network, x - 3)
    assert [row.different for row in rows] == [0] * len(rows)


def test_saturation_is_that_of_training(plain):
    model, network, x = plain(5, 4)
    with torch.no_grad():
        want = model(x * 50)
    codes = integer.run_all(network, x * 50)
    assert any((c == 15).any() for name, c in codes.items() if name.endswith(".out"))
    torch.testing.assert_close(integer.run(network, x * 50), want.double(), rtol=0, atol=0)


def test_bad_input_is_refused(plain):
    _, network, x = plain()
    with pytest.raises(ExportError, match="got NaN"):
        integer.run(network, x * torch.nan)
    with pytest.raises(ExportError, match=r"shape \(n, \(2, 8, 8\)\), got \(5, 2, 8\)"):
        integer.run(network, x[..., 0])


def test_infinities_saturate(plain):
    _, network, x = plain()
    top = quantize(torch.full_like(x, torch.inf), FixedPoint(8, 5), rounding="nearest")
    want = integer.run(network, top)
    assert torch.equal(integer.run(network, torch.full_like(x, torch.inf)), want)


def test_samples_are_computed_some_at_a_time(ranged, monkeypatch):
    """Values of all layers are hundreds of times the samples: not those of all samples together."""
    _, network, x = ranged()
    want = integer.run(network, x)
    each = sum(math.prod(value.shape) for value in network.values.values())
    sizes, run_all = [], integer.run_all

    def counted(network, part):
        sizes.append(len(part))
        return run_all(network, part)

    monkeypatch.setattr(integer, "run_all", counted)
    for codes, most in ((each // 2, 1), (3 * each + 1, 3), (each * len(x), len(x))):
        monkeypatch.setattr(integer, "_CODES", codes)
        sizes.clear()
        assert torch.equal(integer.run(network, x), want)
        assert max(sizes) == most
        assert sum(sizes) == len(x)
    assert integer.run(network, x[:0]).shape == (0, *want.shape[1:])
