"""Activations in few bits: pack a tensor once, whoever asks, and unpack it in backward.

Noise of a conversion is one int64 tensor, its seed and a count of tensors packed so far. It is not a
buffer, so it is in no ``state_dict``; copies of a model share it among their layers, not with the
model; and an operator may write to it, which a compiled graph keeps in order.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fixedpoint_kernels._torch_private.compiling import compiled_as_constant
from fixedpoint_kernels._torch_private.tensors import WeakTensor, base_of, version_of
from fixedpoint_kernels.division import operators
from fixedpoint_kernels.division.layout import Layout
from fixedpoint_kernels.forward_save.settings import Division
from fixedpoint_kernels.philox import Key, words

__all__ = [
    "NOTHING",
    "Form",
    "Packed",
    "autocast_dtype",
    "cast",
    "has_autocast",
    "is_dense",
    "is_less_in_code",
    "is_parameter",
    "is_smaller",
    "pack",
    "restore",
    "unpack",
    "weight_gradient",
    "whole",
]

MEMORY = "_forward_save_maps"
GROUP = 256
CODE = 1024  # elements: a few-bit code is of whole groups of them
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Form(NamedTuple):
    """Plain numbers that tell what the packed tensors are.

    Args:
        shape: Of the tensor, as the layer reads it.
        packed_shape: As it was packed.
        dtype: Of the tensor.
        block: Edge of blocks; None: no means.
        bits: Of a residual; 0: none.
        spatial: Trailing dimensions of a plane.
        is_channels_last: Whether the tensor lies so in memory.
        rows: Of the tensor as a matrix, where some of them are kept alone; else 0.
    """

    shape: tuple[int, ...]
    packed_shape: tuple[int, ...]
    dtype: torch.dtype
    block: int | None
    bits: int
    spatial: int
    is_channels_last: bool
    rows: int = 0

    @property
    def plane(self) -> int:
        """Elements of a plane."""
        return math.prod(self.packed_shape[-self.spatial :])


class Packed(NamedTuple):
    """Activations: three tensors to save for backward, and what they are.

    Of rows alone: these, and their numbers, int32.
    """

    means: Tensor | None
    codes: Tensor | None
    ranges: Tensor | None
    form: Form | None


NOTHING = Packed(None, None, None, None)


def _compress(
    x: Tensor, noise: Tensor, block: int | None, bits: int, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compress with the next stream of ``noise``, int64 ``(seed, count)``, and count it."""
    seed, stream = noise.tolist()
    noise[1] += 1
    return operators.compress(x, block, bits, seed, stream, spatial)


def _fake(
    x: Tensor, noise: Tensor, block: int | None, bits: int, spatial: int
) -> tuple[Tensor, Tensor, Tensor]:
    layout = Layout.checked(x, block, bits, spatial)
    return (
        x.new_empty(layout.means_shape, dtype=torch.bfloat16),
        x.new_empty(layout.codes_shape, dtype=torch.uint8),
        x.new_empty(layout.ranges_shape, dtype=torch.bfloat16),
    )


def _draw_rows(x: Tensor, noise: Tensor, count: int) -> Tensor:
    """Return the numbers of ``count`` rows of a matrix, ascending, with the next stream of ``noise``."""
    numbers = noise.tolist()
    noise[1] = numbers[1] + 1
    drawn = words(x.shape[0], Key(*numbers), x.device)
    return drawn.argsort(stable=True)[:count].sort().values.to(torch.int32)


def _fake_rows(x: Tensor, noise: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=torch.int32)


