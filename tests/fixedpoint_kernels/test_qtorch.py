"""Beside QPyTorch, wherever QPyTorch is right: nearest for word lengths up to 24 bits, floats but for ties.

Importing ``qtorch.quant`` compiles C++ into torch's extensions folder. A build that was killed
leaves a lock file there on which the next import waits for ever, so the build has a folder of its
own and is made first in a child, with a timeout.
"""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import marvin
from fixedpoint_kernels import BlockFloat, FixedPoint, Minifloat, quantize, quantize_block

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


# Rows of docs/migration.md, both sides.


@pytest.mark.parametrize("wl", [4, 8])
def test_block_floating_point_rounds_to_its_own_grid(qtorch, wl):
    """Equal where both take the same power of two and nobody saturates."""
    x = torch.randn(4000).clamp(-3.4, 3.4)
    x[0] = 3.25  # 2 <= largest < 4 - half a step, for both
    ours = quantize_block(x, BlockFloat(wl), rounding="nearest")
    theirs = qtorch.quant.block_quantize(x, wl, rounding="nearest")
    step = 2.0 ** (3 - wl)  # of codes to 2**(wl - 1)
    is_clear = ((x.double().abs() / step) % 1 - 0.5).abs() > 1e-3
    torch.testing.assert_close(ours[is_clear], theirs[is_clear] + 0.0, rtol=0, atol=0)


@pytest.mark.parametrize("is_float", [False, True])
def test_quantizers_are_the_same_there_and_back(qtorch, is_float):
    fmt = Minifloat(5, 9) if is_float else FixedPoint(9, 5)
    gradient, values = torch.randn(4000), torch.randn(4000) * 2
    results = []
    for quantizer in (
        marvin.Quantizer(
            fmt, fmt, forward_rounding="nearest", backward_rounding="nearest", ste="identity"
        ),
        qtorch.quant.Quantizer(fmt.to_qtorch(), fmt.to_qtorch(), "nearest", "nearest"),
    ):
        x = values.clone().requires_grad_()
        y = quantizer(x * 1.0)
        y.backward(gradient)
        results.append((y.detach() + 0.0, x.grad + 0.0))
    for ours, theirs in zip(*results, strict=True):
        differ = ours != theirs  # ties alone
        assert differ.sum() < 20
        assert (ours - theirs).abs().max() <= 2.0**-5


def test_optimizers_move_accumulators_and_momenta_alike(qtorch):
    """With gradients that do not depend on the weights, in formats in which there are no ties."""
    from qtorch.optim import OptimLP

    acc, momentum = FixedPoint(14, 10), FixedPoint(12, 8)
    gradients = torch.randn(8, 6, 5)
    weights = torch.randn(6, 5)

    def sgd(p):
        return torch.optim.SGD([p], lr=0.3, momentum=0.9)

    p = torch.nn.Parameter(weights.clone())
    ours = marvin.Quantized(sgd(p), marvin.FixedPolicy(8, 4))
    marvin.round_state(ours, momentum=momentum, master=acc, rounding="nearest")
    q = torch.nn.Parameter(weights.clone())
    number = {"forward_rounding": "nearest"}
    theirs = OptimLP(
        sgd(q),
        acc_quant=qtorch.quant.quantizer(acc.to_qtorch(), **number),
        momentum_quant=qtorch.quant.quantizer(momentum.to_qtorch(), **number),
    )
    for gradient in gradients:
        p.grad, q.grad = gradient.clone(), gradient.clone()
        ours.step(loss=1.0)
        theirs.step()
    (state,) = ours.optimizer.state.values()
    torch.testing.assert_close(ours.state[p]["master"], theirs.weight_acc[q], rtol=0, atol=0)
    torch.testing.assert_close(
        state["momentum_buffer"], theirs.optim.state[q]["momentum_buffer"], rtol=0, atol=0
    )


def test_every_name_of_qpytorch_has_its_row(qtorch):
    from qtorch import auto_low, number, optim

    page = (Path(__file__).parents[2] / "docs/migration.md").read_text()
    table = page.split("| QPyTorch |")[1].split("\n\n")[0]
    named = {*re.findall(r"\w+", " ".join(row.split("|")[1] for row in table.splitlines()[2:]))}
    public = {*qtorch.quant.__all__, *auto_low.__all__, *optim.__all__, *number.__all__}
    assert public - {"Number"} <= named
