"""What a data set is: images and labels as tensors, and where they came from."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Dataset", "Images", "make_dataset"]


@dataclass(frozen=True)
class Images:
    """Some images and their labels.

    Args:
        images: Pixels, shape ``(n, channels, height, width)``, uint8.
        labels: Class of each image, shape ``(n,)``, int64.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | Tensor) -> "Images":
        return Images(self.images[index], self.labels[index])

    def to(self, device: torch.device | str) -> "Images":
        """Return the same images on ``device``."""
        return Images(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """A data set in memory.

    Args:
        name: One of ``train.config.DATASETS``, without ``auto``.
        train: The training part, which a validation part may still be taken from.
        test: The test part.
        classes: Number of classes; labels are 0 to ``classes - 1``.
        mean: Mean of each channel over the training images, in units of 0..255.
        std: Standard deviation of each channel, likewise.
        source: Where the images came from, and their licence where one is known.
        memory_format: How images of a batch lie in memory.
    """

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    memory_format: torch.memory_format = torch.contiguous_format

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return self.train.images.shape[1]

    @property
    def side(self) -> int:
        """Height of the images, which are square."""
        return self.train.images.shape[2]

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that differ when any pixel or label differs."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            digest.update(part.images.contiguous().numpy().data)
            digest.update(part.labels.contiguous().numpy().data)
        return digest.hexdigest()[:16]


def make_dataset(name: str, train: Images, test: Images, classes: int, source: str) -> Dataset:
    """Return a ``Dataset`` with the channel statistics of its training images."""
    mean, std = _statistics(train.images)
    return Dataset(name, train, test, classes, mean, std, source)


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, exact integer sums of the pixels."""
    means, stds = [], []
    values = torch.arange(256, dtype=torch.float64)
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).double()
        mean = ((counts * values).sum() / counts.sum()).item()
        variance = ((counts * (values - mean) ** 2).sum() / counts.sum()).item()
        means.append(mean)
        stds.append(max(variance**0.5, 1.0))  # a constant channel is not blown up
    return tuple(means), tuple(stds)
