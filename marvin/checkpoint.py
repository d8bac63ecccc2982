"""Checkpoints of models whose parameters several processes share, for any number of processes."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.serialization import get_crc32_options, set_crc32_options

from marvin.compact import SUFFIXES
from marvin.owners import check_pair
from marvin.quantized import Quantized
from marvin.ranks import is_distributed, rank
from marvin.rounder import BUFFER
from marvin.sharded_files import METADATA, add_checksum, read_checked
from marvin.shards import Shard, shard_of
from marvin.warned import listed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["load_sharded", "save_sharded"]

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
            something that is no tensor (``get_extra_state``); or model and optimizer are none, or the
            optimizer is one that a ``Quantized`` wraps.
        ValueError: The optimizer has no parameter of the model.
        OSError: The folder cannot be made or takes no files, of one process or another; all raise it.
    """
    from torch.distributed import checkpoint as dcp  # slow to import, and not on every system

    check_pair(model, optimizer, "marvin.save_sharded(folder, model, optimizer)")
    own = model.state_dict()
    if wrong := sorted(name for name, value in own.items() if not isinstance(value, Tensor)):
        raise TypeError(
            f"the model's state must hold tensors alone, got other values: {', '.join(wrong)}"
        )
    tensors: dict[str, Tensor] = {}
    state = {"optimizer": optimizer.state_dict(), "extra": dict(extra or {})}
    text = json.dumps({name: _plain(value, name, tensors) for name, value in state.items()})
    plain = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    if rank() == 0:  # else files of two checkpoints would pass for one, if this is interrupted
        (Path(folder) / METADATA).unlink(missing_ok=True)
    if is_distributed():
        dist.barrier()
    try:
        with _alone_is_fine(), _with_checksums():
            dcp.save(
                {"model": own, "tensors": tensors, "plain": plain},
                checkpoint_id=str(folder),
            )
    except dcp.api.CheckpointException as error:  # which is no Exception
        for failure, _ in error.failures.values():
            if not isinstance(failure, Exception):
                raise failure from None  # an interrupt
        raise OSError(
            f"{folder} must be a folder that takes files, got {_said(error)}: save to another"
        ) from None  # torch's has the tracebacks of all processes
    if rank() == 0:
        add_checksum(Path(folder))


def load_sharded(folder: Path | str, model: nn.Module, optimizer: Quantized) -> dict[str, Any]:
    """Load what ``save_sharded`` saved; all processes call this.

    Args:
        folder: Of the checkpoint.
        model: Gets the weights; its parameters may be sharded otherwise than those saved.
        optimizer: Of this model; gets the state.

    Returns:
        ``extra``.

    Raises:
        TypeError: Model and optimizer are none, or the optimizer is one that a ``Quantized`` wraps.
        ValueError: The folder holds no whole checkpoint of this kind, or one of another model; model and
            optimizer are as they were. Or the optimizer has no parameter of the model.
    """
    from torch.distributed import checkpoint as dcp  # slow to import, and not on every system

    check_pair(model, optimizer, "marvin.load_sharded(folder, model, optimizer)")
    reader = dcp.FileSystemReader(str(folder))
    try:
        with _together():
            known = read_checked(Path(folder), reader)
            _check_model(known, model)
        plain = torch.empty(known["plain"].size, dtype=torch.uint8, device="cpu")
        with _alone_is_fine():
            dcp.load({"plain": plain}, storage_reader=reader)
        trees = json.loads(plain.numpy().tobytes())
        names = [name for name in known if name.startswith("tensors.")]
        shards = [shard_of(p) for group in optimizer.param_groups for p in group["params"]]
        tensors = {n.removeprefix("tensors."): _target(n, known[n], shards) for n in names}
        own = {n: v for n, v in model.state_dict().items() if f"model.{n}" in known}
        loaded = {name: value.clone() for name, value in own.items()}  # what follows may be refused
        with _alone_is_fine():
            dcp.load({"model": loaded, "tensors": tensors}, storage_reader=reader)
        state, extra = (_restored(trees[name], tensors) for name in ("optimizer", "extra"))
        with _together():
            optimizer.load_state_dict(state)
        for name, value in own.items():
            value.copy_(loaded[name])
    except (Exception, dcp.api.CheckpointException) as error:  # which is no Exception
        raise ValueError(
            f"{folder} must hold a whole checkpoint of save_sharded, of this model and optimizer: "
            f"{_said(error)}"
        ) from error
    return extra


def _check_model(known: "Mapping[str, TensorStorageMetadata]", model: nn.Module) -> None:
    """Refuse a checkpoint of another model, as ``load_state_dict`` does."""
    saved = {n.removeprefix("model."): v.size for n, v in known.items() if n.startswith("model.")}
    own = model.state_dict()
    more = [name for name in saved if name not in own]
    # earlier versions kept no formats with the model: they come with the optimizer
    fewer = [name for name in own if name not in saved and not _is_format(name)]
    shapes = [
        f"{name} of shape {(*saved[name],)} in the place of {(*value.shape,)}"
        for name, value in own.items()
        if name in saved and saved[name] != value.shape
    ]
    if more and all(map(_is_format, more)) and not fewer and not shapes:
        raise ValueError(
            f"the model must round what its layers take, as {listed(more)} of the checkpoint says: write "
            "marvin.quantize_activations(model, optimizer) before load_sharded"
        )
    if more or fewer or shapes:
        words = {"too many": more, "too few": fewer, "others": shapes}
        got = "; ".join(f"{word}: {listed(names)}" for word, names in words.items() if names)
        raise ValueError(
            f"the checkpoint must have the weights and buffers of the model, got {got}"
        )


def _is_format(name: str) -> bool:
    return name.rpartition(".")[2] == BUFFER


@contextmanager
def _together() -> Iterator[None]:
    """Raise on every process what one of them raises: it would not come to the next collective."""
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    words = [_said(found) if found else ""]
    if is_distributed():
        words = [""] * dist.get_world_size()
        dist.all_gather_object(words, _said(found) if found else "")
    if found:
        raise found
    for number, word in enumerate(words):
        if word:
            raise RuntimeError(f"process {number}: {word}")


def _said(error: BaseException) -> str:
    """Return an error in one line; torch's own has those of all processes, with their tracebacks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def _target(name: str, saved: "TensorStorageMetadata", shards: Sequence[Shard]) -> Tensor:
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


@contextmanager
def _with_checksums() -> Iterator[None]:
    """Let ``torch.save`` write them, whatever the process has set."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(before)
