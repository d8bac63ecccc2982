"""ONNX: opset 21, power-of-two scales, outputs equal to the integer reference.

Three spellings, of which the first that is exact is taken:

``"int8"``: formats up to 8 bits, in bytes, which ONNX Runtime computes with integer kernels: see
``marvin.export.int8``.

``"int16"``: formats up to 16 bits, in int16 containers; layers are computed in float32, without
error because no sum takes more than 24 bits.

``"float64"``: formats up to 32 bits whose sums take up to 53. ONNX Runtime has no convolution for
them, so windows are gathered and multiplied as matrices. Slow, and exact.
"""

from pathlib import Path
from typing import Any, Literal, get_args

from marvin.export.errors import ExportError
from marvin.export.graph.nodes import Network, Round, Weighted
from marvin.export.targets.onnx.float64 import Float64Writer
from marvin.export.targets.onnx.graph import FloatWriter, require_exact
from marvin.export.targets.onnx.int8 import Int8Writer
from marvin.export.targets.onnx.int16 import Int16Writer
from marvin.files import write_atomic

__all__ = ["Spelling", "in_floats", "obstacle", "original", "save", "spelling_of", "to_model"]

Spelling = Literal["int8", "int16", "float64"]


def save(
    network: Network,
    path: str | Path,
    spelling: Spelling | None = None,
    *,
    vnni: bool = False,
) -> int:
    """Write a network as an ONNX file, at once; return its bytes.

    Args:
        network: From ``describe``.
        path: Of the file; its folder is made if it is not there.
        spelling: As in ``to_model``.
        vnni: As in ``to_model``.

    Raises:
        ExportError: As ``to_model``.
    """
    content = to_model(network, spelling, vnni=vnni).SerializeToString()
    write_atomic(Path(path), content)
    return len(content)


def to_model(network: Network, spelling: Spelling | None = None, *, vnni: bool = False) -> Any:
    """Return a network as an ``onnx.ModelProto``.

    Args:
        network: From ``describe``.
        spelling: See above; default: ``spelling_of(network)``.
        vnni: In ``"int8"``, write every weight as int8: faster where weights have 8 bits, and
            wrong on x86 processors without VNNI.

    Returns:
        A model from float32 samples to what the trained model gives: float32, or float64 where
        ``spelling`` is ``"float64"``.

    Raises:
        ExportError: The spelling would not be exact; names the operation and its bits. Or the
            package ``onnx`` is not installed.
    """
    spelling = spelling or spelling_of(network)
    if spelling not in get_args(Spelling):
        raise ExportError(f"spelling must be one of {get_args(Spelling)}, got {spelling!r}")
    writer, output = _written(network, spelling, vnni)
    types = writer.graph.onnx.TensorProto
    dtype = types.DOUBLE if spelling == "float64" else types.FLOAT
    return writer.graph.model(network, output, dtype)


def spelling_of(network: Network) -> Spelling:
    """Return the fastest spelling that is exact.

    Raises:
        ExportError: None is: a sum takes more than 53 bits.
    """
    reasons = []
    for spelling in get_args(Spelling):
        try:
            _written(network, spelling)
        except ExportError as error:
            reasons.append(error)
        else:
            return spelling
    raise reasons[-1]


def original(network: Network) -> Any:
    """Return the network in float32, without any rounding: to measure the others beside it.

    As exporters of float32 models write it; ONNX Runtime folds its batch normalisation.

    Raises:
        ExportError: The package ``onnx`` is not installed.
    """
    writer = _Unrounded(network)
    return writer.graph.model(network, writer.write(), writer.graph.onnx.TensorProto.FLOAT)


class _Unrounded(FloatWriter):
    def rounded(self, op: Round) -> str:
        return self.float(op.inputs[0])

    def weight(self, op: Weighted) -> str:
        return self.number(f"{op.name}.weight", op.weight.numpy() * op.weight_fmt.lsb)


def obstacle(network: Network) -> str:
    """Return what keeps words of 8 bits from being integers in ONNX Runtime; ``""`` if nothing."""
    if all(fmt.wl <= 8 for fmt in network.words().values()):
        try:
            _written(network, "int8")
        except ExportError as error:
            return str(error)
    return ""


def in_floats(network: Network) -> dict[str, str]:
    """Return the layers that ONNX Runtime computes in floats, and why, in the fastest spelling.

    Raises:
        ExportError: As ``spelling_of``.
    """
    spelling = spelling_of(network)
    writer = _written(network, spelling)[0]
    if isinstance(writer, Int8Writer):
        return writer.in_floats
    longest = max(network.words().values(), key=lambda fmt: fmt.wl)
    why = obstacle(network) or f"words have up to {longest.wl} bits"
    return {op.name: why for op in network.operations if isinstance(op, Weighted)}


def _written(network: Network, spelling: Spelling, vnni: bool = False) -> tuple[FloatWriter, str]:
    """Return what has written a network, and the name of its output."""
    longest = {"int8": 8, "int16": 16, "float64": 32}[spelling]
    for name, fmt in network.words().items():
        if fmt.wl > longest:
            raise ExportError(f"{name}: {spelling} holds words of {longest} bits, got {fmt}")
    if spelling == "int8":
        writer = Int8Writer(network, vnni=vnni)
    else:
        bits = 53 if spelling == "float64" else 24
        require_exact(network, bits, f"{spelling} is exact up to")
        writer = Float64Writer(network) if spelling == "float64" else Int16Writer(network)
    return writer, writer.write()
