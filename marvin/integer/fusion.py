"""Running chains of layers as one: forward and backward in training, forward where nothing goes backward."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fixedpoint_kernels import products
from fixedpoint_kernels._torch_private.compiling import compiled_as_constant
from fixedpoint_kernels._torch_private.modes import is_watched
from fixedpoint_kernels._torch_private.modules import called_in, global_forward_hooks
from fixedpoint_kernels.watch import KEPT, OtherForward, has_own_forward, unbound
from marvin.compiled import is_traced
from marvin.hooks import not_scripted, restore_forwards, rounders_of
from marvin.integer.chain_graph import Chain
from marvin.integer.chain_run import ChainRun
from marvin.integer.formats import has_hooks, rounds_inputs
from marvin.integer.graph import NOT_TRACED, Arguments, Traced, part_of, trace
from marvin.integer.graph_code import GraphCode
from marvin.integer.inference_run import InferenceRun
from marvin.integer.layers import IntegerConv2d, IntegerLinear, is_linear, stock_class, uncompiled
from marvin.integer.nodes import arguments_of, is_needed
from marvin.integer.notes import PLAIN, Plain, exact
from marvin.integer.seen import Seen
from marvin.integer.sizes import Assumed
from marvin.integer.strayed import Strayed
from marvin.integer.token_inference import TokenInference
from marvin.integer.token_run import TokenRun, put_in

__all__ = ["fuse", "fused_layers", "own_forwards", "refused_calls", "restore_forwards"]

_PROGRAMS = 4  # traces of calls, and variants of chains, that a module keeps
_CALLS = 16  # kinds of calls, by names and plain values of arguments
_numbers = count()


class _Given(NamedTuple):
    """What a call brings: tensors, plain values, of which tuples tensors are parts, and how many each has; by name.

    One tensor that is given twice is among ``tensors`` once; ``same`` has its other names, and the name that it has there.
    """

    tensors: dict[str, Tensor]
    plain: dict[str, Plain]
    tuples: dict[str, int]
    same: dict[str, str]


class Fused(OtherForward):
    """Runs a module's chains of layers fused where that can be, and the module's own code elsewhere.

    It can be in training with gradients, and in eval mode without, for float32 images on the CPU,
    where layers round to nearest and have formats that fit, and nobody else has hooks on what would
    not be called.

    Args:
        module: Whose ``forward`` this replaces.

    Attributes:
        ran: Whether the last call ran as it was traced.
        refused: An argument of the last call of which no trace can be made, and its class; "": none.
    """

    __slots__ = (
        "_defaults",
        "_lock",
        "_modes",
        "_needed",
        "_order",
        "_others",
        "_own",
        "_places",
        "_strayed",
        "_takes_others",
        "ran",
        "refused",
    )

    def __init__(self, module: nn.Module) -> None:
        self.module, self.ran, self.refused = module, False, ""
        # torch.compile looks at it where there are no formats: what it made is for this object alone
        self._own = str(next(_numbers))
        arguments = arguments_of(module)
        own = [p for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self._order = {p.name: i for i, p in enumerate(own)}
        self._defaults = {p.name: p.default for p in own if type(p.default) in PLAIN}
        self._places = [p.name for p in own if p.kind is not p.KEYWORD_ONLY]
        self._needed = tuple(p.name for p in own if is_needed(p))
        self._takes_others = any(p.kind is p.VAR_KEYWORD for p in arguments)
        self._modes = {training: _Mode(module, training) for training in (True, False)}
        self._others: dict[tuple[object, ...], list[_Mode]] = {}
        self._lock = RLock()
        self._strayed: Strayed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do as ``forward`` of the module's class, outside of torch.compile, which would take chains apart, but for a frozen module."""
        if torch.compiler.is_compiling() and (self._has_formats() or not self._own):
            return uncompiled(Fused.run)(self, args, kwargs)
        called = None if torch.compiler.is_compiling() else called_in(sys._getframe(1))
        if called is None or called is self.module or vars(called).get("forward") is not self:
            return self.run(args, kwargs)
        # copy.copy, and libraries for meta-learning, copied the attributes of this object's module
        return type(called).forward(called, *args, **kwargs)

    @property
    def __func__(self) -> Callable[..., object]:
        """What those who wrap a method bind to the module: a closure over this object would be shared by copies."""
        return unbound(type(self.module).forward)

    @property
    def __globals__(self) -> dict[str, object]:  # for which torch.jit.script asks first
        raise not_scripted()

    @compiled_as_constant
    def _has_formats(self) -> bool:
        """Say whether a policy may change how the module rounds."""
        return any(map(rounders_of, self.module.modules()))

    def run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Do as ``__call__``, by its arguments."""
        given = self._given(args, kwargs) if self._is_kept() else None
        runs = None if given is None else self._ready(given)
        self.ran = runs is not None
        if given is None or runs is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return runs(*given.tensors.values())

    def _is_kept(self) -> bool:
        """Say whether ``restore_forwards`` has not been called, after which one that others have wrapped still runs."""
        own = vars(self.module)
        return own.get(KEPT, own.get("forward")) is self

    def why_not(self) -> str:
        """Say why the module's chains are not fused; "" where they are."""
        return self._modes[True].why_not()

    def layers(self) -> set[str]:
        """Return the names of the layers in chains, within the module: of the calls that were seen, and the usual one."""
        return {name for mode in self._all(True) for name in mode.layers()}

    def inexact(self) -> set[str]:
        """Return the names of the layers in chains whose last bits are others in eval mode."""
        return {name for mode in self._all(False) for name in mode.inexact()}

    def _all(self, training: bool) -> "list[_Mode]":
        with self._lock:
            others = [
                own for key, modes in self._others.items() if key[0] is training for own in modes
            ]
        return [self._modes[training], *others]

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Given | None":
        """Return what a call brings, in order, but for plain values that are the default; None where there is anything else."""
        if len(args) == 1 and not kwargs:
            found = {self._places[0]: args[0]} if self._places else {}
        else:
            found = dict(zip(self._places, args, strict=False)) | kwargs
            if len(found) < len(args) + len(kwargs):
                return None
            if not self._takes_others and not found.keys() <= self._order.keys():
                return None
            nothing, last = object(), len(self._order)
            own = [name for name in found if found[name] is not self._defaults.get(name, nothing)]
            found = {n: found[n] for n in sorted(own, key=lambda n: self._order.get(n, last))}
        tuples = {n: len(x) for n, x in found.items() if type(x) is tuple and x}
        for name in tuples:
            parts = {part_of(name, i): own for i, own in enumerate(found.pop(name))}
            if found.keys() & parts.keys():
                return None
            found |= parts
        tensors = {n: x for n, x in found.items() if type(x) in (Tensor, nn.Parameter)}
        plain = {n: x for n, x in found.items() if type(x) in PLAIN}
        others = [(n, type(x)) for n, x in found.items() if n not in tensors and n not in plain]
        if not any(issubclass(kind, fx.Proxy) for _, kind in others):
            self.refused = f"{others[0][0]}, a {others[0][1].__name__}" if others else ""
        if not tensors or len(tensors) + len(plain) < len(found):
            return None
        names: dict[int, str] = {}
        first = {n: names.setdefault(id(x), n) for n, x in tensors.items()}
        same = {n: own for n, own in first.items() if n != own}
        return _Given({n: tensors[n] for n in names.values()}, plain, tuples, same)

    def _ready(self, given: "_Given") -> GraphCode | None:
        tensors = given.tensors
        if (
            is_traced()
            or is_watched()
            or not all(x.device.type == "cpu" and x.dim() and len(x) for x in tensors.values())
            or torch.is_autocast_enabled("cpu")
            or not products.path().is_own
        ):
            return None
        goes_back = torch.is_grad_enabled() and (
            self.module.training
            or any(x.requires_grad for x in tensors.values())
            or _trains(self.module)
        )
        if goes_back is not self.module.training:
            return None
        if not goes_back:
            self._look()
        mode = self._mode(goes_back, given)
        return None if mode is None else mode.ready(tensors)

    def _look(self) -> None:
        """Warn of weights that are far from their formats."""
        if self._strayed is None:
            self._strayed = Strayed(filter(_is_layer, self.module.modules()))
        self._strayed.look()

    def _mode(self, training: bool, given: "_Given") -> "_Mode | None":
        """Return the chains of calls with such arguments; None where there were too many kinds of calls."""
        own, (tensors, plain, tuples, same) = self._modes[training], given
        is_first = not (plain or tuples or same) and tuple(tensors) == self._needed
        if is_first and own.fits(tensors) and not own.why_not():
            return own
        kinds = tuple((n, exact(x)) for n, x in plain.items())
        key = training, tuple(tensors), kinds, tuple(tuples.items()), tuple(same.items())
        with self._lock:
            if key not in self._others and len(self._others) >= _CALLS:
                return None
            modes = self._others.setdefault(key, [])
            found = next((own for own in modes if own.fits(tensors)), None)
            if found is None and len(modes) < _PROGRAMS:
                found = _Mode(self.module, training, given)
                modes.append(found)
            return found


