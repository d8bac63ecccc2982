"""What torch does not offer publicly: the only file of these packages that uses its private names.

Each entry says which public way is missing. The tests name what is gone after an update of torch.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import wraps
from operator import itemgetter
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd as AdaptiveAvgPoolBase
from torch.nn.modules.pooling import _AvgPoolNd as AvgPoolBase
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import TensorWeakRef as WeakTensor

__all__ = [
    "ASSERT",
    "COMPILED_CALL",
    "FORWARDS",
    "HOOKS",
    "READ_ONE",
    "AdaptiveAvgPoolBase",
    "AskedByScaler",
    "AvgPoolBase",
    "BatchNormBase",
    "ConvolutionHook",
    "NormBase",
    "OpOverload",
    "SavingHooks",
    "TorchDispatchMode",
    "WeakStorage",
    "WeakTensor",
    "adaptive_avg_pool_backward",
    "attention_of_functions",
    "base_of",
    "batch_norm",
    "buffers_of",
    "calling_scaler",
    "compiled_as_constant",
    "compiled_graph",
    "derivatives_of",
    "exchange_hooks",
    "fake_tensor_mode",
    "fill_copy",
    "foreach_abs",
    "foreach_add",
    "foreach_add_",
    "foreach_clamp_min_",
    "foreach_div",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sub",
    "function_of_call",
    "global_backward_hooks",
    "global_forward_hooks",
    "has_backward_hooks",
    "has_step_hooks",
    "hook_wrapper",
    "hooks_of",
    "in_place_of",
    "int_mm",
    "is_called_plainly",
    "is_checkpointed",
    "is_fake",
    "is_joining",
    "is_recomputed",
    "is_watched",
    "keep_when_copied",
    "left_uncompiled",
    "mode_and_hooks",
    "own_buffers",
    "own_forward_hooks",
    "own_hooks",
    "padding_around",
    "put_before",
    "remove_hooks",
    "saving_hooks",
    "settings_of",
    "step_hooks_of",
    "storage_key",
    "tensor_of",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "uncompiled",
    "unseen_in_checkpoints",
    "version_of",
    "versions_of",
    "without_global_step_hooks",
    "written_by",
]

_Hook = TypeVar("_Hook")
_Run = TypeVar("_Run", bound=Callable[..., object])

# Above, torch has no public name for: the common classes of batch and instance normalisation and
# of average pooling, the type of an operator, a mode that sees operators, nested containers, and a
# reference that ends with a tensor: weakref's own ends with the Python object, which autograd lets go.
# One that ends with a storage has a public name, and no page; no storage gets its number meanwhile.

# Tensors. The public operators take one tensor: one call, and on a GPU one launch, for each.
foreach_abs = torch._foreach_abs
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_div = torch._foreach_div
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub

int_mm = torch._int_mm  # torch.mm takes no int8 on the CPU


def version_of(x: Tensor) -> int:
    """Return how often a tensor has been written to.

    ``torch.autograd.graph`` can only count one up. Tensors of inference mode count nothing: 0.
    """
    return 0 if x.is_inference() else x._version


def versions_of(xs: Sequence[Tensor]) -> list[int]:
    """Return ``version_of`` many tensors."""
    try:
        return [x._version for x in xs]
    except RuntimeError:  # one is of inference mode
        return list(map(version_of, xs))


def base_of(x: Tensor) -> Tensor:
    """Return the tensor of which ``x`` is a view, or ``x``; torch tells only whether it is one."""
    return x if x._base is None else x._base


def storage_key(x: Tensor) -> int:
    """Return a number that tensors with one memory share, also without an address (meta, fake)."""
    return x.untyped_storage()._cdata


def written_by(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Tensor]:
    """Return the tensors to which a call of an operator writes.

    An operator tells that only by its schema.
    """
    given: list[object] = []
    for i, own in enumerate(func._schema.arguments):
        if own.alias_info is not None and own.alias_info.is_write:
            given.append(args[i] if i < len(args) else kwargs.get(own.name))
    return [x for x in tree_leaves(given) if isinstance(x, Tensor)]


def is_watched() -> bool:
    """Say whether a mode, ``torch.func`` or forward-mode differentiation sees what operators do."""
    # torch.overrides tells of neither
    return bool(torch._C._len_torch_dispatch_stack() or is_transformed())


def is_transformed() -> bool:
    """Say whether ``torch.func`` or forward-mode differentiation sees what operators do."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def derivatives_of(x: Tensor) -> int:
    """Return how many transformations of ``torch.func`` will differentiate by ``x``.

    Tensors do not tell otherwise which transformations they are inside of.
    """
    found, inside = 0, torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while inside.is_functorch_wrapped_tensor(x):
        found += inside.is_gradtrackingtensor(x)
        x = inside.get_unwrapped(x)
    return found


