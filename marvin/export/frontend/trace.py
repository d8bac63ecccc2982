"""From a model to a network: traced by torch.fx, each call translated or refused by name."""

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from inspect import Parameter, signature, unwrap
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument, map_aggregate
from torch.fx.proxy import TraceError
from torch.optim.swa_utils import AveragedModel

from fixedpoint_kernels import FixedPoint, forward_save
from fixedpoint_kernels.forward_save.swap import is_converted
from marvin.channels import ChannelFormat
from marvin.compiled import check_uncompiled
from marvin.export.errors import NO_MEMORY, ExportError, check_length, check_tensor
from marvin.export.execute.verify import evaluating
from marvin.export.frontend.activations import ACTIVATIONS, exact
from marvin.export.frontend.builder import Builder
from marvin.export.frontend.call import Call, by_place
from marvin.export.frontend.calls import CALLS, SHAPES, round_values
from marvin.export.frontend.counts import OtherCount
from marvin.export.frontend.follow import Follower, Step, check_numbers
from marvin.export.frontend.foreign import check_finite, check_own, kind_of
from marvin.export.frontend.functions import layer_of
from marvin.export.frontend.instead import of_error, of_layer
from marvin.export.frontend.layers import MODULES, SAME
from marvin.export.frontend.observe import observe
from marvin.export.frontend.sizes import CUTS, SampleSizes
from marvin.export.frontend.transformers import ROWS, exact_rows
from marvin.export.graph.formats import Formats, activation_formats, weight_formats
from marvin.export.graph.nodes import Network
from marvin.export.passes.shorten_scales import shorten_scales
from marvin.hooks import state_of
from marvin.integer.conversion import revert
from marvin.integer.layers import CLASSES, integer_class, stock_class
from marvin.integer.surroundings import Surroundings
from marvin.kinds import called
from marvin.quantizer import Quantizer
from marvin.refused import check_model
from marvin.rounding import Format
from marvin.tracing import Tracer

__all__ = ["describe"]

_KINDS = {**MODULES, **ACTIVATIONS, **ROWS}
_SOME = FixedPoint(8, 0)  # format: which one does not matter
_VARIABLE = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
_VIEWS = nn.Flatten, nn.Unflatten
_WRAPPERS = nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel


