"""What stands for values while a model is traced, and answers what code asks Python about them.

Python tells a proxy's class, text or number where code asks for those of a tensor: ``isinstance(y, Tensor)`` would be
False. Here the answer is that of the value, where it is known for certain; else the trace is refused.
"""

import builtins
import dis
import math
import operator
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, UnionType
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, TraceError

from fixedpoint_kernels._torch_private.compiling import ASSERT
from marvin.kinds import OPERATORS, Kinds, are_tensors

__all__ = [
    "OF_TEXTS",
    "AskedTracer",
    "ProxyOfValue",
    "Types",
    "answered",
    "caller",
    "is_of_packages",
]

OF_TEXTS = "it makes a text of a value, or of a size"
_PACKAGES = "torch.fx.", "torch.nn.parameter", "marvin.", "fixedpoint_kernels."
_PYTHONS = "abc", "dataclasses"
_PLAIN_LOOKS = "LOAD_ATTR", "LOAD_METHOD", "MATCH_CLASS"
_METACLASSES = type, ABCMeta, type(Tensor), type(nn.Parameter)
_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "__int__": int, "__float__": float, "__complex__": complex, "__round__": round, "__divmod__": divmod,
    "__trunc__": math.trunc, "__floor__": math.floor, "__ceil__": math.ceil,
}  # fmt: skip


def caller(depth: int = 1) -> FrameType | None:
    """Return the frame of who called the function that asks, or of one before."""
    return sys._getframe(depth + 1)


def is_of_packages(frame: FrameType | None) -> bool:
    """Say whether code is of torch's tracer, or of these packages, or of Python's own that those call."""
    while frame is not None and frame.f_globals.get("__name__") in _PYTHONS:
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.startswith(_PACKAGES)


def _is_plain_look(frame: FrameType | None) -> bool:
    """Say whether code reads ``x.name``, and calls no function for it."""
    if frame is None:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _PLAIN_LOOKS


class AskedTracer(fx.Tracer):
    """Knows of which class values are, and what nobody could answer.

    Attributes:
        unanswered: Why what was traced may be wrong, each time.
        texts: Of values, which only the message of an assertion may have: see ``told``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unanswered: list[str] = []
        self.texts: list[str] = []

    def told(self, message: object) -> None:
        """Take the texts of values that an assertion's message has as answered."""
        if type(message) is str:
            self.texts = [own for own in self.texts if own not in message]

    def check(self, condition: object, message: str) -> object:
        """Stand for ``torch._assert``, whose condition need not be a proxy: numbers of dimensions are known."""
        self.told(message)
        if issubclass(type(condition), fx.Proxy):
            return self.create_proxy("call_function", ASSERT, (condition, message), {})
        if not condition:
            raise AssertionError(message)
        return None

    def refused(self, reason: str) -> TraceError:
        """Remember why a trace may be wrong, even if the model's code catches the error that is returned."""
        self.unanswered.append(reason)
        return TraceError(reason)

    def kinds(self, proxy: fx.Proxy) -> Kinds:
        """Return the classes of which a value has one; none where nothing is known."""
        return ()

    def rank(self, proxy: fx.Proxy) -> int | None:
        """Return the number of dimensions of a value; None where that is not known."""
        return None

    def number(self, proxy: fx.Proxy) -> int | float | None:
        """Return a size, or what is computed of sizes; None where a value is none, or not known."""
        return None

    def kind(self, proxy: fx.Proxy) -> type:
        """Return the class of a value; where that is not known, remember it, and return the proxy's."""
        found = self.kinds(proxy)
        if len(found) == 1:
            return found[0]
        self.refused("it asks for the class of a value, which is not known")
        return type(proxy)

    def is_of(self, proxy: fx.Proxy, kind: Any) -> bool:
        """Say whether a value is of a class, or of one of some; where that is not known, remember it."""
        if type(kind) is tuple:
            return any(self.is_of(proxy, own) for own in kind)
        if type(kind) is UnionType:
            return self.is_of(proxy, kind.__args__)
        if type(kind) in _METACLASSES:
            if issubclass(kind, fx.Proxy):
                return issubclass(type(proxy), kind)
            answers = {issubclass(own, kind) for own in self.kinds(proxy)}
            if len(answers) == 1:
                return answers.pop()
        self.refused("it asks with isinstance for the class of a value, which is not known")
        return issubclass(type(proxy), kind) if type(kind) in _METACLASSES else False


