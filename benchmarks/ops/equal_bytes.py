"""A plan beside other ways to keep as little for backward: time of a step at equal bytes, ``--op equal_bytes``.

A ResNet-18 on 32 images of 32 px, and two layers of BERT on 4 texts of 128 tokens, without dropout. Two budgets for each:
what checkpointing of each block keeps, and half of what the model keeps exactly. The rivals: checkpointing; and
``torch.compile`` with the largest ``activation_memory_budget`` that keeps no more. A plan may choose few bits, DIVISION
and recomputation; it runs plain, and compiled. One more may also choose to compile. Bytes are counted in the same
way for all: storages that autograd keeps, each once, parameters and buffers left out. The ResNet lies channels last
for all: the compiler wants it so, and of a model that lies otherwise it keeps a copy of each weight between the
passes. Steps without an optimizer; medians of turns, each in an order of its own, on ``--threads``. ``torch.compile``
needs a C++ compiler. What is known of a model and a budget is written to ``results/equal_bytes.json``, and not
measured again while it is there.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.ops import forward_save_steps
from benchmarks.ops.forward_save_steps import TURNS, medians_s, step_s
from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import compiling
from perfmodel import trial

TESTS = "tests/benchmarks/test_equal_bytes.py"
RESULTS = Path(__file__).parents[1] / "results/equal_bytes.json"


def resnet18() -> tuple[nn.Module, Tensor]:
    """Return a ResNet-18 and a batch, channels last."""
    model, batch = forward_save_steps.resnet18()
    last = torch.channels_last
    return model.to(memory_format=last), batch.contiguous(memory_format=last)  # pyright: ignore[reportCallIssue]


MODELS = {
    "ResNet-18, 32 px, batch 32, channels last": resnet18,
    "BERT, 2 layers, 4 x 128": forward_save_steps.bert,
}


class Row(NamedTuple):
    """One way: bytes kept, seconds of a step, and the error of the gradient."""

    way: str
    kept_bytes: int
    step_s: float
    error: float


def kept_bytes(model: nn.Module, batch: Tensor) -> int:
    """Return the bytes that autograd keeps between the passes."""
    own = [*model.parameters(), *model.buffers()]
    known = {x.untyped_storage().data_ptr() for x in own}
    kept: dict[int, Tensor] = {}  # tensors, so that no memory is used twice

    def pack(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x.detach())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(batch)
    sizes = {at: x.untyped_storage().nbytes() for at, x in kept.items() if at not in known}
    del out
    return sum(sizes.values())


def compiled_within(model: nn.Module, batch: Tensor, most: int, backend: str) -> nn.Module | None:
    """Return a compiled copy with the largest budget that keeps ``most`` bytes, or None."""

    def kept(made: nn.Module) -> int:
        step_s(made, batch)  # compiles it
        return kept_bytes(made, batch)

    return compiling.largest_within(copy.deepcopy(model), kept, most, backend).made


def ways(
    model: nn.Module, batch: Tensor, most: int, backend: str = "inductor"
) -> dict[str, nn.Module]:
    """Return a copy of a model for each way; those of one budget keep ``most`` bytes."""
    checkpointed = copy.deepcopy(model)
    trial.convert(checkpointed, "checkpointing")
    planned = by_plan(model, batch, most, forward_save.CHOICES)
    found = {
        "exact": model,
        "checkpointing of each block": checkpointed,
        "plan": planned,
        "compiled": compiling.Compiled(copy.deepcopy(model), 1.0, backend),
        "compiled, activation_memory_budget": compiled_within(model, batch, most, backend),
        "compiled, plan": compiling.Compiled(copy.deepcopy(planned), 1.0, backend),
        "plan, which may compile": by_plan(model, batch, most, (*forward_save.CHOICES, "compile")),
    }
    return {way: made for way, made in found.items() if made is not None}


def by_plan(model: nn.Module, batch: Tensor, most: int, choices: Sequence[str]) -> nn.Module:
    """Return a copy that is converted by a plan of these choices."""
    made = copy.deepcopy(model)
    plan = forward_save.plan(made, batch, budget_bytes=most, choices=choices)
    forward_save.convert(made, plan=plan)
    return made


def rows(made: dict[str, nn.Module], batch: Tensor, turns: int = TURNS) -> list[Row]:
    """Return what each way takes; the first is what gradients are compared with."""
    medians = medians_s(made, batch, turns)
    want = gradient(made["exact"], batch)
    return [
        Row(
            way,
            kept_bytes(m, batch),
            medians[way],
            float((gradient(m, batch) - want).norm() / want.norm()),
        )
        for way, m in made.items()
    ]


def gradient(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the gradient of a fixed random sum of the outputs; 0 where a parameter has no part.

    A compiled model has such zeros for parameters of outputs that the sum does not read.
    """
    out = model(batch)
    out = getattr(out, "last_hidden_state", out)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = (out * noise).sum()
    found = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def table() -> Iterator[str]:
    """Yield the lines of the table: a budget of a model when it is known."""
    kept = "kept" if machine.keep_freed_memory() else "as malloc likes"
    for name, make in MODELS.items():
        for budget in ("checkpointing's bytes", "half of the bytes"):
            found = known_results().get(f"{name}, {budget}") or measured(make, budget, kept)
            keep(f"{name}, {budget}", found)
            own = [Row(**row) for row in found["rows"]]
            yield f"| {name}, {budget}: {found['most_bytes'] / 1e6:.1f} MB | kept, MB | step over exact | error |"
            yield "|---|---:|---:|---:|"
            for row in own:
                ratio = row.step_s / own[0].step_s
                yield f"| {row.way} | {row.kept_bytes / 1e6:.1f} | {ratio:.2f} | {row.error:.2g} |"
            yield ""
    yield f"{torch.get_num_threads()} threads; freed memory: {kept}."


def measured(
    make: Callable[[], tuple[nn.Module, Tensor]], budget: str, kept: str
) -> dict[str, Any]:
    """Return the machine, the budget in bytes, and the rows of one model and budget."""
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    if budget == "half of the bytes":
        most = kept_bytes(model, batch) // 2
    else:
        checkpointed = copy.deepcopy(model)
        trial.convert(checkpointed, "checkpointing")
        most = kept_bytes(checkpointed, batch)
    before = {**machine.describe(), "freed memory": kept}
    found = rows(ways(model, batch, most), batch)
    return {"machine": before, "most_bytes": most, "rows": [row._asdict() for row in found]}


def known_results() -> dict[str, Any]:
    """Return what is written, by model and budget."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def keep(name: str, found: dict[str, Any]) -> None:
    """Write what was found beside what is known."""
    RESULTS.write_text(json.dumps({**known_results(), name: found}, indent=2) + "\n")
