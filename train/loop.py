"""Training and evaluation, readable from top to bottom."""

import dataclasses
import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marvin
from marvin.ranks import sum_over_ranks
from perfmodel.cost import weights_of
from perfmodel.files import METRICS, TIMING, TRACE
from perfmodel.run import start_of
from train import distributed, front
from train.augment import batch, epoch_order, private_generator, step_indices
from train.config import Config, to_dict
from train.dataset import Dataset, Images
from train.monitor import Monitor
from train.optimizers import prepare_gradients_
from train.records import TIMES
from train.schedule import rate
from train.training import COLUMNS, Progress, Training

__all__ = ["Score", "evaluate", "fit", "reestimate"]


@dataclass(frozen=True)
class Score:
    """What a model reaches on some images: mean loss, and share of right answers."""

    loss: float
    accuracy: float


def fit(training: Training, monitor: Monitor) -> None:
    """Train from where ``training`` stands to the last epoch, or the policy's."""
    save_tables(training)
    while not training.is_over:
        begin = time.perf_counter()
        images = train_epoch(training, monitor)
        train_s = time.perf_counter() - begin
        row = end_epoch(training)
        monitor.epoch(row, training, images / train_s)
        if training.config.keep_front and distributed.is_first():
            front.keep(training)
        training.folder.save_checkpoint(training.state())
        save_tables(training)
        save_timing(training, images, train_s, time.perf_counter() - begin)


def train_epoch(training: Training, monitor: Monitor) -> int:
    """Train to the end of the current epoch; return the images this call saw."""
    config, progress = training.config, training.progress
    order = epoch_order(len(training.parts.train), config.seed, progress.epoch)
    seen_before = progress.seen
    training.model.train()
    monitor.begin_epoch(progress, min(training.steps * step_size(config), len(order)))
    while progress.step < training.steps:
        indices = step_indices(order, progress.step, config.batch_size, config.accumulation_steps)
        skipped = training.skipped_steps
        loss, correct = train_step(training, indices)
        was_skipped = training.skipped_steps > skipped
        progress.add(loss, correct, sum(len(i) for i in indices), was_skipped=was_skipped)
        training.note_switches()
        monitor.step(training, loss)
        if is_checkpoint_due(config, progress, training.steps):
            monitor.flush()
            training.folder.save_checkpoint(training.state())
    return progress.seen - seen_before


def step_size(config: Config) -> int:
    """Return the images of an optimiser step."""
    return config.batch_size * config.accumulation_steps


def is_checkpoint_due(config: Config, progress: Progress, steps: int) -> bool:
    """Return whether to save inside an epoch; the end of an epoch has a checkpoint of its own."""
    every = config.checkpoint_steps
    return every > 0 and progress.total_steps % every == 0 and progress.step < steps


def train_step(training: Training, indices: list[Tensor]) -> tuple[float, int]:
    """Do one optimiser step with the mean gradient over its micro-batches, and all processes.

    ``indices`` are the images of each micro-batch, int64 vectors.

    Returns:
        Mean loss over the images, and number of right answers.
    """
    config, progress = training.config, training.progress
    step_images = sum(len(i) for i in indices) / distributed.world()
    sums = torch.zeros(2, dtype=torch.float64, device=config.device)
    training.optimizer.zero_grad()
    for number, chosen in enumerate(indices):
        generator = private_generator(config.seed, "batch", progress.epoch, progress.step, number)
        own = distributed.share(len(chosen))
        images, labels = batch(training.parts.train, chosen, training.dataset, generator, own)
        with distributed.no_sync(training.parallel, is_last=number + 1 == len(indices)):
            logits = training.parallel(images)
            loss = F.cross_entropy(logits, labels) * (len(labels) / step_images)
            loss.backward()
        correct = (logits.argmax(1) == labels).sum()
        sums += torch.stack([loss.detach().double(), correct.double()])
    loss, correct = sum_over_ranks(sums).tolist()
    loss /= distributed.world()
    lr = rate(config, progress.total_steps, config.epochs * training.steps)
    for group in training.optimizer.param_groups if lr is not None else ():
        group["lr"] = lr
    update(training, loss)
    if training.average is not None:
        training.average.update()
    return loss, int(correct)