class _Mode:
    """A module's chains in training, or those in eval mode, where code and chains are others; see ``trace``."""

    def __init__(self, module: nn.Module, training: bool, given: "_Given | None" = None) -> None:
        self.module, self._training = module, training
        self._given = Arguments()
        if given is not None:
            self._given = Arguments(
                tuple(given.tensors),
                given.plain,
                given.tuples,
                {n: tuple(x.shape) for n, x in given.tensors.items()},
                {n: x.dtype for n, x in given.tensors.items()},
                given.same,
            )
        self._known: tuple[Traced | str, Seen | None] | None = None
        # modules of others that did not round when tracing failed
        self._floats: list[nn.Module] = []
        self._runs: dict[frozenset[str], GraphCode] = {}  # by what is left out of chains
        self._lock = RLock()  # threads may come at once

    def fits(self, tensors: dict[str, Tensor]) -> bool:
        """Say whether a call has the shapes and dtypes that were assumed."""
        traced = self._trace()[0]
        return isinstance(traced, str) or traced.assumed.holds(tensors)

    def why_not(self) -> str:
        """Say why chains are not fused; "" where they are."""
        traced = self._trace()[0]
        return traced if isinstance(traced, str) else ""

    def layers(self) -> list[str]:
        """Return the names of the layers in chains, within the module."""
        traced = self._trace()[0]
        return [] if isinstance(traced, str) else traced.layers

    def inexact(self) -> list[str]:
        """Return the names of those in chains that are not, to the bit, what layers compute one by one."""
        traced = self._trace()[0]
        return [] if isinstance(traced, str) else traced.inexact

    def ready(self, tensors: dict[str, Tensor]) -> GraphCode | None:
        """Return the module with its chains, if they can run now; one thread asks at a time."""
        with self._lock:
            return self._ready(tensors)

    def _ready(self, tensors: dict[str, Tensor]) -> GraphCode | None:
        traced, seen = self._trace()
        if seen is not None and (not seen.holds() or any(map(rounds_inputs, seen.inner))):
            self._known, self._runs = None, {}
            traced, seen = self._trace()
        if isinstance(traced, str) or any(global_forward_hooks()):
            return None
        x = next(iter(tensors.values()))
        if traced.chains and (x.dim() != 4 or x.dtype is not torch.float32):
            return None
        if not traced.assumed.holds(tensors):
            return None
        assert seen is not None
        if any(map(has_hooks, seen.inner)):
            return None
        runs = self._without(frozenset())
        if runs is None or all(run.ready() for run in _chains_of(runs)):
            return runs
        unfit = [
            name for run in _chains_of(runs) if isinstance(run, ChainRun) for name in run.unfit()
        ]
        runs = self._without(frozenset(unfit)) if unfit else None
        return runs if runs and all(run.ready() for run in _chains_of(runs)) else None

    def _without(self, left: frozenset[str]) -> GraphCode | None:
        """Return the module with its chains, without some layers; None where no chains are left."""
        if left not in self._runs:
            traced = self._traced(left) if left else self._trace()[0]
            if isinstance(traced, str):
                return None
            while len(self._runs) >= _PROGRAMS:
                del self._runs[next(iter(self._runs))]
            self._runs[left] = _built(self.module, traced, self._training)
        return self._runs[left]

    def _trace(self) -> tuple[Traced | str, Seen | None]:
        known = self._known
        if known is None or any(map(rounds_inputs, self._floats)):  # those are no more looked into
            traced = self._traced()
            seen = None if isinstance(traced, str) else Seen(self.module, traced)
            self._floats = _floats_of(self.module) if seen is None else []
            self._known = known = traced, seen
        return known

    def _traced(self, left: frozenset[str] = frozenset()) -> Traced | str:
        return trace(self.module, left, infers=not self._training, given=self._given)


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _floats_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules within one whose code is traced as long as they have no format of inputs."""
    own = (part for part in module.modules() if part is not module and rounders_of(part))
    return [part for part in own if stock_class(part) is None and not rounds_inputs(part)]


def fuse(model: nn.Module) -> None:
    """Let the chains of a model run fused; those of its children where it cannot be traced."""
    restore_forwards(model)
    for module in _roots(model):
        own = Fused(module)
        setattr(module, KEPT, own)
        module.forward = own


def _fused_of(module: nn.Module) -> Fused | None:
    """Return what a module runs; None where that is something else."""
    own = vars(module).get(KEPT, vars(module).get("forward"))
    is_its_own = isinstance(own, Fused) and own.module is module
    return own if is_its_own and not has_own_forward(module) else None


def own_forwards(model: nn.Module) -> list[str]:
    """Return the names of modules with layers that run a ``forward`` which somebody set on the object."""
    named = ((name, own) for name, own in model.named_modules() if has_own_forward(own))
    return [name for name, own in named if any(map(_is_layer, own.modules()))]


def fused_layers(model: nn.Module) -> tuple[set[str], set[str]]:
    """Return the names of the layers of a model that run fused in training, and of those whose last bits differ in eval mode."""
    fused, inexact = set(), set()
    for name, module in model.named_modules():
        if (own := _fused_of(module)) is not None:
            fused |= {f"{name}.{layer}".lstrip(".") for layer in own.layers()}
            inexact |= {f"{name}.{layer}".lstrip(".") for layer in own.inexact()}
    return fused, inexact


def refused_calls(model: nn.Module) -> dict[str, str]:
    """Return the names of a model's modules whose last call no trace can be made of, and for which argument; the outermost."""
    found: dict[str, str] = {}
    outer: list[str] = []
    for name, module in model.named_modules():
        own = _fused_of(module)
        if own is None or any(name.startswith(other) for other in outer):
            continue
        if own.refused or own.ran:
            outer.append(f"{name}." if name else "")
        if own.refused:
            found[name] = own.refused
    return found


