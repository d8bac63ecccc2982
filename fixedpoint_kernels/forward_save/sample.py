"""Run a model on a sample, and see who calls what, who keeps which tensor, and what a step takes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fixedpoint_kernels._torch_private.modules import HOOKS
from fixedpoint_kernels._torch_private.tensors import (
    storage_key,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)
from fixedpoint_kernels.undo import all_or_nothing
from fixedpoint_kernels.watch import Caller, Running, Storage, Watch, is_torchs

__all__ = [
    "ForwardPass",
    "Given",
    "Inputs",
    "Loss",
    "draws_random_numbers",
    "given",
    "gradients",
    "kept_bytes",
    "leaves_of",
    "mapped",
    "observe",
    "own_random_numbers",
    "tensors_in",
    "visit",
]

Inputs = Tensor | Sequence[object] | Mapping[str, object]
Loss = Callable[[object], Tensor]


class Given(NamedTuple):
    """Arguments of a model, by position and by keyword."""

    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = {}


class ForwardPass(NamedTuple):
    """What one forward pass did.

    Args:
        calls: Each call from Python, without repetition.
        saved: Each storage kept for backward; parameters, buffers and empty ones are left out.
        taken: What each of some modules was called with: places in ``saved``, or bytes of storages
            that nobody keeps, by their number.
        written: Those of these modules whose inputs were written to after they were called.
    """

    calls: tuple[Caller, ...]
    saved: tuple[Storage, ...]
    taken: Mapping[str, Mapping[int, int]] = {}
    written: frozenset[str] = frozenset()

    @property
    def size_bytes(self) -> int:
        """Bytes kept."""
        return sum(storage.size_bytes for storage in self.saved)

    def is_idle(self, layer: str, rest: set[tuple[str, str]]) -> bool:
        """Whether all that a layer keeps is also kept by ``rest``: layers and their functions."""
        mine = [storage.savers for storage in self.saved if layer in storage.layers]
        return bool(mine) and all(
            any((who.layer, who.function) in rest for who in savers) for savers in mine
        )


def given(
    sample_input: Inputs | None,
    sample_args: Sequence[object] = (),
    sample_kwargs: Mapping[str, object] | None = None,
) -> Given:
    """Return a sample as arguments by position and by keyword.

    Raises:
        TypeError: There is no sample, one of either form, or one of another type.
    """
    by_name = dict(sample_kwargs or {})
    if (sample_input is None) == (not sample_args and not by_name):
        came = "neither" if sample_input is None else "both"
        raise TypeError(f"a sample is sample_input, or sample_args and sample_kwargs, got {came}")
    if sample_input is None:
        return Given(tuple(sample_args), by_name)
    if isinstance(sample_input, Given):
        return sample_input
    if isinstance(sample_input, Mapping):
        return Given((), dict(sample_input))
    if isinstance(sample_input, Tensor):
        return Given((sample_input,))
    if isinstance(sample_input, str) or not isinstance(sample_input, Sequence):
        raise TypeError(
            "a sample must be a tensor, a tuple of arguments or a mapping of keywords, got "
            f"{type(sample_input).__name__}: write torch.from_numpy(x) for an array of NumPy"
        )
    return Given(tuple(sample_input))


def observe(model: nn.Module, inputs: Inputs, taken: Iterable[str] = ()) -> ForwardPass:
    """Run a forward pass in the mode the model is in; the user's hooks are not called.

    Args:
        model: Any module.
        inputs: What to call it with.
        taken: Modules of which to note what they are called with.
    """
    buffers = _copies(model)
    with without_hooks(model):
        held = {name: _hold(model.get_submodule(name)) for name in taken}
        watch = Watch(Running(model), [*model.parameters(), *buffers.values()])
        with torch.enable_grad(), watch:
            output = _forward(model, buffers, inputs)
    keys = watch.keys()
    sizes = {
        name: {
            storage_key(tensor): tensor.untyped_storage().nbytes()
            for tensor, _ in tensors
            if not watch.is_own(tensor)
        }
        for name, tensors in held.items()
    }
    written = frozenset(
        name
        for name, tensors in held.items()
        if any(version_of(tensor) != version for tensor, version in tensors)
    )
    del output  # it alone keeps the graph
    return ForwardPass(tuple(watch.calls), *_numbered(watch.saved(), keys, sizes), written)


def kept_bytes(model: nn.Module, inputs: Inputs) -> int:
    """Return what ``observe`` counts: bytes kept for backward; the model may be compiled."""
    buffers, kept = _copies(model), {}
    own = {storage_key(tensor) for tensor in (*model.parameters(), *buffers.values())}

    def keep(tensor: Tensor) -> Tensor:
        kept[storage_key(tensor)] = tensor  # no address is given twice while it lives
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with without_hooks(model), torch.enable_grad(), hooks:
        _forward(model, buffers, inputs)
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)


def draws_random_numbers(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a forward pass draws random numbers of torch's, as dropout does."""
    args, kwargs = given(inputs)
    devices = {t.device for t in model.parameters() if t.is_cuda}

    def numbers() -> Tensor:
        return torch.cat([torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)])

    with without_hooks(model), torch.no_grad(), own_random_numbers(model):
        before = numbers()
        torch.func.functional_call(model, _copies(model), args, dict(kwargs))
        return not torch.equal(numbers(), before)


