"""Of which class the values of a trace are, where that is known for certain."""

import operator
from collections.abc import Callable, Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fixedpoint_kernels._torch_private.modules import own_forward_hooks, table_of

__all__ = ["OPERATORS", "OWN", "PASS_ON", "Kinds", "are_tensors", "called", "changes_in_place", "has_hooks_of_others", "kind_of_attribute", "kind_of_node"]  # fmt: skip

Kinds = tuple[type, ...]
"""Classes of which a value has one; none where nothing is known."""

OPERATORS = (  # in place, which torch.fx would trace as others
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul",
    "iand", "ior", "ixor", "ilshift", "irshift",
)  # fmt: skip
# what gives a tensor of its own; of others, a result may share memory with what they take
OWN = {
    "add", "sub", "mul", "div", "truediv", "neg", "matmul", "bmm", "mm", "cat", "concat", "concatenate", "stack", "clone",
    "mean", "sum", "amax", "amin", "softmax", "relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid",
    "leaky_relu", "linear", "conv1d", "conv2d", "batch_norm", "layer_norm", "max_pool2d", "avg_pool2d",
    "adaptive_avg_pool2d", "interpolate", "scaled_dot_product_attention",
}  # fmt: skip
PASS_ON = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
_OTHERS = {  # that give tensors, perhaps the one that they take
    "abs", "chunk_cat", "clamp", "contiguous", "conv3d", "cos", "cumsum", "detach", "dropout", "einsum", "embedding", "elu",
    "erf", "exp", "expand", "expand_as", "flatten", "flip", "float", "floordiv", "full_like", "group_norm", "hardtanh", "log",
    "log_softmax", "masked_fill", "mish", "mod", "movedim", "normalize", "ones_like", "outer", "pad", "permute",
    "pixel_shuffle", "pixel_unshuffle", "pow", "prod", "rand_like", "reciprocal", "repeat", "repeat_interleave", "reshape",
    "rms_norm", "roll", "rsqrt", "selu", "sin", "softplus", "sqrt", "square", "squeeze", "std", "swapaxes", "t", "tile", "to",
    "transpose", "tril", "triu", "type_as", "unflatten", "unfold", "unsqueeze", "upsample", "var", "view", "where",
    "zeros_like", "adaptive_avg_pool1d", "adaptive_avg_pool3d", "avg_pool1d", "avg_pool3d", "instance_norm",
}  # fmt: skip
_TENSORS = OWN | _OTHERS
_CUTS = {"split", "chunk", "unbind", "tensor_split"}  # these give tuples of tensors
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_NUMBERS = {"add", "sub", "mul", "floordiv", "mod", "neg", "iadd", "isub", "imul", "ifloordiv"}
_FUNCTIONS = {
    getattr(place, name)
    for place in (torch, F)
    for name in (*_TENSORS, *_CUTS, *_COMPARISONS)
    if hasattr(place, name)
}
_SUMS = {getattr(operator, name) for name in (*OPERATORS, *_TENSORS) if hasattr(operator, name)}
_COMPARES = {getattr(operator, name) for name in _COMPARISONS}
_ATTRIBUTES: Mapping[str, type] = {
    "shape": torch.Size, "ndim": int, "dtype": torch.dtype, "device": torch.device, "layout": torch.layout,
    "requires_grad": bool, "is_cuda": bool, "data": Tensor, "T": Tensor, "mT": Tensor, "H": Tensor,
}  # fmt: skip
_METHODS: Mapping[str, type] = {"dim": int, "ndimension": int, "numel": int, "nelement": int}
_RECURRENT = nn.RNNBase.forward, nn.RNN.forward, nn.GRU.forward, nn.LSTM.forward
_PAIRS = (*_RECURRENT, nn.MultiheadAttention.forward)  # these give tuples, a tensor first
_MANY = nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer


def are_tensors(kinds: Kinds) -> bool:
    """Say whether a value is a tensor for certain."""
    return bool(kinds) and all(issubclass(own, Tensor) for own in kinds)


def kind_of_attribute(kinds: Kinds, name: str) -> Kinds:
    """Return of which class an attribute of a value is."""
    found = _ATTRIBUTES.get(name) if are_tensors(kinds) else None
    return (found,) if found else ()


