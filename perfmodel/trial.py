"""One training step in a process of its own: ``python -m perfmodel.trial JSON``; see ``batch``."""

import json
import resource
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import sample
from fixedpoint_kernels.forward_save.checkpoint import blocks
from fixedpoint_kernels.forward_save.peak import peak_of
from perfmodel.batch import Found, Trial
from perfmodel.model_report import load_model

__all__ = ["attempt", "checkpointed", "convert"]

WARM = 2  # samples: batch norm needs two


def main() -> None:
    """Print what one step took."""
    trial = Trial(*json.loads(sys.argv[1]))
    print(json.dumps(attempt(trial)._asdict()))


def attempt(trial: Trial) -> Found:
    """Train a step on two samples, then one on the whole batch; then count what such a step takes.

    Raises:
        ValueError: The model or the way is unknown.
    """
    torch.set_num_threads(trial.threads)
    torch.manual_seed(0)
    model = load_model(trial.model, "cpu").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    convert(model, trial.way)
    _step(model, optimizer, _batch(trial, WARM))
    base, start = most_memory(), time.perf_counter()
    _step(model, optimizer, _batch(trial, trial.batch))
    step_s, peak = time.perf_counter() - start, most_memory()
    kept = counted = 0
    if trial.is_counted:
        given = _batch(trial, trial.batch)
        counted = peak_of(partial(_step, model, optimizer, given), torch.device("cpu"))
        kept = sample.observe(model, given).size_bytes
    return Found(trial.way, trial.batch, peak, kept, counted, base, step_s)


def convert(model: nn.Module, way: str) -> None:
    """Make a model keep less.

    Raises:
        ValueError: There is no such way, and no such file, or its plan compiles the model.
    """
    if way == "exact":
        return
    if way == "checkpointing":
        for name in checkpointed(model):
            block = model.get_submodule(name)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    elif way == "few-bit":
        forward_save.convert(model, few_bit=3)
    elif way == "few-bit+division":
        forward_save.convert(model, few_bit=3, division={"block": 8, "bits": 2})
    else:
        try:
            plan = forward_save.Plan.load(way)
        except OSError as error:
            raise ValueError(f"a way must be known, or the file of a plan, got {way!r}") from error
        if plan.memory_budget is not None:
            raise ValueError(
                f"the plan {way!r} compiles the model: the memory that the compiler takes would "
                "count as that of a step"
            )
        forward_save.convert(model, plan=plan)


def checkpointed(model: nn.Module) -> list[str]:
    """Return the blocks that one would checkpoint: the outermost of which there are several.

    Raises:
        ValueError: There are none.
    """
    kinds = {name: type(model.get_submodule(name)) for name in blocks(model)}
    several = [
        name
        for name, kind in kinds.items()
        if kind is not nn.Sequential and [*kinds.values()].count(kind) > 1
    ]
    several = several or [name for name, kind in kinds.items() if kind is nn.Sequential]
    outer = [n for n in several if not any(n.startswith(f"{other}.") for other in several)]
    if not outer:
        raise ValueError("checkpointing needs blocks: modules with layers inside")
    return outer


def most_memory() -> int:
    """Return the most bytes that this process has had in memory."""
    try:  # what the system says of resources includes the process that started this one
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _batch(trial: Trial, count: int) -> Tensor:
    dtype = getattr(torch, trial.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be one of torch's, got {trial.dtype!r}")
    shape = (count, *trial.shape)
    return (
        torch.randn(shape, dtype=dtype)
        if dtype.is_floating_point
        else torch.ones(shape, dtype=dtype)
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    output = model(batch)
    own = getattr(output, "last_hidden_state", None)
    found = sample.tensors_in(output if own is None else own)
    sum((t.float().mean() for t in found if t.requires_grad), torch.zeros(())).backward()
    optimizer.step()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
