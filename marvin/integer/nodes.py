"""What single nodes of a traced model do to images: activations, pooling, means, flattening."""

import inspect
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fixedpoint_kernels._torch_private.compiling import ASSERT
from fixedpoint_kernels.forward_save.known import Known, known
from fixedpoint_kernels.functions import CURVES, Curve
from marvin.integer.layers import IntegerLinear

__all__ = [
    "arguments_of",
    "asks_dtype",
    "asks_shape",
    "casts",
    "computes",
    "concatenation",
    "curve_of",
    "drop_assertions",
    "flattening",
    "is_known",
    "is_needed",
    "is_rms_norm",
    "norm_of",
    "norms_out_of_order",
    "plain",
    "repetition",
    "returned",
    "zeros_around",
]

_CURVES: dict[object, str] = {
    nn.SiLU: "silu", F.silu: "silu",
    nn.Sigmoid: "sigmoid", F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", torch.sigmoid_: "sigmoid",
    "sigmoid": "sigmoid", "sigmoid_": "sigmoid",
    nn.Hardswish: "hardswish", F.hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid", F.hardsigmoid: "hardsigmoid",
    nn.GELU: "gelu", F.gelu: "gelu",
    nn.LeakyReLU: "leaky_relu", F.leaky_relu: "leaky_relu",
}  # fmt: skip
_GELUS: dict[object, str] = {"none": "gelu", "tanh": "gelu_tanh"}
_JOINS = torch.cat, torch.concat, torch.concatenate
_MOST_TIMES = 32  # up to there, PyTorch's own float32 numbers of places are exact
_FLATTENS = torch.flatten, "flatten"
_VIEWS = torch.reshape, "reshape", "view"
_OF_TORCH = "torch", "_operator", "math", "builtins"
_COMPARED = operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge


def plain(node: fx.Node) -> bool:
    """Say whether a call has nothing but its input, and perhaps ``inplace``."""
    return len(node.args) <= 1 and not set(node.kwargs) - {"inplace", "input"}


def is_known(module: nn.Module) -> bool:
    """Say whether a module of a class of its own is known to be a curve or a norm of chains; see ``forward_save.register``."""
    return _said_curve(module) is not None or is_rms_norm(known(module))


def _said_curve(module: nn.Module) -> Curve | None:
    """Return the curve that a module's class is said to be."""
    found = known(module)
    is_curve = found is not None and found.kind == "activation" and found.name in CURVES
    return Curve(found.name) if found is not None and is_curve else None


def computes(module: nn.Module, wanted: Callable[[Tensor], Tensor], features: int = 64) -> bool:
    """Say whether a module's own code computes, on a few rows of features, what its class is said to, to a thousandth."""
    x = torch.linspace(-9, 9, 2 * features, dtype=torch.float32, device="cpu").view(2, features)
    try:
        with torch.no_grad():
            found = type(module).forward(module, x)
            return bool(torch.isclose(found, wanted(x), rtol=1e-3, atol=1e-3).all())
    except Exception:  # whatever code of others raises: it is another function, then
        return False


def is_rms_norm(found: Known | None) -> bool:
    """Say whether a class is known to be RMS normalisation times its weight, or its weight and a number."""
    return found is not None and found.kind == "rms_norm"


def curve_of(node: fx.Node, module: nn.Module) -> Curve | None:
    """Return what curve a node is, if it is one that chains have."""
    own = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    if len(node.all_input_nodes) != 1:
        return None
    if own is not None:
        return _curve_of_module(own) if plain(node) else None
    name = _CURVES.get(node.target)
    if name is None:
        return None
    names = ("input", "negative_slope") if name == "leaky_relu" else ("input",)
    given = dict(zip((*names, "inplace"), node.args, strict=False)) | node.kwargs
    number = given.pop("negative_slope", 0.01) if name == "leaky_relu" else 0.0
    name = _GELUS.get(given.pop("approximate", "none")) if name == "gelu" else name
    if name is None or not isinstance(number, float | int):
        return None
    return None if set(given) - {"input", "inplace"} else Curve(name, float(number))


def _curve_of_module(own: nn.Module) -> Curve | None:
    name = _CURVES.get(type(own))
    if name is None:
        curve = _said_curve(own)
        if curve is None:
            return None
        return curve if computes(own, curve.value) else None
    if isinstance(own, nn.GELU):
        name = _GELUS.get(own.approximate)
    return Curve(name, getattr(own, "negative_slope", 0.0)) if name else None


