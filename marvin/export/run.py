"""Read a run folder of the trainers, and make of it what is exported.

The trainers use marvin, not the other way; so they are looked up by name when a run is opened,
and importing this module imports none of them.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError, fixed_point
from marvin.export.network import Network
from marvin.export.observe import Formats, calibrate
from marvin.export.packed import Packed, pack_state
from marvin.export.sums import round_sums
from marvin.export.trace import describe
from marvin.export.weights import formats_of_weights, masters_of, nearest_weights
from marvin.quantized import Quantized

__all__ = ["Deployed", "Options", "Run", "deploy", "open_run"]

_CALIBRATION_IMAGES = 512


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Args:
        path: The folder.
        title: What was trained on what, by which optimiser.
        model: At the end of training; rounds activations if it did in training.
        optimizer: Has formats and masters, if it is one of fixed point.
        has_activations: Whether the model rounds activations.
        train: Training images, normalised, shape ``(n, channels, side, side)``.
        test: Test images, likewise.
        labels: Of the test images, int64.
    """

    path: Path
    title: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    has_activations: bool
    train: Tensor
    test: Tensor
    labels: Tensor

    def accuracy(self, logits: Tensor) -> float:
        """Return the share of right answers on the test images."""
        return float((logits.argmax(1) == self.labels).double().mean())


@dataclass(frozen=True)
class Options:
    """How a run becomes a network.

    Args:
        wl: Word length where a format must be found by calibration, bits.
        scale_wl: Word length of batch normalisation's scale, bits.
        weights: ``"nearest"``: masters rounded to nearest; ``"last"``: the model's own weights,
            the last stochastic draw.
        sums_wl: Word length of the terms of sums, bits; None: as exact as they come.
    """

    wl: int = 8
    scale_wl: int = 16
    weights: str = "nearest"
    sums_wl: int | None = None


@dataclass(frozen=True)
class Deployed:
    """What is exported.

    Args:
        model: A copy of the run's, with the weights that are exported.
        formats: Of its parameters.
        network: Its operations.
        exact: ``network`` with exact sums; the same where sums are not rounded.
    """

    model: nn.Module
    formats: Mapping[str, FixedPoint]
    network: Network
    exact: Network

    def packed(self) -> Packed:
        """Return weights as integers, and formats of activations beside them."""
        return pack_state(self.model.state_dict(), self.formats, self.network.formats())


def open_run(path: Path, data_dir: str | None = None) -> Run:
    """Read a run folder of ``train``, and the data it names; nothing that it names is written.

    Args:
        path: The folder.
        data_dir: Folder of data sets, where it has moved; data that is absent is downloaded to it.
            None: where the run found its data; what is absent there is not downloaded.

    Raises:
        ValueError: The folder, or the data, cannot be read; says why.
    """
    records, main, augment, checkpoint = (
        importlib.import_module(f"train.{name}")
        for name in ("records", "main", "augment", "checkpoint")
    )
    folder = records.RunFolder(path)
    config = folder.read_config()
    state = folder.load_checkpoint()
    if state is None:
        raise ExportError(f"{path} must be a run with a checkpoint, found no {folder.checkpoint}")
    script = importlib.import_module(f"train.{config.model}")
    # what is kept for backward does not matter any more
    changes: dict[str, Any] = {"device": "cpu", "run": str(path), "forward_save": "none"}
    if data_dir is not None:
        changes["data_dir"] = data_dir
    config = dataclasses.replace(config, **changes)
    build = getattr(script, config.model)
    training = main.prepare(config, build, script.MIN_SIDE, may_fetch=data_dir is not None)
    main.check_data(state, training.dataset)
    state.pop("forward_save", None)
    checkpoint.load(training, state, folder.checkpoint)
    parts = training.parts
    chosen = torch.arange(min(_CALIBRATION_IMAGES, len(parts.train)))
    train, _ = augment.batch(parts.train, chosen, training.dataset)
    test, labels = augment.batch(parts.test, torch.arange(len(parts.test)), training.dataset)
    title = f"{config.model} on {config.dataset}, {config.optimizer}"
    rounds = training.activations is not None
    model = training.model.eval()
    return Run(path, title, model, training.optimizer, rounds, train, test, labels)


def deploy(run: Run, options: Options) -> Deployed:
    """Return the network of a run.

    Formats are those of training. Where there are none, weights and activations get formats of
    ``options.wl`` bits that hold the weights, and the activations of training images. So do terms
    of sums, of ``options.sums_wl`` bits.

    Raises:
        ExportError: Something in the model cannot be exported; says what, and why.
    """
    if isinstance(run.optimizer, Quantized):
        found = run.optimizer.formats()
        masters = masters_of(run.model, run.optimizer) if options.weights == "nearest" else None
    else:
        found, masters = formats_of_weights(run.model, options.wl), None
    formats = {name: fixed_point(name, fmt) for name, fmt in found.items()}
    model = nearest_weights(run.model, found, masters)
    activations: dict[str, Formats] | None = None
    if not run.has_activations:
        activations = calibrate(model, [run.train], options.wl)
    sample = run.train[:2]
    exact = describe(model, sample, found, activations, scale_wl=options.scale_wl)
    wl = options.sums_wl
    network = exact if wl is None else round_sums(exact, run.train, wl)
    return Deployed(model, formats, network, exact)
