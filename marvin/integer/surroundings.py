"""What a module's code may read and change: its attributes, parameters and parts, and random generators."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.proxy import TraceError
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels._torch_private.modes import TorchDispatchMode
from fixedpoint_kernels._torch_private.tensors import (
    READ_ONE,
    OpOverload,
    WeakStorage,
    storage_key,
    tree_leaves,
    written_by,
)
from marvin.integer.notes import noted
from marvin.rounder import BUFFER

__all__ = ["Surroundings", "names_of", "tensors_of"]

_OF_TORCH = {*vars(nn.Module())} - {"training"}
_DICTS = [name for name, own in vars(nn.Module()).items() if isinstance(own, dict)]
_HOOKS = [name for name in _DICTS if "hooks" in name]
_TABLES = [name for name in _DICTS if name not in _HOOKS]  # of parts, parameters and buffers
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # truths and shapes
_ARRAYS = Tensor.numpy, Tensor.__array__  # share memory
_EXPORTS = Tensor.tolist, *_ARRAYS
_ACCESS = [getattr(Tensor, name) for name in ("data", "grad", "requires_grad")]
_SETTERS = [
    *(own.__set__ for own in _ACCESS),
    *(own.__delete__ for own in _ACCESS),
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
]
_READS = (
    "its forward reads the value of a buffer or another tensor of the model's, which may change"
)
_WRITES = "its forward changes parameters, or their gradients"


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


def _memory_of(xs: Iterable[object]) -> set[int]:
    """Return numbers of the memory of tensors; those without any (sparse, not initialised) have none."""
    tensors = (x for x in xs if isinstance(x, Tensor) and not is_lazy(x))
    return {storage_key(x) for x in tensors if x.layout is torch.strided}


class _Watch(TorchDispatchMode):
    """Notes what code does in this thread: others may do so meanwhile. Refuses what changes parameters before it does.

    So no copy of parameters is needed, which may be as large as all other memory.

    Args:
        tensors: Of a model, which code may compute with.
        parameters: Of it, which code must not change, nor their gradients.

    Attributes:
        refused: Why code was ended, even if it caught that error; "" where it was not.
        has_drawn: Whether it drew random numbers of torch's.
        generators: Of its own that it drew from, and their states of before.
        has_read: Whether it made a Python number, or a shape, of values of the model's, or of what was computed from them.
    """

    def __init__(self, tensors: Iterable[Tensor], parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.refused = ""
        self.has_drawn = self.has_read = False
        self.generators: dict[torch.Generator, Tensor] = {}
        self._ids = {id(p): p for p in parameters}
        self._fixed = _memory_of([*parameters, *(p.grad for p in parameters)])
        self._own = _memory_of([*tensors, *parameters])
        self._held: list[WeakStorage] = []  # so that no other gets the number of what was computed

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        tags, leaves = func.tags, tree_leaves((args, kwargs))
        if any(map(self.is_fixed, written_by(func, args, kwargs or {}))):
            raise self.refuse(_WRITES)
        if torch.Tag.nondeterministic_seeded in tags:
            self.has_drawn = True
            for own in leaves:
                if isinstance(own, torch.Generator) and own not in self.generators:
                    self.generators[own] = own.get_state()
        found = func(*args, **(kwargs or {}))
        if self._own and any(map(self.is_own, leaves)):
            self.has_read |= func is READ_ONE or not _BY_VALUE.isdisjoint(tags)
            made = [x for x in tree_leaves(found) if _memory_of([x])]
            self._held += [WeakStorage(x.untyped_storage()) for x in made]
            self._own |= _memory_of(made)
        return found

    def refuse(self, reason: str) -> TraceError:
        """Note why code is ended, and return the error that ends it."""
        self.refused = self.refused or reason
        return TraceError(reason)

    def is_parameter(self, x: object) -> bool:
        """Say whether something is a parameter of the model's."""
        return id(x) in self._ids

    def is_fixed(self, x: object) -> bool:
        """Say whether something has memory of a parameter, or of a gradient."""
        return not self._fixed.isdisjoint(_memory_of([x]))

    def is_own(self, x: object) -> bool:
        """Say whether something is a tensor of the model's, or computed from one."""
        return not self._own.isdisjoint(_memory_of([x]))


