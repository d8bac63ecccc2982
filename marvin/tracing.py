"""Traces of models by torch.fx that keep operations in place, and name what was called."""

import gc
import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import fx, nn
from torch.fx.proxy import Attribute

__all__ = ["Reads", "Tracer", "changes_shared"]

_OPERATORS = (  # in place, which torch.fx would trace as others
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul",
    "iand", "ior", "ixor", "ilshift", "irshift",
)  # fmt: skip
# what gives a tensor of its own; of others, a result may share memory with what they take
_OWN = {
    "add", "sub", "mul", "div", "truediv", "neg", "matmul", "bmm", "mm", "cat", "concat", "concatenate", "stack", "clone",
    "mean", "sum", "amax", "amin", "softmax", "relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid",
    "leaky_relu", "linear", "conv1d", "conv2d", "batch_norm", "layer_norm", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool2d", "interpolate", "scaled_dot_product_attention",
}  # fmt: skip
_PASS_ON = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)


class _Proxy(fx.Proxy):
    """A proxy that keeps ``x += y``, which torch.fx would trace as ``x = x + y``."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("tracer", "node"):
            raise AttributeError(f"an attribute of a value is set, {name}, which no trace can see")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Attribute:
        return _Attribute(self, name)

    def __len__(self) -> int:
        return _length(self)


class _Attribute(Attribute):
    """An attribute of a value, of which one may ask how long it is."""

    def __len__(self) -> int:
        return _length(self)


def _length(proxy: fx.Proxy) -> int:
    length = proxy.tracer.length(proxy) if isinstance(proxy.tracer, Tracer) else None
    return fx.Proxy.__len__(proxy) if length is None else length


def _keep(name: str) -> Any:
    def method(self: fx.Proxy, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in _OPERATORS:
    setattr(_Proxy, f"__{_name}__", _keep(_name))


_TRACING = threading.RLock()  # torch.fx changes nn.Module for the whole process meanwhile


class Reads:
    """Which attributes of modules code reads, whatever it does with them.

    Names are noted as Python looks for them. Code that asks for a module's ``__dict__`` may read all (``vars(self)``,
    copies and pickles do), unless it is torch's own look for parameters, or this package's for layers.
    """

    def __init__(self) -> None:
        self._found: set[tuple[int, str]] = set()
        self._thread = threading.get_ident()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what this thread reads meanwhile; one at a time."""
        before = vars(nn.Module).get("__getattribute__")
        look = nn.Module.__getattribute__

        def noting(own: nn.Module, name: str) -> object:
            if threading.get_ident() == self._thread:
                if name in _WHOLE and not _is_of_packages():
                    self._found.add((id(own), _ALL))
                self._found.add((id(own), name))
            return look(own, name)

        nn.Module.__getattribute__ = noting
        try:
            yield
        finally:
            if before is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = before

    def may_have(self, own: nn.Module, name: str) -> bool:
        """Say whether code may have read an attribute; that of classes that look for attributes in ways of their own may."""
        # a module's own has another's trace meanwhile
        others = set(type(own).__mro__) - {nn.Module, object}
        looks_itself = any("__getattribute__" in vars(c) for c in others)
        return looks_itself or not self._found.isdisjoint({(id(own), name), (id(own), _ALL)})


_ALL = ""
_WHOLE = "__dict__", "__getstate__", "__reduce__", "__reduce_ex__"
_LOOKS = [
    own.__code__
    for own in (
        nn.Module.__getattr__,
        nn.Module.__setattr__,
        nn.Module.__delattr__,
        nn.Module.__dir__,
    )
]  # these take parameters, modules and names
_PACKAGES = fx.Tracer.__module__, "marvin.", "fixedpoint_kernels."


def _is_of_packages() -> bool:
    """Say whether who reads an attribute is torch's tracer, its modules' own look, or of these packages."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    if frame is None:
        return False
    return frame.f_code in _LOOKS or str(frame.f_globals.get("__name__")).startswith(_PACKAGES)


class Tracer(fx.Tracer):
    """Traces a model, operators in place included; what other threads run meanwhile is left alone.

    Attributes:
        called: Names of the modules that were called, those that are traced through included.
        reads: Of attributes, meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[str, None] = {"": None}
        self.reads = Reads()
        self._thread = threading.get_ident()
        self._made: list[ref[fx.Proxy]] = []

    def is_here(self) -> bool:
        """Say whether this thread is the one that traces."""
        return threading.get_ident() == self._thread

    def trace(
        self,
        root: nn.Module | Callable[..., object],
        concrete_args: dict[str, object] | None = None,
    ) -> fx.Graph:
        """Trace a model; one at a time."""
        with _TRACING, self.reads.noted():
            return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Remember the name of a module that is called."""
        if not self.is_here():
            forward, inputs, options = args
            return forward(*inputs, **options)
        self.called[self.path_of_module(m)] = None
        return super().call_module(m, *args, **kwargs)

    def getattr(
        self, attr: str, attr_val: object, parameter_proxy_cache: dict[str, fx.Proxy]
    ) -> object:
        """Return what stands for a parameter."""
        if not self.is_here():
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def length(self, obj: fx.Proxy) -> int | None:
        """Return how many values there are in one; None where that is not known."""
        return None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for a value while the model's code runs."""
        found = _Proxy(node, self)
        self._made.append(ref(found))
        return found

    def are_kept(self) -> bool:
        """Say whether somebody keeps what stood for a value, after a trace."""
        if any(own() is not None for own in self._made):
            gc.collect()  # in a circle, it may wait for that alone
        return any(own() is not None for own in self._made)


def changes_shared(node: fx.Node, module: nn.Module) -> bool:
    """Say whether a call of a trace of ``module`` writes to what other nodes use, or to memory that they may share."""
    if not _changes_in_place(node, module):
        return False
    if "out" in node.kwargs:
        return True
    waiting = [node.all_input_nodes[0]]
    while waiting:
        own = waiting.pop()
        if len(own.users) > 1 or own.op == "get_attr":  # a parameter's, or a buffer's
            return True
        is_asked_itself = _changes_in_place(own, module)
        if not is_asked_itself and not _makes_own(own, module):
            waiting += own.all_input_nodes
    return False


def _makes_own(node: fx.Node, module: nn.Module) -> bool:
    """Say whether the result of a node is known to share memory with nothing that it takes."""
    if node.op == "call_module":
        return not isinstance(module.get_submodule(str(node.target)), _PASS_ON)
    return _called(node) in _OWN


def _called(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _changes_in_place(node: fx.Node, module: nn.Module) -> bool:
    """Say whether a node writes to what it takes."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    name = _called(node)
    own = getattr(operator, name, None)
    return (own is node.target and name in (*_OPERATORS, "setitem")) or (
        name.endswith("_") and not name.endswith("__")
    )
