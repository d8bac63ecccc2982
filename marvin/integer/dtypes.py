"""What is known of dtypes while a model is traced, so that code may compare them.

Code asks ``x.dtype == torch.float16`` before it clamps, say. The dtypes of arguments, parameters and buffers are noted; what
layers and functions make of float32 is float32.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fixedpoint_kernels._torch_private.modules import table_of
from marvin.integer.layers import is_linear
from marvin.integer.nodes import asks_dtype, casts, is_known
from marvin.kinds import called, has_hooks_of_others

__all__ = ["AssumedDtypes", "Dtypes"]

_MODULES = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.Identity, nn.Dropout, nn.Flatten,
    nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid,
)  # fmt: skip
_OF_FIRST = {  # these have the dtype of what they take first, where that is float32
    "abs", "adaptive_avg_pool2d", "avg_pool2d", "chunk", "clone", "contiguous", "cos", "dropout", "erf", "exp", "expand",
    "expand_as", "flatten", "flip", "gelu", "layer_norm", "linear", "log", "masked_fill", "max_pool2d", "mean", "movedim",
    "narrow", "neg", "permute", "relu", "repeat", "repeat_interleave", "reshape", "rms_norm", "roll", "rsqrt",
    "scaled_dot_product_attention", "select", "sigmoid", "silu", "sin", "softmax", "split", "sqrt", "square", "squeeze", "sum",
    "swapaxes", "tanh", "transpose", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
_OF_ALL = {"add", "iadd", "sub", "isub", "mul", "imul", "truediv", "div", "pow", "matmul", "bmm"}
_JOINS = torch.cat, torch.concat, torch.concatenate, torch.stack
_PLACES = torch, F, operator


@dataclass(frozen=True)
class AssumedDtypes:
    """Dtypes that a trace takes for granted.

    Args:
        arguments: Of arguments, by name.
        tensors: Of parameters and buffers: where each is, its name there, and its dtype.
    """

    arguments: Mapping[str, torch.dtype] = field(default_factory=dict)
    tensors: tuple[tuple[Mapping[str, object], str, torch.dtype], ...] = ()

    def hold(self, given: Mapping[str, Tensor]) -> bool:
        """Say whether arguments, and what the module has now, have these."""
        if not all(given[name].dtype is dtype for name, dtype in self.arguments.items()):
            return False
        found = ((table.get(name), dtype) for table, name, dtype in self.tensors)
        return all(isinstance(own, Tensor) and own.dtype is dtype for own, dtype in found)


class Dtypes:
    """Dtypes in a graph that is being traced, and what was assumed of them.

    Args:
        module: That is traced.
        given: Of arguments, by name, where a call told them; others are float32.
    """

    def __init__(self, module: nn.Module, given: Mapping[str, torch.dtype]) -> None:
        self._module, self._given = module, given
        self.answers: dict[fx.Node, bool] = {}
        self._arguments: dict[str, torch.dtype] = {}
        self._tensors: dict[str, tuple[Mapping[str, object], str, torch.dtype]] = {}
        self._known: dict[fx.Node, torch.dtype | None] = {}

    @property
    def assumed(self) -> AssumedDtypes:
        """All of it until now."""
        return AssumedDtypes({**self._arguments}, tuple(self._tensors.values()))

    def truth(self, node: fx.Node) -> bool | None:
        """Return whether two dtypes are the same, or not; None where something else is compared, or not known."""
        if node.target not in (operator.eq, operator.ne) or len(node.args) != 2:
            return None
        a, b = (self._asked(own) for own in node.args)
        if a is None or b is None:
            return None
        self.answers[node] = (a is b) is (node.target is operator.eq)
        return self.answers[node]

    def _asked(self, own: object) -> torch.dtype | None:
        if isinstance(own, torch.dtype):
            return own
        return self.of(own.args[0]) if isinstance(own, fx.Node) and asks_dtype(own) else None

    def of(self, node: object) -> torch.dtype | None:
        """Return the dtype of a tensor, or of each in a tuple; None where that is not known."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._known:
            self._known[node] = self._found(node)
        return self._known[node]

    def _found(self, node: fx.Node) -> torch.dtype | None:
        if node.op == "placeholder":
            name = str(node.target)
            return self._arguments.setdefault(name, self._given.get(name, torch.float32))
        if node.op == "get_attr":
            return self._of_tensor(str(node.target))
        if node.op == "call_module":
            return self._behind(node)
        if casts(node):
            return self._cast(node)
        return self._made(node) if node.op == "call_method" or _is_of_torch(node) else None

    def _made(self, node: fx.Node) -> torch.dtype | None:
        """Return the dtype of what a function of torch's or a method makes."""
        given = *node.args, *node.kwargs.values()
        if "out" in node.kwargs or any(isinstance(own, torch.dtype) for own in given):
            return None
        if node.target is operator.getitem:
            return self.of(node.args[0])
        if node.target in _JOINS:
            own = node.args[0] if node.args else None
            return self._float32(own if isinstance(own, tuple | list) else [own])
        if called(node) in _OF_FIRST:
            return self._float32(node.args[:1])
        if called(node) in _OF_ALL and not node.kwargs:
            return self._float32(own for own in node.args if type(own) not in (int, float))
        return None

    def _behind(self, node: fx.Node) -> torch.dtype | None:
        """Return the dtype of what a module makes."""
        name, found = str(node.target), self._float32(node.args[:1])
        own = self._module.get_submodule(name)
        if has_hooks_of_others(own):
            return None
        if isinstance(own, _MODULES) or is_linear(own):
            return found
        if not is_known(own):
            return None
        dtypes = {self._of_tensor(f"{name}.{key}") for key, _ in own.named_parameters()}
        return found if dtypes <= {torch.float32} else None

    def _cast(self, node: fx.Node) -> torch.dtype | None:
        wanted = next(iter((*node.args[1:], *node.kwargs.values())), torch.float32)
        return self.of(wanted) if node.target == "type_as" else self._asked(wanted)

    def _of_tensor(self, name: str) -> torch.dtype | None:
        owner, _, own = name.rpartition(".")
        table = table_of(self._module.get_submodule(owner), own)
        found = table.get(own)
        if not isinstance(found, Tensor):
            return None
        self._tensors[name] = table, own, found.dtype
        return found.dtype

    def _float32(self, nodes: Iterable[object]) -> torch.dtype | None:
        """Return float32 if all of some values are; there is one at least."""
        return torch.float32 if {self.of(own) for own in nodes} == {torch.float32} else None


def _is_of_torch(node: fx.Node) -> bool:
    """Say whether a node's function is the one of its name of torch, its functions or Python's operators."""
    return any(getattr(own, called(node), None) is node.target for own in _PLACES)
