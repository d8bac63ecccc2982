"""Fashion-MNIST from its idx files."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from train.dataset import Dataset, Images, make_dataset
from train.errors import UserError

__all__ = ["FILES", "find", "load"]

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
SIDE = 28
CLASSES = 10
IMAGES_MAGIC = 2051  # unsigned bytes, 3 dimensions
LABELS_MAGIC = 2049  # unsigned bytes, 1 dimension
MOST_BYTES = 2**28  # unpacked; the training images are 47 MB
HOW_TO_GET = (
    "install Debian's package dataset-fashion-mnist, or put the four files from "
    "https://github.com/zalandoresearch/fashion-mnist into"
)


def find(data_dir: Path) -> Path | None:
    """Return the first folder that holds all four files, or None."""
    for folder in _folders(data_dir):
        if all((folder / name).is_file() for pair in FILES.values() for name in pair):
            return folder
    return None


def load(data_dir: Path) -> Dataset:
    """Read the data set from ``data_dir`` or from where Debian's package puts it.

    Raises:
        UserError: The files are absent or damaged.
    """
    folder = find(data_dir)
    if folder is None:
        names = ", ".join(name for pair in FILES.values() for name in pair)
        places = ", ".join(str(place) for place in _folders(data_dir))
        raise UserError(
            f"looked for {names} in {places}: found no folder with all four; {HOW_TO_GET} "
            f"{data_dir / 'fashion-mnist'}"
        )
    train, test = (_read_part(folder, *names) for names in FILES.values())
    return make_dataset("fashion-mnist", train, test, CLASSES, f"idx files in {folder}; MIT")


def _folders(data_dir: Path) -> tuple[Path, ...]:
    return data_dir / "fashion-mnist", data_dir, DEBIAN


def _read_part(folder: Path, images_name: str, labels_name: str) -> Images:
    images = _read_idx(folder / images_name, IMAGES_MAGIC, (SIDE, SIDE))
    labels = _read_idx(folder / labels_name, LABELS_MAGIC, ())
    if len(images) != len(labels):
        required = f"a label for each of the {len(images):,} images"
        raise UserError(_damaged(folder / labels_name, required, f"{len(labels):,} labels"))
    if int(labels.max(initial=0)) >= CLASSES:
        required = f"labels 0 to {CLASSES - 1}"
        raise UserError(_damaged(folder / labels_name, required, f"label {labels.max()}"))
    return Images(
        torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64))
    )


def _read_idx(path: Path, magic: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the items of an idx file of bytes, each of the given shape."""
    content = _unzip(path)
    header = struct.Struct(f">{2 + len(shape)}I")
    if len(content) < header.size:
        raise UserError(_damaged(path, f"{header.size} bytes of header", f"{len(content)} bytes"))
    got_magic, count, *got_shape = header.unpack_from(content)
    if got_magic != magic or tuple(got_shape) != shape:
        required = f"idx data with magic {magic} and items of shape {shape}"
        raise UserError(_damaged(path, required, f"magic {got_magic}, shape {tuple(got_shape)}"))
    size = header.size + count * int(np.prod(shape))
    if count < 1 or len(content) != size:
        required = f"at least one item, {size:,} bytes for the {count:,} of its header"
        raise UserError(_damaged(path, required, f"{len(content):,} bytes"))
    return np.frombuffer(content, dtype=np.uint8, offset=header.size).reshape(count, *shape)


def _unzip(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(_damaged(path, "a whole gzip file", str(error))) from error
    if len(content) > MOST_BYTES:
        raise UserError(_damaged(path, f"{MOST_BYTES:,} bytes at most", "more"))
    return content


def _damaged(path: Path, required: str, got: str) -> str:
    return (
        f"{path} must hold {required}, got {got}: the file is damaged; {HOW_TO_GET} {path.parent}"
    )
