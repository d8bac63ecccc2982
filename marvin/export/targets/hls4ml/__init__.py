"""hls4ml: a C++ project for Vitis or Vivado HLS that computes the integer reference's codes.

Every type is written out. A value that is rounded has ``ap_fixed<WL, WL - FL, AP_RND_CONV,
AP_SAT>``, which rounds ties to even and saturates; the defaults of hls4ml truncate and wrap. Every
other value, and every accumulator, has a type that holds whatever it can be. Images are
channels-last inside, as hls4ml wants them.
"""

import math
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marvin.export.errors import ExportError, require
from marvin.export.graph.nodes import (
    Add,
    Affine,
    Conv,
    Linear,
    MaxPool,
    Network,
    Operation,
    Relu,
    Round,
    check_network,
)
from marvin.export.graph.transformers import Embedding
from marvin.export.graph.views import Pad
from marvin.export.targets.hls4ml.layers import (
    LAYERS,
    channels_last,
    check,
    exact,
    linear,
    orders,
    rounding,
)

__all__ = ["Hardware", "Project", "save", "write"]

_NAME = "network"
FORGOTTEN = "ap_fixed<2,1>"  # of a type that is not written out: too short for anything
# these would compute batch normalisation as part of the layer before it, which rounds differently
_NO_FUSION = ["fuse_batch_normalization", "fuse_consecutive_batch_normalization"]
# whose result is cast to its type; a reshaping casts nothing, and a pooling may round already
_CASTING = Conv, Linear, Affine, Add, Relu


_IO = "io_parallel", "io_stream"
_STRATEGIES = "Latency", "Resource"


@dataclass(frozen=True)
class Hardware:
    """What a project is made for; none of it changes what is computed.

    Args:
        part: Of the maker of the FPGA; None for hls4ml's default.
        clock_ns: Period of the clock.
        io: ``"io_parallel"``, or ``"io_stream"``, in which values come one pixel after the other.
        strategy: ``"Latency"``, or ``"Resource"``, which needs fewer multipliers.
        reuse_factor: How often each multiplier is used for one layer.

    Raises:
        ExportError: A value is out of range.
    """

    part: str | None = None
    clock_ns: float = 5.0
    io: str = "io_parallel"
    strategy: str = "Latency"
    reuse_factor: int = 1

    def __post_init__(self) -> None:
        for name, value, known in (("io", self.io, _IO), ("strategy", self.strategy, _STRATEGIES)):
            if value not in known:
                raise ExportError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        is_clock = isinstance(self.clock_ns, int | float) and 0 < self.clock_ns < math.inf
        if not is_clock or type(self.reuse_factor) is not int or self.reuse_factor < 1:
            raise ExportError(
                "clock_ns must be a number above 0 and reuse_factor a whole number of at least 1, got "
                f"{self.clock_ns!r} and {self.reuse_factor!r}"
            )
        if not isinstance(self.part, str | None):
            raise ExportError(f"part must be the name of one, or None, got {self.part!r}")


_ANY = Hardware()


@dataclass(frozen=True)
class Project:
    """A project on disk, and its emulation.

    Args:
        graph: hls4ml's own ``ModelGraph``.
        network: What it computes.
        order: Where each output is in the trained model's, None where it is there.
    """

    graph: Any
    network: Network
    order: Any

    def predict(self, samples: Tensor) -> Tensor:
        """Compile the C++ with g++ if that was not done, and run it.

        Args:
            samples: Shape ``(n, *shape)``, float32.

        Returns:
            float64, shape as of the trained model.

        Raises:
            ExportError: The compilation failed.
        """
        if self.graph._top_function_lib is None:
            try:
                self.graph._compile()
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                raise ExportError(f"g++ could not compile the project: {error}") from error
        x = samples.double().numpy()
        if x.ndim == 4:
            x = x.transpose(0, 2, 3, 1)
        shape = len(x), *self.network.values[self.network.output].shape
        rows = [np.asarray(self.graph.predict(np.ascontiguousarray(row[None]))) for row in x]
        y = np.stack([row.reshape(-1) for row in rows])
        if self.order is not None:
            y = y[:, np.argsort(self.order)]
        elif len(shape) == 4:
            y = y.reshape(len(x), *shape[2:], shape[1]).transpose(0, 3, 1, 2)
        return torch.from_numpy(y.reshape(shape).copy())


