"""The flags that choose activations and what is kept for backward."""

import dataclasses

import pytest
import torch
from torch import nn

from fixedpoint_kernels import few_bit, forward_save
from fixedpoint_kernels.few_bit.activations import ENTRIES
from train import loop
from train.arguments import parse
from train.config import ACTIVATIONS
from train.main import prepare
from train.resnet20 import DEFAULTS, MIN_SIDE, resnet20


def prepared(config, **changes):
    return prepare(dataclasses.replace(config, **changes), resnet20, MIN_SIDE)


def test_flags():
    got = parse(DEFAULTS, ["--forward-save", "few-bit", "--bits", "2", "--activation", "gelu"])
    assert (got.forward_save, got.bits, got.activation) == ("few-bit", 2, "gelu")
    assert DEFAULTS.forward_save == "none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bits 9", "--bits must be 1 to 8, got 9"),
        ("--activation step", "invalid choice: 'step'"),
        ("--forward-save all", "invalid choice: 'all'"),
        ("--block 0", "--block must be at least 1, got 0"),
        ("--division-bits 3", "--division-bits must be 1, 2, 4 or 8, got 3"),
    ],
)
def test_bad_values_end_with_a_message(words, message, capsys):
    with pytest.raises(SystemExit):
        parse(DEFAULTS, words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_has_a_few_bit_one(tiny, name):
    training = prepared(tiny, activation=name, forward_save="few-bit", bits=2)
    kinds = {type(m).__name__ for m in training.model.modules() if hasattr(m, "weight")}
    stock = ENTRIES[name].kind.__name__
    assert stock in kinds
    kind = getattr(few_bit, stock)
    assert sum(isinstance(m, kind) for m in training.model.modules()) == 19


@pytest.mark.parametrize("ways", ["division", "few-bit+division"])
def test_division_flags(tiny, ways):
    training = prepared(
        tiny, activation="gelu", forward_save=ways, bits=2, block=4, division_bits=1, seed=5
    )
    model = training.model
    assert isinstance(model.relu, few_bit.GELU) == (ways != "division")
    assert vars(model.fc)["_division"] == forward_save.Division(4, 1)
    assert training.state()["forward_save"] == {"seed": 5, "count": 0}


def test_stopped_and_resumed_has_the_same_noise(run, tiny, tmp_path, monkeypatch):
    tiny = dataclasses.replace(tiny, forward_save="few-bit+division", activation="silu", epochs=2)
    run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    config = dataclasses.replace(tiny, run=str(tmp_path / "stopped"))
    for calls in (3, 4):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", stop_after(calls, loop.train_step))
            with pytest.raises(KeyboardInterrupt):
                run(config)
        config = dataclasses.replace(config, resume=True)
    run(config)
    whole, stopped = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "stopped")
    )
    assert whole["forward_save"] == stopped["forward_save"]
    assert whole["forward_save"]["count"] > 0
    for name, value in whole["model"].items():
        torch.testing.assert_close(stopped["model"][name], value, rtol=0, atol=0)


def stop_after(calls, function):
    left = iter(range(calls))

    def stopping(*args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*args)

    return stopping


def test_nothing_is_converted_unless_asked(tiny):
    kinds = {type(m) for m in prepared(tiny).model.modules()}
    assert nn.ReLU in kinds
    assert few_bit.ReLU not in kinds


def test_an_exact_code_changes_no_bit_of_a_run(run, tiny, tmp_path):
    """ReLU's code of 1 bit is exact, so the run is the one without it."""
    run(dataclasses.replace(tiny, run=str(tmp_path / "exact")))
    run(dataclasses.replace(tiny, run=str(tmp_path / "few"), forward_save="few-bit"))
    exact, few = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("exact", "few")
    )
    for name, value in exact["model"].items():
        torch.testing.assert_close(few["model"][name], value, rtol=0, atol=0)
