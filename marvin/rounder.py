"""Rounding what a module sees, by the formats that it carries."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from fixedpoint_kernels import BlockFloat, FixedPoint
from fixedpoint_kernels._torch_private.modes import is_recomputed, is_transformed
from fixedpoint_kernels._torch_private.tensors import version_of
from fixedpoint_kernels.rounding import Rounding
from marvin.compiled import check_untraced
from marvin.layers import carried_parameters, is_layer
from marvin.model_formats import CarriedFormats, ModuleFormats, decode_formats, encode_formats
from marvin.nested import mapped, mapped_output
from marvin.noise import NEXT, Purpose, stream
from marvin.policies.observer import Observer
from marvin.ranks import rank
from marvin.rounding import Format
from marvin.straight_through import StraightThrough, Tally, round_with_gradient

__all__ = [
    "BUFFER",
    "FLOATS",
    "ForwardState",
    "Rounder",
    "Samples",
    "as_it_is",
    "channels_of",
    "formats_of",
]

BUFFER = "fixed_point"
"""Name of the buffer in which a module's state has its formats."""

FLOATS = torch.float32, torch.bfloat16, torch.float16

Samples = tuple[int, tuple[str, int] | None]
"""Of a ``ForwardState``: ``samples`` and ``first``."""


class ForwardState:
    """What a model's modules share between forward passes.

    Attributes:
        seed: Of the noise of activations.
        forwards: Roundings with noise so far; numbers them.
        gradients: Roundings of gradients in integer layers so far; numbers them.
        rounding: How activations are rounded in training.
        samples: How many went forward in training since the optimizer last asked, as the model's first module tells.
        first: The first module that was called since, and how many samples it tells: where the other was not called.
        waiting: Names of modules that round and were not called yet.
        is_complete: Whether no module awaits formats, or it was told which do.
    """

    def __init__(self, seed: int = 0, rounding: Rounding = "stochastic") -> None:
        self.seed, self.rounding = seed, rounding
        self.forwards = self.gradients = self.samples = 0
        self.first: tuple[str, int] | None = None
        self.waiting: set[str] = set()
        self.is_complete = False
        self._rounded: dict[int, tuple[weakref.ref[Tensor], Format, int]] = {}

    def __getstate__(self) -> StateDict:
        return {**vars(self), "_rounded": {}}  # tensors of this process

    def __setstate__(self, state: StateDict) -> None:
        self.__init__()  # an older one lacks what came since
        vars(self).update(state)

    def options(self, is_training: bool, eval_rounding: Rounding) -> dict[str, Any]:
        """Return how to round once more."""
        rounding = self.rounding if is_training else eval_rounding
        if rounding == "nearest" or not is_training:
            return {"rounding": rounding}
        self.forwards += 1
        place = stream(Purpose.ACTIVATIONS, self.forwards, rank())
        return {"rounding": rounding, "seed": self.seed, "stream": place}

    def noise_of_gradients(self) -> tuple[int, int, int]:
        """Return a seed, and two streams for the gradient of one more product."""
        self.gradients += 1
        first = stream(Purpose.PRODUCTS, 2 * self.gradients, rank())
        return self.seed, first, first + NEXT

    def take_samples(self) -> Samples:
        """Return what was counted, and begin anew."""
        found = self.samples, self.first
        self.count_anew()
        return found

    @property
    def counted(self) -> int:
        """How many samples went forward: the first module that was called tells where the model's first was not called."""
        return self.samples or (self.first[1] if self.first else 0)

    def count_anew(self) -> None:
        """Forget the samples of the last step."""
        self.samples, self.first = 0, None

    def mark(self, x: Tensor, fmt: Format) -> None:
        """Remember that ``x`` has been rounded to ``fmt``."""
        if not x.is_inference():  # torch counts no versions of these
            key, marks = id(x), self._rounded
            forget = weakref.ref(x, lambda _: marks.pop(key, None))
            marks[key] = forget, fmt, version_of(x)

    def format_of(self, x: Any) -> Format | None:
        """Return the format to which ``x`` has been rounded; None where that is not known."""
        found = self._rounded.get(id(x))
        if found is None or found[0]() is not x or found[2] != version_of(x):
            return None
        return found[1]


