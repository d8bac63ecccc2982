"""An ONNX graph in the making, and the operations that all container dtypes have in common.

Built node by node: exporters of torch drop the bounds of short formats.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError, require
from marvin.export.execute.arithmetic import Codes, trailing_zeros
from marvin.export.graph.functions import Clip, Mul, Table
from marvin.export.graph.nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Input,
    Linear,
    MaxPool,
    Network,
    Operation,
    Relu,
    Round,
    Weighted,
)
from marvin.export.graph.transformers import Constant, Embedding, MatMul, Norm, Softmax
from marvin.export.graph.views import Concat, Pad, Reshape, Slice, Transpose
from marvin.export.passes.fold import absorbed
from marvin.export.targets.onnx.transformers import Integers

if TYPE_CHECKING:  # an extra
    import onnx

__all__ = ["FloatWriter", "Graph", "container", "require_exact", "window"]

_FLOAT32_BITS = 24

OPSET, IR_VERSION = 21, 10  # ONNX Runtime reads no IR above 13, onnx 1.23 writes 14


class Graph:
    """Nodes and constants of an ONNX model.

    Args:
        source: Name of what comes in.
        labels: Names that outputs have; no other value gets one of these.

    Raises:
        ExportError: The package ``onnx`` is not installed.
    """

    def __init__(self, source: str, labels: Iterable[str] = ()) -> None:
        self.onnx = require("onnx", "onnx")
        self.nodes: list[onnx.NodeProto] = []
        self._names = {source: 1}  # how often each was asked for
        self._labels = {label: self._new(label) for label in sorted(labels, key=[source].count)}
        self._constants: dict[str, onnx.TensorProto] = {}
        self.in_4_bits = False
        """Store weights of up to 4 bits in 4 bits each."""
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def constant(self, hint: str, array: Codes) -> str:
        """Return the name of a constant; equal ones are stored once."""
        array = np.ascontiguousarray(array) if array.ndim else array
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._known:
            name = self._known[key] = self._new(hint)
            self._constants[name] = self.onnx.numpy_helper.from_array(array, name)
        return self._known[key]

    def weights(self, hint: str, codes: Codes) -> str:
        """Return the name of weights as bytes, stored once, in 4 bits each where ``in_4_bits`` and they fit.

        Runtimes make bytes of them once, when they load the file.
        """
        rows = np.bitwise_or.reduce(codes.reshape(len(codes), -1), axis=1)
        zeros = np.array([trailing_zeros(int(row), 7) for row in rows])
        if (zeros[rows != 0] == zeros.min()).all():
            zeros = zeros[:1] * 0 + zeros.min()
        zeros = zeros.reshape(-1, *[1] * (codes.ndim - 1))  # of each channel, or of all
        short = codes.astype(np.int64) >> zeros
        if not self.in_4_bits or codes.dtype != np.int8 or short.min() < -8 or short.max() > 7:
            return self.constant(hint, codes)
        key = "int4", codes.shape, codes.tobytes()
        if key not in self._known:
            self._known[key] = self._short(hint, short, zeros)
        return self._known[key]

    def _short(self, hint: str, short: Codes, zeros: Codes) -> str:
        """Store weights in 4 bits each, without the zeros at their ends; return the name of the bytes."""
        types, name = self.onnx.TensorProto, self._new(f"{hint}.short")
        flat = np.pad(short.reshape(-1), (0, short.size % 2)) & 15
        packed = (flat[::2] | flat[1::2] << 4).astype(np.uint8).tobytes()
        stored = self.onnx.helper.make_tensor(name, types.INT4, short.shape, packed, raw=True)
        self._constants[name] = stored
        if zeros.any():
            whole = self.node("Cast", [name], f"{hint}.whole", to=types.INT32)
            step = self.constant("step", (2**zeros).astype(np.int32))
            name = self.node("Mul", [whole, step], f"{hint}.shifted")
        return self.node("Cast", [name], hint, to=types.INT8)

    def node(self, kind: str, inputs: list[str], hint: str, **attributes: object) -> str:
        """Add a node with one output; return the output's name."""
        output = self._new(hint)
        self._add(kind, inputs, output, **attributes)
        return output

    def _add(self, kind: str, inputs: list[str], output: str, **attributes: object) -> None:
        node = self.onnx.helper.make_node(kind, inputs, [output], name=output, **attributes)
        self.nodes.append(node)

    def _new(self, hint: str) -> str:
        """Return a name that nothing has, ``hint`` if possible."""
        count = self._names[hint] = self._names.get(hint, 0) + 1
        return hint if count == 1 else self._new(f"{hint}#{count}")

    def model(
        self,
        network: Network,
        outputs: Mapping[str, tuple[str, int]],
        domains: dict[str, int] | None = None,
        batch: int | str = "batch",
    ) -> "onnx.ModelProto":
        """Return the checked model; samples come in as float32.

        What no output needs is left out.

        Args:
            network: What was written.
            outputs: Name and dtype of each of ``network.outputs``, by its label. What has a label
                is called by it, with ``#2`` behind it where the input has that name; one without has
                the name that it has in the graph.
            domains: Versions of other sets of operators.
            batch: Size of the batch, or the name of it.
        """
        helper, types = self.onnx.helper, self.onnx.TensorProto
        dtype = types.INT64 if network.takes_indices else types.FLOAT
        source = helper.make_tensor_value_info(
            network.input.name, dtype, [batch, *network.input.shape]
        )
        results = []
        for label, (name, dtype) in outputs.items():
            shape = [batch, *network.values[network.outputs[label]].shape]
            if own := self._labels.get(label):
                self._add("Identity", [name], own)
                name = own
            results.append(helper.make_tensor_value_info(name, dtype, shape))
        nodes, used = [], {result.name for result in results}
        for node in reversed(self.nodes):
            if node.output[0] in used:
                nodes.append(node)
                used.update(node.input)
        constants = [c for name, c in self._constants.items() if name in used]
        graph = helper.make_graph(nodes[::-1], "marvin", [source], results, constants)
        opsets = [helper.make_opsetid("", OPSET)]
        opsets += [helper.make_opsetid(name, version) for name, version in (domains or {}).items()]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="marvin-fixedpoint")
        model.ir_version = IR_VERSION
        self.onnx.checker.check_model(model, full_check=not domains)
        return model


