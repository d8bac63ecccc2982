"""The safetensors file format: written and read here, so that no field of a file is trusted.

Eight bytes hold the length of a JSON header, which holds dtype, shape and place of each tensor and
a table of texts; behind it lie the tensors. The format can hold no code.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from marvin.export.errors import ExportError

__all__ = ["are_sizes", "parse", "read", "write"]

Tensors = Mapping[str, Tensor]

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the format's authors
_KEYS = {"dtype", "shape", "data_offsets"}
_DEEPEST = 8  # tables and lists inside one another; ours take 4
_MOST_DIMENSIONS = 16
_LARGEST = 2**48  # of a size, and bytes of a file's tensors


def write(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    """Return the content of a file.

    Args:
        tensors: By name, of dtype bool, an integer or a float.
        metadata: Texts by name.

    Raises:
        ExportError: The format has no such dtype or name.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    data, place = [], 0
    for name, x in tensors.items():
        if x.dtype not in _NAMES or name == _METADATA:
            raise ExportError(f"safetensors holds bool, integers and floats, got {name}: {x.dtype}")
        if not are_sizes(list(x.shape)):
            raise ExportError(f"{name} must have up to 16 dimensions, got {x.ndim}")
        content = _to_bytes(x)
        offsets = [place, place + len(content)]
        header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
        data.append(content)
        place += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return b"".join([_LENGTH.pack(len(text)), text, *data])


def read(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and texts of a file's content.

    Raises:
        ExportError: The content is damaged: says which field is wrong.
    """
    header, start = _header(content)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ExportError("the metadata must be a table of texts")
    tensors: dict[str, Tensor] = {}
    place = 0
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(name, entry)
        if begin != place or end > len(content) - start:
            raise ExportError(
                f"{name} must begin at byte {place} of {len(content) - start}, got [{begin}, {end}]"
            )
        tensors[name] = _from_bytes(content[start + begin : start + end], dtype, shape)
        place = end
    if place != len(content) - start:
        raise ExportError(f"the tensors must fill {len(content) - start} bytes, got {place}")
    return tensors, cast(dict[str, str], metadata)


def _header(content: bytes) -> tuple[dict[str, Any], int]:
    if len(content) < _LENGTH.size:
        raise ExportError(f"a safetensors file has at least 8 bytes, got {len(content)}")
    (length,) = _LENGTH.unpack_from(content)
    if not 2 <= length <= min(len(content) - _LENGTH.size, _LONGEST_HEADER):
        raise ExportError(f"the header must fit into {len(content)} bytes, got {length}")
    start = _LENGTH.size + length
    header = parse("header", content[_LENGTH.size : start])
    if not isinstance(header, dict):
        raise ExportError(f"the header must be a table, got {type(header).__name__}")
    return header, start


def parse(what: str, text: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        ExportError: It is none, a name is there twice, or it is deeper than any file of ours.
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


def _entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise ExportError(f"{name} must have {', '.join(sorted(_KEYS))}, got {entry!r:.80}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ExportError(f"{name} must be one of {', '.join(_DTYPES)}, got {entry['dtype']!r:.80}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (are_sizes(shape) and _are_whole(offsets) and len(offsets) == 2):
        raise ExportError(f"{name} must have whole sizes, got {shape!r:.80} and {offsets!r:.80}")
    size = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != size:
        raise ExportError(f"{name} must take {size} bytes, got {offsets[1] - offsets[0]}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def are_sizes(values: Any) -> bool:
    """Say whether these are sizes that torch takes, of an empty tensor too; True is no size."""
    if not _are_whole(values) or len(values) > _MOST_DIMENSIONS:
        return False
    return math.prod(max(1, v) for v in values) < _LARGEST


def _are_whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < _LARGEST for v in values)


def _to_bytes(x: Tensor) -> bytes:
    x = x.detach().cpu().contiguous()
    flat = x.as_strided((x.numel(),), (1,))  # of one number, or none, any stride is contiguous
    return flat.view(torch.uint8).numpy().tobytes()


def _from_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.zeros(shape, dtype=dtype)
    if dtype is torch.bool and set(content) - {0, 1}:
        raise ExportError("booleans must be 0 or 1")
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