def kind_of_node(
    node: fx.Node,
    known: Mapping[fx.Node, Kinds],
    root: nn.Module,
    others: Collection[Callable[..., object]],
    is_known: Callable[[nn.Module], bool],
) -> Kinds:
    """Return of which class a value of a trace is.

    Args:
        node: Of the value.
        known: Classes of what came before.
        root: The module that is traced.
        others: More functions that give tensors.
        is_known: Whether a module that is called whole is known to give a tensor of its own.
    """
    taken = [known.get(own, ()) for own in node.all_input_nodes]
    if node.op == "placeholder":
        return Tensor, nn.Parameter
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return (type(table_of(root.get_submodule(owner), name)[name]),)
    if node.op == "call_module":
        own = root.get_submodule(str(node.target))
        return (Tensor,) if is_known(own) else _behind(own, taken)
    first = known.get(node.args[0], ()) if node.args and isinstance(node.args[0], fx.Node) else ()
    if node.op == "call_method":
        return _of_method(node, first)
    if node.target in others:
        return (Tensor,)
    if node.target is getattr:
        return kind_of_attribute(first, str(node.args[1]))
    if node.target is operator.getitem:
        return _of_item(node, first)
    if node.target in _FUNCTIONS:
        return _of_function(node, first)
    return _of_operator(node, taken)


def _behind(own: nn.Module, taken: list[Kinds]) -> Kinds:
    """Return of which class a module's result is."""
    if has_hooks_of_others(own) or not _is_of_packages(vars(own).get("forward", type(own).forward)):
        return ()
    if type(own).forward in _PAIRS:
        return (tuple,)
    if isinstance(own, (*_MANY, nn.AdaptiveLogSoftmaxWithLoss)):
        return ()
    if isinstance(own, nn.Identity):
        return taken[0] if taken else ()
    if getattr(own, "return_indices", False):
        return ()
    return (
        _wider(*taken) if isinstance(own, PASS_ON) or getattr(own, "inplace", False) else (Tensor,)
    )


def has_hooks_of_others(own: nn.Module) -> bool:
    """Say whether somebody else's hooks may make something else of a module's result."""
    return not all(map(_is_of_packages, own_forward_hooks(own)[1].values()))


def _is_of_packages(function: object) -> bool:
    """Say whether a function is of torch's modules, or of this package."""
    module = str(getattr(function, "__module__", type(function).__module__))
    return module.startswith(("marvin.", "torch.nn.modules."))


def _wider(*taken: Kinds) -> Kinds:
    """Return the classes of what may be one of the tensors that are taken, or a new one."""
    return tuple({Tensor: None, **{own: None for kinds in taken for own in kinds}})


def _of_method(node: fx.Node, first: Kinds) -> Kinds:
    name = str(node.target)
    if first == (torch.Size,) and name == "numel":
        return (int,)
    if not are_tensors(first):
        return ()
    if name == "size":
        return (torch.Size,) if len(node.args) == 1 and not node.kwargs else (int,)
    if name in _METHODS:
        return (_METHODS[name],)
    return _of_function(node, first)


def _of_function(node: fx.Node, first: Kinds) -> Kinds:
    name = called(node)
    if name in _CUTS:
        return (tuple,)
    if node.kwargs.get("return_indices") or name.removesuffix("_") not in _TENSORS | _COMPARISONS:
        return ()
    is_own = name in OWN | _COMPARISONS and not changes_in_place(node)
    return (Tensor,) if is_own else _wider(first)


def _of_item(node: fx.Node, first: Kinds) -> Kinds:
    source, key = node.args[0], node.args[1]
    if are_tensors(first):
        return _wider(first)
    if first == (torch.Size,):
        return (int,) if isinstance(key, int) else (torch.Size,) if isinstance(key, slice) else ()
    if first == (tuple,) and isinstance(source, fx.Node) and isinstance(key, int):
        return (Tensor,) if key == 0 or called(source) in _CUTS else ()
    return ()


def _of_operator(node: fx.Node, taken: list[Kinds]) -> Kinds:
    if not taken or not all(taken) or node.target not in _SUMS | _COMPARES:
        return ()
    if any(map(are_tensors, taken)):
        return _wider(*filter(are_tensors, taken)) if changes_in_place(node) else (Tensor,)
    others = [own for own in node.args if not isinstance(own, fx.Node)]
    if not all(own == (int,) for own in taken) or not all(type(own) is int for own in others):
        return ()
    if node.target in _COMPARES:
        return (bool,)
    return (int,) if called(node) in _NUMBERS else ()


def called(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls; "" where it calls none."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def changes_in_place(node: fx.Node, module: nn.Module | None = None) -> bool:
    """Say whether a node writes to what it takes; that of a module that is called, too, where ``module`` has that."""
    if node.op == "call_module":
        return module is not None and bool(
            getattr(module.get_submodule(str(node.target)), "inplace", False)
        )
    if node.op not in ("call_function", "call_method"):
        return False
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    name = called(node)
    own = getattr(operator, name, None)
    return (own is node.target and name in (*OPERATORS, "setitem")) or (
        name.endswith("_") and not name.endswith("__")
    )