class FloatWriter:
    """Writes a network whose values are floats: codes times their step.

    Subclasses say how a value is rounded, and how weights are stored.
    """

    real: Any = np.float32

    def __init__(self, network: Network) -> None:
        self.network = network
        self.graph = Graph(network.input.name, dict(network.heads))
        self.names = {network.input.name: network.input.name}  # floats, by value

    def write(self) -> dict[str, tuple[str, int]]:
        """Add all operations; return name and dtype of each output, by its label."""
        for op in self.network.operations:
            if not isinstance(op, Input):
                self.add(op)
        dtype = self.graph.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self.real))
        return {label: (self.float(n), dtype) for label, n in self.network.outputs.items()}

    def add(self, op: Operation) -> None:
        """Add one operation."""
        name = _WRITE[type(op)](self, op)
        if name:
            self.names[op.name] = name

    def float(self, name: str) -> str:
        """Return the name of a value as floats."""
        return self.names[name]

    def number(self, hint: str, values: object) -> str:
        """Return the name of a constant of real numbers."""
        return self.graph.constant(hint, np.asarray(values, dtype=self.real))

    def rounded(self, op: Round) -> str:
        """Add a rounding; return the name of the result as floats, ``""`` where there is none."""
        raise NotImplementedError

    def weight(self, op: Weighted) -> str:
        """Return the name of the weights as floats."""
        raise NotImplementedError

    def bias(self, op: Weighted) -> list[str]:
        """Return the name of the bias as floats, nothing where there is none."""
        if op.bias is None:
            return []
        values = op.bias.numpy().astype(np.float64) * op.bias_fmt.lsb
        return [self.number(f"{op.name}.bias", values)]

    def conv(self, op: Conv) -> str:
        """Add a convolution."""
        return self.multiplied(op, self._inputs(op), op.name)

    def linear(self, op: Linear) -> str:
        """Add a linear layer."""
        return self.multiplied(op, self._inputs(op), op.name)

    def _inputs(self, op: Weighted) -> list[str]:
        return [self.float(op.inputs[0]), self.weight(op), *self.bias(op)]

    def multiplied(self, op: Weighted, inputs: list[str], name: str) -> str:
        """Add sums of products.

        Args:
            op: Whose.
            inputs: Names of what comes in, of the weights and of the bias, if there is one.
            name: Of the result.
        """
        if not isinstance(op, Conv):
            return self.graph.node("Gemm", inputs, name, transB=1)
        attributes = {"strides": op.stride, "dilations": op.dilation, "group": op.groups}
        pads, kernel = [*op.padding, *op.padding], list(op.weight.shape[2:])
        return self.graph.node("Conv", inputs, name, pads=pads, kernel_shape=kernel, **attributes)

    def affine(self, op: Affine) -> str:
        """Add a batch normalisation in fixed point, as ``(x + b) * scale + c``."""
        dims = len(self.network.values[op.name].shape)
        value = self.float(op.inputs[0])
        kinds = ("Add", "shift"), ("Mul", "scale"), ("Add", "offset")
        for (kind, what), x in zip(kinds, op.numbers, strict=True):
            if kind == "Mul" or x.any():
                constant = self.number(f"{op.name}.{what}", x.reshape(-1, *[1] * (dims - 1)))
                value = self.graph.node(kind, [value, constant], f"{op.name}.{what}ed")
        return value

    def max_pool(self, op: MaxPool) -> str:
        """Add max pooling."""
        return self.graph.node("MaxPool", [self.float(op.inputs[0])], op.name, **window(op))

    def average_pool(self, op: AveragePool) -> str:
        """Add average pooling, rounded once."""
        count = math.prod(op.kernel)
        source = self.float(op.inputs[0])
        if count & (count - 1) == 0:
            mean = self.graph.node(
                "AveragePool", [source], f"{op.name}.mean", count_include_pad=1, **window(op)
            )
        else:  # the runtime's kernel multiplies by a rounded 1 / count
            mean = self._mean(op, source, count)
        return self.rounded_mean(op, mean)

    def rounded_mean(self, op: AveragePool, mean: str) -> str:
        """Round what average pooling gives."""
        self.names[mean] = mean
        return self.rounded(Round(op.name, (mean,), op.fmt))

    def _mean(self, op: AveragePool, source: str, count: int) -> str:
        channels = self.network.values[op.name].shape[0]
        ones = self.number(f"{op.name}.ones", np.ones((channels, 1, *op.kernel)))
        total = self.graph.node(
            "Conv", [source, ones], f"{op.name}.sum",
            group=channels, dilations=[1] * len(op.kernel), **window(op),
        )  # fmt: skip
        return self.graph.node(
            "Div", [total, self.number(f"{op.name}.count", count)], f"{op.name}.mean"
        )

    def relu(self, op: Relu) -> str:
        """Add a ReLU."""
        return self.graph.node("Relu", [self.float(op.inputs[0])], op.name)

    def flatten(self, op: Flatten) -> str:
        """Add a flattening."""
        return self.graph.node("Flatten", [self.float(op.inputs[0])], op.name)

    def moved(self, op: Operation, source: str, name: str) -> str:
        """Add an operation that only moves what ``source`` holds, whatever that is."""
        if isinstance(op, Reshape):
            shape = self.graph.constant("shape", np.array([0, *op.shape], np.int64))
            return self.graph.node("Reshape", [source, shape], name)
        if isinstance(op, Transpose):
            order = [0, *(i + 1 for i in op.order)]
            return self.graph.node("Transpose", [source], name, perm=order)
        assert isinstance(op, Slice)
        ends = [op.start], [op.stop], [op.axis + 1], [op.step]
        given = [self.graph.constant("index", np.array(end, np.int64)) for end in ends]
        return self.graph.node("Slice", [source, *given], name)

    def padded(self, op: Pad, source: str, name: str, *zero: str) -> str:
        """Add zeros around what ``source`` holds; ``zero``: what stands for 0 there, if it is another.

        ONNX Runtime 1.31 makes a ``Pad`` without axes padding of the pooling behind it: that of max pooling is
        never the maximum, and that of average pooling must be smaller than the window.
        """
        constant = self.graph.constant
        sides = constant("sides", np.array([0, *op.before, 0, *op.behind], np.int64))
        given = [source, sides, *zero]
        users = self.network.users.get(op.name, [])
        if not all(isinstance(user, Conv) for user in users):
            axes = constant("axes", np.arange(1 + len(op.before), dtype=np.int64))
            given = [source, sides, *(zero or [""]), axes]
        return self.graph.node("Pad", given, name)

    def concat(self, op: Concat) -> str:
        """Add values one behind the other."""
        sources = [self.float(name) for name in op.inputs]
        return self.graph.node("Concat", sources, op.name, axis=op.axis + 1)

    def clip(self, op: Clip) -> str:
        """Add bounds."""
        ends = [self.number("bound", end * 2.0**-op.source_fl) for end in (op.low, op.high)]
        return self.graph.node("Clip", [self.float(op.inputs[0]), *ends], op.name)

    def table(self, op: Table) -> str:
        """Add a function by its table: codes as indices, values from the table."""
        node, types = self.graph.node, self.graph.onnx.TensorProto
        scale = self.number("scale", 2.0**op.source_fl)
        codes = node("Mul", [self.float(op.inputs[0]), scale], f"{op.name}.codes")
        first = self.number("first", float(op.low))
        places = node("Sub", [codes, first], f"{op.name}.places")
        indices = node("Cast", [places], f"{op.name}.indices", to=types.INT32)
        values = self.number(f"{op.name}.table", op.codes.numpy() * op.fmt.lsb)
        return node("Gather", [values, indices], op.name)

    def constant(self, op: Constant) -> str:
        """Add a constant, for samples of any number."""
        value = self.number(op.name, op.codes.numpy()[None] * op.codes_fmt.lsb)
        if not any(isinstance(user, Concat) for user in self.network.users.get(op.name, [])):
            return value
        node, ends = self.graph.node, [np.array([i], np.int64) for i in (0, 1)]
        whole = node("Shape", [self.network.input.name], f"{op.name}.input")
        samples = node(
            "Slice", [whole, *(self.graph.constant("index", i) for i in ends)], "samples"
        )
        sides = self.graph.constant("shape", np.array(op.codes.shape, np.int64))
        shape = node("Concat", [samples, sides], f"{op.name}.shape", axis=0)
        return node("Expand", [value, shape], f"{op.name}.each")

    def embedding(self, op: Embedding) -> str:
        """Add rows of a table."""
        table = self.number(f"{op.name}.weight", op.weight.numpy() * op.weight_fmt.lsb)
        return self.graph.node("Gather", [table, self.network.input.name], op.name)

    def matmul(self, op: MatMul) -> str:
        """Add a product of matrices."""
        return self.graph.node("MatMul", [self.float(name) for name in op.inputs], op.name)

    def row_codes(self, op: Norm | Softmax) -> str:
        """Add a norm of rows or softmax, computed in int64."""
        codes = self.integers(op, self.float(op.inputs[0]), self.real)
        return self.graph.node("Mul", [codes, self.number("scale", op.fmt.lsb)], op.name)

    def integers(self, op: Norm | Softmax, values: str, real: Any) -> str:
        """Return the codes of a norm of rows or of softmax, of floats of dtype ``real``, as such floats."""
        integers = Integers(self.graph, op.name, real)
        codes = integers.codes(values, op.source_fl)
        if isinstance(op, Norm):
            return integers.norm(op, codes)
        n = self.network.values[op.name].shape[-1]
        return integers.softmax(op, codes, n, *map(self.float, op.inputs[1:]))

    def sum(self, op: Add | Mul) -> str:
        """Add a sum, or a product."""
        return self.graph.node(type(op).__name__, [self.float(name) for name in op.inputs], op.name)


