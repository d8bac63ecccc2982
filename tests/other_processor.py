"""Print a checksum of what kernels, layers and a short training compute; see test_other_processors.

python -m tests.other_processor
"""

import json
import zlib

import torch
from torch import nn

import marvin
from fixedpoint_kernels import (
    BlockFloat,
    FixedPoint,
    Minifloat,
    division,
    encode,
    few_bit,
    histogram_candidates,
    pack,
    quantize,
    quantize_block,
)
from fixedpoint_kernels.few_bit import functional


def checksum(*tensors: torch.Tensor) -> int:
    """Return one number of all bytes."""
    return zlib.crc32(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors))


def values(*shape: int) -> torch.Tensor:
    """Return numbers that no processor computes otherwise: whole ones times a power of two."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 + 13) % 4093 - 2046).float().reshape(shape) / 512


def kernels() -> dict[str, int]:
    """Return checksums of kernels, by name."""
    x, fmt = values(64, 257), FixedPoint(6, 3)
    codes = encode(x, fmt, seed=3, stream=5)
    wanted = x.clone().requires_grad_()
    functional.gelu(wanted, bits=3).backward(values(64, 257))
    assert wanted.grad is not None
    small = division.compress(values(4, 8, 16, 16), seed=1)
    table = few_bit.solve("silu", 2)
    return {
        "quantize": checksum(quantize(x, fmt, seed=3, stream=5), quantize(x, Minifloat(4, 3))),
        "quantize_block": checksum(quantize_block(x, BlockFloat(8))),
        "encode and pack": checksum(codes, pack(codes, 6)),
        "histogram_candidates": checksum(histogram_candidates(x, [fmt, FixedPoint(8, 5)], 50)),
        "few-bit gradients": checksum(wanted.grad),
        "few-bit table, to 6 digits": zlib.crc32(
            json.dumps(table.borders.round(6).tolist()).encode()
        ),
        "DIVISION": checksum(
            small.means.view(torch.int16), small.codes, small.ranges.view(torch.int16)
        ),
    }


def training(execution: str) -> dict[str, int]:
    """Return checksums of an output, and of the weights after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(values(*p.shape) / 16)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.125)
    optimizer = marvin.Quantized(sgd, marvin.FixedPolicy(6, 4))
    marvin.quantize_activations(model, optimizer)
    if execution == "integer":
        marvin.integer.convert(model)
    x, labels = values(16, 3, 8, 8), torch.arange(16) % 10
    found = {}
    for step in range(8):
        optimizer.zero_grad()
        y = model(x)
        loss = nn.functional.cross_entropy(y, labels)
        loss.backward()
        if step == 0:
            found[f"first output, {execution}"] = checksum(y)
        optimizer.step(loss=loss)
    found[f"masters after 8 steps, {execution}"] = checksum(
        *(
            optimizer.state[p]["master"]
            for p in model.parameters()
            if "master" in optimizer.state[p]
        )
    )
    return found


if __name__ == "__main__":
    found = kernels() | training("simulated") | training("integer")
    print(json.dumps(found))
