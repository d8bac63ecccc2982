"""Which activation modules have a few-bit one, and what it needs."""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import activation as torchs

from fixedpoint_kernels import few_bit

__all__ = ["CALLS", "STEPWISE", "InPlace", "few_bit_of", "is_activation"]

SMOOTH = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.LogSigmoid,
    nn.Mish,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
)
STEPWISE = (  # exact with 1 bit
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.Softshrink,
    nn.Threshold,
)
FEW_BIT = {kind: getattr(few_bit, kind.__name__) for kind in (*SMOOTH, *STEPWISE)}
_NAMES = {name for name in few_bit.NAMES if hasattr(few_bit, name)}
CALLS = _NAMES | {name + "_" for name in _NAMES}  # as torch calls the functions
_OTHERS = tuple(getattr(torchs, name) for name in torchs.__all__)
WHY_NOT = {
    nn.PReLU: "its slope learns",
    nn.RReLU: "its slope is random",
    nn.MultiheadAttention: "it calls functions of its own",
}


class InPlace(nn.Module):
    """Keeps ``inplace=True``: the input is overwritten, as the model may rely on it."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input``, which holds the value from then on."""
        return input.copy_(super().forward(input))  # pyright: ignore[reportAttributeAccessIssue]


def few_bit_of(module: nn.Module) -> Any:
    """Return torch's class that a module behaves as, if there is a few-bit one of it."""
    kinds = (kind for kind in type(module).__mro__ if kind in FEW_BIT)
    kind = next(kinds, None)
    return kind if kind is not None and type(module).forward is kind.forward else None


def is_activation(module: nn.Module) -> bool:
    """Whether it is torch's or derives from torch's, few-bit ones apart."""
    return isinstance(module, _OTHERS) and type(module) not in FEW_BIT.values()


def why_not(module: nn.Module) -> str:
    """Say why an activation has no few-bit one."""
    for kind, reason in WHY_NOT.items():
        if isinstance(module, kind):
            return reason
    if isinstance(module, tuple(FEW_BIT)):
        return "it has a forward of its own"
    return "it is not a function of one element"
