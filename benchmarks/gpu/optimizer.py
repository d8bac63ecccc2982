"""A step of MSGD beside SGD's on ResNet20 and AlexNet: time, launches, waits of the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import marvin
from benchmarks.gpu.clock import compare, host_waits, launches, repeated
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.training import models

__all__ = ["rows"]

LONG = 10**6, 10**6  # windows that never end
SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}


def rows(device: torch.device, sizes: Sizes) -> list[dict[str, object]]:
    """Return each way of a step; MSGD between switches, and with those that fall in its steps."""
    return [row for name, model in models(device, sizes) for row in _rows(name, model, sizes)]


def _rows(name: str, model: nn.Module, sizes: Sizes) -> list[dict[str, object]]:
    device = next(model.parameters()).device
    steps = _steps(model, device)
    seconds = compare(steps, device, sizes.turns, sizes.steps)
    fastest = min(s for way, s in seconds.items() if way.startswith("SGD"))
    return [
        {
            "model": name,
            "step": way,
            "over the fastest SGD": seconds[way] / fastest,
            "us": seconds[way] * 1e6,
            "launches": launches(step, device),
            f"host waits in {sizes.steps}": host_waits(repeated(step, sizes.steps), device),
        }
        for way, step in steps.items()
    ]


def _steps(model: nn.Module, device: torch.device) -> dict[str, Callable[[], object]]:
    steps: dict[str, Callable[[], object]] = {}
    ways: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}}
    if device.type == "cuda":
        ways["fused"] = {"fused": True}
    for way, keywords in ways.items():
        steps[f"SGD({way})"] = torch.optim.SGD(_parameters(model), **SGD, **keywords).step
    windows: dict[str, dict[str, Any]] = {
        "between switches": {"lookback": LONG},
        "with switches": {},
    }
    for way, keywords in windows.items():
        optimizer = marvin.MSGD(_parameters(model), buffer_bits=8, **keywords)
        steps[f"MSGD, {way}"] = lambda optimizer=optimizer: optimizer.step(loss=1.0)
    return steps


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return copies of a model's parameters, with gradients."""
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for p in copies:
        p.grad = torch.randn_like(p)
    return copies