def _roots(module: nn.Module) -> Iterator[nn.Module]:
    if _is_layer(module) or not any(map(_is_layer, module.modules())):
        return
    if has_own_forward(module):
        for child in module.children():
            yield from _roots(child)
        return
    traced = trace(module)
    if not isinstance(traced, str):
        yield module
        is_always = len(arguments_of(module)) == 1 and traced.assumed == Assumed()
        if is_always and not isinstance(module, nn.Sequential):
            for own in module.modules():  # else all are asked, which others may call one by one
                is_apart = rounders_of(own) or has_own_forward(own)
                if own is not module and stock_class(own) is None and is_apart:
                    yield from _roots(own)  # when it rounds what it takes, it is no part of others
            return
    if isinstance(traced, str) and _may_be_traced(module, traced):
        yield module
    for child in module.children():
        yield from _roots(child)


def _may_be_traced(module: nn.Module, reason: str) -> bool:
    """Say whether calls may be traced for what they bring: other arguments, and shapes."""
    arguments = arguments_of(module)
    if any(own.kind is own.VAR_POSITIONAL for own in arguments):
        return False
    has_more = any(own.default is not own.empty for own in arguments)
    return has_more or reason.startswith(NOT_TRACED)


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, IntegerConv2d | IntegerLinear) or is_linear(module)


