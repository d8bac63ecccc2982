"""A network as JSON: one table an operation, whose tensors lie beside it by name.

Every field of a record of ``graph.nodes``, ``views`` and ``functions`` is written by its type, so a new record needs no line here.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat
from marvin.export.errors import ExportError
from marvin.export.graph import functions, nodes, transformers, views
from marvin.export.graph.bounds import FLOAT64_BITS, first_value, value_of
from marvin.export.graph.functions import Mul
from marvin.export.graph.nodes import (
    Add,
    Affine,
    Input,
    Linear,
    Network,
    Operation,
    Round,
    Value,
    Weighted,
)
from marvin.export.graph.transformers import Constant, Embedding
from marvin.export.graph.views import Concat, Slice

__all__ = ["Tensors", "read_format", "read_network", "write_format", "write_network"]

Json = object
_MOST_CODES = 2**26  # of one value: what a reader must be able to hold
_LARGEST = 2**31
_FROM_0 = (
    "padding",
    "before",
    "behind",
    "axis",
    "fl",
    "start",
    "order",
    "shift",
    "precision",
)  # other numbers are sizes, from 1
_SIGNED = "low", "high", "source_fl", "epsilon"
_KINDS: dict[str, type[Operation]] = {
    kind.__name__: kind
    for module in (nodes, views, functions, transformers)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Operation) and not kind.__subclasses__()
}


@dataclass(frozen=True)
class Tensors:
    """Integer codes by name.

    Args:
        codes: Of any shape, integers.
        formats: Of each of ``codes``; with an ``fl`` for each channel, codes are at their own.
        taken: Names that others have.
    """

    codes: dict[str, Tensor] = field(default_factory=dict)
    formats: dict[str, FixedPoint | ChannelFormat] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def add(self, name: str, codes: Tensor, fmt: FixedPoint | ChannelFormat) -> str:
        """Keep a tensor, once; return the name it has, which is another if that is taken.

        Weights that are another's, as those of a layer that is called twice, have that one's name.
        """
        if codes.ndim >= 2 and (same := self._same(codes, fmt)):
            return same
        while name in self.codes or name in self.taken:
            is_same = name in self.codes and self.formats[name] == fmt
            if is_same and torch.equal(self.codes[name].long(), codes.long()):
                return name
            name = f"network.{name}"
        self.codes[name], self.formats[name] = codes, fmt
        return name

    def _same(self, codes: Tensor, fmt: FixedPoint | ChannelFormat) -> str | None:
        """Return the name of a tensor of the same codes in the same format."""
        alike = (
            name
            for name, own in self.codes.items()
            if own.shape == codes.shape and self.formats[name] == fmt
        )
        return next((n for n in alike if torch.equal(self.codes[n].long(), codes.long())), None)


def write_format(fmt: FixedPoint) -> list[int | bool]:
    """Return a format as JSON has it."""
    return [fmt.wl, fmt.fl, fmt.symmetric, fmt.signed]


def read_format(name: str, values: Json) -> FixedPoint:
    """Return the format that ``write_format`` wrote.

    Raises:
        ExportError: ``values`` are not a format.
    """
    wl, fl, symmetric, signed = values if isinstance(values, list) and len(values) == 4 else [0] * 4
    are_numbers = isinstance(wl, int) and isinstance(fl, int) and {type(wl), type(fl)} == {int}
    if not (are_numbers and isinstance(symmetric, bool) and isinstance(signed, bool)):
        raise ExportError(
            f"{name} must have a format: two whole numbers, two truths, got {values!r:.80}"
        )
    try:
        return FixedPoint(wl, fl, symmetric, signed)
    except (TypeError, ValueError) as error:
        raise ExportError(f"{name} must have a format: {error}") from error


def write_network(network: Network, tensors: Tensors) -> dict[str, Json]:
    """Return a network as JSON.

    Args:
        network: From ``describe``.
        tensors: Its numbers are added to these; what is there already is not stored again.

    Raises:
        ExportError: A number has a code that its format lacks.
    """
    operations = []
    for op in network.operations:
        table: dict[str, Json] = {"kind": type(op).__name__, "name": op.name}
        table |= {"inputs": list(op.inputs)} | _write_fields(op, tensors)
        if op.name in network.values:
            value = network.values[op.name]
            bits = max(value.bits, value.magnitude.bit_length() + 1)
            table |= {"shape": list(value.shape), "fl": value.fl, "bits": bits}
        operations.append(table)
    heads = {"heads": [list(head) for head in network.heads]} if network.heads else {}
    return {"origin": network.origin, "operations": operations, **heads}


def _write_fields(op: Operation, tensors: Tensors) -> dict[str, Json]:
    """Return all fields but names; a tensor is its name, its format stands beside its codes."""
    hints, found = typing.get_type_hints(type(op)), {}
    for name in _own_fields(type(op)):
        value = getattr(op, name)
        if isinstance(value, Tensor):
            found[name] = tensors.add(f"{op.name}.{name}", *_short(op, name, value))
        elif isinstance(value, FixedPoint):
            found[name] = write_format(value)
        else:
            found[name] = list(value) if isinstance(value, tuple) else value
        assert hints[name] in _READERS or hints[name] in (Tensor, Tensor | None), name
    return found


def _own_fields(kind: type[Operation]) -> list[str]:
    """Return the fields that JSON has: not names, nor formats that stand beside codes."""
    names = [f.name for f in dataclasses.fields(kind)]
    beside = {f"{name}_fmt" for name in names} | {"name", "inputs", "per_channel"}
    return [name for name in names if name not in beside]


def _short(op: Operation, name: str, codes: Tensor) -> tuple[Tensor, FixedPoint | ChannelFormat]:
    """Return codes and format of a field, codes of channels at the ``fl`` of their own."""
    if name == "weight" and isinstance(op, Weighted) and op.per_channel is not None:
        return codes >> _zeros(op.per_channel, codes), op.per_channel
    fmt = getattr(op, f"{name}_fmt", None)
    low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
    if fmt is None:
        fmt = FixedPoint(max(2, high.bit_length() + 1, (~min(low, 0)).bit_length() + 1), 0)
    if not fmt.min_code <= low <= high <= fmt.max_code:
        raise ExportError(f"{op.name}: {name} must have codes of {fmt}, got {low} to {high}")
    return codes, fmt


def _zeros(fmt: ChannelFormat, codes: Tensor) -> Tensor:
    """Return by how many bits the codes of each channel are longer in the format of all."""
    most = max(fmt.shifts)
    return torch.tensor([most - s for s in fmt.shifts]).view(-1, *[1] * (codes.ndim - 1))


def read_network(table: Json, tensors: Tensors) -> Network:
    """Return the network that ``write_network`` wrote.

    Args:
        table: The JSON; nothing in it is taken on trust.
        tensors: Of the file.

    Raises:
        ExportError: It is no network; says what is wrong.
    """
    if not isinstance(table, dict) or set(table) - {"heads"} != {"origin", "operations"}:
        raise ExportError(f"network must have origin and operations, got {table!r:.80}")
    origin, entries = table["origin"], table["operations"]
    if origin not in ("trained", "calibrated") or not isinstance(entries, list):
        raise ExportError(f"network must be trained or calibrated, got {origin!r:.80}")
    operations: list[Operation] = []
    values: dict[str, Value] = {}
    for entry in entries:
        op = _operation(entry, tensors)
        if operations:
            value = _value(op, operations[0], values)
            _check_value(op.name, value, entry)
            values[op.name] = value
        if isinstance(op, Input) == bool(operations):
            raise ExportError("an input must be the first operation, and the only input")
        operations.append(op)
    if not values:
        raise ExportError("a network must have operations, got none")
    return Network(tuple(operations), values, origin, _heads(table.get("heads", []), values))


def _heads(pairs: Json, values: Mapping[str, Value]) -> tuple[tuple[str, str], ...]:
    """Return label and value of each of several outputs."""
    if not isinstance(pairs, list):
        raise ExportError(f"heads must be pairs of label and value, got {pairs!r:.80}")
    found = {}
    for pair in pairs:
        label, name = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if not isinstance(label, str) or not isinstance(name, str) or name not in values:
            raise ExportError(f"heads must be pairs of label and value, got {pair!r:.80}")
        found[label] = name
    if len(found) < len(pairs):
        raise ExportError("labels of heads must be unique")
    return tuple(found.items())


def _operation(entry: Json, tensors: Tensors) -> Operation:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ExportError(f"an operation must be a table with a name, got {entry!r:.80}")
    name, kind = entry["name"], _KINDS.get(str(entry.get("kind")))
    if kind is None:
        raise ExportError(f"{name} must be one of {sorted(_KINDS)}, got {entry.get('kind')!r:.80}")
    own = _own_fields(kind)
    wanted = {"kind", "name", "inputs", *own}
    wanted |= set() if kind is Input else {"shape", "fl", "bits"}
    if set(entry) != wanted:
        raise ExportError(f"{name} must have {sorted(wanted)}, got {sorted(entry)!r:.80}")
    inputs = entry["inputs"]
    if not isinstance(inputs, list) or not all(isinstance(i, str) for i in inputs):
        raise ExportError(f"{name} must have names of inputs, got {inputs!r:.80}")
    hints, found = typing.get_type_hints(kind), {}
    for field_name in own:
        where, value = f"{name}.{field_name}", entry[field_name]
        if hints[field_name] in (Tensor, Tensor | None):
            is_optional = hints[field_name] == Tensor | None
            found |= _tensor(kind, field_name, where, value, tensors, is_optional)
        else:
            found[field_name] = _READERS[hints[field_name]](where, value)
    return kind(name=name, inputs=tuple(inputs), **found)


def _tensor(
    kind: type[Operation], name: str, where: str, value: Json, tensors: Tensors, is_optional: bool
) -> dict[str, object]:
    """Return a tensor, and the fields that say what its format is."""
    fields = {f.name for f in dataclasses.fields(kind)}
    if value is None and is_optional:
        found = {f"{name}_fmt": FixedPoint(32, 0)} if f"{name}_fmt" in fields else {}
        return {name: None, **found}
    if not isinstance(value, str) or value not in tensors.codes:
        raise ExportError(f"{where} must be the name of a tensor with a format, got {value!r:.80}")
    codes, fmt = tensors.codes[value].long(), tensors.formats[value]
    if codes.ndim != 1 and name not in ("weight", "mask") and kind is not Constant:
        raise ExportError(f"{where} must have one dimension, got shape {tuple(codes.shape)}")
    found: dict[str, object] = {}
    if isinstance(fmt, ChannelFormat):
        if "per_channel" not in fields or name != "weight":
            raise ExportError(f"{where} must have one format, got one for each channel")
        try:
            found = {"per_channel": fmt, f"{name}_fmt": fmt.whole()}
        except ValueError as error:
            raise ExportError(f"{where}: {error}") from error
        codes = codes << _zeros(fmt, codes)
    elif f"{name}_fmt" in fields:
        found[f"{name}_fmt"] = fmt
    return found | {name: codes}


def _value(op: Operation, source: Operation, values: Mapping[str, Value]) -> Value:
    """Return what an operation's codes can be."""
    assert isinstance(source, Input)
    if op.name in values or op.name == source.name:
        raise ExportError(f"names of operations must be unique, got {op.name} twice")
    if op.inputs == (source.name,) and isinstance(op, Round | Embedding):
        return _checked(op, lambda: first_value(op, source.shape))
    if unknown := [name for name in op.inputs if name not in values]:
        raise ExportError(f"{op.name} must take values of before, got {', '.join(unknown)!r:.80}")
    inputs = [values[name] for name in op.inputs]
    _check_dimensions(op, [len(x.shape) for x in inputs])
    value = _checked(op, lambda: value_of(op, inputs))
    if isinstance(op, Add) and inputs[0].shape != inputs[1].shape:
        raise ExportError(f"{op.name} must add values of one shape")
    if isinstance(op, Mul) and len(inputs[0].shape) != len(inputs[1].shape):
        raise ExportError(f"{op.name} must multiply values of as many dimensions")
    if isinstance(op, Affine) and len(op.scale) != inputs[0].channel_count:
        count = inputs[0].channel_count
        raise ExportError(f"{op.name} must have {count} scales, got {len(op.scale)}")
    return value