READ_ONE = torch.ops.aten._local_scalar_dense.default
"""The operator that makes a Python number of a tensor."""

SavingHooks = tuple[Callable[..., object], Callable[..., Tensor]]


def saving_hooks() -> SavingHooks | None:
    """Return the innermost hooks for saved tensors, which torch does not tell; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore


def _saving_hooks_of_others() -> SavingHooks | None:
    """Return the innermost hooks but those that pass tensors on to ``outer``, an attribute."""
    hooks = saving_hooks()
    while hooks is not None and hasattr(hooks[0], "outer"):
        hooks = hooks[0].outer  # pyright: ignore[reportFunctionMemberAccess]
    return hooks


def is_checkpointed() -> bool:
    """Say whether a checkpoint that is not reentrant drops what is saved just now, or makes it again.

    ``torch.utils.checkpoint`` does not tell; its hooks are on top of those for saved tensors.
    """
    hooks = _saving_hooks_of_others()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def is_recomputed() -> bool:
    """Say whether a checkpoint that is not reentrant runs a part of a model for the second time."""
    hooks = _saving_hooks_of_others()
    return hooks is not None and "_recomputation_hook" in hooks[0].__qualname__


def unseen_in_checkpoints() -> AbstractContextManager[object]:
    """Let a selective checkpoint not see what operators do in this block.

    It wants the same operators each time it runs a part of a model; what is counted may take others.
    """
    if torch._C._len_torch_dispatch_stack() and is_checkpointed():
        return _disable_current_modes()
    return nullcontext()


def fake_tensor_mode() -> Any:
    """Return a mode in which tensors have shapes and devices, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    return FakeTensorMode()


def is_fake(x: Tensor) -> bool:
    """Say whether a tensor has a shape and a device, and no values."""
    if type(x) is Tensor:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


# Operators that nn.functional calls, which give what backward needs, or take it.
def step_hooks_of(optimizer: torch.optim.Optimizer, kind: type[_Hook]) -> Iterator[_Hook]:
    """Yield the hooks of a class before a step: torch registers them publicly, and lists them not."""
    hooks: list[object] = [*optimizer._optimizer_step_pre_hooks.values()]
    return (hook for hook in hooks if isinstance(hook, kind))


def has_step_hooks(optimizer: torch.optim.Optimizer, but: type) -> bool:
    """Say whether an optimizer has hooks for a step, but for those of a class before it."""
    return bool(
        len([*step_hooks_of(optimizer, but)]) < len(optimizer._optimizer_step_pre_hooks)
        or optimizer._optimizer_step_post_hooks
    )


@contextmanager
def without_global_step_hooks() -> Iterator[None]:
    """Let no hook of all optimizers see the steps in this block: they saw, or will see, the one it belongs to.

    torch lets nobody step an optimizer without them. Steps that other threads do meanwhile miss them.
    """
    tables = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    hooks = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, own in zip(tables, hooks, strict=True):
            table.update(own)


