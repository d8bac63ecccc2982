"""Running chains of layers as one, forward and backward, where the model is in training."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import increment_version

from fixedpoint_kernels import products
from fixedpoint_kernels._torch_private import (
    foreach_add_,
    global_forward_hooks,
    has_backward_hooks,
    own_forward_hooks,
)
from fixedpoint_kernels.fused import Layer, Parameters, Segment
from fixedpoint_kernels.products.shapes import Window
from fixedpoint_kernels.threads import is_parallel, thread_count
from marvin.hooks import OtherForward, restore_forwards, rounders_of
from marvin.integer.autograd import lies_as, once
from marvin.integer.formats import Options, Product, choose, has_nan
from marvin.integer.graph import Chain, Traced, trace
from marvin.integer.layers import OPTIONS, IntegerConv2d, IntegerLinear
from marvin.integer.seen import Seen, plain_attributes
from marvin.integer.token_run import TokenRun, alone, put_in
from marvin.model_formats import ModuleFormats
from marvin.rounder import Rounder

__all__ = ["fuse", "fused_layers", "restore_forwards"]

_PROGRAMS = 4  # that a chain keeps: formats and batches change


class Fused(OtherForward):
    """Runs a module's chains of layers fused where that can be, and the module's own code elsewhere.

    It can be in training, with gradients, for float32 images on the CPU, where layers round to
    nearest and have formats that fit, no policy observes, and nobody else has hooks on what would
    not be called.

    Args:
        module: Whose ``forward`` this replaces.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._known: tuple[Traced | str, Seen | None] | None = None  # threads may come at once
        self._runs: dict[frozenset[str], fx.GraphModule] = {}  # by what is left out of chains

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do as ``forward`` of the module's class."""
        runs = None if kwargs or len(args) != 1 else self._ready(args[0])
        if runs is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return runs(args[0])

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own ``forward``."""
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def why_not(self) -> str:
        """Say why the module's chains are not fused; "" where they are."""
        traced = self._trace()[0]
        return traced if isinstance(traced, str) else ""

    def layers(self) -> list[str]:
        """Return the names of the layers in chains, within the module."""
        traced = self._trace()[0]
        return [] if isinstance(traced, str) else traced.layers

    def _ready(self, x: Any) -> fx.GraphModule | None:
        if (
            type(x) not in (Tensor, nn.Parameter)
            or x.device.type != "cpu"
            or not len(x)
            or not self.module.training
            or not torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
            or not products.path().is_own
        ):
            return None
        traced, seen = self._trace()
        if seen is not None and not seen.holds():
            self._known, self._runs = None, {}
            traced, seen = self._trace()
        if isinstance(traced, str) or any(global_forward_hooks()):
            return None
        if traced.chains and (x.dim() != 4 or x.dtype is not torch.float32):
            return None
        assert seen is not None
        if any(map(_has_hooks, seen.inner)):
            return None
        runs = self._without(frozenset())
        if runs is None or all(run.ready() for run in _chains_of(runs)):
            return runs
        unfit = [name for run in _chains_of(runs) if isinstance(run, _Run) for name in run.unfit()]
        runs = self._without(frozenset(unfit)) if unfit else None
        return runs if runs and all(run.ready() for run in _chains_of(runs)) else None

    def _without(self, left: frozenset[str]) -> fx.GraphModule | None:
        """Return the module with its chains, without some layers; None where no chains are left."""
        if left not in self._runs:
            traced = trace(self.module, left) if left else self._trace()[0]
            if isinstance(traced, str):
                return None
            while len(self._runs) >= _PROGRAMS:
                del self._runs[next(iter(self._runs))]
            self._runs[left] = _built(self.module, traced)
        return self._runs[left]

    def _trace(self) -> tuple[Traced | str, Seen | None]:
        known = self._known
        if known is None:
            before = [plain_attributes(m) for m in self.module.modules()]
            traced = trace(self.module)
            if [plain_attributes(m) for m in self.module.modules()] != before:
                traced = "its forward changes attributes of modules"
            seen = None if isinstance(traced, str) else Seen(self.module, traced)
            self._known = known = traced, seen
        return known


def fuse(model: nn.Module) -> None:
    """Let the chains of a model run fused; those of its children where it cannot be traced."""
    restore_forwards(model)
    for module in _roots(model):
        module.forward = Fused(module)


