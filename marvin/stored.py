"""Weights as integer codes while nothing computes with them: memory for time."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fixedpoint_kernels import FixedPoint, decode, encode
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels._torch_private.modes import SavingHooks, saving_hooks
from fixedpoint_kernels._torch_private.modules import hooks_of
from fixedpoint_kernels.undo import all_or_nothing
from fixedpoint_kernels.watch import OtherForward
from marvin.layers import is_layer
from marvin.marks import Mark, marks_of
from marvin.quantized import Quantized
from marvin.refused import check_model, check_values, without_values
from marvin.shards import is_sharded
from marvin.wrappers import unwrapped

__all__ = ["StoredCodes", "store_codes"]

_Marker = tuple[Tensor, int, tuple[int, ...], tuple[int, ...], int]


class _Passed(NamedTuple):
    """What hooks outside keep of a tensor."""

    value: object
    unpack: Callable[..., Tensor]


class _Hook:
    """A hook of ``StoredCodes``; who copies or pickles its module needs values, and gets none of it."""

    def __init__(
        self, stored: "StoredCodes", weights: Iterable[Tensor], call: Callable[..., None]
    ) -> None:
        self._stored, self._weights, self._call = stored, weights, call

    def __call__(self, *_: object) -> None:
        self._call()

    def __reduce__(self) -> tuple[type["_Nothing"], tuple[()]]:
        self.check()
        return _Nothing, ()

    def check(self) -> None:
        """Refuse to go on while a weight of the module has no values."""
        self._stored._check(self._weights)


class _Nothing:
    """What a copied or pickled module has in the place of ``_Hook``."""

    def __call__(self, *_: object) -> None:
        pass


class _Forward(OtherForward):
    """The ``forward`` of a module's class, which ends what hooks began: torch calls no hook after an interrupt."""

    __slots__ = ("_end",)

    def __init__(self, module: nn.Module, end: Callable[[], None]) -> None:
        self.module, self._end = module, end

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            self._end()

    def __reduce__(self) -> tuple[type["_Forward"], tuple[nn.Module, type["_Nothing"]]]:
        return _Forward, (self.module, _Nothing)


class StoredCodes:
    """A model whose weights are kept as codes; made by ``store_codes``."""

    def __init__(self, optimizer: Quantized) -> None:
        self._optimizer = optimizer
        self._codes: dict[Tensor, tuple[Tensor, FixedPoint]] = {}
        self._weights: dict[Tensor, None] = {}  # in order
        self._generation = 0  # of the codes: a step makes new ones
        self._marks: dict[Tensor, list[Mark]] = {}  # of weights that got their values back
        self._hooks: list[RemovableHandle] = []
        self._forwards: dict[nn.Module, _Forward] = {}

    def __repr__(self) -> str:
        sizes = f"{self.size_bytes():,} bytes in place of {self.float_bytes():,}"
        count = f"{len(self._codes)} of {len(self._weights)} weights"
        return f"{count} are kept as codes: {sizes}"

    def size_bytes(self) -> int:
        """Return the bytes of the codes, of all weights that have some."""
        return sum(codes.nbytes for codes, _ in self._codes.values())

    def float_bytes(self) -> int:
        """Return the bytes that the same weights take in their own dtype."""
        return sum(p.numel() * p.element_size() for p in self._codes)

    @left_uncompiled
    def restore(self) -> None:
        """Put the weights' values back for now; the next forward or step stores codes again.

        Those that somebody writes to until then stay, and are the new weights at the next step.
        """
        for p in [*self._codes]:
            self._fill(p)

    @left_uncompiled
    def remove(self) -> None:
        """Undo: the weights have their values again, and keep them."""
        self.restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module, own in self._forwards.items():
            if vars(module).get("forward") is own:
                del module.forward
        self._forwards.clear()
        self._codes.clear()
        self._optimizer.stored = tuple(own for own in self._optimizer.stored if own is not self)

    @torch.no_grad()
    def store(self) -> None:
        """Encode the weights as they are now, and let go of their values."""
        self.restore()
        self._codes.clear()
        self._generation += 1
        for p in self._weights:
            fmt = self._optimizer.format_of(p)
            if isinstance(fmt, FixedPoint):
                self._codes[p] = encode(p, fmt, rounding="nearest"), fmt
                self._empty(p)

    def attach(self, module: nn.Module, weights: Sequence[Tensor]) -> None:
        """Decode ``weights`` for each forward of ``module``, and again for backward."""
        contexts: list[AbstractContextManager[object]] = []

        def before() -> None:
            vars(module).setdefault("forward", forward)  # integer.convert takes it away
            for p in weights:
                self._fill(p)
            outer = saving_hooks()  # such as checkpointing's: torch asks the innermost alone

            def pack(x: Tensor) -> object:
                return self._pack(x, weights, outer)

            pack.outer = outer  # pyright: ignore[reportFunctionMemberAccess]: who asks sees through
            context = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
            context.__enter__()
            contexts.append(context)

        def end() -> None:
            if contexts:  # else a hook before raised, as checkpointing's do where they have all
                contexts.pop().__exit__(None, None, None)

        def after() -> None:
            end()
            for p in weights:
                if p in self._codes:
                    self._empty(p)

        forward = self._forwards[module] = _Forward(module, end)
        vars(module).setdefault("forward", forward)
        self._weights |= dict.fromkeys(weights)
        first, last = _Hook(self, weights, before), _Hook(self, weights, after)
        self._hooks.append(module.register_forward_pre_hook(first))
        self._hooks.append(module.register_forward_hook(last, always_call=True))

    def attach_everywhere_else(self, model: nn.Module) -> None:
        """Have values where a step, ``state_dict`` and ``load_state_dict`` look for them."""
        restore, store = (_Hook(self, self._weights, do) for do in (self.restore, self.store))
        self._optimizer.stored += (self,)
        self._hooks += [
            self._optimizer.register_step_pre_hook(restore),
            self._optimizer.register_step_post_hook(store),
            model.register_state_dict_pre_hook(restore),
            model.register_load_state_dict_pre_hook(restore),
            model.register_load_state_dict_post_hook(store),
        ]

    def _check(self, weights: Iterable[Tensor]) -> None:
        for p in weights:
            if not self._has_values(p):
                raise without_values(self._optimizer.name_of(p))

    def _has_values(self, p: Tensor) -> bool:
        return p not in self._codes or p in self._marks or not _is_empty(p)

    def _fill(self, p: Tensor) -> None:
        if p not in self._codes:
            return
        if not self._has_values(p):
            if any(p.stride()):  # model.to(...) made other memory: codes lie in its order
                codes, fmt = self._codes[p]
                self._codes[p] = torch.empty_like(p, dtype=codes.dtype).copy_(codes), fmt
            p.data = self._decoded(p)
            self._marks[p] = marks_of([p])
        elif marks_of([p]) != self._marks.get(p):  # somebody wrote to it: the codes are of before
            del self._codes[p]

    def _empty(self, p: Tensor) -> None:
        # autograd wants the shape; whoever reads it otherwise gets NaN, not something plausible
        p.data = p.data.new_full((), torch.nan).expand(p.shape)
        self._marks.pop(p, None)

    def _decoded(self, p: Tensor) -> Tensor:
        codes, fmt = self._codes[p]
        return decode(codes, fmt).to(p.dtype)

    def _pack(
        self, x: Tensor, weights: Sequence[Tensor], outer: SavingHooks | None
    ) -> "Tensor | _Marker | _Passed":
        """Keep a weight, or a view of one, for backward as a note of which it is; pass others on."""
        address = x.untyped_storage().data_ptr()
        for p in weights:
            if p in self._codes and p.untyped_storage().data_ptr() == address:
                return p, self._generation, tuple(x.shape), x.stride(), int(x.storage_offset())
        return x if outer is None else _Passed(outer[0](x), outer[1])

    def _unpack(self, kept: "Tensor | _Marker | _Passed") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, _Passed):
            return kept.unpack(kept.value)
        p, generation, shape, stride, offset = kept
        if generation != self._generation or p not in self._codes:
            raise RuntimeError("backward must come before the step that changes the weights")
        return self._decoded(p).as_strided(shape, stride, offset)


