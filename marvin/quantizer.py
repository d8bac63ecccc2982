"""A module that rounds what goes through it, and the gradient that comes back."""

import itertools
from numbers import Integral
from typing import get_args

import torch
from torch import Tensor, nn

from fixedpoint_kernels import BlockFloat, FixedPoint, Minifloat
from fixedpoint_kernels.memory import is_exported
from fixedpoint_kernels.rounding import Rounding
from marvin.noise import Purpose, stream
from marvin.ranks import rank
from marvin.straight_through import StraightThrough, Tally, round_with_gradient

__all__ = ["Number", "Quantizer"]

Number = FixedPoint | BlockFloat | Minifloat
_COUNT = 2**18  # of numbers: two streams each, below those of ``round_state``
_CALLS, _RANKS = 2**28, 2**12  # of a process, and processes: 2**40 steps of a stream
_NUMBERS = itertools.count()  # of the quantizers of this process: each has noise of its own


class Quantizer(nn.Module):
    """Rounds activations to one format, and their gradient to another; formats do not change.

    For formats that change with training see ``marvin.quantize_activations``. In training mode each
    call has noise of its own, in each process; in eval mode that of one call, which stays. The
    state of the module has the place in the noise, so that a resumed training has the same bits.
    A copy has it too, and so the same noise: of ``copy.deepcopy``, or ``nn.TransformerEncoder(layer, 3)``,
    give each copy a ``number`` of its own.

    Args:
        forward_format: Of what goes through: ``FixedPoint``, ``BlockFloat`` or ``Minifloat``. None:
            it stays.
        backward_format: Of the gradient that comes back. None: it stays. An infinity becomes NaN, so that
            a gradient scaler sees it; of a ``BlockFloat`` the whole tensor does.
        forward_rounding: ``"stochastic"`` or ``"nearest"``, in training and in eval mode.
        backward_rounding: The same, for the gradient.
        ste: ``"clip"``: no gradient where a value saturated; ``"identity"``: as if it fitted. See
            ``marvin.fake_quantize``; block floating point does not saturate.
        seed: Of the noise.
        number: Which of the seed's quantizers this is, 0 to 2**18 - 1. None: the next one of this
            process, after the last from 0 again.

    Raises:
        TypeError: A format is not a ``FixedPoint``, ``BlockFloat`` or ``Minifloat``.
        ValueError: A rounding or ``ste`` is unknown, ``seed`` or ``number`` out of range.

    Examples:
        >>> number = fixedpoint_kernels.FixedPoint(8, 4)
        >>> model = nn.Sequential(nn.Linear(8, 8), marvin.Quantizer(number, number))

    Source:
        ``qtorch.quant.Quantizer``. Differs: see docs/migration.md.
    """

    def __init__(  # noqa: PLR0913  there and back
        self,
        forward_format: Number | None = None,
        backward_format: Number | None = None,
        *,
        forward_rounding: Rounding = "stochastic",
        backward_rounding: Rounding = "stochastic",
        ste: StraightThrough = "clip",
        seed: int = 0,
        number: int | None = None,
    ) -> None:
        super().__init__()
        for fmt in (forward_format, backward_format):
            if not isinstance(fmt, Number | None):
                raise TypeError(
                    "a format must be a FixedPoint, BlockFloat or Minifloat, or None, "
                    f"got {fmt!r:.60}: write FixedPoint(8, 4), say"
                )
        for rounding in (forward_rounding, backward_rounding):
            if rounding not in get_args(Rounding):
                raise ValueError(f"rounding must be one of {get_args(Rounding)}, got {rounding!r}")
        if ste not in get_args(StraightThrough):
            raise ValueError(f"ste must be one of {get_args(StraightThrough)}, got {ste!r}")
        number = next(_NUMBERS) % _COUNT if number is None else number
        for name, value, end in (("seed", seed, 2**63), ("number", number, _COUNT)):
            if not (isinstance(value, Integral) and 0 <= value < end):
                raise ValueError(
                    f"{name} must be a whole number, 0 to {end - 1}, got {value!r:.60}"
                )
        self.forward_format, self.backward_format = forward_format, backward_format
        self.forward_rounding, self.backward_rounding = forward_rounding, backward_rounding
        self.ste: StraightThrough = ste
        self.seed, self.number, self.calls = seed, number, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, rounded; any shape, float32, bfloat16 or float16.

        Raises:
            TypeError: ``x`` is no tensor.
            RuntimeError: ``torch.jit`` or ``torch.export`` follows it in training mode.
        """
        if not isinstance(x, Tensor):
            raise TypeError(
                f"a Quantizer takes a tensor, got {type(x).__name__}: write torch.as_tensor(x)"
            )
        there, back = self._noise(0), self._noise(1)
        if self.training:
            if is_exported():
                raise RuntimeError(
                    "a Quantizer to trace or export must be in eval mode, for a program would keep the noise "
                    "of one call: write model.eval() before"
                )
            self.calls += 1
        gradient = None
        if self.backward_format is not None:
            gradient = self.backward_format, {"rounding": self.backward_rounding, **back}
        options = {"rounding": self.forward_rounding, **there}
        fmt = self.forward_format
        if fmt is None and gradient is None:
            return x
        return round_with_gradient(x, fmt, options, ste=self.ste, tally=Tally(), back=gradient)

    def _noise(self, way: int) -> dict[str, int]:
        process = rank() % _RANKS if self.training else 0
        own = stream(Purpose.QUANTIZER, process * _CALLS + self.calls, 2 * self.number + way)
        return {"seed": self.seed, "stream": own}

    def get_extra_state(self) -> Tensor:
        """Return where in the noise this is: seed, number and count of calls."""
        return torch.tensor([self.seed, self.number, self.calls], device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Go on where ``state`` stopped."""
        self.seed, self.number, self.calls = state.tolist()

    def extra_repr(self) -> str:
        """Return the formats."""
        there = f"{self.forward_format or 'float32'}, {self.forward_rounding}"
        return f"{there}; gradient {self.backward_format or 'float32'}, {self.backward_rounding}"
