"""Run an ONNX file in OpenVINO on the CPU; for the environment that has OpenVINO.

    .venv-openvino/bin/python benchmarks/openvino_runner.py NETWORK.onnx X.npy Y.npz

Writes the first output, computed as OpenVINO chooses (``default``) and in float32 (``float32``).
"""

import sys

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Run it twice."""
    path, given, out = sys.argv[1:]
    core, x = openvino.Core(), np.load(given)
    found = {}
    for name, hint in (("default", {}), ("float32", {"INFERENCE_PRECISION_HINT": "f32"})):
        compiled = core.compile_model(core.read_model(path), "CPU", hint)
        found[name] = compiled([x])[compiled.output(0)]
    np.savez(out, **found, version=openvino.__version__)


if __name__ == "__main__":
    main()
