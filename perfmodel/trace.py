"""Word lengths over a run: what happened, what would have, and fixed schedules."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from perfmodel.checks import check_whole

__all__ = ["MUPPET_ALEXNET", "MUPPET_RESNET20", "Schedule", "Segment", "SwitchLike", "Trace"]

_FLOAT_BITS = 32


class SwitchLike(Protocol):
    """What a trace needs to know of a change of format, such as ``marvin.Switch``.

    ``has_float_inputs`` may say that the layer's inputs are not rounded; without it, they are.
    """

    @property
    def step(self) -> int:
        """Optimiser step at the end of which the layer changed, from 1."""
        ...

    @property
    def layer(self) -> str:
        """Name of the weight."""
        ...

    @property
    def wl(self) -> int:
        """Word length from the next step on, bits."""
        ...

    @property
    def lookback(self) -> int:
        """Lookback at the switch, steps; 0: there was no search."""
        ...

    @property
    def input_wl(self) -> int:
        """Word length of the layer's inputs from the next step on, bits; 0: the weight's."""
        ...

    @property
    def input_signed(self) -> bool:
        """Whether one of these bits is a sign; without meaning where ``input_wl`` is 0."""
        ...


class OptimizerLike(Protocol):
    """What a trace needs to know of an optimizer, such as ``marvin.MSGD``."""

    policy: Any
    trace: list[Any]
    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Segment:
    """Steps in which one layer kept one word length.

    Args:
        wl: Bits.
        steps: How many steps.
        lookback: The paper's ``lb`` in each of them: steps over which the search for the next
            format is spread; infinite where none is made.
        input_wl: Bits of the layer's inputs.
        input_signed: Whether one of these is a sign.
        has_float_inputs: Whether inputs are float32: EBOPs count these bits, SU ``input_wl``.
    """

    wl: int
    steps: int
    lookback: float
    input_wl: int
    input_signed: bool = True
    has_float_inputs: bool = False

    @property
    def product_wl(self) -> int:
        """Bits that a product costs: those of the longer factor."""
        return max(self.wl, self.input_wl)

    @property
    def ebops(self) -> int:
        """Effective bit operations of one multiply-add: weight bits times input bits, without signs."""
        inputs = self.input_wl - self.input_signed
        return (self.wl - 1) * (_FLOAT_BITS - 1 if self.has_float_inputs else inputs)


@dataclass(frozen=True)
class Trace:
    """The word length of each layer in each step of a run; ``Trace.of`` takes that of an optimizer.

    A switch at the end of step t changes the weights that step t + 1 computes with, so steps 1 to
    t count with the old word length. Until its first switch a layer has ``init_wl`` bits.

    The steps that end in a switch have the lookback recorded there: the search of that switch is
    charged evenly to the window it closes. Steps after a layer's last switch have the lookback of
    that switch; without any, the lower bound.

    Args:
        switches: In any order of layers, each layer's in order of steps.
        steps: Optimiser steps of the run.
        init_wl: Word length to begin with, bits.
        lookback: Bounds of the lookback, steps.
        resolution: Bounds of the resolution, bins.
        kept: Layers that keep one word length and search for none: their switches are ignored.
            ``"*"`` stands for every layer without a name of its own here.
        searches: Whether formats are searched for, by PushDown and PushUp, as MARViN does; else nothing
            is charged, nor for a switch whose lookback is 0.
        rounds_inputs: Whether layers round their inputs; if not, EBOPs count these as float32, and
            SU as the weights, as the paper does.

    Raises:
        TypeError: ``steps`` or ``init_wl`` is no whole number, or ``switches`` are none.
        ValueError: One of them is out of range; a switch is not within the run, or its layer's
            steps are not in order.
    """

    switches: Sequence[SwitchLike]
    steps: int
    init_wl: int = 8
    lookback: tuple[int, int] = (25, 100)
    resolution: tuple[int, int] = (50, 150)
    kept: Mapping[str, int] = field(default_factory=dict)
    searches: bool = True
    rounds_inputs: bool = True

    def __post_init__(self) -> None:
        check_whole(0, steps=self.steps)
        check_whole(1, _FLOAT_BITS, init_wl=self.init_wl)
        strange: list[object] = [self.switches]
        if isinstance(self.switches, Sequence):
            names = "step", "layer", "wl"
            strange = [row for row in self.switches if not all(hasattr(row, n) for n in names)]
        if strange:
            raise TypeError(
                f"switches must be those of an optimizer, got {strange[0]!r:.60}: write "
                "Trace.of(optimizer, steps)"
            )
        last: dict[str, int] = {}
        for switch in self.switches:
            if not last.get(switch.layer, 0) < switch.step <= self.steps:
                raise ValueError(
                    f"switches of {switch.layer} must be in order and within {self.steps} steps, "
                    f"got step {switch.step} after {last.get(switch.layer, 0)}"
                )
            last[switch.layer] = switch.step

    @classmethod
    def of(cls, optimizer: OptimizerLike, steps: int, *, rounds_inputs: bool = True) -> "Trace":
        """Return the trace of an optimizer, with the word length, the bounds and the search that its settings say.

        Args:
            optimizer: ``marvin.MSGD``, or ``marvin.Quantized`` with any policy.
            steps: Optimiser steps of the run.
            rounds_inputs: Whether layers round their inputs, by ``marvin.quantize_activations``.

        Raises:
            TypeError: ``optimizer`` is no such optimizer, or ``steps`` is no whole number.
            ValueError: Parameter groups begin with other word lengths or bounds than the first, or
                ``steps`` are fewer than the optimizer's.
        """
        if not hasattr(optimizer, "policy"):
            raise TypeError(
                f"optimizer must be marvin.MSGD or marvin.Quantized, got {type(optimizer).__name__}"
            )
        policy, shared = optimizer.policy, optimizer.policy.init_shared()
        first, *others = (
            cls(
                (),
                0,
                _FLOAT_BITS if (fmt := policy.init(group, shared).fmt) is None else fmt.wl,
                tuple(group.get("lookback", cls.lookback)),
                tuple(group.get("resolution", cls.resolution)),
                searches="lookback" in group,
                rounds_inputs=rounds_inputs,
            )
            for group in optimizer.param_groups
        )
        if any(other != first for other in others):
            raise ValueError(
                "parameter groups must begin with one word length, lookback and resolution, got others: "
                "write Trace(optimizer.trace, steps, ...) with those that count"
            )
        return replace(first, switches=(*optimizer.trace,), steps=steps)

    @cached_property
    def by_layer(self) -> dict[str, list[SwitchLike]]:
        """The switches of each layer that has any."""
        found: dict[str, list[SwitchLike]] = {}
        for switch in self.switches:
            found.setdefault(switch.layer, []).append(switch)
        return found

    def segments(self, layer: str) -> list[Segment]:
        """Return the layer's word lengths in order; their steps add up to those of the run."""
        wl = self._kept(layer)
        if wl is not None:
            return [Segment(wl, self.steps, math.inf, wl, True, not self.rounds_inputs)]
        wl, since, lookback = self.init_wl, 0, self.lookback[0]
        inputs = self.init_wl, True, not self.rounds_inputs
        segments = []
        for switch in self.by_layer.get(layer, ()):
            steps = switch.step - since
            segments.append(Segment(wl, steps, self.spread(switch.lookback), *inputs))
            wl, since, lookback = switch.wl, switch.step, switch.lookback
            inputs = *self.input_bits(switch), self._has_float_inputs(switch)
        return [*segments, Segment(wl, self.steps - since, self.spread(lookback), *inputs)]

    def segment_after(self, switch: SwitchLike) -> Segment:
        """Return what begins with a switch, and has no steps yet."""
        inputs = *self.input_bits(switch), self._has_float_inputs(switch)
        return Segment(switch.wl, 0, self.spread(switch.lookback), *inputs)

    def spread(self, lookback: int) -> float:
        """Return the steps over which a search is spread: ``lookback``, infinite without one."""
        return lookback if self.searches and lookback else math.inf

    def input_bits(self, switch: SwitchLike) -> tuple[int, bool]:
        """Return the bits that the layer's inputs count with after a switch, and if one is a sign."""
        if self.rounds_inputs and switch.input_wl:
            return switch.input_wl, switch.input_signed
        return switch.wl, True

    def _has_float_inputs(self, switch: SwitchLike) -> bool:
        return not self.rounds_inputs or getattr(switch, "has_float_inputs", False)

    @cached_property
    def has_inputs(self) -> bool:
        """Whether inputs have word lengths of their own."""
        own = any(switch.input_wl for switch in self.switches)
        return self.rounds_inputs and own and not self.kept

    def mean(self, layer: str) -> float:
        """Return the mean word length over the steps, bits; the last one where there are none."""
        return self._mean(layer, "wl")

    def input_mean(self, layer: str) -> float:
        """Return ``mean`` of the layer's inputs."""
        return self._mean(layer, "input_wl")

    def _mean(self, layer: str, of: str) -> float:
        segments = self.segments(layer)
        if not self.steps:
            return float(getattr(segments[-1], of))
        return sum(getattr(s, of) * s.steps for s in segments) / self.steps

    def final(self, layer: str) -> int:
        """Return the word length after the last step, bits."""
        return self.segments(layer)[-1].wl

    def lowest(self, layer: str) -> int:
        """Return the shortest word length of any step."""
        return min((s.wl for s in self.segments(layer) if s.steps), default=self.final(layer))

    def word_lengths(self, layer: str) -> list[int]:
        """Return the bits of each step."""
        return [wl for s in self.segments(layer) for wl in [s.wl] * s.steps]

    def keeping(self, wl: int, layers: Iterable[str] = ("*",)) -> "Trace":
        """Return the run as it would have been, had ``layers`` kept ``wl`` bits from the start.

        Args:
            wl: Bits.
            layers: Names of weights, or one name; default: all of them.

        Raises:
            TypeError: ``wl`` is no whole number.
            ValueError: It is not 1 to 32.
        """
        check_whole(1, _FLOAT_BITS, wl=wl)
        layers = (layers,) if isinstance(layers, str) else layers
        return replace(self, kept={**self.kept, **dict.fromkeys(layers, wl)})

    def _kept(self, layer: str) -> int | None:
        return self.kept.get(layer, self.kept.get("*"))


