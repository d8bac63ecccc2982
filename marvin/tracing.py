"""Traces of models by torch.fx that keep operations in place, and name what was called."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import fx, nn
from torch.fx.proxy import TraceError

from fixedpoint_kernels._torch_private.compiling import ASSERT, asserting
from marvin.kinds import (
    OWN,
    PASS_ON,
    Kinds,
    called,
    changes_in_place,
    kind_of_attribute,
    kind_of_node,
)
from marvin.proxies import (
    OF_TEXTS,
    AskedTracer,
    ProxyOfValue,
    Types,
    answered,
    caller,
    is_of_packages,
)

__all__ = ["Reads", "Tracer", "changes_shared"]

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
        # nn.Module has one while another thread traces
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


def _is_of_packages() -> bool:
    """Say whether who reads an attribute is torch's tracer, its modules' own look, or of these packages."""
    frame = caller(2)
    return frame is not None and (frame.f_code in _LOOKS or is_of_packages(frame))


class Tracer(AskedTracer):
    """Traces a model, operators in place included; what other threads run meanwhile is left alone.

    Attributes:
        called: Names of the modules that were called, those that are traced through included.
        reads: Of attributes, meanwhile.
        functions: That are no part of torch and give tensors.
    """

    functions: frozenset[Callable[..., object]] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[str, None] = {"": None}
        self.reads = Reads()
        self._thread = threading.get_ident()
        self._made: list[ref[fx.Proxy]] = []
        self._kinds: dict[fx.Node, Kinds] = {}
        self._types = Types(self.check)

    def is_here(self) -> bool:
        """Say whether this thread is the one that traces."""
        return threading.get_ident() == self._thread

    def trace(
        self,
        root: nn.Module | Callable[..., object],
        concrete_args: dict[str, object] | None = None,
    ) -> fx.Graph:
        """Trace a model; one at a time.

        Raises:
            TraceError: The model's code asks what nobody can answer before it runs, even if it catches that error.
        """
        with _TRACING, self.reads.noted():
            try:
                if isinstance(root, nn.Module):
                    self._types.put_in(root)
                with answered(), asserting(self.check):
                    graph = super().trace(root, concrete_args)
            except Exception as error:
                if not self.unanswered:
                    raise
                raise TraceError(self.unanswered[0]) from error
            finally:
                self._types.restore()
        if self.texts:
            self.refused(OF_TEXTS)
        if self.unanswered:
            raise TraceError(self.unanswered[0])
        return graph

    def call_module(self, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Remember the name of a module that is called."""
        if not self.is_here():
            forward, inputs, options = args
            return forward(*inputs, **options)
        self.called[name := self.path_of_module(m)] = None
        if not self.is_leaf_module(m, name):
            self._types.put_in(m)
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
        self._kinds[node] = kind_of_node(
            node, self._kinds, self.root, self.functions, self.is_known_layer
        )
        found = ProxyOfValue(node, self)
        self._made.append(ref(found))
        return found

    def kinds(self, proxy: fx.Proxy) -> Kinds:
        """Return the classes of which a value has one; none where nothing is known."""
        own = vars(proxy)
        if "attr" in own and own["_node"] is None:
            return kind_of_attribute(self.kinds(own["root"]), own["attr"])
        return self._kinds.get(proxy.node, ())

    def is_known_layer(self, m: nn.Module) -> bool:
        """Say whether a module of a class of others gives a tensor of its own."""
        return False

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        """Add a node; remember an error, even if the model's code catches it."""
        if args[:2] == ("call_function", ASSERT):
            self.told([*args[2], *args[3].values()][-1])
        with self._noted():
            return super().create_proxy(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuse a branch on a value; remember it, even if the model's code catches the error."""
        with self._noted():
            return super().to_bool(obj)

    def iter(self, obj: Any) -> Iterator[Any]:
        """Yield what is known to be in a value; else refuse a loop, and remember it, even if the model's code catches the error."""
        length = self.length(obj)
        if length is None:
            raise self.refused("it loops over a value, or takes it apart")
        return (obj[i] for i in range(length))

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.refused(str(error))
            raise

    def are_kept(self) -> bool:
        """Say whether somebody keeps what stood for a value, after a trace."""
        if any(own() is not None for own in self._made):
            gc.collect()  # in a circle, it may wait for that alone
        return any(own() is not None for own in self._made)


def changes_shared(node: fx.Node, module: nn.Module) -> bool:
    """Say whether a call of a trace of ``module`` writes to what other nodes use, or to memory that they may share."""
    if not changes_in_place(node, module):
        return False
    if "out" in node.kwargs:
        return True
    waiting = [node.all_input_nodes[0]]
    while waiting:
        own = waiting.pop()
        if len(own.users) > 1 or own.op == "get_attr":  # a parameter's, or a buffer's
            return True
        is_asked_itself = changes_in_place(own, module)
        if not is_asked_itself and not _makes_own(own, module):
            waiting += own.all_input_nodes
    return False


def _makes_own(node: fx.Node, module: nn.Module) -> bool:
    """Say whether the result of a node is known to share memory with nothing that it takes."""
    if node.op == "call_module":
        return not isinstance(module.get_submodule(str(node.target)), PASS_ON)
    return called(node) in OWN
