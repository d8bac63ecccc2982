"""A network, and weights as integers of their own word length, in a safetensors file.

``docs/packed.md`` says what is in such a file; ``docs/read_packed.py`` computes with one.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint, decode, pack, unpack
from fixedpoint_kernels.formats import LONGEST_FL
from marvin.channels import ChannelFormat, scale_of
from marvin.export.errors import ExportError, fixed_point
from marvin.export.graph.formats import codes_of
from marvin.export.graph.nodes import Network, check_network
from marvin.export.targets import safetensors
from marvin.export.targets.packed_network import (
    Tensors,
    read_format,
    read_network,
    write_format,
    write_network,
)
from marvin.files import write_atomic
from marvin.rounding import Format

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

VERSION = 3
_KEY = "marvin"
_FIELDS = {"version", "sha256", "fixed_point", "activations"}
_ADDED = {2: set[str](), 3: {"network"}}  # by the versions that are read
_FORMAT_FIELDS = {"wl", "fl", "symmetric", "signed", "shape", "dtype"}
_SHIFTS = "shifts"  # of the channels, of weights with an ``fl`` for each; from version 3 on
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Packed:
    """The weights of a network, without loss, and the network itself.

    Args:
        codes: Integer codes of the tensors that have a format, in parameter order.
        formats: Of each of ``codes``; with an ``fl`` for each channel, codes are at their own.
        dtypes: What each of ``codes`` was in the model; None of those that the network alone has.
        others: All other tensors of the state, as they were.
        activations: Formats of activations, by the name of what is rounded.
        network: What is computed with them; None where that is not known.
    """

    codes: dict[str, Tensor]
    formats: Mapping[str, FixedPoint | ChannelFormat]
    dtypes: Mapping[str, torch.dtype | None]
    others: dict[str, Tensor]
    activations: dict[str, FixedPoint]
    network: Network | None = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as ``load_state_dict`` takes it: the model's own values, every bit."""
        values = {
            name: _decoded(self.codes[name], self.formats[name]).to(dtype)
            for name, dtype in self.dtypes.items()
            if dtype is not None
        }
        return values | {name: x.clone() for name, x in self.others.items()}


@dataclass(frozen=True)
class Size:
    """Bytes of one tensor: packed, and as the model has it; 0 there of what the network alone has.

    Attributes:
        name: Of the tensor.
        fmt: Of its codes; None where it is stored as it is.
        packed_bytes: In the file.
        float_bytes: In the model's state.
    """

    name: str
    fmt: FixedPoint | ChannelFormat | None
    packed_bytes: int
    float_bytes: int


def pack_state(
    state: Mapping[str, Tensor],
    formats: Mapping[str, Format],
    activations: Mapping[str, FixedPoint] | None = None,
    network: Network | None = None,
) -> Packed:
    """Return a model's state with integer codes where there are formats.

    Args:
        state: ``model.state_dict()``.
        formats: Of weights, such as ``optimizer.formats()``; keys are names of ``state``.
        activations: Formats of activations, to be kept with the weights.
        network: What the model computes. Its numbers are kept, once where they are in ``state``.

    Raises:
        ExportError: A name is not in ``state``, or its values are not numbers of its format; or the
            state has something that is no tensor.
    """
    for name, x in state.items():
        if not isinstance(x, Tensor):
            raise ExportError(
                f"{name} must be a tensor, got {type(x).__name__}: leave it out of the state, or let "
                "get_extra_state return a tensor"
            )
    if unknown := sorted(set(formats) - set(state)):
        raise ExportError(f"formats must be of tensors in the state, got {', '.join(unknown)}")
    known = {name: _known(name, fmt) for name, fmt in formats.items()}
    for name, fmt in dict(activations or {}).items():
        fixed_point(name, fmt)
    codes = {name: _codes(name, state[name], fmt) for name, fmt in known.items()}
    others = {name: x.detach().cpu().clone() for name, x in state.items() if name not in known}
    dtypes = {name: state[name].dtype for name in known}
    return _with_network(Packed(codes, known, dtypes, others, dict(activations or {}), network))