class _Exports(TorchFunctionMode):
    """Notes where code takes values out of torch, and refuses changes of parameters, as far as no operator does so."""

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
        if func in _SETTERS and self._watch.is_parameter(args[0]):
            raise self._watch.refuse(_WRITES)
        if func in _ARRAYS and self._watch.is_fixed(args[0]):
            raise self._watch.refuse(_READS)
        if func in _EXPORTS:
            self._watch.has_read |= self._watch.is_own(args[0])
        return func(*args, **(kwargs or {}))


class Surroundings:
    """The attributes, hooks, parts and parameters of a model's modules, and the random generators of the process, as they are now.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        values = tensors_of(model).items()  # formats are read to tell what is a layer
        tensors = [x for name, x in values if name.rpartition(".")[2] != BUFFER]
        self._watch = _Watch(tensors, [*model.parameters()])
        self._parts = [*model.modules()]
        self._before, self._noted = self._now()
        held = [value for own in self._before for value in own.values()]
        self._lists = [(value, [*value]) for value in held if type(value) is list]
        self._tables = [(value, {**value}) for value in held if type(value) is dict]
        self._queues = [(value, [*value]) for value in held if type(value) is deque]
        hooks = [vars(m)[name] for m in self._parts for name in _HOOKS]
        self._hooks = [(own, {**own}) for own in hooks]
        members = [vars(m).get(name) for m in self._parts for name in _TABLES]
        self._members = [(own, {**own}) for own in members if isinstance(own, dict)]
        self._dice = torch.get_rng_state(), random.getstate(), np.random.get_state()

    @property
    def refused(self) -> str:
        """Why the model's code was ended, even if it caught that error; "" where it was not."""
        return self._watch.refused

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what the model's code does meanwhile."""
        with self._watch, _Exports(self._watch):
            yield

    def restore(self, *, values_may_change: bool = False) -> str:
        """Put back what has changed since, and say what that was; "" where nothing has.

        Args:
            values_may_change: Whether code may draw random numbers, make Python numbers of values and change
                attributes: none of these is said. They are put back all the same.
        """
        is_random, is_changed, is_hooked = self._threw(), self._changed(), self._hooked()
        has_others = self._has_others()
        if self.refused:
            return self.refused
        if is_hooked:
            return "its forward adds or removes hooks of modules"
        if is_random and not values_may_change:
            return "its forward draws random numbers, which would be the same at each call"
        if self._watch.has_read and not values_may_change:
            return _READS
        if has_others:
            return "its forward adds, replaces or removes modules, parameters or buffers"
        if is_changed and not values_may_change:
            return "its forward changes attributes of modules"
        return ""

    def _now(self) -> tuple[list[dict[str, object]], list[list[tuple[str, object]]]]:
        """Return the attributes of each module, and what is noted of them."""
        found = [{n: vars(m)[n] for n in names_of(m)} for m in self._parts]
        return found, [[(n, noted(value)) for n, value in own.items()] for own in found]

    def _threw(self) -> bool:
        ours, pythons, numpys = self._dice
        of_torch = self._watch.has_drawn and not torch.equal(torch.get_rng_state(), ours)
        for own, state in self._watch.generators.items():
            own.set_state(state)
        is_same = not of_torch and not self._watch.generators and random.getstate() == pythons
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

    def _has_others(self) -> bool:
        found = [(own, before) for own, before in self._members if not _are_same(own, before)]
        for own, before in found:
            own.clear()
            own.update(before)
        return bool(found)

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
        for items, before in self._queues:
            items.clear()
            items.extend(before)
        for items, before in self._tables:
            items.clear()
            items.update(before)
        return True


def _are_same(table: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Say whether two tables have the same objects in one order."""
    return [*table] == [*other] and all(own is other[name] for name, own in table.items())
