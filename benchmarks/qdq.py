"""QDQ files in OpenVINO's CPU and in ONNX Runtime: the share of outputs that are not the integers'.

    python -m benchmarks.qdq

The networks of ``benchmarks/ops/targets.py``: random weights, statistics of the images, calibrated to 8 bits, sums
of 8. OpenVINO runs in ``.venv-openvino``, which ``make .venv-openvino/installed`` makes.
"""

from perfmodel.arguments import Parser, stop_at_interrupt

PARSER = Parser("python -m benchmarks.qdq", (__doc__ or "").partition("\n")[0])

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import marvin
from benchmarks.ops.targets import MODELS, samples_of
from marvin.export import ExportError, Network, describe, integer, onnx, round_sums

PYTHON = os.environ.get("OPENVINO_PYTHON", ".venv-openvino/bin/python")
RUNNER = Path(__file__).with_name("openvino_runner.py")


def network_of(build: Callable[[], nn.Module], x: Tensor, bits: int = 8) -> Network:
    """Return a network with statistics of ``x``."""
    torch.manual_seed(0)
    model = build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(x)
    return round_sums(describe(marvin.calibrate(model.eval(), [x], bits=bits), x), x)


def cells(network: Network, x: Tensor, folder: Path) -> list[str]:
    """Return the columns of a row: outputs that differ, and equal predictions."""
    path, given, found = (folder / name for name in ("net.onnx", "x.npy", "y.npz"))
    onnx.save(network, path, "qdq")
    np.save(given, x.numpy())
    words = [PYTHON, str(RUNNER), str(path), str(given), str(found)]
    has_run = not subprocess.run(words, check=False, capture_output=True).returncode
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (own,) = session.run(None, {network.input.name: x.numpy()})
    results: list[np.ndarray | None] = [np.asarray(own), None, None]
    if has_run:
        with np.load(found) as both:
            results[1:] = both["float32"], both["default"]
        found.unlink()
    want = integer.run(network, x).numpy()
    row = []
    for got in results:
        if got is None:
            row.append("does not load it")
            continue
        gap = np.abs(got - want)
        same = (got.argmax(1) == want.argmax(1)).mean()
        share, most = (gap > 0).mean(), gap.max() / np.abs(want).max()
        row.append("0" if not share else f"{share:.0%}, by {most:.1%}; {same:.0%}")
    return row


def main() -> None:
    """Print the table."""
    PARSER.parse_args()
    if not Path(PYTHON).exists():
        sys.exit("python -m benchmarks.qdq: error: it needs make .venv-openvino/installed")
    torch.set_num_threads(1)
    print("| | ONNX Runtime | OpenVINO, float32 | OpenVINO, as it comes |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, build in MODELS.items():
            x = samples_of(build, 64)
            try:
                row = cells(network_of(build, x), x, Path(folder))
            except ExportError as error:
                row = [f"refused: {error}"[:60]] * 3
            print(f"| {name} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
