"""Running chains of a transformer as one operation, in eval mode and without gradients."""

from torch import Tensor, nn

from fixedpoint_kernels import tokens
from fixedpoint_kernels.fused.stamp import Stamp
from marvin.integer.chain_run import is_in_the_way
from marvin.integer.formats import has_hooks, is_prepacked, rounding_of
from marvin.integer.seen import Tensors
from marvin.integer.token_autograd import NO_NOISE, run_tokens
from marvin.integer.token_chain import TokenChain
from marvin.integer.token_run import Call, TokenRun

__all__ = ["TokenInference"]


class TokenInference(TokenRun):
    """One chain: what it computes in training; also of a frozen model.

    Args:
        module: Whose graph it is.
        chain: Of its nodes.
    """

    def __init__(self, module: nn.Module, chain: TokenChain) -> None:
        super().__init__(module, chain, has_hooks)
        self._given: tuple[Stamp, list[Tensor | None]] | None = None  # where layers are prepacked
        self._tensors = Tensors([])

    def ready(self) -> bool:
        """Say whether the chain can run fused now, if what comes in has the shapes that it must."""
        if tokens.path() is None:
            return False
        if not self._standing.holds() and not self._standing.found(self._looks_ready()):
            return False
        given = self._given
        if given is not None and given[0].is_of(self._tensors.now()):
            return True
        self._given = None
        if not self.are_plain():
            return False
        if is_prepacked(*self.layers):
            self._tensors = Tensors([owner for owner in self.owners if owner is not None])
            if self._tensors.are_known:
                self._given = Stamp(self._tensors.now()), super().parameters_in_order()
        return True

    def _looks_ready(self) -> bool:
        """Say whether modes, hooks and formats are those of a chain that can run."""
        found = [rounding_of(layer) for layer in self.layers]
        for layer, (formats, _, count) in zip(self.layers, found, strict=True):
            if layer.training or count != 1 or has_hooks(layer, 1):
                return False
            if formats.eval_rounding != "nearest":
                return False
        if any(is_in_the_way(own) or own.training for own in self.others):
            return False
        self.rounders = tuple(rounder for _, rounders, _ in found for rounder in rounders)
        return self._knows([formats for formats, *_ in found])

    def parameters_in_order(self) -> list[Tensor | None]:
        """Return weight or scale, and bias or shift, of each member."""
        return super().parameters_in_order() if self._given is None else [*self._given[1]]

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return what leaves the chain; only training counts what is clamped."""
        found = self._taken(xs)
        if found is None:
            return self._plain(*xs)
        call = Call(self._programs, self._given[0] if self._given else None)
        calls = self.calls([NO_NOISE] * len(self.layers))
        outputs = run_tokens(call, found.segment, calls, found.values, found.parameters)
        if call.met_nan:
            return self._plain(*xs)
        for rounder in self.rounders:
            rounder.state.waiting.discard(rounder.name)
        return outputs