def pack_network(network: Network) -> Packed:
    """Return a network and all its numbers, as integers of their own formats.

    They are named by operation: ``weight`` and ``bias`` of layers, ``scale`` and ``offset`` of
    batch normalisation.

    Args:
        network: From ``describe``.

    Raises:
        ExportError: A number has a code that its format lacks.
        TypeError: ``network`` is not a ``Network``.
    """
    check_network(network)
    packed = _with_network(Packed({}, {}, {}, {}, network.formats(), network))
    return replace(packed, dtypes=dict.fromkeys(packed.codes, torch.float32))


def _with_network(packed: Packed) -> Packed:
    """Return the same with those numbers of the network that are not there yet."""
    if packed.network is None:
        return packed
    tensors = Tensors(dict(packed.codes), dict(packed.formats), set(packed.others))
    write_network(packed.network, tensors)
    dtypes = {name: packed.dtypes.get(name) for name in tensors.codes}
    return replace(packed, codes=tensors.codes, formats=tensors.formats, dtypes=dtypes)


def _known(name: str, fmt: Format) -> FixedPoint | ChannelFormat:
    """Return a format that has codes."""
    whole = fixed_point(name, fmt)
    return fmt if isinstance(fmt, ChannelFormat) else whole


def _codes(name: str, x: Tensor, fmt: FixedPoint | ChannelFormat) -> Tensor:
    """Return the codes of values; those of channels at the ``fl`` of their own."""
    if isinstance(fmt, FixedPoint):
        return codes_of(name, x, fmt)
    if len(fmt.shifts) != len(x):
        raise ExportError(f"{name} must have {len(fmt.shifts)} channels, got {len(x)}")
    return codes_of(name, x.detach().cpu() * scale_of(fmt, x.detach().cpu()), fmt.fmt)


def _decoded(codes: Tensor, fmt: FixedPoint | ChannelFormat) -> Tensor:
    if isinstance(fmt, FixedPoint):
        return decode(codes, fmt, dtype=torch.float64)
    return decode(codes, fmt.fmt, dtype=torch.float64) / scale_of(fmt, codes).double()


def _check_packed(packed: object) -> None:
    if not isinstance(packed, Packed):
        raise TypeError(
            f"a Packed must come first, got {type(packed).__name__}: write pack_network(network), or pack_state("
            "frozen.state_dict(), weight_formats(frozen))"
        )


