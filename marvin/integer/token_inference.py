"""Running chains of a transformer as one operation, in eval mode and without gradients."""

from torch import Tensor, nn

from fixedpoint_kernels import tokens
from marvin.integer.chain_run import is_in_the_way
from marvin.integer.formats import has_hooks, rounding_of
from marvin.integer.token_autograd import NO_NOISE, run_tokens
from marvin.integer.token_graph import TokenChain
from marvin.integer.token_run import Call, TokenRun, are_plain

__all__ = ["TokenInference"]


class TokenInference(TokenRun):
    """One chain: what it computes in training; also of a frozen model.

    Args:
        module: Whose graph it is.
        chain: Of its nodes.
    """

    def __init__(self, module: nn.Module, chain: TokenChain) -> None:
        super().__init__(module, chain, has_hooks)

    def ready(self) -> bool:
        """Say whether the chain can run fused now, if what comes in has the shapes that it must."""
        if tokens.path() is None:
            return False
        found = [rounding_of(layer) for layer in self.layers]
        for layer, (formats, _, count) in zip(self.layers, found, strict=True):
            if layer.training or count != 1 or has_hooks(layer, 1) or not are_plain(layer):
                return False
            if formats.eval_rounding != "nearest":
                return False
        if any(is_in_the_way(own) or own.training or not are_plain(own) for own in self.others):
            return False
        self.rounders = tuple(rounder for _, rounders, _ in found for rounder in rounders)
        return self._knows([formats for formats, *_ in found])

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return what leaves the chain; only training counts what is clamped."""
        segment = self._segment_of(xs)
        if segment is None:
            return self._plain[0](*xs)
        call = Call(self._programs)
        calls = self.calls([NO_NOISE] * len(self.layers))
        outputs = run_tokens(call, segment, calls, xs, self.parameters_in_order())
        if call.met_nan:
            return self._plain[0](*xs)
        for rounder in self.rounders:
            rounder.state.waiting.discard(rounder.name)
        return outputs
