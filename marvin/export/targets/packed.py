"""Weights as integers of their own word length, in a safetensors file."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint, decode, pack, unpack
from marvin.export.errors import ExportError, fixed_point
from marvin.export.graph.formats import codes_of
from marvin.export.graph.nodes import Affine, Network, Weighted
from marvin.export.targets import safetensors
from marvin.files import write_atomic

__all__ = [
    "Packed",
    "Size",
    "from_bytes",
    "load",
    "pack_network",
    "pack_state",
    "save",
    "sizes",
    "to_bytes",
]

VERSION = 2
_KEY = "marvin"
_FIELDS = {"version", "sha256", "fixed_point", "activations"}
_FORMAT_FIELDS = {"wl", "fl", "symmetric", "signed", "shape", "dtype"}
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Packed:
    """The weights of a network, without loss.

    Args:
        codes: Integer codes of the tensors that have a format, in parameter order.
        formats: Of each of ``codes``.
        dtypes: What each of ``codes`` was in the model.
        others: All other tensors of the state, as they were.
        activations: Formats of activations, by the name of what is rounded.
    """

    codes: dict[str, Tensor]
    formats: dict[str, FixedPoint]
    dtypes: dict[str, torch.dtype]
    others: dict[str, Tensor]
    activations: dict[str, FixedPoint]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as ``load_state_dict`` takes it: the model's own values, every bit."""
        values = {
            name: decode(codes, self.formats[name], dtype=torch.float64).to(self.dtypes[name])
            for name, codes in self.codes.items()
        }
        return values | {name: x.clone() for name, x in self.others.items()}


@dataclass(frozen=True)
class Size:
    """Int8Writer of one tensor: packed, and as the model has it."""

    name: str
    fmt: FixedPoint | None
    packed_bytes: int
    float_bytes: int


def pack_state(
    state: Mapping[str, Tensor],
    formats: Mapping[str, FixedPoint],
    activations: Mapping[str, FixedPoint] | None = None,
) -> Packed:
    """Return a model's state with integer codes where there are formats.

    Args:
        state: ``model.state_dict()``.
        formats: Of weights, such as ``optimizer.formats()``; keys are names of ``state``.
        activations: Formats of activations, to be kept with the weights.

    Raises:
        ExportError: A name is not in ``state``, or its values are not numbers of its format.
    """
    if unknown := sorted(set(formats) - set(state)):
        raise ExportError(f"formats must be of tensors in the state, got {', '.join(unknown)}")
    formats = {name: fixed_point(name, fmt) for name, fmt in formats.items()}
    for name, fmt in dict(activations or {}).items():
        fixed_point(name, fmt)
    codes = {name: codes_of(name, state[name], fmt) for name, fmt in formats.items()}
    others = {name: x.detach().cpu().clone() for name, x in state.items() if name not in formats}
    dtypes = {name: state[name].dtype for name in formats}
    return Packed(codes, formats, dtypes, others, dict(activations or {}))


def pack_network(network: Network) -> Packed:
    """Return all numbers of a network, as integers of their own formats.

    They are named by operation: ``weight`` and ``bias`` of layers, ``scale`` and ``offset`` of
    batch normalisation.

    Args:
        network: From ``describe``.
    """
    found: dict[str, tuple[Tensor, FixedPoint]] = {}
    for op in network.operations:
        if isinstance(op, Weighted):
            found[f"{op.name}.weight"] = op.weight, op.weight_fmt
            if op.bias is not None:
                found[f"{op.name}.bias"] = op.bias, op.bias_fmt
        elif isinstance(op, Affine):
            found[f"{op.name}.scale"] = op.scale, op.scale_fmt
            found[f"{op.name}.offset"] = op.offset, op.offset_fmt
    codes = {name: codes for name, (codes, _) in found.items()}
    formats = {name: fmt for name, (_, fmt) in found.items()}
    dtypes = dict.fromkeys(codes, torch.float32)
    return Packed(codes, formats, dtypes, {}, network.formats())


def sizes(packed: Packed) -> list[Size]:
    """Return the bytes of each tensor."""
    rows = []
    for name, codes in packed.codes.items():
        fmt = packed.formats[name]
        packed_bytes = (codes.numel() * fmt.wl + 7) // 8
        rows.append(Size(name, fmt, packed_bytes, codes.numel() * packed.dtypes[name].itemsize))
    for name, x in packed.others.items():
        size = x.numel() * x.element_size()
        rows.append(Size(name, None, size, size))
    return rows


def save(packed: Packed | Network, path: str | Path) -> int:
    """Write a file at once; return its bytes.

    Args:
        packed: From ``pack_state``; or a network, of which ``pack_network`` is written.
        path: Of the file; its folder is made if it is not there.

    Raises:
        ExportError: A tensor has a dtype that the file format lacks.
    """
    content = to_bytes(pack_network(packed) if isinstance(packed, Network) else packed)
    write_atomic(Path(path), content)
    return len(content)


def load(path: str | Path) -> Packed:
    """Read a file that ``save`` wrote.

    Raises:
        ExportError: The file is damaged, or not of this package; says what is wrong.
        OSError: There is no such file.
    """
    try:
        return from_bytes(Path(path).read_bytes())
    except ExportError as error:
        raise ExportError(f"{path} must be a packed network: {error}") from error