def window(op: MaxPool | AveragePool) -> dict[str, Any]:
    """Return the attributes of a pooling."""
    attributes = {
        "kernel_shape": op.kernel,
        "strides": op.stride,
        "pads": [*op.padding, *op.padding],
    }
    return attributes | ({"dilations": op.dilation} if isinstance(op, MaxPool) else {})


def container(fmt: FixedPoint) -> Any:
    """Return the smallest NumPy integer that holds a format's codes, of its own signedness up to 16 bits."""
    signed = np.int8, np.int16, np.int32
    unsigned = np.uint8, np.uint16, np.int32  # ONNX dequantises no uint32, and words have 31 bits
    kinds = signed if fmt.signed else unsigned
    return next(t for t in kinds if fmt.wl <= 8 * np.dtype(t).itemsize)


def require_exact(network: Network, significand_bits: int, what: str) -> None:
    """Refuse a network whose codes need more bits than a float has.

    Raises:
        ExportError: Names the first operation, and its bits.
    """
    is_float32 = significand_bits == _FLOAT32_BITS
    allowed = absorbed(network) if is_float32 else ()
    for name, value in network.values.items():
        if name not in allowed and not value.is_exact(significand_bits):
            bits = value.significand.bit_length()
            others = 'container="float64"' if is_float32 else "a packed file or C"
            raise ExportError(
                f"{name}: sums take {bits} bits, {what} {significand_bits} at most: round what is added "
                "(round_sums, --sums-wl 8), give what is multiplied there shorter formats (a batch norm's scale: "
                f"scale_wl), or write {others}, which has longer sums"
            )


