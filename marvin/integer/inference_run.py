"""Running one chain of a module as one operation, in eval mode and without gradients."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fixedpoint_kernels import products
from fixedpoint_kernels.fused.graph import INPUT
from fixedpoint_kernels.fused.stamp import Stamp
from fixedpoint_kernels.threads import is_parallel, thread_count
from marvin.integer.autograd import lies_as
from marvin.integer.chain_graph import Chain
from marvin.integer.chain_run import (
    ChainRun,
    is_in_the_way,
)
from marvin.integer.formats import choose_plain, has_hooks, is_prepacked, rounding_of
from marvin.integer.seen import Tensors
from marvin.model_formats import ModuleFormats
from marvin.rounder import Rounder

if TYPE_CHECKING:
    from fixedpoint_kernels.fused import inference

__all__ = ["InferenceRun"]


class _Given(NamedTuple):
    """What each layer has: its weight; batch norm, a bias, or nothing; and the stamp of both, where layers are prepacked."""

    weights: list[Tensor | None]
    norms: "list[inference.Norm | Tensor | None]"
    stamp: Stamp | None


class InferenceRun(ChainRun):
    """One chain, also of a frozen model; see ``Chain.is_exact``."""

    def __init__(self, module: nn.Module, chain: Chain) -> None:
        super().__init__(module, chain)
        self._given: _Given | None = None  # where layers are prepacked
        self._tensors = Tensors([])

    def ready(self) -> bool:
        """Say whether the chain can run fused now."""
        if not self._standing.holds() and not self._standing.found(self._looks_ready()):
            return False
        given = self._given
        if given is not None and given.stamp is not None and given.stamp.is_of(self._tensors.now()):
            return True
        self._given = None
        return self._knows(self._formats) and self._are_taken()

    def _are_taken(self) -> bool:
        are_known = all(norm is None or norm.running_mean is not None for norm in self.norms)
        return are_known and super()._are_taken()

    def _looks_ready(self) -> bool:
        """Say whether modes, hooks and formats are those of a chain that can run."""
        from fixedpoint_kernels.fused.inference import rounds_once

        if rounds_once() is None:
            return False
        found = [rounding_of(conv) for conv in self.convolutions]
        if not all(map(_infers, self.convolutions, found)):
            return False
        if any(is_in_the_way(own) or own.training for own in self.others):
            return False
        self.rounders = tuple(rounder for _, rounders, _ in found for rounder in rounders)
        return self._knows([formats for formats, *_ in found])

    def _is_fit(self, layer: nn.Module) -> bool:
        found = rounding_of(layer)
        return _infers(layer, found) and choose_plain(layer, found[0]) is not None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what leaves the chain."""
        from fixedpoint_kernels.fused import inference

        if not self._takes(x) or not self._is_normalised_alike(x):
            return self._plain(x)
        for rounder in self.rounders:
            rounder.state.waiting.discard(rounder.name)
        weights, norms, stamp = self._given or self._gathered()
        outputs = inference.run(self._inference(x), x, weights, norms, self.shifts, stamp)
        if outputs is None:
            return self._plain(x)
        return tuple(lies_as(y, x) for y in outputs)

    def _is_normalised_alike(self, x: Tensor) -> bool:
        """Say whether batch norm has the bits of a dense tensor; of a transposed one PyTorch rounds otherwise."""
        if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
            return True
        return not any(own.source == INPUT and not own.name for own in self.chain.layers)

    def _gathered(self) -> _Given:
        weights, norms, stamp = [], [], None
        if is_prepacked(*self.convolutions):
            self._tensors = Tensors([*self._owners()])
            stamp = Stamp(self._tensors.now()) if self._tensors.are_known else None
        for conv, norm in self.each(self.convolutions):
            bias = None if conv is None else conv.bias
            weights.append(None if conv is None else conv.weight.detach())
            norms.append(bias if norm is None else _numbers(norm))
        given = _Given(weights, norms, stamp)
        self._given = given if stamp else None
        return given

    def _owners(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield what has the tensors of ``_Given``, and their names."""
        for own in self.convolutions:
            yield from ((own, name) for name in ("weight", "bias"))
        for norm in self.norms:
            names = "weight", "bias", "running_mean", "running_var"
            yield from ((norm, name) for name in names if norm is not None)

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