def fused_layers(model: nn.Module) -> set[str]:
    """Return the names of the layers of a model that run fused in training."""
    found = set()
    for name, module in model.named_modules():
        own = vars(module).get("forward")
        if isinstance(own, Fused):
            found |= {f"{name}.{layer}".lstrip(".") for layer in own.layers()}
    return found


def _roots(module: nn.Module) -> Iterator[nn.Module]:
    layers = IntegerConv2d, IntegerLinear
    if isinstance(module, layers) or not any(isinstance(m, layers) for m in module.modules()):
        return
    if not isinstance(trace(module), str):
        yield module
        return
    for child in module.children():
        yield from _roots(child)


def _has_hooks(module: nn.Module, own: int | None = None) -> bool:
    """Say whether a module has hooks of others; ``own``: how many rounders it has, where that is known."""
    before, after = own_forward_hooks(module)
    if before or after:
        own = len(rounders_of(module)) if own is None else own
        if len(before) > own or len(after) > own:
            return True
    return has_backward_hooks(module)


def _is_in_the_way(module: nn.Module) -> bool:
    """Say whether a module that is no convolution rounds, or has hooks that would not be called."""
    before, after = own_forward_hooks(module)
    if before or after:
        rounders = rounders_of(module)
        if any(own.formats(module).rounds for own in rounders) or _has_hooks(module, len(rounders)):
            return True
    return has_backward_hooks(module) or not module.training


def _built(module: nn.Module, traced: Traced) -> fx.GraphModule:
    """Return the traced module with its chains in place of their layers."""
    named = [(f"tokens_{i}", chain) for i, chain in enumerate(traced.tokens)]
    graph, copies = put_in(traced.graph, named)
    runs = fx.GraphModule(module, traced.graph)
    for name, chain in named:
        runs.add_module(name, TokenRun(module, chain, _has_hooks))
    runs.graph = graph
    for i, chain in enumerate(traced.chains):
        name = f"chain_{i}"
        runs.add_module(name, _Run(module, chain))
        inside = [copies[node] for node in chain.replaced]
        source = copies[chain.input]
        with graph.inserting_after(source):
            call = graph.call_module(name, (source,))
        _pass_on(chain, call, copies, inside)
        for node in reversed(inside):
            if not node.users:
                graph.erase_node(node)
    graph.lint()
    runs.recompile()
    return runs


def _pass_on(
    chain: Chain, call: fx.Node, copies: dict[fx.Node, fx.Node], inside: list[fx.Node]
) -> None:
    """Give others what leaves a chain, in place of what its nodes made."""
    graph, numbers = call.graph, [i for i, v in enumerate(chain.values) if v.is_output]
    for node, (number, flattens) in reversed(chain.used.items()):
        with graph.inserting_after(call):
            item = graph.call_function(_item, (call, numbers.index(number)))
        if flattens:
            with graph.inserting_after(item):
                item = graph.call_function(torch.flatten, (item, 1))
        for user in list(copies[node].users):
            if user not in inside:
                user.replace_input_with(copies[node], item)


def _item(values: tuple[Tensor, ...], k: int) -> Tensor:
    return values[k]


def _chains_of(runs: fx.GraphModule) -> Iterator["_Run | TokenRun"]:
    for module in runs.children():
        if isinstance(module, _Run | TokenRun):
            yield module


def _layer(module: nn.Module, name: str) -> nn.Conv2d | nn.Linear:
    found = module.get_submodule(name)
    assert isinstance(found, nn.Conv2d | nn.Linear)
    return found


def _norm(module: nn.Module, name: str | None) -> nn.BatchNorm2d | None:
    found = None if name is None else module.get_submodule(name)
    assert found is None or isinstance(found, nn.BatchNorm2d)
    return found