def update(training: Training, loss: float) -> None:
    """Let the optimizer use the gradients.

    Raises:
        FloatingPointError: The loss is not finite.
    """
    if isinstance(training.optimizer, marvin.Quantized):
        training.optimizer.step(loss=loss)
        return
    if not math.isfinite(loss):
        step = training.progress.total_steps + 1
        raise FloatingPointError(f"the loss must be finite, got {loss} in step {step}; lower --lr")
    prepare_gradients_(training.config, training.model)
    training.optimizer.step()


def end_epoch(training: Training) -> dict[str, float | None]:
    """Let the policy, then the schedule decide, and return the row of the epoch.

    What is evaluated has the formats that the policy chose here, as the checkpoint of the epoch has.
    """
    config, progress, parts = training.config, training.progress, training.parts
    lr = training.optimizer.param_groups[0]["lr"]
    train_loss = progress.mean_loss
    train = Score(math.nan if train_loss is None else train_loss, progress.correct / progress.seen)
    if isinstance(training.optimizer, marvin.Quantized):
        training.optimizer.end_epoch()
        training.note_switches()
    held_out = None
    model = training.evaluated
    reestimate(training, model)
    if len(parts.validation):
        held_out = evaluate(model, parts.validation, training.dataset, config.batch_size)
    has_loss = held_out is not None or train_loss is not None
    is_plateau = config.schedule == "plateau" and has_loss
    if is_plateau and (training.policy is None or not training.policy.rules.owns_lr):
        training.scheduler.step((held_out or train).loss)
    values = (
        progress.epoch + 1,
        progress.total_steps,
        lr,
        train_loss,
        train.accuracy,
        held_out and held_out.loss,
        held_out and held_out.accuracy,
        training.mean_word_length,
    )
    row: dict[str, float | None] = dict(zip(COLUMNS, values, strict=True))
    progress.finish_epoch(row)
    return row


def reestimate(training: Training, model: nn.Module) -> None:
    """Estimate batch norm's statistics anew, over training images, the same ones each time.

    They stay in the model: what is tested is what the checkpoint holds and an export takes. Training
    does not read them.

    Args:
        training: Has the images.
        model: Whose statistics: the run's, or one with its weights averaged.
    """
    config, part = training.config, training.parts.train
    if not config.batch_norm_batches:
        return
    order = torch.randperm(len(part), generator=private_generator(config.seed, "statistics order"))
    size = min(config.batch_size, len(part))
    every = order[: len(part) // size * size].split(size)[: config.batch_norm_batches]
    own = range(distributed.rank(), len(every), distributed.world())
    marvin.reestimate_batch_norm(
        model,
        (
            batch(part, every[i], training.dataset, private_generator(config.seed, "statistics", i))
            for i in own
        ),
    )


@torch.no_grad()
def evaluate(model: nn.Module, part: Images, dataset: Dataset, batch_size: int) -> Score:
    """Return mean loss and accuracy in evaluation mode; the model's mode stays as it was.

    Of several processes each takes some of the batches; all return the same.
    """
    distributed.sync_buffers(model)
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=part.labels.device)
    batches = torch.arange(len(part)).split(batch_size)
    for indices in batches[distributed.rank() :: distributed.world()]:
        images, labels = batch(part, indices, dataset)
        logits = model(images)
        correct = (logits.argmax(1) == labels).sum()
        losses = F.cross_entropy(logits, labels, reduction="none")
        sums += torch.stack([losses.double().sum(), correct.double()])
    model.train(was_training)
    loss, correct = sum_over_ranks(sums).tolist()
    return Score(loss / len(part), correct / len(part))


def save_tables(training: Training) -> None:
    """Write the tables that the checkpoint also holds."""
    training.folder.save_rows(METRICS, training.progress.rows, COLUMNS)
    if isinstance(training.optimizer, marvin.Quantized):
        columns = [f.name for f in dataclasses.fields(marvin.Switch)]
        start = start_of(to_dict(training.config))
        madds = {w.name: w.madds for w in weights_of(training.layers)}
        rows = (
            dataclasses.asdict(switch)
            | {"ebops": madds[switch.layer] * start.segment_after(switch).ebops}
            for switch in training.switches()
        )
        training.folder.save_rows(TRACE, rows, [*columns, "ebops"])


def save_timing(training: Training, images: int, train_s: float, epoch_s: float) -> None:
    """Write how long an epoch took: of what this process did of it."""
    values = (
        training.progress.epoch,
        images,
        round(train_s, 3),
        round(epoch_s, 3),
        round(images / train_s, 1),
    )
    row: dict[str, float] = dict(zip(TIMES, values, strict=True))
    training.folder.add_row(TIMING, row)
