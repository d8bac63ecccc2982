"""What the tests of ``train`` share: a run small enough to take a second."""

import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from train import main, resnet20
from train.config import Config
from train.training import Training


@pytest.fixture
def tiny(tmp_path: Path) -> Config:
    """A run of 3 epochs of 5 steps, in which every layer switches its format."""
    return Config(
        model="resnet20",
        width=4,
        dataset="digits",
        limit=180,
        run=str(tmp_path / "run"),
        device="cpu",
        epochs=3,
        batch_size=32,
        checkpoint_steps=2,
        lookback=(3, 6),
        lr=0.02,
    )


@pytest.fixture
def unread(monkeypatch):
    """Have a block print to a reader that has left, as ``head`` does."""

    @contextmanager
    def printing():
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as output, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            yield
            output.flush()  # as the interpreter does at its end

    return printing


@pytest.fixture
def full():
    """Return an output whose disk is full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs a device that is always full")
    with open("/dev/full", "w") as output:
        yield output


@pytest.fixture
def prepare():
    """Make the training of a configuration, nothing written yet."""

    with ExitStack() as held:

        def make(config: Config) -> Training:
            training = main.prepare(config, resnet20.resnet20, resnet20.MIN_SIDE)
            held.enter_context(main.round_onednn(training.model))
            return training

        yield make


@pytest.fixture
def run():
    """Do a whole run; return its summary."""

    def do(config: Config) -> str:
        return main.run(config, resnet20.resnet20, resnet20.MIN_SIDE)

    return do
