"""Which activation modules have a few-bit one, and what it needs."""

from torch import Tensor, nn
from torch.nn.modules import activation as torchs

from fixedpoint_kernels.few_bit.activations import ENTRIES
from fixedpoint_kernels.few_bit.modules import MODULES as FEW_BIT

__all__ = ["CALLS", "FEW_BIT", "SMOOTH", "STEPWISE", "InPlace", "few_bit_of", "is_activation"]

SMOOTH = tuple(entry.kind for entry in ENTRIES.values() if not entry.exact)
STEPWISE = tuple(entry.kind for entry in ENTRIES.values() if entry.exact)  # exact with 1 bit
CALLS = {*ENTRIES, *(name + "_" for name in ENTRIES)}  # as torch calls the functions
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
        if not self.training:  # torch's own writes to it
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        return input.copy_(super().forward(input))  # pyright: ignore[reportAttributeAccessIssue]


def few_bit_of(module: nn.Module) -> type[nn.Module] | None:
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
