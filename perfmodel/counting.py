"""Count the multiply-adds of a model while it runs on the meta device; loads torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels._torch_private.modes import TorchDispatchMode
from fixedpoint_kernels._torch_private.modules import BatchNormBase
from fixedpoint_kernels._torch_private.tensors import storage_key, tree_leaves
from fixedpoint_kernels.forward_save.swap import is_converted, is_restorable, restore_
from fixedpoint_kernels.watch import Running
from perfmodel.madds import Layer
from perfmodel.operators import EMBEDDINGS, Product, is_free, name_of, product
from perfmodel.skeleton import check_model, explain, skeleton

__all__ = ["count"]


def count(
    model: nn.Module, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None
) -> tuple[list[Layer], list[Layer]]:
    """See ``perfmodel.layers``; unknown operations apart."""
    check_model(model, "perfmodel.layers(model, (3, 32, 32))")
    copy = skeleton(model, on_meta)
    for module in copy.modules():
        # forward_save changes what is kept, not what is multiplied
        if is_converted(module) and is_restorable(module):
            restore_(module)
        if isinstance(module, BatchNormBase):
            module.training = False
    dtype = dtype or next((p.dtype for p in copy.parameters()), torch.float32)
    inputs = [torch.empty((1, *shape), dtype=dtype, device="meta") for shape in shapes]
    running = Running(copy)
    counter = _Counter(running, copy, inputs)
    needed = "run on shapes alone (the meta device)"
    with explain(running, needed), torch.enable_grad(), _InAttention(counter), counter:
        copy(*inputs)
    return counter.found(), counter.strange()


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and kind without values."""
    meta = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )
    if isinstance(tensor, nn.Parameter):  # with gradients no fused, uncountable path is taken
        return nn.Parameter(meta, requires_grad=meta.is_floating_point())
    return meta


class _InAttention(TorchFunctionMode):
    """Tells the counter when an attention is running."""

    def __init__(self, counter: "_Counter"):
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counter.in_attention = func is F.scaled_dot_product_attention
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._counter.in_attention = False


@dataclass(frozen=True)
class _Source:
    """The weight that a tensor was made of, beside tensors that do not depend on the input.

    Args:
        name: ``""``: of no weight, such as a buffer.
        elements: Of the weight.
        is_product: Whether it is only made of what the weight was multiplied with, as its norm is.
    """

    name: str = ""
    elements: int = 0
    is_product: bool = False


class _Row(NamedTuple):
    """What tells one row of the result from others."""

    module: str
    kind: str
    weight: str
    makes_weight: bool  # of one weight and of constants: dropped where it goes into that weight


