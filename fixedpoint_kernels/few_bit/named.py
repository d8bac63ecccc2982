"""The activations that have a name: their functions, exact tables, and the tables shipped."""

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fixedpoint_kernels.few_bit.integrals import Function, Weight
from fixedpoint_kernels.few_bit.solver import checked_bits, solve_by_value, solve_function
from fixedpoint_kernels.few_bit.table import Table, number

FILE = Path(__file__).with_name("tables.npz")
SHIPPED_WEIGHTS = "uniform", "normal"
BITS = range(1, 9)

# Function and default parameters, in the order of torch's signatures.
_CONTINUOUS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "celu": (F.celu, (1.0,)),
    "elu": (F.elu, (1.0,)),
    "gelu": (lambda x, approximate: F.gelu(x, approximate=approximate), ("none",)),
    "hardswish": (F.hardswish, ()),
    "logsigmoid": (F.logsigmoid, ()),
    "mish": (F.mish, ()),
    "selu": (F.selu, ()),
    "sigmoid": (torch.sigmoid, ()),
    "silu": (F.silu, ()),
    "softplus": (F.softplus, (1.0, 20.0)),
    "softsign": (F.softsign, ()),
    "tanh": (torch.tanh, ()),
    "tanhshrink": (F.tanhshrink, ()),
}
_STEPWISE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hardshrink": (F.hardshrink, (0.5,)),
    "hardsigmoid": (F.hardsigmoid, ()),
    "hardtanh": (F.hardtanh, (-1.0, 1.0)),
    "leaky_relu": (F.leaky_relu, (0.01,)),
    "relu": (F.relu, ()),
    "relu6": (F.relu6, ()),
    "softshrink": (F.softshrink, (0.5,)),
    "threshold": (F.threshold, (0.0, 0.0)),
}
_ALL = {**_CONTINUOUS, **_STEPWISE}
_OTHER_NAMES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "gelu_tanh": ("gelu", ("tanh",)),
    "swish": ("silu", ()),
}
_SAME_TABLE = {"celu": "elu"}  # with their default parameters
NAMES = *sorted(_ALL), *_OTHER_NAMES
SHIPPED = *(name for name in _CONTINUOUS if name not in _SAME_TABLE), "gelu_tanh"


def resolve(name: str) -> tuple[str, tuple[Any, ...]]:
    """Return a name of torch's and the parameters that ``name`` stands for.

    Raises:
        ValueError: There is no such activation.
    """
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    if name not in _ALL:
        raise ValueError(f"the activation must be one of {', '.join(NAMES)}, got {name!r}")
    return name, _ALL[name][1]


def function_of(name: str, parameters: tuple[Any, ...]) -> Function:
    """Return an activation of one argument."""
    function = _ALL[name][0]
    return partial(_with_parameters, function, parameters) if parameters else function


def _with_parameters(function: Any, parameters: tuple[Any, ...], x: Tensor) -> Tensor:
    return function(x, *parameters)


@lru_cache(maxsize=256)
def table_of(name: str, parameters: tuple[Any, ...], bits: int, weight: Weight) -> Table:
    """Return the exact table, the one that ships, or else solve for it."""
    checked_bits(bits)
    if name in _STEPWISE:
        return _exact(name, parameters)
    alias = (
        "gelu_tanh" if (name, parameters) == ("gelu", ("tanh",)) else _SAME_TABLE.get(name, name)
    )
    is_default = alias == "gelu_tanh" or parameters == _ALL[name][1]
    if is_default and weight in SHIPPED_WEIGHTS:
        return _shipped()[alias, weight, bits]
    return solve_function(function_of(name, parameters), bits, weight=weight)


def _exact(name: str, parameters: tuple[Any, ...]) -> Table:
    """Return the two levels of a stepwise activation, with torch's choice at the steps."""
    if name in ("hardshrink", "softshrink"):  # 0 from -lambd to lambd, both included
        return number(_float32(_below(-parameters[0]), parameters[0]), _ranks(1, 0, 1), _levels())
    if name in ("hardtanh", "relu6", "hardsigmoid"):  # 1 between the ends, both excluded
        low, high = {"relu6": (0, 6), "hardsigmoid": (-3, 3)}.get(name, parameters)
        borders = _float32(low, max(_below(high), np.float32(low)))
        return number(borders, _ranks(0, 1, 0), _levels(1 / 6 if name == "hardsigmoid" else 1.0))
    step = parameters[0] if name == "threshold" else 0.0
    low = parameters[0] if name == "leaky_relu" else 0.0
    return number(_float32(step), _ranks(0, 1), np.array([low, 1.0]))


def _below(x: float) -> np.float32:
    return np.nextafter(np.float32(x), np.float32(-np.inf))


def _float32(*borders: Any) -> np.ndarray:
    return np.array(borders, np.float32)


def _ranks(*ranks: int) -> np.ndarray:
    return np.array(ranks)


def _levels(high: float = 1.0) -> np.ndarray:
    return np.array([0.0, high])


@lru_cache(maxsize=1)
def _shipped() -> dict[tuple[Any, ...], Table]:
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


def _order() -> list[tuple[str, str, int]]:
    return [(n, w, b) for n in SHIPPED for w in SHIPPED_WEIGHTS for b in BITS]


def solve_shipped(name: str, weight: Any) -> list[Table]:
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
