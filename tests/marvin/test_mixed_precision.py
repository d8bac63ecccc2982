"""Autocast, gradient scaling and torch.compile around fixed-point optimizers."""

import shutil

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint, encode, quantize, quantize_many, quantize_with_mask
from marvin import MSGD, MarvinPolicy, Quantized

FAST = {"lookback": (2, 5), "resolution": (10, 20)}


def msgd(model):
    return MSGD(model.named_parameters(), lr=0.02, **FAST)


def adamw(model):
    wrapped = torch.optim.AdamW(model.named_parameters(), lr=5e-3)
    return Quantized(wrapped, MarvinPolicy(**FAST))


def static(model):
    return Quantized(
        torch.optim.AdamW(model.named_parameters(), lr=5e-3), marvin.StaticPolicy(8, 8)
    )


def budget(model):
    wrapped = torch.optim.AdamW(model.named_parameters(), lr=5e-3)
    return Quantized(wrapped, marvin.LossBudgetPolicy())


def integer(model):
    marvin.integer.convert(model)
    return static(model)


def setup(make, quantized=True):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = make(marvin.tnvs_(model))
    if quantized:
        marvin.quantize_activations(model, optimizer)
    return model, optimizer


def batches(n):
    for i in range(n):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(i))
        yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("make", [msgd, adamw])
def test_bfloat16_autocast_with_float32_masters(make, quantized):
    model, optimizer = setup(make, quantized)
    losses = []
    for x, y in batches(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
        assert logits.dtype is torch.bfloat16
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    for state in optimizer.state.values():
        assert all(v.dtype is torch.float32 for v in state.values() if torch.is_tensor(v))
    assert optimizer.trace


@pytest.mark.parametrize("make", [msgd, adamw])
def test_float16_with_a_scaler_skips_what_overflows(make):
    model, optimizer = setup(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)
    scales, steps = [], []
    for x, y in batches(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer, loss=loss)
        scaler.update()
        scales.append(scaler.get_scale())
        steps.append(optimizer.state_dict()["marvin"]["step"])
    assert scales[0] < 2.0**20  # float16 ends at 65504
    assert steps[0] == 0
    assert 15 < steps[-1] < 30
    assert optimizer.skipped_steps == 0  # it was never asked
    assert all(p.isfinite().all() for p in model.parameters())


def train(model, optimizer, forward, steps=8):
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step(loss=loss)
    return loss.item()


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch's own, where it goes on after a rounding hook
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("make", [msgd, adamw])
def test_compiled_models_train_to_the_same_bits(make, quantized):
    model, optimizer = setup(make, quantized)
    loss = train(model, optimizer, model)
    compiled, compiled_optimizer = setup(make, quantized)
    run = torch.compile(compiled, backend="aot_eager")
    assert train(compiled, compiled_optimizer, run) == loss
    torch.testing.assert_close(
        dict(compiled.state_dict()), dict(model.state_dict()), rtol=0, atol=0
    )
    assert repr(compiled_optimizer.trace) == repr(optimizer.trace)
    assert len(optimizer.trace) >= 2


# torch's own, where it goes on after a rounding hook
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("make", [msgd, adamw, static, budget, integer])
def test_a_step_in_compiled_code_is_done_outside_of_it(make, whole):
    def trained(compiled):
        model, optimizer = setup(make)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)  # which wraps the step

        def after(loss):
            optimizer.step(loss=loss)
            scheduler.step()
            return loss

        def one(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return end(loss)

        end, step = after, one
        if compiled:  # "aot_eager" would crash
            end = end if whole else torch.compile(after, backend="eager")
            step = torch.compile(one, backend="eager") if whole else one
        losses = [step(x, y).item() for x, y in batches(6)]
        return losses, model.state_dict(), optimizer

    losses, weights, optimizer = trained(compiled=False)
    got, compiled_weights, compiled_optimizer = trained(compiled=True)
    assert got == losses
    torch.testing.assert_close(dict(compiled_weights), dict(weights), rtol=0, atol=0)
    assert repr(compiled_optimizer.trace) == repr(optimizer.trace)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "round_",
    [
        marvin.fake_quantize,
        quantize,
        encode,
        lambda x, fmt, **noise: quantize_with_mask(x, fmt, **noise)[0],
        lambda x, fmt, **noise: quantize_many([x], [fmt], **noise)[0],
    ],
    ids=["fake_quantize", "quantize", "encode", "quantize_with_mask", "quantize_many"],
)
def test_numbers_are_rounded_in_compiled_code_as_outside_of_it(round_):
    def half(x):
        return round_(x * 0.5, FixedPoint(4, 2), seed=3)

    x = torch.randn(64)
    assert torch.equal(torch.compile(half, backend="eager")(x), half(x))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["update", "averaged", "freeze", "store"])
def test_other_calls_in_compiled_code_are_done_outside_of_it(name):
    model, optimizer = setup(msgd)
    average = marvin.MasterAverage(model, optimizer)
    average.update()
    calls = {
        "update": average.update,
        "averaged": average.averaged,
        "freeze": lambda: marvin.freeze(model),
        "store": lambda: marvin.store_codes(model, optimizer).remove(),
    }
    before = optimizer.state_dict()["state"][0]["master"].clone()
    torch.compile(calls[name], backend="eager")()
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["master"], before, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_trains_alike():
    model, optimizer = setup(msgd, quantized=False)
    loss = train(model, optimizer, model)
    compiled, compiled_optimizer = setup(msgd, quantized=False)
    got = train(compiled, compiled_optimizer, torch.compile(compiled))
    assert got == pytest.approx(loss, rel=1e-3)  # fused kernels sum in another order
    assert compiled_optimizer.formats() == optimizer.formats()


def test_steps_in_a_cuda_graph_are_refused(monkeypatch):
    _, optimizer = setup(msgd)
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(RuntimeError, match="must be outside of CUDA graphs"):
        optimizer.step(loss=1.0)
