"""Derivatives in forward mode, and of what rounds: right, or refused by name; never lost."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.straight_through import StraightThrough, fake_quantize

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
ALONG, BACK = torch.randn_like(X), torch.randn(4, 10)


def _trained(policy: marvin.Policy, is_integer: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip
    optimizer = marvin.Quantized(torch.optim.SGD(model.parameters(), lr=0.01), policy)
    marvin.quantize_activations(model, optimizer)
    if is_integer:
        marvin.integer.convert(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), torch.arange(4))
        loss.backward()
        optimizer.step(loss=loss.detach())
    return model


def _tangent(model: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(X, ALONG))).tangent
    assert found is not None
    return found


@pytest.mark.parametrize("is_integer", [False, True])
def test_forward_mode_tells_what_backward_tells(is_integer: bool) -> None:
    model = _trained(marvin.LossBudgetPolicy(), is_integer).eval()
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad((model(x) * BACK).sum(), x)
    assert grad.any()
    torch.testing.assert_close((_tangent(model) * BACK).sum(), (grad * ALONG).sum())


def test_forward_mode_in_training_takes_what_rounds_for_the_identity() -> None:
    model = _trained(marvin.LossBudgetPolicy(), True).train()
    assert _tangent(model).any()


@pytest.mark.parametrize(("ste", "passed"), [("clip", [0.0, 1.0, 0.0]), ("identity", [1.0] * 3)])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_rounding_in_forward_mode(ste: StraightThrough, passed, needs_gradient: bool) -> None:
    x = torch.tensor([-9.0, 0.3, 9.0], requires_grad=needs_gradient)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        y = fake_quantize(dual, FixedPoint(4, 1), ste=ste, rounding="nearest")
        assert forward_ad.unpack_dual(y).tangent.tolist() == passed


def test_the_gradient_of_an_input_in_block_floating_point() -> None:
    model = _trained(marvin.MuppetPolicy(), False).train()
    x = X.clone().requires_grad_()
    (model(x) * BACK).sum().backward()
    assert x.grad is not None
    assert x.grad.any()


@pytest.mark.parametrize("is_integer", [False, True])
def test_a_frozen_model_says_that_it_has_no_gradient(is_integer: bool) -> None:
    frozen = marvin.freeze(_trained(marvin.LossBudgetPolicy(), is_integer))
    with pytest.warns(UserWarning, match="take the model that was frozen"):
        grad = torch.func.grad(lambda x: frozen(x).sum())(X)
    assert not grad.any()
    if not is_integer:  # integer sums have no graph: torch refuses
        x = X.clone().requires_grad_()
        with pytest.warns(UserWarning, match="take the model that was frozen"):
            assert not torch.autograd.grad(frozen(x).sum(), x)[0].any()


def _dual(model: nn.Module) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, ALONG))).tangent


DERIVED = {
    "jacfwd": lambda model: torch.func.jacfwd(model)(X[:1]),
    "jvp": lambda model: torch.func.jvp(model, (X,), (ALONG,))[1],
    "dual": _dual,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func calls it
@pytest.mark.parametrize("how", DERIVED)
def test_a_frozen_model_says_so_in_forward_mode_too(how: str) -> None:
    frozen = marvin.freeze(_trained(marvin.LossBudgetPolicy(), False))
    with pytest.warns(UserWarning, match="take the model that was frozen"):
        found = DERIVED[how](frozen)
    assert not found.any()