def save(
    network: Network, path: str | Path, backend: str = "Vitis", hardware: Hardware = _ANY
) -> int:
    """Write a project to a folder; return the bytes of its files.

    Args:
        network: From ``describe``.
        path: The folder, which the project names inside; made if it is not there.
        backend: As in ``write``.
        hardware: As in ``write``.

    Raises:
        ExportError: As ``write``.
        TypeError: ``network`` is not a ``Network``.
    """
    check_network(network)
    write(network, path, backend, hardware)
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def write(
    network: Network, folder: str | Path, backend: str = "Vitis", hardware: Hardware = _ANY
) -> Project:
    """Write a project, and return it with its emulation.

    Args:
        network: From ``describe``.
        folder: To write to.
        backend: ``"Vitis"`` or ``"Vivado"``; the emulations of others are not exact.
        hardware: What it is made for.

    Raises:
        ExportError: An operation has no exact counterpart; named, with the reason. Or hls4ml is
            not installed.
    """
    if backend not in ("Vitis", "Vivado"):
        raise ExportError(f"the backend must be Vitis or Vivado, got {backend!r}")
    if len(network.outputs) > 1:
        named = ", ".join(network.outputs)
        raise ExportError(f"hls4ml gets one output, got {named}: export a model that gives one")
    padded = [
        op.name
        for op in network.operations
        if isinstance(op, Pad) or any(getattr(op, "padding", ()))
    ]
    if hardware.io == "io_stream" and padded:
        named = ", ".join(padded)
        raise ExportError(
            f"{named}: io_stream does not pad as the network does: use io_parallel, or padding=0"
        )
    writer = _Writer(network)
    writer.write()
    require("hls4ml", "hls4ml")
    from hls4ml.model.graph import ModelGraph
    from hls4ml.utils.config import create_config

    own = {"part": hardware.part, "clock_period": hardware.clock_ns, "io_type": hardware.io}
    config = create_config(output_dir=str(folder), project_name=_NAME, backend=backend, **own)
    config["HLSConfig"] = {
        "Model": {
            "Precision": FORGOTTEN,
            "ReuseFactor": hardware.reuse_factor,
            "Strategy": hardware.strategy,
        },
        "LayerName": {name: {"Precision": types} for name, types in writer.types.items()},
        "SkipOptimizers": _NO_FUSION,
    }
    graph = ModelGraph.from_layer_list(config, writer.layers)
    graph.write()
    # the folder may be moved; and an emulation that is fast to compile is the faster one
    _replace(Path(folder, "hls4ml_config.yml"), r"(?m)^OutputDir: .*$", "OutputDir: .")
    _replace(Path(folder, "build_lib.sh"), "-O3", "-O0")
    return Project(graph, network, writer.orders.get(network.output))


def _replace(path: Path, old: str, new: str) -> None:
    path.write_text(re.sub(old, new, path.read_text()))


@dataclass
class _Writer:
    """Layers as hls4ml's dictionaries, in the making.

    Args:
        network: What is written.
        layers: So far.
        types: Of each layer: what to it is a name of a type, and that type.
        names: Layer of each value.
        orders: Of values in another order than the trained model's: where each of ours is there.
    """

    network: Network
    layers: list[dict[str, Any]] = field(default_factory=list)
    types: dict[str, dict[str, str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    orders: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.orders = orders(self.network)

    def write(self) -> None:
        """Add all operations."""
        users = self.network.users
        self._input(users[self.network.input.name])
        for op in self.network.operations[1:]:
            if op.name not in self.names:
                rounded = users.get(op.name, [])
                is_fused = len(rounded) == 1 and isinstance(rounded[0], Round)
                is_fused &= isinstance(op, _CASTING)
                self._operation(op, rounded[0] if is_fused else None)

    def _input(self, users: list[Operation]) -> None:
        (first, *others) = users
        if isinstance(first, Embedding):
            check(first)
        if others or not isinstance(first, Round):
            raise ExportError("hls4ml rounds the input once; this network has several roundings")
        name = self._identifier(self.network.input.name)
        shape = channels_last(self.network.input.shape)
        self.layers.append({"class_name": "InputLayer", "name": name, "input_shape": list(shape)})
        self.types[name] = {"result": rounding(first.fmt)}
        self.names[first.name] = self.names[self.network.input.name] = name

    def _operation(self, op: Operation, rounded: Any) -> None:
        """Add one operation, together with the rounding of its result where that is all."""
        value = self.network.values[op.name]
        name = self._identifier(op.name)
        check(op)
        layer, types = LAYERS[type(op)](self, op, value)
        result = rounding(rounded.fmt) if rounded else types.pop("result", exact(value))
        self.types[name] = {**types, "result": result}
        is_padded = isinstance(op, MaxPool) and any(op.padding)
        inputs = [self._signed(source) if is_padded else self.names[source] for source in op.inputs]
        self.layers.append({**layer, "name": name, "inputs": inputs, "outputs": [name]})
        self.names[op.name] = name
        if rounded:
            self.names[rounded.name] = name

    def _signed(self, source: str) -> str:
        """Return a layer whose type is signed and has a value: hls4ml pads others with half their range."""
        before = self.names[source]
        if not self.types[before]["result"].startswith("ap_ufixed"):
            return before
        value, name = self.network.values[source], self._identifier(f"{source}_signed")
        self.layers.append({**linear(value), "name": name, "inputs": [before], "outputs": [name]})
        self.types[name] = {"result": exact(value)}
        return name

    def _identifier(self, name: str) -> str:
        word = re.sub(r"\W", "_", name, flags=re.ASCII)
        taken = {layer["name"] for layer in self.layers}
        word = word if word[:1].isalpha() else f"layer_{word}"
        return word if word not in taken else f"{word}_{len(taken)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.network.values[name].shape
