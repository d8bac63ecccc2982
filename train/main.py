"""What the scripts share: set up a run, train, report."""

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import marvin
import perfmodel
from fixedpoint_kernels import forward_save
from fixedpoint_kernels.few_bit.activations import ENTRIES
from perfmodel.arguments import give_up_output, message_of, reader_may_leave, stop
from perfmodel.cost import weights_of
from perfmodel.files import CONFIG, LAYERS, UserError
from perfmodel.report import one_line
from perfmodel.run import read_run
from train import checkpoint, distributed, plot
from train.arguments import parse
from train.augment import private_generator
from train.checks import in_flags
from train.config import Config, run_folder
from train.data import Parts, choose, enlarge, load, split
from train.dataset import Dataset
from train.loop import evaluate, fit, reestimate
from train.monitor import Monitor, Silence, errors_once
from train.optimizers import make_optimizer
from train.records import RunFolder, SilentFolder, environment
from train.training import Training, mean_word_lengths

__all__ = ["ERRORS", "main", "prepare", "run"]

ERRORS = UserError, FloatingPointError, OSError  # that the user can put right

Build = Callable[[int, int, int, type[nn.Module]], nn.Module]  # the last makes activations


def main(defaults: Config, build: Build, min_side: int, argv: Sequence[str] | None = None) -> None:
    """Do what the command line asks; errors of the user end the process with one line."""
    config = parse(defaults, argv)
    own_process(config)
    try:
        distributed.check_environment()
    except UserError as error:
        sys.exit(f"python -m train.{config.model}: error: {message_of(error)}")
    try:
        with distributed.process_group(distributed.own_device(config.device)):
            summary = run(config, build, min_side)
    except distributed.PeerLost as error:
        sys.exit(f"python -m train.{config.model}: {error}")
    except BrokenPipeError:  # nobody reads what the run prints
        give_up_output()
        sys.exit(_how_to_go_on(config))
    except ERRORS as error:
        who = "" if distributed.is_first() else f"process {distributed.rank()}: "
        sys.exit(f"python -m train.{config.model}: {who}error: {message_of(error)}")
    except KeyboardInterrupt:
        stop(_how_to_go_on(config))
    if distributed.is_first():
        with reader_may_leave():
            print(summary)


def _how_to_go_on(config: Config) -> str:
    """Return what is to be done about a run that Ctrl-C or its reader's end has stopped."""
    name = choose(config.dataset, Path(config.data_dir))
    if (run_folder(dataclasses.replace(config, dataset=name)) / CONFIG).exists():
        return "stopped; the same command with --resume continues from the last checkpoint"
    return "stopped before the run began: start it again with the same command"


def own_process(config: Config) -> None:
    """Set what is global to the process, which the script owns: the same bits every time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(True)
    # A debugging aid, and slow. setattr: the module gets this attribute at run time only.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False
    print_log()


class _Printed(logging.Handler):
    """Prints what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        print(record.getMessage(), flush=True)


_PRINTED = _Printed()


def print_log() -> None:
    """Print what kernels log, once each, however many runs the process has."""
    kernels = logging.getLogger("fixedpoint_kernels")
    kernels.setLevel(logging.INFO)
    kernels.addHandler(_PRINTED)


def run(config: Config, build: Build, min_side: int) -> str:
    """Train as configured, from the start or from a checkpoint.

    Args:
        config: What to do.
        build: Makes the model of classes, channels, width and the class of its activations.
        min_side: Smallest image the model takes; smaller ones are enlarged.

    Returns:
        A summary for people.

    Raises:
        UserError: Something in ``config`` or in the files it names must be put right.
        FloatingPointError: The training diverged.
    """
    training = prepare(config, build, min_side)
    with ExitStack() as held:
        with distributed.first_alone():
            held.enter_context(training.folder.claim(training.config))
        resume(training)
        goes_round = held.enter_context(round_onednn(training.model))
        if goes_round and distributed.is_first():
            print("without oneDNN: on this processor it fails on strided convolutions so narrow")
        held.enter_context(errors_once())
        with Monitor(training) if distributed.is_first() else Silence() as monitor:
            fit(training, monitor)
        return finish(training)


