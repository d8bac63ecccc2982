"""The training steps that benchmarks time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Step", "step_in_floats", "steps_in_floats", "training_step"]

Step = Callable[[], object]


def training_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    zero_grad: Step,
    update: Callable[[Tensor], object],
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return a step on one batch of images and classes.

    Args:
        model: What is trained.
        x: The batch.
        y: Its classes.
        zero_grad: Called first.
        update: Called last, with the loss.
        dtype: Of autocast, where it is not float32.
    """
    kind, casts = x.device.type, dtype is not torch.float32

    def step() -> None:
        zero_grad()
        with torch.autocast(kind, dtype, enabled=casts):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        update(loss.detach())

    return step


def steps_in_floats(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Step]:
    """Return PyTorch's own steps, by dtype (bfloat16 by autocast) and, of images, layout.

    Args:
        make: Builds the network.
        x: A batch.
        y: Its classes.
    """
    found: dict[str, Step] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last)[: 1 + (x.dim() == 4)]:
            kind = f"{str(dtype)[6:]}" + " channels last" * (layout is torch.channels_last)
            found[kind] = step_in_floats(make, x, y, dtype, layout)
    return found


def step_in_floats(
    make: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> Step:
    """Return one of PyTorch's own steps, under autocast where ``dtype`` is not float32."""
    torch.manual_seed(0)
    model = make()
    model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]: torch has it
    fused = x.is_cuda or None  # one launch for the update
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused)
    own = x.contiguous(memory_format=layout)
    return training_step(model, own, y, sgd.zero_grad, lambda _: sgd.step(), dtype)