def _is_empty(p: Tensor) -> bool:
    """Say whether a weight is as ``_empty`` left it, or what ``model.to(...)`` made of that."""
    return not any(p.stride()) or bool(p.isnan().all())


def _weights_of(module: nn.Module, optimizer: Quantized) -> list[Tensor]:
    """Return the weights that a module computes with."""
    # attention reads the weight of its output layer without calling it
    recurse = isinstance(module, nn.MultiheadAttention)
    return [p for p in module.parameters(recurse=recurse) if p in optimizer and is_layer(p)]


@left_uncompiled
def store_codes(model: nn.Module, optimizer: Quantized) -> StoredCodes:
    """Keep the model's weights as int8, int16 or int32 codes while nothing computes with them.

    Each module decodes its weights for its own forward, and again, one by one, for backward; a
    step, ``state_dict`` and ``load_state_dict`` have all of them decoded. Results do not change
    by a bit. It takes time, and saves what the values take less the codes: of the 20 bytes that
    MSGD keeps for each float32 weight (weight, gradient, master, momentum, window) 3 with words
    of up to 8 bits, 2 with up to 16, none above. Where the model only evaluates, 3 of 4.

    Weights in block floating point or float32, and parameters with fewer than two dimensions,
    stay as they are. ``torch.compile`` needs ``remove()`` or ``restore()`` first, and so do copies
    and pickles of the model: they are refused until then, and have plain weights.
    ``model.to(...)`` changes dtype, device and memory format as always. Where ``store_codes`` is
    interrupted, model and optimizer stay as they were.

    Args:
        model: Changed by hooks; ``remove()`` undoes it.
        optimizer: Whose formats the weights have.

    Returns:
        A handle: ``size_bytes()``, ``float_bytes()``, ``restore()``, ``remove()``.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` not one of fixed point.
        ValueError: No module of ``model`` has a layer of ``optimizer``, processes share one, or its
            weights are codes already.
    """
    check_model(model, "store_codes(model, optimizer)")
    check_values(model)
    for module in model.modules():
        for hook in hooks_of(module, _Hook):
            hook.check()
    if not isinstance(optimizer, Quantized):
        raise TypeError(
            "store_codes needs an optimizer of fixed point, such as marvin.MSGD(...) or "
            f"marvin.Quantized(optimizer, policy), got {type(optimizer).__name__}"
        )
    optimizer = unwrapped(optimizer)
    if any(map(is_sharded, model.parameters())):
        raise ValueError("store_codes needs whole parameters, got sharded ones")
    stored = StoredCodes(optimizer)
    layers = {module: own for module in model.modules() if (own := _weights_of(module, optimizer))}
    if not layers:
        raise ValueError("no module of the model has a layer of this optimizer")
    values = [(p, p.data) for own in layers.values() for p in own]
    try:
        with all_or_nothing([*model.modules(), optimizer]):
            for module, own in layers.items():
                stored.attach(module, own)
            stored.attach_everywhere_else(model)
            stored.store()
            return stored
    except BaseException:
        for p, before in values:
            p.data = before
        raise
