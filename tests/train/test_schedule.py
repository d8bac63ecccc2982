"""Rates by step, against torch's own schedulers, and in runs."""

import dataclasses

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from train.arguments import parse
from train.errors import UserError
from train.records import read_csv
from train.resnet20 import DEFAULTS
from train.schedule import rate

MAKE = {
    "cosine": lambda sgd, steps: CosineAnnealingLR(sgd, steps),
    "one-cycle": lambda sgd, steps: OneCycleLR(sgd, 0.4, steps, cycle_momentum=False),
}


@pytest.mark.parametrize("schedule", MAKE)
@pytest.mark.parametrize("steps", [4, 7, 200])
def test_rates_are_those_of_torch(schedule, steps):
    config = dataclasses.replace(DEFAULTS, schedule=schedule, lr=0.4)
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler = MAKE[schedule](sgd, steps)
    for step in range(steps):
        # torch computes the cosine by recursion
        assert rate(config, step, steps) == pytest.approx(sgd.param_groups[0]["lr"], rel=1e-9)
        sgd.step()
        scheduler.step()


def test_the_plateau_leaves_the_rate_to_validation():
    assert rate(DEFAULTS, 3, 10) is None


@pytest.mark.parametrize("optimizer", ["msgd", "sgd"])
def test_a_run_follows_it_to_the_end(run, tiny, tmp_path, optimizer):
    run(dataclasses.replace(tiny, schedule="cosine", optimizer=optimizer))
    rates = [float(row["lr"]) for row in read_csv(tmp_path / "run" / "metrics.csv")]
    config = dataclasses.replace(tiny, schedule="cosine")
    assert rates == [rate(config, step, 15) for step in (4, 9, 14)]
    assert rates[2] < 0.02 * rates[0]


def test_a_whole_schedule_may_not_be_prolonged(run, tiny):
    config = dataclasses.replace(tiny, schedule="one-cycle", epochs=1)
    run(config)
    with pytest.raises(UserError, match="--epochs must be 1 to resume --schedule one-cycle"):
        run(dataclasses.replace(config, epochs=2, resume=True))


def test_muppet_has_a_schedule_of_its_own(capsys):
    with pytest.raises(SystemExit):
        parse(DEFAULTS, ["--policy", "muppet", "--schedule", "cosine"])
    assert "--schedule cosine must be without --policy muppet" in capsys.readouterr().err
