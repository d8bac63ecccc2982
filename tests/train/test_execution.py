"""Runs whose layers multiply integers."""

import dataclasses

import pytest
import torch

from marvin.integer import report
from train import loop
from train.arguments import parse
from train.resnet20 import DEFAULTS


def stop_after(calls, function):
    """Interrupt at a call, as Ctrl-C does."""
    left = [calls]

    def counted(*args, **kwargs):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return function(*args, **kwargs)

    return counted


def test_the_flag():
    assert parse(DEFAULTS, ["--policy", "static", "--execution", "int8"]).execution == "int8"
    assert DEFAULTS.execution == "float32"


@pytest.mark.parametrize("words", ["--optimizer sgd", "--policy none", "--no-quantize-activations"])
def test_integers_are_of_fixed_point(words, capsys):
    with pytest.raises(SystemExit):
        parse(DEFAULTS, [*words.split(), "--execution", "int8"])
    assert "--execution int8 must be with fixed point" in capsys.readouterr().err


def test_stopped_and_resumed_is_the_same_run(run, prepare, tiny, tmp_path, monkeypatch):
    tiny = dataclasses.replace(tiny, policy="static", execution="int8", epochs=2)
    summary = run(dataclasses.replace(tiny, run=str(tmp_path / "whole")))
    assert "22 of 22 layers multiply integers" in summary
    config = dataclasses.replace(tiny, run=str(tmp_path / "stopped"))
    for calls in (3, 4):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", stop_after(calls, loop.train_step))
            with pytest.raises(KeyboardInterrupt):
                run(config)
        config = dataclasses.replace(config, resume=True)
    run(config)
    names = "whole", "stopped"
    whole, stopped = (torch.load(tmp_path / n / "checkpoint.pt", weights_only=True) for n in names)
    assert whole["optimizer"]["marvin"]["gradients"] > 100
    torch.testing.assert_close(whole["model"], stopped["model"], rtol=0, atol=0)
    assert not any(row.is_integer for row in report(prepare(tiny).model).rows)  # no formats yet


def test_gradients_may_be_float(prepare, tiny):
    tiny = dataclasses.replace(tiny, policy="static", execution="int8", gradient_bits=0)
    options = [vars(m).get("integer_options") for m in prepare(tiny).model.modules()]
    found = {own.input_gradient_bits for own in options if own is not None}
    assert found == {None}
    with pytest.raises(ValueError, match="--gradient-bits must be 8, or 0 for float32, got 4"):
        dataclasses.replace(tiny, gradient_bits=4)


def test_division_leaves_integer_layers_alone(run, tiny, tmp_path):
    both = {"execution": "int8", "forward_save": "few-bit+division", "policy": "static"}
    summary = run(dataclasses.replace(tiny, **both, run=str(tmp_path / "run")))
    assert "22 of 22 layers multiply integers" in summary