def sizes(packed: Packed) -> list[Size]:
    """Return the bytes of each tensor.

    Raises:
        TypeError: ``packed`` is not a ``Packed``, but a network, say.
    """
    _check_packed(packed)
    rows = []
    for name, codes in packed.codes.items():
        fmt = packed.formats[name]
        packed_bytes = (codes.numel() * fmt.wl + 7) // 8
        dtype = packed.dtypes[name]
        float_bytes = 0 if dtype is None else codes.numel() * dtype.itemsize
        rows.append(Size(name, fmt, packed_bytes, float_bytes))
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
        TypeError: ``packed`` is neither.
    """
    if not isinstance(packed, Packed):
        check_network(packed)
        packed = pack_network(packed)
    content = to_bytes(packed)
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
    """Return the content of a file.

    Raises:
        TypeError: ``packed`` is not a ``Packed``, but a network, say.
    """
    _check_packed(packed)
    packed = _with_network(packed)
    tensors = {n: pack(codes, packed.formats[n].wl) for n, codes in packed.codes.items()}
    tensors = safetensors.in_file_order(tensors | packed.others)
    fields = {
        "version": VERSION,
        "fixed_point": {name: _describe(packed, name) for name in packed.codes},
        "activations": {name: write_format(fmt) for name, fmt in packed.activations.items()},
        "network": None,
    }
    if packed.network is not None:
        own = Tensors(dict(packed.codes), dict(packed.formats), set(packed.others))
        fields["network"] = write_network(packed.network, own)
    fields["sha256"] = _digest(tensors, fields)
    return safetensors.write(tensors, {_KEY: json.dumps(fields)})


def from_bytes(content: bytes) -> Packed:
    """Read the content of a file.

    Args:
        content: From ``to_bytes``, or of a file of ``save``.

    Raises:
        ExportError: It is damaged, or not of this package.
    """
    tensors, metadata = safetensors.read(content)
    fields = _fields(metadata)
    if _digest(tensors, fields) != fields["sha256"]:
        raise ExportError("the content does not have its own SHA-256: the file is damaged")
    codes, formats, dtypes = {}, {}, {}
    for name, entry in fields["fixed_point"].items():
        formats[name], shape, dtypes[name] = _described(name, entry, fields["version"])
        codes[name] = _unpacked(name, tensors.pop(name, None), formats[name], shape)
    activations = {name: read_format(name, v) for name, v in fields["activations"].items()}
    table = fields.get("network")
    network = None if table is None else read_network(table, Tensors(codes, formats))
    return Packed(codes, formats, dtypes, tensors, activations, network)


def _describe(packed: Packed, name: str) -> dict[str, Any]:
    fmt, dtype = packed.formats[name], packed.dtypes[name]
    word = fmt.fmt if isinstance(fmt, ChannelFormat) else fmt
    table = dict(zip(("wl", "fl", "symmetric", "signed"), write_format(word), strict=True))
    table |= {"shape": list(packed.codes[name].shape)}
    table |= {"dtype": None if dtype is None else str(dtype).removeprefix("torch.")}
    return table | ({_SHIFTS: list(fmt.shifts)} if isinstance(fmt, ChannelFormat) else {})


def _fields(metadata: Mapping[str, str]) -> dict[str, Any]:
    if _KEY not in metadata:
        raise ExportError(f"the metadata must have {_KEY!r}, got {sorted(metadata)!r:.80}")
    fields = safetensors.parse("metadata", metadata[_KEY])
    version = fields.get("version") if isinstance(fields, dict) else fields
    if not isinstance(fields, dict) or type(version) is not int or version not in _ADDED:
        raise ExportError(
            f"the version must be {' or '.join(map(str, _ADDED))}, got {version!r:.80}"
        )
    wanted = _FIELDS | _ADDED[version]
    if set(fields) != wanted:
        raise ExportError(f"the metadata must have {sorted(wanted)}, got {sorted(fields)!r:.80}")
    for name in ("fixed_point", "activations"):
        if not isinstance(fields[name], dict):
            raise ExportError(f"{name} must be a table, got {fields[name]!r:.80}")
    return fields


def _described(
    name: str, entry: object, version: int
) -> tuple[FixedPoint | ChannelFormat, tuple[int, ...], torch.dtype | None]:
    is_new = version > 2  # with the tables of networks came tensors of no model, and channels
    fields = _FORMAT_FIELDS | (
        {_SHIFTS} & set(entry) if is_new and isinstance(entry, dict) else set()
    )
    if not isinstance(entry, dict) or set(entry) != fields:
        raise ExportError(f"{name} must have {sorted(_FORMAT_FIELDS)}, got {entry!r:.80}")
    shape, dtype = entry["shape"], entry["dtype"]
    if not safetensors.are_sizes(shape):
        raise ExportError(f"{name} must have a shape of whole sizes, got {shape!r:.80}")
    if not (dtype is None and is_new) and (not isinstance(dtype, str) or dtype not in _FLOATS):
        raise ExportError(f"{name} must be one of {sorted(_FLOATS)}, got {dtype!r:.80}")
    fmt = read_format(name, [entry[field] for field in ("wl", "fl", "symmetric", "signed")])
    if _SHIFTS in entry:
        fmt = _channels(name, fmt, entry[_SHIFTS], shape)
    return fmt, tuple(shape), None if dtype is None else _FLOATS[dtype]


def _channels(name: str, fmt: FixedPoint, shifts: object, shape: list[int]) -> ChannelFormat:
    """Return the format of a weight whose channels have an ``fl`` each."""
    if not isinstance(shifts, list) or not shifts or shape[:1] != [len(shifts)] or not fmt.signed:
        raise ExportError(f"{name} must have a shift for each channel, got {shifts!r:.80}")
    if not all(type(shift) is int and 0 <= shift <= LONGEST_FL - fmt.fl for shift in shifts):
        raise ExportError(
            f"{name} must have shifts of 0 to {LONGEST_FL - fmt.fl}, got {shifts!r:.80}"
        )
    return ChannelFormat(fmt, tuple(shifts))


def _unpacked(
    name: str, x: Tensor | None, found: FixedPoint | ChannelFormat, shape: tuple[int, ...]
) -> Tensor:
    fmt = found.fmt if isinstance(found, ChannelFormat) else found
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