def _built(module: nn.Module, traced: Traced, training: bool) -> GraphCode:
    """Return the traced module with its chains in place of their layers."""
    named = [(f"tokens_{i}", chain) for i, chain in enumerate(traced.tokens)]
    graph, copies = put_in(traced.graph, named)
    chains: dict[str, nn.Module] = {}
    for name, chain in named:
        own = TokenRun(module, chain, has_hooks) if training else TokenInference(module, chain)
        chains[name] = own
    for i in reversed(range(len(traced.chains))):  # one may take what one before it makes
        chain = traced.chains[i]
        name = f"chain_{i}"
        chains[name] = (ChainRun if training else InferenceRun)(module, chain)
        inside = [copies[node] for node in chain.replaced]
        source = copies[chain.input]
        with graph.inserting_after(source):
            call = graph.call_module(name, (source,))
        _pass_on(chain, call, copies, inside)
        for node in reversed(inside):
            if not node.users:
                graph.erase_node(node)
    graph.lint()
    return GraphCode(graph, module, chains)


def _pass_on(
    chain: Chain, call: fx.Node, copies: dict[fx.Node, fx.Node], inside: list[fx.Node]
) -> None:
    """Give others what leaves a chain, in place of what its nodes made."""
    graph, numbers = call.graph, [i for i, v in enumerate(chain.values) if v.is_output]
    for node, (number, flattens) in reversed(chain.used.items()):
        with graph.inserting_after(call):
            item = graph.call_function(_item, (call, numbers.index(number)))
        if flattens:
            with graph.inserting_after(item):
                item = graph.call_function(torch.flatten, (item, 1))
        for user in list(copies[node].users):
            if user not in inside:
                user.replace_input_with(copies[node], item)


def _item(values: tuple[Tensor, ...], k: int) -> Tensor:
    return values[k]


def _chains_of(runs: GraphCode) -> Iterator["ChainRun | TokenRun"]:
    for module in runs.chains:
        if isinstance(module, ChainRun | TokenRun):
            yield module
