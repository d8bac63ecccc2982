"""Giving layers integer products, taking them back, and saying what runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from fixedpoint_kernels import products
from fixedpoint_kernels._torch_private.modules import own_parameters
from fixedpoint_kernels.drawing import draw_cells
from fixedpoint_kernels.forward_save.swap import is_converted
from fixedpoint_kernels.undo import all_or_nothing
from marvin.hooks import restore_forwards, rounders_of
from marvin.integer.formats import (
    BITS,
    PREPACKED,
    Execution,
    Options,
    carried,
    choose,
    is_prepacked,
    why_no_kernel,
)
from marvin.integer.fusion import fuse, fused_layers, own_forwards, refused_calls
from marvin.integer.layers import (
    CLASSES,
    OPTIONS,
    TransposedLinear,
    integer_class,
    keep_out_of_compilation,
    stock_class,
)
from marvin.integer.lone_run import forget
from marvin.layers import computed_weights, is_layer, parameters_of, parametrisations_of
from marvin.model_formats import ModuleFormats
from marvin.refused import check_model
from marvin.shards import is_sharded

if TYPE_CHECKING:
    from fixedpoint_kernels.figure import Shown

__all__ = ["Report", "Row", "convert", "prepack", "report", "revert"]


@dataclass(frozen=True)
class Row:
    """What runs in one layer.

    Args:
        name: Of the module.
        forward: What computes its output: instructions of integer products, or ``"float32"``.
        input_gradient: What computes the gradient of its input.
        weight_gradient: What computes the gradient of its weight.
        reason: Why not all of them are integer; "" where they are.
        is_fused: Whether it runs with its neighbours as one in training, codes going from layer to
            layer, where ``marvin.integer.convert`` says that this can be.
        is_exact: Whether it has the bits of layers one by one in eval mode without gradients: its chain
            there has no means, SiLU, sigmoid or GELU, norms or attention.
        is_prepacked: Whether ``marvin.integer.prepack`` was called for it, which says which layers then keep
            their weights laid out.
    """

    name: str
    forward: str
    input_gradient: str
    weight_gradient: str
    reason: str = ""
    is_fused: bool = False
    is_exact: bool = True
    is_prepacked: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether the forward product is one of integers."""
        return self.forward != _FLOAT


