"""ResNet20 exported to ONNX beside the same network in float32, both in ONNX Runtime, one thread.

An element is a sample of 3x32x32. ``int8``: formats of 8 bits; ``int16``: of 8 bits in int16
containers, for which ONNX Runtime has no integer kernels; ``float64``: of 16 bits.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper

import marvin
from benchmarks.timing import Case
from marvin.export import Network, describe
from marvin.export.graph import Floats
from marvin.export.network import Round, Weighted
from marvin.export.onnx import Spelling, to_model
from train.resnet20 import resnet20

TESTS = "tests/marvin/export/test_onnx.py"
SAMPLES = 8


class _Unrounded(Floats):
    """The same operations without rounding, weights in float32."""

    def rounded(self, op: Round) -> str:
        return self.float(op.inputs[0])

    def weight(self, op: Weighted) -> str:
        values = op.weight.numpy() * op.weight_fmt.lsb
        return self.number(f"{op.name}.weight", values)


def cases() -> Iterator[Case]:
    """Yield a case a spelling."""
    for spelling, wl, fl in (("int8", 8, 4), ("int16", 8, 4), ("float64", 16, 10)):
        network, x = _network(wl, fl)
        writer = _Unrounded(network)
        output = writer.write()
        floats = writer.graph.model(network, output, onnx.TensorProto.FLOAT)
        ours = to_model(network, _spelling(spelling))
        size = f"{_weight_bytes(ours):,} bytes of constants, {_weight_bytes(floats):,} in float32"
        contestants = {"ours": _runner(ours, x), "float32": _runner(floats, x)}
        yield Case(f"{spelling}, {wl} bits, {size}", SAMPLES, contestants)


def _spelling(name: str) -> Spelling:
    return name  # pyright: ignore[reportReturnType]


def _network(wl: int, fl: int) -> tuple[Network, Any]:
    torch.manual_seed(0)
    model = resnet20()
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=wl, init_fl=fl)
    marvin.quantize_activations(model.eval(), optimizer)
    x = torch.randn(SAMPLES, 3, 32, 32)
    return describe(model, x, optimizer.formats()), x.numpy()  # pyright: ignore[reportArgumentType]


def _runner(model: Any, x: Any) -> Callable[[], object]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: x})


def _weight_bytes(model: Any) -> int:
    return sum(np.asarray(numpy_helper.to_array(c)).nbytes for c in model.graph.initializer)
