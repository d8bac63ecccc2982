"""The five things an export can be: how each is written, and proved."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from marvin.export.deployed import Deployed
from marvin.export.errors import ExportError, require
from marvin.export.execute import integer
from marvin.export.graph.nodes import Add, AveragePool, Network, Weighted
from marvin.export.targets import c, hls4ml, onnx, packed, qonnx
from marvin.export.targets.c.proof import prove, report

__all__ = ["TARGETS", "Order", "Target", "Written"]


@dataclass(frozen=True)
class Written:
    """What was written.

    Args:
        size_bytes: Of all files.
        what: In words.
        outputs: What the file computes of the samples it was proved on, None where not proved.
        proof: In words; ``""`` where there is none.
        is_exact: Whether it computes what the integers do; False only where no float32 could.
        notes: What it takes, line by line.
    """

    size_bytes: int
    what: str
    outputs: Tensor | None = None
    proof: str = ""
    is_exact: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Order:
    """What to write.

    Args:
        deployed: The network.
        folder: To write to.
        samples: To prove it on, None for no proof.
        wanted: What the integer reference gives of the samples, by output.
        backend: Of hls4ml.
        hardware: Of hls4ml.
        python: Interpreter of an environment with qonnx.
        vnni: Of ONNX: the processor has VNNI.
        nibbles: Of C: weights of 4 bits or fewer are two to a byte.
        int4: Of ONNX: weights of up to 4 bits take 4 bits each.
        qdq: Of ONNX: float operators between nodes that quantise.
    """

    deployed: Deployed
    folder: Path
    samples: Tensor | None
    wanted: Mapping[str, Tensor]
    backend: str = "Vitis"
    python: str = sys.executable
    vnni: bool = False
    nibbles: bool = False
    int4: bool = False
    qdq: bool = False
    hardware: hls4ml.Hardware = dataclasses.field(default_factory=hls4ml.Hardware)


Target = Callable[[Order], Written]
_TOGETHER = 256  # samples that ONNX Runtime computes at one time


def _packed(order: Order) -> Written:
    path = order.folder / "network.safetensors"
    size = packed.save(order.deployed.packed(), path)
    state, what = order.deployed.tensors(), path.name
    if left_out := [name for name in order.deployed.model.state_dict() if name not in state]:
        what += f" without {', '.join(left_out)}, which are no tensors"
    if order.samples is None:
        return Written(size, what)
    loaded = packed.load(path)
    found = loaded.state_dict()
    names = sorted(state)
    same = sorted(found) == names and all(torch.equal(found[n], state[n]) for n in names)
    if not same or loaded.network is None:
        raise ExportError("the packed weights differ from the model's")
    got = list(integer.run_heads(loaded.network, order.samples).values())
    proved = _proved(order, size, what, got, "the network read back")
    proof = f"all {len(names)} tensors come back, every bit; {proved.proof}"
    return replace(proved, proof=proof)


def _onnx(order: Order) -> Written:
    network, path = order.deployed.network, order.folder / "network.onnx"
    if order.qdq:
        return _qdq(order, path)
    container = onnx.container_of(network)
    size = onnx.save(network, path, container, vnni=order.vnni, int4=order.int4)
    what = f"{path.name} ({container})"
    what += _kernels(onnx.in_floats(network), network)
    sums = (Add, AveragePool)
    slow = [name for name in onnx.unfused(network) if network.users.get(name)]
    if (
        slow
        and order.deployed.exact is network
        and any(isinstance(op, sums) for op in network.operations)
    ):
        what += f"; sums of {', '.join(slow)} are not rounded, which is slower: try --sums-wl 8"
    if order.samples is None:
        return Written(size, what)
    return _proved(order, size, what, *_in_onnx_runtime(network, path, order.samples))


def _qdq(order: Order, path: Path) -> Written:
    network = order.deployed.network
    size = onnx.save(network, path, "qdq", vnni=order.vnni, int4=order.int4)
    what = f"{path.name} (QDQ): exact where a runtime computes in float32"
    is_exact = onnx.qdq_is_exact(network)
    if not is_exact:
        what = f"{path.name} (QDQ): sums are longer than the 24 bits of float32, so it is not exact"
    if order.samples is None:
        return Written(size, what)
    _check_loads(path)
    # its integer kernels are wrong for weights of 8 bits on processors without VNNI
    got, who = _in_onnx_runtime(network, path, order.samples, as_written=True)
    proved = _proved if is_exact else _counted
    return proved(order, size, what, got, who)


def _check_loads(path: Path) -> None:
    """Refuse a file that ONNX Runtime does not load as users do, with all it changes in graphs."""
    runtime = require("onnxruntime", "onnx")
    with _named(runtime, f"load {path.name}", "write the file without --qdq"):
        runtime.InferenceSession(_loadable(path), providers=["CPUExecutionProvider"])


def _loadable(path: Path) -> str | bytes:
    """Return what ONNX Runtime loads: a path, or the file where the path is not in UTF-8, which it refuses."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return path.read_bytes()
    return str(path)