def asks_shape(node: fx.Node) -> bool:
    """Say whether a node asks for the shape of another, for one of its sizes or how many there are."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel")
    return node.target is getattr and node.args[1] in ("shape", "ndim")


def asks_dtype(node: fx.Node) -> bool:
    """Say whether a node asks for the dtype of another."""
    return node.target is getattr and node.args[1] == "dtype"


def casts(node: fx.Node) -> bool:
    """Say whether a node makes float32 of another, or the dtype that a third has: nothing, where all are float32."""
    if node.op != "call_method" or node.target not in ("float", "to", "type_as"):
        return False
    given = [*node.args[1:], *node.kwargs.values()]
    if node.target == "float" or len(given) != 1 or [*node.kwargs] not in ([], ["dtype"]):
        return node.target == "float" and not given
    if isinstance(given[0], fx.Node):
        return node.target == "type_as" or asks_dtype(given[0])
    return given[0] is torch.float32


def drop_assertions(graph: fx.Graph) -> None:
    """Erase assertions about numbers of dimensions, and comparisons that nobody uses: they keep values in use that chains need not make."""
    for node in reversed(list(graph.nodes)):
        is_unused = not node.users and (node.target in _COMPARED or _counts_dimensions(node))
        if is_unused or (node.target is ASSERT and _tests_dimensions(node.args[0])):
            graph.erase_node(node)


def returned(graph: fx.Graph, module: nn.Module) -> set[fx.Node]:
    """Return the nodes whose very tensors the caller of a module gets, and others take too: it may ask for their gradients.

    Args:
        graph: Of the module.
        module: That was traced.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or (node in found and _hands_on(node, module)):
            found |= {*node.all_input_nodes}
    return {node for node in found if len(node.users) > 1}


def _hands_on(node: fx.Node, module: nn.Module) -> bool:
    """Say whether a node may be the very tensor that it takes, or a record of some."""
    if node.op == "call_module":
        return isinstance(module.get_submodule(str(node.target)), nn.Identity | nn.Dropout)
    if node.op == "call_method":
        return node.target == "contiguous" or casts(node)
    if node.op != "call_function":
        return False
    package = (getattr(node.target, "__module__", None) or "torch").partition(".")[0]
    others = package not in _OF_TORCH  # functions of other packages may return what they take
    return node.target is F.dropout or isinstance(node.target, type) or others


def arguments_of(module: nn.Module) -> list[inspect.Parameter]:
    """Return what ``forward`` takes."""
    return [*inspect.signature(type(module).forward).parameters.values()][1:]


def is_needed(argument: inspect.Parameter) -> bool:
    """Say whether an argument must be given."""
    is_own = argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    return is_own and argument.default is argument.empty


def _tests_dimensions(node: object) -> bool:
    if not isinstance(node, fx.Node) or node.target is not operator.eq:
        return False
    return _counts_dimensions(node.args[0])