class Rounder:
    """A module's formats, in the module's state and on the host, and rounding by them.

    Args:
        name: Of the module.
        state: What the model's modules share.
        arguments: Names of the arguments of the module's ``forward``.
        is_root: Whether the module is the whole model.

    Attributes:
        counts_samples: Whether this is the module whose inputs tell the size of the batch.
        tally: Of clamped inputs that have a gradient.
        outputs: Of clamped outputs.
        data: Of clamped inputs without a gradient, in the first pass since the optimizer last looked.
        observer: Set by the optimizer before a step whose inputs it wants to know.
    """

    def __init__(
        self, name: str, state: ForwardState, arguments: Sequence[str], *, is_root: bool = False
    ) -> None:
        self.name, self.state, self.arguments, self.is_root = name, state, arguments, is_root
        self.counts_samples = False
        self.tally, self.outputs, self.data = Tally(), Tally(), Tally()
        self.observer: Observer | None = None
        self._carried = CarriedFormats()

    def __setstate__(self, state: StateDict) -> None:
        self.__init__(state["name"], state["state"], state["arguments"])  # as of ``ForwardState``
        vars(self).update(state)

    def formats(self, module: nn.Module) -> ModuleFormats:
        """Return the formats that ``module`` carries; waits for no device unless others wrote them.

        Raises:
            RuntimeError: ``torch.export`` exports.
            ValueError: The module's buffer does not hold formats.
        """
        buffer = getattr(module, BUFFER)
        if not self._carried.are_of(buffer):
            name = f"{self.name}.{BUFFER}".lstrip(".")
            self._carried.read(buffer, name, _with_values(module, buffer))
        return self._carried.formats

    def has(self, module: nn.Module, formats: ModuleFormats) -> bool:
        """Say whether ``module`` carries these formats, and nobody else has written to them."""
        buffer = getattr(module, BUFFER, None)
        own = self._carried
        return buffer is not None and own.are_of(buffer) and formats == own.formats

    @torch.no_grad()
    def write(self, module: nn.Module, formats: ModuleFormats) -> None:
        """Give ``module`` other formats."""
        buffer = getattr(module, BUFFER, None)
        numbers = encode_formats(formats, channels_of(module))
        if buffer is None:
            device = next((p.device for p in module.parameters()), numbers.device)
            module.register_buffer(BUFFER, numbers.to(device))
        elif buffer.shape == numbers.shape and not buffer.is_meta:
            buffer.copy_(numbers)
        else:
            setattr(module, BUFFER, numbers.to(buffer.device))
        buffer = getattr(module, BUFFER)
        if not buffer.is_meta:
            self._carried.note(buffer, numbers, formats)

    def count(self, samples: int) -> None:
        """Count samples that go forward, where this module tells their number: not those that go again."""
        if is_recomputed():
            return
        if self.counts_samples:
            self.state.samples += samples
        name, count = self.state.first or (self.name, 0)
        if name == self.name:
            self.state.first = name, count + samples

    def round_inputs(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Round what comes into ``module``; masks are left as they are.

        Raises:
            RuntimeError: ``torch.jit`` traces, or ``torch.export`` exports.
        """
        formats = self.formats(module)
        self.state.waiting.discard(self.name)
        is_watched = module.training and torch.is_grad_enabled()
        first = next(iter(args or kwargs.values()), None)
        if is_watched and isinstance(first, Tensor) and first.ndim:
            self.count(len(first))
        watches = self.observer is not None and is_watched and not is_transformed()
        if formats.inputs is None and formats.samples is None and not watches:
            return None
        check_untraced()

        def rounded(x: Tensor) -> Tensor:
            x = self._round_samples(module, x, formats)
            if watches:
                return self._observe(module, x, formats)
            return self._round(module, x, formats, formats.inputs)

        return mapped(rounded, args, kwargs, self.arguments)

    def round_outputs(self, module: nn.Module, output: object) -> object:
        """Round what ``module`` returns, but for numbers by themselves: a loss is no activation.

        Raises:
            RuntimeError: ``torch.jit`` traces.
        """
        formats = self.formats(module)
        if formats.outputs is None:
            return output
        check_untraced()
        return mapped_output(
            lambda x: self._round(module, x, formats, formats.outputs, True), output
        )

    def _round(
        self,
        module: nn.Module,
        x: Tensor,
        formats: ModuleFormats,
        fmt: Format | None,
        goes_out: bool = False,
    ) -> Tensor:
        if fmt is None or x.dtype not in FLOATS:
            return as_it_is(module, x, fmt)
        if self.state.format_of(x) == fmt:
            return x  # the layer before has the same format: rounding again changes nothing
        ways = module.training, formats.eval_rounding
        wanted = formats.gradients if goes_out else None
        back = None if wanted is None else (wanted, self.state.options(*ways))
        options = self.state.options(*ways)
        tally = self.outputs if goes_out else self.tally
        if not x.requires_grad and module.training and not goes_out:
            self._note_data(x, fmt, formats.ste)
        y = round_with_gradient(x, fmt, options, ste=formats.ste, tally=tally, back=back)
        self.state.mark(y, fmt)
        return y

    @torch.no_grad()
    def _note_data(self, x: Tensor, fmt: Format, ste: StraightThrough) -> None:
        if ste == "clip" and isinstance(fmt, FixedPoint) and not self.data.total and x.numel():
            reach = 2.0**fmt.il
            low = -reach if fmt.signed else 0.0
            self.data.add(((x >= reach) | (x < low)).count_nonzero(), x.numel())

    def _observe(self, module: nn.Module, x: Tensor, formats: ModuleFormats) -> Tensor:
        """Round what a layer sees, and show it and its gradient to the policy."""
        if x.dtype not in FLOATS or not x.numel():
            return as_it_is(module, x, formats.inputs)
        fmt, clip = formats.inputs, formats.ste == "clip"
        assert self.observer is not None
        assert fmt is None or isinstance(fmt, FixedPoint)
        y, clamped = self.observer.round(x, fmt, clip=clip)
        if clip and fmt is not None and x.requires_grad:
            self.tally.add(clamped, x.numel())
        return y

    def _round_samples(self, module: nn.Module, x: Tensor, formats: ModuleFormats) -> Tensor:
        fmt = formats.samples
        if not isinstance(fmt, BlockFloat) or x.dtype not in FLOATS:
            return x
        options = self.state.options(module.training, formats.eval_rounding)
        options["per_sample"] = True
        return round_with_gradient(x, fmt, options, ste="identity", tally=self.tally, back=None)


def _with_values(module: nn.Module, buffer: Tensor) -> Tensor:
    """Return a module's formats' buffer; where it is on the meta device, what accelerate loads into it later in the call."""
    if buffer.is_meta:
        first = getattr(module, "_hf_hook", None)
        for hook in getattr(first, "hooks", (first,)):
            kept: Mapping[str, Tensor] = getattr(hook, "weights_map", None) or {}
            if BUFFER in kept:
                return kept[BUFFER]
    return buffer


def as_it_is(module: nn.Module, x: Tensor, fmt: Format | None) -> Tensor:
    """Return what is not rounded, such as indices.

    Raises:
        TypeError: It should be, but the model was made float64.
    """
    if fmt is not None and x.dtype is torch.float64:
        own = next(module.parameters(), x)
        if own.dtype is torch.float64:
            raise TypeError(
                "a model in fixed point must be float32, bfloat16 or float16, got float64: write "
                "model.float()"
            )
    return x


def formats_of(model: nn.Module) -> dict[str, ModuleFormats]:
    """Return the formats that a model carries, by the name of the module.

    Raises:
        ValueError: A buffer does not hold formats.
    """
    return {
        name: decode_formats(_with_values(module, buffer), f"{name}.{BUFFER}")
        for name, module in model.named_modules()
        if (buffer := dict(module.named_buffers(recurse=False)).get(BUFFER)) is not None
    }


def channels_of(module: nn.Module) -> list[int]:
    """Return how many channels each of ``carried_parameters`` has; 0 for those of one dimension."""
    return [len(p) if is_layer(p) else 0 for _, p in carried_parameters(module)]
