"""What a model keeps for its backward pass, by layer and by kind, and what options would save."""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from perfmodel.checks import check_whole
from perfmodel.forward_save import Division, few_bit_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fixedpoint_kernels.watch import Storage

__all__ = [
    "Row",
    "Saved",
    "SavedStorage",
    "Saver",
    "divided",
    "division",
    "few_bit",
    "kind_of",
    "largest_batch",
    "saved_bytes",
]

PARTS = {  # of an operation's name; the first that fits
    "attention": "attention",
    "conv": "convolution",
    "norm": "normalization",
    "linear": "linear",
    "pool": "pooling",
    "dropout": "dropout",
    "embedding": "embedding",
    "softmax": "softmax",
    "lstm": "recurrent",
    "gru": "recurrent",
    "rnn": "recurrent",
}
MATMUL = {"matmul", "__matmul__", "bmm", "mm", "einsum", "baddbmm", "addmm"}
COMPRESSED = {"convolution", "linear", "normalization"}


@dataclass(frozen=True)
class Saver:
    """Who keeps a tensor.

    Args:
        layer: Innermost module that was running, ``""`` for the model itself.
        kind: What sort of operation, see ``kind_of``.
        op: The operation as called from Python, or the module's class where none was.
        module: Class of the module.
    """

    layer: str
    kind: str
    op: str
    module: str


@dataclass(frozen=True)
class SavedStorage:
    """One piece of memory that is kept for backward.

    Args:
        size_bytes: Of the whole storage, which may be more than the tensor saved.
        shape: Of the first tensor saved of it.
        itemsize: Bytes an element.
        savers: Who keeps it, without repetition, the first one first.
    """

    size_bytes: int
    shape: tuple[int, ...]
    itemsize: int
    savers: tuple[Saver, ...]

    @property
    def elements(self) -> int:
        """Numbers in the storage."""
        return self.size_bytes // self.itemsize


Option = Callable[[SavedStorage], int]


def __getattr__(name: str) -> Any:
    if name == "Kept":
        message = "perfmodel.memory.Kept is now perfmodel.memory.SavedStorage"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return SavedStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class Row:
    """Bytes of one layer or one kind.

    Args:
        layer: Module, ``""`` in a table by kind and for the model itself.
        kind: What sort of operation.
        size_bytes: Kept by it and by nobody before it: these add up to the total.
        alone_bytes: Kept by it and by nobody else: what goes if it keeps nothing.
    """

    layer: str
    kind: str
    size_bytes: int
    alone_bytes: int


