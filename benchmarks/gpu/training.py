"""Training steps of ResNet20 and AlexNet: float32, MSGD, and rounding call by call in torch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import marvin
from benchmarks.gpu.clock import compare, host_waits, launches, peak_bytes, repeated
from benchmarks.gpu.sizes import Sizes
from benchmarks.ops import int8_training
from benchmarks.steps import Step, step_in_floats, training_step
from fixedpoint_kernels import FixedPoint
from train.alexnet import alexnet
from train.resnet20 import resnet20

__all__ = ["models", "rows"]

FMT = FixedPoint(16, 10)
ROUNDED = nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d, nn.Linear


def models(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, nn.Module]]:
    """Yield ResNet20 and AlexNet for images of 32x32, initialised as the trainers do."""
    built = ("ResNet20", resnet20(width=sizes.width)), ("AlexNet", alexnet(width=4 * sizes.width))
    for seed, (name, model) in enumerate(built):
        marvin.tnvs_(model, generator=torch.Generator().manual_seed(seed))
        yield name, model.to(device)


def rows(device: torch.device, sizes: Sizes) -> list[dict[str, object]]:
    """Return each way of training, with its throughput over that of float32."""
    found: list[dict[str, object]] = []
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(sizes.batch, 3, 32, 32, generator=generator, device=device)
    y = torch.randint(10, (sizes.batch,), generator=generator, device=device)
    for number, (name, _) in enumerate(models(device, sizes)):
        # each way has a model of its own
        steps = {
            way: make(list(models(device, sizes))[number][1], x, y) for way, make in WAYS.items()
        }
        found += _rows(name, steps, device, sizes)
    return found


def _rows(
    name: str, steps: dict[str, Step], device: torch.device, sizes: Sizes
) -> list[dict[str, object]]:
    seconds = compare(steps, device, sizes.turns, sizes.steps)
    return [
        {
            "model": name,
            "training": way,
            "throughput over float32": seconds["float32"] / seconds[way],
            "images/s": sizes.batch / seconds[way],
            "ms a step": seconds[way] * 1e3,
            "launches": launches(step, device),
            f"host waits in {sizes.steps}": host_waits(repeated(step, sizes.steps), device),
            "peak, MB": _megabytes(peak_bytes(step, device)),
        }
        for way, step in steps.items()
    ]


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6


def _float32(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return training_step(model, x, y, sgd.zero_grad, lambda loss: sgd.step())


def _bfloat16(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return what is fastest otherwise."""
    return step_in_floats(lambda: model, x, y, torch.bfloat16, torch.channels_last)


def _budget(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return int8_training.fixed_point(lambda: model, x, y, integer=False)


def _integers(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    return int8_training.fixed_point(lambda: model, x, y, integer=True)


def _weights(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.01, buffer_bits=8)
    return training_step(model, x, y, optimizer.zero_grad, lambda loss: optimizer.step(loss=loss))


def _weights_and_activations(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.01, buffer_bits=8)
    marvin.quantize_activations(model, optimizer)
    return training_step(model, x, y, optimizer.zero_grad, lambda loss: optimizer.step(loss=loss))


def _call_by_call(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a step as QPyTorch's quantisers make it: rounding is a call a tensor, in torch."""
    for module in model.modules():
        if isinstance(module, ROUNDED):
            module.register_forward_pre_hook(lambda _m, args: (_Rounded.apply(args[0]),))
            module.register_forward_hook(lambda _m, _args, output: _Rounded.apply(output))
    weights = list(model.parameters())
    masters = [p.detach().clone() for p in weights]
    sgd = torch.optim.SGD(masters, lr=0.01, momentum=0.9, weight_decay=1e-4)

    @torch.no_grad()
    def update(loss: Tensor) -> None:
        for master, p in zip(masters, weights, strict=True):
            master.grad = p.grad
        sgd.step()
        for master, p in zip(masters, weights, strict=True):
            p.copy_(_round(master))

    return training_step(model, x, y, model.zero_grad, update)


def _round(x: Tensor) -> Tensor:
    codes = torch.floor(x * FMT.scale + torch.rand_like(x))
    return codes.clamp_(FMT.min_code, FMT.max_code).mul_(FMT.lsb)


class _Rounded(torch.autograd.Function):
    """Rounds forward; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _round(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


WAYS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "float32": _float32,
    "bfloat16 autocast, channels last": _bfloat16,
    "loss budget, simulated": _budget,
    "loss budget, on integer units": _integers,
    "MSGD, weights": _weights,
    "MSGD, weights and activations": _weights_and_activations,
    "rounding call by call": _call_by_call,
}
