"""What is known of shapes while a model is traced, so that code may branch on them.

Sizes of the arguments have names. Where code asks ``x.shape[1] > 1``, or takes ``x.shape[:-1]`` apart, an answer is
assumed and noted: what was traced is of such calls alone.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from marvin.integer.dtypes import AssumedDtypes
from marvin.integer.layers import features_of, is_linear
from marvin.integer.nodes import asks_dtype, asks_shape, is_known

__all__ = ["Assumed", "Sizes", "put_in"]

_RANK = 3  # of arguments of which nothing is known: (samples, tokens, features)
_SAME_MODULES = (
    nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid,
)  # fmt: skip
_SAME = (
    F.gelu, F.relu, F.silu, F.dropout, F.layer_norm, F.softmax, torch.relu, torch.tanh, torch.sigmoid, torch.softmax,
    operator.neg, torch.neg, "neg", "contiguous", "float", "clone", "to", "relu", "tanh", "sigmoid", "softmax",
)  # fmt: skip
_SUMS = (
    operator.add,
    operator.iadd,
    operator.sub,
    operator.mul,
    operator.truediv,
    torch.add,
    torch.mul,
)
_JOINS = torch.cat, torch.concat, torch.concatenate
_CUTS = "split", "chunk", torch.split, torch.chunk
_Compare = Callable[[int, int], bool]
_COMPARISONS: dict[_Compare, bool] = {  # what is assumed: sizes are large, and those that are asked for
    operator.gt: True, operator.ge: True, operator.eq: True,
    operator.lt: False, operator.le: False, operator.ne: False,
}  # fmt: skip


@dataclass(frozen=True)
class _Size:
    """A size of an argument."""

    name: str
    dim: int


_Known = int | _Size | None  # None: a size of which nothing is known
_Shape = tuple[_Known, ...]
_Answer = tuple[_Compare, int | _Size, int | _Size, bool]


@dataclass(frozen=True)
class Assumed:
    """What a trace takes for granted of its arguments.

    Args:
        ranks: Numbers of dimensions, by name.
        answers: A comparison, what it compares, numbers or sizes, and what comes of it.
        dtypes: Of arguments, parameters and buffers.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    answers: tuple[_Answer, ...] = ()
    dtypes: AssumedDtypes = field(default_factory=AssumedDtypes)

    def holds(self, given: Mapping[str, Tensor]) -> bool:
        """Say whether arguments are so, and dtypes of the module's tensors."""
        if not all(given[name].dim() == rank for name, rank in self.ranks.items()):
            return False
        if not self.dtypes.hold(given):
            return False

        def number(own: int | _Size) -> int:
            return own if isinstance(own, int) else given[own.name].shape[own.dim]

        return all(compare(number(a), number(b)) is is_so for compare, a, b, is_so in self.answers)


def put_in(graph: fx.Graph, answers: Mapping[fx.Node, bool]) -> None:
    """Put answers in place of comparisons, and erase what a graph computes of sizes and dtypes and nobody uses."""
    for node in reversed([*graph.nodes]):
        if node in answers:
            answer = answers[node]
            for user in [*node.users]:
                args, kwargs = map_arg(
                    (user.args, user.kwargs),
                    lambda n, node=node, answer=answer: answer if n is node else n,
                )
                user.args, user.kwargs = args, kwargs
        if not node.users and (node in answers or _is_asked(node)):
            graph.erase_node(node)


