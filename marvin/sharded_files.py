"""The files of a sharded checkpoint, looked at before anything of them is loaded."""

import hashlib
import io
import pickle
from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from marvin.files import write_atomic
from marvin.ranks import is_distributed, rank
from marvin.saved_file import check_calls, check_memo, check_records

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

__all__ = ["METADATA", "add_checksum", "read_checked"]

METADATA = ".metadata"
_RECORDS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_PLAIN = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
    ("pathlib._local", "WindowsPath"),
}


def add_checksum(folder: Path) -> None:
    """Write a checksum behind the metadata: whoever unpickles them ends before it."""
    content = (folder / METADATA).read_bytes()
    write_atomic(folder / METADATA, content + _checksum(content))


def read_checked(folder: Path, reader: "FileSystemReader") -> "dict[str, TensorStorageMetadata]":
    """Return what a checkpoint has, by name, if that and this process's share of the records are whole.

    Between them, the processes compare every record with its checksum. Metadata of earlier versions have none of
    their own.

    Args:
        folder: Of the checkpoint.
        reader: Of the same folder.

    Raises:
        BadZipFile, TypeError, UnpicklingError, ValueError: Something is damaged, or no checkpoint's; other
            exceptions may come, too.
    """
    _check_metadata(folder / METADATA)
    found = reader.read_metadata()
    tensors = _checked_sizes(folder, found)
    count = dist.get_world_size() if is_distributed() else 1
    for info in [*found.storage_data.values()][rank() :: count]:
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            record = io.BytesIO(file.read(info.length))
        check_records(record)
        check_calls(record)
    return tensors


class _Plain:
    """Stands for what metadata name, in a first reading: takes any arguments, and no change."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it changes what is no record")


class _Record(_Plain):
    """Stands for a record, which pickles fill; not for its class, which the whole process has."""

    def __setstate__(self, state: object) -> None: ...


class _Names(pickle.Unpickler):
    """Reads metadata that name nothing but what torch writes into them; imports nothing."""

    def find_class(self, module: str, name: str) -> type[_Plain]:
        if (module, name) in _RECORDS:
            return _Record
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or (module, name) in _PLAIN:
            return _Plain
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint does")


def _check_metadata(path: Path) -> None:
    """Refuse metadata that torch would run code to read, or that were changed since."""
    content = path.read_bytes()
    check_memo(content)
    file = io.BytesIO(content)
    _Names(file).load()
    end = file.tell()
    if (added := file.read()) and added != _checksum(content[:end]):
        raise ValueError(f"wrong checksum of {path.name}")


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _checked_sizes(folder: Path, found: "Metadata") -> "dict[str, TensorStorageMetadata]":
    """Return the tensors of metadata; refuse those that tell of more than there is in the files: memory is taken as they say."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    taken = Counter[str]()
    for info in found.storage_data.values():
        if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
            raise ValueError(f"it has a record in {info.relative_path}, where none is written")
        taken[info.relative_path] += info.length
    for name, length in taken.items():
        if length > (size := (folder / name).stat().st_size):
            raise ValueError(f"{name} must have {length} bytes, got {size}")
    tensors: dict[str, TensorStorageMetadata] = {}
    for name, saved in found.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):  # torch unpickles others
            raise TypeError(f"the folder must hold tensors alone, got another value: {name}")
        chunks = {chunk.offsets: prod(chunk.sizes) for chunk in saved.chunks}
        for offsets, count in chunks.items():
            held = found.storage_data[MetadataIndex(name, offsets)].length
            if count * saved.properties.dtype.itemsize > held:
                raise ValueError(f"{name} must have {count} values, got {held} bytes of them")
        if sum(chunks.values()) != prod(saved.size):
            raise ValueError(f"{name} must be there whole, got {sum(chunks.values())} values")
        tensors[name] = saved
    return tensors
