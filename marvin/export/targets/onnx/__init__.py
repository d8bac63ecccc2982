"""ONNX: opset 21, power-of-two scales, outputs equal to the integer reference.

Three container dtypes, of which the first that is exact is taken:

``"int8"``: formats up to 8 bits, in bytes, which ONNX Runtime computes with integer kernels: see
``int8.Int8Writer``. Layers of longer words are computed in floats, if others are not; sums that float32 does not hold are int32 and float64, for themselves alone; an
output of such sums is float64.

``"int16"``: formats up to 16 bits, in int16; layers are computed in float32, without
error because no sum takes more than 24 bits.

``"float64"``: formats up to 32 bits whose sums take up to 53. ONNX Runtime has no convolution for
them, so windows are gathered and multiplied as matrices. Slow, and exact.

``"qdq"`` is taken where it is asked for: formats up to 16 bits, float32 operators between ``QuantizeLinear`` and
``DequantizeLinear``, for runtimes that choose kernels from these. Exact where they compute in float32, and no sum
takes more than 24 bits: see ``qdq_is_exact``.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from marvin.export.errors import ExportError
from marvin.export.graph.nodes import FLOAT32_BITS, Network, Round, Weighted, check_network
from marvin.export.graph.transformers import Norm, Softmax
from marvin.export.targets.onnx.float64 import Float64Writer
from marvin.export.targets.onnx.graph import FloatWriter, require_exact
from marvin.export.targets.onnx.int8 import Int8Writer
from marvin.export.targets.onnx.int16 import Int16Writer
from marvin.export.targets.onnx.qdq import QdqWriter
from marvin.files import write_atomic

if TYPE_CHECKING:  # an extra
    import onnx

__all__ = [
    "Container",
    "container_of",
    "in_floats",
    "original",
    "qdq_is_exact",
    "save",
    "to_model",
    "unfused",
]

Container = Literal["int8", "int16", "float64", "qdq"]
"""In what a file computes: codes of 8 or 16 bits, float64, or float32 between nodes that quantise; see ``container_of``."""
_EXACT: tuple[Container, ...] = ("int8", "int16", "float64")
_RENAMED = {"Spelling": "Container", "spelling_of": "container_of"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        message = f"marvin.export.onnx.{name} is now marvin.export.onnx.{_RENAMED[name]}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def save(
    network: Network,
    path: str | Path,
    container: Container | None = None,
    *,
    vnni: bool = False,
    int4: bool = False,
    spelling: Container | None = None,
) -> int:
    """Write a network as an ONNX file, at once; return its bytes.

    Args:
        network: From ``describe``.
        path: Of the file; its folder is made if it is not there.
        container: As in ``to_model``.
        vnni: As in ``to_model``.
        int4: As in ``to_model``.
        spelling: Earlier name of ``container``.

    Raises:
        ExportError: As ``to_model``.
        TypeError: As ``to_model``.
    """
    container = _container(container, spelling)
    content = to_model(network, container, vnni=vnni, int4=int4).SerializeToString()
    write_atomic(Path(path), content)
    return len(content)


def to_model(
    network: Network,
    container: Container | None = None,
    *,
    vnni: bool = False,
    int4: bool = False,
    spelling: Container | None = None,
) -> "onnx.ModelProto":
    """Return a network as an ``onnx.ModelProto``.

    Args:
        network: From ``describe``.
        container: Dtype that holds the codes, see above; default: ``container_of(network)``.
        vnni: In ``"int8"``, write every weight as int8: faster where weights have 8 bits, and
            wrong on x86 processors without VNNI.
        int4: In ``"int8"``, store weights of up to 4 bits in 4 bits each. ONNX Runtime reads such files
            from version 1.20 on, and makes bytes of them when it loads them: the same kernels, the same
            outputs.
        spelling: Earlier name of ``container``.

    Returns:
        A model from float32 samples to what the trained model gives: float32, or float64 where
        ``container`` is ``"float64"``.

    Raises:
        ExportError: The outputs would not be exact; names the operation and its bits. Or the
            package ``onnx`` is not installed.
        TypeError: ``network`` is not a ``Network``, or ``container`` comes under its earlier name too.
    """
    check_network(network)
    container = _container(container, spelling) or container_of(network)
    if container not in get_args(Container):
        raise ExportError(f"container must be one of {get_args(Container)}, got {container!r}")
    if container != "int8" and (vnni or int4):
        raise ExportError(
            f"vnni and int4 are of integer kernels, {container} has none: give one of them"
        )
    writer, outputs = _written(network, container, vnni, int4)
    return writer.graph.model(network, outputs)


def qdq_is_exact(network: Network) -> bool:
    """Say whether a QDQ file computes the integers, in a runtime that computes it in float32."""
    try:
        require_exact(network, FLOAT32_BITS, "")
    except ExportError:
        return False
    return True


def container_of(network: Network) -> Container:
    """Return the fastest container dtype that is exact.

    Raises:
        ExportError: None is: a sum takes more than 53 bits.
        TypeError: ``network`` is not a ``Network``.
    """
    reasons = []
    for container in _EXACT:
        try:
            _written(network, container)
        except ExportError as error:
            reasons.append(error)
        else:
            return container
    raise reasons[-1]


def original(network: Network) -> "onnx.ModelProto":
    """Return the network in float32, without any rounding: to measure the others beside it.

    As exporters of float32 models write it; ONNX Runtime folds its batch normalisation.

    Raises:
        ExportError: The package ``onnx`` is not installed; or the network has norms of rows or softmax, whose
            float32 form is not in the description.
    """
    writer = _Unrounded(network)
    return writer.graph.model(network, writer.write())


class _Unrounded(FloatWriter):
    def rounded(self, op: Round) -> str:
        return self.float(op.inputs[0])

    def weight(self, op: Weighted) -> str:
        return self.number(f"{op.name}.weight", op.weight.numpy() * op.weight_fmt.lsb)

    def row_codes(self, op: Norm | Softmax) -> str:
        raise ExportError(
            f"{op.name}: {type(op).__name__} is in integers alone: take torch.onnx.export of the model itself"
        )


def in_floats(network: Network) -> dict[str, str]:
    """Return the layers that ONNX Runtime computes in floats, and why; see ``container_of``.

    Raises:
        ExportError: As ``container_of``.
        TypeError: ``network`` is not a ``Network``.
    """
    container = container_of(network)
    writer = _written(network, container)[0]
    if isinstance(writer, Int8Writer):
        return writer.in_floats
    longest = max(network.words().values(), key=lambda fmt: fmt.wl)
    why = f"word lengths are up to {longest.wl} bits"
    return {op.name: why for op in network.operations if isinstance(op, Weighted)}


def unfused(network: Network) -> list[str]:
    """Return the layers that ONNX Runtime sums with integers and does not round at once.

    What takes their sums takes them as they are; their kernels are slower than those that round. To
    round what is added and averaged, as ``round_sums`` does, makes them fast.

    Raises:
        ExportError: As ``container_of``.
        TypeError: ``network`` is not a ``Network``.
    """
    writer = _written(network, container_of(network))[0]
    return sorted(writer.unfused) if isinstance(writer, Int8Writer) else []


def _container(container: Container | None, spelling: Container | None) -> Container | None:
    """Return the one of two arguments that is given: the second is its earlier name."""
    if spelling is None:
        return container
    if container is not None:
        raise TypeError(f"give container alone, got container={container!r} and {spelling=}")
    warnings.warn("spelling= is now container=", DeprecationWarning, stacklevel=3)
    return spelling


def _written(
    network: Network, container: Container, vnni: bool = False, int4: bool = False
) -> tuple[FloatWriter, dict[str, tuple[str, int]]]:
    """Return what has written a network, and name and dtype of its outputs."""
    check_network(network)
    longest = {"int8": 8, "int16": 16, "float64": 32, "qdq": 16}[container]
    too_long = ""
    for name, fmt in network.words().items():
        if fmt.wl > longest:
            too_long = f"{name}: {container} holds word lengths of up to {longest} bits, got {fmt}"
            break
    if too_long and container != "int8":
        raise ExportError(too_long)
    if container == "int8":
        require_exact(network, 53, "int8 is exact up to")
        writer = Int8Writer(network, vnni=vnni, int4=int4)
        outputs = writer.write()
        layers = {op.name for op in network.operations if isinstance(op, Weighted)}
        if too_long and layers <= writer.in_floats.keys():
            raise ExportError(too_long)
        return writer, outputs
    if container == "qdq":
        writer = QdqWriter(network)
    else:
        bits = 53 if container == "float64" else FLOAT32_BITS
        require_exact(network, bits, f"{container} is exact up to")
        writer = Float64Writer(network) if container == "float64" else Int16Writer(network)
    return writer, writer.write()
