"""Quantised activations: a model's modules round what they see to the formats they carry."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels import BlockFloat, FixedPoint, quantize_block
from fixedpoint_kernels._torch_private import hooks_of, remove_hooks, version_of
from fixedpoint_kernels.rounding import Rounding
from marvin.layers import is_layer
from marvin.model_formats import ModuleFormats, decode_formats, encode_formats
from marvin.noise import Purpose, stream
from marvin.policies.observer import Observer
from marvin.ranks import rank
from marvin.rounding import Format
from marvin.straight_through import StraightThrough, Tally, round_with_gradient

__all__ = [
    "BUFFER",
    "FLOATS",
    "Entry",
    "ForwardState",
    "QuantizedActivations",
    "Report",
    "Rounder",
    "RoundsInputs",
    "channels_of",
    "detach",
    "formats_of",
    "hook",
    "mapped",
    "state_of",
    "unhook",
]

BUFFER = "fixed_point"
"""Name of the buffer in which a module's state has its formats."""

FLOATS = torch.float32, torch.bfloat16, torch.float16


class ForwardState:
    """What a model's modules share between forward passes.

    Attributes:
        seed: Of the noise of activations.
        forwards: Roundings with noise so far; numbers them.
        rounding: How activations are rounded in training.
        samples: How many went forward in training since the optimizer last asked.
        waiting: Names of modules that round and were not called yet.
    """

    def __init__(self, seed: int = 0, rounding: Rounding = "stochastic") -> None:
        self.seed, self.rounding = seed, rounding
        self.forwards = self.samples = 0
        self.waiting: set[str] = set()
        self._rounded: dict[int, tuple[weakref.ref[Tensor], Format, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rounded": {}}  # tensors of this process

    def options(self, is_training: bool, eval_rounding: Rounding) -> dict[str, Any]:
        """Return how to round once more."""
        rounding = self.rounding if is_training else eval_rounding
        if rounding == "nearest" or not is_training:
            return {"rounding": rounding}
        self.forwards += 1
        place = stream(Purpose.ACTIVATIONS, self.forwards, rank())
        return {"rounding": rounding, "seed": self.seed, "stream": place}

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
        tally: Of clamped values.
        observer: Set by the optimizer before a step whose inputs it wants to know.
    """

    def __init__(
        self, name: str, state: ForwardState, arguments: Sequence[str], *, is_root: bool = False
    ) -> None:
        self.name, self.state, self.arguments, self.is_root = name, state, arguments, is_root
        self.counts_samples = False
        self.tally = Tally()
        self.observer: Observer | None = None
        self._formats = ModuleFormats()
        self._seen: tuple[Tensor | None, int] = None, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_seen": (None, 0)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _keep_out_of_compilation()

    def formats(self, module: nn.Module) -> ModuleFormats:
        """Return the formats that ``module`` carries; waits for no device unless others wrote them.

        Raises:
            ValueError: The module's buffer does not hold formats.
        """
        buffer = getattr(module, BUFFER)
        seen, version = self._seen
        if buffer is not seen or buffer.is_inference() or version_of(buffer) != version:
            self._formats = decode_formats(buffer, f"{self.name}.{BUFFER}".lstrip("."))
            self._seen = buffer, version_of(buffer)
        return self._formats

    @torch.no_grad()
    def write(self, module: nn.Module, formats: ModuleFormats) -> None:
        """Give ``module`` other formats."""
        buffer = getattr(module, BUFFER, None)
        is_same = (
            buffer is self._seen[0] and buffer is not None and version_of(buffer) == self._seen[1]
        )
        if is_same and formats == self._formats:
            return
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
            self._formats, self._seen = formats, (buffer, version_of(buffer))

    def round_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Round what comes into ``module``; masks are left as they are."""
        formats = self.formats(module)
        self.state.waiting.discard(self.name)
        is_watched = module.training and torch.is_grad_enabled()
        if self.counts_samples and is_watched:
            first = next(iter(args or kwargs.values()), None)
            if isinstance(first, Tensor) and first.ndim:
                self.state.samples += len(first)
        watches = self.observer is not None and is_watched
        if formats.inputs is None and formats.samples is None and not watches:
            return None

        def rounded(x: Tensor) -> Tensor:
            x = self._round_samples(module, x, formats)
            if watches:
                return self._observe(x, formats)
            return self._round(module, x, formats, formats.inputs)

        return mapped(rounded, args, kwargs, self.arguments)

    def round_outputs(self, module: nn.Module, output: Any) -> Any:
        """Round what ``module`` returns."""
        formats = self.formats(module)
        if formats.outputs is None:
            return output
        return _mapped(lambda x: self._round(module, x, formats, formats.outputs, True), output)

    def _round(
        self,
        module: nn.Module,
        x: Tensor,
        formats: ModuleFormats,
        fmt: Format | None,
        goes_out: bool = False,
    ) -> Tensor:
        if fmt is None or x.dtype not in FLOATS:
            return x
        if self.state.format_of(x) == fmt:
            return x  # the layer before has the same format: rounding again changes nothing
        ways = module.training, formats.eval_rounding
        wanted = formats.gradients if goes_out else None
        back = None if wanted is None else (wanted, self.state.options(*ways))
        options = self.state.options(*ways)
        y = round_with_gradient(x, fmt, options, ste=formats.ste, tally=self.tally, back=back)
        self.state.mark(y, fmt)
        return y

    def _observe(self, x: Tensor, formats: ModuleFormats) -> Tensor:
        """Round what a layer sees, and show it and its gradient to the policy."""
        if x.dtype not in FLOATS or not x.numel():
            return x
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
        return quantize_block(x.detach(), fmt, per_sample=True, **options)


class _Hook:
    """What a module calls; a class, so that models with hooks can be copied and pickled."""

    def __init__(self, rounder: Rounder) -> None:
        self.rounder = rounder


class RoundsInputs(_Hook):
    """Marks a module that rounds."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Rounder.round_inputs``."""
        return self.rounder.round_inputs(module, args, kwargs)


class _Outputs(_Hook):
    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        return self.rounder.round_outputs(module, output)


class _Loading(_Hook):
    """Refuses numbers that are no formats; where a state has none, those of the module stay."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        own = getattr(module, BUFFER)
        loaded = state.setdefault(prefix + BUFFER, own.detach().clone())
        try:
            decode_formats(loaded, prefix + BUFFER)
        except ValueError as error:
            errors.append(str(error))


@dataclass(frozen=True)
class Report:
    """Which modules round what they see, and which do not.

    Args:
        rounded: Names of modules.
        left: Why other modules with parameters, normalisation and pooling stay as they are, by name.
    """

    rounded: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.rounded)} modules round activations: {', '.join(self.rounded)}"]
        return "\n".join(lines + [f"not {name}: {reason}" for name, reason in self.left.items()])


@dataclass(frozen=True)
class Entry:
    """A module that carries formats.

    Args:
        module: The module.
        rounder: Of it.
        parameters: The first with a format gives that of the activations.
    """

    module: nn.Module
    rounder: Rounder
    parameters: Sequence[Tensor] = ()

    @property
    def is_live(self) -> bool:
        """Whether the module rounds by this still."""
        return any(hook.rounder is self.rounder for hook in hooks_of(self.module, RoundsInputs))


@dataclass
class QuantizedActivations:
    """A model's quantised activations; made by ``quantize_activations`` and ``prepare``.

    Args:
        entries: Modules that carry formats.
        state: What they share.
        ste: See ``fake_quantize``.
        eval_rounding: How activations are rounded in eval mode.
        left: See ``Report``.
    """

    entries: list[Entry]
    state: ForwardState
    ste: StraightThrough = "clip"
    eval_rounding: Rounding = "nearest"
    left: dict[str, str] = field(default_factory=dict)

    @property
    def report(self) -> Report:
        """Which modules round what they see, and why others do not."""
        waiting = dict.fromkeys(sorted(self.state.waiting), "not called yet")
        return Report(tuple(self.layers()), {**self.left, **waiting})

    @property
    def is_attached(self) -> bool:
        """Whether the model has these hooks still."""
        return any(entry.is_live for entry in self.entries)

    def remove(self) -> None:
        """Undo: the model's activations are float again, and its state has no formats."""
        for entry in self.entries:
            if entry.is_live:
                detach(entry.module)

    def layers(self) -> list[str]:
        """Return the names of the modules that round their activations."""
        return [entry.rounder.name for entry in self.entries if entry.parameters]

    def saturation(self) -> dict[str, float]:
        """Return the share of values each module clamped in training since the last call.

        Inputs and outputs count together; ``ste="identity"`` does not count. Above a few per
        cent, use more ``buffer_bits``.
        """
        rounders = [entry.rounder for entry in self.entries if entry.parameters]
        shares = {rounder.name: rounder.tally.share() for rounder in rounders}
        for rounder in rounders:
            rounder.tally = Tally()
        return shares


def hook(module: nn.Module, rounder: Rounder) -> None:
    """Let a module round by its formats, and save and load them with its state."""
    _keep_out_of_compilation()
    module.register_forward_pre_hook(RoundsInputs(rounder), with_kwargs=True)
    module.register_forward_hook(_Outputs(rounder))
    module.register_load_state_dict_pre_hook(_Loading(rounder))


def unhook(module: nn.Module) -> None:
    """Let a module round no more; its formats stay."""
    remove_hooks(module, _Hook)


def detach(module: nn.Module) -> None:
    """Take hooks and formats from one module, if it has some."""
    unhook(module)
    if BUFFER in dict(module.named_buffers(recurse=False)):
        delattr(module, BUFFER)


def state_of(model: nn.Module) -> ForwardState | None:
    """Return what a model's modules share; None where activations are not quantised."""
    found = (hook.rounder.state for m in model.modules() for hook in hooks_of(m, RoundsInputs))
    return next(found, None)


def formats_of(model: nn.Module) -> dict[str, ModuleFormats]:
    """Return the formats that a model carries, by the name of the module.

    Raises:
        ValueError: A buffer does not hold formats.
    """
    return {
        name: decode_formats(buffer, f"{name}.{BUFFER}")
        for name, module in model.named_modules()
        if (buffer := dict(module.named_buffers(recurse=False)).get(BUFFER)) is not None
    }


def channels_of(module: nn.Module) -> list[int]:
    """Return how many channels each parameter of a module has; 0 for those of one dimension."""
    return [len(p) if is_layer(p) else 0 for p in module.parameters(recurse=False)]


def mapped(
    function: Callable[[Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with their tensors replaced, also inside of tuples, lists and dictionaries.

    Args:
        function: Gives what takes a tensor's place.
        args: By position.
        kwargs: By name. What is named a mask stays.
        names: Of ``args``, as far as they are known.
    """
    known = [*names[: len(args)], *[""] * (len(args) - len(names))]
    own = tuple(_mapped(function, x, name) for name, x in zip(known, args, strict=True))
    return own, {name: _mapped(function, x, name) for name, x in kwargs.items()}


def _mapped(function: Callable[[Tensor], Tensor], value: Any, name: str = "") -> Any:
    """Return ``value`` with its tensors replaced; what is named a mask stays."""
    if "mask" in name:
        return value
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [_mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _mapped(function, item, str(key))
        return copied
    return value


@cache
def _keep_out_of_compilation() -> None:
    """Keep hooks out of torch.compile, which cannot look into the kernels."""
    for kind in (RoundsInputs, _Outputs):  # takes a second the first time
        disabled: Any = torch.compiler.disable(kind.__call__)
        kind.__call__ = disabled
