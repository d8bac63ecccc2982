"""Count the bytes of tensors that are alive at once."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fixedpoint_kernels._torch_private.modes import TorchDispatchMode
from fixedpoint_kernels._torch_private.tensors import storage_key
from fixedpoint_kernels.forward_save.sample import tensors_in

__all__ = ["LiveBytes", "peak_of"]


class LiveBytes(TorchDispatchMode):
    """Counts, while it is entered, the memory of tensors that operators make.

    What was there before is left out, and so is the memory that an operator takes for itself.

    Attributes:
        now: Bytes alive.
        peak: Most bytes alive so far.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            key, storage = storage_key(tensor), tensor.untyped_storage()
            if key in before or key in self._sizes:
                continue
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, key)
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def peak_of(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that ``run`` holds at once beyond what was there before.

    On a GPU they are those of torch's allocator, otherwise those of tensors.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        run()
    return live.peak
