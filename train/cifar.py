"""CIFAR-10 and CIFAR-100 in their official binary files; no pickle is ever loaded."""

import gzip
import hashlib
import http.client
import re
import secrets
import tarfile
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch

from marvin.files import write_atomic
from train.bars import HIDDEN, tqdm
from train.dataset import Dataset, Images, make_dataset
from train.errors import UserError

__all__ = ["RELEASES", "Release", "is_present", "load"]

PIXELS = 3 * 32 * 32
SERVER = "https://www.cs.toronto.edu/~kriz/"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Release:
    """How one of the two data sets is stored.

    Args:
        archive: File name of the official archive.
        md5: Checksum of the archive, as its authors publish it.
        folder: Folder inside the archive.
        train: Names of the training files, and records in each.
        test: Name of the test file, and its records.
        label_bytes: Bytes before the pixels of a record; the last one is the label used.
        classes: Number of classes.
    """

    archive: str
    md5: str
    folder: str
    train: dict[str, int]
    test: dict[str, int]
    label_bytes: int
    classes: int

    @property
    def files(self) -> dict[str, int]:
        """Every file with its number of records."""
        return self.train | self.test

    @property
    def record_bytes(self) -> int:
        """Size of one image with its labels."""
        return self.label_bytes + PIXELS


RELEASES = {
    "cifar10": Release(
        archive="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        train={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
        test={"test_batch.bin": 10_000},
        label_bytes=1,
        classes=10,
    ),
    "cifar100": Release(
        archive="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        train={"train.bin": 50_000},
        test={"test.bin": 10_000},
        label_bytes=2,  # coarse, fine
        classes=100,
    ),
}


def is_present(name: str, data_dir: Path) -> bool:
    """Return whether every file of the data set is there, whatever is in it."""
    release = RELEASES[name]
    return all((data_dir / release.folder / file).is_file() for file in release.files)


def load(name: str, data_dir: Path, *, may_fetch: bool = True) -> Dataset:
    """Read the data set, after downloading it where it is absent.

    Args:
        name: ``cifar10`` or ``cifar100``.
        data_dir: Folder that holds, or will hold, the official folder of binary files.
        may_fetch: Whether what is absent may be downloaded and unpacked.

    Raises:
        UserError: A file is damaged, or absent and cannot be downloaded.
        OSError: What was downloaded cannot be unpacked: the disk is full, for example.
    """
    release = RELEASES[name]
    if not is_present(name, data_dir):
        if not may_fetch:
            raise UserError(
                f"looked for {', '.join(release.files)} in {data_dir / release.folder}, found not "
                "all of them: name the folder of your data sets with --data-dir"
            )
        _unpack(release, _archive(release, data_dir), data_dir)
    folder = data_dir / release.folder
    train = _read_part(release, folder, release.train)
    test = _read_part(release, folder, release.test)
    return make_dataset(name, train, test, release.classes, f"binary files in {folder}")


def _read_part(release: Release, folder: Path, files: dict[str, int]) -> Images:
    records = np.concatenate([_read_file(release, folder / f, n) for f, n in files.items()])
    images = records[:, release.label_bytes :].reshape(-1, 3, 32, 32)
    labels = records[:, release.label_bytes - 1].astype(np.int64)
    return Images(torch.from_numpy(images.copy()), torch.from_numpy(labels))


def _read_file(release: Release, path: Path, records: int) -> np.ndarray:
    """Return the records of one file, shape ``(records, record_bytes)``, uint8."""
    want = records * release.record_bytes
    have = path.stat().st_size
    if have != want:
        raise UserError(_damaged(release, path, f"{want:,} bytes", f"{have:,} bytes"))
    content = np.fromfile(path, dtype=np.uint8).reshape(records, release.record_bytes)
    label = int(content[:, release.label_bytes - 1].max(initial=0))
    if label >= release.classes:
        want_labels = f"labels 0 to {release.classes - 1}"
        raise UserError(_damaged(release, path, want_labels, f"label {label}"))
    return content


def _damaged(release: Release, path: Path, required: str, got: str) -> str:
    return (
        f"{path} must hold {required}, got {got}: the file is damaged; delete it and run again "
        f"to download {SERVER}{release.archive}"
    )


def _archive(release: Release, data_dir: Path) -> Path:
    """Return the archive in ``data_dir``, checked; download it where it is absent."""
    path = data_dir / release.archive
    if not path.is_file():
        _download(release, path)
    elif _md5(path) != release.md5:
        raise UserError(
            f"{path} must have MD5 {release.md5}, got {_md5(path)}: delete it and run again"
        )
    return path


def _download(release: Release, path: Path) -> None:
    """Fetch the archive to ``path``, which appears only once its checksum is right."""
    url = SERVER + release.archive
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")  # of this process alone
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=30) as response, partial.open("xb") as file:
            _copy(response, file, release.archive)
        got = _md5(partial)
        if got != release.md5:
            raise UserError(f"{url} must have MD5 {release.md5}, got {got}: nothing was unpacked")
        partial.replace(path)
    except (OSError, http.client.HTTPException) as error:  # no network, no room on the disk
        raise UserError(_absent(release, path.parent, error)) from error
    finally:
        partial.unlink(missing_ok=True)


def _absent(release: Release, data_dir: Path, error: Exception) -> str:
    return (
        f"looked for {', '.join(release.files)} in {data_dir / release.folder} and for "
        f"{data_dir / release.archive}, found neither, and could not download "
        f"{SERVER}{release.archive} ({type(error).__name__}: {error!s:.200}); run again, or download it "
        f"on another machine and put the archive into {data_dir}, or choose --dataset digits, which "
        "needs no download"
    )


def _copy(response: IO[bytes], file: IO[bytes], name: str) -> None:
    """Write what a server sends.

    Raises:
        OSError: It sends less than it said.
    """
    length = getattr(response, "headers", {}).get("Content-Length", "")
    total = int(length) if re.fullmatch("[0-9]{1,18}", length) else None  # else the MD5 tells
    with tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=HIDDEN) as bar:
        while chunk := response.read(CHUNK_BYTES):
            file.write(chunk)
            bar.update(len(chunk))
    if total and file.tell() < total:
        raise OSError(f"cut off after {file.tell():,} of {total:,} bytes")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(release: Release, archive: Path, data_dir: Path) -> None:
    """Write the expected members of the archive, and nothing else, each at once."""
    folder = data_dir / release.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            for name, records in release.files.items():
                content = _member(tar, f"{release.folder}/{name}", records * release.record_bytes)
                write_atomic(folder / name, content)
    except (tarfile.TarError, KeyError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{archive} must be the official archive, got {error}") from error


def _member(tar: tarfile.TarFile, name: str, size: int) -> bytes:
    """Return the bytes of a regular file of the archive; its path is never followed."""
    member = tar.getmember(name)
    file = tar.extractfile(member) if member.isfile() else None
    if file is None or member.size != size:
        raise KeyError(f"{name} of {member.size:,} bytes where {size:,} are required")
    return file.read()
