import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import marvin
from train import loop
from train.augment import step_indices
from train.dataset import Images, make_dataset
from train.optimizers import add_l1_, normalize_gradients_
from train.records import read_csv


@pytest.fixture
def plain_batches(monkeypatch):
    """No augmentation: it differs between micro-batches by design."""
    monkeypatch.setattr(
        loop, "batch", lambda part, chosen, dataset, *_: _batch(part, chosen, dataset)
    )


_batch = loop.batch


def gradients_of_a_step(prepare, config, monkeypatch) -> tuple[list[torch.Tensor], float]:
    """Gradients and loss that reach the optimizer, batch norm with frozen statistics."""
    training = prepare(config)
    training.model.eval()
    seen = []
    monkeypatch.setattr(
        loop,
        "update",
        lambda training, loss: seen.extend([p.grad for p in training.model.parameters()] + [loss]),
    )
    order = torch.arange(48)
    indices = step_indices(order, 0, config.batch_size, config.accumulation_steps)
    loss, _ = loop.train_step(training, indices)
    assert seen[-1] == loss
    return seen[:-1], loss


@pytest.mark.usefixtures("plain_batches")
@pytest.mark.parametrize(("batch_size", "accumulation_steps"), [(16, 3), (24, 2), (32, 2)])
def test_accumulation_is_the_mean_over_the_step(
    prepare, tiny, monkeypatch, batch_size, accumulation_steps
):
    config = dataclasses.replace(tiny, optimizer="sgd", batch_size=48)
    want, want_loss = gradients_of_a_step(prepare, config, monkeypatch)
    config = dataclasses.replace(
        config, batch_size=batch_size, accumulation_steps=accumulation_steps
    )
    got, got_loss = gradients_of_a_step(prepare, config, monkeypatch)
    assert got_loss == pytest.approx(want_loss, rel=1e-6)
    # float32 sums in another order
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


def test_every_micro_batch_changes_its_images_in_a_way_of_its_own(prepare, tiny, monkeypatch):
    training = prepare(dataclasses.replace(tiny, batch_size=16, accumulation_steps=2))
    seeds = []

    def batch(part, chosen, dataset, generator, own):
        seeds.append(generator.initial_seed())
        return _batch(part, chosen, dataset, generator, own)

    monkeypatch.setattr(loop, "batch", batch)
    monkeypatch.setattr(loop, "update", lambda *_: None)
    for epoch, step in ((0, 0), (0, 1), (1, 0)):
        training.progress.epoch, training.progress.step = epoch, step
        loop.train_step(training, step_indices(torch.arange(64), step, 16, 2))
    assert len(set(seeds)) == 6
    training.progress.epoch = 0
    loop.train_step(training, step_indices(torch.arange(64), 0, 16, 2))
    assert seeds[6:] == seeds[:2]  # a place of a run has its own, whenever it is trained


def test_msgd_gets_the_loss(prepare, tiny, monkeypatch):
    training = prepare(tiny)
    losses = []
    step = training.optimizer.step
    monkeypatch.setattr(
        training.optimizer, "step", lambda *, loss: losses.append(loss) or step(loss=loss)
    )
    indices = step_indices(torch.arange(64), 0, 16, 4)
    training.model.train()
    loss, correct = loop.train_step(training, indices)
    assert losses == [loss]
    assert math.isfinite(loss)
    assert 0 <= correct <= 64


def test_gradients_are_normalised_and_zeros_stay():
    a, b, c = (torch.ones(3, 2, requires_grad=True) for _ in range(3))
    a.grad = torch.full((3, 2), 5.0)
    b.grad = torch.zeros(3, 2)
    normalize_gradients_([a, b, c])
    torch.testing.assert_close(a.grad, torch.full((3, 2), 1 / math.sqrt(6)))
    torch.testing.assert_close(b.grad, torch.zeros(3, 2))
    assert c.grad is None


