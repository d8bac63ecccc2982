"""The activations that have a name: their functions, exact tables, and the tables shipped."""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from torch import Tensor

from fixedpoint_kernels.few_bit.activations import ENTRIES, OTHER_NAMES, Parameters
from fixedpoint_kernels.few_bit.integrals import Function, Weight
from fixedpoint_kernels.few_bit.solver import checked_bits, solve_by_value, solve_function
from fixedpoint_kernels.few_bit.table import Table

FILE = Path(__file__).with_name("tables.npz")
SHIPPED_WEIGHTS: tuple[Weight, ...] = ("uniform", "normal")
BITS = range(1, 9)

NAMES = *sorted(ENTRIES), *OTHER_NAMES
SHIPPED = *(name for name, entry in ENTRIES.items() if entry.is_shipped), "gelu_tanh"


def resolve(name: str) -> tuple[str, Parameters]:
    """Return a name of torch's and the parameters that ``name`` stands for.

    Raises:
        ValueError: There is no such activation.
    """
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    if name not in ENTRIES:
        raise ValueError(f"the activation must be one of {', '.join(NAMES)}, got {name!r}")
    return name, ENTRIES[name].defaults


def function_of(name: str, parameters: Parameters) -> Function:
    """Return an activation of one argument."""
    function = ENTRIES[name].function
    return partial(_with_parameters, function, parameters) if parameters else function


def _with_parameters(function: Callable[..., Tensor], parameters: Parameters, x: Tensor) -> Tensor:
    return function(x, *parameters)


@lru_cache(maxsize=256, typed=True)  # True is no 1
def table_of(name: str, parameters: Parameters, bits: int, weight: Weight) -> Table:
    """Return the exact table, the one that ships, or else solve for it.

    Raises:
        TypeError: ``bits`` is no integer.
        ValueError: ``bits`` is not 1 to 8.
    """
    checked_bits(bits)
    entry = ENTRIES[name]
    if entry.exact:
        return entry.exact(*parameters)
    is_tanh = (name, parameters) == OTHER_NAMES["gelu_tanh"]
    if (is_tanh or parameters == entry.defaults) and weight in SHIPPED_WEIGHTS:
        shipped = "gelu_tanh" if is_tanh else entry.same_table or name
        if shipped in SHIPPED:
            return _shipped()[shipped, weight, bits]
    return solve_function(function_of(name, parameters), bits, weight=weight)


@lru_cache(maxsize=1)
def _shipped() -> dict[tuple[str, Weight, int], Table]:
    """Read the file: all tables one behind the other, with the sizes of each."""
    with np.load(FILE) as data:
        borders, codes, levels, losses = (
            data[key] for key in ("borders", "codes", "levels", "losses")
        )
        ends = data["sizes"].cumsum(0)
    tables = {}
    for i, (name, weight, bits) in enumerate(_order()):
        (b, l), (b0, l0) = ends[i], ends[i - 1] if i else (0, 0)
        pieces = codes[b0 + i : b + i + 1]  # each table has one piece more than borders
        tables[name, weight, bits] = Table(borders[b0:b], pieces, levels[l0:l], float(losses[i]))
    return tables


def _order() -> list[tuple[str, Weight, int]]:
    return [(n, w, b) for n in SHIPPED for w in SHIPPED_WEIGHTS for b in BITS]


def solve_shipped(name: str, weight: Weight) -> list[Table]:
    """Solve for the tables of a function that ship, of 1 to 8 bits."""
    return solve_by_value(function_of(*resolve(name)), BITS, weight)


def write_shipped() -> None:
    """Solve for all tables that ship, and write the file."""
    tables = [
        t for name in SHIPPED for weight in SHIPPED_WEIGHTS for t in solve_shipped(name, weight)
    ]
    np.savez_compressed(
        FILE,
        borders=np.concatenate([t.borders for t in tables]),
        codes=np.concatenate([t.codes for t in tables]),
        levels=np.concatenate([t.levels for t in tables]),
        losses=np.array([t.loss for t in tables]),
        sizes=np.array([(len(t.borders), len(t.levels)) for t in tables], np.int32),
    )
