"""ResNets in ONNX Runtime: our files beside float32 and the runtime's own ``quantize_static``.

    python -m benchmarks.quantize_static

ResNet20 on images of 32x32 and ResNet-18, as torchvision builds it, of 64x64: the embedded digits, larger
and in three channels, on which each is trained in float32 for a moment. All files are made of that model,
from the same images. Prints accuracies, then times, one thread, the files in random order, medians. Files are
loaded several times: where the runtime puts them in memory changes the time of one image by 3 %. Ours are
compared with the integers first. The processor must have VNNI.
"""

from perfmodel.arguments import Parser, stop_at_interrupt

PARSER = Parser("python -m benchmarks.quantize_static", (__doc__ or "").partition("\n")[0])

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

import marvin
from benchmarks.networks import resnet18
from fixedpoint_kernels.products import paths
from marvin.export import describe, integer, round_sums
from marvin.export import onnx as exporter
from train.augment import normalize
from train.data import enlarge, load
from train.dataset import Images
from train.resnet20 import resnet20

RUNS = {1: 200, 8: 30, 64: 5}  # by batch, each time that files are loaded
LOADED = 7  # times
CALIBRATION = 64  # images
OURS = {"ours, 8 bits": (8, 8), "ours, 6 bits": (6, 6), "inputs 8, weights 6": (8, 6)}
Session = onnxruntime.InferenceSession


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # with side and epochs
    "ResNet20, 32x32": (resnet20, 32, 6),
    "ResNet-18, 64x64": (resnet18, 64, 3),
}


class Reader(quantization.CalibrationDataReader):
    """Hands images to ``quantize_static``."""

    def __init__(self, name: str, x: Tensor) -> None:
        self.batches = iter([{name: part.numpy()} for part in x.split(8)])

    def get_next(self) -> dict[str, np.ndarray] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the next batch."""
        return next(self.batches, None)


def session(model: bytes) -> Session:
    """Return a session of one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return Session(model, options, providers=["CPUExecutionProvider"])


def trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Train in float32, and take batch norm's statistics over images as they are."""
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(32):
            adam.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            adam.step()
    marvin.reestimate_batch_norm(model, x.split(64))
    return model.eval()


def ours(model: nn.Module, bits: int, weight_bits: int, x: Tensor) -> tuple[bytes, onnx.ModelProto]:
    """Return our file, and the same network in float32."""
    fixed = marvin.calibrate(deepcopy(model), [x], bits=bits, weight_bits=weight_bits)
    network = round_sums(describe(fixed, x[:32]), x)
    made = exporter.to_model(network, vnni=True).SerializeToString()
    (got,) = session(made).run(None, {network.input.name: x[:16].numpy()})
    wanted = integer.run(network, x[:16])
    torch.testing.assert_close(torch.from_numpy(got).double(), wanted, rtol=0, atol=0)
    return made, exporter.original(network)


def files_of(model: nn.Module, x: Tensor) -> dict[str, bytes]:
    """Return all files, by name."""
    own = {label: ours(model, *bits, x) for label, bits in OURS.items()}
    found = {label: made for label, (made, _) in own.items()}
    original = own["ours, 8 bits"][1]
    found["float32"] = original.SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, part)) for part in ("float32", "prepared", "static")]
        onnx.save(original, paths[0])
        quant_pre_process(paths[0], paths[1], skip_symbolic_shape=True)
        quantization.quantize_static(
            paths[1], paths[2], Reader(original.graph.input[0].name, x),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )  # fmt: skip
        found["quantize_static"] = Path(paths[2]).read_bytes()
    return found


def answers(file: bytes, x: Tensor) -> Tensor:
    """Return logits."""
    made = session(file)
    name = made.get_inputs()[0].name
    return torch.cat([torch.from_numpy(made.run(None, {name: p.numpy()})[0]) for p in x.split(64)])


def timed(files: dict[str, bytes], x: Tensor) -> dict[int, dict[str, float]]:
    """Return seconds an image by batch and file, medians."""
    # nobody always comes behind the same file, which leaves its own in the caches
    generator = random.Random(0)
    times: dict[int, dict[str, list[float]]] = {b: {label: [] for label in files} for b in RUNS}
    for _ in range(LOADED):
        made = [
            (label, session(file)) for label, file in generator.sample([*files.items()], len(files))
        ]
        for batch, runs in RUNS.items():
            for _ in range(runs):
                for label, one in generator.sample(made, len(made)):
                    given = {one.get_inputs()[0].name: x[:batch].numpy()}
                    start = time.perf_counter()
                    one.run(None, given)
                    times[batch][label].append((time.perf_counter() - start) / batch)
    return {
        batch: {label: statistics.median(seconds) for label, seconds in found.items()}
        for batch, found in times.items()
    }


def compare(name: str) -> tuple[list[str], str, list[str]]:
    """Train a network; return names of its files, a row of accuracies, and rows of times."""
    make, side, epochs = NETWORKS[name]
    torch.manual_seed(0)
    dataset = enlarge(load("digits", Path("data")), side)

    def images(part: Images) -> Tensor:
        return normalize(part.images, dataset).expand(-1, 3, -1, -1).contiguous()

    x, test = images(dataset.train), images(dataset.test)
    model = trained(make(), x, dataset.train.labels, epochs)
    files = files_of(model, x[:CALIBRATION])
    right = [answers(file, test).argmax(1) == dataset.test.labels for file in files.values()]
    accuracy = " | ".join(f"{100 * own.float().mean():.2f}" for own in right)
    rows = []
    for batch, medians in timed(files, test).items():
        cells = (
            f"{t * 1e6:.0f} ({t / medians['float32']:.2f}, {t / medians['quantize_static']:.3f})"
            for t in medians.values()
        )
        rows.append(f"| {name}, batch {batch} | " + " | ".join(cells) + " |")
    return list(files), f"| {name} | {accuracy} |", rows


def main() -> None:
    """Print what the files reach, and microseconds an image with the shares of float32 and of ``quantize_static``."""
    PARSER.parse_args()
    if not paths.has_vnni():
        sys.exit("python -m benchmarks.quantize_static: error: this processor has no VNNI")
    torch.set_num_threads(1)
    found = [compare(name) for name in NETWORKS]
    labels = found[0][0]
    head, rule = " | ".join(labels), "|---" * (1 + len(labels)) + "|"
    print(f"| % of test images | {head} |", rule, *(row for _, row, _ in found), sep="\n")
    print(f"\n| us an image | {head} |", rule, sep="\n")
    print(*(row for _, _, rows in found for row in rows), sep="\n")


if __name__ == "__main__":
    main()
