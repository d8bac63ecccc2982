"""Files of ``torch.save``: what torch reads of them, of two records of one name say, no public function tells."""

from typing import BinaryIO

import torch

__all__ = ["record_of"]


def record_of(file: BinaryIO, name: str) -> bytes:
    """Return a record of a file of ``torch.save``, the one that ``torch.load`` takes.

    Raises:
        RuntimeError: There is none.
    """
    file.seek(0)
    return torch._C.PyTorchFileReader(file).get_record(name)