def _check_dimensions(op: Operation, inputs: Sequence[int]) -> None:
    """Refuse what torch takes and no description has, where ``inputs`` have so many dimensions each."""
    # one for each side of an image or a sequence
    for name in ("kernel", "stride", "padding", "dilation"):
        numbers = getattr(op, name, None)
        if numbers is not None and any(len(numbers) != dims - 1 for dims in inputs):
            raise ExportError(f"{op.name}.{name} must have a number for each side, got {numbers}")
    for dims in inputs:
        if isinstance(op, Concat | Slice) and op.axis >= dims:
            raise ExportError(f"{op.name}.axis must be below {dims}, got {op.axis}")
        if isinstance(op, Linear) and dims != 1:
            raise ExportError(f"{op.name} must take values of one dimension, got {dims}")
        if isinstance(op, Weighted) and op.weight.ndim != dims + 1:
            got = tuple(op.weight.shape)
            raise ExportError(f"{op.name}.weight must have {dims + 1} dimensions, got shape {got}")


def _checked(op: Operation, found: Callable[[], Value]) -> Value:
    try:
        return found()
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ExportError(f"{op.name} must be an operation on its inputs: {reason:.200}") from error


def _check_value(name: str, value: Value, entry: Mapping[str, Json]) -> None:
    if math.prod(value.shape) > _MOST_CODES or not all(value.shape):
        raise ExportError(f"{name} must have 1 to {_MOST_CODES:,} codes, got shape {value.shape}")
    for what, want in (("shape", list(value.shape)), ("fl", value.fl)):
        if entry[what] != want or isinstance(entry[what], bool):
            raise ExportError(f"{name} must have {what} {want}, got {entry[what]!r:.80}")
    bits, least = entry["bits"], max(value.bits, value.magnitude.bit_length() + 1)
    if type(bits) is not int or not least <= bits <= FLOAT64_BITS:
        raise ExportError(f"{name} must have {least} to {FLOAT64_BITS:,} bits, got {bits!r:.80}")


def _number(where: str, value: Json) -> int:
    what = where.rpartition(".")[2]
    least = -(2**62) if what in _SIGNED else 0 if what in _FROM_0 else 1
    most = -least if what in _SIGNED else _LARGEST
    if type(value) is not int or not least <= value < most:
        raise ExportError(f"{where} must be a whole number from {least}, got {value!r:.80}")
    return value


def _numbers(where: str, value: Json) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 16:
        raise ExportError(f"{where} must be up to 16 whole numbers, got {value!r:.80}")
    found = tuple(_number(where, v) for v in value)
    if math.prod(max(1, v) for v in found) > _LARGEST:
        raise ExportError(f"{where} must be smaller, got {value!r:.80}")
    return found


def _text(where: str, value: Json) -> str:
    if not isinstance(value, str) or len(value) > 99:
        raise ExportError(f"{where} must be a short text, got {value!r:.80}")
    return value


def _bool(where: str, value: Json) -> bool:
    if not isinstance(value, bool):
        raise ExportError(f"{where} must be true or false, got {value!r:.80}")
    return value


_READERS: dict[object, Callable[[str, Json], object]] = {
    int: _number,
    bool: _bool,
    str: _text,
    tuple[int, ...]: _numbers,
    FixedPoint: read_format,
}
