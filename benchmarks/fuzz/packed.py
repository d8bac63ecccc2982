"""Packed files: what is read is what was written, and nothing but ``ExportError`` escapes."""

import hashlib
import json
import struct
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Failure, Format
from marvin.export import ExportError, packed

_OTHERS = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
_EMPTY_SHAPES = [[2**47, 2**47, 0], [2**31, 2**31, 0, 4], [0, 2**46, 2**46], [0, 2**47], [0] * 17]
_ODD: list[Any] = [
    *(
        [2**47, 2**47, 0],
        [2**47] * 5000,
        [0] * 100_000,
        [1] * 17,
        [2**48],
        [-1],
        [True],
        [0, 2**47],
    ),
    *([0.0], [], {}, "", None, True, -1, 0, 1, 33, 2**31, 2**63, 2**64, 10**400, 1e308, "float32"),
    *(
        float("nan"),
        float("inf"),
        "F32",
        "U8",
        [0, 2**62],
        [8, 0],
        ["a"],
        [None],
        "\ud800",
        "x" * 999,
    ),
    *([2**31, 2**31, 0, 4], [0, 2**62, 4], [2**46] * 16, [3, 2**47, 0], {"wl": 8}),
]


def files(chance: Random) -> None:
    """A state to bytes, read by this file, and by the package."""
    state, formats, rounded = _state(chance)
    content = packed.to_bytes(packed.pack_state(state, formats, rounded))
    length = struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8 : 8 + length])
    fields = json.loads(header["__metadata__"]["marvin"])
    for name, fmt in formats.items():
        begin, end = header[name]["data_offsets"]
        data = content[8 + length + begin : 8 + length + end]
        entry = fields["fixed_point"][name]
        codes = oracle.unpack(data, entry["wl"], state[name].numel(), entry["signed"])
        want = np.array(codes, np.float64) * 2.0 ** -entry["fl"]
        got = draw.content(state[name]).astype(np.float64).ravel()
        oracle.same(got + 0.0, want, f"{name} of {fmt}")
    _check_same(packed.from_bytes(content), state, formats, rounded)
    damaged = bytearray(content)
    if chance.random() < 0.5:
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    else:
        del damaged[chance.randrange(len(damaged)) :]
    try:
        loaded = packed.from_bytes(bytes(damaged))
    except ExportError:
        return
    _check_same(loaded, state, formats, rounded)


def hostile(chance: Random) -> None:
    """A file of this file's own, its checksum right, with a field that no writer writes."""
    fields: dict[str, Any] = {
        "version": 2,
        "fixed_point": {
            "w": {
                "wl": 3,
                "fl": 2,
                "symmetric": False,
                "signed": True,
                "shape": [2, 4],
                "dtype": "float32",
            }
        },
        "activations": {"a": [8, 4, False, True]},
    }
    header: dict[str, Any] = {
        "w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "o": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    data = {"w": chance.randbytes(3), "o": chance.randbytes(8)}
    if chance.random() < 0.5:  # nothing in it, so that sizes of any product are possible
        fields["fixed_point"]["w"]["shape"], data["w"] = [0, 4], b""
        header["w"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        header["o"] = {"dtype": "F32", "shape": [0, 1], "data_offsets": [0, 0]}
        data["o"] = b""
    for _ in range(chance.randint(1, 2)):
        _spoil(chance, chance.choice((fields, header)))
    try:
        content = _file(header, fields, data)
    except (TypeError, ValueError, AttributeError, KeyError):
        return  # this writer cannot write it
    if chance.random() < 0.02:
        content = _deep(chance)
    try:
        packed.from_bytes(content)
    except ExportError:
        return


def _state(chance: Random) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    state: dict[str, Tensor] = {}
    formats, rounded = {}, {}
    for i in range(chance.randint(0, 3)):
        fmt = draw.format_of(chance, 24, signed=False)
        n, dtype = chance.randint(0, 40), chance.choices(list(draw.DTYPES), (4, 1, 1))[0]
        wide = {"float32": 24, "bfloat16": 8, "float16": 11}[dtype]
        if dtype != "float32":  # what the dtype holds
            fmt = Format(min(fmt.wl, wide), chance.randint(0, 8), fmt.symmetric, fmt.signed)
        codes = np.array([chance.randint(fmt.low, fmt.high) for _ in range(n)], np.float64)
        values = (codes * 2.0**-fmt.fl).astype(np.float32).reshape(draw.shape_of(chance, n))
        state[f"w{i}"], formats[f"w{i}"] = draw.tensor(values, dtype), draw.given(fmt)
    for i in range(chance.randint(0, 3)):
        shape = draw.shape_of(chance, chance.randint(0, 12)) if chance.random() < 0.8 else ()
        raw = np.frombuffer(chance.randbytes(8 * max(1, int(np.prod(shape)))), np.int64)
        kind = chance.choice(_OTHERS)
        with np.errstate(all="ignore"):
            other = raw[: int(np.prod(shape))].astype(kind).reshape(shape)
        state[f"o{i}"] = torch.from_numpy(np.array(other))
    if chance.random() < 0.5:
        rounded["a"] = draw.given(draw.format_of(chance, signed=False))
    return state, formats, rounded


def _check_same(
    loaded: packed.Packed,
    state: dict[str, Tensor],
    formats: dict[str, Any],
    rounded: dict[str, Any],
) -> None:
    if (loaded.formats, loaded.activations) != (formats, rounded):
        raise Failure(f"formats {loaded.formats} and {loaded.activations} were read")
    found = loaded.state_dict()
    if set(found) != set(state):
        raise Failure(f"{sorted(found)} were read, {sorted(state)} written")
    for name, x in state.items():
        if found[name].dtype is not x.dtype:
            raise Failure(f"{name} was read as {found[name].dtype}")
        oracle.same(draw.content(found[name]), draw.content(x), name)


def _spoil(chance: Random, table: dict[str, Any]) -> None:
    """Put something odd at a random place of a table of tables."""
    while True:
        name = "shape" if "shape" in table and chance.random() < 0.3 else chance.choice([*table])
        if isinstance(table[name], dict) and table[name] and chance.random() < 0.9:
            table = table[name]
            continue
        if chance.random() < 0.1:
            del table[name]
        else:
            is_shape = name == "shape" and chance.random() < 0.7
            table[name] = chance.choice(_EMPTY_SHAPES if is_shape else _ODD)
        return


def _file(header: dict[str, Any], fields: dict[str, Any], data: dict[str, bytes]) -> bytes:
    names = {"F32": "torch.float32", "U8": "torch.uint8", "F16": "torch.float16"}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name, entry in header.items():
        described = [name, names.get(entry["dtype"], "torch.int64"), list(entry["shape"])]
        digest.update(json.dumps(described).encode())
        digest.update(data[name])
    fields = {**fields, "sha256": digest.hexdigest()}
    whole = {"__metadata__": {"marvin": json.dumps(fields)}, **header}
    text = json.dumps(whole, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data[name] for name in header)


def _deep(chance: Random) -> bytes:
    opening = chance.choice(("[", '{"a":'))
    depth = chance.choice((900, 5000, 100_000))
    text = opening * depth
    if chance.random() < 0.5:
        text = json.dumps({"__metadata__": {"marvin": text}})
    return struct.pack("<Q", len(text)) + text.encode()
