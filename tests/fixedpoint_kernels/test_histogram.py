import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels import FixedPoint, histogram_candidates, quantize
from fixedpoint_kernels.histogram import (
    Bins,
    Expected,
    bins_of,
    cpu,
    gpu,
    grid_histogram,
    reference,
    sampled_histogram,
)
from fixedpoint_kernels.histogram.reference import Cells
from fixedpoint_kernels.philox import Key

TINIEST, LARGEST = 2.0**-149, float(torch.finfo(torch.float32).max)
FORMATS = [FixedPoint(8, fl) for fl in range(2, 9)] + [FixedPoint(5, 6), FixedPoint(16, 12)]


def assert_same_counts(x, fmts, resolution, rounding, key, device):
    bins = bins_of(x, resolution)
    expected = reference.sampled(x, fmts, bins, rounding, key)
    assert torch.equal(cpu.sampled(x, fmts, bins, rounding, key), expected)
    assert torch.equal(gpu.sampled(x.to(device), fmts, bins, rounding, key).cpu(), expected)
    assert (expected.sum(1) == x.numel()).all()


def assert_same_cells(x, resolution, grid, device):
    bins = bins_of(x, resolution)
    expected = reference.cells(x, bins, grid)
    torch.testing.assert_close(cpu.cells(x, bins, grid), expected, rtol=0, atol=0)
    actual = [t.cpu() for t in gpu.cells(x.to(device), bins, grid)]
    torch.testing.assert_close(tuple(actual), expected, rtol=0, atol=0)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("n", "resolution"), [(2, 50), (1023, 1), (3000, 150), (60_001, 64)])
def test_kernels_equal_the_reference(n, resolution, rounding, device):
    fmts = FORMATS if n < 60_000 else FORMATS[:2]
    assert_same_counts(torch.randn(n) / 4, fmts, resolution, rounding, Key(3, 2**35), device)