def _counts_dimensions(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is getattr and node.args[1] == "ndim"


def norm_of(node: fx.Node, module: nn.Module) -> tuple[str, list[fx.Node]] | None:
    """Return which batch norm a call of ``F.batch_norm`` is, in its mode, and the nodes of its tensors.

    Classes that are batch norms with more (timm's ``BatchNormAct2d``) call it.
    """
    names = "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    tensors = {name: given.get(name) for name in names[1:5]}
    nodes = [own for own in tensors.values() if isinstance(own, fx.Node)]
    owners = {str(own.target).rpartition(".")[0] for own in nodes if own.op == "get_attr"}
    if len(owners) != 1 or any(own.op != "get_attr" for own in nodes):
        return None
    (name,) = owners
    norm = module.get_submodule(name)
    if not isinstance(norm, nn.BatchNorm2d):
        return None
    tracks = norm.track_running_stats
    held = {own: getattr(norm, own) if tracks or own in names[3:] else None for own in tensors}
    for own, tensor in held.items():
        wanted = None if tensor is None else f"{name}.{own}"
        found = tensors[own]
        if (str(found.target) if isinstance(found, fx.Node) else found) != wanted:
            return None
    rest = given.get("training"), given.get("eps")
    if rest != (norm.training, norm.eps):
        return None
    if norm.training and given.get("momentum") != norm.momentum:
        return None
    return name, [own for own in dict.fromkeys(nodes) if len(own.users) == 1]


def norms_out_of_order(graph: fx.Graph, module: nn.Module) -> set[nn.Module]:
    """Return the batch norms whose running statistics several nodes move or read, of which one does not need the one before it.

    Chains may run such nodes in another order than the code, and the last one weighs most.
    """
    nodes: dict[nn.Module, list[fx.Node]] = {}
    for node in graph.nodes:
        for norm in _tracking(node, module):
            nodes.setdefault(norm, []).append(node)
    in_order = {norm for norm, own in nodes.items() if all(_needs(b, a) for a, b in pairwise(own))}
    return {*nodes} - in_order


def _tracking(node: fx.Node, module: nn.Module) -> set[nn.Module]:
    """Return the batch norms whose running statistics a node may move or read."""
    if node.op == "call_module":
        own = module.get_submodule(str(node.target)).modules()
        return {m for m in own if isinstance(m, nn.BatchNorm2d) and m.track_running_stats}
    owners = [str(n.target).rpartition(".") for n in node.all_input_nodes if n.op == "get_attr"]
    names = "running_mean", "running_var"
    return {module.get_submodule(owner) for owner, _, name in owners if name in names}


def _needs(node: fx.Node, other: fx.Node) -> bool:
    """Say whether a node can only run after another."""
    seen, left = {node}, [node]
    while left:
        new = {*left.pop().all_input_nodes} - seen
        seen |= new
        left += new
    return other in seen


def concatenation(node: fx.Node) -> list[fx.Node] | None:
    """Return the nodes whose channels stand side by side, if that is what a node does."""
    if node.target not in _JOINS:
        return None
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    tensors = given.pop("tensors", None)
    if given not in ({"dim": 1}, {"dim": -3}) or not isinstance(tensors, tuple | list):
        return None
    nodes = [own for own in tensors if isinstance(own, fx.Node)]
    return nodes if len(nodes) == len(tensors) else None


def zeros_around(node: fx.Node) -> tuple[int, int] | None:
    """Return how many channels of zeros a node puts before and behind those of an image, if that is what it does."""
    if node.target is not F.pad or len(node.all_input_nodes) != 1:
        return None
    given = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | node.kwargs
    if given.get("mode") != "constant" or given.get("value") not in (None, 0):
        return None
    sides = given.get("pad")
    numbers = [n for n in sides if isinstance(n, int)] if isinstance(sides, tuple | list) else []
    if len(numbers) != 6 or any(numbers[:4]) or min(numbers) < 0:
        return None
    return numbers[4], numbers[5]


def repetition(node: fx.Node, module: nn.Module) -> tuple[int, int] | None:
    """Return how often each place is repeated, down and across, if a node is nearest upsampling by whole numbers."""
    if len(node.all_input_nodes) != 1:
        return None
    if node.op == "call_module":
        own = module.get_submodule(str(node.target))
        if not plain(node) or type(own) not in (nn.Upsample, nn.UpsamplingNearest2d):
            return None
        assert isinstance(own, nn.Upsample)
        return _times(own.size, own.scale_factor, own.mode)
    if node.target is not F.interpolate:
        return None
    given = dict(zip(("input", "size", "scale_factor", "mode"), node.args, strict=False))
    given |= node.kwargs
    known = {"input", "size", "scale_factor", "mode"}
    if any(value for name, value in given.items() if name not in known):
        return None
    return _times(given.get("size"), given.get("scale_factor"), given.get("mode", "nearest"))


def _times(size: object, factor: object, mode: object) -> tuple[int, int] | None:
    if size is not None or mode != "nearest":
        return None
    pair = factor if isinstance(factor, tuple | list) else (factor, factor)
    numbers = [int(n) for n in pair if isinstance(n, int | float) and n in range(1, _MOST_TIMES)]
    return (numbers[0], numbers[1]) if len(numbers) == len(pair) == 2 else None


def flattening(node: fx.Node, module: nn.Module) -> tuple[fx.Node, ...] | None:
    """Return the nodes that make (images, features) of images, which end with ``node``, or None.

    ``x.view(-1, features)`` and ``x.view(len(x), features)`` only say so where linear layers alone take it:
    then the shapes that come tell whether it is the same.
    """
    if node.op == "call_module":
        own = module.get_submodule(str(node.target))
        ends = type(own) is nn.Flatten and own.start_dim == 1 and own.end_dim in (-1, 3)
        return (node,) if ends and plain(node) else None
    if node.target in _FLATTENS:
        names = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
        names.pop("input", None)
        ends = names.pop("start_dim", 0) == 1 and names.pop("end_dim", -1) in (-1, 3)
        return (node,) if ends and not names else None
    if node.target not in _VIEWS or node.kwargs or not isinstance(node.args[0], fx.Node):
        return None
    sizes = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
    return _viewed(node, sizes, module) if len(sizes) == 2 else None


def _viewed(node: fx.Node, sizes: Sequence[Any], module: nn.Module) -> tuple[fx.Node, ...] | None:
    images, features = sizes
    if isinstance(features, fx.Node):
        return None
    if not isinstance(images, fx.Node):
        return (node,) if images == -1 and _are_taken(node, features, module) else None
    before = _number_of_images(images, node)
    fits = features == -1 or _are_taken(node, features, module)
    return (*before, node) if before is not None and fits else None


def _are_taken(node: fx.Node, features: object, module: nn.Module) -> bool:
    """Say whether linear layers of so many features, and nothing else, take what a node makes."""
    users = [module.get_submodule(str(n.target)) for n in node.users if n.op == "call_module"]
    fit = all(isinstance(own, IntegerLinear) and own.in_features == features for own in users)
    return fit and len(users) == len(node.users)


def _number_of_images(size: fx.Node, user: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the nodes of ``x.size(0)`` or ``x.shape[0]``, if ``user``, a view of ``x``, alone takes it."""
    nodes = [size]
    if size.target is operator.getitem and size.args[1] == 0:
        (before,) = size.all_input_nodes
        nodes.insert(0, before)
        known = before.target == "size" and len(before.args) == 1
        known |= before.target is getattr and before.args[1:] == ("shape",)
    else:
        known = size.target == "size" and size.args[1:] == (0,)
    alone = all(len(own.users) == 1 for own in nodes) and list(size.users) == [user]
    if not known or not alone or any(own.kwargs for own in nodes):
        return None
    return tuple(nodes) if nodes[0].args[0] is user.args[0] else None