class _Run(nn.Module):
    """One chain of a module, as a module of the traced graph."""

    def __init__(self, module: nn.Module, chain: Chain) -> None:
        super().__init__()
        self.chain = chain
        # in tuples, so that they are not this module's own; linear layers are convolutions, too
        self.convolutions = tuple(_layer(module, own.name) for own in chain.layers)
        self.norms = tuple(_norm(module, own.norm) for own in chain.layers)
        self.others = tuple(
            own
            for own in map(module.get_submodule, chain.modules)
            if not isinstance(own, IntegerConv2d | IntegerLinear)
        )
        self._plain = (fx.GraphModule(module, alone(chain)),)
        self.rounders: tuple[Rounder, ...] = ()
        self._formats: list[Any] = []
        self._segment: Segment | None = None
        self._held: tuple[Any, ...] = ()
        self._programs: dict[Any, Any] = {}

    def ready(self) -> bool:
        """Say whether the chain can run fused now."""
        found = [rounders_of(conv) for conv in self.convolutions]
        if any(len(own) != 1 for own in found):
            return False
        self.rounders = tuple(own[0] for own in found)
        for conv, rounder in zip(self.convolutions, self.rounders, strict=True):
            if not conv.training or _has_hooks(conv, 1):
                return False
            if rounder.state.rounding != "nearest" or conv.weight.dtype is not torch.float32:
                return False
        if any(map(_is_in_the_way, self.others)):
            return False
        for norm in self.norms:
            if norm is not None and not _is_float32(norm):
                return False
        formats = [
            r.formats(conv) for r, conv in zip(self.rounders, self.convolutions, strict=True)
        ]
        if len(formats) != len(self._formats) or any(
            a is not b for a, b in zip(formats, self._formats, strict=True)
        ):
            self._formats, self._segment = formats, self._described(formats)
        return self._segment is not None

    def unfit(self) -> list[str]:
        """Return the names of linear layers without which the chain could run fused now."""
        pairs = zip(self.chain.layers, self.convolutions, strict=True)
        unfit = [(own.name, layer) for own, layer in pairs if not _is_fit(layer)]
        return (
            [name for name, _ in unfit] if all(isinstance(n, nn.Linear) for _, n in unfit) else []
        )

    def _described(self, formats: list[Any]) -> Segment | None:
        layers = []
        for own, conv, norm, found in zip(
            self.chain.layers, self.convolutions, self.norms, formats, strict=True
        ):
            product = choose(conv, found)
            if isinstance(product, str) or not _fits(product, getattr(conv, OPTIONS), found):
                return None
            eps, clip = (None if norm is None else norm.eps), found.ste == "clip"
            is_flat, sizes = isinstance(conv, nn.Linear), (*conv.weight.shape, 1, 1)
            layers.append(
                Layer(
                    own.source, product.inputs, product.weight_fmt,
                    (sizes[0], sizes[1], sizes[2], sizes[3]), _window(product), eps, clip, is_flat,
                )
            )  # fmt: skip
        return Segment(tuple(layers), tuple(self.chain.values))

    def _takes(self, x: Tensor) -> bool:
        """Say whether an input has a shape for which the chain is what its layers are, and no NaN."""
        if x.dim() != 4 or has_nan(x):
            return False
        key = self._segment, tuple(x.shape[1:])
        if self._held[:1] != (key,):
            assert self._segment is not None
            self._held = key, self._segment.holds((x.shape[1], x.shape[2], x.shape[3]))
        return self._held[1]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what leaves the chain."""
        if not self._takes(x):
            return self._plain[0](x)
        parameters: list[Tensor | None] = []
        for conv, norm in zip(self.convolutions, self.norms, strict=True):
            pair = (None, conv.bias) if norm is None else (norm.weight, norm.bias)
            parameters += [conv.weight, *pair]
        for rounder in self.rounders:
            rounder.state.waiting.discard(rounder.name)
            rounder.count(len(x))
        noise = [rounder.state.noise_of_gradients()[:2] for rounder in self.rounders]
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
        program = self._programs.pop(key, None)
        if program is None:
            assert self._segment is not None
            size = x.shape[2], x.shape[3]
            program = Program(
                self._segment, len(x), size, path, threads, needs_input, needs_weights, observes
            )
            while len(self._programs) >= _PROGRAMS:
                del self._programs[next(iter(self._programs))]
        self._programs[key] = program
        return program

    def note(self, program: Any, x: Tensor) -> None:
        """Count what was clamped."""
        clamped = program.clamped.sum(1).tolist()
        for i, (layer, rounder) in enumerate(
            zip(program.segment.layers, self.rounders, strict=True)
        ):
            if layer.clip and (layer.source >= 0 or x.requires_grad):
                shape = program.shapes[layer.source]
                rounder.tally.add(clamped[i], shape.elements * len(x))

    def show(self, seen: Mapping[int, Tensor]) -> list[Callable[[Tensor], None] | None]:
        """Show what layers took to the policy; return what takes the gradients."""
        assert self._segment is not None
        found = []
        for layer, own in zip(self._segment.layers, self.rounders, strict=True):
            x, see = _taken(seen[layer.source], layer), own.observer and own.observer.see
            found.append(see and see(x, layer.inputs))
        return found

    def track(self, parameters: Sequence[Parameters]) -> None:
        """Let the kernels move the running statistics of batch norm, as it would do itself."""
        batches, running = [], []
        for norm, own in zip(self.norms, parameters, strict=True):
            if norm is None or not norm.track_running_stats:
                continue
            count, mean, variance = norm.num_batches_tracked, norm.running_mean, norm.running_var
            if count is not None:
                batches.append(count)
            if mean is None or variance is None:
                continue
            running += [mean, variance]
            own.running, own.momentum = (mean, variance), norm.momentum or 0.0
            if norm.momentum is None and count is not None:
                own.momentum = 1 / (int(count) + 1)
        if batches:
            foreach_add_(batches, 1)
        increment_version(running)


def _taken(x: Tensor, layer: Layer) -> Tensor:
    """Return an image map as the layer alone would take it."""
    return x.flatten(1) if layer.is_flat else x


def _is_float32(norm: nn.BatchNorm2d) -> bool:
    own = norm.weight, norm.bias, norm.running_mean, norm.running_var
    return all(t is None or (t.dtype is torch.float32 and t.is_contiguous()) for t in own)


def _is_fit(layer: nn.Module) -> bool:
    """Say whether a layer has what chains need."""
    rounders = rounders_of(layer)
    if len(rounders) != 1 or _has_hooks(layer) or not layer.training:
        return False
    formats = rounders[0].formats(layer)
    product = choose(layer, formats)
    return not isinstance(product, str) and _fits(product, getattr(layer, OPTIONS), formats)


def _fits(product: Product, options: Options, formats: ModuleFormats) -> bool:
    others = formats.outputs, formats.samples, formats.gradients
    is_plain = all(fmt is None for fmt in others)
    return is_plain and not product.shifts and options == Options()


def _window(product: Product) -> Window:
    if product.window is None:
        return Window()
    stride, padding, dilation = ((pair[0], pair[1]) for pair in product.window)
    return Window(stride, padding, dilation, product.groups)


class _Chain(torch.autograd.Function):
    """A chain, forward and backward; keeps codes, what batch norm needs, and masks of bits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: _Run, noise: list[tuple[int, int]], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        from fixedpoint_kernels.fused import execute

        needed = ctx.needs_input_grad[3:]
        program = run.program(x, ctx.needs_input_grad[0], tuple(needed[::3]))
        own = _own(parameters, noise)
        run.track(own)
        seen: dict[int, Tensor] = {}
        outputs, kept = execute.forward(program, x, own, seen)
        run.note(program, x)
        ctx.observers = run.show(seen) if program.observes else []
        ctx.save_for_backward(kept, *parameters)
        ctx.program, ctx.noise = program, noise
        return tuple(lies_as(y, x) for y in outputs)

    @staticmethod
    @once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        from fixedpoint_kernels.fused import execute

        kept, *parameters = ctx.saved_tensors
        seen: list[Tensor] = []
        own = _own(parameters, ctx.noise)
        dx, found = execute.backward(ctx.program, kept, own, grads, seen)
        layers = ctx.program.segment.layers if ctx.observers else ()
        for layer, observe, grad in zip(layers, ctx.observers, seen, strict=True):
            if observe is not None:
                observe(_taken(grad, layer))
        back: list[Tensor | None] = [dx if ctx.needs_input_grad[0] else None, None, None]
        for i, own in enumerate(found):
            ways = own.weight, own.scale, own.shift
            for k, way in enumerate(ways):
                back.append(way if ctx.needs_input_grad[3 + 3 * i + k] else None)
        return tuple(back)


def _own(parameters: Sequence[Tensor | None], noise: list[tuple[int, int]]) -> list[Parameters]:
    found = []
    triples = zip(parameters[::3], parameters[1::3], parameters[2::3], noise, strict=True)
    for weight, scale, shift, own in triples:
        assert weight is not None
        found.append(Parameters(weight, scale, shift, own))
    return found
