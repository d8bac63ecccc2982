"""Running one chain of a module as one operation, forward and backward, in training."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fixedpoint_kernels import products
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels._torch_private.modules import has_backward_hooks, own_forward_hooks
from fixedpoint_kernels._torch_private.tensors import foreach_add_
from fixedpoint_kernels.fused import Layer, Norm, Parameters, Segment, Wanted
from fixedpoint_kernels.products.shapes import Window
from fixedpoint_kernels.threads import is_parallel, thread_count
from marvin.hooks import rounders_of
from marvin.integer.autograd import lies_as, once
from marvin.integer.chain_graph import Chain
from marvin.integer.formats import (
    Product,
    choose_plain,
    has_hooks,
    has_nan,
    rounding_of,
    size_of,
)
from marvin.integer.graph_code import GraphCode
from marvin.integer.layers import IntegerConv2d, IntegerLinear
from marvin.integer.programs import Programs
from marvin.integer.seen import Tensors
from marvin.integer.standing import Standing
from marvin.integer.token_run import alone
from marvin.model_formats import ModuleFormats
from marvin.rounder import Rounder

__all__ = ["ChainRun", "is_in_the_way"]


_Own = TypeVar("_Own")


def is_in_the_way(module: nn.Module) -> bool:
    """Say whether a module that is no convolution rounds, or has hooks that would not be called."""
    before, after = own_forward_hooks(module)
    if not before and not after:
        return has_backward_hooks(module)
    formats, _, own = rounding_of(module)
    return formats.rounds or has_hooks(module, own)


def _layer(module: nn.Module, name: str) -> nn.Conv2d | nn.Linear:
    found = module.get_submodule(name)
    assert isinstance(found, nn.Conv2d | nn.Linear)
    return found


def _norm(module: nn.Module, name: str | None) -> nn.BatchNorm2d | None:
    found = None if name is None else module.get_submodule(name)
    assert found is None or isinstance(found, nn.BatchNorm2d)
    return found


class ChainRun(nn.Module):
    """One chain of a module, as a module of the traced graph."""

    def __init__(self, module: nn.Module, chain: Chain) -> None:
        super().__init__()
        self.chain = chain
        # in tuples, so that they are not this module's own; linear layers are convolutions, too
        self.convolutions = tuple(_layer(module, own.name) for own in chain.products)
        self.norms = tuple(_norm(module, own.norm) for own in chain.layers)
        self._has_norm_alone = len(chain.products) < len(chain.layers)
        self.others = tuple(
            own
            for own in map(module.get_submodule, chain.modules)
            if not isinstance(own, IntegerConv2d | IntegerLinear)
        )
        self._plain = GraphCode(alone(chain), module, {})
        pairs = [*self.each(self.convolutions)]
        self._weights = Tensors([(conv, "weight") for conv, _ in pairs])
        of_norm = "running_mean", "running_var", "num_batches_tracked"
        self._scales = Tensors([(norm, "weight") for _, norm in pairs])
        self._shifts = Tensors([(conv if norm is None else norm, "bias") for conv, norm in pairs])
        self._running = [Tensors([(norm, name) for _, norm in pairs]) for name in of_norm]
        # batch norm would take it away, all but the running mean
        self._unwanted = Tensors([(conv, "bias") for conv, norm in pairs if norm is not None])
        self.rounders: tuple[Rounder, ...] = ()
        self._formats: list[ModuleFormats] = []
        self._shapes: list[torch.Size] = []
        self._segment: Segment | None = None
        self._wanted = Wanted([])
        self.shifts: list[tuple[int, ...]] = []
        self._held: tuple[Any, ...] = ()
        self._programs: Programs[Any] = Programs()
        self._standing = Standing((*self.convolutions, *self.others))

    def ready(self) -> bool:
        """Say whether the chain can run fused now."""
        if self._standing.holds() and self._rounds_to_nearest() and self._are_taken():
            return True
        return self._standing.found(self._fits() and self._are_taken())

    def _rounds_to_nearest(self) -> bool:
        return all(own.state.rounding == "nearest" for own in self.rounders)

    def _fits(self) -> bool:
        """Look at each module, and say whether hooks, modes and formats are those that chains take."""
        found = [rounders_of(conv) for conv in self.convolutions]
        if any(len(own) != 1 for own in found):
            return False
        self.rounders = tuple(own[0] for own in found)
        if any(not conv.training or has_hooks(conv, 1) for conv in self.convolutions):
            return False
        if not self._rounds_to_nearest():
            return False
        if any(is_in_the_way(own) or not own.training for own in self.others):
            return False
        pairs = zip(self.rounders, self.convolutions, strict=True)
        return self._knows([r.formats(conv) for r, conv in pairs])

    def _are_taken(self) -> bool:
        """Say whether weights, biases and what batch norm has are what kernels take."""
        if any(own is not None for own in self._unwanted.now()):
            return False
        found = self._weights, self._scales, self._shifts, *self._running[:2]
        return self._wanted.are(*(own.now() for own in found))

    def _knows(self, formats: list[ModuleFormats]) -> bool:
        """Describe the chain with these formats, and say whether they fit."""
        shapes = [conv.weight.shape for conv in self.convolutions]
        if (
            shapes != self._shapes
            or len(formats) != len(self._formats)
            or any(a is not b for a, b in zip(formats, self._formats, strict=True))
        ):
            self._segment = self._described(formats)
            self._wanted = Wanted([] if self._segment is None else self._segment.layers)
            self._formats, self._shapes = formats, shapes  # last: it may be interrupted
        return self._segment is not None

    def unfit(self) -> list[str]:
        """Return the names of linear layers without which the chain could run fused now."""
        pairs = zip(self.chain.products, self.convolutions, strict=True)
        unfit = [(own.name, layer) for own, layer in pairs if not self._is_fit(layer)]
        return (
            [name for name, _ in unfit] if all(isinstance(n, nn.Linear) for _, n in unfit) else []
        )

    def _is_fit(self, layer: nn.Module) -> bool:
        """Say whether a layer has what chains need."""
        rounders = rounders_of(layer)
        if len(rounders) != 1 or has_hooks(layer) or not layer.training:
            return False
        return choose_plain(layer, rounders[0].formats(layer)) is not None

    def _described(self, formats: list[ModuleFormats]) -> Segment | None:
        layers: list[Layer | Norm] = []
        self.shifts = []
        pairs = zip(self.convolutions, formats, strict=True)
        for own, norm in zip(self.chain.layers, self.norms, strict=True):
            if not own.name:
                assert norm is not None
                layers.append(Norm(own.source, norm.num_features, norm.eps))
                self.shifts.append(())
                continue
            conv, found = next(pairs)
            product = choose_plain(conv, found)
            if product is None:
                return None
            eps, clip = (None if norm is None else norm.eps), found.ste == "clip"
            is_flat, sizes = isinstance(conv, nn.Linear), (*conv.weight.shape, 1, 1)
            if conv.weight.dim() != (2 if is_flat else 4) or sizes[0] % product.groups:
                return None
            layers.append(
                Layer(
                    own.source, product.inputs, product.weight_fmt,
                    (sizes[0], sizes[1], sizes[2], sizes[3]), _window(product), eps, clip, is_flat,
                    bool(product.shifts),
                )
            )  # fmt: skip
            self.shifts.append(product.shifts)
        return Segment(tuple(layers), tuple(self.chain.values))

    def each(
        self, convolutions: Iterable[_Own]
    ) -> Iterator[tuple[_Own | None, nn.BatchNorm2d | None]]:
        """Yield what belongs to the convolution of each layer, None of batch norm alone; and its norm."""
        found = iter(convolutions)
        for own, norm in zip(self.chain.layers, self.norms, strict=True):
            yield (next(found) if own.name else None), norm

    def _takes(self, x: Tensor) -> bool:
        """Say whether an input is float32, has images of a shape for which the chain is what its layers are, and no NaN."""
        if x.dim() != 4 or x.dtype is not torch.float32 or not len(x):
            return False
        # batch norm of infinity is NaN, too
        if not math.isfinite(size_of(x)) if self._has_norm_alone else has_nan(x):
            return False
        key = self._segment, tuple(x.shape[1:])
        held = self._held  # threads may come at once
        if held[:1] != (key,):
            assert self._segment is not None
            self._held = held = key, self._segment.holds((x.shape[1], x.shape[2], x.shape[3]))
        return held[1]

    def _normalises_one(self, x: Tensor) -> bool:
        """Say whether a batch norm has one value of each channel, which PyTorch refuses."""
        assert self._segment is not None
        return len(x) == 1 and self._segment.normalises_one((x.shape[2], x.shape[3]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what leaves the chain."""
        if not self._takes(x) or self._normalises_one(x):
            return self._plain(x)
        images = len(x)
        for rounder in self.rounders:
            rounder.state.waiting.discard(rounder.name)
            rounder.count(images)
        drawn = [rounder.state.noise_of_gradients() for rounder in self.rounders]
        noise = [own or (0, 0, 0) for own, _ in self.each(drawn)]
        parameters = *self._weights.now(), *self._scales.now(), *self._shifts.now()
        return _Chain.apply(x, self, noise, *parameters)  # pyright: ignore[reportReturnType]

    @property
    def observes(self) -> bool:
        """Whether a policy asks what layers see."""
        return any(rounder.observer is not None for rounder in self.rounders)

    def program(self, x: Tensor, needs_input: bool, needs_weights: tuple[bool, ...]) -> Any:
        """Return the program for images like ``x``."""
        from fixedpoint_kernels.fused.program import Program  # Numba takes a second to import

        path = products.path().name
        threads = min(thread_count() if is_parallel(x.numel() * 16) else 1, len(x))
        observes = self.observes
        needs_input = needs_input or observes
        key = self._segment, tuple(x.shape), path, threads, needs_input, needs_weights, observes
        segment, size = self._segment, (x.shape[2], x.shape[3])
        assert segment is not None
        rest = path, threads, needs_input, needs_weights, observes
        return self._programs.get(key, lambda own: Program(segment, len(x), size, *rest, own))

    def note(self, program: Any, x: Tensor, clamped: Sequence[int]) -> None:
        """Count what was clamped."""
        goes_back, elements = x.requires_grad, program.elements
        for layer, (rounder, _), *own in zip(
            program.segment.layers, self.each(self.rounders), clamped, elements, strict=True
        ):
            if rounder is not None and layer.clip and (layer.source >= 0 or goes_back):
                rounder.tally.add(*own)

    def show(self, seen: Mapping[int, Tensor]) -> list[Callable[[Tensor], None] | None]:
        """Show what layers took to the policy; return what takes the gradients."""
        assert self._segment is not None
        found = []
        for layer, own in zip(self._segment.products, self.rounders, strict=True):
            x, see = _taken(seen[layer.source], layer), own.observer and own.observer.see
            found.append(see and see(x, layer.inputs))
        return found

    def track(self, parameters: Sequence[Parameters]) -> None:
        """Let the kernels move the running statistics of batch norm, as it would do itself."""
        batches, running = [], []
        found = zip(self.norms, parameters, *(own.now() for own in self._running), strict=True)
        for norm, own, mean, variance, count in found:
            if norm is None or not norm.track_running_stats:
                continue
            if count is not None:
                batches.append(count)
            if mean is None or variance is None:
                continue
            running += [mean, variance]
            own.running, own.momentum = (mean, variance), norm.momentum or 0.0
            if norm.momentum is None and count is not None:  # which moves once for each use
                own.momentum = 1 / (int(count) + sum(other is count for other in batches))
        if batches:
            foreach_add_(batches, 1)
        increment_version(running)