def test_l1_pulls_weights_or_all():
    weight = torch.tensor([[2.0, -3.0, 0.0]], requires_grad=True)
    bias = torch.tensor([4.0], requires_grad=True)
    for every, of_bias in ((False, 1.0), (True, 1.5)):
        weight.grad, bias.grad = torch.ones(1, 3), torch.ones(1)
        add_l1_([weight, bias], 0.5, every)
        torch.testing.assert_close(weight.grad, torch.tensor([[1.5, 0.5, 1.0]]))
        torch.testing.assert_close(bias.grad, torch.tensor([of_bias]))


@pytest.mark.parametrize("normalize", [True, False])
def test_sgd_adds_weight_decay_after_normalisation(prepare, tiny, normalize):
    config = dataclasses.replace(
        tiny, optimizer="sgd", normalize_gradients=normalize, weight_decay=0.5, lr=0.25
    )
    training = prepare(config)
    for p in training.model.parameters():
        p.grad = torch.full_like(p, 2.0)
    before = [p.detach().clone() for p in training.model.parameters()]
    loop.update(training, loss=1.0)
    for p, old in zip(training.model.parameters(), before, strict=True):
        gradient = torch.full_like(p, 1 / math.sqrt(p.numel()) if normalize else 2.0)
        # float32 additions in the optimizer's own order
        torch.testing.assert_close(
            p.detach(), old - 0.25 * (gradient + 0.5 * old), rtol=1e-5, atol=1e-6
        )


def test_both_optimizers_begin_with_the_same_weights(prepare, tiny):
    fixed = prepare(dataclasses.replace(tiny, run="a"))
    floating = prepare(dataclasses.replace(tiny, run="b", optimizer="sgd"))
    assert isinstance(fixed.optimizer, marvin.MSGD)
    masters = [fixed.optimizer.state[p]["master"] for p in fixed.model.parameters()]
    torch.testing.assert_close(masters, [p.detach() for p in floating.model.parameters()])


def test_a_loss_that_is_not_finite_stops_the_run(prepare, tiny):
    training = prepare(dataclasses.replace(tiny, optimizer="sgd"))
    with pytest.raises(FloatingPointError, match="must be finite, got nan in step 1; lower --lr"):
        loop.update(training, math.nan)


