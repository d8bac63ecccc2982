"""QONNX: ``Quant`` nodes with the true word lengths, for FINN, Brevitas and hls4ml users.

A sample at a time, as those tools want it. Values are float32: qonnx's executor computes the
integer reference's outputs while sums take at most 24 bits, see ``is_exact``.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.graph.nodes import FLOAT32_BITS, Network, Relu, Round, Weighted, check_network
from marvin.export.graph.transformers import Constant, Embedding, MatMul, Norm, Softmax
from marvin.export.passes.round_early import round_early
from marvin.export.targets.onnx.graph import FloatWriter, require_exact
from marvin.files import write_atomic

if TYPE_CHECKING:  # an extra
    import onnx

__all__ = ["execute", "execute_heads", "is_exact", "save", "to_model"]

_DOMAIN = "qonnx.custom_op.general"
# qonnx needs an older onnx than the other exports, so it may live in an environment of its own
_SCRIPT = """
import sys
import numpy as np
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.infer_shapes import InferShapes
model = ModelWrapper(sys.argv[1]).transform(InferShapes())
name, = (value.name for value in model.graph.input)
outputs = [value.name for value in model.graph.output]
samples = np.load(sys.argv[2])
found = [execute_onnx(model, {name: x[None]}) for x in samples]
np.savez(sys.argv[3], *[np.concatenate([one[output] for one in found]) for output in outputs])
"""


def is_exact(network: Network) -> bool:
    """Say whether float32 computes every value of a network without error.

    Raises:
        TypeError: ``network`` is not a ``Network``.
    """
    check_network(network)
    try:
        require_exact(network, FLOAT32_BITS, "")
    except ExportError:
        return False
    return True


def save(network: Network, path: str | Path) -> int:
    """Write a network as a QONNX file, at once; return its bytes.

    Args:
        network: From ``describe``.
        path: Of the file; its folder is made if it is not there.

    Raises:
        ExportError: As ``to_model``.
        TypeError: As ``to_model``.
    """
    content = to_model(network).SerializeToString()
    write_atomic(Path(path), content)
    return len(content)


def to_model(network: Network) -> "onnx.ModelProto":
    """Return a network as an ``onnx.ModelProto`` with ``Quant`` nodes; float32, batches of one.

    Raises:
        ExportError: A format is wider than float32 holds, or ``onnx`` is not installed.
        TypeError: ``network`` is not a ``Network``.
    """
    check_network(network)
    for name, fmt in network.words().items():
        if fmt.wl > FLOAT32_BITS:
            raise ExportError(f"{name}: QONNX is float32 and holds {FLOAT32_BITS} bits, got {fmt}")
    for op in network.operations:
        if isinstance(op, Constant | Embedding | MatMul | Norm | Softmax):
            kind = type(op).__name__
            raise ExportError(
                f"{op.name}: {kind} is not written as QONNX: export it to c, onnx or packed"
            )
    network = round_early(network)
    writer = _QuantWriter(network)
    return writer.graph.model(network, writer.write(), {_DOMAIN: 1}, batch=1)


def execute(path: str | Path, samples: Tensor, python: str = sys.executable) -> Tensor:
    """Return what qonnx's executor makes of a file with one output: see ``execute_heads``.

    Args:
        path: Of the file.
        samples: Shape ``(n, *shape)``, float32.
        python: The interpreter of an environment with qonnx.

    Raises:
        ExportError: The executor failed, or there is none; or the file has several outputs.
    """
    found = execute_heads(path, samples, python)
    if len(found) > 1:
        raise ExportError(f"the file has {len(found)} outputs: take qonnx.execute_heads")
    return found[0]


def execute_heads(path: str | Path, samples: Tensor, python: str = sys.executable) -> list[Tensor]:
    """Return what qonnx's executor makes of a file, sample by sample; each output in order.

    Args:
        path: Of the file.
        samples: Shape ``(n, *shape)``, float32.
        python: The interpreter of an environment with qonnx.

    Raises:
        ExportError: The executor failed, or there is none.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "given.npy"), Path(folder, "found.npz")
        np.save(given, samples.numpy())
        command = [python, "-c", _SCRIPT, str(path), str(given), str(found)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "No module named 'qonnx'" in done.stderr:
            raise ExportError(
                'qonnx is not installed: pip install "marvin-fixedpoint[qonnx]", in an environment '
                "of its own where onnx 1.23 is needed too, and name its --python"
            )
        if done.returncode:
            raise ExportError(f"qonnx could not execute {path}: {done.stderr.strip()[-300:]}")
        with np.load(found) as arrays:
            return [torch.from_numpy(arrays[f"arr_{i}"]) for i in range(len(arrays.files))]


class _QuantWriter(FloatWriter):
    def rounded(self, op: Round) -> str:
        source = self.float(op.inputs[0])
        is_behind = any(
            x.name == op.inputs[0] for x in self.network.operations if isinstance(x, Relu)
        )
        if not op.fmt.signed and not is_behind:  # FINN wants one there, and nothing is below 0
            source = self.graph.node("Relu", [source], f"{op.name}.relu")
        return self._quant(op.name, source, op.fmt)

    def weight(self, op: Weighted) -> str:
        values = op.weight.numpy() * op.weight_fmt.lsb
        stored = self.number(f"{op.name}.weight", values)
        steps = op.weight_fmt.lsb * 2.0 ** np.array(op.trailing_zeros)
        lsb = steps.reshape(-1, *[1] * (values.ndim - 1)) if op.per_channel else None
        return self._quant(f"{op.name}.weight.quant", stored, op.word, lsb)

    def bias(self, op: Weighted) -> list[str]:
        names = super().bias(op)
        if not names or op.bias_fmt.wl > FLOAT32_BITS:
            return names
        lsb = np.array([op.bias_fmt.lsb])
        return [self._quant(f"{op.name}.bias.quant", names[0], op.bias_fmt, lsb)]

    def _quant(self, name: str, source: str, fmt: FixedPoint, lsb: object = None) -> str:
        """Add a rounding to a format, or to its codes in steps of ``lsb``."""
        numbers = [self.number(hint, value) for hint, value in _numbers(fmt, lsb)]
        return self.graph.node(
            "Quant",
            [source, *numbers],
            f"{name}.value",
            domain=_DOMAIN,
            signed=int(fmt.signed),
            narrow=int(fmt.symmetric),
            rounding_mode="ROUND",
        )


def _numbers(fmt: FixedPoint, lsb: object) -> list[tuple[str, object]]:
    scale = np.array(fmt.lsb if lsb is None else lsb)
    # of a bias, an array: else qonnx cannot take it out of its layer
    zero_point = np.zeros((1,) * min(1, scale.ndim))
    return [("scale", scale), ("zero_point", zero_point), ("bits", float(fmt.wl))]
