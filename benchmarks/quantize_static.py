"""ResNet20 in ONNX Runtime: our files beside float32 and the runtime's own ``quantize_static``.

    python -m benchmarks.quantize_static

Random weights, images of 32 x 32, one thread; the four files in turn, medians. Ours are compared with the
integers first. The processor must have VNNI.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

import marvin
from marvin.export import describe, integer, round_sums
from marvin.export import onnx as exporter
from train.resnet20 import resnet20

RUNS = {1: 300, 8: 60, 64: 9}  # by batch


class Reader(quantization.CalibrationDataReader):
    """Hands images to ``quantize_static``."""

    def __init__(self, name: str, x: Tensor) -> None:
        self.batches = iter([{name: part.numpy()} for part in x.split(8)])

    def get_next(self) -> dict[str, np.ndarray] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the next batch."""
        return next(self.batches, None)


def session(model: bytes | str) -> onnxruntime.InferenceSession:
    """Return a session of one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def ours(bits: int, x: Tensor) -> tuple[onnxruntime.InferenceSession, onnx.ModelProto]:
    """Return a session of our file, and the same network in float32."""
    torch.manual_seed(0)
    model = resnet20(10, 3, 16)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # statistics of these images
    with torch.no_grad():
        model.train()(x)
    fixed = marvin.calibrate(model, [x], bits=bits)
    network = round_sums(describe(fixed, x[:32]), x)
    made = session(exporter.to_model(network, vnni=True).SerializeToString())
    (got,) = made.run(None, {network.input.name: x.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(got).double(), integer.run(network, x), rtol=0, atol=0
    )
    return made, exporter.original(network)


def main() -> None:
    """Print microseconds an image, and the share of float32's."""
    torch.set_num_threads(1)
    x = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    files = {f"ours, {bits} bits": ours(bits, x) for bits in (8, 6)}
    original = files["ours, 8 bits"][1]
    name = original.graph.input[0].name
    sessions = {label: made for label, (made, _) in files.items()}
    sessions["float32"] = session(original.SerializeToString())
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, part)) for part in ("float32", "prepared", "static")]
        onnx.save(original, paths[0])
        quant_pre_process(paths[0], paths[1], skip_symbolic_shape=True)
        quantization.quantize_static(
            paths[1], paths[2], Reader(name, x), quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )  # fmt: skip
        sessions["quantize_static"] = session(paths[2])
    print("| batch | " + " | ".join(sessions) + " |\n|---|" + "---|" * len(sessions))
    for batch, runs in RUNS.items():
        given, times = {name: x[:batch].numpy()}, {label: [] for label in sessions}
        for _ in range(runs):
            for label, made in sessions.items():
                start = time.perf_counter()
                made.run(None, given)
                times[label].append(time.perf_counter() - start)
        medians = {label: statistics.median(found) for label, found in times.items()}
        cells = (f"{t / batch * 1e6:.0f} ({t / medians['float32']:.2f})" for t in medians.values())
        print(f"| {batch} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