def prepare(config: Config, build: Build, min_side: int, *, may_fetch: bool = True) -> Training:
    """Load the data and make the model and the optimizer; nothing is written yet.

    Args:
        config: What to do.
        build: As of ``run``.
        min_side: As of ``run``.
        may_fetch: Whether data that is absent may be downloaded to ``config.data_dir``.

    Raises:
        UserError: Something in ``config`` or in the files it names must be put right.
    """
    device = choose_device(distributed.own_device(config.device))
    with distributed.first_alone():
        folder = Path(config.data_dir)
        dataset = enlarge(load(config.dataset, folder, may_fetch=may_fetch), min_side)
    if config.channels_last:
        dataset = dataclasses.replace(dataset, memory_format=torch.channels_last)
    config = dataclasses.replace(config, dataset=dataset.name, device=str(device))
    folder = run_folder(config)
    config = dataclasses.replace(config, run=str(folder))
    model = make_model(config, dataset, build)
    marvin.tnvs_(model, config.init_scale, generator=private_generator(config.seed, "weights"))
    parts = on_device(split(dataset, config.validation_share, config.limit), device)
    shape = dataset.channels, dataset.side, dataset.side
    layers = perfmodel.layers(model.to(device), shape, unknown="list")
    learning = make_learning(config, model, layers)
    if config.execution == "int8":  # before keep_less, which would take these layers
        marvin.integer.convert(model, gradient_bits=config.gradient_bits or None)
    keep_less(config, model)
    check_shares(config, len(parts.train))
    own_folder = RunFolder(folder) if distributed.is_first() else SilentFolder(folder)
    parallel = distributed.parallel(model)
    return Training(config, dataset, parts, model, parallel, folder=own_folder, **learning)


@contextmanager
def round_onednn(model: nn.Module) -> Iterator[bool]:
    """Do without oneDNN where it could write past its memory in a step of this model; yields whether.

    On processors without AVX-512, its weight gradient of a strided 1x1 convolution of fewer than 8
    channels does, where images lie channels last: those of one channel always do. Gradients are then
    wrong, or the process ends (PyTorch 2.13.0; issue 6035 of oneDNN). A model on a GPU never meets it.
    """
    breaks = "AVX512" not in torch.backends.cpu.get_cpu_capability() and any(
        isinstance(m, nn.Conv2d)
        and m.weight.device.type == "cpu"
        and m.kernel_size == (1, 1)
        and m.stride != (1, 1)
        and m.in_channels // m.groups < 8
        for m in model.modules()
    )
    before, *_ = torch.backends.mkldnn.set_flags(False if breaks else None)
    try:
        yield breaks
    finally:
        torch.backends.mkldnn.set_flags(before)


def check_shares(config: Config, images: int) -> None:
    """Refuse batches in which a process would have no image.

    Raises:
        UserError: There is such a batch.
    """
    step = min(images, config.batch_size * config.accumulation_steps)
    smallest = step % config.batch_size or config.batch_size
    if smallest < distributed.world():
        raise UserError(
            f"every batch must have an image for each of {distributed.world()} processes, "
            f"got one of {smallest}"
        )


def keep_less(config: Config, model: nn.Module) -> None:
    """Convert ``model`` as ``--forward-save`` asks."""
    ways = config.forward_save.split("+")
    few_bit = config.bits if "few-bit" in ways else None
    division = {
        "block": config.block,
        "bits": config.division_bits,
        "method": config.division_method,
    }
    if ways != ["none"]:
        forward_save.convert(
            model,
            few_bit=few_bit,
            division=division if "division" in ways else None,
            seed=config.seed,
        )


