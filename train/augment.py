"""Batches: their order, augmentation and normalisation, each a function of seed and position.

Nothing here has state, so a run continues in the middle of an epoch with the same bits.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from train.dataset import Dataset, Images

__all__ = ["Augmentation", "augment", "augmentation", "batch", "epoch_order", "normalize"]
__all__ += ["private_generator", "step_indices", "steps_per_epoch"]


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images.

    Args:
        padding: Zeros put around an image before a random crop to its old size.
        flip: Mirror every second image, at random, from left to right.
    """

    padding: int
    flip: bool


def augmentation(dataset: Dataset) -> Augmentation:
    """Return what suits a data set: small images move less, digits are not mirrored."""
    return Augmentation(padding=4 if dataset.side > 8 else 1, flip=dataset.name != "digits")


def private_generator(seed: int, *position: int | str) -> torch.Generator:
    """Return a CPU generator for one place of a run, independent of every other place."""
    words = ",".join(str(word) for word in (seed, *position))
    digest = hashlib.sha256(words.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch visits ``count`` images, shape ``(count,)``, int64."""
    return torch.randperm(count, generator=private_generator(seed, "order", epoch))


def steps_per_epoch(count: int, batch_size: int, accumulation_steps: int) -> int:
    """Return the optimiser steps of an epoch.

    Every step sees the same number of images: with normalised gradients a small last batch would
    weigh as much as a whole one. The images left over, other ones in each epoch, wait for a later
    epoch; fewer images than one step needs make one smaller step.
    """
    return max(1, count // (batch_size * accumulation_steps))


def step_indices(
    order: Tensor, step: int, batch_size: int, accumulation_steps: int
) -> list[Tensor]:
    """Return the image indices of each micro-batch of an optimiser step, int64 vectors.

    ``order`` are the indices of an epoch, (images,) int64.
    """
    size = batch_size * accumulation_steps
    return list(order[step * size : (step + 1) * size].split(batch_size))


def augment(
    images: Tensor,
    how: Augmentation,
    generator: torch.Generator,
    share: slice = slice(None),
    of: int | None = None,
) -> Tensor:
    """Crop and mirror each image at random.

    Args:
        images: Pixels, shape ``(n, channels, side, side)``, on any device.
        how: What to do.
        generator: A CPU generator, so that every device sees the same images.
        share: Which images of a batch these are: they change as they would in the whole batch.
        of: Images of that batch; None: these are all.

    Returns:
        Shape, dtype and device of ``images``.
    """
    n, channels, side, _ = images.shape
    every = n if of is None else of
    shift = torch.randint(2 * how.padding + 1, (2, every, 1), generator=generator)[:, share]
    mirrored = torch.randint(2, (every, 1), generator=generator)[share].bool() & how.flip
    along = torch.arange(side)
    rows = shift[0] + along  # (n, side)
    columns = shift[1] + torch.where(mirrored, along.flip(0), along)  # (n, side)
    padded = F.pad(images, (how.padding,) * 4).flatten(2)
    places = rows.unsqueeze(2) * (side + 2 * how.padding) + columns.unsqueeze(1)
    chosen = places.view(n, 1, -1).to(images.device)
    return padded.gather(2, chosen.expand(-1, channels, -1)).view(images.shape)


def normalize(images: Tensor, dataset: Dataset) -> Tensor:
    """Return float32 images of mean 0 and deviation 1 in each channel of the training part.

    They lie in memory as ``dataset.memory_format`` says.
    """
    mean = torch.tensor(dataset.mean, device=images.device).view(-1, 1, 1)
    std = torch.tensor(dataset.std, device=images.device).view(-1, 1, 1)
    scaled = images.float().sub_(mean).div_(std)
    return scaled.contiguous(memory_format=dataset.memory_format)


def batch(
    part: Images,
    indices: Tensor,
    dataset: Dataset,
    generator: torch.Generator | None = None,
    share: slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """Return normalised images and labels of a share, augmented when a generator is given.

    Images are (n, channels, height, width) float32, labels (n,) int64; ``indices`` is a vector.
    """
    chosen = part[indices[share].to(part.labels.device)]
    images = chosen.images
    if generator is not None:
        images = augment(images, augmentation(dataset), generator, share, len(indices))
    return normalize(images, dataset), chosen.labels
