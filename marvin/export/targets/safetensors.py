"""Tensors and texts in a safetensors file, which can hold no code.

The package ``safetensors`` writes and reads. It takes a few things that are checked here: names that
are there twice, of which it keeps the last; dtypes of others; booleans that are neither 0 nor 1; and
sizes of empty tensors that torch does not take.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from marvin.export.errors import ExportError

__all__ = ["are_sizes", "in_file_order", "parse", "read", "write"]

_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_DEEPEST = 8  # tables and lists inside one another; ours take 4
_MOST_DIMENSIONS = 16
_LARGEST = 2**48  # of a size


def write(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a file.

    Args:
        tensors: By name, of dtype bool, an integer or a float.
        metadata: Texts by name.

    Raises:
        ExportError: The format has no such dtype or name.
    """
    for name, x in tensors.items():
        if x.dtype not in _DTYPES or name == _METADATA:
            raise ExportError(f"safetensors holds bool, integers and floats, got {name}: {x.dtype}")
        if not are_sizes(list(x.shape)):
            raise ExportError(f"{name} must have up to 16 dimensions, got {x.ndim}")
    plain = {name: _plain(x) for name, x in tensors.items()}
    # with no tensors, and a table of no texts, the package writes what it cannot read
    return save_tensors(plain, dict(metadata) or None)


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the order in which ``read`` gives them."""
    return {name: tensors[name] for name in read(write(tensors, {}))[0]}


def read(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors, in the order of the header, and texts of a file's content.

    Raises:
        ExportError: The content is damaged; says what is wrong.
    """
    try:
        tensors = load_tensors(content)
    except Exception as error:  # its own, torch's, and Python's
        raise ExportError(f"the content must be whole: {error!s:.200}") from error
    (length,) = _LENGTH.unpack_from(content)
    header = parse("header", content[_LENGTH.size : _LENGTH.size + length])
    metadata = header.pop(_METADATA, None) or {}
    for name, x in tensors.items():
        if x.dtype not in _DTYPES:
            raise ExportError(f"{name} must be bool, integers or floats, got {x.dtype}")
        if not are_sizes(list(x.shape)):
            raise ExportError(f"{name} must have whole sizes, got {tuple(x.shape)!r:.80}")
        if x.dtype is torch.bool and (x.view(torch.uint8) > 1).any():
            raise ExportError(f"{name}: booleans must be 0 or 1")
    return {name: tensors[name] for name in header}, metadata


def parse(what: str, text: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        ExportError: ``text`` is not JSON, a name is there twice, or it is deeper than any file of ours.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        found = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"the {what} must be JSON: {error}") from error
    level = [found] if isinstance(found, dict | list) else []
    for _ in range(_DEEPEST):
        inner = [x.values() if isinstance(x, dict) else x for x in level]
        level = [y for x in inner for y in x if isinstance(y, dict | list)]
        if not level:
            return found
    raise ExportError(f"the {what} must be JSON of {_DEEPEST} levels, got more")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ExportError("names in a header must be unique")
    return table


def are_sizes(values: object) -> bool:
    """Say whether these are sizes that torch takes, of an empty tensor too; True is no size."""
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        return False
    if not all(type(v) is int and 0 <= v < _LARGEST for v in values):
        return False
    return math.prod(max(1, v) for v in values) < _LARGEST


def _plain(x: Tensor) -> Tensor:
    """Return a tensor with memory of its own and the usual strides, as the package wants it."""
    x = x.detach().cpu()
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)