class _Asked(fx.Proxy):
    """A proxy that answers as its value would."""

    tracer: Any

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        frame = caller()
        if is_of_packages(frame) or not _is_plain_look(frame):
            return type(self)
        return self.tracer.kind(self)

    def __getattr__(self, name: str) -> Any:
        if name == "ndim" and (rank := self.tracer.rank(self)) is not None:
            return rank
        frame, kinds = caller(), self.tracer.kinds(self)
        found = _Attribute(self, name)
        if is_of_packages(frame) or (kinds and all(hasattr(own, name) for own in kinds)):
            return found
        if not kinds and _is_plain_look(frame):
            return found  # an error then, as of the value
        reason = f"it asks whether a value has an attribute, {name}, which tensors do not have"
        error = self.tracer.refused(reason)
        if kinds:
            raise AttributeError(f"{kinds[0].__name__!r} object has no attribute {name!r}")
        raise error

    def __len__(self) -> int:
        length = self.tracer.length(self)
        if length is None:
            raise self.tracer.refused(
                "it asks for the length of a value; of a tensor, write x.shape[0]"
            )
        return length

    def __index__(self) -> int:
        number = self.tracer.number(self)
        if not isinstance(number, int):  # torch's functions ask, and take values, too
            raise TypeError(f"'{type(self).__name__}' object cannot be interpreted as an integer")
        return number

    def __repr__(self) -> str:
        return self._text(caller(), "")

    def __str__(self) -> str:
        return self._text(caller(), "")

    def __format__(self, form: str) -> str:
        return self._text(caller(), form)

    def _text(self, frame: FrameType | None, form: str) -> str:
        if is_of_packages(frame):
            return format(f"Proxy({self.node.name})", form)
        if form:
            raise self.tracer.refused(OF_TEXTS)
        self.tracer.texts.append(text := f"<{self.node.name}>")
        return text

    def __hash__(self) -> int:
        if is_of_packages(caller()) or are_tensors(self.tracer.kinds(self)):
            return object.__hash__(self)
        if (number := self.tracer.number(self)) is not None:
            return hash(number)
        raise self.tracer.refused("it looks for a value, or for a size, in a dictionary or a set")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Asked":
        raise self.tracer.refused("it copies a value")


class ProxyOfValue(_Asked):
    """A proxy that keeps ``x += y``, which torch.fx would trace as ``x = x + y``."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("tracer", "node"):
            reason = f"an attribute of a value is set, {name}, which no trace can see"
            self.tracer.refused(reason)
            raise AttributeError(reason)
        super().__setattr__(name, value)


class _Attribute(_Asked, Attribute):
    """An attribute of a value, or a method of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.attr in ("dim", "ndimension") and (rank := self.tracer.rank(self.root)) is not None:
            return rank
        return super().__call__(*args, **kwargs)


