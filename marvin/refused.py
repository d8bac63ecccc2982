"""What is refused of what callers give: models, batches, parameters and losses."""

import inspect
from collections.abc import Iterable, Mapping
from numbers import Real

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import data

from marvin.shards import is_sharded

__all__ = [
    "check_batches",
    "check_dtypes",
    "check_loss",
    "check_model",
    "check_one_input",
    "check_params",
    "check_unsharded",
    "check_values",
    "without_values",
]

_FLOATS = torch.float32, torch.bfloat16, torch.float16


def check_model(model: object, call: str) -> None:
    """Refuse what is no model where one comes first.

    Args:
        model: What came.
        call: How it is written, such as ``"freeze(model)"``.

    Raises:
        TypeError: It is no ``torch.nn.Module``, or a parameter has no shape yet.
    """
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"a model (torch.nn.Module) must come first, got {got}: write {call}")
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(p):
            raise TypeError(
                f"a model must have parameters with a shape, got an {type(p).__name__} at {name!r}: run "
                f"the model once on a sample, then write {call}"
            )


def check_values(model: nn.Module) -> None:
    """Refuse a model whose weights have no values for now, where these are to be copied or encoded.

    Raises:
        ValueError: ``marvin.store_codes`` keeps codes in their place.
    """
    for name, p in model.named_parameters():
        if p.numel() > 1 and not any(p.stride()):
            raise without_values(name)


def check_unsharded(model: nn.Module) -> None:
    """Refuse a model whose parameters processes share, where a copy is to be made: torch makes none.

    Raises:
        ValueError: A parameter is sharded.
    """
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "a model that is copied must have whole parameters, got sharded ones: call marvin.save_sharded, then "
            "marvin.load_sharded into a model without fully_shard, in one process, and take that"
        )


def without_values(name: str) -> ValueError:
    """Return the error of a model that is to be copied while codes are in the place of a weight."""
    return ValueError(
        f"a model must have values of its weights, got codes in the place of {name}: call remove() "
        "of what marvin.store_codes returned first"
    )


def check_one_input(model: nn.Module) -> None:
    """Refuse a model that must be called with several tensors.

    Raises:
        ValueError: It must; names them.
    """
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in known if p.default is p.empty and p.kind in kinds]
    if len(needed) > 1:
        raise ValueError(
            f"the model must take one tensor, got forward({', '.join(needed)}): give one tensor that has them "
            f"all, and take it apart in forward, {needed[0]}[:, :4]"
        )


def check_batches(batches: object, call: str) -> None:
    """Refuse one batch where several are asked for: its samples would pass for batches.

    Raises:
        TypeError: It is a tensor, a data set, or nothing that can be gone through.
    """
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"batches must be a loader or a list of batches, got {type(batches).__name__}: write {call}"
        )
    if isinstance(batches, torch.Tensor):
        shape = tuple(batches.shape)
        raise TypeError(
            f"batches must be a loader or a list of batches, got one tensor of shape {shape}: "
            f"write {call}"
        )
    if isinstance(batches, data.Dataset) and not isinstance(batches, data.IterableDataset):
        raise TypeError(
            f"batches must be a loader or a list of batches, got {type(batches).__name__}, which has samples: write "
            "torch.utils.data.DataLoader(dataset, batch_size=32), or batch_size=None where these are batches"
        )


def check_params(params: object, call: str) -> None:
    """Refuse a model, a mapping of names, or nothing, in place of parameters.

    Raises:
        TypeError: It is one.
    """
    if not isinstance(params, Iterable | nn.Module):
        raise TypeError(f"parameters must come first, got {type(params).__name__}: write {call}")
    if isinstance(params, nn.Module | Mapping):
        what = "a mapping" if isinstance(params, Mapping) else "the model"
        raise TypeError(
            f"parameters must come first, got {what} ({type(params).__name__}): write {call}"
        )


def check_loss(loss: object) -> None:
    """Refuse what is no loss of a step.

    Raises:
        TypeError: It is no number and no tensor.
        ValueError: It is a tensor of more or fewer than one element.
    """
    if loss is None or isinstance(loss, Real):
        return
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"a loss must be a number or a tensor of one, got {type(loss).__name__}: "
            "write step(loss=loss)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"a loss must be one number, got a tensor of shape {tuple(loss.shape)}: "
            "write step(loss=loss.mean())"
        )


def check_dtypes(params: Iterable[torch.Tensor], who: str) -> None:
    """Refuse parameters that cannot be quantised, or have no shape yet.

    Raises:
        TypeError: With what is required and what came.
    """
    params = list(params)
    is_plain = {*map(type, params)} <= {torch.Tensor, torch.nn.Parameter}
    if (
        is_plain
        and {p.dtype for p in params}.issubset(_FLOATS)
        and not any(p.is_meta for p in params)
    ):
        return
    for p in params:
        if is_lazy(p):
            raise TypeError(
                f"{who} needs parameters with a shape, got an {type(p).__name__}: run the model once "
                "on a sample, then make the optimizer"
            )
        if p.is_meta:
            raise TypeError(
                f"{who} needs parameters with values, got one on the meta device: call "
                'model.to_empty(device="cpu") and load a state or start the weights, then make the optimizer'
            )
        if p.dtype not in _FLOATS:
            remedy = ": write model.float()" if p.dtype.is_floating_point else ""
            raise TypeError(
                f"{who} needs float32, bfloat16 or float16 parameters, got {p.dtype}{remedy}"
            )
