"""ResNet20 and AlexNet exported to ONNX int8 beside their float32 originals, both in ONNX Runtime.

An element is a sample of 3x32x32. Formats are those of ``StaticPolicy``, 6 or 8 bits for weights and
layers' inputs, sums of 8. The original is the same network without rounding, as an exporter would
write it; ONNX Runtime folds its batch normalisation into the convolutions. ``portable``: 8-bit
weights as uint8; ``vnni``: as int8, see ``docs/targets.md``. Weights of 6 bits are int8 anyway.
"""

from collections.abc import Callable, Iterator
from typing import Any

import onnxruntime
import torch
from torch import nn

import marvin
from benchmarks.timing import Case
from marvin.export import Network, describe, integer, round_sums
from marvin.export.targets.onnx import original, to_model
from train.alexnet import alexnet
from train.resnet20 import resnet20

TESTS = "tests/marvin/export/test_onnx.py"
BATCHES = 1, 64
WEIGHTS = (6, False), (8, False), (8, True)


def cases() -> Iterator[Case]:
    """Yield a case a model, a way to write weights and a batch."""
    for build in (resnet20, alexnet):
        for bits, vnni in WEIGHTS:
            network = _network(build, bits)
            ours = to_model(network, "int8", vnni=vnni)
            _require_equal(network, ours)
            written = "" if bits < 8 else ", vnni" if vnni else ", portable"
            for batch in BATCHES:
                x = torch.randn(batch, *network.input.shape).numpy()
                contestants = {"ours": _runner(ours, x), "float32": _runner(original(network), x)}
                name = f"{build.__name__}, {bits} bits{written}, batch {batch}"
                yield Case(name, batch, contestants)


def _network(build: Callable[[], nn.Module], bits: int) -> Network:
    torch.manual_seed(0)
    model, x = build(), torch.randn(16, 3, 32, 32)
    marvin.tnvs_(model)
    sgd = torch.optim.SGD(model.named_parameters(), lr=1e-3)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(bits, bits))
    marvin.quantize_activations(model, optimizer)
    for _ in range(2):  # formats come at the end of the first step
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    return round_sums(describe(model.eval(), x, optimizer.formats()), x)


def _require_equal(network: Network, model: Any) -> None:
    """Refuse to time a file that computes something else on this processor."""
    x = torch.randn(8, *network.input.shape)
    (got,) = _session(model).run(None, {network.input.name: x.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(got).double(), integer.run(network, x), rtol=0, atol=0
    )


def _session(model: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _runner(model: Any, x: Any) -> Callable[[], object]:
    session = _session(model)
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: x})