@dataclass(frozen=True)
class Report:
    """What runs in each layer of a model, with the formats of now.

    Args:
        rows: Of modules with a weight of two or more dimensions.
        path: Which instructions integer products take, and why.
        refused: Modules whose last call ran part by part, and the argument that no trace can be made of.
        own_forwards: Modules that run a ``forward`` which was set on the object, such as Accelerate's: it stays, and
            what it calls runs part by part.
    """

    rows: tuple[Row, ...]
    path: str
    refused: Mapping[str, str] = field(default_factory=dict)
    own_forwards: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        count = sum(row.is_integer for row in self.rows)
        lines = [f"{count} of {len(self.rows)} layers multiply integers ({self.path})"]
        for row in self.rows:
            ways = f"{row.forward}, {row.input_gradient}, {row.weight_gradient}"
            notes = [row.reason] if row.reason else []
            notes += ["fused"] if row.is_fused else []
            notes += [] if row.is_exact else ["other last bits in eval mode"]
            notes += ["prepacked"] if row.is_prepacked else []
            lines.append(f"{row.name}: {ways}" + (f" ({', '.join(notes)})" if notes else ""))
        for argument in dict.fromkeys(self.refused.values()):
            names = [name or "the model" for name, own in self.refused.items() if own == argument]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            hint = _NO_CACHE if argument.endswith("Cache") else ""
            lines.append(
                f"{names[0]}{more}: ran part by part, for its last call had {argument}{hint}"
            )
        if self.own_forwards:
            name, more = self.own_forwards[0] or "the model", len(self.own_forwards) - 1
            more = f" and {more} more" if more else ""
            lines.append(f"{name}{more}: runs part by part, for a forward was set on the object")
        return "\n".join(lines)

    def plot(self) -> "Shown":
        """Draw the three products of each layer: coloured on integer units, grey in float32.

        Returns:
            A figure of matplotlib's; a notebook shows it, ``savefig(path)`` writes it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        count = sum(row.is_integer for row in self.rows)
        title = f"{count} of {len(self.rows)} layers multiply integers"
        header = "output", "gradient of the input", "gradient of the weight", ""
        rows = []
        for row in self.rows:
            ways = row.forward, row.input_gradient, row.weight_gradient
            note = row.reason or ("fused" if row.is_fused else "")
            rows.append(
                (row.name, [*((way, way != _FLOAT) for way in ways), (note, not row.reason)])
            )
        return draw_cells(title, header, rows)


_FLOAT = "float32"
_NO_CACHE = ": to train, write model.config.use_cache = False"
_SPELL = (
    ": write model = marvin.spell_attention(model) before the optimizer is made, which puts nn.Linear "
    "there; it takes no attention with add_bias_kv=True or add_zero_attn=True"
)
_INSTEAD: dict[type[nn.Module], str] = dict.fromkeys(
    (nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear), _SPELL
)


def convert(
    model: nn.Module,
    *,
    gradient_bits: int | tuple[int | None, int | None] | None = BITS,
    execution: Execution = "integer",
    fused: bool = True,
) -> Report:
    """Let layers multiply integer codes: output, gradient of the input, gradient of the weight.

    A layer does so at each call where its formats have 8 bits or fewer, and computes in float as
    before where they have not: policies may switch formats at any time. Forward, the sums are exact
    where the simulation's float32 sums are rounded. Backward, the gradient of a layer's output is
    rounded stochastically to 8 bits, with a power of two for each sample
    (``fixedpoint_kernels.products.round_per_sample``), by noise of the optimizer's seed and a count
    that its state keeps; both gradients are exact products of these codes. In eval mode gradients
    are computed in float.

    Modules stay the same objects with the same parameters, hooks and names; only their class
    becomes ``IntegerConv2d``, ``IntegerConv1d`` or ``IntegerLinear``, or a class of its own for ``Conv1D``
    of transformers and ``Linear`` of timm. A second call changes the
    options. Where it is interrupted, the model stays as it was.

    Args:
        model: Its layers round their inputs by ``marvin.quantize_activations``, which may come before
            or after.
        gradient_bits: 8, or None for gradients in float; or a pair, for the gradient of the input
            and that of the weight.
        execution: ``"integer"``; or ``"simulation"``, the same step in PyTorch's float32, equal to
            the bit where its sums are exact.
        fused: Whether layers that follow each other run as one, and pass codes on: convolutions, batch
            norm, sums and activation functions, or the layers of a transformer, in training and in eval
            mode without gradients; and a linear layer with its codes and its bias. See
            ``docs/chains.md``. It needs integer products of both gradients.

    Returns:
        What runs in each layer, and why not integers where they do not.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: An argument is unknown.
    """
    check_model(model, "integer.convert(model)")
    pair = gradient_bits if isinstance(gradient_bits, tuple) else (gradient_bits, gradient_bits)
    if len(pair) != 2 or any(bits not in (BITS, None) for bits in pair):
        raise ValueError(
            f"gradient_bits must be {BITS}, None, or a pair of these for the gradients of inputs "
            f"and of weights, got {gradient_bits!r}"
        )
    if execution not in ("integer", "simulation"):
        raise ValueError(f"execution must be 'integer' or 'simulation', got {execution!r}")
    options = Options(*pair, execution, fused)
    keep_out_of_compilation()
    with all_or_nothing(model.modules()):
        restore_forwards(model)
        for module in model.modules():
            if (own := integer_class(type(module))) is not None:
                module.__class__ = own
            if stock_class(module) is not None:
                setattr(module, OPTIONS, options)
                _unpack(module)
        if options == Options():
            fuse(model)
        return report(model)


def prepack(model: nn.Module) -> None:
    """Let a frozen model keep its weights laid out between calls, in place of laying them out at each.

    It saves time where few samples meet many weights; no bit of a result changes. At each call weights, biases and batch norm's
    numbers are compared: where one is another tensor, has another address, or has been written to, as by ``load_state_dict``
    or ``parameter.mul_(2)``, all of its chain are laid out anew. Torch counts no writes through ``parameter.data``, NumPy
    arrays and addresses, nor those of FSDP2, which gathers weights: **these are not seen**, and the model goes on with the weights of
    before, until ``prepack`` is called again. Of tensors that were made in ``torch.inference_mode``, which count no writes, nothing is kept.

    A chain, or a layer alone, keeps its weights for each size of batches, number of threads and instructions: the last 64 of
    these while they take 64 MiB or less, else the last four. It has them without ``prepack``, too. They are in no
    state, file, pickle or copy: a copy is prepacked, and lays out weights of its own. Convolutions that
    belong to no chain, and cut no patches, lay out theirs at each call. Where it is interrupted, the model stays as it was.

    Args:
        model: What ``marvin.freeze`` made of a converted model, or a part of it. ``marvin.integer.convert`` of it
            undoes ``prepack``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: It has no layers that multiply integers, or one that is not frozen.

    Examples:
        >>> frozen = marvin.freeze(model)
        >>> marvin.integer.prepack(frozen)
    """
    check_model(model, "integer.prepack(model)")
    layers = {name: own for name, own in model.named_modules() if stock_class(own) is not None}
    if not layers:
        raise ValueError(
            "a model to prepack must have layers that multiply integers, got none: call "
            "marvin.integer.convert(model) first"
        )
    for name, layer in layers.items():
        if rounders_of(layer) or any(p.requires_grad for p in layer.parameters()):
            raise ValueError(
                "a model to prepack must be frozen, for training writes weights at each step, got layer "
                f"{name!r} that is not: call marvin.freeze(model) first"
            )
    with all_or_nothing(layers.values()):
        for layer in layers.values():
            setattr(layer, PREPACKED, getattr(layer, PREPACKED, 0) + 1)
            forget(layer)


def _unpack(module: nn.Module) -> None:
    vars(module).pop(PREPACKED, None)
    forget(module)


def revert(model: nn.Module) -> None:
    """Undo ``convert``: layers compute in float again.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_model(model, "integer.revert(model)")
    with all_or_nothing(model.modules()):
        restore_forwards(model)
        for module in model.modules():
            if (stock := stock_class(module)) is not None:
                module.__class__ = stock
                delattr(module, OPTIONS)
                _unpack(module)