@settings(max_examples=25 * settings().max_examples // 100)
@given(
    x=st.lists(
        st.floats(-100, 100, width=32) | st.floats(-LARGEST, LARGEST, width=32),
        min_size=2,
        max_size=9,
    ).filter(lambda x: min(x) < max(x)),
    fl=st.integers(-31, 31),
    resolution=st.integers(1, 150),
)
def test_kernels_equal_the_reference_everywhere(x, fl, resolution):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.tensor(x)
    assert_same_counts(x, [FixedPoint(9, fl)], resolution, "stochastic", Key(0, 0), device)
    low, high = x.min().item(), x.max().item()
    fl = min(fl, 10 - math.frexp(high - low)[1])
    first = math.floor(low * 2.0**fl)
    assert_same_cells(
        x, resolution, Cells(fl, first, math.floor(high * 2.0**fl) - first + 1), device
    )


@pytest.mark.parametrize("power", [-149, -140, -127, -126, -100, 0, 100, 115, 116])
def test_a_power_of_two_moves_no_value_to_another_bin(power, device):
    codes = torch.randint(-2000, 2001, (3000,))
    codes[:2] = torch.tensor([-2000, 2000])
    want = torch.bincount((codes + 2000) * 50 // 4000, minlength=51)
    want = torch.cat([want[:49], want[49:].sum()[None]])  # the last bin holds its right end
    x = torch.ldexp(codes.double(), torch.tensor(power)).float()
    assert_same_counts(x, FORMATS[:2], 50, "nearest", Key(0, 0), device)
    for rounding in ("nearest", "stochastic", "expected"):
        own = histogram_candidates(x, [], 50, rounding=rounding)[0].long()
        torch.testing.assert_close(own, want, rtol=0, atol=0)


EXTREMES = {
    "subnormal": [0.0, 1e-38],
    "one subnormal step": [0.0, TINIEST],
    "subnormals": [-1e-39, 1e-38, 3e-39],
    "an overflowing difference": [-3e38, 3e38, 0.0, 1.0],
    "all of float32": [-LARGEST, LARGEST, TINIEST, -TINIEST],
    "one step far from 0": [3e38, float(np.nextafter(np.float32(3e38), np.float32(0)))],
    "one step near 1": [1.0, 1.0 + 2.0**-23],
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("resolution", [1, 2, 100, 150])
def test_extreme_ranges_are_counted(name, resolution, device):
    x = torch.tensor(EXTREMES[name] * 50)
    fmts = [FixedPoint(8, 4), FixedPoint(32, 31), FixedPoint(32, -31), FixedPoint(2, 31)]
    for rounding in ("nearest", "stochastic"):
        assert_same_counts(x, fmts, resolution, rounding, Key(5, 6), device)
    expected = histogram_candidates(x, fmts, resolution, rounding="expected")
    sampled = histogram_candidates(x, fmts, resolution, seed=5, stream=6)
    assert (expected.sum(1) == len(x)).all()
    # 5 standard deviations of a bin's count; a place in a step is in 2**-24
    std = torch.sqrt(expected.clamp(max=len(x) / 4))
    assert ((expected - sampled).abs() <= 5 * std + len(x) * 2**-24).all()
    assert expected[0, 0] > 0
    assert expected[0, -1] > 0


def test_no_count_leaves_the_row(device):
    # values that histogram_candidates refuses: a kernel that gets them must stay in its memory
    x = torch.tensor([math.nan, math.inf, -math.inf, LARGEST, -LARGEST, 1e9, -1e9, 0.0, 0.3] * 30)
    bins = bins_of(torch.tensor([-1.0, 1.0]), 50)
    for rounding in ("nearest", "stochastic"):
        expected = reference.sampled(x, FORMATS, bins, rounding, Key(1, 2))
        assert (expected.sum(1) == len(x)).all()
        assert torch.equal(cpu.sampled(x, FORMATS, bins, rounding, Key(1, 2)), expected)
        actual = gpu.sampled(x.to(device), FORMATS, bins, rounding, Key(1, 2))
        assert torch.equal(actual.cpu(), expected)
    own, table = reference.cells(x, bins, Cells(5, -32, 64))
    assert own.sum() == table[:, 0].sum() == len(x)
    torch.testing.assert_close(cpu.cells(x, bins, Cells(5, -32, 64)), (own, table), rtol=0, atol=0)
    actual = [t.cpu() for t in gpu.cells(x.to(device), bins, Cells(5, -32, 64))]
    torch.testing.assert_close(tuple(actual), (own, table), rtol=0, atol=0)


@pytest.mark.parametrize("resolution", [0, -1, 2**20, 2.5, "50"])
def test_too_many_bins_are_refused(resolution):
    with pytest.raises(ValueError, match="needs a whole number of bins, 1 to 1048575"):
        histogram_candidates(torch.tensor([0.0, 1.0]), [], resolution)


def test_counts_of_parts_add_up(device):
    x = torch.randn(60_011)
    bins, key = bins_of(x, 60), Key(3, 2**35, 6)
    whole = reference.sampled(x, FORMATS[:2], bins, "stochastic", key)
    for implementation, where in ((reference, "cpu"), (cpu, "cpu"), (gpu, device)):
        total = torch.zeros_like(whole)
        for part, first in zip(x.split([3, 50_002, 10_006]), (6, 9, 50_011), strict=True):
            own = Key(3, 2**35, first)
            total += implementation.sampled(
                part.to(where), FORMATS[:2], bins, "stochastic", own
            ).cpu()
        torch.testing.assert_close(total, whole, rtol=0, atol=0)
    own, grid = grid_histogram(x, bins, 5)
    parts = [grid_histogram(part, bins, 5) for part in (x[:7], x[7:], x[:0])]
    assert (sum(part for part, _ in parts) == own).all()
    assert (sum(part.table for _, part in parts) == grid.table).all()
    assert not sampled_histogram(x[:0], FORMATS, bins, key).any()


def test_parallel_cells_equal_the_reference(device):
    x = torch.rand(60_001) - 0.5
    assert_same_cells(x, 50, Cells(8, -128, 256), device)


def test_own_row_is_numpys_histogram():
    x = torch.randn(5000)
    counts = histogram_candidates(x, [], 50)[0].numpy()
    expected, _ = np.histogram(x.double().numpy(), 50)
    assert np.abs(counts - expected).sum() <= 4  # values on an edge, to float32's last bit
    assert torch.equal(
        histogram_candidates(x, [], 50, rounding="expected")[0].long(), torch.tensor(counts)
    )


def test_candidates_are_the_rounded_values():
    x, fmt = torch.randn(4000), FixedPoint(6, 3)
    rounded = quantize(x, fmt, seed=9, stream=2)
    counts = histogram_candidates(x, [fmt], 60, seed=9, stream=2)[1]
    expected = torch.bincount(reference.bin_of(rounded, bins_of(x, 60)), minlength=60)
    assert torch.equal(counts, expected)


def test_expected_counts_are_the_mean_of_sampled_ones():
    x, draws = torch.randn(500) / 3, 400
    fmts = [FixedPoint(8, fl) for fl in range(1, 9)] + [FixedPoint(4, 5)]
    expected = histogram_candidates(x, fmts, 50, rounding="expected")
    total = sum(histogram_candidates(x, fmts, 50, seed=seed) for seed in range(draws))
    # a bin's count is a sum of independent events: its variance is at most n/4 and at most its mean
    std = torch.sqrt(expected.clamp(max=x.numel() / 4).clamp(min=1 / draws) / draws)
    assert ((total / draws - expected).abs() <= 5 * std).all()
    torch.testing.assert_close(expected.sum(1), torch.full((10,), 500.0, dtype=torch.float64))


def test_expected_counts_equal_probabilities_summed_one_by_one():
    x = (torch.rand(300) - 0.3).double()
    fmt, resolution = FixedPoint(5, 3), 20
    bins = bins_of(x.float(), resolution)
    want = torch.zeros(resolution, dtype=torch.float64)
    for value in x.float().double().tolist():
        below = math.floor(value * 8)
        for code, share in ((below, 1 - (value * 8 - below)), (below + 1, value * 8 - below)):
            y = torch.tensor([min(max(code, -16), 15) / 8])
            want[reference.bin_of(y, bins)] += share
    got = histogram_candidates(x.float(), [fmt], resolution, rounding="expected")[1]
    torch.testing.assert_close(got, want, rtol=0, atol=300 * 2**-23)  # places are in 2**-24 steps


def test_coarser_grids_equal_direct_ones():
    x = torch.randn(2000) / 5
    bins = bins_of(x, 50)
    _, fine = grid_histogram(x, bins, 9)
    for fl in (8, 7, 6, 5, -2):
        _, direct = grid_histogram(x, bins, fl)
        torch.testing.assert_close(
            torch.tensor(fine.histograms([FixedPoint(12, fl)])),
            torch.tensor(direct.histograms([FixedPoint(12, fl)])),
            rtol=0,
            atol=2000 * 2**-23,  # the direct one drops what lies below 2**-24 steps
        )
    with pytest.raises(ValueError, match="up to fl=9"):
        fine.histograms([FixedPoint(12, 10)])


@pytest.mark.parametrize(
    "x", [torch.ones(5), torch.tensor([1.0, math.nan]), torch.tensor([0, math.inf]), torch.empty(0)]
)
def test_no_range_is_refused(x):
    with pytest.raises(ValueError, match="needs two different finite values, got a range"):
        histogram_candidates(x, FORMATS, 50)


def one_by_one(x, fmt, resolution):
    """Expected counts, from the documented formula for bins and exact fractions of a step."""
    low, high = np.float32(min(x)), np.float32(max(x))
    largest = 2 ** (fmt.wl - 1) - 1
    largest -= largest % 2 ** max(0, fmt.wl - 25)  # what float32 holds
    counts = [Fraction(0)] * resolution
    for value in map(Fraction, x):
        scaled = value * Fraction(2) ** fmt.fl
        below = math.floor(scaled)
        for code, share in ((below, 1 - (scaled - below)), (below + 1, scaled - below)):
            y = np.float32(min(max(code, -(2 ** (fmt.wl - 1))), largest) * 2.0**-fmt.fl)
            place = math.floor((y - low) * (np.float32(resolution) / (high - low)))
            counts[min(max(place, 0), resolution - 1)] += share
    return torch.tensor(list(map(float, counts)), dtype=torch.float64)


@pytest.mark.parametrize("cells", [8, 64, 2**16])
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**-4, 1.0, 2.0**12])
def test_fine_formats_are_counted_as_exactly_as_coarse_ones(scale, cells):
    x = (torch.randn(120) + 0.4) * scale
    fmts = [FixedPoint(wl, fl) for fl in (-4, 0, 3, 8, 13, 20, 26, 31) for wl in (4, 12, 20, 32)]
    expected = Expected(x, bins_of(x, 40), cells)
    if cells == 8:
        assert expected.fl < 26  # so both ways of counting are seen
    for fmt, row in zip(fmts, expected.histograms(fmts), strict=True):
        want = one_by_one(x.tolist(), fmt, 40)
        torch.testing.assert_close(torch.tensor(row), want, rtol=0, atol=120 * 2**-23, msg=str(fmt))


def test_expected_counts_of_parts_add_up():
    x = torch.randn(5000) / 3
    bins, fmts = bins_of(x, 50), [FixedPoint(20, fl) for fl in (6, 12, 15)]
    whole, counted = Expected(x, bins, 1000), []

    def other(counts):
        counted.append(counts)
        return counts

    Expected(x[:3000], bins, 1000, total=other).histograms(fmts)
    table, moved = counted
    rest = iter((table, moved))
    parts = Expected(x[3000:], bins, 1000, total=lambda counts: counts + next(rest))
    assert (parts.own == whole.own).all()
    assert (parts.histograms(fmts) == whole.histograms(fmts)).all()


@pytest.mark.parametrize("fmts", [FixedPoint(8, 4), [(8, 4)]])
def test_candidates_are_formats(fmts):
    with pytest.raises(TypeError, match=r"must be a sequence of FixedPoint, got .*: write \[Fixed"):
        histogram_candidates(torch.randn(9), fmts, 5)


def test_a_grid_has_a_largest_size():
    x = torch.randn(9)
    with pytest.raises(ValueError, match="at most 16777216 steps"):
        grid_histogram(x, bins_of(x, 50), 28)


def test_bins_that_are_none_are_refused():
    with pytest.raises(ValueError, match="1 bin or more, got resolution=0"):
        sampled_histogram(torch.randn(9), [], Bins(0.0, 1.0, 0, 1.0), Key(0, 0), "nearest")