class AskedByScaler:
    """A base of optimizers that hear of a step from ``GradScaler``, also where it leaves the step out.

    It tells nobody what it leaves out; but before it decides, it reads this attribute.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        if calling_scaler() is not None:
            self._before_scaled_step()
        return False  # the scaler divides gradients itself

    def _before_scaled_step(self) -> None:
        """Prepare for a ``step`` that may be left out."""


def calling_scaler() -> torch.amp.GradScaler | None:
    """Return the gradient scaler in whose method this is called; None if there is none.

    It hands in nothing that tells of it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, torch.amp.GradScaler):
            return own
        frame = frame.f_back
    return None


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise as in training; returns the output, and means and inverse deviations."""
    statistics = () if running is None else running
    return torch.ops.aten._native_batch_norm_legit(
        x, weight, bias, *statistics, True, momentum, eps
    )


def adaptive_avg_pool_backward(grad: Tensor, x: Tensor, spatial: int) -> Tensor:
    """Return the gradient to ``x`` of adaptive average pooling over 2 or 3 dimensions."""
    aten = torch.ops.aten
    if spatial == 2:
        return aten._adaptive_avg_pool2d_backward(grad, x)
    return aten._adaptive_avg_pool3d_backward(grad, x)


def _attention_of_functions() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return ``F.multi_head_attention_forward`` that shows a mode the functions it calls.

    Torch's shows itself alone: a mode is off while it runs. It asks ``has_torch_function``, its
    global, whether a mode is on; the same code here is always told no.
    """
    own = F.multi_head_attention_forward
    names = {**own.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(own.__code__, names, own.__name__, own.__defaults__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return copy


attention_of_functions = _attention_of_functions()


# Modules. A hook is known by the handle that registering it gave, and by nothing on a copy.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
mode_and_hooks = itemgetter(
    "training", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
"""Return, of ``vars(module)``, whether it trains, and its hooks around ``forward`` and on gradients."""
_OURS = "_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks"


def hooks_of(module: nn.Module, kind: type) -> list[Any]:
    """Return the hooks of a class that a module has."""
    found, places = [], vars(module)
    for place in _OURS:
        for hook in places[place].values():
            own = _unwrapped(hook)
            if isinstance(own, kind):
                found.append(own)
    return found


def keep_when_copied(module: fx.GraphModule, kind: type, buffer: str) -> None:
    """Let copies of a traced module have its hooks of a class around ``forward``, and a buffer, as those of other modules do.

    ``fx.GraphModule`` leaves them out of copies. Each of these modules has a class of its own.
    """
    cls = type(module)
    if "__deepcopy__" in vars(cls):
        return
    plain = cls.__deepcopy__

    def copied(self: fx.GraphModule, memo: dict[int, object]) -> fx.GraphModule:
        new = plain(self, memo)
        for key, hook in self._forward_pre_hooks.items():
            if isinstance(hook, kind):
                with_kwargs = key in self._forward_pre_hooks_with_kwargs
                new.register_forward_pre_hook(deepcopy(hook, memo), with_kwargs=with_kwargs)
        for hook in self._forward_hooks.values():
            if isinstance(hook, kind):
                new.register_forward_hook(deepcopy(hook, memo))
        if buffer in self._buffers and buffer not in new._buffers:
            new.register_buffer(buffer, deepcopy(self._buffers[buffer], memo))
        keep_when_copied(new, kind, buffer)
        return new

    cls.__deepcopy__ = copied


def remove_hooks(module: nn.Module, kind: type) -> None:
    """Take all hooks of a class from a module."""
    for place in _OURS:
        hooks: dict[int, Callable[..., Any]] = getattr(module, place)
        for key in [key for key, hook in hooks.items() if isinstance(_unwrapped(hook), kind)]:
            del hooks[key]
            if place == "_forward_pre_hooks":
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def exchange_hooks(module: nn.Module, old: type, new: type) -> None:
    """Put a module's hooks around ``forward`` of one class where those of another are, which go.

    Others keep their places: the order of hooks is part of what a module computes.
    """
    for hooks in own_forward_hooks(module):
        before = dict(hooks)
        moved = {key: hook for key, hook in before.items() if isinstance(hook, new)}
        hooks.clear()
        for key, hook in before.items():
            if key not in moved:
                hooks[key] = hook
            if isinstance(hook, old):
                hooks.update(moved)
        hooks.update(moved)  # where there was no other
    remove_hooks(module, old)


def put_before(module: nn.Module, number: int, kind: type) -> None:
    """Move a hook around ``forward``, by its number, in front of that of a class; where there is none, of all."""
    for hooks in own_forward_hooks(module):
        keys = [key for key in hooks if key != number] if number in hooks else []
        first = next((i for i, key in enumerate(keys) if isinstance(hooks[key], kind)), 0)
        for key in keys[first:]:  # go behind it
            hooks[key] = hooks.pop(key)


def _unwrapped(hook: object) -> object:
    """Return what was registered: torch wraps hooks that want the module."""
    return getattr(hook, "hook", hook)


def own_forward_hooks(
    module: nn.Module,
) -> tuple[dict[int, Callable[..., object]], dict[int, Callable[..., object]]]:
    """Return the hooks before and after a module's ``forward``."""
    return module._forward_pre_hooks, module._forward_hooks


_ALL_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def own_hooks(module: nn.Module) -> list[object]:
    """Return all hooks of a module: around ``forward``, on gradients, and around its state."""
    return [_unwrapped(hook) for name in _ALL_HOOKS for hook in getattr(module, name).values()]


def global_backward_hooks() -> tuple[
    dict[int, Callable[..., object]], dict[int, Callable[..., object]]
]:
    """Return the hooks on gradients of every module."""
    return torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name; what is put in their place later is seen in it."""
    return module._modules


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's buffers by name, those that are None, too; what is put in their place later is seen in it."""
    return module._buffers


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters of a module alone: a tenth of the time of ``named_parameters``."""
    return [(name, own) for name, own in module._parameters.items() if own is not None]


_MACHINERY = {*vars(nn.Module())} - {"_buffers", "_modules", "_parameters"}


def settings_of(module: nn.Module) -> dict[str, object]:
    """Return what is on a module, its tensors and its children too, but torch's hooks and flags."""
    return {name: value for name, value in vars(module).items() if name not in _MACHINERY}


@contextmanager
def in_place_of(module: nn.Module, others: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let a module and those inside read other tensors in the place of some of its parameters."""
    places = [
        (part._parameters, name, p)
        for part in module.modules()
        for name, p in part._parameters.items()
        if p is not None and p in others
    ]
    for own, name, p in places:
        own[name] = others[p]  # pyright: ignore[reportArgumentType]: a tensor, not a parameter
    try:
        yield
    finally:
        for own, name, p in places:
            own[name] = p


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer as ``getattr`` does, without the search; None where there is none."""
    for own in (module._parameters, module._buffers):
        if name in own:
            return own[name]
    return getattr(module, name, None)


def buffers_of(modules: Sequence[nn.Module], name: str) -> list[Tensor | None]:
    """Return a buffer of each module; None where there is none."""
    return [own._buffers.get(name) for own in modules]


def table_of(module: nn.Module, name: str) -> Mapping[str, object]:
    """Return the table in which a module has a parameter, a buffer or another attribute."""
    tables = module._parameters, module._buffers
    return next((own for own in tables if name in own), vars(module))


def has_backward_hooks(module: nn.Module) -> bool:
    """Say whether a module has hooks on gradients, or all modules have."""
    return bool(
        module._backward_hooks or module._backward_pre_hooks or any(global_backward_hooks())
    )


def global_forward_hooks() -> tuple[
    dict[int, Callable[..., object]], dict[int, Callable[..., object]]
]:
    """Return the hooks before and after every module's ``forward``."""
    return torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks


def is_called_plainly(module: nn.Module) -> bool:
    """Say whether calling a module is its class's ``forward``, between its own hooks alone."""
    is_own = "forward" not in vars(module) and module._compiled_call_impl is None
    return is_own and not any(global_forward_hooks())


def hook_wrapper() -> type:
    """Return the class that torch wraps a hook in that wants the module; a saved model names it."""
    return torch_module._WrappedHook


def fill_copy(
    copy: nn.Module,
    module: nn.Module,
    convert: Callable[[Tensor | None], Any],
    child: Callable[[nn.Module], nn.Module],
) -> None:
    """Give a copy of ``module`` parameters, buffers and modules of its own.

    ``named_parameters`` and its like leave out what is None or there twice.
    """
    copy._parameters = {name: convert(p) for name, p in module._parameters.items()}
    copy._buffers = {name: convert(b) for name, b in module._buffers.items()}
    copy._modules = {name: m and child(m) for name, m in module._modules.items()}


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module of which ``torch.compile`` made ``model``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


ASSERT = torch._assert
"""What models call that are to be traced: an ``assert`` would ask a proxy for its truth."""
FORWARDS = "forward", "_conv_forward"
"""Methods in which torch's layers compute."""


class ConvolutionHook(nn.Module):
    """Goes before a convolution in a class's bases: ``convolve`` replaces its product.

    ``forward`` calls that with the weight and bias of the moment (weight normalisation); whoever
    overrides ``forward`` alone, as is public, misses what subclasses of torch's layers do there.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = super()._conv_forward  # pyright: ignore[reportAttributeAccessIssue]
        return self.convolve(own, input, weight, bias)

    def convolve(
        self, own: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the convolution of ``x``; ``own`` is torch's."""
        return own(x, weight, bias)


def padding_around(module: Any) -> list[int]:
    """Return a convolution's padding as ``F.pad`` takes it: ``padding`` may be a word."""
    return module._reversed_padding_repeated_twice


def left_uncompiled(function: _Run) -> _Run:
    """Return a function that ``torch.compile`` leaves as it is, with all that it calls: kernels take addresses.

    As ``torch.compiler.disable``, without loading Dynamo and Triton before something else does.
    """
    apart: Callable[..., object] | None = None
    whole: Callable[..., object] = function

    @wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        nonlocal apart
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if apart is None:
            from torch._dynamo.decorators import skip_code  # slow to import

            apart = cast("Callable[..., object]", torch.compiler.disable(whole))
            code = cast("FunctionType", run).__code__
            skip_code(code)  # of all: Dynamo would compile it for each kind of arguments
        return apart(*args, **kwargs)

    return cast("_Run", run)


def compiled_as_constant(function: _Run) -> _Run:
    """Return a function that ``torch.compile`` calls once for the same arguments, and keeps what it gave.

    As ``torch.compiler.assume_constant_result``, without loading Dynamo and Triton. Where Dynamo gave up on the
    caller it would compile what the function calls: it is kept from that.
    """
    run = left_uncompiled(function)
    setattr(run, "_dynamo_marked_constant", True)  # noqa: B010  pyright knows functions
    return run


def is_joining(model: Any) -> bool:
    """Say whether a ``DistributedDataParallel`` is inside of ``join``, of which it does not tell."""
    return model._join_config.enable


COMPILED_CALL = "_compiled_call_impl"
"""Where a module has what ``nn.Module.compile`` made; torch has no way to undo that."""


def function_of_call(module: nn.Module) -> Callable[..., object]:
    """Return a function that calls a module as if it was not compiled in place.

    Its code is its own, which ``nn.Module.compile`` has no way to ask for: Dynamo keeps what it
    compiled with the code, and lets at most 8 versions share it. And it begins outside of torch,
    where Dynamo would skip all of a model whose ``forward`` is torch's, such as ``nn.Sequential``.
    """

    def call(*args: object, **kwargs: object) -> object:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace()
    return FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)


def compiled_graph(
    backend: str, memory_budget: float, graph: torch.fx.GraphModule, inputs: list[Tensor]
) -> Callable[..., object]:
    """Return what a backend of ``torch.compile`` makes of a graph, with a budget of kept bytes.

    Neither the setting nor the backend has a public name.
    """
    from torch._dynamo import lookup_backend  # slow to import
    from torch._functorch import config

    with config.patch(activation_memory_budget=memory_budget):
        return lookup_backend(backend)(graph, inputs)