def describe(  # noqa: PLR0913  each is a choice of the user's
    model: nn.Module,
    sample: Tensor,
    weights: Mapping[str, Format] | None = None,
    activations: Mapping[str, Formats] | None = None,
    *,
    scale_wl: int = 16,
    wl: int = 8,
    calibration: Tensor | None = None,
) -> Network:
    """Return a model as exact operations and roundings, which can be exported.

    Supported are models that ``torch.fx`` traces, of convolutions, linear layers, batch normalisation,
    pooling (adaptive in windows of one size), activation functions, dropout, sums, concatenation,
    shapes, parts and orders of tensors, norms of rows, softmax, attention and embeddings, and the
    functions of the same meaning; with one input and any number of outputs. Other arguments of ``forward``
    must have defaults, which are taken; ``Network.defaults`` names them. Anything else is refused by name.

    Activation functions other than ReLU and bounds are tables of codes: each value computed in float64
    and rounded once, so exact by construction. What they take has up to 16 bits where something has
    rounded it; longer codes, and sums that training did not round, are rounded to ``wl`` bits for it.

    Batch normalisation becomes an affine map in fixed point of its own: the scale
    ``weight / sqrt(running_var + eps)`` and the offset ``bias - running_mean * scale``, computed
    in float64, are rounded to nearest: the scale to ``scale_wl`` bits, the offset to the ``fl`` of
    ``x * scale``. Biases without a format get the ``fl`` of ``x * weight``, that of their
    channel where weights have an ``fl`` by channel, or up to 6 bits finer: see
    ``marvin.export.passes.biases``.

    The sample goes through the model and through what is exported for each of its modules. A gap
    that these roundings and float32's do not explain is refused. So is a ``forward`` that changes
    parameters, before it does.

    Args:
        model: Its values of ``weights`` are numbers of their formats. Frozen, or with
            ``marvin.quantize_activations`` on it, unless ``activations`` are given.
        sample: One batch of what the model takes, float32, or int64 where these are indices: what the
            network is compared on, so samples of the data, not zeros.
        weights: Formats of parameters by name, such as ``optimizer.formats()``; default: those that
            the model carries.
        activations: Formats from ``calibrate``; default: those that the model carries.
        scale_wl: Word length of batch normalisation's scale, 2 to 32 bits.
        wl: Word length of formats that neither training nor ``activations`` decide, 2 to 32 bits, 31
            where values cannot be below 0: what a
            table of an activation function takes, and means or results of tables that nothing rounds.
            ``Network.chosen`` names them.
        calibration: Samples whose ranges decide these formats; default: ``sample``.

    Raises:
        ExportError: Something in the model cannot be exported; says what, and why.
        TypeError: ``model`` is no module, or what ``torch.compile`` returned; or ``sample`` is no tensor, or a word
            length no whole number.
    """
    check_model(model, "describe(model, samples)")
    check_uncompiled(model, "describe(model, samples)")
    for name, lengths in {"scale_wl": scale_wl, "wl": wl}.items():
        check_length(name, lengths)
    _check_taken("samples", sample)
    if calibration is not None:
        _check_taken("calibration", calibration)
    if isinstance(model, _WRAPPERS):
        raise ExportError(
            f"the model must come without {type(model).__name__}: write describe(model.module, samples)"
        )
    model = _plain(model)
    _check_dtypes(model)
    origin = "trained" if activations is None else "calibrated"
    own = activation_formats(model)
    weights = weight_formats(model) if weights is None else weights
    model, weights = _turned(model, weights)
    if activations is None:
        activations = own
        if not activations:
            if state_of(model) is not None:
                raise ExportError(
                    "formats of activations must be found first, got a model of no step: train it"
                )
            other = (
                "give formats from marvin.export.calibrate"
                if weights
                else "describe marvin.calibrate(model, batches)"
            )
            raise ExportError(
                "the model rounds no activations: call marvin.quantize_activations(model, optimizer) before it is "
                f"trained, or {other}"
            )
    elif own:
        raise ExportError(
            f"formats of activations must be given for a model that rounds none, got them for one "
            f"that rounds at {next(iter(own))}: leave them out"
        )
    own = set(vars(model))
    try:
        return _described(model, sample, weights, activations, (scale_wl, wl), calibration, origin)
    finally:
        for name in set(vars(model)) - own:  # tensors that the tracer leaves there
            delattr(model, name)


def _check_taken(name: str, x: Tensor) -> None:
    """Refuse samples on which nothing can be compared, and of which no range can be taken."""
    check_tensor(x, name)
    if not x.numel():
        raise ExportError(f"{name} must hold some, to compare on, got shape {tuple(x.shape)}")
    if x.is_meta:
        raise ExportError(f"{name} must have values, got a tensor of the device meta")
    if x.isnan().any():
        raise ExportError("the input must be numbers, got NaN: leave such samples out")


def _plain(model: nn.Module) -> nn.Module:
    """Return a model of torch's own layers: a copy, where others compute the same in eval mode."""
    keeps_less = any(map(is_converted, model.modules()))
    if not keeps_less and not any(stock_class(m) is not None for m in model.modules()):
        return model
    model = copy.deepcopy(model)
    if keeps_less:
        forward_save.revert(model)
    revert(model)
    return model