class Fixed(nn.Module):
    """Answers class 0 for dark images, 1 for bright ones; has a mode to be left alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training
        bright = x.mean((1, 2, 3))
        return torch.stack([-bright, bright], 1)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_evaluate_counts_right_answers(batch_size):
    images = torch.tensor([0, 0, 255, 255], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    part = Images(images, torch.tensor([0, 1, 1, 1]))
    dataset = make_dataset("x", part, part, 2, "")
    model = Fixed().train()
    score = loop.evaluate(model, part, dataset, batch_size)
    assert score.accuracy == 0.75
    right, wrong = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    assert score.loss == pytest.approx((3 * right + wrong) / 4, rel=1e-6)
    assert model.training


def test_metrics_are_means_over_the_images_of_an_epoch(prepare, tiny):
    training = prepare(dataclasses.replace(tiny, validation_share=0.0))
    training.progress.add(loss=1.0, correct=3, images=30)
    training.progress.add(loss=4.0, correct=9, images=10)
    row = loop.end_epoch(training)
    assert (row["epoch"], row["step"]) == (1, 2)
    assert row["train_loss"] == pytest.approx(70 / 40)
    assert row["train_accuracy"] == 12 / 40
    assert training.progress.seen == 0


def test_the_validation_part_drives_the_schedule(prepare, tiny, monkeypatch):
    losses = iter([1.0, 0.5, 0.7, 0.8])
    monkeypatch.setattr(loop, "evaluate", lambda *_: loop.Score(next(losses), 0.5))
    config = dataclasses.replace(tiny, plateau_patience=0, plateau_factor=0.5, epochs=4)
    training = prepare(config)
    rates = []
    for _ in range(4):
        training.progress.add(2.0, 1, 10)
        rates.append(loop.end_epoch(training)["lr"])
    assert rates == [0.02, 0.02, 0.02, 0.01]
    assert training.optimizer.param_groups[0]["lr"] == 0.005


def test_without_validation_the_training_loss_drives_it(prepare, tiny):
    training = prepare(dataclasses.replace(tiny, validation_share=0.0, plateau_patience=0))
    for loss in (1.0, 2.0):
        training.progress.add(loss, 1, 10)
        row = loop.end_epoch(training)
    assert row["validation_loss"] is None
    assert row["train_loss"] == 2.0
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.002)


@pytest.mark.parametrize("optimizer", ["msgd", "sgd"])
def test_a_run_leaves_its_records(run, tiny, tmp_path, optimizer):
    summary = run(dataclasses.replace(tiny, optimizer=optimizer))
    folder = tmp_path / "run"
    names = {p.name for p in folder.iterdir()}
    want = {"config.json", "environment.json", "layers.csv", "metrics.csv", "timing.csv"}
    want |= {"checkpoint.pt", "result.json", "tensorboard", ".lock"}
    if optimizer == "msgd":
        want |= {"trace.csv", "word_lengths.png"}
        assert "mean word length" in summary
        assert len(read_csv(folder / "trace.csv")) >= 22
    assert names == want
    assert "test accuracy" in summary
    metrics = read_csv(folder / "metrics.csv")
    assert [(row["epoch"], row["step"]) for row in metrics] == [
        ("1", "5"),
        ("2", "10"),
        ("3", "15"),
    ]
    assert len(read_csv(folder / "timing.csv")) == 3


@pytest.mark.parametrize("policy", ["marvin", "loss-budget", "none"])
def test_statistics_estimated_anew_change_no_bit_of_training(run, tiny, tmp_path, policy):
    states = {}
    for count in (0, 3):
        folder = tmp_path / f"{count}"
        run(dataclasses.replace(tiny, policy=policy, batch_norm_batches=count, run=str(folder)))
        states[count] = torch.load(folder / "checkpoint.pt", weights_only=True)
        states[count]["validation"] = [
            row.pop("validation_loss") for row in states[count]["progress"]["rows"]
        ]
        for row in states[count]["progress"]["rows"]:
            row.pop("validation_accuracy")
        running = {k: v for k, v in states[count]["model"].items() if "running" in k}
        states[count]["running"] = [states[count]["model"].pop(name) for name in running]
    plain, anew = states[0], states[3]
    assert plain["validation"] != anew["validation"]
    assert plain["progress"] == anew["progress"]
    assert repr(plain["optimizer"]) == repr(anew["optimizer"])
    torch.testing.assert_close(plain["model"], anew["model"], rtol=0, atol=0)
    assert not torch.equal(plain["running"][0], anew["running"][0])


def test_the_checkpoint_holds_the_statistics_that_were_tested(run, prepare, tiny, tmp_path):
    run(dataclasses.replace(tiny, epochs=1, checkpoint_steps=0))
    training = prepare(dataclasses.replace(tiny, resume=True, batch_norm_batches=0))
    training.load(torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True))
    score = loop.evaluate(training.model, training.parts.test, training.dataset, 32)
    assert score.loss == json.loads((tmp_path / "run" / "result.json").read_text())["test_loss"]


def test_an_average_is_tested_and_training_does_not_notice(run, prepare, tiny, tmp_path):
    states = []
    for ema in (0.0, 0.9):
        folder = tmp_path / f"{ema}"
        run(dataclasses.replace(tiny, ema=ema, run=str(folder)))
        states.append(torch.load(folder / "checkpoint.pt", weights_only=True))
    plain, averaged = states
    assert repr(plain["optimizer"]) == repr(averaged["optimizer"])
    first = "conv.weight"
    torch.testing.assert_close(plain["model"][first], averaged["model"][first], rtol=0, atol=0)
    losses = [state["progress"]["rows"][-1]["validation_loss"] for state in states]
    assert losses[0] != losses[1]
