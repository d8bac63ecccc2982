"""From a model to a network: traced by torch.fx, each call translated or refused by name."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError
from marvin.export.execute.verify import evaluating
from marvin.export.frontend.builder import Builder
from marvin.export.frontend.calibrate import POOLS
from marvin.export.frontend.follow import Step, check_numbers, follow
from marvin.export.frontend.foreign import check_own, kind_of
from marvin.export.frontend.layers import MODULES
from marvin.export.graph.formats import Formats, activation_formats, weight_formats
from marvin.export.graph.nodes import Add, Flatten, Network, Relu
from marvin.export.passes.shorten_scales import shorten_scales
from marvin.rounding import Format
from marvin.tracing import Tracer

__all__ = ["describe"]

_ADDS = operator.add, operator.iadd, torch.add, "add", "add_"
_RELUS = torch.relu, torch.relu_, F.relu, "relu", "relu_"
_IN_PLACE = operator.iadd, "add_", torch.relu_, "relu_"
_FLATTENS = torch.flatten, "flatten"
_SAME = nn.Identity, nn.Dropout  # which give back the tensor they take
_SHAPES = nn.Flatten, *_SAME  # values go through them unchanged


def describe(
    model: nn.Module,
    sample: Tensor,
    weights: Mapping[str, Format] | None = None,
    activations: Mapping[str, Formats] | None = None,
    *,
    scale_wl: int = 16,
) -> Network:
    """Return a model as exact operations and roundings, which can be exported.

    Supported are straight-line models of ``Conv2d``, ``Linear``, ``BatchNorm1d`` and
    ``BatchNorm2d``, ``ReLU``, ``MaxPool2d``, ``AvgPool2d``, ``AdaptiveAvgPool2d`` (windows of one
    size), ``Flatten``, ``Identity``, ``Dropout``, sums of two values, and the functions of the
    same meaning. Anything else is refused by name.

    Batch normalisation becomes an affine map in fixed point of its own: the scale
    ``weight / sqrt(running_var + eps)`` and the offset ``bias - running_mean * scale``, computed
    in float64, are rounded to nearest: the scale to ``scale_wl`` bits, the offset to the ``fl`` of
    ``x * scale``. Biases without a format get the ``fl`` of ``x * weight``, that of their
    channel where weights have an ``fl`` by channel, or up to 6 bits finer: see
    ``marvin.export.passes.biases``.

    The sample goes through the model and through what is exported for each of its modules. A gap
    that these roundings and float32's do not explain is refused.

    Args:
        model: Its values of ``weights`` are numbers of their formats. Frozen, or with
            ``marvin.quantize_activations`` on it, unless ``activations`` are given.
        sample: One batch of what the model takes, float32: what the network is compared on, so
            samples of the data, not zeros.
        weights: Formats of parameters by name, such as ``optimizer.formats()``; default: those that
            the model carries.
        activations: Formats from ``calibrate``; default: those that the model carries.
        scale_wl: Word length of batch normalisation's scale, bits.

    Raises:
        ExportError: Something in the model cannot be exported; says what, and why.
    """
    origin = "trained" if activations is None else "calibrated"
    own = activation_formats(model)
    weights = weight_formats(model) if weights is None else weights
    if activations is None:
        activations = own
        if not activations:
            raise ExportError(
                "the model rounds no activations: put marvin.quantize_activations on it, or give "
                "formats from marvin.export.calibrate"
            )
    elif own:
        raise ExportError(
            f"formats of activations must be given for a model that rounds none, got them for one "
            f"that rounds at {next(iter(own))}: leave them out"
        )
    with evaluating(model):
        try:
            tracer = Tracer()
            graph = tracer.trace(model)
        except Exception as error:  # whatever the model's own code raises on a tracer's proxies
            first_line = str(error).partition("\n")[0]
            raise ExportError(f"the model must be traceable by torch.fx: {first_line}") from error
    layers = {str(node.target): None for node in graph.nodes if node.op == "call_module"}
    check_own(model, layers)
    with_pools = _with_pools(graph, model, activations)
    builder = Builder(model, weights, with_pools, scale_wl)
    steps = [step for node in graph.nodes if (step := _translate(builder, node, sample))]
    _check_rounded(tracer, set(layers), activations)
    network = shorten_scales(builder.network(origin))
    rounds = with_pools if origin == "calibrated" else activations
    steps = [replace(step, output_fmt=_output_of(rounds, step.module)) for step in steps]
    check_numbers(model, network, steps)
    follow(model, network, steps, sample, rounds=origin == "trained")
    return network


def _output_of(rounds: Mapping[str, Formats], module: str) -> FixedPoint | None:
    return rounds[module].output if module in rounds else None


def _check_rounded(tracer: Tracer, layers: set[str], activations: Mapping[str, Formats]) -> None:
    """Refuse modules that round something and have calls inside that are traced one by one."""
    inner = [name for name in tracer.called if name in activations and name not in layers]
    if inner:
        shown = inner[0] or "the model"
        raise ExportError(f"{shown} rounds activations and is not called as one layer")


def _with_pools(
    graph: fx.Graph, model: nn.Module, activations: Mapping[str, Formats]
) -> dict[str, Formats]:
    """Return formats in which an average that is not rounded has the format of what takes it."""
    found = dict(activations)
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "call_module" and isinstance(model.get_submodule(name), POOLS):
            own = found.get(name, Formats(None, None))
            taken = set(_formats_of_users(node, model, activations))
            if own.output is None and len(taken) == 1:
                found[name] = replace(own, output=taken.pop())
    return found


def _formats_of_users(
    node: fx.Node, model: nn.Module, activations: Mapping[str, Formats]
) -> Iterator[FixedPoint | None]:
    """Yield what those round to that take a value, whatever its shape."""
    for user in node.users:
        name = str(user.target)
        if (
            user.op == "call_module" and isinstance(model.get_submodule(name), _SHAPES)
        ) or user.target in _FLATTENS:
            yield from _formats_of_users(user, model, activations)
        else:
            is_layer = user.op == "call_module" and name in activations
            yield activations[name].input if is_layer else None


def _translate(builder: Builder, node: fx.Node, sample: Tensor) -> Step | None:
    """Add what one node of the trace computes; return the step, if it is one."""
    if node.op == "call_module":
        return _module(builder, node)
    if node.op in ("call_function", "call_method"):
        return _function(builder, node)
    if node.op == "placeholder":
        _placeholder(builder, node, sample)
    elif node.op == "output":
        _output(builder, node)
    else:
        raise ExportError(f"{node.target}: a tensor used outside a layer cannot be exported")
    return None


def _placeholder(builder: Builder, node: fx.Node, sample: Tensor) -> None:
    if builder.operations:
        raise ExportError(f"a network must have one input, got another: {node.name}")
    builder.begin(node.name, tuple(sample.shape[1:]))
    builder.memory.new(node, node.name)


def _module(builder: Builder, node: fx.Node) -> Step:
    name = str(node.target)
    module = builder.model.get_submodule(name)
    kind = kind_of(module, MODULES)
    if kind is None:
        raise ExportError(f"{name}: {type(module).__name__} cannot be exported")
    taken, source = _source(builder, node, name)
    rounds, before = builder.input_format(name, source), len(builder.operations)
    result = MODULES[kind](builder, builder.unused(name), name, module, source)
    if kind in _SAME:
        builder.memory.same(node, taken)
    elif kind is nn.Flatten:
        builder.memory.view(node, taken, result)
    elif getattr(module, "inplace", False):
        builder.memory.write(node, taken, result)
    else:
        builder.memory.new(node, result)
    return Step(name, (source,), result, _names(builder, before), rounds)


def _function(builder: Builder, node: fx.Node) -> Step:
    target = node.target
    values = [x for x in node.args if isinstance(x, fx.Node)]
    rest = [x for x in node.args if not isinstance(x, fx.Node)]
    name, before = builder.unused(node.name), len(builder.operations)
    in_place = target in _IN_PLACE
    if target in _ADDS and len(values) == 2 and not rest and not node.kwargs:
        sources = tuple(builder.rounded(builder.memory.read(v, name), name) for v in values)
        result = builder.add(Add(name, sources))
    elif (
        target in _RELUS
        and len(values) == 1
        and (inplace := _inplace(rest, node.kwargs)) is not None
    ):
        in_place |= inplace
        sources = (_source(builder, node, name)[1],)
        result = builder.add(Relu(name, sources))
    elif target in _FLATTENS and _flattens_all(rest, node.kwargs):
        sources = (_source(builder, node, name)[1],)
        result = builder.add(Flatten(name, sources))
    else:
        text = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        arguments = ", ".join(map(str, node.args))
        raise ExportError(f"{node.name}: {text}({arguments}) cannot be exported")
    if in_place:
        builder.memory.write(node, values[0], result)
    elif target in _FLATTENS:
        builder.memory.view(node, values[0], result)
    else:
        builder.memory.new(node, result)
    return Step("", sources, result, _names(builder, before))


def _names(builder: Builder, before: int) -> tuple[str, ...]:
    """Return the names of the operations added since there were ``before``."""
    return tuple(op.name for op in builder.operations[before:])


def _inplace(rest: list[Any], kwargs: Mapping[str, object]) -> bool | None:
    """Return whether a ReLU with these arguments works in place; None if it has others."""
    given = [*rest, *kwargs.values()]
    is_known = len(given) <= 1 and set(kwargs) <= {"inplace"}
    return bool(given and given[0]) if is_known else None


def _flattens_all(rest: list[Any], kwargs: Mapping[str, object]) -> bool:
    arguments = dict(zip(("start_dim", "end_dim"), rest, strict=False)) | dict(kwargs)
    return arguments.pop("start_dim", 0) == 1 and arguments.pop("end_dim", -1) == -1


def _source(builder: Builder, node: fx.Node, name: str) -> tuple[fx.Node, str]:
    """Return the node that a call takes, and the value that is in it."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source not in builder.memory:
        raise ExportError(f"{name} must be called with a value of the network, got {source}")
    return source, builder.memory.read(source, name)


def _output(builder: Builder, node: fx.Node) -> None:
    result = node.args[0]
    if not isinstance(result, fx.Node):
        raise ExportError(f"a network must have one output, got {result}")
    builder.end(builder.memory.read(result, "the output"))
