"""Export a training run.

python -m train.export RUN --to packed|onnx|qonnx|hls4ml|c [--verify] [--out DIR]

Prints format, bytes and verdict of each layer and writes RUN/export/TARGET, as a whole or not at
all. With --verify the files are run, and must compute what the integer reference computes.
"""

from pathlib import Path

from marvin.export.arguments import Parser
from perfmodel.arguments import stop_at_interrupt, whole

PARSER = Parser("python -m train.export", __doc__)
PARSER.add_argument("run", type=Path, metavar="RUN", help="run folder of train")
PARSER.add_flags("RUN/export/TARGET")
PARSER.add_argument(
    "--weights",
    choices=("nearest", "last"),
    default="nearest",
    help="masters rounded to nearest, or the last stochastic draw (default: nearest)",
)
PARSER.add_argument(
    "--epoch",
    type=whole(1),
    metavar="N",
    help="the checkpoint of epoch N that --keep-front kept; written to RUN/export/epoch-N/TARGET "
    "(default: the run's last)",
)
PARSER.add_argument("--data-dir", help="folder of data sets, where it has moved or is to be made")

if __name__ == "__main__":  # --help and slips are answered before the trainer loads
    stop_at_interrupt()
    PARSER.parse_args()

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marvin.export import command, formats_of_weights, masters_of, nearest_weights
from marvin.export.deployed import Deployed, Options
from marvin.export.deployed import deploy as deploy_model
from marvin.export.errors import ExportError
from marvin.export.report import Trained
from marvin.hooks import detach
from marvin.policies.muppet import MuppetPolicy
from marvin.quantized import Quantized
from train import alexnet, augment, checkpoint, resnet20, vit
from train.config import Config
from train.loop import reestimate
from train.main import check_data, prepare
from train.records import RunFolder

__all__ = ["TrainedRun", "deploy", "main", "open_run"]

_SCRIPTS = {
    "alexnet": (alexnet.alexnet, alexnet.MIN_SIDE),
    "resnet20": (resnet20.resnet20, resnet20.MIN_SIDE),
    "vit": (vit.vit, vit.MIN_SIDE),
}
_CALIBRATION_IMAGES = 512


@dataclass(frozen=True)
class TrainedRun:
    """What a run folder holds.

    Args:
        path: The folder.
        title: What was trained on what, by which optimiser.
        model: At the end of training, as it was tested; rounds activations if it did in training.
        masters: Float32 masters of its quantised parameters, by name; None in float32.
        optimizer: Has formats and masters, if it is one of fixed point.
        train: Training images, normalised, shape ``(n, channels, side, side)``.
        test: Test images, likewise.
        labels: Of the test images, int64.
    """

    path: Path
    title: str
    model: nn.Module
    masters: dict[str, Tensor] | None
    optimizer: torch.optim.Optimizer
    train: Tensor
    test: Tensor
    labels: Tensor


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line asks; what the user can put right ends with one line."""
    given = PARSER.parse_args(argv)
    with command.one_line(PARSER.prog):
        folder = given.run / "export" / (f"epoch-{given.epoch}" if given.epoch else "")
        options = command.options(given, folder)
        run = open_run(given.run, given.data_dir, epoch=given.epoch)
        deployed = deploy(run, options, given.weights)
        shown = Trained(run.path, run.title, run.model, run.test, run.labels)
        command.export(given, shown, deployed, folder)


def open_run(path: Path, data_dir: str | None = None, *, epoch: int | None = None) -> TrainedRun:
    """Read a run folder, and the data it names; nothing that it names is written.

    Args:
        path: The folder.
        data_dir: Folder of data sets, where it has moved; data that is absent is downloaded to it.
            None: where the run found its data; what is absent there is not downloaded.
        epoch: Of a checkpoint of the run's front, from 1. None: the last checkpoint.

    Raises:
        ExportError: The run has no checkpoint yet, none of this epoch, or another's in its place.
        UserError: The folder, or the data, cannot be read, or the data is not the run's; says why.
    """
    folder = RunFolder(path)
    config = folder.read_config()
    file = folder.checkpoint if epoch is None else folder.kept(epoch)
    state = folder.load_checkpoint(file)
    if state is None:
        kept = sorted(own.name for own in file.parent.glob("epoch-*.pt"))
        hint = "" if epoch is None else f"; train with --keep-front, kept are: {', '.join(kept)}"
        raise ExportError(f"{path} must be a run with a checkpoint, found no {file}{hint}")
    # what is kept for backward, and what multiplied in training, does not matter any more
    changes: dict[str, Any] = {"device": "cpu", "run": str(path), "forward_save": "none"}
    changes["execution"] = Config.execution
    if data_dir is not None:
        changes["data_dir"] = data_dir
    config = dataclasses.replace(config, **changes)
    training = prepare(config, *_SCRIPTS[config.model], may_fetch=data_dir is not None)
    check_data(state, training.dataset)
    state.pop("forward_save", None)
    checkpoint.load(training, state, file)
    ended = len(training.progress.rows)
    if epoch not in (None, ended):
        raise ExportError(f"{file} must be of epoch {epoch}, got one of epoch {ended}")
    parts = training.parts
    chosen = torch.arange(min(_CALIBRATION_IMAGES, len(parts.train)))
    train, _ = augment.batch(parts.train, chosen, training.dataset)
    test, labels = augment.batch(parts.test, torch.arange(len(parts.test)), training.dataset)
    title = f"{config.model} on {config.dataset}, {config.optimizer}"
    model, optimizer = training.evaluated, training.optimizer
    masters = masters_of(training.model, optimizer) if isinstance(optimizer, Quantized) else None
    if training.average is not None:
        reestimate(training, model)
        averages = training.average.masters
        masters = None if masters is None else {name: averages[name] for name in masters}
    return TrainedRun(path, title, model.eval(), masters, optimizer, train, test, labels)


def deploy(run: TrainedRun, options: Options, weights: str = "nearest") -> Deployed:
    """Return the network of a run.

    Formats are those of training. Where there are none, or those of MuPPET, which no target has,
    weights and activations get formats of ``options.wl`` bits by ``options.estimator``, from the
    weights and from training images.

    Args:
        run: From ``open_run``.
        options: See there.
        weights: ``"nearest"``: masters rounded to nearest; ``"last"``: the model's own weights,
            the last stochastic draw.

    Raises:
        ExportError: Something in the model cannot be exported; says what, and why.
    """
    model, masters = run.model, run.masters if weights == "nearest" else None
    if isinstance(run.optimizer, Quantized) and not isinstance(run.optimizer.policy, MuppetPolicy):
        formats = run.optimizer.formats()
    else:  # float32 or block floating point, which no target has
        model, masters = _in_float32(model, masters), None
        formats = formats_of_weights(model, options.wl, options.estimator)
    model = nearest_weights(model, formats, masters)
    return deploy_model(model, formats, run.train, options)


@torch.no_grad()
def _in_float32(model: nn.Module, masters: Mapping[str, Tensor] | None) -> nn.Module:
    """Return a copy of a model that carries no formats; with ``masters``, these are its weights."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        detach(module)
    for name, p in copied.named_parameters():
        if masters and name in masters:
            p.copy_(masters[name])
    return copied


if __name__ == "__main__":
    main()
