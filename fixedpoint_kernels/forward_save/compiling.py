"""Compile a model so that it keeps some share of its bytes: torch's ``activation_memory_budget``.

The budget belongs to the backend and not to torch's settings. So it holds whenever a model is
compiled: at its first step, for another shape, in a copy. Each model is compiled as a function with
code of its own: of equal code, Dynamo would give one model what it has of another, and count both
towards the same limit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fixedpoint_kernels._torch_private.compiling import (
    COMPILED_CALL,
    compiled_graph,
    function_of_call,
    uncompiled,
)
from fixedpoint_kernels.forward_save.choices import Choice

__all__ = [
    "Compiled",
    "Within",
    "compile_",
    "compiled_in_place",
    "is_compiled",
    "largest_within",
]

BACKEND = "inductor"
SEARCH = "aot_eager_decomp_partition"  # keeps what inductor does, and makes no code
GRID = 16  # steps of the budget
BUDGET = "_memory_budget"


@dataclass(frozen=True)
class Backend:
    """A backend of ``torch.compile`` that keeps a budget.

    Dynamo takes equal ones for the same, and others for others.

    Args:
        memory_budget: ``activation_memory_budget``, 0 to 1.
        name: Of the backend that makes the code.
    """

    memory_budget: float
    name: str

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        """Return the code of a graph."""
        return compiled_graph(self.name, self.memory_budget, graph, inputs)


class Compiled(nn.Module):
    """A model that runs compiled; the model itself stays as it is.

    Args:
        model: Any module.
        memory_budget: ``activation_memory_budget``, 0 to 1.
        backend: That makes the code; None: inductor.
    """

    def __init__(self, model: nn.Module, memory_budget: float, backend: str | None = None):
        super().__init__()
        self.model, self.memory_budget = model, memory_budget
        self._run = _compiled_call(model, memory_budget, backend)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the model."""
        return self._run(*args, **kwargs)


class Within(NamedTuple):
    """What was found within a limit of bytes.

    Args:
        made: The compiled model, None if nothing was found.
        memory_budget: Its ``activation_memory_budget``.
        kept_bytes: What it keeps; where nothing was found, what the least budget keeps.
    """

    made: Compiled | None
    memory_budget: float
    kept_bytes: int


def largest_within(
    model: nn.Module,
    kept_bytes: Callable[[nn.Module], int],
    most: int,
    backend: str | None = None,
) -> Within:
    """Compile a model with the largest budget that keeps no more than ``most`` bytes.

    The budget is searched for by halving, without making code, and then lowered until the code
    keeps no more.

    Args:
        model: Any module.
        kept_bytes: Runs a compiled model, and says what it keeps.
        most: Bytes.
        backend: That makes the code; None: inductor.
    """
    fits, too_large = -1, GRID + 1
    while too_large - fits > 1:
        step = (fits + too_large) // 2
        is_within = kept_bytes(Compiled(model, step / GRID, SEARCH)) <= most
        fits, too_large = (step, too_large) if is_within else (fits, step)
    kept = 0
    for step in range(max(fits, 0), -1, -1):
        made = Compiled(model, step / GRID, backend)
        kept = kept_bytes(made)
        if kept <= most:
            return Within(made, step / GRID, kept)
    return Within(None, 0.0, kept)


class InPlace(nn.Module):
    """First among the classes of a model that is compiled in place; copies are compiled, too."""

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # torch leaves what is compiled out of the state
        compile_(self)


def compiled_in_place(choice: Choice | None, memory_budget: float) -> Choice:
    """Return what becomes of a model that is to be compiled, by what becomes of it anyway.

    ``compile_`` then compiles it.
    """
    own = choice or Choice()
    attributes = {**(own.attributes or {}), BUDGET: memory_budget, COMPILED_CALL: None}
    return own._replace(bases=(InPlace, *own.bases), attributes=attributes)


def compile_(model: nn.Module) -> None:
    """Compile a model that is ``InPlace``, by its budget; code is made at the first step."""
    vars(model)[COMPILED_CALL] = _compiled_call(model, vars(model)[BUDGET])


def is_compiled(model: nn.Module) -> bool:
    """Whether a model was compiled, in place or by ``torch.compile``."""
    return vars(model).get(COMPILED_CALL) is not None or uncompiled(model) is not model


def _compiled_call(
    model: nn.Module, memory_budget: float, backend: str | None = None
) -> Callable[..., object]:
    """Return a compiled function that calls a model; a graph that breaks is an error."""
    made = Backend(memory_budget, backend or BACKEND)
    return torch.compile(function_of_call(model), backend=made, fullgraph=True)
