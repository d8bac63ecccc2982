"""ResNet20 and AlexNet as C beside ONNX Runtime, one sample at a time, one thread.

An element is a sample of 3x32x32. Networks are those of ``export``. ``ours`` is the C file as gcc compiles it
with ``-O3 -march=native``, ``-O3`` as it runs on any x86-64 processor; ``int8`` and ``float32`` are the same network
in ONNX Runtime, 8-bit weights as int8.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.ops.export import _network, _runner
from benchmarks.timing import Case
from marvin.export import Network, c, integer
from marvin.export.targets.onnx import original, to_model
from train.alexnet import alexnet
from train.resnet20 import resnet20

TESTS = "tests/marvin/export/test_c.py::test_branches"
FLAGS = {"ours": ("-O3", "-march=native"), "-O3": ("-O3",)}


def cases() -> Iterator[Case]:
    """Yield a case a model and a word length."""
    for build in (resnet20, alexnet):
        for bits in (6, 8):
            network = _network(build, bits)
            x = torch.randn(1, *network.input.shape)
            contestants: dict[str, Callable[[], object]] = {}
            for name, flags in FLAGS.items():
                contestants[name] = _compiled(network, x, flags)
            contestants["int8"] = _runner(to_model(network, "int8", vnni=True), x.numpy())
            contestants["float32"] = _runner(original(network), x.numpy())
            yield Case(f"{build.__name__}, {bits} bits, batch 1", 1, contestants)


def _compiled(network: Network, x: Tensor, flags: tuple[str, ...]) -> Callable[[], object]:
    """Return a call of the C function; its output is compared first."""
    source = c.write(network)
    with tempfile.TemporaryDirectory() as name:
        path, library = Path(name) / "network.c", Path(name) / "network.so"
        c.save(network, path)
        words = ["gcc", "-std=c99", *flags, "-shared", "-fPIC", str(path), "-o", str(library)]
        subprocess.run(words, check=True)
        run = ctypes.CDLL(str(library)).network_run
    codes = c.input_codes(network, x)[0].astype(source.input.word.removesuffix("_t"))
    output = np.zeros(
        source.outputs["output"].count, source.outputs["output"].word.removesuffix("_t")
    )

    def call() -> object:
        return run(codes.ctypes.data_as(ctypes.c_void_p), output.ctypes.data_as(ctypes.c_void_p))

    call()
    got = c.output_codes(network, source, output[None].astype(np.int64))
    torch.testing.assert_close(got["output"], integer.run(network, x), rtol=0, atol=0)
    return call
