"""What a model's module knows of its formats, and the tensor in which its state has it."""

import ctypes
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from fixedpoint_kernels import BlockFloat, FixedPoint
from fixedpoint_kernels._torch_private.tensors import version_of
from fixedpoint_kernels.rounding import Rounding
from marvin.channels import ChannelFormat
from marvin.compiled import check_not_exported
from marvin.rounding import Format
from marvin.shards import is_sharded
from marvin.straight_through import StraightThrough

__all__ = ["CarriedFormats", "ModuleFormats", "decode_formats", "encode_formats", "mark_of"]
__all__ += ["no_longer_awaited"]

_VERSION = 1
_ROW = 5  # kind, wl, fl, flags, number of shifts
_FLOAT, _FIXED, _BLOCK, _CHANNELS = range(4)
_IDENTITY, _STOCHASTIC, _AWAITED = 1, 2, 4  # flags
_TRIES = 100  # to read formats that another process is writing, a millisecond apart


@dataclass(frozen=True)
class ModuleFormats:
    """In which formats a module computes; None is float32.

    Args:
        inputs: Of what comes in.
        outputs: Of what goes out.
        gradients: Of the gradient that comes back to the outputs.
        samples: Of what comes in, with a power of two for each sample.
        weights: Of the module's own parameters, in the order of ``marvin.layers.carried_parameters``.
        ste: See ``marvin.fake_quantize``.
        eval_rounding: How activations are rounded in eval mode.
        is_awaited: Whether they are those of ``marvin.prepare``, and no state has been loaded since.
    """

    inputs: Format | None = None
    outputs: Format | None = None
    gradients: Format | None = None
    samples: Format | None = None
    weights: tuple[Format | None, ...] = ()
    ste: StraightThrough = "clip"
    eval_rounding: Rounding = "nearest"
    is_awaited: bool = False

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded here."""
        return not (self.inputs is self.outputs is self.gradients is self.samples is None)


def encode_formats(formats: ModuleFormats, channels: Sequence[int]) -> Tensor:
    """Return formats as numbers with a checksum.

    Args:
        formats: Of a module.
        channels: How many channels each of its parameters has: room for their shifts.

    Returns:
        int32 on the CPU, 1-d; as long for other formats of the same module.
    """
    flags = _IDENTITY * (formats.ste == "identity")
    flags |= _STOCHASTIC * (formats.eval_rounding == "stochastic")
    flags |= _AWAITED * formats.is_awaited
    rows = [_VERSION, flags, len(formats.weights)]
    for fmt in (formats.inputs, formats.outputs, formats.gradients, formats.samples):
        rows += _row(fmt, 0)
    shifts: list[int] = []
    for fmt, room in zip(formats.weights, channels, strict=True):
        rows += _row(fmt, room)
        own = fmt.shifts if isinstance(fmt, ChannelFormat) else ()
        shifts += [*own, *[0] * (room - len(own))]
    return _signed(np.array([*rows, *shifts], np.int32))


def no_longer_awaited(numbers: Tensor) -> Tensor:
    """Return whole formats as those that a state has brought; see ``ModuleFormats``."""
    own = numbers.detach().cpu().numpy()[:-1].copy()
    own[1] &= ~_AWAITED
    return _signed(own).to(numbers.device)


def decode_formats(numbers: Tensor, name: str) -> ModuleFormats:
    """Return the formats that ``encode_formats`` made ``numbers`` of.

    Args:
        numbers: int32, 1-d; where they are on a device, this waits for it.
        name: Of the module, for the message.

    Raises:
        ValueError: They are not whole: averaged, cast, never loaded, on the meta device, or a DTensor.
    """
    if numbers.is_meta:
        raise ValueError(
            f"{name} must hold formats, got a tensor on the meta device, which has no values: write "
            'model.to_empty(device="cpu"), and load a state'
        )
    if is_sharded(numbers):
        raise ValueError(
            f"{name} must hold formats in a plain tensor, got a DTensor, as tensor parallelism (parallelize_module) "
            "makes it, which is not supported: use fully_shard"
        )
    values = numbers.detach().cpu().numpy()
    if (
        values.dtype != np.int32
        or values.ndim != 1
        or len(values) < 3 + 4 * _ROW + 1
        or values[-1] != _checksum(values[:-1])
        or values[0] != _VERSION
    ):
        raise ValueError(
            f"{name} must hold formats as marvin saved them, got other numbers: copy this buffer "
            "as it is (do not average or cast it), or load the model's own state, as after to_empty()"
        )
    _, flags, weights, *rest = values[:-1].tolist()
    rows = [rest[i : i + _ROW] for i in range(0, (4 + weights) * _ROW, _ROW)]
    found: list[Format | None] = []
    first = (4 + weights) * _ROW
    for kind, wl, fl, bits, room in rows:
        shifts = rest[first : first + room]
        first += room
        found.append(_format(kind, wl, fl, bits, shifts))
    ste: StraightThrough = "identity" if flags & _IDENTITY else "clip"
    rounding: Rounding = "stochastic" if flags & _STOCHASTIC else "nearest"
    inputs, outputs, gradients, samples, *own = found
    is_awaited = bool(flags & _AWAITED)
    return ModuleFormats(inputs, outputs, gradients, samples, tuple(own), ste, rounding, is_awaited)


class CarriedFormats:
    """The formats of a module's buffer, and whether it still holds them.

    Attributes:
        formats: That were read, or written, last.
        buffer: That held them.
    """

    def __init__(self) -> None:
        self.formats = ModuleFormats()
        self.buffer: Tensor | None = None
        self._mark: object = None
        self._count = 0  # of writes, which torch.compile can compare, other than bytes

    def __getstate__(self) -> StateDict:
        return {**vars(self), "buffer": None}  # a copy is of another module

    def are_of(self, buffer: Tensor) -> bool:
        """Say whether a buffer holds ``formats``; waits for no device."""
        if buffer is not self.buffer:
            return False
        if torch.compiler.is_compiling():
            return not buffer.is_inference() and version_of(buffer) == self._count
        return mark_of(buffer) == self._mark

    def read(self, buffer: Tensor, name: str, source: Tensor | None = None) -> None:
        """Take the formats that a buffer holds; a device is waited for.

        Args:
            buffer: Of a module.
            name: For the message.
            source: Where its values are, if elsewhere.

        Raises:
            RuntimeError: ``torch.export`` exports.
            ValueError: The buffer does not hold formats.
        """
        check_not_exported()
        source = buffer if source is None else source
        mark = None if buffer.is_cpu else mark_of(buffer)
        left = _TRIES if buffer.is_cpu and buffer.untyped_storage().is_shared() else 1
        while True:
            numbers = source if source.is_meta else source.detach().to("cpu", copy=True)
            try:
                formats = decode_formats(numbers, name)
                break
            except ValueError:  # where others write meanwhile, a part of the numbers is old
                left -= 1
                if not left:
                    raise
                time.sleep(1e-3)
        self._note(buffer, formats, mark_of(numbers) if mark is None else mark)

    def note(self, buffer: Tensor, numbers: Tensor, formats: ModuleFormats) -> None:
        """Take formats that were written to a buffer, as ``numbers`` on the CPU."""
        self._note(buffer, formats, mark_of(numbers if buffer.is_cpu else buffer))

    def _note(self, buffer: Tensor, formats: ModuleFormats, mark: object) -> None:
        self.formats = formats  # first: other threads may ask
        self._count = version_of(buffer)
        self._mark, self.buffer = mark, buffer


def mark_of(buffer: Tensor) -> object:
    """Return what is another where other formats were written to a buffer; waits for no device.

    On the CPU these are its bytes: torch does not count what NumPy, ``torch.distributed`` and other
    processes write. No operator reads them, so nothing that watches or traces sees it.
    """
    if not buffer.is_cpu:
        return object() if buffer.is_inference() else version_of(buffer)
    address = buffer.data_ptr()
    return ctypes.string_at(address, buffer.nbytes) if address else b""


def _row(fmt: Format | None, room: int) -> list[int]:
    if fmt is None:
        return [_FLOAT, 0, 0, 0, room]
    if isinstance(fmt, BlockFloat):
        return [_BLOCK, fmt.wl, 0, 0, room]
    kind, plain = (_CHANNELS, fmt.fmt) if isinstance(fmt, ChannelFormat) else (_FIXED, fmt)
    return [kind, plain.wl, plain.fl, plain.symmetric | plain.signed << 1, room]


def _format(kind: int, wl: int, fl: int, flags: int, shifts: list[int]) -> Format | None:
    if kind == _FLOAT:
        return None
    if kind == _BLOCK:
        return BlockFloat(wl)
    fmt = FixedPoint(wl, fl, bool(flags & 1), bool(flags & 2))
    return ChannelFormat(fmt, tuple(shifts)) if kind == _CHANNELS else fmt


def _signed(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.append(numbers, _checksum(numbers)))


def _checksum(numbers: np.ndarray) -> np.int32:
    return np.uint32(zlib.crc32(numbers.tobytes())).astype(np.int32)
