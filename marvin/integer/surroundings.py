"""What a module's code may read and change besides tensors: its attributes, and random generators."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels._torch_private import READ_ONE, TorchDispatchMode, storage_key, tree_leaves
from marvin.rounder import BUFFER

__all__ = ["PLAIN", "Plain", "Surroundings", "names_of", "noted", "tensors_of"]

PLAIN = bool, int, float, str, type(None)
"""Classes of values that are compared as they are."""
Plain = bool | int | float | str | None
"""What such values are."""

_OF_TORCH = {*vars(nn.Module())} - {"training"}
_HOOKS = [
    name for name, own in vars(nn.Module()).items() if isinstance(own, dict) and "hooks" in name
]
_FLAT = *PLAIN, dict, list, tuple, set, torch.dtype, torch.device
_FUNCTIONS = FunctionType, BuiltinFunctionType, type
_EXPORTS = Tensor.tolist, Tensor.numpy, Tensor.__array__
_DEEP, _LONG = 4, 64  # how far into lists, dictionaries and records; how many are looked at
_LARGE = 2**16  # plain values of a list, and bytes of an array


class _Object:
    """An object that is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    __hash__ = object.__hash__


def names_of(module: nn.Module) -> list[str]:
    """Return the names of the attributes that a module has besides those of every module."""
    own = (name for name in vars(module) if name not in _OF_TORCH)
    return [name for name in own if not name.startswith("_tensor_constant")]  # a tracer's


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model, and tensors that are plain attributes of its modules; without those that have no values."""
    found = dict(model.named_buffers())
    for name, own in model.named_modules():
        held = ((key, vars(own)[key]) for key in names_of(own))
        found |= {f"{name}.{key}".lstrip("."): x for key, x in held if isinstance(x, Tensor)}
    return {name: x for name, x in found.items() if not x.is_meta}


def noted(value: object, depth: int = _DEEP) -> object:
    """Return what is equal for as long as a value is the same, and what is in it.

    Plain values are what they are, also in lists, tuples, sets and dictionaries that are not long, and in records
    (objects with such attributes, functions and classes, and no others, such as configurations). Long lists count
    if plain values are all they have, NumPy's arrays if they are no larger. Of others, which object it is counts.

    Args:
        value: Of an attribute.
        depth: How far to look into it.
    """
    if type(value) in PLAIN:
        return value
    if depth and isinstance(value, dict | list | tuple | set) and len(value) <= _LONG:
        if isinstance(value, dict):
            return dict, [(key, noted(own, depth - 1)) for key, own in value.items()]
        if isinstance(value, set):
            return set, {*value}
        return list, [noted(own, depth - 1) for own in value]
    if _is_long(value):
        return list, [*value]
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGE and not value.dtype.hasobject:
        return np.ndarray, value.shape, value.dtype.str, value.tobytes()
    if _is_record(value, depth):
        return _Object(value), [(name, noted(own, depth)) for name, own in vars(value).items()]
    return _Object(value)


def _is_long(value: object) -> TypeGuard[list[Plain] | tuple[Plain, ...]]:
    """Say whether a value is a list of plain values alone."""
    if not isinstance(value, list | tuple) or len(value) > _LARGE:
        return False
    return all(type(own) in PLAIN for own in value)


def _is_record(value: object, depth: int) -> bool:
    """Say whether a value has attributes, all of them plain, containers, functions or records: a trainer is none."""
    if not depth or callable(value) or not hasattr(value, "__dict__"):
        return False
    found = (own for own in vars(value).values() if not isinstance(own, (*_FLAT, *_FUNCTIONS)))
    return all(_is_record(own, depth - 1) for own in found)


class _Watch(TorchDispatchMode):
    """Notes what code does in this thread: others may do so meanwhile.

    Args:
        tensors: Of a model.

    Attributes:
        has_drawn: Whether it drew random numbers of torch's.
        has_read: Whether it made a Python number of a value of the model's, or of what was computed from one.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.has_drawn = self.has_read = False
        self._own = {storage_key(x) for x in tensors}
        self._held: list[object] = []  # so that no other gets the memory of what was computed

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        tags = func.tags  # pyright: ignore[reportFunctionMemberAccess]: an operator has them
        self.has_drawn |= torch.Tag.nondeterministic_seeded in tags
        found = func(*args, **(kwargs or {}))
        if self._own and any(map(self.is_own, tree_leaves((args, kwargs)))):
            self.has_read |= func is READ_ONE
            self._held.append(found)
            self._own |= {storage_key(x) for x in tree_leaves(found) if isinstance(x, Tensor)}
        return found

    def is_own(self, x: object) -> bool:
        """Say whether something is a tensor of the model's, or computed from one."""
        return isinstance(x, Tensor) and storage_key(x) in self._own


class _Exports(TorchFunctionMode):
    """Notes where code takes values out of torch, which no operator does."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _EXPORTS:
            self._watch.has_read |= self._watch.is_own(args[0])
        return func(*args, **(kwargs or {}))


class Surroundings:
    """The attributes and hooks of a model's modules, and the random generators of the process, as they are now.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        values = tensors_of(model).items()  # formats are read to tell what is a layer
        self._watch = _Watch(x for name, x in values if name.rpartition(".")[2] != BUFFER)
        self._parts = [*model.modules()]
        self._before, self._noted = self._now()
        held = [value for own in self._before for value in own.values()]
        self._lists = [(value, [*value]) for value in held if type(value) is list]
        self._tables = [(value, {**value}) for value in held if type(value) is dict]
        hooks = [vars(m)[name] for m in self._parts for name in _HOOKS]
        self._hooks = [(own, {**own}) for own in hooks]
        self._dice = torch.get_rng_state(), random.getstate(), np.random.get_state()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the model's code does meanwhile."""
        with self._watch, _Exports(self._watch):
            yield

    def restore(self) -> str:
        """Put back what has changed since, and say what that was; "" where nothing has."""
        is_random, is_changed, is_hooked = self._threw(), self._changed(), self._hooked()
        if is_hooked:
            return "its forward adds or removes hooks of modules"
        if is_random:
            return "its forward draws random numbers, which would be the same at each call"
        if self._watch.has_read:
            return "its forward reads the value of a buffer or another tensor of the model's, which may change"
        return "its forward changes attributes of modules" if is_changed else ""

    def _now(self) -> tuple[list[dict[str, object]], list[list[tuple[str, object]]]]:
        """Return the attributes of each module, and what is noted of them."""
        found = [{n: vars(m)[n] for n in names_of(m)} for m in self._parts]
        return found, [[(n, noted(value)) for n, value in own.items()] for own in found]

    def _threw(self) -> bool:
        ours, pythons, numpys = self._dice
        of_torch = self._watch.has_drawn and not torch.equal(torch.get_rng_state(), ours)
        is_same = not of_torch and random.getstate() == pythons
        if is_same and all(map(np.array_equal, np.random.get_state(), numpys)):
            return False
        if of_torch:
            torch.set_rng_state(ours)
        random.setstate(pythons)
        np.random.set_state(numpys)
        return True

    def _hooked(self) -> bool:
        changed = [(own, before) for own, before in self._hooks if own != before]
        for own, before in changed:
            own.clear()
            own.update(before)
        return bool(changed)

    def _changed(self) -> bool:
        if self._now()[1] == self._noted:
            return False
        for module, before in zip(self._parts, self._before, strict=True):
            own = vars(module)
            for name in [name for name in names_of(module) if name not in before]:
                del own[name]
            own.update(before)
        for items, before in self._lists:
            items[:] = before
        for items, before in self._tables:
            items.clear()
            items.update(before)
        return True
