"""Checkpoints of models whose parameters several processes share, for any number of processes."""

import json
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from marvin.compact import SUFFIXES
from marvin.quantized import Quantized
from marvin.ranks import is_distributed, rank
from marvin.rounder import BUFFER
from marvin.shards import Shard, shard_of

__all__ = ["load_sharded", "save_sharded"]

_RECORDS = "torch.distributed.checkpoint.metadata"
_PLAIN = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
_STATE_OF = re.compile(r"(?:^|/)state/(\d+)/")


def save_sharded(
    folder: Path | str,
    model: nn.Module,
    optimizer: Quantized,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Save with ``torch.distributed.checkpoint``: each process writes what it holds.

    All processes call this. ``load_sharded`` reads it with another number of processes, or
    without ``fully_shard``, too. Where the folder has a file ``.metadata``, it is whole.

    Args:
        folder: A new one: files of an older checkpoint are overwritten one by one, and until the last
            is written, the folder holds none.
        model: Parameters whole or sharded. Buffers that differ between processes (running
            statistics) become those of one of them.
        optimizer: Of this model.
        extra: More to keep: numbers, text, None, tensors, and dictionaries, lists and tuples of
            these, the same in all processes.

    Raises:
        TypeError: ``extra`` or the optimizer's state has something else in it, or the model's state
            something that is no tensor (``get_extra_state``).
    """
    from torch.distributed import checkpoint as dcp  # slow to import, and not on every system

    own = model.state_dict()
    _check_tensors(own, Tensor, "the model's state")
    tensors: dict[str, Tensor] = {}
    state = {"optimizer": optimizer.state_dict(), "extra": dict(extra or {})}
    text = json.dumps({name: _plain(value, name, tensors) for name, value in state.items()})
    plain = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    if rank() == 0:  # else files of two checkpoints would pass for one, if this is interrupted
        (Path(folder) / ".metadata").unlink(missing_ok=True)
    if is_distributed():
        dist.barrier()
    with _alone_is_fine():
        dcp.save(
            {"model": own, "tensors": tensors, "plain": plain},
            checkpoint_id=str(folder),
        )


def load_sharded(folder: Path | str, model: nn.Module, optimizer: Quantized) -> dict[str, Any]:
    """Load what ``save_sharded`` saved; all processes call this.

    Args:
        folder: Of the checkpoint.
        model: Gets the weights; its parameters may be sharded otherwise than those saved.
        optimizer: Of this model; gets the state.

    Returns:
        ``extra``.

    Raises:
        ValueError: The folder holds no whole checkpoint of this kind, or one of another model; model and
            optimizer are as they were.
    """
    from torch.distributed import checkpoint as dcp  # slow to import, and not on every system

    path = Path(folder)
    try:
        _check_names(path / ".metadata")
        reader = dcp.FileSystemReader(str(folder))
        known = reader.read_metadata().state_dict_metadata
        _check_tensors(
            known, dcp.metadata.TensorStorageMetadata, "the folder"
        )  # torch unpickles others
        plain = torch.empty(known["plain"].size, dtype=torch.uint8, device="cpu")  # pyright: ignore[reportAttributeAccessIssue]
        with _alone_is_fine():
            dcp.load({"plain": plain}, storage_reader=reader)
        trees = json.loads(plain.numpy().tobytes())
        names = [name for name in known if name.startswith("tensors.")]
        shards = [shard_of(p) for group in optimizer.param_groups for p in group["params"]]
        tensors = {n.removeprefix("tensors."): _target(n, known[n], shards) for n in names}
        own = {  # earlier versions kept no formats with the model: they come with the optimizer
            name: value
            for name, value in model.state_dict().items()
            if f"model.{name}" in known or name.rpartition(".")[2] != BUFFER
        }
        loaded = {name: value.clone() for name, value in own.items()}  # what follows may be refused
        with _alone_is_fine():
            dcp.load({"model": loaded, "tensors": tensors}, storage_reader=reader)
        state, extra = (_restored(trees[name], tensors) for name in ("optimizer", "extra"))
        optimizer.load_state_dict(state)
        for name, value in own.items():
            value.copy_(loaded[name])
    except (Exception, dcp.api.CheckpointException) as error:  # which is no Exception
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{folder} must hold a whole checkpoint of save_sharded, of this model and optimizer: "
            f"{type(error).__name__}: {reason:.300}"
        ) from error
    return extra


class _Names(pickle.Unpickler):
    """Reads metadata that name nothing but what torch writes into them: others could run code."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if "." not in name else None
        is_record = isinstance(found, type) and found.__module__ == module == _RECORDS
        is_dtype = module == "torch" and isinstance(found, torch.dtype)
        if is_record or is_dtype or (module, name) in _PLAIN:
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint does")


def _check_names(path: Path) -> None:
    """Refuse metadata that torch would run code to read."""
    with path.open("rb") as file:
        _Names(file).load()


def _check_tensors(values: Mapping[str, object], kind: type, place: str) -> None:
    """Refuse anything but tensors, or what describes them."""
    if wrong := sorted(name for name, value in values.items() if not isinstance(value, kind)):
        raise TypeError(f"{place} must hold tensors alone, got other values: {', '.join(wrong)}")


def _target(name: str, saved: Any, shards: Sequence[Shard]) -> Tensor:
    """Return an empty tensor, spread as the parameter is to whose state it belongs."""
    found = _STATE_OF.search(name)
    index = int(found[1]) if found else len(shards)
    has_rows = name.endswith(SUFFIXES)
    if index < len(shards) and (has_rows or shards[index].shape == saved.size):
        return shards[index].empty(saved.size, saved.properties.dtype)
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def _plain(value: object, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON has it, and put its tensors into ``tensors``."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"items": [[k, _plain(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = type(value).__name__
        return {kind: [_plain(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint takes plain values and tensors, got {type(value)} in {path}")


def _restored(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Return what ``_plain`` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "items":
        return {key: _restored(v, tensors) for key, v in inner}
    found = [_restored(v, tensors) for v in inner]
    return tuple(found) if kind == "tuple" else found


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Do not warn where there is one process."""
    with warnings.catch_warnings():
        if not is_distributed():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        yield
