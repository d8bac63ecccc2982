"""Formats of activations that training left in floats, by the name of the layer that takes them."""

from torch import nn

from marvin.calibration import Batches, layer_formats
from marvin.estimators import Estimator
from marvin.export.errors import ExportError
from marvin.export.execute.verify import evaluating
from marvin.export.graph.formats import Formats, plain

__all__ = ["calibrate"]


def calibrate(
    model: nn.Module, loader: Batches, wl: int = 8, estimator: Estimator = "noise"
) -> dict[str, Formats]:
    """Return formats of ``wl`` bits for what the layers of a model take; above 8 bits also give.

    The formats that ``marvin.calibrate`` gives a copy of the model, for ``describe`` beside formats of
    weights that training has found. To calibrate weights too, call ``marvin.calibrate``.

    Args:
        model: Run in eval mode, without gradients. What rounds already is measured after it was rounded.
        loader: Batches: tensors, or tuples that begin with one.
        wl: Word length of every activation, bits.
        estimator: See ``marvin.calibrate``.

    Returns:
        Formats by the name of the module.

    Raises:
        ExportError: There is no batch, or an activation is not finite.
    """
    names = {module: name for name, module in model.named_modules()}
    with evaluating(model):
        try:
            found = layer_formats(model, loader, wl, estimator)
        except ValueError as error:
            raise ExportError(str(error)) from error
    return {names[m]: Formats(plain(f.inputs), plain(f.outputs)) for m, f in found.items()}