# not custom_op, whose checks take longer than a small layer
_library = torch.library.Library("fixedpoint_kernels", "FRAGMENT")
_library.define(
    "forward_save_compress(Tensor x, Tensor(a!) noise, int? block, int bits, int spatial)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.impl("forward_save_compress", _compress, "CompositeExplicitAutograd")
torch.library.register_fake("fixedpoint_kernels::forward_save_compress", _fake, lib=_library)
_library.define("forward_save_draw_rows(Tensor x, Tensor(a!) noise, int count) -> Tensor")
_library.impl("forward_save_draw_rows", _draw_rows, "CompositeExplicitAutograd")
torch.library.register_fake("fixedpoint_kernels::forward_save_draw_rows", _fake_rows, lib=_library)
draw_rows = torch.ops.fixedpoint_kernels.forward_save_draw_rows.default
compress = torch.ops.fixedpoint_kernels.forward_save_compress.default


def pack(
    x: Tensor,
    spatial: int,
    settings: Division,
    noise: Tensor,
    dtype: torch.dtype | None = None,
    by: object = None,
) -> Packed:
    """Return ``x`` in few bits; what was packed the same way, of the same memory, is not packed again.

    The memory of ``x`` remembers what was packed, also for views of it, until it is written to, and
    as long as a graph keeps it: nothing outlives the backward pass. Autograd does not see who writes
    to memory behind its back, as NumPy and ``x.data`` do. So what no operation of the graph made,
    such as the model's input, is packed again when a layer asks for it a second time.

    Args:
        x: A floating tensor.
        spatial: How many trailing dimensions make up a plane.
        settings: How to compress.
        noise: Of the conversion.
        dtype: Of what comes back; that of ``x`` where None.
        by: Who asks: the name of a layer, or a scope, which asks for all its functions.

    Raises:
        TypeError: ``x`` is not floating, or is inside of ``torch.func``.
    """
    if not x.is_floating_point():
        raise TypeError(f"activations that are kept in few bits must be floating, got {x.dtype}")
    if torch.compiler.is_compiling():  # a graph knows no versions
        return _packed(x.detach(), spatial, settings, noise, dtype)
    is_given, x = base_of(x).grad_fn is None, x.detach()
    try:
        memory, key = x.untyped_storage(), (*_place(x), settings, id(noise))
        if settings.rows is not None:
            key = (*key, x.shape[-1])
    except NotImplementedError as error:
        raise TypeError(
            "activations that are kept in few bits must lie in memory, got those of a transformation "
            "of torch.func: use it in eval mode, which is exact, or after forward_save.revert(model)"
        ) from error
    known: dict[object, _Known] = vars(memory).setdefault(MEMORY, {})
    entry = known.get(key)
    found = None if entry is None or (is_given and entry.is_over(by)) else entry.packed()
    form = None if found is None else found.form
    is_grouped = settings.method == "per_group"  # which knows no planes
    if entry and found and form and (is_grouped or form.plane <= math.prod(x.shape[-spatial:])):
        entry.by.add(by)
        form = form._replace(shape=tuple(x.shape), dtype=dtype or x.dtype)
        return found._replace(form=form)
    for old in [key for key, packed in known.items() if packed.packed() is None]:
        del known[old]
    packed = _packed(x, spatial, settings, noise, dtype)
    known[key] = _Known.of(packed, noise, by)
    return packed


class _Known(NamedTuple):
    """What was packed, as long as somebody keeps it.

    Args:
        references: To its tensors.
        form: What they are.
        noise: That it was packed with: while it is here, its ``id`` is nobody else's.
        by: Who asked for it.
    """

    references: list[WeakTensor | None]
    form: Form | None
    noise: Tensor
    by: set[object]

    @classmethod
    def of(cls, packed: Packed, noise: Tensor, by: object) -> "_Known":
        references = [None if t is None else WeakTensor(t) for t in packed[:3]]
        return cls(references, packed.form, noise, {by})

    def is_over(self, by: object) -> bool:
        """Whether ``by`` belongs to a later forward pass: a layer asks again, or another scope."""
        if by is None or isinstance(by, str):
            return by is not None and by in self.by
        return any(one is not by for one in self.by if not isinstance(one, str | None))

    def packed(self) -> Packed | None:
        parts = [None if reference is None else reference() for reference in self.references]
        is_gone = [part is None for part in parts] != [part is None for part in self.references]
        means, codes, ranges = parts
        return None if is_gone else Packed(means, codes, ranges, self.form)


def _place(x: Tensor) -> tuple[object, ...]:
    """Return where ``x`` lies; who packs first decides the planes, but for those who need smaller ones."""
    place = version_of(x), x.dtype, x.storage_offset(), x.is_neg()
    return (*place, x.numel()) if x.is_contiguous() else (*place, tuple(x.shape), x.stride())


def _packed(
    x: Tensor, spatial: int, settings: Division, noise: Tensor, as_dtype: torch.dtype | None
) -> Packed:
    shape, dtype, method = tuple(x.shape), as_dtype or x.dtype, settings.method
    is_last = is_channels_last(x)
    if settings.rows is not None and x.numel():
        matrix = x.reshape(-1, x.shape[-1])
        form = Form(shape, tuple(x.shape), dtype, None, 0, spatial, False, len(matrix))
        index = draw_rows(matrix, noise, math.ceil(settings.rows * len(matrix)))
        return Packed(matrix[index].to(dtype), index, None, form)
    if method == "per_group":
        x, spatial = _grouped(x), 1
    block, bits = _numbers(settings)
    means, codes, ranges = compress(x, noise, block, bits, spatial)
    if method == "high" and codes.numel():
        means, block = means.new_empty((means.shape[0], 0)), None
    form = Form(shape, tuple(x.shape), dtype, block, bits, spatial, is_last)
    return Packed(means, codes, ranges, form)


def _numbers(settings: Division) -> tuple[int | None, int]:
    """Return the block and the bits of what is packed; None: no means, 0: no residuals."""
    block = settings.block if settings.method in ("division", "low", "high") else None
    return block, 0 if settings.method == "low" else settings.bits


def _grouped(x: Tensor) -> Tensor:
    """Return the elements in rows of 256, zeros at the end."""
    return F.pad(x.reshape(-1), (0, -x.numel() % GROUP)).view(-1, GROUP)


def unpack(parts: Sequence[Tensor], form: Form) -> Tensor:
    """Return the activations, as far as their bits go, in their shape and order in memory."""
    is_whole = form.shape == form.packed_shape
    is_last = form.is_channels_last and is_whole
    means, codes, ranges = parts
    numbers = form.packed_shape, form.dtype, form.block, form.bits, form.spatial, is_last
    x = operators.decompress(means, codes, ranges, *numbers)
    if is_whole:
        return x
    return x.view(-1)[: math.prod(form.shape)].view(form.shape)


def whole(x: Tensor) -> Packed:
    """Return ``x`` as it is."""
    return Packed(x, None, None, None)


def restore(parts: Sequence[Tensor], form: Form | None) -> Tensor:
    """Return what ``pack`` or ``whole`` kept."""
    return parts[0] if form is None else unpack(parts, form)


def weight_gradient(grad: Tensor, parts: Sequence[Tensor], form: Form | None) -> Tensor:
    """Return the gradient of a linear layer's weight from what was kept of its input.

    Args:
        grad: Of the output, ``(rows, outputs)``.
        parts: Tensors that ``pack`` or ``whole`` gave.
        form: What they are.

    Source:
        Drineas, Kannan, Mahoney, 2006, Fast Monte Carlo algorithms for matrices I: sums over random
        rows. Differs: each row at most once, all as likely.
    """
    if form is None or not form.rows:
        x = restore(parts, form)
        return grad.t() @ x.reshape(len(grad), x.shape[-1]).to(grad.dtype)
    kept, index = parts[:2]
    scale = form.rows / max(len(index), 1)
    return (grad[index] * scale).t() @ kept.to(grad.dtype)


def is_parameter(x: Tensor) -> bool:
    """Whether ``x`` is a parameter or a view of one: memory that is there anyway."""
    base = base_of(x)
    return base.is_leaf and base.requires_grad


def is_dense(x: Tensor) -> bool:
    """Whether ``x`` is neither sparse nor nested."""
    return x.layout is torch.strided and not x.is_nested


def is_smaller(x: Tensor, spatial: int, settings: Division) -> bool:
    """Whether ``x`` takes less memory packed than it has now."""
    if not x.is_floating_point() or not x.numel():
        return False
    shape, block, bits = tuple(x.shape), *_numbers(settings)
    if settings.method == "per_group":
        shape, spatial = (-(x.numel() // -GROUP), GROUP), 1
    layout = Layout(shape, x.dtype, block, bits, spatial)
    packed = math.prod(layout.codes_shape) + 2 * math.prod(layout.ranges_shape)
    packed += 0 if settings.method == "high" else 2 * math.prod(layout.means_shape)
    return packed < _size_bytes(x)


def _size_bytes(x: Tensor) -> int:
    """Return the bytes that ``x`` takes: of an expanded one, those of its memory."""
    try:
        return min(x.nbytes, x.untyped_storage().nbytes())
    except NotImplementedError:  # inside of torch.func, which ``pack`` refuses by name
        return x.nbytes


def is_less_in_code(x: Tensor, bits: int) -> bool:
    """Whether a code of so many bits an element takes less memory than ``x``."""
    if torch.compiler.is_compiling():  # a graph may be for other sizes, too
        return True
    size_bytes = -(x.numel() // -CODE) * CODE // 8 * bits
    return size_bytes < _size_bytes(x)


def is_channels_last(x: Tensor) -> bool:
    """Whether channels vary fastest in memory, and ``x`` is not also in the usual order."""
    if x.dim() not in FORMATS or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=FORMATS[x.dim()])


def order_of(x: Tensor) -> torch.memory_format:
    """Return the order of dimensions in memory: channels last, or the usual one."""
    return FORMATS[x.dim()] if is_channels_last(x) else torch.contiguous_format


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return what autocast would make of ``x``; None where it leaves it alone."""
    kind = x.device.type
    if not x.is_floating_point() or x.dtype == torch.float64:
        return None
    if not (has_autocast(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)


def cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> list[Any]:
    """Return tensors in the type that autocast gives them; None: it leaves them alone.

    Those that need a gradient say so, for torch asks it how to multiply. A graph does not.
    """
    if dtype is None or torch.compiler.is_compiling():
        return [t if t is None or dtype is None else t.to(dtype) for t in tensors]
    return [t if t is None else t.to(dtype).requires_grad_(t.requires_grad) for t in tensors]


@compiled_as_constant  # torch 2.11's compiler does not know what it asks
def has_autocast(kind: str) -> bool:
    """Say whether there is autocast for a type of device."""
    return torch.amp.is_autocast_available(kind)
