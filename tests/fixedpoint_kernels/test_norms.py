import math

import pytest
import torch

from fixedpoint_kernels.norms import norms_many
from fixedpoint_kernels.norms.cpu import PIECE
from fixedpoint_kernels.threads import is_parallel

SIZES = 1, 7, 0, 1023, PIECE, PIECE + 1, 3 * PIECE + 5


def tensors(sizes=SIZES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator) * 10.0**i for i, n in enumerate(sizes)]


def exact(x: torch.Tensor) -> float:
    """Python's own: squares of float32 are exact in float64, and ``fsum`` rounds once."""
    return math.sqrt(math.fsum(v * v for v in x.double().flatten().tolist()))


def test_norms_are_those_of_exact_sums():
    xs = tensors()
    got = norms_many(xs)
    assert got.dtype is torch.float64
    assert got.shape == (len(xs),)
    for norm, x in zip(got.tolist(), xs, strict=True):
        assert norm == pytest.approx(exact(x), rel=1e-14)  # float64 sums of 50,000 squares
    assert got.float().tolist() == [torch.tensor(exact(x)).float().item() for x in xs]


def test_sizes_whose_squares_float32_cannot_hold():
    xs = [torch.full((5,), 1e30), torch.full((4,), 1e-30), torch.tensor([math.inf, 1.0])]
    got = norms_many(xs).tolist()
    assert got[:2] == pytest.approx([exact(x) for x in xs[:2]], rel=1e-15)
    assert got[2] == math.inf
    for bad in (math.nan, math.inf):
        x = torch.ones(PIECE + 3)
        x[PIECE + 1] = bad
        assert not math.isfinite(norms_many([torch.ones(2), x])[1].item())


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(48.0).view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0)[::2],
        torch.ones(1).expand(9),
        torch.arange(9.0).bfloat16(),
        torch.arange(9.0).double(),
        torch.nn.Parameter(torch.arange(9.0)),
    ],
    ids=["transposed", "channels last", "strided", "expanded", "bfloat16", "float64", "parameter"],
)
def test_layouts_and_dtypes(x):
    xs = [torch.arange(5.0), x.detach() if x.is_leaf else x]
    assert norms_many(xs).tolist() == pytest.approx([exact(y) for y in xs], rel=1e-15)


def test_threads_change_no_bit(monkeypatch):
    xs = tensors((100_000, 3, 70_000))
    want = norms_many(xs)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    try:
        assert is_parallel(170_003)
        assert torch.equal(norms_many(xs), want)
    finally:
        torch.set_num_threads(threads)


def test_float32_is_added_up_in_float32_where_a_device_has_no_more():
    got = norms_many([torch.full((4,), 0.5)], dtype=torch.float32)
    assert got.dtype is torch.float32
    assert got.tolist() == [1.0]
