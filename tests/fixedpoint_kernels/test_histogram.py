import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels import FixedPoint, histogram_candidates, quantize
from fixedpoint_kernels.histogram import (
    bins_of,
    cpu,
    gpu,
    grid_histogram,
    reference,
    sampled_histogram,
)
from fixedpoint_kernels.histogram.reference import Cells
from fixedpoint_kernels.philox import Key

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
    x=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9).filter(
        lambda x: min(x) < max(x)
    ),
    fl=st.integers(-3, 12),
    resolution=st.integers(1, 150),
)
def test_kernels_equal_the_reference_everywhere(x, fl, resolution):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.tensor(x)
    if not math.isfinite(bins_of(x, resolution).inverse_width):
        return  # a range so small that the bins vanish in float32
    assert_same_counts(x, [FixedPoint(9, fl)], resolution, "stochastic", Key(0, 0), device)
    first = math.floor(x.min().item() * 2.0**fl)
    size = math.floor(x.max().item() * 2.0**fl) - first + 1
    assert_same_cells(x, resolution, Cells(fl, first, size), device)


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


def test_too_fine_for_expected_counts():
    with pytest.raises(ValueError, match="at most 16777216 steps"):
        histogram_candidates(torch.randn(9), [FixedPoint(32, 28)], 50, rounding="expected")