def _keep(name: str) -> Any:
    def method(self: fx.Proxy, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


def _convert(function: Callable[..., Any]) -> Any:
    def method(self: _Asked, *args: object) -> Any:
        if (number := self.tracer.number(self)) is None:
            raise self.tracer.refused("it makes a Python number of a value, or of a size")
        return function(number, *args)

    return method


for _name in OPERATORS:
    setattr(ProxyOfValue, f"__{_name}__", _keep(_name))
for _name, _function in _NUMBERS.items():
    setattr(_Asked, _name, _convert(_function))

_PROXIES = ProxyOfValue, _Attribute
_isinstance, _callable, _expand = builtins.isinstance, builtins.callable, Tensor.expand


def _expand_to(x: Tensor, *sizes: Any, **options: Any) -> Any:
    """Expand a tensor, or trace that, where a size is a proxy."""
    for given in (*sizes, *options.values()):
        for size in given if _isinstance(given, list | tuple) else (given,):
            if type(size) in _PROXIES:
                return size.tracer.create_proxy("call_method", "expand", (x, *sizes), options)
    return _expand(x, *sizes, **options)


@contextmanager
def answered() -> Iterator[None]:
    """Let ``isinstance``, ``callable`` and ``Tensor.expand`` take proxies, for the whole process meanwhile.

    ``expand`` alone of torch's methods does not ask a proxy that stands where the first size does.
    """
    before = builtins.isinstance, builtins.callable, Tensor.expand

    def is_of(value: Any, kind: Any, /) -> bool:
        if type(value) not in _PROXIES or is_of_packages(caller()):
            return _isinstance(value, kind)
        return value.tracer.is_of(value, kind)

    def can_be_called(value: Any, /) -> bool:
        if type(value) not in _PROXIES or is_of_packages(caller()):
            return _callable(value)
        if type(value) is _Attribute:
            root = value.tracer.kinds(value.root)
            if root:
                return all(_callable(getattr(own, value.attr, None)) for own in root)
        return value.tracer.is_of(value, Callable)

    builtins.isinstance, builtins.callable = is_of, can_be_called
    Tensor.expand = _expand_to  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        builtins.isinstance, builtins.callable, Tensor.expand = before


class _TypeOfTypes(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) in _PROXIES:
            return args[0].tracer.kind(args[0])
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return _isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    __hash__ = type.__hash__


class _Type(type, metaclass=_TypeOfTypes):
    """Stands for ``type`` in code that is traced."""


class Types:
    """Puts what stands for ``type``, and for ``torch._assert``, where functions that a model may call look for it.

    Args:
        check: What stands for ``torch._assert``.
    """

    def __init__(self, check: Callable[[object, str], object]) -> None:
        self._check = check
        self._seen: set[CodeType] = set()
        self._tables: list[tuple[dict[str, Any], str]] = []
        self._objects: set[type] = set()

    def put_in(self, module: nn.Module) -> None:
        """Look at the code of a module, and at what it calls by names."""
        waiting: list[tuple[object, type | None]] = [(module.forward, type(module))]
        held = vars(module).values()
        waiting += [(own, None) for own in held if _is_code(own)]
        self._objects = {type(own) for own in held if not _is_others(str(type(own).__module__))}
        while waiting:
            value, owner = waiting.pop()
            if _isinstance(value, FunctionType):
                if value.__code__ in self._seen:
                    continue
                self._seen.add(value.__code__)
                waiting += self._named(value, owner)
            waiting += [(own, owner) for own in _inside(value)]

    def restore(self) -> None:
        """Take it out again."""
        while self._tables:
            table, name = self._tables.pop()
            if table.pop(name, None) == self._check:
                table[name] = ASSERT

    def _named(
        self, function: FunctionType, owner: type | None
    ) -> Iterator[tuple[object, type | None]]:
        """Yield what a function may call, by the names in its code, and the classes whose methods they are."""
        table = function.__globals__
        if _is_others(str(table.get("__name__"))):
            return
        names = _names(function.__code__)
        if "type" in names and "type" not in table:
            table["type"] = _Type
            self._tables.append((table, "type"))
        for name in names & table.keys():
            own = table[name]
            if own is ASSERT:
                table[name] = self._check
                self._tables.append((table, name))
            if _isinstance(own, ModuleType) and not _is_others(own.__name__):
                yield from ((vars(own)[n], None) for n in names & vars(own).keys())
            elif not _is_code(own):
                kind = own if _isinstance(own, type) else type(own)
                if not _is_others(kind.__module__):
                    yield from _methods(kind, names | _IMPLIED)
            yield own, None
        for kind in (owner, *self._objects):
            if kind is not None:
                yield from _methods(kind, names | _IMPLIED)


_IMPLIED = {"__call__", "__init__", "__new__", "__post_init__", "__setattr__", "__getitem__"}


def _methods(kind: type, names: set[str]) -> Iterator[tuple[object, type]]:
    for base in kind.__mro__:
        if not _is_others(base.__module__):
            yield from ((vars(base)[name], kind) for name in names & vars(base).keys())


def _is_code(value: object) -> bool:
    return _isinstance(value, FunctionType | MethodType | partial | _CACHED)


def _inside(value: Any) -> Iterator[object]:
    """Yield the functions that one calls, or that are around it."""
    if _isinstance(value, staticmethod | classmethod | MethodType):
        yield value.__func__
    elif _isinstance(value, property):
        yield value.fget
    elif _isinstance(value, partial):
        yield value.func
    elif _isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not there yet
                continue
    elif _isinstance(value, _CACHED):
        yield value.__wrapped__


@cache
def _names(code: CodeType) -> set[str]:
    inner = (_names(own) for own in code.co_consts if type(own) is CodeType)
    return {*code.co_names}.union(*inner)


def _is_others(name: str) -> bool:
    """Say whether a module is Python's, torch's, NumPy's or of these packages."""
    first = name.partition(".")[0]
    return first in _OTHERS or (first in sys.stdlib_module_names and first != "__main__")


_CACHED = type(lru_cache(lambda: None))
_OTHERS = {"torch", "numpy", "marvin", "fixedpoint_kernels", "builtins"}