def to_bytes(packed: Packed) -> bytes:
    """Return the content of a file."""
    tensors = {n: pack(codes, packed.formats[n].wl) for n, codes in packed.codes.items()}
    tensors = safetensors.in_file_order(tensors | packed.others)
    fields = {
        "version": VERSION,
        "fixed_point": {name: _describe(packed, name) for name in packed.codes},
        "activations": {
            name: [fmt.wl, fmt.fl, fmt.symmetric, fmt.signed]
            for name, fmt in packed.activations.items()
        },
    }
    fields["sha256"] = _digest(tensors, fields)
    return safetensors.write(tensors, {_KEY: json.dumps(fields)})


def from_bytes(content: bytes) -> Packed:
    """Read the content of a file.

    Raises:
        ExportError: It is damaged, or not of this package.
    """
    tensors, metadata = safetensors.read(content)
    fields = _fields(metadata)
    if _digest(tensors, fields) != fields["sha256"]:
        raise ExportError("the content does not have its own SHA-256: the file is damaged")
    codes, formats, dtypes = {}, {}, {}
    for name, entry in fields["fixed_point"].items():
        formats[name], shape, dtypes[name] = _described(name, entry)
        codes[name] = _unpacked(name, tensors.pop(name, None), formats[name], shape)
    activations = {name: _format(name, v) for name, v in fields["activations"].items()}
    return Packed(codes, formats, dtypes, tensors, activations)


def _describe(packed: Packed, name: str) -> dict[str, Any]:
    fmt, dtype = packed.formats[name], packed.dtypes[name]
    return {
        "wl": fmt.wl,
        "fl": fmt.fl,
        "symmetric": fmt.symmetric,
        "signed": fmt.signed,
        "shape": list(packed.codes[name].shape),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _fields(metadata: Mapping[str, str]) -> dict[str, Any]:
    if _KEY not in metadata:
        raise ExportError(f"the metadata must have {_KEY!r}, got {sorted(metadata)!r:.80}")
    fields = safetensors.parse("metadata", metadata[_KEY])
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        version = fields.get("version") if isinstance(fields, dict) else fields
        raise ExportError(f"the version must be {VERSION}, got {version!r:.80}")
    if set(fields) != _FIELDS:
        raise ExportError(f"the metadata must have {sorted(_FIELDS)}, got {sorted(fields)!r:.80}")
    for name in ("fixed_point", "activations"):
        if not isinstance(fields[name], dict):
            raise ExportError(f"{name} must be a table, got {fields[name]!r:.80}")
    return fields


def _described(name: str, entry: object) -> tuple[FixedPoint, tuple[int, ...], torch.dtype]:
    if not isinstance(entry, dict) or set(entry) != _FORMAT_FIELDS:
        raise ExportError(f"{name} must have {sorted(_FORMAT_FIELDS)}, got {entry!r:.80}")
    shape, dtype = entry["shape"], entry["dtype"]
    if not safetensors.are_sizes(shape):
        raise ExportError(f"{name} must have a shape of whole sizes, got {shape!r:.80}")
    if not isinstance(dtype, str) or dtype not in _FLOATS:
        raise ExportError(f"{name} must be one of {sorted(_FLOATS)}, got {dtype!r:.80}")
    fmt = _format(name, [entry[field] for field in ("wl", "fl", "symmetric", "signed")])
    return fmt, tuple(shape), _FLOATS[dtype]


def _format(name: str, values: Any) -> FixedPoint:
    try:
        wl, fl, symmetric, signed = values
        if not {type(wl), type(fl)} == {int} or not {type(symmetric), type(signed)} == {bool}:
            raise TypeError(
                f"got wl={wl!r:.20}, fl={fl!r:.20}, symmetric={symmetric!r:.20}, "
                f"signed={signed!r:.20}"
            )
        return FixedPoint(wl, fl, symmetric, signed)
    except (TypeError, ValueError) as error:
        raise ExportError(f"{name} must have a format: {error}") from error


def _unpacked(name: str, x: Tensor | None, fmt: FixedPoint, shape: tuple[int, ...]) -> Tensor:
    if x is None or x.dtype is not torch.uint8:
        raise ExportError(f"{name} must be there as bytes, got {None if x is None else x.dtype}")
    size = (math.prod(shape) * fmt.wl + 7) // 8
    if x.shape != (size,):
        raise ExportError(f"{name} must take {size} bytes, got shape {tuple(x.shape)}")
    codes = unpack(x, fmt.wl, shape, signed=fmt.signed)
    if not torch.equal(pack(codes, fmt.wl), x):
        raise ExportError(f"{name} must end with zero bits")
    if codes.numel() and int(codes.min()) < fmt.min_code:
        raise ExportError(f"{name} must have codes from {fmt.min_code}, got {int(codes.min())}")
    return codes


def _digest(tensors: Mapping[str, Tensor], fields: Mapping[str, object]) -> str:
    """Return the SHA-256 of everything else in a file."""
    digest = hashlib.sha256()
    rest = {key: value for key, value in fields.items() if key != "sha256"}
    digest.update(json.dumps(rest, sort_keys=True).encode())
    for name, x in tensors.items():
        digest.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        flat = x.detach().cpu().contiguous().as_strided((x.numel(),), (1,))
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