def _turned(
    model: nn.Module, weights: Mapping[str, Format]
) -> tuple[nn.Module, Mapping[str, Format]]:
    """Return a model whose linear layers of other packages are ``nn.Linear`` in a copy, and formats of its weights."""
    kinds = [(name, type(m)) for name, m in model.named_modules()]
    names = [name for name, kind in kinds if integer_class(kind) not in (None, *CLASSES.values())]
    if not names:
        return model, weights
    model, found = copy.deepcopy(model), dict(weights)
    for name in names:
        own: Any = model.get_submodule(name)
        is_turned, own.__class__ = not isinstance(own, nn.Linear), nn.Linear
        if not is_turned:
            continue
        own.weight = nn.Parameter(own.weight.detach().T.contiguous(), requires_grad=False)
        own.in_features, own.out_features = own.nx, own.nf
        fmt = found.get(key := f"{name}.weight".lstrip("."))
        if isinstance(fmt, ChannelFormat):  # of each input: a sum has one
            found[key] = fmt.whole()
    return model, found


def _check_dtypes(model: nn.Module) -> None:
    """Refuse parameters of other floats than float32, in which nothing would be compared exactly."""
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.dtype != torch.float32:
            raise ExportError(
                f"the model must be float32, got {p.dtype} in {name}: write model.float()"
            )