def _taken(x: Tensor, layer: Layer) -> Tensor:
    """Return an image map as the layer alone would take it."""
    return x.flatten(1) if layer.is_flat else x


def _window(product: Product) -> Window:
    if product.window is None:
        return Window()
    stride, padding, dilation = ((pair[0], pair[1]) for pair in product.window)
    return Window(stride, padding, dilation, product.groups)


class _Chain(torch.autograd.Function):
    """A chain, forward and backward; keeps codes, what batch norm needs, and masks of bits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        run: ChainRun,
        noise: list[tuple[int, int, int]],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        from fixedpoint_kernels.fused import execute

        count = len(parameters) // 3
        program = run.program(x, ctx.needs_input_grad[0], ctx.needs_input_grad[3 : 3 + count])
        own = _own(parameters, noise, run.shifts)
        run.track(own)
        clamped: list[int] = []
        ctx.observers = []
        show = (lambda seen: ctx.observers.extend(run.show(seen))) if program.observes else None
        outputs, kept = execute.forward(program, x, own, clamped, show)
        run.note(program, x, clamped)
        ctx.save_for_backward(kept, *parameters)
        ctx.program, ctx.noise, ctx.shifts = program, noise, run.shifts
        return tuple(lies_as(y, x) for y in outputs)

    @staticmethod
    @left_uncompiled
    @once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        from fixedpoint_kernels.fused import execute

        kept, *parameters = ctx.saved_tensors
        own = _own(parameters, ctx.noise, ctx.shifts)

        def show(seen: Sequence[Tensor]) -> None:
            layers = ctx.program.segment.products
            for layer, observe, grad in zip(layers, ctx.observers, seen, strict=True):
                if observe is not None:
                    observe(_taken(grad, layer))

        dx, found = execute.backward(ctx.program, kept, own, grads, show if ctx.observers else None)
        ways = [dx, None, None, *(own.weight for own in found)]
        ways += [*(own.scale for own in found), *(own.shift for own in found)]
        needed = zip(ways, ctx.needs_input_grad, strict=True)
        return tuple(way if is_needed else None for way, is_needed in needed)


def _own(
    parameters: Sequence[Tensor | None],
    noise: list[tuple[int, int, int]],
    shifts: list[tuple[int, ...]],
) -> list[Parameters]:
    count, found = len(noise), []
    thirds = (parameters[k * count : (k + 1) * count] for k in range(3))
    every = zip(*thirds, noise, shifts, strict=True)
    for weight, scale, shift, (seed, stream, second), own in every:
        weight = torch.empty(0, device="cpu") if weight is None else weight
        found.append(Parameters(weight, scale, shift, (seed, stream), own, second))
    return found
