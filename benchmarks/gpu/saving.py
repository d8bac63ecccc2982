"""Keeping less for backward: few-bit activations and DIVISION beside torch, whole models."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.gpu.clock import compare, peak_bytes
from benchmarks.gpu.sizes import Sizes
from benchmarks.ops import division as plain_division
from fixedpoint_kernels import division, few_bit, forward_save
from perfmodel.zoo import MODELS
from perfmodel.zoo.transformer import Size, ViT

__all__ = ["models", "operators"]

Call = Callable[[], object]
CONVERTED: dict[str, dict[str, Any]] = {
    "few-bit 3": {"few_bit": 3},
    "DIVISION 8, 2": {"division": {"block": 8, "bits": 2}},
    "both": {"few_bit": 3, "division": {"block": 8, "bits": 2}},
}


def operators(device: torch.device, sizes: Sizes) -> list[dict[str, object]]:
    """Return forward and backward of activations, and DIVISION there and back, beside torch."""
    rows = 64 if sizes.elements >= 64 * 1024 else 1
    x = torch.randn(sizes.elements // 1024 // rows, rows, 32, 32, device=device)
    grad = torch.randn_like(x)
    found: list[dict[str, object]] = []
    for name in ("relu", "gelu", "silu", "tanh"):
        function = getattr(F, name)
        for bits in (1,) if name == "relu" else (1, 3):
            ours = getattr(few_bit, name)
            calls = {
                "ours": _there_and_back(lambda x, f=ours, b=bits: f(x, bits=b), x, grad),
                "torch": _there_and_back(function, x, grad),
            }
            found.append(_beside(f"{name}, {bits} bits", calls, device, sizes))
    calls: dict[str, Call] = {
        "ours": lambda: division.decompress(division.compress(x)),
        "torch": lambda: plain_division._decompress(plain_division._compress(x), x),
    }
    found.append(_beside("DIVISION, 2 bits, there and back", calls, device, sizes))
    return found


def _there_and_back(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Call:
    x = x.detach().requires_grad_()
    return lambda: torch.autograd.grad(function(x), x, grad)


def _beside(
    name: str, calls: dict[str, Call], device: torch.device, sizes: Sizes
) -> dict[str, object]:
    seconds = compare(calls, device, sizes.turns, 3)
    peaks = {who: peak_bytes(call, device) for who, call in calls.items()}
    return {
        "operator": name,
        "time over torch's": seconds["ours"] / seconds["torch"],
        **{f"{who}, ms": s * 1e3 for who, s in seconds.items()},
        **{f"{who}, peak MB": p and p / 1e6 for who, p in peaks.items()},
    }


def models(device: torch.device, sizes: Sizes) -> list[dict[str, object]]:
    """Return time and peak memory of forward and backward of whole models, each way."""
    torch.manual_seed(0)
    tokens, width = sizes.tokens
    side = 32 if sizes.batch > 8 else 8
    built: dict[str, tuple[nn.Sequential, Tensor]] = {
        "ResNet-18/CIFAR": (_resnet(), torch.randn(sizes.batch, 3, side, side)),
        "four transformer blocks": (
            ViT(Size(4, width, 8, tokens - 1), 8).blocks,
            torch.randn(max(1, sizes.batch // 8), tokens, width),
        ),
    }
    found: list[dict[str, object]] = []
    for name, (model, x) in built.items():
        found += _ways(name, model.to(device), x.to(device).requires_grad_(), sizes)
    return found


def _resnet() -> Any:
    return MODELS["ResNet-18/CIFAR"].build(nn.ReLU)


def _ways(name: str, model: nn.Sequential, x: Tensor, sizes: Sizes) -> list[dict[str, object]]:
    calls = {"exact": _gradient(model, model, x)}
    for way, settings in CONVERTED.items():
        changed = copy.deepcopy(model)
        forward_save.convert(changed, **settings)
        calls[way] = _gradient(changed, changed, x)
    calls["checkpointing, 2 segments"] = _gradient(
        model, lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False), x
    )
    calls["offloading"] = _gradient(model, lambda x: _offloaded(model, x), x)
    seconds = compare(calls, x.device, sizes.turns)
    peaks = {way: peak_bytes(call, x.device) for way, call in calls.items()}
    exact = peaks["exact"]
    return [
        {
            "model": name,
            "way": way,
            "throughput over exact": seconds["exact"] / seconds[way],
            "peak over exact": peak / exact if peak and exact else None,
            "ms": seconds[way] * 1e3,
            "peak, MB": peak and peak / 1e6,
        }
        for way, peak in peaks.items()
    ]


def _offloaded(model: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=x.is_cuda):
        return model(x)


def _gradient(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    def call() -> None:
        model.zero_grad()
        x.grad = None
        forward(x).square().mean().backward()

    return call