def report(model: nn.Module) -> Report:
    """Return what runs in each layer of a model, with the formats that it carries now.

    Args:
        model: Converted or not.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_model(model, "integer.report(model)")
    inside = parametrisations_of(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if module not in inside and any(map(is_layer, parameters_of(module).values()))
    }
    here = {name for name, module in layers.items() if _device(module).type == "cpu"}
    fused, inexact = (names & here for names in fused_layers(model))  # chains are for CPUs alone
    rows = [
        replace(
            row,
            is_fused=name in fused and not row.reason,
            is_exact=name not in inexact or not row.is_integer,
            is_prepacked=row.is_integer and is_prepacked(module),
        )
        for name, module in layers.items()
        for row in [_row(name, module)]
    ]
    paths = dict.fromkeys(products.path(_device(module)) for module in layers.values())
    described = "; ".join(f"{path.name}: {path.reason}" for path in paths or [products.path()])
    return Report(tuple(rows), described, refused_calls(model), tuple(own_forwards(model)))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _row(name: str, module: nn.Module) -> Row:
    way, reason = products.path(_device(module)).name, _why_not(module)
    if reason:
        return Row(name, _FLOAT, _FLOAT, _FLOAT, reason)
    options: Options = getattr(module, OPTIONS)
    bits = options.input_gradient_bits, options.weight_gradient_bits
    of_input, of_weight = (way if own else _FLOAT for own in bits)
    return Row(name, way, of_input, of_weight, "" if all(bits) else "gradient_bits=None")


def _named(kind: type[nn.Module]) -> str:
    """Return the name of a class without integer products, and what to write."""
    if kind.__module__.startswith("torch."):
        return kind.__name__ + _INSTEAD.get(kind, "")
    known = ", ".join(f"nn.{own.__name__}" for own in CLASSES)
    path = f"{kind.__module__}.{kind.__qualname__}"
    return f"{path}: where it computes what one of {known} does, put that in its place"


def _why_not(module: nn.Module) -> str:
    """Say why a layer does not multiply integers; "" where it does."""
    if integer_class(type(module)) is not None:
        return "not converted"
    if not isinstance(module, (*CLASSES.values(), TransposedLinear)):
        return _why_no_class(module)
    if any(t.is_meta for t in (*module.parameters(False), *module.buffers(False))):
        return "it is on the meta device, which has no values"
    formats = carried(module)[0]
    if formats == ModuleFormats():
        return "it carries no formats: marvin.quantize_activations leaves it out, or was not called"
    product = choose(module, formats)
    if isinstance(product, str):
        waits = any(own.name in own.state.waiting for own in rounders_of(module))
        is_known_later = waits and product == "its inputs are float32"
        return f"{product}: not called yet" if is_known_later else product
    if getattr(module, OPTIONS).execution == "simulation":
        return "the integer step is simulated"
    return why_no_kernel(_device(module), product.groups)


def _why_no_class(module: nn.Module) -> str:
    """Say why a module could not become one that multiplies integers."""
    if is_converted(module):
        return "forward_save.convert came first: revert it, call integer.convert, then again"
    if any(map(is_sharded, module.parameters(recurse=False))):
        return "its parameters are sharded: call integer.convert before fully_shard"
    if computed := computed_weights(module):
        return f"a parametrisation computes its {' and '.join(computed)}"
    if any(module.children()) and type(module) not in _INSTEAD:
        own = " and ".join(name for name, p in own_parameters(module) if is_layer(p))
        return f"there is no integer product for its own {own}: put that into an nn.Linear, and call it"
    return f"there is no integer product for {_named(type(module))}"