def _described(  # noqa: PLR0913  each is a choice of the user's
    model: nn.Module,
    sample: Tensor,
    weights: Mapping[str, Format],
    activations: Mapping[str, Formats],
    lengths: tuple[int, int],
    calibration: Tensor | None,
    origin: str,
) -> Network:
    with _unchanged(model):
        graph, tracer = _traced(model, activations, sample)
        _check_inputs(graph)
        layers = {str(node.target): None for node in graph.nodes if node.op == "call_module"}
        check_own(model, layers)
        observed = observe(model, graph, sample)
        if calibration is not None:
            observed = replace(observed, ranges=observe(model, graph, calibration).ranges)
    builder = Builder(model, weights, activations, *lengths, observed)
    steps = [step for node in graph.nodes if (step := _translate(builder, node, sample))]
    other = OtherCount.of(model, graph, sample)
    for node in graph.nodes:
        if node in builder.memory:
            other.check(builder, node, any_sizes=node.target in SHAPES)
    network = shorten_scales(builder.network(origin, tuple(tracer.defaults)))
    steps = [replace(step, output_fmt=_output_of(activations, step.module)) for step in steps]
    check_numbers(model, network, steps)
    follower = Follower(network, steps, origin == "trained", builder.results, builder.origins)
    follower.follow(model, sample)
    return network


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Refuse code that changes parameters, before it does, and code that changes hooks or parts of modules.

    Whatever else it changes of modules, and random generators, are put back.
    """
    surroundings, cause = Surroundings(model), None
    try:
        with surroundings.watched():
            yield
    except ExportError as error:  # of what came of it
        if not surroundings.refused:
            raise
        cause = error
    finally:
        reason = surroundings.restore(values_may_change=True)
    if reason:
        raise ExportError(
            f"the model must stay as it is when it is called in eval mode, but {reason}: do that in the "
            "training loop, or below if self.training"
        ) from cause


def _is_given(parameter: Parameter) -> bool:
    """Return whether a caller must give an argument."""
    return parameter.default is Parameter.empty and parameter.kind not in _VARIABLE


def _nothing_for(parameter: Parameter) -> Any:
    """Return what an argument is that nobody gives."""
    empty = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}
    return empty.get(parameter.kind, parameter.default)


class _Tracer(Tracer):
    """Traces a model, and the roundings of modules that are traced through.

    Args:
        activations: What modules round, by name.
        sample: What the model takes: answers are those of its shape.

    Attributes:
        defaults: Arguments of the model that were not given, and what they are then.
    """

    functions = frozenset({round_values})

    def __init__(self, activations: Mapping[str, Formats], sample: Tensor) -> None:
        super().__init__()
        self.activations, self._sample = activations, sample
        self._sizes: SampleSizes | None = None
        self._computes = False  # of what was traced, not a part of the trace
        self.defaults: list[str] = []

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Give optional arguments of the model their defaults: a network has none."""
        fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        own = unwrap(root_fn)
        parameters = signature(own).parameters
        for place, name in enumerate(own.__code__.co_varnames[: len(args)]):
            if place == 1 and parameters[name].kind in _VARIABLE:
                raise TypeError(f"forward must name its input, got *{name}: write forward(self, x)")
            if place < 2 or _is_given(parameters[name]):  # self, and the network's input
                continue
            self.graph.erase_node(args[place].node)
            args[place] = _nothing_for(parameters[name])
            if parameters[name].kind not in _VARIABLE:
                self.defaults.append(f"{name}={args[place]!r:.40}")
        formats = self.activations.get("")
        if formats is None:
            return fn, args
        root, *inputs = args  # the model itself rounds, as modules do in ``call_module``
        return self._rounding(fn, formats), [root, *(self._round(x, formats.input) for x in inputs)]

    def _rounding(self, fn: Callable[..., Argument], formats: Formats) -> Callable[..., object]:
        """Return ``forward`` of the model, with what it gives rounded."""

        @wraps(fn)
        def rounding(*args: object) -> object:
            return self._round(fn(*args), formats.output)

        return rounding

    def call_module(self, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Add what a module rounds around the calls inside of it."""
        name = self.path_of_module(m) if self.is_here() else ""
        formats = self.activations.get(name) if self.is_here() else None
        if formats is None or self.is_leaf_module(m, name):
            return super().call_module(m, *args, **kwargs)
        forward, inputs, options = args
        inputs = tuple(self._round(x, formats.input) for x in inputs)
        result = super().call_module(m, forward, inputs, options, **kwargs)
        return self._round(result, formats.output)

    def path_of_module(self, mod: nn.Module) -> str:
        """Return the name of a module of the model."""
        try:
            return super().path_of_module(mod)
        except NameError:
            raise TypeError(
                f"forward calls a {type(mod).__name__} that is no part of the model, made there or kept in a list: "
                f"make it in __init__, self.layer = {type(mod).__name__}(...), or keep it in an nn.ModuleList"
            ) from None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether a module is one layer: torch's are, and what rounds by itself."""
        return isinstance(m, Quantizer) or super().is_leaf_module(m, module_qualified_name)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """Add a node; what cuts a tensor gives a tuple of its parts, as in torch."""
        found: Any = super().create_proxy(*args, **kwargs)
        parts = self._ask(SampleSizes.parts, found) if called(found.node) in CUTS else None
        return found if parts is None else tuple(found[i] for i in range(parts))

    def is_here(self) -> bool:
        """Say whether what runs is traced."""
        return not self._computes and super().is_here()

    def rank(self, proxy: fx.Proxy) -> int | None:
        """Return the number of dimensions of a value."""
        return self._ask(SampleSizes.rank, proxy)

    def length(self, obj: fx.Proxy) -> int | None:
        """Return how many sizes a shape has."""
        return self._ask(SampleSizes.length, obj)

    def number(self, proxy: fx.Proxy) -> int | float | None:
        """Return what is computed of sizes, and is the same however many samples come."""
        number = self._ask(SampleSizes.known, proxy)
        return number if isinstance(number, int | float) else None

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer a comparison of sizes that are the same however many samples come."""
        number = self.number(obj)
        return super().to_bool(obj) if number is None else bool(number)

    def _ask(self, question: Callable[[SampleSizes, fx.Node], Any], proxy: fx.Proxy) -> Any:
        self._sizes = self._sizes or SampleSizes(self.root, self.graph, self._sample)
        node, self._computes = proxy.node, True
        try:
            return question(self._sizes, node)
        finally:
            self._computes = False

    def _round(self, values: Argument, fmt: FixedPoint | None) -> Any:
        """Round a value, or those inside of tuples, lists and dictionaries."""
        if fmt is None:
            return values
        numbers = fmt.wl, fmt.fl, fmt.symmetric, fmt.signed

        def rounded(x: Argument) -> Argument:
            if not isinstance(x, fx.Proxy):
                return x
            proxy: Argument = self.create_proxy("call_function", round_values, (x, *numbers), {})  # pyright: ignore[reportAssignmentType]
            return proxy

        return map_aggregate(values, rounded)


def _traced(
    model: nn.Module, activations: Mapping[str, Formats], sample: Tensor
) -> tuple[fx.Graph, _Tracer]:
    """Return the calls of a model; of a model that is one layer, this call."""
    tracer = _Tracer(activations, sample)
    if kind_of(model, _KINDS) is not None:
        graph = fx.Graph()
        graph.output(graph.create_node("call_module", "", (graph.placeholder("x"),)))
        return graph, tracer
    with evaluating(model):
        try:
            graph = tracer.trace(model)
            for node in reversed(graph.nodes):
                if node.target is operator.getitem and not node.users:
                    graph.erase_node(node)  # of parts that nobody takes
            return graph, tracer
        except NO_MEMORY:
            raise
        except Exception as error:  # whatever the model's own code raises on a tracer's proxies
            first_line = str(error).partition("\n")[0]
            hint = of_error(first_line)
            is_known = bool(hint)
            if "ProxyOfValue" in first_line:
                first_line = first_line.replace("ProxyOfValue", "a value or a size")
                hint += "; where a size is meant, write the number, such as range(2, 4)"
            if (hint and not is_known) or isinstance(error, TraceError):
                hint += (
                    "; in forward, no if and no loop may depend on values of tensors, or on how many "
                    "samples come"
                )
            raise ExportError(
                f"the model must be traceable by torch.fx: {first_line}{hint}"
            ) from error


def _check_inputs(graph: fx.Graph) -> None:
    """Refuse a model that must be called with several tensors."""
    inputs = [node.name for node in graph.nodes if node.op == "placeholder" and not node.args]
    if len(inputs) > 1:
        raise ExportError(
            f"a network must have one input, got another: {inputs[1]}; give one tensor that has both, and take "
            f"it apart in forward, {inputs[0]}[:, :4]; a padding mask is made of indices, {inputs[0]} == 0"
        )


def _output_of(rounds: Mapping[str, Formats], module: str | None) -> FixedPoint | None:
    return rounds[module].output if module is not None and module in rounds else None


def _translate(builder: Builder, node: fx.Node, sample: Tensor) -> Step | None:
    """Add what one node of the trace computes; return the step, if it is one."""
    builder.node, builder.whole = node.name, None
    if node.name in builder.observed.constants:
        return None
    if node.op == "call_module":
        module = builder.model.get_submodule(str(node.target))
        return _layer(builder, node, str(node.target), module)
    if node.op in ("call_function", "call_method"):
        return _function(builder, node)
    if node.op == "placeholder":
        _placeholder(builder, node, sample)
    elif node.op == "output":
        _output(builder, node)
    elif node.name not in builder.observed.plain:
        raise ExportError(f"{node.target}: a tensor used outside a layer cannot be exported")
    return None


def _placeholder(builder: Builder, node: fx.Node, sample: Tensor) -> None:
    if (
        builder.operations
    ):  # a default, which is what the model takes when it is called with one tensor
        return
    builder.begin(node.name, tuple(sample.shape[1:]))
    builder.memory.new(node, node.name)


def _layer(builder: Builder, node: fx.Node, name: str, module: nn.Module, key: str = "") -> Step:
    """Add what a layer computes.

    Args:
        builder: Of the network.
        node: Of the trace.
        name: Of the layer, or of the call of a function.
        module: The layer, or one of the same meaning as the function.
        key: Name of its formats, if that is another.
    """
    kind = kind_of(module, _KINDS)
    shown = name or type(module).__name__.lower()
    if kind is None:
        raise ExportError(f"{shown}: {type(module).__name__} cannot be exported{_instead(module)}")
    check_finite(shown, module)
    taken, source = _source(builder, node, shown)
    builder.taken = taken.name
    rounds, before = builder.input_format(key or name, source), len(builder.operations)
    rounds = None if kind is nn.Embedding else rounds  # of indices
    result = _KINDS[kind](builder, builder.unused(shown), key or name, module, source)
    if kind in SAME:
        builder.memory.same(node, taken)
    elif kind in _VIEWS:
        builder.memory.view(node, taken, result)
    elif getattr(module, "inplace", False):
        builder.memory.write(node, taken, result)
    else:
        builder.memory.new(node, result)
    given = {
        "exact": exact(module) if kind in ACTIVATIONS else None,
        "whole": exact_rows(module) if kind in ROWS else builder.whole,
    }
    return _step(builder, name, (source,), result, before, input_fmt=rounds, **given)


def _instead(module: nn.Module) -> str:
    """Return what to use instead of a layer that cannot be exported."""
    near = next((k.__name__ for k in _KINDS if isinstance(module, k)), "")
    if near:
        return f": its forward is not that of {near}"
    return f": {of_layer(module)}"


def _function(builder: Builder, node: fx.Node) -> Step | None:
    """Add what a function or a method computes."""
    if node.name in builder.observed.plain:
        return None  # a size, or several tensors, which the calls that take them look up
    call = Call.of(builder, node)
    if CALLS.get(node.target) is None:
        module = layer_of(node.target, call.args[1:], call.kwargs)
        if module is None or not isinstance(call.args[0], fx.Node):
            raise call.refusal()
        step = _layer(builder, node, node.name, module, f"{node.name}()")
        return replace(step, module=None, call=call.replay)
    before = len(builder.operations)
    sources = tuple(call.value(taken, in_any_order=True) for taken in call.nodes)
    result = CALLS[node.target](builder, call)
    if node not in builder.memory:
        return None
    return _step(builder, None, sources, result, before, call=call.whole, whole=builder.whole)


def _step(
    builder: Builder,
    module: str | None,
    sources: tuple[str, ...],
    result: str,
    before: int,
    **more: Any,
) -> Step:
    """Return a step that has added operations since there were ``before``."""
    added = [op.name for op in builder.operations[before:]]
    waiting, name = [], builder.origins.get(result, result)
    while name in builder.pending and name not in sources:
        pending = builder.pending[name]
        waiting.append(pending.make(name, pending.source, _SOME))
        name = pending.source
    operations = tuple(n for n in added if n not in builder.origins)
    return Step(module, sources, result, operations, waiting=tuple(waiting[::-1]), **more)


def _source(builder: Builder, node: fx.Node, name: str) -> tuple[fx.Node, str]:
    """Return the node that a call takes, and the value that is in it."""
    args = node.args if node.op == "call_module" else by_place(node)[0]
    source = args[0] if args else None
    if not isinstance(source, fx.Node) or source not in builder.memory:
        raise ExportError(f"{name} must be called with a value of the network, got {source}")
    return source, builder.memory.read(source, name)


def _output(builder: Builder, node: fx.Node) -> None:
    heads: dict[str, str] = {}
    for label, value in _heads(builder, node.args[0], ""):
        if label in heads:
            raise ExportError(
                f"outputs must have names of their own, got two of the name {label}: rename one in what "
                "forward returns"
            )
        heads[label] = value
    builder.end(heads)


def _heads(builder: Builder, result: Any, label: str) -> Iterator[tuple[str, str]]:
    """Yield label and value of each output."""
    if isinstance(result, fx.Node) and hasattr(result.target, "_fields"):  # a named tuple
        result = (*result.args, *result.kwargs.values())
    if isinstance(result, fx.Node) and result in builder.memory:
        yield label or "output", builder.memory.read(result, "the output")
    elif isinstance(result, tuple | list | dict) and result:
        pairs = result.items() if isinstance(result, dict) else enumerate(result)
        for key, inner in pairs:
            own = str(key) if isinstance(result, dict) else f"output{key}"
            yield from _heads(builder, inner, f"{label}.{own}".lstrip("."))
    else:
        kind = result.target if isinstance(result, fx.Node) else None
        got = f"{kind.__name__}: return a dictionary" if isinstance(kind, type) else result
        raise ExportError(
            "a network must give tensors, or tuples, lists and dictionaries of them, got "
            f"{label or 'the output'}={got}"
        )