@dataclass(frozen=True)
class Saved:
    """All that a model keeps for backward: each piece of memory once, without parameters.

    Args:
        kept: In the order in which they were saved.
        source: ``"modelled, ..."`` or ``"measured on ..."``.
    """

    kept: tuple[SavedStorage, ...]
    source: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all."""
        return sum(k.size_bytes for k in self.kept)

    def by_layer(self) -> list[Row]:
        """Return bytes by module and kind, in the order in which they ran."""
        return self._table(lambda saver: (saver.layer, saver.kind))

    def by_kind(self) -> list[Row]:
        """Return bytes by kind, the largest first."""
        rows = self._table(lambda saver: ("", saver.kind))
        return sorted(rows, key=lambda row: -row.size_bytes)

    def of_modules(self, classes: Iterable[str]) -> int:
        """Return the bytes that modules of some classes keep, whoever else does."""
        wanted = set(classes)
        return sum(k.size_bytes for k in self.kept if wanted & {s.module for s in k.savers})

    def with_option(self, option: Option) -> int:
        """Return the bytes that would be kept with a forward-save option.

        Raises:
            TypeError: ``option`` is none.
        """
        if not callable(option):
            raise TypeError(
                f"an option must be one such as memory.few_bit(3) or memory.division(), got {option!r}"
            )
        return sum(map(option, self.kept))

    def _table(self, key: Callable[[Saver], tuple[str, str]]) -> list[Row]:
        found: dict[tuple[str, str], list[int]] = {}
        for kept in self.kept:
            owners = list(dict.fromkeys(map(key, kept.savers)))
            for owner in owners:
                found.setdefault(owner, [0, 0])
            found[owners[0]][0] += kept.size_bytes
            found[owners[0]][1] += kept.size_bytes if len(owners) == 1 else 0
        return [Row(*owner, *sizes) for owner, sizes in found.items()]


def saved_bytes(
    model: "nn.Module", inputs: "Tensor | tuple[Tensor, ...]", *, measure: bool = False
) -> Saved:
    """Return what ``model`` keeps for backward after a forward pass.

    A copy of the model runs, in the mode the model is in: its statistics, hooks and gradients are
    untouched, its hooks are not called, and no random number of yours is used. What the loss keeps
    is not included, nor are the inputs that non-reentrant checkpointing holds. On a CPU, an LSTM keeps
    a workspace of oneDNN's, often more than all the rest, that only measuring tells; ``source`` says so.

    Args:
        model: Any module; its parameters may be on the meta device unless measured. What
            ``forward_save.convert`` did counts; layers of ``marvin.integer.convert`` count as those of before.
        inputs: What to call it with; the values matter only if measured.
        measure: False: predicted with fake tensors, which run nothing and take no memory, for the
            kernels of the inputs' device (those of the CPU for the meta device). True: really run.

    Returns:
        Storages kept, each once; parameters and buffers are left out, the input is not.

    Raises:
        TypeError: ``model`` is no module, or ``inputs`` are no tensors.
        ValueError: The model failed, or is lazy and has not run yet; says in which module.

    Source:
        The convention that reproduces Few-bit backward, appendix B.
    """
    from perfmodel.saving import watch  # loads torch

    storages, source = watch(model, inputs if isinstance(inputs, tuple) else (inputs,), measure)
    return Saved(tuple(map(_kept, storages)), source)


def _kept(storage: "Storage") -> SavedStorage:
    named = [(who, who.function or who.module) for who in storage.savers]
    savers = tuple(Saver(who.layer, kind_of(op), op, who.module) for who, op in named)
    return SavedStorage(storage.size_bytes, storage.shape, storage.itemsize, savers)


def kind_of(op: str) -> str:
    """Return the kind of an operation: ``"activation"``, ``"convolution"``, ... or its own name."""
    if op.removesuffix("_") in _activations():
        return "activation"
    if op in MATMUL:
        return "matmul"
    return next((kind for part, kind in PARTS.items() if part in op.lower()), op)


@cache
def _activations() -> dict[str, bool]:
    """Return the names of activation functions, and whether their derivative has two values."""
    from fixedpoint_kernels.few_bit.activations import ENTRIES  # loads torch

    return {"prelu": False} | {name: entry.exact is not None for name, entry in ENTRIES.items()}


def _is_stepwise(saver: Saver) -> bool:
    return _activations().get(saver.op.removesuffix("_"), False)


def few_bit(bits: int) -> Option:
    """Return the option that keeps a code of ``bits`` bits of every activation function's input.

    Stepwise functions need 1 bit. What another operation keeps as well, such as the output of ReLU
    that goes into a convolution, stays.

    Raises:
        TypeError: ``bits`` is no whole number.
        ValueError: ``bits`` is not 1 to 8.
    """
    check_whole(1, 8, bits=bits)

    def size(kept: SavedStorage) -> int:
        activations = [s for s in kept.savers if s.kind == "activation"]
        stays = kept.size_bytes if len(activations) < len(kept.savers) else 0
        return stays + sum(_code(kept, s, bits) for s in activations)

    return size


def _code(kept: SavedStorage, saver: Saver, bits: int) -> int:
    return few_bit_bytes(kept.elements, 1 if _is_stepwise(saver) else bits)


def division(settings: Division = Division()) -> Option:  # noqa: B008  frozen
    """Return the option that compresses what convolution, linear and normalisation layers keep.

    Step functions and dropout keep a mask of 1 bit, max pooling 8 bits an index, average pooling
    nothing. A tensor that several layers keep is compressed once, but for batch norm of ``(batch,
    channels)``, whose planes are channels. Everything else stays, also what group norm keeps of that
    shape: how many groups there are, each with a range, is not known here.

    Raises:
        TypeError: ``settings`` are no ``Division``.
    """
    if not isinstance(settings, Division):
        raise TypeError(f"settings must be a Division, such as Division(block=8), got {settings!r}")

    def size(kept: SavedStorage) -> int:
        parts = [divided(kept, s, settings) for s in kept.savers]
        if None in parts:
            return kept.size_bytes
        compressed = {p for p in parts if p and p[0] in ("map", "rows", "columns")}
        masks = [p for p in parts if p and p[0] == "mask"]
        return sum(p[1] for p in [*compressed, *masks])

    return size


def divided(kept: SavedStorage, saver: Saver, settings: Division) -> tuple[str, int] | None:
    """Return what one saver keeps under DIVISION; None where it keeps the tensor itself."""
    is_map = math.prod(kept.shape) == kept.elements and len(kept.shape) > 1
    if saver.kind == "linear" and is_map and settings.rows is not None:
        return "rows", settings.linear_bytes(kept.shape, kept.itemsize)
    if saver.op in ("batch_norm", "group_norm") and is_map and math.prod(kept.shape[2:]) == 1:
        planes = 1, *kept.shape[1:2], 1, *kept.shape[:1]
        return ("columns", settings.size_bytes(planes)) if saver.op == "batch_norm" else None
    if saver.kind in COMPRESSED and is_map:
        return "map", settings.size_bytes(kept.shape)
    if _is_stepwise(saver) or saver.kind == "dropout":
        return "mask", math.ceil(kept.elements / 8)
    if saver.kind == "pooling":
        is_index = kept.itemsize == 8
        return "mask", kept.elements if is_index else 0
    return None


def largest_batch(memory_bytes: float, fixed_bytes: float, sample_bytes: float) -> int:
    """Return how many samples fit.

    Args:
        memory_bytes: Of the device.
        fixed_bytes: Taken whatever the batch: parameters, gradients, optimizer state.
        sample_bytes: Kept for backward, a sample.

    Raises:
        ValueError: ``sample_bytes`` is not above 0: any number of samples would fit. Or a number is not
            finite.
    """
    if not math.isfinite(memory_bytes - fixed_bytes - sample_bytes):
        given = f"{memory_bytes}, {fixed_bytes} and {sample_bytes}"
        raise ValueError(f"memory_bytes, fixed_bytes and sample_bytes must be finite, got {given}")
    if not sample_bytes > 0:
        raise ValueError(f"sample_bytes must be above 0, got {sample_bytes}")
    return max(0, math.floor((memory_bytes - fixed_bytes) / sample_bytes))
