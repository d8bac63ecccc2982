"""Optimizer states in few bytes: bytes a parameter, error of 100 steps, time of one.

    python -m benchmarks.run --op optimizer_state --threads 1

One matrix of 1024 by 1024 gets the same gradients from all: a direction for each element, plus noise three
times as large, both of a size of its own, log-normal with a spread of 1 or, harder, 2. The error is the distance of the weights
(masters) from where torch's float32 optimizer brings them, over the length of its way. Bytes count
masters and moments; where an optimizer has no masters, float32 weights stand for them. Times are the smallest of
interleaved steps, of the thread's own clock. torchao and bitsandbytes take part where they are
installed.

The second table has steps of whole networks, with random gradients: medians, of the thread's clock too. Gradients
are copied before each step, as backward writes them.
"""

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import marvin
from benchmarks.networks import resnet18
from benchmarks.states import Transformer
from marvin.compact import master_of
from train.resnet20 import resnet20

TESTS = "tests/marvin/test_compact.py"
SHAPE = 1024, 1024
STEPS, TIMED = 100, 15
SPREADS = 1.0, 2.0
LR = {"SGD": 0.1, "AdamW": 1e-3}
NETWORK_STEPS = 40
NETWORKS = {"ResNet20": resnet20, "transformer of 4 blocks": Transformer, "ResNet-18": resnet18}
OPTIMIZERS: dict[str, Callable[[list[Tensor], bool], marvin.Quantized]] = {
    "SGD": lambda params, compact: _quantized("SGD", compact, 4)(params),
    "AdamW": lambda params, compact: _quantized("AdamW", compact, 4)(params),
    "MSGD": lambda params, compact: marvin.MSGD(
        params, lr=1e-3, momentum=0.9, compact_state=compact
    ),
}


class Row(NamedTuple):
    """One optimizer: its state's bytes a parameter, errors of its way, ns a parameter and step."""

    name: str
    size_bytes: float
    errors: tuple[float, ...]
    time_ns: float


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| optimizer | bytes a parameter | error, spread 1 | spread 2 | ns a parameter and step |"
    yield "|---|---:|---:|---:|---:|"
    for family in LR:
        for easy, hard in zip(*(rows(family, spread) for spread in SPREADS), strict=True):
            errors = " | ".join(f"{x:.4f}" for x in (*easy.errors, *hard.errors))
            time_ns = min(easy.time_ns, hard.time_ns)
            yield f"| {easy.name} | {easy.size_bytes:.2f} | {errors} | {time_ns:.2f} |"
    missing = [name for name in ("torchao", "bitsandbytes") if not importlib.util.find_spec(name)]
    if missing:
        yield f"\nnot installed: {', '.join(missing)}"
    yield "\n| network | parameters | optimizer | float32 state, ms a step | compact, ms | compact over float32 |"
    yield "|---|---:|---|---:|---:|---:|"
    for name, build in NETWORKS.items():
        for family in OPTIMIZERS:
            count, plain, compact = steps(build, family)
            yield (
                f"| {name} | {count:,} | {family} | {plain * 1e3:.2f} | {compact * 1e3:.2f} "
                f"| {compact / plain:.2f} |"
            )


def steps(build: Callable[[], nn.Module], family: str) -> tuple[int, float, float]:
    """Return parameters of a network, and seconds of a step with float32 and with compact states."""
    made = []
    for compact in (False, True):
        params: list[Tensor] = [*build().parameters()]
        made.append((params, OPTIMIZERS[family](params, compact)))
    grads, times = [torch.randn_like(p) * 1e-2 for p in made[0][0]], ([], [])
    for _ in range(NETWORK_STEPS):
        for (params, optimizer), own in zip(made, times, strict=True):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.clone()
            began = time.thread_time()
            optimizer.step(loss=1.0)
            own.append(time.thread_time() - began)
    plain, compact = (median(own[NETWORK_STEPS // 10 :]) for own in times)
    return sum(grad.numel() for grad in grads), plain, compact


def rows(family: str, spread: float) -> list[Row]:
    """Return the rows of one optimizer and spread: torch's in float32 is the first."""
    makers = {f"torch {family}, float32": _torch(family)}
    for compact in (False, True):
        name = f"Quantized({family}), {'compact' if compact else 'float32'}"
        makers[name] = _quantized(family, compact)
    if family == "AdamW":
        makers |= dict(_rivals())
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.05
    made = {}
    for name, make in makers.items():
        p = nn.Parameter(start.clone())
        made[name] = p, make([p])
    best = dict.fromkeys(made, math.inf)
    for step in range(STEPS):
        grad = _gradient(step, spread)
        for name, (p, optimizer) in made.items():
            p.grad = grad.clone()
            began = time.thread_time()
            optimizer.step()
            if step >= STEPS - TIMED:
                best[name] = min(best[name], time.thread_time() - began)
    ways = {name: _weights(p, optimizer) - start for name, (p, optimizer) in made.items()}
    want = next(iter(ways.values()))
    n = start.numel()
    return [
        Row(name, _bytes(p, optimizer) / n, (_error(ways[name], want),), best[name] / n * 1e9)
        for name, (p, optimizer) in made.items()
    ]


def _gradient(step: int, spread: float) -> Tensor:
    g = torch.Generator().manual_seed(1)
    size = torch.randn(SHAPE, generator=g).mul_(spread).exp_() * 1e-3
    direction = torch.randn(SHAPE, generator=g)
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + step))
    return size * (direction + 3 * noise)


def _error(way: Tensor, want: Tensor) -> float:
    return float((way - want).norm() / want.norm())


def _torch(family: str) -> Callable[[list[Tensor]], Optimizer]:
    if family == "SGD":
        return lambda ps: torch.optim.SGD(ps, lr=LR[family], momentum=0.9)
    return lambda ps: torch.optim.AdamW(ps, lr=LR[family])


def _quantized(
    family: str, compact: bool, fl: int = 8
) -> Callable[[list[Tensor]], marvin.Quantized]:
    policy = marvin.FixedPolicy(8, fl)
    return lambda ps: marvin.Quantized(_torch(family)(ps), policy, compact_state=compact)


def _rivals() -> Iterator[tuple[str, Callable[[list[Tensor]], Optimizer]]]:
    """Yield 8-bit AdamW of other packages that are installed."""
    for package, module in (("torchao", "torchao.optim"), ("bitsandbytes", "bitsandbytes.optim")):
        if importlib.util.find_spec(package):
            kind = importlib.import_module(module).AdamW8bit
            yield f"{package} AdamW8bit", lambda ps, kind=kind: kind(ps, lr=LR["AdamW"])


def _weights(p: Tensor, optimizer: Optimizer) -> Tensor:
    is_ours = isinstance(optimizer, marvin.Quantized)
    return master_of(optimizer.state[p]) if is_ours else p.detach()


def _bytes(p: Tensor, optimizer: Optimizer) -> int:
    if isinstance(optimizer, marvin.Quantized):
        return sum(optimizer.state_bytes().values())
    return p.nbytes + sum(_size(x) for x in optimizer.state[p].values() if isinstance(x, Tensor))


def _size(x: Tensor) -> int:
    """Return the bytes of a tensor, or of those that one of torchao's is made of."""
    names = ["codes", "scale"] if hasattr(x, "codes") else []
    return sum(getattr(x, name).nbytes for name in names) if names else x.nbytes
