"""What a module's code may read and change besides tensors: its attributes, and random generators."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels._torch_private import READ_ONE, TorchDispatchMode, storage_key, tree_leaves
from marvin.integer.notes import noted
from marvin.rounder import BUFFER

__all__ = ["Surroundings", "names_of", "tensors_of"]

_OF_TORCH = {*vars(nn.Module())} - {"training"}
_HOOKS = [
    name for name, own in vars(nn.Module()).items() if isinstance(own, dict) and "hooks" in name
]
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # truths and shapes
_EXPORTS = Tensor.tolist, Tensor.numpy, Tensor.__array__


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


class _Watch(TorchDispatchMode):
    """Notes what code does in this thread: others may do so meanwhile.

    Args:
        tensors: Of a model.

    Attributes:
        has_drawn: Whether it drew random numbers of torch's.
        generators: Of its own that it drew from, and their states of before.
        has_read: Whether it made a Python number, or a shape, of values of the model's, or of what was computed from them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.has_drawn = self.has_read = False
        self.generators: dict[torch.Generator, Tensor] = {}
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
        leaves = tree_leaves((args, kwargs))
        if torch.Tag.nondeterministic_seeded in tags:
            self.has_drawn = True
            for own in leaves:
                if isinstance(own, torch.Generator) and own not in self.generators:
                    self.generators[own] = own.get_state()
        found = func(*args, **(kwargs or {}))
        if self._own and any(map(self.is_own, leaves)):
            self.has_read |= func is READ_ONE or not _BY_VALUE.isdisjoint(tags)
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
        self._queues = [(value, [*value]) for value in held if type(value) is deque]
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