def choose_device(name: str) -> torch.device:
    """Return a device that is there.

    Raises:
        UserError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        one = torch.zeros(1, device=name)
        one.tolist()  # the device "meta" has no values
        return one.device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise UserError(f"--device must be one that torch can use, got {name}: {reason}") from error


def on_device(parts: Parts, device: torch.device) -> Parts:
    """Return the same images where the model is: they are small enough to stay there."""
    return Parts(parts.train.to(device), parts.validation.to(device), parts.test.to(device))


def make_learning(
    config: Config, model: nn.Module, layers: list[perfmodel.Layer]
) -> dict[str, Any]:
    """Return optimizer, schedule, quantised activations and average; quantise the model if asked.

    Raises:
        UserError: A hyper-parameter is out of range.
    """
    try:
        optimizer = make_optimizer(config, model, layers)
    except ValueError as error:
        names = [f.name for f in dataclasses.fields(config)]
        raise UserError(in_flags(str(error), names)) from error
    scheduler = ReduceLROnPlateau(
        optimizer,
        patience=config.plateau_patience,
        factor=config.plateau_factor,
        threshold=config.plateau_threshold,
    )
    activations = None
    if isinstance(optimizer, marvin.Quantized) and config.quantize_activations:
        activations = marvin.quantize_activations(model, optimizer, ste=config.ste)
    average = marvin.MasterAverage(model, optimizer, config.ema) if config.ema else None
    return {
        "optimizer": optimizer,
        "scheduler": scheduler,
        "activations": activations,
        "average": average,
        "layers": layers,
    }


def make_model(config: Config, dataset: Dataset, build: Build) -> nn.Module:
    """Return the model of a configuration.

    Raises:
        UserError: There is no room for it.
    """
    try:
        return build(
            dataset.classes,
            dataset.channels,
            config.width,
            ENTRIES[config.activation].kind,
        )
    except (RuntimeError, MemoryError) as error:  # of torch's allocator
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"--width must leave room for the model, got {config.width}: {reason}"
        ) from error


def resume(training: Training) -> None:
    """Load the checkpoint where there is one, and store what the run depends on.

    Raises:
        UserError: The checkpoint is not of this run, or a file of the folder is damaged.
    """
    folder, config = training.folder, training.config
    state = folder.load_checkpoint() if config.resume else None
    if state is not None:
        check_data(state, training.dataset)
        checkpoint.load(training, state, folder.checkpoint)
    folder.accept(config)  # not before: a run whose resume is refused stays as it is
    changes = folder.save_environment(environment(torch.device(config.device)))
    if changes:
        print(f"resuming elsewhere, the last bits may differ: {'; '.join(changes)}")
    names = ("layer", "shape", "elements", "madds")
    folder.save_rows(LAYERS, layer_rows(training), names)
    if distributed.is_first():
        print(f"{training.dataset.name}: {training.dataset.source}")
        print(f"run folder {folder.path}", flush=True)


def check_data(state: dict[str, Any], dataset: Dataset) -> None:
    """Refuse to continue with other images than those the run began with.

    Raises:
        UserError: The images are others.
    """
    got = dataset.fingerprint()
    if state["data"] != got:
        raise UserError(f"the data must have fingerprint {state['data']:.40} to resume, got {got}")


def layer_rows(training: Training) -> list[dict[str, object]]:
    """Return the rows of ``layers.csv``: name, shape, elements and multiply-adds.

    First each layer that has a format, in parameter order; then the modules that multiply
    activations with each other, with their kind for a shape and without elements.
    """
    named = training.model.named_parameters()
    madds = {w.name: w.madds for w in weights_of(training.layers)}
    rows: list[dict[str, object]] = [
        {
            "layer": name,
            "shape": "x".join(map(str, p.shape)),
            "elements": p.numel(),
            "madds": madds[name],
        }
        for name, p in named
        if p.ndim >= 2
    ]
    return rows + [
        {"layer": own.name or "model", "shape": own.kind, "elements": 0, "madds": own.madds}
        for own in training.layers
        if not own.weight
    ]


def finish(training: Training) -> str:
    """Measure the test part, once, store the result and draw the word lengths."""
    config, folder = training.config, training.folder
    model = training.evaluated
    reestimate(training, model)
    score = evaluate(model, training.parts.test, training.dataset, config.batch_size)
    bits, lengths = training.mean_word_length, mean_word_lengths(training)
    result = {
        "epochs": training.progress.epoch,
        "steps": training.progress.total_steps,
        "test_images": len(training.parts.test),
        "test_loss": score.loss,
        "test_accuracy": score.accuracy,
        "mean_word_length": bits,
        **lengths,
    }
    folder.save_result(result)
    if not distributed.is_first():
        return ""
    lines = [f"test accuracy {score.accuracy:.2%} ({len(training.parts.test):,} images)"]
    if bits is not None:
        lines.append(f"mean word length {bits:.1f} bits")
    if config.is_range and "mean_input_word_length" in lengths:
        lines.append(f"that of layers' inputs {lengths['mean_input_word_length']:.1f} bits")
    optimizer = training.optimizer
    if config.late and isinstance(optimizer, marvin.Quantized) and optimizer.shared.has_high_rate:
        lines.append(
            "--late: the learning rate did not fall to half of its highest, so words kept "
            f"{optimizer.param_groups[0]['max_wl']} bits: let it fall, for example by --schedule cosine"
        )
    if config.execution == "int8":
        report = marvin.integer.report(training.model)
        count, path = sum(row.is_integer for row in report.rows), report.path.partition(":")[0]
        lines.append(f"{count} of {len(report.rows)} layers multiply integers ({path})")
    if bits is not None:
        lines += [one_line(read_run(folder.path)), f"figure {plot.save(folder.path)}"]
    return "\n".join([*lines, f"run folder {folder.path}"])
