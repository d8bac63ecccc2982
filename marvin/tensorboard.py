"""Word lengths in TensorBoard."""

from typing import TYPE_CHECKING

from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat
from marvin.policies.records import word_length
from marvin.quantized import Quantized

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["log_formats"]


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
    formats = optimizer.formats()
    for layer in optimizer.layers():
        fmt = formats.get(layer)
        writer.add_scalar(f"word_length/{layer}", word_length(fmt), step)
        if isinstance(fmt, FixedPoint | ChannelFormat):
            writer.add_scalar(f"fractional_length/{layer}", fmt.fl, step)
    writer.add_scalar("mean_word_length", optimizer.mean_word_length(), step)
    inputs = optimizer.input_formats()
    if all(formats.get(layer) == fmt for layer, fmt in inputs.items()):
        return  # these are the weights' own
    for layer, fmt in inputs.items():
        writer.add_scalar(f"input_word_length/{layer}", word_length(fmt), step)
    writer.add_scalar("mean_input_word_length", optimizer.mean_input_word_length(), step)
