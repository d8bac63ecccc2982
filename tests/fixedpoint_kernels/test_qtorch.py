"""Beside QPyTorch, wherever QPyTorch is right: nearest for word lengths up to 24 bits, floats but for ties.

Importing ``qtorch.quant`` compiles C++ into torch's extensions folder. A build that was killed
leaves a lock file there on which the next import waits for ever, so the build has a folder of its
own and is made first in a child, with a timeout.
"""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixedpoint_kernels import FixedPoint, Minifloat, quantize

NEEDS = {
    "the package qtorch": importlib.util.find_spec("qtorch"),
    "the program ninja": shutil.which("ninja"),
    "the program g++": shutil.which("g++"),
}
MISSING = ", ".join(name for name, found in NEEDS.items() if not found)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")]
formats = st.integers(2, 24).flatmap(
    lambda wl: st.builds(FixedPoint, st.just(wl), st.integers(0, 23), st.booleans())
)


@pytest.fixture(scope="module")
def qtorch(pytestconfig):
    """Return the package, compiled."""
    folder = pytestconfig.cache.mkdir("qtorch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        build = [sys.executable, "-c", "import qtorch.quant"]
        try:
            subprocess.run(build, env=os.environ, check=True, capture_output=True, timeout=240)
        except subprocess.TimeoutExpired:
            shutil.rmtree(folder)
            pytest.fail(f"building qtorch took more than 240 seconds; {folder} is removed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # setuptools' and torch's, about the build
            import qtorch.quant
        yield qtorch


def round_there(qtorch, x, fmt, rounding):
    return qtorch.quant.fixed_point_quantize(
        x, fmt.wl, fmt.fl, clamp=True, symmetric=fmt.symmetric, rounding=rounding
    )


@given(fmt=formats.filter(lambda fmt: fmt.fl > 0))
def test_formats_go_there_and_back(fmt, qtorch):
    number = fmt.to_qtorch()
    assert (number.wl, number.fl, number.clamp) == (fmt.wl, fmt.fl, True)
    assert FixedPoint.from_qtorch(number) == fmt


def test_formats_of_one_side_only_are_refused(qtorch):
    with pytest.raises(ValueError, match="1 or more, got <8, 0>"):
        FixedPoint(8, 0).to_qtorch()
    with pytest.raises(ValueError, match="must saturate"):
        FixedPoint.from_qtorch(qtorch.FixedPoint(8, 4, clamp=False))


@pytest.mark.parametrize("wl", [2, 3, 8, 16, 24])
@pytest.mark.parametrize("fl", [0, 4, 20])
def test_nearest_is_the_same(qtorch, wl, fl):
    fmt = FixedPoint(wl, fl)
    halves = (torch.arange(2001) - 1000) * (fmt.lsb / 4)  # ties among them
    x = torch.cat([halves, torch.randn(10_000) * fmt.max, torch.tensor([math.inf, -math.inf])])
    assert_same_nearest(qtorch, x, fmt)


@given(fmt=formats, x=st.lists(st.floats(width=32), min_size=1, max_size=9))
def test_nearest_is_the_same_everywhere(qtorch, fmt, x):
    assert_same_nearest(qtorch, torch.tensor(x), fmt)


def assert_same_nearest(qtorch, x, fmt):
    expected = round_there(qtorch, x, fmt, "nearest")
    actual = quantize(x, fmt, rounding="nearest")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("x", [0.03, -0.3, 1.28, 7.95, -7.99])
def test_stochastic_goes_up_equally_often(qtorch, x):
    fmt, n = FixedPoint(8, 4), 100_000
    values = torch.full((n,), x)
    up = values[0].double().item() / fmt.lsb % 1
    ours = quantize(values, fmt, seed=1).double().mean()
    theirs = round_there(qtorch, values, fmt, "stochastic").double().mean()
    std = fmt.lsb * math.sqrt(2 * up * (1 - up) / n)  # of a difference of two means
    assert abs(ours - theirs) < 5 * std


def test_stochastic_takes_the_same_neighbours(qtorch):
    x, fmt = torch.randn(10_000) * 4, FixedPoint(8, 4)
    ours, theirs = quantize(x, fmt, seed=1), round_there(qtorch, x, fmt, "stochastic")
    low = quantize(torch.floor(x / fmt.lsb) * fmt.lsb, fmt, rounding="nearest")
    high = quantize(torch.ceil(x / fmt.lsb) * fmt.lsb, fmt, rounding="nearest")
    for y in (ours, theirs):
        assert ((y == low) | (y == high)).all()


@pytest.mark.parametrize(("exp", "man"), [(4, 3), (5, 2), (2, 1), (6, 9), (3, 4)])
def test_minifloats_are_the_same(qtorch, exp, man):
    """But for ties, which QPyTorch rounds away from 0, and what it makes ties of below ``lsb``."""
    fmt = Minifloat(exp, man)
    assert Minifloat.from_qtorch(fmt.to_qtorch()) == fmt
    x = torch.cat([torch.randn(20_000) * 4 * fmt.lsb, torch.randn(20_000) * fmt.max])
    places = fmt.man - torch.frexp(x).exponent.sub(1).clamp(min=fmt.min_exponent)
    rest = (x.double().abs() * places.double().exp2()) % 1
    is_clear = (rest - 0.5).abs() > 1e-3
    assert is_clear.double().mean() > 0.9
    expected = qtorch.quant.float_quantize(x, exp, man, rounding="nearest")
    actual = quantize(x, fmt, rounding="nearest")
    torch.testing.assert_close(actual[is_clear], expected[is_clear] + 0.0, rtol=0, atol=0)


def test_a_minifloat_that_qpytorch_has_not_is_refused():
    with pytest.raises(ValueError, match='has specials="none"'):
        Minifloat(4, 3, "nan").to_qtorch()
