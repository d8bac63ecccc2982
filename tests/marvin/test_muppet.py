import copy
import io
import json
import math

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import BlockFloat, quantize_block
from marvin import MuppetPolicy, Quantized
from marvin.freezing import _round
from marvin.policies.muppet import Stage, epoch_diversity, threshold
from marvin.policies.records import Layer, Step
from marvin.shards import Shard
from marvin.state import packed_policy, policy_of


def make(model=None, lr=0.1, **settings):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    sgd = torch.optim.SGD(model.named_parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    return model, Quantized(sgd, MuppetPolicy(**settings))


def epoch(optimizer, gradients):
    """End an epoch whose last gradient of each parameter is ``gradients(p)``."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = gradients(p)
    optimizer.step(loss=1.0)
    optimizer.end_epoch()


def level_after(optimizer, kinds):
    """Return the word length after epochs of gradients that are the same, or differ."""
    levels = []
    for i, kind in enumerate(kinds):
        g = torch.Generator().manual_seed(i if kind == "differ" else 0)
        epoch(optimizer, lambda p, g=g: torch.randn(p.shape, generator=g))
        levels.append(optimizer.mean_word_length())
    return levels


def test_golden_diversities():
    g = torch.randn(4, 5)
    orthonormal = torch.eye(9)[:3]
    assert epoch_diversity([torch.stack([g, g, g])]) == pytest.approx(1 / 3)
    assert epoch_diversity([orthonormal]) == 1
    assert epoch_diversity([torch.stack([g, g, g]), orthonormal]) == pytest.approx(2 / 3)
    assert epoch_diversity([torch.stack([g, -g])]) == math.inf
    assert epoch_diversity([torch.zeros(3, 2), orthonormal]) == 1
    assert math.isnan(epoch_diversity([torch.zeros(3, 2)]))


def test_golden_thresholds():
    values = [threshold(j) for j in (0, 10, 30)]
    assert values == pytest.approx([2.5, 1.5518, 1.0747], abs=1e-4)


def test_the_level_rises_where_gradients_stop_to_differ():
    _, optimizer = make(levels=(8, 12, 32))
    # after three different gradients the diversity is about 1; of three equal ones it is 1/3
    kinds = ["differ"] * 3 + ["same"] * 4
    assert level_after(optimizer, kinds) == [8, 8, 8, 8, 8, 8, 12]  # 2 violations: epochs 6, 7
    row = optimizer.trace[0]
    assert (row.wl_before, row.wl, row.layer) == (8, 12, "0.weight")
    assert row.diversity == pytest.approx(1 / 3, rel=0.1)  # of gradients rounded to 8 bits
    assert optimizer.formats()["0.bias"] == BlockFloat(12)


def test_weights_take_the_new_level_at_the_end_of_the_epoch():
    model, optimizer = make(levels=(4, 12, 32))
    assert level_after(optimizer, ["differ"] * 3 + ["same"] * 4)[-1] == 12
    for j, p in enumerate(model.parameters()):
        master = optimizer.state[p]["master"]
        rounded = quantize_block(master, BlockFloat(12), stream=7 << 20 | j)
        torch.testing.assert_close(p.detach(), rounded, rtol=0, atol=0)


@pytest.mark.parametrize("levels", [(8, 12, 16), (8, 32)])
def test_a_layer_that_was_frozen_while_the_level_rose_takes_it_when_it_trains_again(levels):
    model, optimizer = make(levels=levels)

    def gradients(kind):
        for group in optimizer.param_groups:
            for p in group["params"]:
                seed = torch.Generator().manual_seed(
                    optimizer.shared.epoch if kind == "differ" else 0
                )
                p.grad = torch.randn(p.shape, generator=seed) if p.requires_grad else None

    def run(kind):
        gradients(kind)
        optimizer.step(loss=1.0)
        optimizer.end_epoch()

    run("differ")
    model[0].requires_grad_(False)
    for kind in ["differ"] * 3 + ["same"] * 4:
        run(kind)
    frozen = model[0].weight.detach().clone()
    assert optimizer.policy.word_length_at(optimizer.shared) == levels[1]
    assert optimizer.formats()["0.weight"] == BlockFloat(8)
    model[0].requires_grad_(True)
    gradients("same")
    optimizer.step(loss=1.0)
    expected = None if levels[1] == 32 else BlockFloat(levels[1])
    assert optimizer.formats().get("0.weight") == optimizer.formats().get("0.bias") == expected
    row = next(row for row in optimizer.trace if row.layer == "0.weight")
    assert (row.wl_before, row.wl) == levels[:2]
    assert not torch.equal(model[0].weight, frozen)
    assert "epoch_grads" not in optimizer.state[model[0].weight]  # these were of the level before


@pytest.mark.parametrize(("epochs", "violations"), [("absolute", 1), ("since_switch", 0)])
def test_the_threshold_falls_with_all_epochs_or_those_since_the_switch(epochs, violations):
    """A ratio of 1.2 is a violation at epoch 30, where the threshold is 1.07, not at epoch 0."""
    policy = MuppetPolicy(threshold_epoch=epochs)
    different, size = torch.eye(9)[:3], torch.Size((9,))
    tensors = {"epoch_grads": different[:2], "last_grad": different[2]}
    layer = Layer(0, "weight", {}, None, tensors, torch.zeros(9), Shard(size))
    shared = Stage(epoch=30, entries=2, largest=1.2)
    update = policy.end_epoch(shared, [layer], Step(31, 0, {}))  # of a diversity of 1
    assert update.switches == ()
    assert update.shared.violations == violations
    assert shared == Stage(epoch=30, entries=2, largest=1.2)


def test_the_level_stays_while_gradients_differ():
    _, optimizer = make()
    assert set(level_after(optimizer, ["differ"] * 12)) == {8}


def test_blocks_compare_every_third_epoch():
    _, optimizer = make(levels=(8, 12, 32), window_kind="block")
    kinds = ["differ"] * 3 + ["same"] * 6
    assert level_after(optimizer, kinds)[-2:] == [8, 12]


def test_float32_lowers_the_rate_and_stops():
    model, optimizer = make(lr=1.0, levels=(8, 32), patience=1, epochs_per_lr=2, lr_decays=2)
    assert level_after(optimizer, ["differ"] * 3 + ["same"] * 3)[-1] == 32
    assert optimizer.formats() == {}
    assert optimizer.mean_word_length() == 32
    rates, stops = [], []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        stops.append(optimizer.should_stop)
        epoch(optimizer, torch.ones_like)
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert not any(stops)
    assert optimizer.should_stop
    for p in model.parameters():
        torch.testing.assert_close(p.detach(), optimizer.state[p]["master"], rtol=0, atol=0)


def test_weights_biases_and_gradients_are_in_the_format():
    model, optimizer = make(lr=1.0)
    seen = {}

    def remember(wrapped, *_):
        for p, s in optimizer.state.items():
            seen[p] = s["master"].grad.clone()

    optimizer.optimizer.register_step_pre_hook(remember)
    epoch(optimizer, torch.randn_like)
    for p in model.parameters():
        for values in (p.detach(), seen[p]):
            rounded = quantize_block(values, BlockFloat(8), rounding="nearest")
            torch.testing.assert_close(values, rounded, rtol=0, atol=0)
        assert not torch.equal(seen[p], p.grad)


def test_activations_and_their_gradients():
    model, optimizer = make()
    handle = marvin.quantize_activations(model, optimizer)
    assert handle.layers() == ["0", "3"]  # no batch norm
    seen, fmt = {}, BlockFloat(8)
    model[0].register_forward_hook(lambda _m, x, y: seen.update(x=x[0], y=y))
    model[3].register_full_backward_hook(lambda _m, _gx, gy: seen.update(gy=gy[0]))
    x = torch.randn(16, 6) * torch.logspace(-3, 3, 16).unsqueeze(1)
    model(x).square().mean().backward()
    for row in seen["x"]:
        assert torch.equal(row, quantize_block(row, fmt, rounding="nearest"))
    assert torch.equal(seen["y"], quantize_block(seen["y"].detach(), fmt, rounding="nearest"))
    assert not torch.equal(seen["x"], x)
    handle.remove()
    seen.clear()
    model(x)
    assert torch.equal(seen["x"], x)


def test_gradients_are_rounded_on_their_way_back():
    model, optimizer = make(nn.Sequential(nn.Linear(6, 3)))
    marvin.quantize_activations(model, optimizer)
    x = torch.eye(6)
    coming = torch.randn(6, 3)
    model(x).backward(coming)
    bias = model[0].bias.grad
    rounded = quantize_block(coming, BlockFloat(8), seed=0, stream=(4 << 60) | (2 << 20))
    torch.testing.assert_close(bias, rounded.sum(0))
    torch.testing.assert_close(model[0].weight.grad, rounded.T)
    assert not torch.equal(rounded, coming)


def test_a_gradient_scaler_sees_what_overflows():
    model, optimizer = make(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    marvin.quantize_activations(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before, x, y = model[2].weight.detach().clone(), torch.randn(16, 4), 50 * torch.randn(16, 2)
    for step in 1, 2:
        optimizer.zero_grad()
        loss = (model(x) - y).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer, loss=loss)
        scaler.update()
        assert scaler.get_scale() == 2.0 ** (127 - step)
    assert torch.equal(model[2].weight, before)


def test_resume_equals_never_stopping():
    model, optimizer = make(levels=(8, 12, 14, 32), patience=1, epochs_per_lr=2)
    level_after(optimizer, ["differ"] * 3 + ["same"] * 2)
    model2, optimizer2 = make(lr=0.7)  # all settings are part of the state
    model2.load_state_dict(model.state_dict())
    optimizer2.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kinds = ["same"] * 2 + ["differ"] * 3 + ["same"] * 8
    assert level_after(optimizer, kinds) == level_after(optimizer2, kinds)
    assert optimizer.mean_word_length() > 12
    assert repr(optimizer.state_dict()) == repr(optimizer2.state_dict())
    torch.testing.assert_close(dict(model.state_dict()), dict(model2.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("levels", (6, 10, 32)),
        ("window", 2),
        ("patience", 1),
        ("window_kind", "block"),
        ("threshold_epoch", "since_switch"),
        ("epochs_per_lr", 1),
        ("lr_decays", 1),
        ("lr_factor", 0.5),
    ],
)
def test_each_setting_comes_back_with_the_state(name, value):
    assert value != getattr(MuppetPolicy(), name)
    first = MuppetPolicy(**{name: value})
    saved = json.loads(json.dumps({"policy": packed_policy(first, first.init_shared())}))
    second, shared = policy_of(MuppetPolicy(), saved)
    assert second == first
    assert second.load_shared(shared) == Stage()


def test_a_state_of_fewer_levels_is_refused():
    _, optimizer = make(levels=(8, 12))
    state = copy.deepcopy(optimizer.state_dict())
    state["marvin"]["policy"]["shared"]["level"] = 2
    with pytest.raises(ValueError, match=r"level must be one of \(8, 12\), got number 2"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": (12, 8)}, "levels must be rising word lengths"),
        ({"levels": (8, 40)}, "word length must be 2 to 24 bits, got wl=40"),
        ({"levels": 8}, r"levels must be rising word lengths, such as \(8, 12, 32\), got levels=8"),
        ({"window": 0}, "window must be a whole number from 1 on, got window=0"),
        ({"window_kind": "sliding"}, r"must be one of \('rolling', 'block'\), got 'sliding'"),
        ({"threshold_epoch": "x"}, "threshold_epoch must be one of"),
        ({"lr_factor": "x"}, "lr_factor must be finite and above 0, got lr_factor='x'"),
        ({"lr_factor": -1}, "lr_factor must be finite and above 0, got lr_factor=-1"),
        ({"lr_decays": "x"}, "lr_decays must be a whole number from 0 on, got lr_decays='x'"),
        ({"lr_decays": -1}, "lr_decays must be a whole number from 0 on"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MuppetPolicy(**settings)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_frozen_model_goes_through_torchs_exporters():
    model, optimizer = make(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    marvin.quantize_activations(model, optimizer)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step(loss=1.0)
    frozen = marvin.freeze(model)
    program = torch.export.export(frozen, (x,)).run_decompositions()
    torch.testing.assert_close(program.module()(x), frozen(x))
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    file = io.BytesIO()
    torch.onnx.export(frozen, (x,), file, dynamo=False)
    session = onnxruntime.InferenceSession(file.getvalue())
    for own in (x, 1e-20 * x, torch.zeros_like(x)):
        (y,) = session.run(None, {session.get_inputs()[0].name: own.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), frozen(own), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own
@pytest.mark.parametrize("per_sample", [False, True])
def test_roundings_of_a_frozen_model_decompose(per_sample):
    class Rounds(torch.nn.Module):
        def forward(self, x):
            return _round(x, BlockFloat(8), per_sample=per_sample)

    x = torch.linspace(-3, 40, 24).reshape(4, 6)
    program = torch.export.export(Rounds(), (x,)).run_decompositions()
    assert torch.equal(program.module()(9 * x), Rounds()(9 * x))
