"""Exporting a frozen model, as the command line says."""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from marvin.export import command
from marvin.export.deployed import Deployed, Options, deploy
from marvin.export.errors import NO_MEMORY, ExportError
from marvin.export.frontend.load import load_frozen, load_tensor
from marvin.export.graph.formats import (
    activation_formats,
    carried_weights,
    formats_of_weights,
    nearest_weights,
    weight_formats,
)
from marvin.export.report import Trained, first_head
from marvin.refused import check_one_input

__all__ = ["export"]

_MADE_UP = 64  # samples


def export(given: argparse.Namespace, prog: str) -> None:
    """Do what the command line asks; what the user can put right ends with one line.

    Args:
        given: The flags of ``python -m marvin.export``.
        prog: The command.
    """
    with command.one_line(prog):
        folder = given.model.with_name(f"{given.model.stem}-export")
        options = command.options(given, folder)
        model = load_frozen(given.model, given.allow)
        has_indices = any(isinstance(module, nn.Embedding) for module in model.modules())
        samples, labels, notes = _samples(given, has_indices)
        outputs = _outputs(model, samples[:1])
        if labels is not None:
            _check_labels(given.labels, labels, outputs)
        deployed, note = _deployed(model, samples, options)
        title = f"{type(model).__name__}, frozen"
        facts = given.model, title, model, samples, labels, "samples", (note, *notes)
        trained = Trained(*facts, carried="the model's own")  # of training, or of marvin.calibrate
        command.export(given, trained, deployed, folder)


def _samples(
    given: argparse.Namespace, has_indices: bool
) -> tuple[Tensor, Tensor | None, tuple[str, ...]]:
    """Return samples, labels if there are some, and what the report says of them.

    Args:
        given: The flags of the command.
        has_indices: The model has an embedding, so that samples may be whole numbers.
    """
    if given.inputs is None and has_indices:
        raise ExportError("a model with an embedding must have samples: give indices with --inputs")
    if given.inputs is None:
        if given.labels is not None:
            raise ExportError("--labels must be those of --inputs, got them with --shape")
        generator = torch.Generator().manual_seed(0)
        samples = torch.randn(_MADE_UP, *given.shape, generator=generator, dtype=torch.float32)
        note = f"{_MADE_UP} samples are made up, normally distributed: give data with --inputs"
        return samples, None, (note,)
    samples = load_tensor(given.inputs)
    is_known = samples.is_floating_point() or (has_indices and samples.dtype is not torch.bool)
    if not is_known or samples.ndim < 2 or not len(samples):
        got = f"{samples.dtype} of shape {tuple(samples.shape)}"
        instead = ": write array.astype('float32'), scaled as in training"
        raise ExportError(
            f"{given.inputs} must hold samples as the model takes them, got {got}"
            + ("" if samples.is_floating_point() or has_indices else instead)
        )
    samples = samples.float() if samples.is_floating_point() else samples.long()
    if given.labels is None:
        return samples, None, ()
    labels = load_tensor(given.labels)
    if labels.is_floating_point() or labels.shape != samples.shape[:1]:
        got = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise ExportError(f"{given.labels} must hold {len(samples)} whole numbers, got {got}")
    return samples, labels.long(), ()


@torch.no_grad()
def _outputs(model: nn.Module, sample: Tensor) -> object:
    """Return what a model gives; refuse samples that it does not take, and a model that takes several tensors."""
    try:
        check_one_input(model)
    except ValueError as error:
        raise ExportError(str(error)) from error
    try:
        return model(sample)
    except NO_MEMORY:
        raise
    except Exception as error:  # whatever the model's own code raises
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
        shape = tuple(sample.shape[1:])
        raise ExportError(f"the model must take samples of shape {shape}, got {reason}") from error


def _check_labels(path: Path, labels: Tensor, outputs: object) -> None:
    """Refuse labels that are none of the classes of the first output, shape ``(1, classes, ...)``."""
    shape = first_head(outputs).shape
    wrong = labels[(labels < 0) | (labels >= shape[1])] if len(shape) > 1 else labels[:0]
    if len(wrong):
        raise ExportError(
            f"{path} must hold classes, 0 to {shape[1] - 1}, got {int(wrong[0])}: the first class is 0, and "
            "samples of no class are left out"
        )


def _deployed(model: nn.Module, samples: Tensor, options: Options) -> tuple[Deployed, str]:
    """Return the network of a frozen model, and where the formats of its weights come from."""
    carried, formats = carried_weights(model), weight_formats(model)
    if not carried and not activation_formats(model):
        found = formats_of_weights(model, options.wl, options.estimator)
        note = f"formats of weights: of {options.wl} bits, the model carries none"
        return deploy(nearest_weights(model, found), found, samples, options), note
    others = ", ".join(f"{name} {fmt}" for name, fmt in formats.items() if name not in carried)
    note = "formats of weights: the model's own"
    note += f"; found from the values: {others}" if others else ""
    return deploy(model, formats, samples, options), note