@contextmanager
def _named(runtime: ModuleType, what: str, instead: str) -> Iterator[None]:
    """Make an ``ExportError`` of what ONNX Runtime raises; it names the node, which has its layer's name."""
    try:
        yield
    except Exception as error:  # of kinds of its own
        reason = f"{str(error).partition(chr(10))[0]:.300}"
        raise ExportError(
            f"ONNX Runtime {runtime.__version__} must {what}, got {reason}: {instead}"
        ) from error


def _in_onnx_runtime(
    network: Network, path: Path, x: Tensor, *, as_written: bool = False
) -> tuple[list[Tensor], str]:
    """Return what ONNX Runtime makes of a file, and its name; as written, without its integer kernels."""
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    if as_written:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    instead = "take another version of onnxruntime, or write the network --to c or packed"
    with _named(runtime, f"run {path.name}", instead):
        providers = ["CPUExecutionProvider"]
        session = runtime.InferenceSession(_loadable(path), options, providers=providers)
        given = [{network.input.name: part.numpy()} for part in x.split(_TOGETHER)]
        parts = [session.run(None, own) for own in given]
    found = [torch.cat([torch.from_numpy(y) for y in own]) for own in zip(*parts, strict=True)]
    return found, f"ONNX Runtime {runtime.__version__}" + ", operators as written" * as_written


def _kernels(in_floats: dict[str, str], network: Network) -> str:
    """Return in words which layers leave integer kernels."""
    layers = [op.name for op in network.operations if isinstance(op, Weighted)]
    if not in_floats:
        return f"; all {len(layers)} layers on integer kernels"
    if len(in_floats) == len(layers) and len(set(in_floats.values())) == 1:
        return f"; all {len(layers)} layers in floats: {next(iter(in_floats.values()))}"
    named = ", ".join(f"{name} ({why})" for name, why in in_floats.items())
    return f"; {len(in_floats)} of {len(layers)} layers in floats: {named}"


def _qonnx(order: Order) -> Written:
    network, path = order.deployed.network, order.folder / "network.qonnx.onnx"
    size = qonnx.save(network, path)
    if order.samples is None:
        return Written(size, path.name)
    found = qonnx.execute_heads(path, order.samples, order.python)
    if qonnx.is_exact(network):
        return _proved(order, size, path.name, found, "qonnx's executor")
    return _counted(order, size, path.name, found, "qonnx's executor")


def _counted(order: Order, size: int, what: str, found: Sequence[Tensor], who: str) -> Written:
    """Say how many outputs differ, where floats are too short to be equal; the first is kept."""
    network = order.deployed.network
    pairs = zip(found, order.wanted.values(), strict=True)
    steps = [2.0 ** network.values[name].fl for name in network.outputs.values()]
    gaps = [(x.double() - y).abs() * step for (x, y), step in zip(pairs, steps, strict=True)]
    gap = torch.cat([gap.reshape(-1) for gap in gaps])
    proof = (
        f"{who} computes in float32, which is too short here: {int((gap > 0).sum())} of "
        f"{gap.numel()} outputs differ from the integers, by {gap.max():g} steps at most"
    )
    return Written(size, what, found[0], proof, is_exact=False)


def _hls4ml(order: Order) -> Written:
    project = hls4ml.write(order.deployed.network, order.folder, order.backend, order.hardware)
    size = sum(file.stat().st_size for file in order.folder.rglob("*") if file.is_file())
    what = f"{order.backend} project"
    if order.samples is None:
        return Written(size, what)
    return _proved(order, size, what, [project.predict(order.samples)], "the C++ emulation")


def _c(order: Order) -> Written:
    network, path = order.deployed.network, order.folder / "network.c"
    size = c.save(network, path, nibbles=order.nibbles)
    source = c.write(network, path.stem, nibbles=order.nibbles)
    what = f"{path.name} and {path.stem}.h"
    notes = tuple(report(network, source, path))
    if order.samples is None:
        return Written(size, what, notes=notes)
    got, who = prove(network, source, path, order.samples)
    return replace(_proved(order, size, what, got, who), notes=notes)


def _proved(order: Order, size: int, what: str, found: Sequence[Tensor], who: str) -> Written:
    """Compare each output with the integer reference; the first is kept."""
    samples = order.samples
    assert samples is not None
    wanted = order.wanted.values()
    total = sum(want.numel() for want in wanted)
    pairs = list(zip(found, wanted, strict=True))
    different = sum(int((got.double() != want).sum()) for got, want in pairs)
    if different or any(got.shape != want.shape for got, want in pairs):
        raise ExportError(
            f"{who} differs from the integer reference in {different} of {total} outputs"
        )
    proof = f"{who}: all {total} outputs of {len(samples)} samples equal the integers"
    return Written(size, what, found[0], proof)


TARGETS: dict[str, Any] = {
    "packed": _packed,
    "onnx": _onnx,
    "qonnx": _qonnx,
    "hls4ml": _hls4ml,
    "c": _c,
}
