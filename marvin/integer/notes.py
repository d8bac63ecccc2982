"""What is in a value of an attribute, noted so that another look tells whether anything of it has changed."""

import random
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from logging import Logger
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from fixedpoint_kernels.watch import OtherForward

__all__ = ["PLAIN", "Plain", "exact", "is_all_noted", "noted"]

PLAIN = bool, int, float, str, type(None)
"""Classes of values that are compared as they are."""
Plain = bool | int | float | str | None
"""What such values are."""

_CONSTANT = bytes, complex, range, frozenset, PurePath, np.generic, torch.dtype, torch.device
# constant, or looked at elsewhere
_ALONE = nn.Module, type, ModuleType, Enum, Logger, OtherForward
_MANY = dict, list, tuple, set, deque
_WITH_ZEROS = float, complex, np.inexact  # zeros have a sign, which == does not see
_PLAIN = frozenset(PLAIN)
_EXACT = _PLAIN - {float}  # of which equal values are the same
_DEEP, _MOST = 8, 2000  # how far to look, and at how many values that are not plain
_TABLE = 256  # of plain values: names of classes, say, of which the number counts
_LARGE = 2**16  # plain values of a list, and bytes of an array


class _Object:
    """An object that is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    __hash__ = object.__hash__


def exact(value: object) -> object:
    """Return what is equal for numbers that are the same: 1, 1.0 and True are three, 0.0 and -0.0 are two, NaN is one."""
    return type(value), repr(value) if isinstance(value, _WITH_ZEROS) else value


def noted(value: object) -> object:
    """Return what is equal for as long as a value, and what is in it, is the same.

    Plain values are what they are, also in lists, tuples, sets, dictionaries and queues; in records (objects that
    have attributes), functions, methods and partial functions. Tensors count as objects with their dtype and shape, modules as objects alone, and so do
    dictionaries of more than 256 plain values, with how many these are.
    """
    return _Notes().of(value, _DEEP)


def is_all_noted(value: object) -> bool:
    """Say whether nothing in a value could change without another note: random generators and trainers have more."""
    notes = _Notes()
    notes.of(value, _DEEP)
    return not notes.misses


class _Notes:
    def __init__(self) -> None:
        self.misses, self._left = False, _MOST

    def of(self, value: object, depth: int) -> object:
        """Return what is noted of a value, which may be looked into so deep."""
        if type(value) in _PLAIN or isinstance(value, _CONSTANT):
            return exact(value)
        if isinstance(value, Tensor):
            return _Object(value), value.dtype, value.shape
        if isinstance(value, _ALONE) or type(value) is object:
            return _Object(value)
        self._left -= 1
        if not depth or self._left < 0:
            return self._missed(value)
        if isinstance(value, _MANY):
            return self._of_many(value, depth - 1)
        if isinstance(value, np.ndarray) and value.nbytes <= _LARGE and not value.dtype.hasobject:
            return np.ndarray, value.shape, value.dtype.str, value.tobytes()
        found = self._of_function(value, depth - 1)
        return self._of_object(value, depth - 1) if found is None else found

    def _missed(self, value: object) -> object:
        self.misses = True
        return _Object(value)

    def _of_many(self, value: object, depth: int) -> object:
        if isinstance(value, dict):
            if len(value) > _TABLE and _are_plain(value.values()):
                return _Object(value), len(value)
            return dict, self._of_pairs(value, depth)
        assert isinstance(value, list | tuple | set | deque)
        if isinstance(value, set):
            self.misses |= not all(
                isinstance(own, (*PLAIN, *_CONSTANT, *_ALONE, Tensor)) for own in value
            )
            return set, {*map(exact, value)}
        if _are_plain(value):
            kinds = [*map(type, value)]
            floats = array("d", (x for x in value if type(x) is float)) if float in kinds else b""
            return list, [*value], kinds, bytes(floats)
        return list, [self.of(own, depth) for own in value]

    def _of_function(self, value: object, depth: int) -> object:
        """Return what is noted of a function, and of what it computes with; None of anything else."""
        if isinstance(value, FunctionType):
            rest = [*_around(value), value.__defaults__, value.__kwdefaults__]
            return _Object(value), [self.of(own, depth) for own in rest]
        if isinstance(value, BuiltinFunctionType | MethodType):
            own = value.__self__
            return value.__name__, self.of(own, depth), None if own is not None else _Object(value)
        if isinstance(value, partial):
            parts = value.func, value.args, value.keywords
            return partial, [self.of(own, depth) for own in parts]
        if isinstance(value, ref):
            return _Object(value), self.of(value(), depth)
        return None

    def _of_object(self, value: object, depth: int) -> object:
        has_slots = any("__slots__" in vars(own) for own in type(value).__mro__)
        if isinstance(value, random.Random) or not (has_slots or hasattr(value, "__dict__")):
            return self._missed(value)
        found = {**dict(_in_slots(value)), **getattr(value, "__dict__", {})}
        return _Object(value), self._of_pairs(found, depth)

    def _of_pairs(self, table: Mapping[object, object], depth: int) -> list[tuple[object, object]]:
        items = table.items()  # most are plain: a call for each takes as long as all of the rest
        return [
            (key, (type(own), own) if type(own) in _EXACT else self.of(own, depth))
            for key, own in items
        ]


def _are_plain(values: Collection[object]) -> bool:
    """Say whether there are plain values alone, and not too many."""
    return len(values) <= _LARGE and _PLAIN.issuperset(map(type, values))


def _around(function: FunctionType) -> Iterator[object]:
    """Yield what a function takes from functions around it, as far as it is there yet."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents


def _in_slots(value: object) -> Iterator[tuple[str, object]]:
    """Yield names and values of slots that have one."""
    kinds = [own for own in type(value).__mro__ if "__slots__" in vars(own)]
    for own in (x for kind in kinds for x in vars(kind).values()):
        if isinstance(own, MemberDescriptorType):
            with suppress(AttributeError):
                yield own.__name__, own.__get__(value)
