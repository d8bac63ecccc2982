"""Watch a model run: which module is running, what it calls, and what autograd saves."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels._torch_private.tensors import storage_key

__all__ = [
    "KEPT",
    "Caller",
    "OtherForward",
    "Running",
    "Storage",
    "Watch",
    "has_own_forward",
    "is_torchs",
    "stock_class",
    "unbound",
]

KEPT = "_kept_forward"
"""Attribute of a module that keeps its ``OtherForward`` while others wrap it."""


class Caller(NamedTuple):
    """Who calls a function, or keeps a tensor.

    Args:
        layer: Innermost module that is running, ``""`` for the model itself.
        function: As called from Python, ``""`` where none is.
        module: Class of the module.
    """

    layer: str
    function: str
    module: str


class Storage(NamedTuple):
    """One piece of memory that is kept for backward.

    Args:
        size_bytes: Of the whole storage, which may be more than the tensor saved.
        shape: Of the first tensor saved of it.
        itemsize: Bytes an element.
        savers: Who keeps it, without repetition, the first one first.
    """

    size_bytes: int
    shape: tuple[int, ...]
    itemsize: int
    savers: tuple[Caller, ...]

    @property
    def layers(self) -> set[str]:
        """Names of the modules that keep it."""
        return {saver.layer for saver in self.savers}


class Running:
    """Which module is running.

    torch's own ``ModuleTracker`` does not do: it has names alone, in a set without order, so that
    the innermost is not known, and it puts hooks on gradients, which a watch must not change.

    Args:
        model: Gets hooks: a copy, or one whose hooks are put back.
    """

    def __init__(self, model: nn.Module):
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[nn.Module] = []
        for module in model.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    @property
    def name(self) -> str:
        """Name of the innermost module that is running."""
        return self._names[id(self._running[-1])] if self._running else ""

    @property
    def kind(self) -> str:
        """Class of the innermost module that is running."""
        return type(self._running[-1]).__name__ if self._running else ""

    def _enter(self, module: nn.Module, _: object) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, _: object, __: object) -> None:
        while self._running and self._running.pop() is not module:
            pass


class Watch(TorchFunctionMode):
    """Notes, while it is entered, what is called from Python and which storages autograd saves.

    Args:
        running: Which module is.
        own: Tensors whose storages are left out: parameters and buffers.
    """

    def __init__(self, running: Running, own: Iterable[Tensor]):
        super().__init__()
        self.calls: dict[Caller, None] = {}
        self._running, self._function = running, ""
        self._alive = list(own)  # an address is not given twice while its owner lives
        self._own = {storage_key(tensor) for tensor in self._alive}
        self._saved: dict[int, tuple[Tensor, dict[Caller, None]]] = {}
        self._hooks = ExitStack()

    def saved(self) -> tuple[Storage, ...]:
        """Return the storages saved so far, in that order."""
        return tuple(
            Storage(t.untyped_storage().nbytes(), tuple(t.shape), t.itemsize, tuple(savers))
            for t, savers in self._saved.values()
        )

    def keys(self) -> tuple[int, ...]:
        """Return the number that each storage of ``saved`` is known by, see ``storage_key``."""
        return tuple(self._saved)

    def is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor is among those that are left out."""
        return storage_key(tensor) in self._own

    def __enter__(self) -> "Watch":
        try:
            self._hooks.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
            super().__enter__()
        except BaseException:  # an interrupt
            self._hooks.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._hooks.close()
        finally:
            super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._function = getattr(func, "__name__", "")
        self.calls[self._caller()] = None
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._function = ""

    def _save(self, tensor: Tensor) -> Tensor:
        address = storage_key(tensor)
        if address not in self._own:
            self._alive.append(tensor)
            _, savers = self._saved.setdefault(address, (tensor, {}))
            savers[self._caller()] = None
        return tensor

    def _caller(self) -> Caller:
        return Caller(self._running.name, self._function, self._running.kind)


class OtherForward:
    """What a module runs in place of its class's ``forward``; see ``marvin.integer.fusion``.

    It has no ``__dict__``, of which ``functools.update_wrapper`` would give all to what others wrap around it.
    """

    __slots__ = "__weakref__", "module"
    module: nn.Module

    @property
    def __code__(self) -> CodeType:
        """That of the module's own ``forward``, of which ``torch.export`` reads the names of arguments."""
        return type(self.module).forward.__code__

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own ``forward``."""
        return inspect.signature(type(self.module).forward.__get__(self.module))


_unbound: set[Callable[..., object]] = set()


@cache
def unbound(forward: Callable[..., object]) -> Callable[..., object]:
    """Return a function of a module and its arguments that runs what the module keeps in place of ``forward`` of its class.

    It is bound to a module as ``forward`` is: a copy of the module then runs what the copy keeps.

    Args:
        forward: Of the module's class.
    """

    def run(module: nn.Module, /, *args: object, **kwargs: object) -> object:
        own = vars(module).get(KEPT)
        if own is None or own.module is not module:
            return type(module).forward(module, *args, **kwargs)
        return own(*args, **kwargs)

    _unbound.add(run)
    run.__name__ = "forward"  # by which a pickle of the bound function finds that of the class
    run.__signature__ = inspect.signature(forward)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def has_own_forward(module: nn.Module) -> bool:
    """Say whether somebody else set a ``forward`` on a module that is not that of its class."""
    own = vars(module).get("forward")
    if own is None or isinstance(own, OtherForward):
        return False
    if not isinstance(own, MethodType) or own.__self__ is not module:
        return True
    function = own.__func__
    is_ours = isinstance(function, FunctionType) and function in _unbound
    return not is_ours and function is not type(module).forward


def stock_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a layer had before ``marvin.integer.convert``; None where it is not converted."""
    return vars(type(module)).get("_integer_stock")


def is_torchs(hook: object) -> bool:
    """Whether torch itself put a hook on a module, such as for weight normalisation."""
    return type(hook).__module__.startswith("torch.nn.utils.")
