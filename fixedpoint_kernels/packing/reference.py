"""Bit packing in plain PyTorch: the definition that the kernels are tested against."""

import torch
from torch import Tensor


def pack(codes: Tensor, packed: Tensor, bits: int) -> None:
    """See ``fixedpoint_kernels.packing.pack``; ``codes`` is flat and signed."""
    stream = codes.to(torch.int64)[:, None] >> torch.arange(bits, device=codes.device) & 1
    padded = stream.new_zeros(8 * packed.numel())
    padded[: stream.numel()] = stream.flatten()
    packed.copy_(_join(padded, 8))


def unpack(packed: Tensor, codes: Tensor, bits: int, signed: bool) -> None:
    """See ``fixedpoint_kernels.packing.unpack``; ``codes`` is flat."""
    stream = packed.to(torch.int64)[:, None] >> torch.arange(8, device=packed.device) & 1
    values = _join(stream.flatten()[: codes.numel() * bits], bits)
    if signed:
        values -= (values >> bits - 1) << bits  # the highest bit counts -2**(bits - 1)
    codes.copy_(values)


def _join(stream: Tensor, bits: int) -> Tensor:
    """Sum each ``bits`` bits of a stream, least significant first."""
    return (stream.view(-1, bits) << torch.arange(bits, device=stream.device)).sum(1)
