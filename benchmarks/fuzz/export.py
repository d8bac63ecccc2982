"""Small networks of random layers, with work in place and values used twice, through ``describe``.

The oracle is what PyTorch's own code would do, on Python's integers: arrays of them are changed in
place where the model changes its tensors in place.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.fuzz import draw
from benchmarks.fuzz.integer import convolved, rounded, windows
from benchmarks.fuzz.oracle import Array, Failure, Format
from fixedpoint_kernels import FixedPoint
from marvin.export import ExportError, Formats, describe, integer

_POINT = 200  # all values of the oracle are multiples of 2**-200
_SIDE = 4


class Net(nn.Module):
    """Runs its steps: what to do, what with, and under which name to keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.steps: list[tuple[str, list[str], str]] = []

    def forward(self, x: Tensor) -> Tensor:
        found: dict[str, Tensor] = {"x": x}
        last = "x"
        for kind, sources, last in self.steps:
            values = [found[name] for name in sources]
            found[last] = self.apply_step(kind, values)
        return found[last]

    def apply_step(self, kind: str, values: list[Tensor]) -> Tensor:
        if kind in self.layers:
            return self.layers[kind](values[0])
        if kind == "+=":
            total = values[0]
            total += values[1]
            return total
        return _FUNCTIONS[kind](*values)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "+": lambda x, y: x + y,
    "relu": torch.relu,
    "relu_": torch.relu_,
    "add_": lambda x, y: x.add_(y),
    "flatten": lambda x: torch.flatten(x, 1),
}


class _Plan:
    """A model in the making, and the oracle's values beside it."""

    def __init__(self, chance: Random) -> None:
        self.chance, self.net = chance, Net()
        self.formats: dict[str, FixedPoint] = {}
        self.activations: dict[str, Formats] = {}
        self.is_aliased = False
        n = 2 * _SIDE * _SIDE
        self.x = (
            np.round(draw.normal(chance, n) * 64).astype(np.float32).reshape(1, 2, _SIDE, _SIDE)
        )
        self.x /= np.float32(64)
        exact = np.vectorize(lambda v: int(v * 64) << _POINT - 6, otypes=[object])
        self.values: dict[str, Array] = {"x": exact(self.x)}

    def add_layer(self, source: str) -> str:
        """Add a layer of weights, which rounds what it takes."""
        chance, x = self.chance, self.values[source]
        name = f"l{len(self.net.steps)}"
        fmt = Format(chance.randint(2, 8), chance.randint(0, 6))
        bias_fmt = Format(chance.randint(2, 8), chance.randint(0, 8))
        if x.ndim == 2:
            layer: Any = nn.Linear(x.shape[1], 3)
        else:
            layer = nn.Conv2d(x.shape[1], 2, 3, padding=1)
        codes = _codes(chance, fmt, tuple(layer.weight.shape))
        biases = _codes(chance, bias_fmt, tuple(layer.bias.shape))
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(codes * 2.0**-fmt.fl))
            layer.bias.copy_(torch.from_numpy(biases * 2.0**-bias_fmt.fl))
        self.net.layers[name] = layer
        self.formats[f"layers.{name}.weight"] = draw.given(fmt)
        self.formats[f"layers.{name}.bias"] = draw.given(bias_fmt)
        taken = Format(chance.randint(4, 8), chance.randint(0, 5))
        given = (
            Format(chance.randint(4, 8), chance.randint(0, 5)) if chance.random() < 0.6 else None
        )
        self.activations[f"layers.{name}"] = Formats(
            draw.given(taken), None if given is None else draw.given(given)
        )
        x = _rounded(x, taken)
        if x.ndim == 2:
            total = x @ codes.astype(object).T
        else:
            total = convolved(x, codes, (1, 1), (1, 1), (1, 1), 1)
        bias = biases.astype(object).reshape(-1, *[1] * (x.ndim - 2))
        y = (total >> fmt.fl) + (bias << _POINT - bias_fmt.fl)
        return self.keep(name, [source], y if given is None else _rounded(y, given))

    def keep(self, kind: str, sources: list[str], y: Array) -> str:
        name = f"v{len(self.net.steps)}"
        self.net.steps.append((kind, sources, name))
        self.values[name] = y
        return name

    def add_other(self, source: str) -> str:
        """Add something that has no weights."""
        x, kind = self.values[source], self.chance.choice((0, 1, 1, 1, 2, 3, 4, 5, 6))
        if kind == 0:
            return self.keep("relu", [source], np.maximum(x, 0))
        if kind == 1:
            x[...] = np.maximum(x, 0)
            self.is_aliased = True
            return self.keep(self.in_place_relu(), [source], x)
        if kind == 2 and x.ndim == 4 and min(x.shape[2:]) > 1:
            name = f"l{len(self.net.steps)}"
            self.net.layers[name] = nn.MaxPool2d(2)
            parts = windows(x, (2, 2), (2, 2), (0, 0), (1, 1), 0)
            largest = np.maximum.reduce(list(parts.values()))
            return self.keep(name, [source], largest)
        if kind == 3 and x.ndim == 4:
            return self.keep("flatten", [source], x.reshape(len(x), -1))
        return self.add_sum(source)

    def in_place_relu(self) -> str:
        name = f"l{len(self.net.steps)}"
        if self.chance.random() < 0.5:
            return "relu_"
        self.net.layers[name] = nn.ReLU(inplace=True)
        return name

    def add_sum(self, source: str) -> str:
        x = self.values[source]
        like = [n for n, y in self.values.items() if y.shape == x.shape and n != "x"]
        other = self.chance.choice(like)
        kind = self.chance.choice(("+", "+=", "add_"))
        if kind == "+":
            return self.keep(kind, [source, other], x + self.values[other])
        x[...] = x + self.values[other]
        self.is_aliased = True
        return self.keep(kind, [source, other], x)


def run(chance: Random) -> None:
    """The network that is described has the model's output, or is refused."""
    plan = _Plan(chance)
    last = plan.add_layer("x")
    for _ in range(chance.randint(1, 5)):
        names = [name for name in plan.values if name != "x"][-3:]
        last = (plan.add_layer if chance.random() < 0.4 else plan.add_other)(chance.choice(names))
    plan.net.eval()
    x = torch.from_numpy(plan.x)
    try:
        network = describe(plan.net, x, plan.formats, plan.activations)
    except ExportError as error:
        if plan.is_aliased and any(kind == "flatten" for kind, _, _ in plan.net.steps):
            return  # a view of what is changed in place may be refused
        raise Failure(f"refused: {error}; steps {plan.net.steps}") from error
    got = integer.run_all(network, x)[network.output]
    shift = _POINT - network.values[network.output].fl
    exact = np.array([int(code) << shift for code in got.ravel()], object).reshape(got.shape)
    want = plan.values[last]
    if exact.shape != want.shape or (exact != want).any():
        raise Failure(f"other outputs than the model's; steps {plan.net.steps}")


def _rounded(x: Array, fmt: Format) -> Array:
    return rounded(x, _POINT, fmt) << _POINT - fmt.fl


def _codes(chance: Random, fmt: Format, shape: tuple[int, ...]) -> Array:
    numbers = [chance.randint(fmt.low, fmt.high) for _ in range(int(np.prod(shape)))]
    return np.array(numbers, np.int64).reshape(shape)