class _Counter(TorchDispatchMode):
    """Sees every operation.

    torch's ``FlopCounterMode`` does not do, and is what tests compare with: it counts 0 for what it
    does not know (``mv``, ``addbmm``, ``bilinear``, a custom operator) where we refuse, and does
    not tell which weight was multiplied.

    Args:
        running: Which module is.
        copy: The model's.
        inputs: Of the model.
    """

    def __init__(self, running: Running, copy: nn.Module, inputs: Iterable[Tensor]):
        super().__init__()
        self.in_attention = False
        self._running = running
        self._weights = dict(copy.named_parameters())
        self._all_names = dict(copy.named_parameters(remove_duplicate=False))
        self._rows: dict[_Row, Layer] = {}
        self._unknown: dict[tuple[str, str], Layer] = {}
        self._used: set[str] = set()
        self._sources: dict[int, _Source | None] = {}  # None: an activation
        self._alive: list[Tensor] = []  # an address is not given twice while its owner lives
        for name, p in self._weights.items():
            self._remember(p, _Source(name, p.numel()))
        for x in inputs:
            self._remember(x, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        self._used.update(s.name for s in map(self._source, tensors) if s)
        found = product(func, args, output)
        source = self._made_of(tensors, is_product=found is not None)
        if found:
            self._add(found, output, makes_weight=source is not None and source.name != "")
        elif name_of(func) in EMBEDDINGS:
            self._embedding(args[0], args[1], output)
        elif not is_free(func):
            self._add_unknown(func, tensors, output)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._remember(tensor, source)
        return output

    def found(self) -> list[Layer]:
        """Return what multiplies, then the weights that multiply nothing."""
        rows: dict[tuple[str, str, str], Layer] = {}
        for key, row in self._rows.items():
            own = key.module, key.kind, key.weight
            rows[own] = replace(row, madds=row.madds + rows[own].madds) if own in rows else row
        seen = {row.weight for row in rows.values()}
        return [*rows.values(), *self._rest(seen)]

    def strange(self) -> list[Layer]:
        """Return the operations that are not known; ``weight`` holds their names."""
        return list(self._unknown.values())

    def _rest(self, seen: set[str]) -> Iterator[Layer]:
        for name, p in self._weights.items():
            if name not in seen and p.ndim >= 2:
                kind = "elementwise" if name in self._used else "unused"
                shape = tuple(p.shape)
                yield self._with_weight(Layer(_module(name), kind, 0, 0, shape, shape), name)

    def _add(self, found: Product, output: object, *, makes_weight: bool) -> None:
        left, right = self._weight(found.left), self._weight(found.right)
        source = right or left
        kind = found.kind
        if kind == "matmul":
            is_attention = self.in_attention or self._running.kind == "MultiheadAttention"
            kind = "linear" if source else "attention" if is_attention else "matmul"
        activation = found.left if right or not left else found.right
        self._record(kind, found.madds, activation, output, source, makes_weight)

    def _embedding(self, weight: Tensor, indices: Tensor, output: object) -> None:
        self._record("embedding", 0, indices, output, self._weight(weight))

    def _record(
        self,
        kind: str,
        madds: int,
        x: Tensor,
        output: object,
        source: _Source | None,
        makes_weight: bool = False,
    ) -> None:
        weight = source.name if source else ""
        key = _Row(self._running.name, kind, weight, makes_weight)
        if key in self._rows:
            row = self._rows[key]
            self._rows[key] = replace(row, madds=row.madds + madds)
            return
        row = Layer(key.module, kind, madds, 0, _sample(x, kind), _sample(_first(output), kind))
        self._rows[key] = self._with_weight(row, weight)

    def _with_weight(self, row: Layer, weight: str) -> Layer:
        """Return the row with sizes of its weight and of the bias that goes with it."""
        if not weight:
            return row
        elements = self._weights[weight].numel()
        last = weight.rpartition(".")[2]
        own = f"{row.name}.{last}".lstrip(".")  # another name of a tied weight
        is_own = self._all_names.get(own) is self._weights[weight]
        head = (own if is_own else weight).removesuffix(last)
        bias = self._all_names.get(head + last.replace("weight", "bias"))
        has_bias = bias is not None and "weight" in last
        parameters = elements + (bias.numel() if bias is not None and has_bias else 0)
        return replace(row, weight=weight, elements=elements, parameters=parameters)

    def _add_unknown(self, func: object, tensors: list[Tensor], output: object) -> None:
        first = _first(output)
        into = _sample(tensors[0], "") if tensors else ()
        key = (self._running.name, str(func))
        row = Layer(key[0], "unknown", 0, 0, into, _sample(first, ""), weight=str(func))
        self._unknown.setdefault(key, row)

    def _source(self, tensor: Tensor) -> _Source | None:
        """Return what a tensor was made of; None for activations."""
        return self._sources.get(storage_key(tensor), _Source())

    def _weight(self, tensor: Tensor) -> _Source | None:
        """Return the weight that a tensor was made of; None for activations and constants."""
        source = self._source(tensor)
        return source if source and source.name else None

    def _remember(self, tensor: Tensor, source: _Source | None) -> None:
        self._alive.append(tensor)
        self._sources[storage_key(tensor)] = source

    def _made_of(self, tensors: list[Tensor], *, is_product: bool) -> _Source | None:
        """Return what an operation's output is made of; None where it is an activation.

        A weight that is cast, normalised, masked or re-parametrised is that weight, the largest of
        several. Products of several weights are activations, such as queries that are learned.
        """
        sources = [self._source(t) for t in tensors]
        weights = [s for s in sources if s and s.name]
        names = {s.name for s in weights}
        if None in sources or (len(names) > 1 and any(is_product or s.is_product for s in weights)):
            return None
        if not weights:
            return _Source()
        main = max(weights, key=lambda s: (not s.is_product, s.elements))
        if is_product:
            return replace(main, is_product=True)
        if not main.is_product and any(s.is_product for s in weights):
            self._drop_products_of(main.name)
        return main

    def _drop_products_of(self, weight: str) -> None:
        """Forget products that made a weight of itself, such as its norm for ``W / norm``."""
        rows = self._rows.items()
        self._rows = {k: row for k, row in rows if not (k.makes_weight and k.weight == weight)}


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _first(output: object) -> Tensor | None:
    return next((t for t in tree_leaves(output) if isinstance(t, Tensor)), None)


def _sample(tensor: Tensor | None, kind: str) -> tuple[int, ...]:
    """Return the shape without a leading batch of one; matrices may have lost it before."""
    if tensor is None:
        return ()
    shape = tuple(tensor.shape)
    has_batch = len(shape) > 1 and shape[0] == 1
    return shape[1:] if has_batch or kind.startswith("conv") else shape