def _hold(module: nn.Module) -> list[tuple[Tensor, int]]:
    """Return a list that gets all tensors a module is called with, and their versions."""
    held: list[tuple[Tensor, int]] = []

    def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        held.extend((tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs)))

    module.register_forward_pre_hook(hook, with_kwargs=True)
    return held


def _numbered(
    saved: tuple[Storage, ...], keys: tuple[int, ...], taken: dict[str, dict[int, int]]
) -> tuple[tuple[Storage, ...], dict[str, dict[int, int]]]:
    """Return the storages that are not empty, and others' by their places among these."""
    pairs = [(key, s) for key, s in zip(keys, saved, strict=True) if s.size_bytes]
    places = {key: place for place, (key, _) in enumerate(pairs)}
    for sizes in taken.values():
        for key in sizes:
            places.setdefault(key, len(places))
    numbered = {
        name: {places[key]: size for key, size in sizes.items()} for name, sizes in taken.items()
    }
    return tuple(storage for _, storage in pairs), numbered


See = Callable[[str, nn.Module, Given], None]


def visit(model: nn.Module, inputs: Inputs, see: See) -> None:
    """Run a forward pass without gradients, and call ``see`` with each module and its arguments.

    Modules that ``see`` itself runs are not seen.
    """
    is_busy = False

    def hook(
        name: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        nonlocal is_busy
        if is_busy:
            return
        is_busy = True
        try:
            see(name, module, Given(args, kwargs))
        finally:
            is_busy = False

    with without_hooks(model), torch.no_grad():
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(hook, name), with_kwargs=True)
        _forward(model, _copies(model), inputs)


def gradients(model: nn.Module, inputs: Inputs, loss: Loss | None = None) -> list[Tensor | None]:
    """Return the gradients of all parameters that need one, by a forward and a backward pass.

    Nothing of the model changes, nor do the random numbers; the user's hooks are not called.

    Raises:
        ValueError: The output has nothing to differentiate.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [(b, b.detach().clone()) for b in model.buffers()]
    with without_hooks(model), torch.enable_grad(), own_random_numbers(model):
        output = _forward(model, _copies(model), inputs)
        value = scalar_of(output) if loss is None else loss(output)
        del output
        found = torch.autograd.grad(value, parameters, allow_unused=True)
    with torch.no_grad():
        for buffer, kept in before:  # what runs again in backward has the model's own
            if not torch.equal(buffer, kept):
                buffer.copy_(kept)
    return list(found)


def scalar_of(output: object) -> Tensor:
    """Return what stands for the loss of an output: its ``loss``, or a random sum of all numbers.

    Raises:
        ValueError: The output has nothing to differentiate.
    """
    own = getattr(output, "loss", None)
    found = [own] if isinstance(own, Tensor) else tensors_in(output)
    found = [t for t in found if t.is_floating_point() and t.requires_grad]
    if not found:
        raise ValueError(
            "the model must give a floating tensor that needs a gradient, "
            f"got {type(output).__name__}; loss= takes the loss of an output"
        )
    if len(found) == 1 and found[0].numel() == 1:
        return found[0].sum()
    noise = torch.Generator(found[0].device).manual_seed(0)
    sums = [
        (t * torch.randn(t.shape, generator=noise, dtype=t.dtype, device=t.device)).sum()
        for t in found
    ]
    return torch.stack([one.float() for one in sums]).sum()


def leaves_of(nested: object) -> list[object]:
    """Return what is in nested containers."""
    return tree_leaves(nested)


def tensors_in(nested: object) -> list[Tensor]:
    """Return the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def mapped(change: Callable[[object], object], given: Given) -> Given:
    """Return arguments in which ``change`` was done to each part of nested containers."""
    leaves, shape = tree_flatten((tuple(given.args), dict(given.kwargs)))
    return Given(*tree_unflatten([change(leaf) for leaf in leaves], shape))


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def _forward(model: nn.Module, buffers: dict[str, Tensor], inputs: Inputs) -> object:
    """Call ``model`` on ``buffers``, leaving the random numbers as they were."""
    args, kwargs = given(inputs)
    with own_random_numbers(model):
        return torch.func.functional_call(model, buffers, args, dict(kwargs))


@contextmanager
def own_random_numbers(model: nn.Module) -> Iterator[None]:
    """Put the random numbers of the model's devices back."""
    devices = {t.device for t in model.parameters() if t.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        yield


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Take off all hooks but torch's own (such as weight normalisation), and put them back."""
    before = [(vars(m), name, vars(m)[name]) for m in model.modules() for name in HOOKS]
    with all_or_nothing(model.modules()):
        for own, name, hooks in before:
            torchs = {key: hook for key, hook in hooks.items() if is_torchs(hook)}
            own[name] = type(hooks)(torchs)
        yield
        for own, name, hooks in before:
            own[name] = hooks
