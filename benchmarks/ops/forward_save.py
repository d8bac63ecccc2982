"""Ways to keep less for backward: bytes, error of the gradient, and time, beside exact training.

``python -m benchmarks.run --op forward_save`` measures time; ``python -m
benchmarks.ops.forward_save`` prints bytes, errors and throughput of every way. Checkpointing is
PyTorch's reentrant one, of two segments: its bytes are those between forward and backward, without
what a segment keeps while it is recomputed. Offloading is ``save_on_cpu``, whose bytes leave a GPU;
on a CPU it moves nothing.
"""

from perfmodel.arguments import Parser, stop_at_interrupt

PARSER = Parser("python -m benchmarks.ops.forward_save", (__doc__ or "").partition("\n")[0])

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks import machine
from benchmarks.timing import Case, measure
from fixedpoint_kernels import forward_save
from perfmodel.memory import saved_bytes
from perfmodel.zoo import MODELS
from perfmodel.zoo.transformer import Size, ViT

TESTS = "tests/fixedpoint_kernels/test_forward_save_figures.py"
DIVISION = {"block": 8, "bits": 2}
CONVERTED: dict[str, dict[str, Any]] = {
    "ours": {"division": DIVISION, "few_bit": 3},
    "few-bit 3": {"few_bit": 3},
    "DIVISION 8, 2": {"division": DIVISION},
    "DIVISION 8, 4": {"division": {"bits": 4}},
    "DIVISION 8, 8": {"division": {"bits": 8}},
    "per group of 256, 2": {"division": {"bits": 2, "method": "per_group"}},
    "fixed 2": {"division": {"bits": 2, "method": "fixed"}},
    "low frequencies": {"division": {"method": "low"}},
    "high frequencies, 2": {"division": {"bits": 2, "method": "high"}},
}
IN_RUN = "ours", "exact", "checkpointing", "save_on_cpu"


class _Checkpointed(nn.Module):
    def __init__(self, model: nn.Sequential):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.model, 2, x, use_reentrant=True)


class _Offloaded(nn.Module):
    def __init__(self, model: nn.Sequential):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return self.model(x)


def _perceptron() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    )


def _resnet() -> Any:
    return MODELS["ResNet-18/CIFAR"].build(nn.ReLU)


def _inputs() -> dict[str, tuple[nn.Sequential, Tensor]]:
    """Return models and a batch each; gradients of the batch are what checkpointing asks for."""
    torch.manual_seed(0)
    models: dict[str, tuple[Any, Tensor]] = {
        "ResNet-18/CIFAR, batch 4": (_resnet(), torch.randn(4, 3, 32, 32)),
        "ResNet-18/CIFAR, batch 32": (_resnet(), torch.randn(32, 3, 32, 32)),
        "MLP 128-64-64-6": (_perceptron(), torch.randn(1024, 128)),
        "two transformer blocks": (ViT(Size(2, 128, 4, 63), 8).blocks, torch.randn(8, 64, 128)),
    }
    return {name: (model, x.requires_grad_()) for name, (model, x) in models.items()}


def _ways(model: nn.Sequential) -> dict[str, nn.Module]:
    ways: dict[str, nn.Module] = {}
    for name, settings in CONVERTED.items():
        if name == "few-bit 3" and all(isinstance(m, nn.ReLU) for m in _activations(model)):
            continue  # ReLU's output is kept by the next layer anyway
        ways[name] = copy.deepcopy(model)
        forward_save.convert(ways[name], **settings)
    ways["checkpointing"] = _Checkpointed(copy.deepcopy(model))
    ways["save_on_cpu"] = _Offloaded(copy.deepcopy(model))
    return {"exact": model, **ways}


def _activations(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.ReLU | nn.GELU)]


def _gradient(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    model(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _call(model: nn.Module, x: Tensor) -> Callable[[], object]:
    return lambda: _gradient(model, x)


def cases() -> Iterator[Case]:
    """Yield forward and backward of each model: ours, exact, checkpointing and offloading."""
    for name, (model, x) in _inputs().items():
        ways = _ways(model)
        contestants = {way: _call(ways[way], x) for way in IN_RUN}
        yield Case(name, x.numel(), contestants)


@dataclass(frozen=True)
class _Row:
    """One way on one model: bytes, error relative to the exact gradient, seconds."""

    way: str
    predicted: int
    measured: int
    error: float
    time_s: float


def _rows(model: nn.Sequential, x: Tensor, seconds: float) -> list[_Row]:
    ways = _ways(model)
    timing = measure(Case("", 1, {way: _call(m, x) for way, m in ways.items()}), seconds)
    exact = _gradient(model, x)
    rows = []
    for way, changed in ways.items():
        error = float((_gradient(changed, x) - exact).norm() / exact.norm())
        predicted, measured = (
            saved_bytes(changed, x, measure=is_run).total_bytes for is_run in (False, True)
        )
        rows.append(_Row(way, predicted, measured, error, timing.medians_s[way]))
    return rows


def main() -> None:
    """Print the table."""
    PARSER.parse_args()
    names = "bytes predicted", "measured", "times less", "error", "ms", "throughput"
    lines = [["model", "way", *names], ["---", "---", *["---:"] * len(names)]]
    for name, (model, x) in _inputs().items():
        rows = _rows(model, x, seconds=3.0)
        exact = rows[0]
        for row in rows:
            less = f"{exact.measured / row.measured:.2f}" if row.measured else "-"
            numbers = (
                *(f"{row.predicted:,}", f"{row.measured:,}", less, f"{row.error:.3g}"),
                *(f"{row.time_s * 1e3:.3g}", f"{exact.time_s / row.time_s:.2f}"),
            )
            lines.append([name, row.way, *numbers])
    print("\n".join("| " + " | ".join(cells) + " |" for cells in lines))
    print("\n" + "; ".join(f"{name} {value}" for name, value in machine.describe().items()))


if __name__ == "__main__":
    main()
