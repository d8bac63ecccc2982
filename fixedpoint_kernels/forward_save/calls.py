"""What functions keep that a ``forward`` calls: activations, products, attention, norms, dropout.

``saving`` is a mode of torch: while it is entered, it sees each call of a torch function, and those
in ``HANDLERS`` keep less. A converted model enters it around its forwards.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels._torch_private.modes import is_checkpointed, is_transformed
from fixedpoint_kernels.forward_save.activations import CALLS
from fixedpoint_kernels.forward_save.handlers import HANDLERS, Keeper
from fixedpoint_kernels.forward_save.noise import new_noise
from fixedpoint_kernels.forward_save.scope import here, paused
from fixedpoint_kernels.forward_save.settings import (
    Division,
    FewBit,
    division_settings,
    few_bit_settings,
)

__all__ = ["Scoped", "saving"]


class saving(Keeper, TorchFunctionMode):
    """Make torch's functions keep less for backward while this is entered.

    Values are torch's own, but for the last bit of Tanh, Sigmoid and SiLU. Activation functions keep a few-bit code; linear layers, convolutions,
    norms, products of two tensors, products of matrices, softmax and attention keep what they keep
    as block means and residuals; dropout keeps 1 bit an element. Attention is computed again in the
    backward pass. Parameters, and tensors that need no gradient, are kept as they are.

        with forward_save.saving(few_bit=3, division=True):
            loss = model(batch)
        loss.backward()

    Args:
        few_bit: Bits an element of activation functions (True: 3), as for ``convert``.
        division: How the rest is kept, as for ``convert``.
        seed: Of the noise.

    Attributes:
        handled: How often each function kept less, by name.

    Raises:
        ValueError: Nothing is asked for, or a setting is out of range.
    """

    def __init__(
        self,
        *,
        few_bit: FewBit | Mapping[str, object] | int | None = None,
        division: Division | Mapping[str, object] | bool | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.few_bit, self.division = few_bit_settings(few_bit), division_settings(division)
        if (self.few_bit, self.division) == (None, None):
            raise ValueError("saving needs few_bit, division, or both, got neither")
        self.noise = new_noise(seed)
        self.handled: dict[str, int] = {}
        self._outside: list[tuple[TorchFunctionMode | None, bool]] = []

    @classmethod
    def of(
        cls, few_bit: FewBit | None, division: Division | None, noise: Tensor | None
    ) -> "saving":
        """Return a scope with the noise of a conversion."""
        made = cls(few_bit=few_bit, division=division)
        made.noise = made.noise if noise is None else noise
        return made

    def is_of(self, module: "Scoped") -> bool:
        """Whether the scope is that of a module's conversion."""
        return self.noise is module._noise and (self.few_bit, self.division) == module._saving

    def seen(self) -> "saving":
        """See ``Keeper``: torch takes a mode off while one of its functions is handled."""
        return self

    def __enter__(self) -> "saving":
        self._outside.append((here.scope, here.is_paused))
        here.scope, here.is_paused = self, False
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        here.scope, here.is_paused = self._outside.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        handler = HANDLERS.get(name)
        if handler and "out" not in kwargs and _is_on(name):
            made = handler(self, func, args, kwargs)
            if made is not NotImplemented:
                self.handled[name] = self.handled.get(name, 0) + 1
                return made
        return func(*args, **kwargs)


def _is_on(function: str) -> bool:
    """Whether a function is to keep less; a checkpoint, which runs it twice, keeps nothing."""
    if torch.compiler.is_compiling():  # a part of a model, which is called in a scope
        return False
    if is_transformed() and function not in CALLS:  # few-bit activations are for torch.func, too
        return False
    return torch.is_grad_enabled() and not here.is_paused and not is_checkpointed()


class Scoped(nn.Module):
    """Goes before the class of a module whose ``forward`` calls functions: they keep less there."""

    _saving: tuple[FewBit | None, Division | None]
    _noise: Tensor | None = None

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)

        @wraps(super().forward)  # whoever reads the signature sees that of the model
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            own: Any = super().forward  # of now: a class may be patched
            if torch.compiler.is_compiling():
                return own(*args, **kwargs)
            with self._scope():
                return own(*args, **kwargs)

        cls.forward = forward

    def _scope(self) -> AbstractContextManager[object]:
        if not self.training:
            return paused()
        if isinstance(here.scope, saving) and not here.is_paused and here.scope.is_of(self):
            return nullcontext()
        return saving.of(*self._saving, self._noise)
