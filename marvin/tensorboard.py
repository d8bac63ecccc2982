"""Word lengths in TensorBoard."""

from typing import TYPE_CHECKING

from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat
from marvin.policies.records import word_length
from marvin.quantized import Quantized

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["add_layout", "log_formats", "scalars_of"]


def log_formats(writer: "SummaryWriter", optimizer: Quantized, step: int) -> None:
    """Write each layer's word and fractional length, and the mean word length, in bits.

    Word lengths of layers' inputs come beside them where they have formats of their own.

    Args:
        writer: A TensorBoard writer.
        optimizer: Whose layers to write.
        step: The optimizer step they belong to.

    Raises:
        TypeError: ``writer`` writes no scalars, or ``optimizer`` has no formats.
    """
    if not hasattr(writer, "add_scalar") or not isinstance(optimizer, Quantized):
        came = f"{type(writer).__name__} and {type(optimizer).__name__}"
        raise TypeError(
            f"log_formats needs a writer and an optimizer of fixed point, got {came}: "
            "write log_formats(SummaryWriter(folder), optimizer, step)"
        )
    for name, value in scalars_of(optimizer).items():
        writer.add_scalar(name, value, step)


def scalars_of(optimizer: Quantized) -> dict[str, float]:
    """Return what ``log_formats`` writes, by the names of the curves, in bits.

    Raises:
        TypeError: ``optimizer`` has no formats.
    """
    if not isinstance(optimizer, Quantized):
        raise TypeError(
            f"scalars_of needs an optimizer of fixed point, got {type(optimizer).__name__}: write "
            "scalars_of(optimizer), where optimizer = marvin.Quantized(...)"
        )
    formats, found = optimizer.formats(), dict[str, float]()
    for layer in optimizer.layers():
        fmt = formats.get(layer)
        found[f"word_length/{layer}"] = word_length(fmt)
        if isinstance(fmt, FixedPoint | ChannelFormat):
            found[f"fractional_length/{layer}"] = fmt.fl
    found["mean_word_length"] = optimizer.mean_word_length()
    inputs = optimizer.input_formats()
    have_own = any(row.input_wl for row in optimizer.trace)
    if not have_own and all(formats.get(layer) == fmt for layer, fmt in inputs.items()):
        return found  # these are the weights' own
    found |= {f"input_word_length/{layer}": word_length(fmt) for layer, fmt in inputs.items()}
    return found | {"mean_input_word_length": optimizer.mean_input_word_length()}


def add_layout(writer: "SummaryWriter") -> None:
    """Put all layers of a kind into one chart each, on TensorBoard's page *Custom Scalars*.

    Weights stand beside inputs. Once for each writer is enough, before or after the curves.

    Args:
        writer: A TensorBoard writer.

    Raises:
        TypeError: ``writer`` writes no layouts.
    """
    if not hasattr(writer, "add_custom_scalars"):
        raise TypeError(
            f"add_layout needs a writer, got {type(writer).__name__}: write "
            "add_layout(SummaryWriter(folder))"
        )
    charts = {
        "weights, bits": ["^word_length/"],
        "inputs, bits": ["^input_word_length/"],
        "means, bits": ["^mean_word_length$", "^mean_input_word_length$"],
    }
    run = {
        "loss": ["^loss/"],
        "accuracy": ["^accuracy/"],
        "EBOPs, modelled": ["^ebops_modelled$"],
        "images a second": ["^images_per_s$"],
    }
    layout = {"word lengths": charts, "run": run}
    writer.add_custom_scalars(
        {
            category: {title: ["Multiline", tags] for title, tags in parts.items()}
            for category, parts in layout.items()
        }
    )
