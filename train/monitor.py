"""What a run shows while it goes: a progress bar, a line an epoch, TensorBoard."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

import marvin
import marvin.tensorboard
from marvin.files import GONE, gone_folder
from perfmodel.meter import Meter
from perfmodel.run import start_of
from train.bars import HIDDEN, tqdm
from train.busy import Watch
from train.config import to_dict
from train.errors import UserError
from train.training import Progress, Training

__all__ = ["Monitor", "Silence", "errors_once"]

Row = dict[str, float | None]


class Monitor:
    """Shows a run while it trains; nothing it does changes a bit of the result.

    Args:
        training: The run; TensorBoard files go to its folder, without the steps it will repeat.

    Raises:
        UserError: The TensorBoard files cannot be written.
    """

    def __init__(self, training: Training):
        next_step = training.progress.total_steps + 1
        self._is_cut = training.progress.step > 0  # counts of this epoch's begin are lost
        self._folder = training.folder.tensorboard
        with _written(self._folder):
            self._writer = SummaryWriter(str(self._folder), purge_step=next_step, flush_secs=10)
        self._bar: tqdm[Any] | None = None
        self._watch = Watch() if training.config.device == "cpu" else None
        self._meter = _meter(training)
        self._trace: list[marvin.Switch] = []  # that the meter has seen
        self._switches = -1  # that the curves show
        self._drawn: dict[str, float] = {}  # where the curves are
        if isinstance(training.optimizer, marvin.Quantized):
            with _written(self._folder):
                marvin.tensorboard.add_layout(self._writer)
            if next_step > 1:
                self._switches = len(training.optimizer.trace)
                self._drawn = marvin.tensorboard.scalars_of(training.optimizer)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        try:
            with _written(self._folder):
                self._writer.close()
        except UserError:
            if kind is None:  # else the run ends by that error
                raise

    def flush(self) -> None:
        """Write what TensorBoard has so far: called before each checkpoint.

        Raises:
            UserError: The TensorBoard files cannot be written.
        """
        with _written(self._folder):
            self._writer.flush()

    def begin_epoch(self, progress: Progress, images: int) -> None:
        """Open the bar of an epoch of ``images`` images."""
        self._bar = tqdm(
            total=images,
            initial=progress.seen,
            desc=f"epoch {progress.epoch + 1}",
            unit=" images",
            leave=False,
            disable=HIDDEN,
            dynamic_ncols=True,
        )

    def step(self, training: Training, loss: float) -> None:
        """Show one optimiser step.

        Raises:
            UserError: The TensorBoard files cannot be written.
        """
        progress, bar = training.progress, self._bar
        self._scalar("loss/step", loss, progress.total_steps)
        speedup = None
        if isinstance(training.optimizer, marvin.Quantized):
            self._formats(training.optimizer, progress.total_steps)
            self._trace += training.switches(len(self._trace))
            speedup = self._meter.speedup(self._trace, progress.total_steps)
            self._scalar("speedup/so_far_modelled", speedup, progress.total_steps)
            self._scalar("ebops_modelled", self._meter.ebops(), progress.total_steps)
        if bar is not None and not bar.disable:
            shown = {"accuracy": f"{progress.correct / progress.seen:.1%}"}
            if progress.mean_loss is not None:
                shown = {"loss": f"{progress.mean_loss:.3f}", **shown}
            if training.mean_word_length is not None:
                shown["bits"] = f"{training.mean_word_length:.1f}"
            if speedup is not None:
                shown["SU modelled"] = f"{speedup:.2f}"
                shown["EBOPs"] = f"{self._meter.ebops() / 1e6:.3g}M"
            bar.set_postfix(shown, refresh=False)
            bar.update(progress.seen - bar.n)
        if self._watch is not None and (said := self._watch.look()):
            tqdm.write(said)

    def _formats(self, optimizer: marvin.Quantized, step: int) -> None:
        """Draw the curves of the layers, where one of them has moved: up or down, not aslant."""
        if len(optimizer.trace) == self._switches:
            return
        self._switches = len(optimizer.trace)
        for name, value in self._drawn.items():
            self._scalar(name, value, step)
        self._drawn = marvin.tensorboard.scalars_of(optimizer)
        with _written(self._folder):
            marvin.tensorboard.log_formats(self._writer, optimizer, step)

    def epoch(self, row: Row, training: Training, images_per_s: float) -> None:
        """Show the metrics of a whole epoch.

        Raises:
            UserError: The TensorBoard files cannot be written.
        """
        if self._bar is not None:
            self._bar.close()
        step = training.progress.total_steps
        if isinstance(training.optimizer, marvin.Quantized):  # an epoch's end may change formats
            self._formats(training.optimizer, step)
        for part in ("train", "validation"):
            for what in ("loss", "accuracy"):
                self._scalar(f"{what}/{part}", row[f"{part}_{what}"], step)
        self._scalar("lr", row["lr"], step)
        if training.activations is not None:
            for layer, share in training.activations.saturation().items():
                self._scalar(f"saturation/{layer}", None if self._is_cut else share, step)
        self._is_cut = False
        self._scalar("images_per_s", images_per_s, step)
        self.flush()
        skipped = training.skipped_steps
        print(epoch_line(row, training.config.epochs, images_per_s, skipped), flush=True)

    def _scalar(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            with _written(self._folder):
                self._writer.add_scalar(name, value, step)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Name the folder where TensorBoard cannot write: its own errors do not.

    Raises:
        UserError: It cannot.
    """
    try:
        yield
    except OSError as error:
        if (gone := gone_folder(folder)) is not None:
            raise UserError(f"{gone} {GONE}") from error
        raise UserError(
            f"TensorBoard's folder must be one that can be written, got {folder} "
            f"({error.strerror or error}): make room, or let it be written, then go on with --resume"
        ) from error


@contextmanager
def errors_once() -> Iterator[None]:
    """Print no traceback of TensorBoard's thread: the next call to its writer raises the same error."""
    before = threading.excepthook

    def tell(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            before(failed)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = before


class Silence(Monitor):
    """What the other processes show."""

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass

    def flush(self) -> None:
        """Show nothing."""

    def begin_epoch(self, progress: Progress, images: int) -> None:
        """Show nothing."""

    def step(self, training: Training, loss: float) -> None:
        """Show nothing."""

    def epoch(self, row: Row, training: Training, images_per_s: float) -> None:
        """Show nothing."""


def _meter(training: Training) -> Meter:
    """Return what adds up the modelled cost of the run."""
    config = training.config
    samples = config.batch_size * config.accumulation_steps
    return Meter(training.layers, samples, start_of(to_dict(config)))


def epoch_line(row: Row, epochs: int, images_per_s: float, skipped: int = 0) -> str:
    """Return the line printed at the end of an epoch; ``skipped`` are steps of the run so far."""
    words = [f"epoch {row['epoch']}/{epochs}"]
    for part in ("train", "validation"):
        if row[f"{part}_loss"] is not None:
            loss, accuracy = row[f"{part}_loss"], row[f"{part}_accuracy"]
            words.append(f"{part} loss {loss:.4f} accuracy {accuracy:.2%}")
    if row["mean_word_length"] is not None:
        words.append(f"mean word length {row['mean_word_length']:.1f} bits")
    if skipped:
        words.append(f"{skipped} of {row['step']} steps skipped")
    return "  ".join([*words, f"lr {row['lr']:.3g}", f"{images_per_s:,.0f} images/s"])
