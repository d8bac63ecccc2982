"""Word lengths in TensorBoard."""

from typing import TYPE_CHECKING

from marvin.optimizer import MSGD

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["log_formats"]


def log_formats(writer: "SummaryWriter", optimizer: MSGD, step: int) -> None:
    """Write each layer's word and fractional length, and the mean word length, in bits.

    Args:
        writer: A TensorBoard writer.
        optimizer: Whose layers to write.
        step: The optimizer step they belong to.
    """
    formats = optimizer.formats()
    for layer in optimizer.layers():
        writer.add_scalar(f"word_length/{layer}", formats[layer].wl, step)
        writer.add_scalar(f"fractional_length/{layer}", formats[layer].fl, step)
    writer.add_scalar("mean_word_length", optimizer.mean_word_length(), step)