_WRITE: dict[type, Any] = {
    Round: lambda writer, op: writer.rounded(op),
    Conv: lambda writer, op: writer.conv(op),
    Linear: lambda writer, op: writer.linear(op),
    Affine: lambda writer, op: writer.affine(op),
    Add: lambda writer, op: writer.sum(op),
    Mul: lambda writer, op: writer.sum(op),
    Relu: lambda writer, op: writer.relu(op),
    MaxPool: lambda writer, op: writer.max_pool(op),
    AveragePool: lambda writer, op: writer.average_pool(op),
    Flatten: lambda writer, op: writer.flatten(op),
    Reshape: lambda writer, op: writer.moved(op, writer.float(op.inputs[0]), op.name),
    Transpose: lambda writer, op: writer.moved(op, writer.float(op.inputs[0]), op.name),
    Slice: lambda writer, op: writer.moved(op, writer.float(op.inputs[0]), op.name),
    Pad: lambda writer, op: writer.padded(op, writer.float(op.inputs[0]), op.name),
    Concat: lambda writer, op: writer.concat(op),
    Clip: lambda writer, op: writer.clip(op),
    Table: lambda writer, op: writer.table(op),
    Constant: lambda writer, op: writer.constant(op),
    Embedding: lambda writer, op: writer.embedding(op),
    MatMul: lambda writer, op: writer.matmul(op),
    Norm: lambda writer, op: writer.row_codes(op),
    Softmax: lambda writer, op: writer.row_codes(op),
}
