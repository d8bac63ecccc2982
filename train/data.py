"""Data sets by name, enlarged to what a model needs, and split into three parts."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from train import cifar, fashion_mnist
from train.config import DATASETS
from train.dataset import Dataset, Images, make_dataset
from train.errors import UserError

__all__ = ["Parts", "choose", "enlarge", "load", "split"]

DIGITS_SOURCE = (
    "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI; CC BY 4.0"
)


def choose(name: str, data_dir: Path) -> str:
    """Return ``name``, or for ``auto`` the first data set that is present.

    ``auto`` looks for cifar10, cifar100 and fashion-mnist, in this order, and falls back on the
    digits inside the package. It never downloads.
    """
    if name != "auto":
        return name
    for candidate in cifar.RELEASES:
        if cifar.is_present(candidate, data_dir):
            return candidate
    return "digits" if fashion_mnist.find(data_dir) is None else "fashion-mnist"


def load(name: str, data_dir: Path, *, may_fetch: bool = True) -> Dataset:
    """Load a data set into memory.

    Args:
        name: One of ``train.config.DATASETS``. cifar10 and cifar100 are downloaded when asked for by name and
            absent.
        data_dir: Folder of the user's data sets; need not exist.
        may_fetch: Whether anything may be downloaded to ``data_dir``, or unpacked there.

    Raises:
        UserError: A file is absent or damaged; says what was looked for, where, and how to get
            it.
    """
    name = choose(name, data_dir)
    if name in cifar.RELEASES:
        return cifar.load(name, data_dir, may_fetch=may_fetch)
    if name == "fashion-mnist":
        return fashion_mnist.load(data_dir)
    if name == "digits":
        return _load_digits()
    raise UserError(f"data set must be one of {', '.join(DATASETS)}, got {name!r}")


def _load_digits() -> Dataset:
    """Read the data set inside the package; ``digits.md`` beside it names its authors."""
    with resources.files("train").joinpath("digits.npz").open("rb") as file:
        arrays = dict(np.load(file, allow_pickle=False))
    train, test = (
        Images(
            torch.from_numpy(arrays[f"{part}_images"]),
            torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64)),
        )
        for part in ("train", "test")
    )
    return make_dataset("digits", train, test, 10, DIGITS_SOURCE)


def enlarge(dataset: Dataset, min_side: int) -> Dataset:
    """Return a data set whose images have at least ``min_side`` rows and columns.

    Pixels are repeated as often as fits, and zeros are put around the rest: digits (8x8) become
    32x32 by repetition, Fashion-MNIST (28x28) by two zeros on each side.
    """
    if dataset.side >= min_side:
        return dataset
    train, test = (
        Images(_enlarge(part.images, min_side), part.labels)
        for part in (dataset.train, dataset.test)
    )
    return make_dataset(dataset.name, train, test, dataset.classes, dataset.source)


def _enlarge(images: Tensor, min_side: int) -> Tensor:
    factor = min_side // images.shape[-1]
    images = images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    missing = min_side - images.shape[-1]
    before, after = missing // 2, missing - missing // 2
    return F.pad(images, (before, after, before, after))


@dataclass(frozen=True)
class Parts:
    """The three parts of a data set: one trains, one drives the schedule, one only reports."""

    train: Images
    validation: Images
    test: Images


def split(dataset: Dataset, validation_share: float, limit: int = 0) -> Parts:
    """Hold out the last images of the training part.

    Args:
        dataset: What to split.
        validation_share: Share of the training images to hold out, 0 to below 1; rounded to
            whole images.
        limit: Use only the first ``limit`` training and test images; 0 for all.

    Raises:
        UserError: No training image would be left.
    """
    train, test = dataset.train, dataset.test
    if limit:
        train, test = train[:limit], test[:limit]
    kept = len(train) - round(len(train) * validation_share)
    if kept < 1:
        raise UserError(f"at least one training image must be left, got {kept} of {len(train)}")
    return Parts(train[:kept], train[kept:], test)