class Sizes:
    """Sizes in a graph that is being traced, and what was assumed of them.

    Args:
        module: That is traced.
        shapes: Of arguments, by name, where a call told them: they decide what is assumed.
    """

    def __init__(
        self, module: nn.Module, shapes: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self._module, self._shapes = module, shapes or {}
        self._ranks: dict[str, int] = {}
        self._answers: dict[fx.Node, _Answer] = {}
        self._assumed: list[_Answer] = []  # that nobody asked for
        self._known: dict[fx.Node, _Shape | None] = {}

    @property
    def answers(self) -> dict[fx.Node, bool]:
        """What comes of comparisons."""
        return {node: answer for node, (*_, answer) in self._answers.items()}

    @property
    def assumed(self) -> Assumed:
        """All of it until now."""
        return Assumed({**self._ranks}, (*self._answers.values(), *self._assumed))

    def length(self, node: fx.Node) -> int | None:
        """Return how many sizes a value is; None where it is something else, or not known."""
        found = self._value(node)
        return len(found) if isinstance(found, tuple) else None

    def truth(self, node: fx.Node) -> bool | None:
        """Return what a comparison of sizes is assumed to be; None where it is something else, or not known."""
        compare = next((own for own in _COMPARISONS if own is node.target), None)
        if compare is None or len(node.args) != 2:
            return None
        a, b = (self._value(own) if isinstance(own, fx.Node) else own for own in node.args)
        if not isinstance(a, int | _Size) or not isinstance(b, int | _Size):
            return None
        if a == b:
            return compare(0, 0)
        if isinstance(a, int) and isinstance(b, int):
            return compare(a, b)
        first, second = self._number(a), self._number(b)
        answer = _COMPARISONS[compare]
        if first is not None and second is not None:
            answer = compare(first, second)
        self._answers[node] = compare, a, b, answer
        return answer

    def _number(self, own: int | _Size) -> int | None:
        if isinstance(own, int):
            return own
        shape = self._shapes.get(own.name)
        return None if shape is None else shape[own.dim]

    def _value(self, node: fx.Node) -> "_Known | _Shape":
        """Return a size or a shape that a node has; None where it is something else, or not known."""
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            return None
        if node.target is operator.floordiv:
            own, by = self._value(first), node.args[1]
            return own // by if isinstance(own, int) and isinstance(by, int) and by else None
        if node.target is operator.getitem:
            own, key = self._value(first), node.args[1]
            if not isinstance(own, tuple) or not isinstance(key, int | slice):
                return None
            return own[key] if isinstance(key, slice) or -len(own) <= key < len(own) else None
        if not asks_shape(node) or node.target == "numel":
            return None
        asked = node.args[1] if node.target is getattr else node.target
        shape = self._shape(first)
        if shape is None or node.kwargs:
            return None
        if asked in ("ndim", "dim"):
            return len(shape)
        dims = node.args[1:] if asked == "size" else ()
        if not dims:
            return shape
        dim = dims[0]
        return shape[dim] if isinstance(dim, int) and -len(shape) <= dim < len(shape) else None

    def _shape(self, node: object) -> _Shape | None:
        """Return the shape of a tensor; None where nothing is known."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._known:
            self._known[node] = self._found(node)
        return self._known[node]

    def _found(self, node: fx.Node) -> _Shape | None:
        if node.op == "placeholder":
            name = str(node.target)
            rank = self._ranks[name] = len(self._shapes.get(name, range(_RANK)))
            return tuple(_Size(name, d) for d in range(rank))
        if node.target is operator.getitem:
            return self._piece(node.args[0]) or self._part(*node.args)
        if node.target in _JOINS:
            return self._joined(*node.args, **node.kwargs)
        if node.target is torch.stack:
            return self._stacked(*node.args, **node.kwargs)
        first = self._shape(node.args[0]) if node.args else None
        return None if first is None else self._made(node, first)

    def _made(self, node: fx.Node, first: _Shape) -> _Shape | None:
        """Return the shape of what a node makes of a value of this shape first of all."""
        if node.op == "call_module":
            return _behind(self._module.get_submodule(str(node.target)), first)
        if node.target is F.scaled_dot_product_attention and len(node.args) >= 3:
            last = self._shape(node.args[2])
            return (*first[:-1], last[-1]) if last else None
        if node.target in _SUMS and len(node.args) == 2:
            if isinstance(node.args[1], int | float):
                return first
            other = self._shape(node.args[1]) or ()
            return tuple(map(self._wider, first, other)) if len(other) == len(first) else None
        if node.target in ("transpose", torch.transpose):
            return _swapped(first, *node.args[1:])
        if node.target in ("view", "reshape"):
            return self._viewed(first, node.args[1:])
        if node.target in ("unsqueeze", torch.unsqueeze):
            return _longer(first, *node.args[1:])
        if node.target in ("flatten", torch.flatten):
            return _flat(first, *node.args[1:], **node.kwargs)
        if node.target in ("repeat_interleave", torch.repeat_interleave):
            return _repeated(first, *node.args[1:], **node.kwargs)
        return first if node.target in _SAME else None

    def _piece(self, node: object) -> _Shape | None:
        """Return the shape of a piece of what a node cuts up; how long it is where it is cut is not known."""
        if not isinstance(node, fx.Node) or node.target not in _CUTS:
            return None
        shape, dim = self._shape(node.args[0]), node.kwargs.get("dim", (*node.args, 0, 0)[2])
        if shape is None or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
            return None
        found: list[_Known] = [*shape]
        found[dim] = None
        return tuple(found)

    def _part(self, node: object, key: object) -> _Shape | None:
        """Return the shape of ``x[..., begin:end:step]``."""
        shape = self._shape(node)
        if shape is None or not isinstance(key, tuple) or len(key) != 2 or key[0] is not ...:
            return None
        last, cut = shape[-1], key[1]
        if not isinstance(cut, slice):
            return None
        begin = 0 if cut.start is None else self._whole(cut.start)
        end = last if cut.stop is None else self._whole(cut.stop)
        step = 1 if cut.step is None else self._whole(cut.step)
        if begin is None or not step:
            return *shape[:-1], None
        if not isinstance(last, int) or not isinstance(end, int):
            return *shape[:-1], None
        return *shape[:-1], len(range(last)[begin:end:step])

    def _joined(self, tensors: object = (), dim: object = 0, **others: object) -> _Shape | None:
        """Return the shape of tensors one behind the other."""
        if others or not isinstance(tensors, tuple | list) or not isinstance(dim, int):
            return None
        shapes = [self._shape(own) for own in tensors]
        known = [own for own in shapes if own is not None and -len(own) <= dim < len(own)]
        if not known or len(known) < len(shapes):
            return None
        found = [*known[0]]
        sizes = [n for own in known if isinstance(n := own[dim], int)]
        found[dim] = sum(sizes) if len(sizes) == len(known) else None
        return tuple(found)

    def _stacked(self, tensors: object = (), dim: object = 0, **others: object) -> _Shape | None:
        """Return the shape of tensors side by side in a new dimension."""
        if (
            others
            or not isinstance(tensors, tuple | list)
            or not tensors
            or not isinstance(dim, int)
        ):
            return None
        shape = self._shape(tensors[0])
        found = None if shape is None else _longer(shape, dim)
        return found and tuple(
            len(tensors) if d == dim % len(found) else n for d, n in enumerate(found)
        )

    def _whole(self, own: object) -> int | None:
        """Return a number, or that of a node that has one."""
        found = self._value(own) if isinstance(own, fx.Node) else own
        return found if isinstance(found, int) else None

    def _viewed(self, shape: _Shape, sizes: Sequence[object]) -> _Shape | None:
        """Return the shape that arguments of ``view`` say."""
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = [*sizes[0]]
        elif len(sizes) == 1 and isinstance(sizes[0], fx.Node):
            found = self._value(sizes[0])
            return found if isinstance(found, tuple) else None
        if not all(isinstance(own, int | fx.Node) for own in sizes):
            return None
        found = [self._size(own) for own in sizes]
        return tuple(
            _left(shape, found) if own == -1 else n for own, n in zip(sizes, found, strict=True)
        )

    def _wider(self, a: _Known, b: _Known) -> _Known:
        """Return the size of a sum of values of two sizes, which are equal, or one of them is 1."""
        if a == b:
            return a
        for one, other in ((a, b), (b, a)):
            if isinstance(one, int):
                return other if one == 1 else one
        if not isinstance(a, _Size) or not isinstance(b, _Size):
            return None
        first, second = self._number(a), self._number(b)
        if first is None or second is None or (first != second and 1 not in (first, second)):
            return None
        taken, other = (b, a) if second == 1 else (a, b)
        is_one = 1 in (first, second)
        self._assumed.append((operator.eq, taken, 1 if is_one else other, True))
        return other

    def _size(self, own: object) -> _Known:
        if isinstance(own, int):
            return own if own >= 0 else None
        found = self._value(own) if isinstance(own, fx.Node) else None
        return None if isinstance(found, tuple) else found


def _behind(module: nn.Module, shape: _Shape) -> _Shape | None:
    """Return the shape of what a module makes of a value."""
    if is_linear(module):
        return *shape[:-1], features_of(module)[0]
    if isinstance(module, nn.Linear):
        return *shape[:-1], module.out_features
    return shape if isinstance(module, _SAME_MODULES) or is_known(module) else None


def _left(shape: _Shape, sizes: Sequence[_Known]) -> _Known:
    """Return the size that ``-1`` stands for in a view, where all others are known."""
    symbols = [own for own in shape if not isinstance(own, int)]
    for own in (own for own in sizes if isinstance(own, _Size)):
        if own not in symbols:
            return None
        symbols.remove(own)
    before = math.prod(own for own in shape if isinstance(own, int))
    after = math.prod(own for own in sizes if isinstance(own, int))
    if None in symbols or len(symbols) > 1 or sizes.count(None) > 1 or not after:
        return None
    if symbols:
        return symbols[0] if before == after else None
    return before // after if before % after == 0 else None


def _flat(shape: _Shape, start_dim: object = 0, end_dim: object = -1) -> _Shape | None:
    """Return the shape where some dimensions are one."""
    dims = [d for d in (start_dim, end_dim) if isinstance(d, int) and -len(shape) <= d < len(shape)]
    if len(dims) != 2:
        return None
    first, last = (d % len(shape) for d in dims)
    sizes = [n for n in shape[first : last + 1] if isinstance(n, int)]
    size = math.prod(sizes) if len(sizes) == last + 1 - first else None
    return *shape[:first], size, *shape[last + 1 :]


def _repeated(
    shape: _Shape, repeats: object, dim: object = None, **others: object
) -> _Shape | None:
    """Return the shape where what lies along a dimension is there some times."""
    if others or not isinstance(repeats, int) or not isinstance(dim, int):
        return None
    if not -len(shape) <= dim < len(shape):
        return None
    found, size = [*shape], shape[dim]
    found[dim] = size * repeats if isinstance(size, int) else None
    return tuple(found)


def _longer(shape: _Shape, dim: object = None) -> _Shape | None:
    if not isinstance(dim, int) or not -len(shape) <= dim + 1 <= len(shape) + 1:
        return None
    place = dim % (len(shape) + 1)
    return *shape[:place], 1, *shape[place:]


def _swapped(shape: _Shape, *dims: object) -> _Shape | None:
    places = [d for d in dims if isinstance(d, int) and -len(shape) <= d < len(shape)]
    if len(dims) != 2 or len(places) != 2:
        return None
    found, (a, b) = [*shape], places
    found[a], found[b] = found[b], found[a]
    return tuple(found)


def _is_asked(node: object) -> bool:
    """Say whether a node asks for sizes or a dtype, or takes some of these sizes."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is operator.getitem:
        return _is_asked(node.args[0])
    return asks_shape(node) or asks_dtype(node)