@dataclass(frozen=True)
class Schedule:
    """One word length for the whole network at a time, without a search; a baseline.

    Args:
        levels: ``(bits, epochs)`` in order.
        steps_per_epoch: Optimiser steps.
        batch_size: Samples of a forward pass.
        accumulation_steps: Forward passes of a step.

    Raises:
        TypeError: ``levels`` are no pairs, or a number is not whole.
        ValueError: A number is out of range, or there is no epoch.
    """

    levels: tuple[tuple[int, int], ...]
    steps_per_epoch: int = 1
    batch_size: int = 1
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        try:
            for wl, epochs in self.levels:
                check_whole(1, _FLOAT_BITS, bits=wl)
                check_whole(0, epochs=epochs)
        except TypeError:
            raise TypeError(
                "levels must be pairs of bits and epochs, such as ((8, 16), (32, 45)), got "
                f"{self.levels!r}"
            ) from None
        check_whole(1, epochs=self.epochs, steps_per_epoch=self.steps_per_epoch)
        check_whole(1, batch_size=self.batch_size, accumulation_steps=self.accumulation_steps)

    @property
    def epochs(self) -> int:
        """Epochs in all."""
        return sum(epochs for _, epochs in self.levels)

    @property
    def memory_ratio(self) -> float:
        """MEM: mean word length over the epochs, of 32 bits."""
        return sum(wl * epochs for wl, epochs in self.levels) / self.epochs / 32


# Epochs that MuPPET spent on each level on CIFAR-10, batch 128: MARVIN, tables 2 and 4.
MUPPET_ALEXNET = Schedule(((8, 16), (12, 10), (14, 14), (16, 14), (32, 45)), batch_size=128)
MUPPET_RESNET20 = Schedule(((8, 22), (12, 22), (14, 10), (16, 15), (32, 45)), batch_size=128)
