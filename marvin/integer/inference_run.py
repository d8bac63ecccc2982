"""Running one chain of a module as one operation, in eval mode and without gradients."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from fixedpoint_kernels import products
from fixedpoint_kernels.threads import is_parallel, thread_count
from marvin.integer.autograd import lies_as
from marvin.integer.chain_run import (
    ChainRun,
    has_fitting_formats,
    is_in_the_way,
)
from marvin.integer.formats import has_hooks, rounding_of
from marvin.model_formats import ModuleFormats
from marvin.rounder import Rounder

if TYPE_CHECKING:
    from fixedpoint_kernels.fused import inference

__all__ = ["InferenceRun"]


class InferenceRun(ChainRun):
    """One chain, also of a frozen model; see ``Chain.is_exact``."""

    def ready(self) -> bool:
        """Say whether the chain can run fused now."""
        from fixedpoint_kernels.fused.inference import rounds_once

        if rounds_once() is None:
            return False
        found = [rounding_of(conv) for conv in self.convolutions]
        if not all(map(_infers, self.convolutions, found)):
            return False
        if any(is_in_the_way(own) or own.training for own in self.others):
            return False
        if any(norm is not None and norm.running_mean is None for norm in self.norms):
            return False
        self.rounders = tuple(rounder for _, rounders, _ in found for rounder in rounders)
        return self._knows([formats for formats, *_ in found]) and self._are_taken()

    def _is_fit(self, layer: nn.Module) -> bool:
        found = rounding_of(layer)
        return _infers(layer, found) and has_fitting_formats(layer, found[0])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what leaves the chain."""
        from fixedpoint_kernels.fused import inference

        if not self._takes(x):
            return self._plain[0](x)
        for rounder in self.rounders:
            rounder.state.waiting.discard(rounder.name)
        program = self._inference(x)
        weights, norms = [], []
        for conv, norm in self.each(self.convolutions):
            bias = None if conv is None else conv.bias
            weights.append(None if conv is None else conv.weight.detach())
            norms.append(bias if norm is None else _numbers(norm))
        outputs = inference.run(program, x, weights, norms, self.shifts)
        if outputs is None:
            return self._plain[0](x)
        return tuple(lies_as(y, x) for y in outputs)

    def _inference(self, x: Tensor) -> "inference.Program":
        from fixedpoint_kernels.fused.inference import Program

        path = products.path().name
        threads = min(thread_count() if is_parallel(x.numel() * 16) else 1, len(x))
        segment, size = self._segment, (x.shape[2], x.shape[3])
        assert segment is not None
        weights = sum(conv.weight.numel() for conv in self.convolutions)
        packers = max(threads, thread_count() if is_parallel(weights) else 1)
        key = segment, tuple(x.shape), path, threads, packers
        rest = len(x), size, path, threads, packers
        return self._programs.get(key, lambda _: Program(segment, *rest))


def _infers(layer: nn.Module, rounding: tuple[ModuleFormats, list[Rounder], int]) -> bool:
    """Say whether a layer's mode, hooks and rounding are those that chains take; see ``rounding_of``."""
    formats, _, count = rounding
    if layer.training or count != 1 or has_hooks(layer, 1):
        return False
    return formats.eval_rounding == "nearest"


def _numbers(norm: nn.BatchNorm2d) -> "inference.Norm":
    from fixedpoint_kernels.fused.inference import Norm

    assert norm.running_mean is not None
    assert norm.running_var is not None
    return Norm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
