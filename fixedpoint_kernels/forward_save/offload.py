"""Blocks whose tensors lie in the host's memory between the forward and the backward pass.

On a GPU a tensor is copied on a stream of its own, beside what is computed, and comes back on a
second one. The host waits for neither. In the backward pass the copies that are needed next begin
early. A copy takes all of the memory that a tensor is in, so views of one memory go once and come
back once; of a memory that is more than twice as large, such as a data set, it takes a part.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fixedpoint_kernels._torch_private.modes import is_checkpointed, is_transformed, saving_hooks
from fixedpoint_kernels._torch_private.tensors import WeakStorage, base_of, storage_key, version_of

__all__ = ["Handle", "Host", "Offloaded", "clear", "goes", "host_of", "is_small"]

DEVICE = "cuda"  # whose tensors go to the host
LEAST_BYTES = 64 * 1024  # of a memory: what is smaller stays
AHEAD = 2  # copies that begin before they are needed


def is_small(size_bytes: int) -> bool:
    """Whether a memory of this size stays where it is."""
    return size_bytes < LEAST_BYTES


def goes(tensor: Tensor) -> bool:
    """Whether a tensor goes to the host, if it is none of the model's own."""
    return (
        tensor.device.type == DEVICE
        and type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
        and not isinstance(base_of(tensor), nn.Parameter)  # a view of one
        and tensor.numel() > 0
        and not is_small(tensor.untyped_storage().nbytes())
    )


class Offloaded(nn.Module):
    """Goes before the class of a block: what autograd saves in it goes to the host.

    Nothing goes in eval mode, without gradients, in compiled code, while a CUDA graph is recorded,
    under ``torch.func``, and inside of a checkpoint, which keeps nothing anyway.
    """

    def __init_subclass__(cls, **named: Any):
        super().__init_subclass__(**named)

        @wraps(super().forward)  # whoever reads the signature sees that of the block
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            own: Any = super().forward  # of now: a class may be patched
            if not (self.training and torch.is_grad_enabled()) or _is_left():
                return own(*args, **kwargs)
            saving = _Saving(self)
            try:
                with saved_tensors_hooks(saving.pack, _unpacked):
                    return own(*args, **kwargs)
            finally:
                saving.handles.clear()  # saved tensors alone hold what is on the host

        cls.forward = forward


def _is_left() -> bool:
    """Whether nothing can go now."""
    if torch.compiler.is_compiling() or is_transformed() or is_checkpointed():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Buffer:
    """Memory of the host.

    Args:
        memory: Bytes.

    Attributes:
        is_read: Event after which nothing reads it; None: nothing does.
    """

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.is_read: torch.cuda.Event | None = None


class Handle:
    """The memory of a tensor, on the host; where it ends, its buffer is free again."""

    def __init__(self, host: "Host", buffer: _Buffer, size_bytes: int, before: "Handle | None"):
        self.host, self.buffer, self.size_bytes = host, buffer, size_bytes
        self.before = before and weakref.ref(before)
        self.is_written: torch.cuda.Event | None = None
        self.back: Tensor | None = None  # what came back, or is coming
        self.is_awaited = False

    def __del__(self):
        self.host.forget(self)


class Host:
    """Copies memory to the host and back; buffers are used again, for pinning one takes long.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device):
        self.device, self._last = device, None
        self._free: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._lanes: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._lanes = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def put(self, flat: Tensor) -> Handle:
        """Begin to copy bytes; their memory may be freed at once."""
        size_bytes = flat.numel()
        buffer = self._taken(size_bytes)
        handle = Handle(self, buffer, size_bytes, self._last and self._last())
        self._last = weakref.ref(handle)
        there = buffer.memory[:size_bytes]
        if self._lanes is None:
            there.copy_(flat)
            return handle
        out = self._lanes[0]
        out.wait_stream(torch.cuda.current_stream(self.device))
        if buffer.is_read is not None:
            out.wait_event(buffer.is_read)
        with torch.cuda.stream(out):
            there.copy_(flat, non_blocking=True)
        flat.record_stream(out)  # the allocator gives the memory to no one before
        handle.is_written = torch.cuda.Event()
        out.record_event(handle.is_written)
        return handle

    def get(self, handle: Handle) -> torch.UntypedStorage:
        """Return what ``put`` took; the stream of now waits for it.

        It is there until the handle ends: autograd lets go of it with the last that needs it.
        """
        flat = self._begun(handle) if handle.back is None else handle.back
        handle.back, handle.is_awaited = flat, True
        if handle.buffer.is_read is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(handle.buffer.is_read)
            flat.record_stream(now)  # where it is not that of the copy's memory
        self._begin_ahead(handle)
        return flat.untyped_storage()

    def _begin_ahead(self, handle: Handle) -> None:
        """Begin to copy back what was put before."""
        following: Handle | None = handle
        for _ in range(AHEAD):
            following = following.before and following.before()
            if following is None:
                return
            if following.back is None:
                following.back = self._begun(following)

    def forget(self, handle: Handle) -> None:
        """Take the buffer of a handle that ends."""
        if handle.back is not None and not handle.is_awaited and self._lanes is not None:
            handle.back.record_stream(self._lanes[1])  # begun early, and not needed
        buffer = handle.buffer
        self._free[buffer.memory.numel()].append(buffer)

    def clear(self) -> None:
        """Let go of the buffers that are free."""
        self._free.clear()

    def _taken(self, size_bytes: int) -> _Buffer:
        """Return a free buffer, or a new one: of a power of two, as torch pins no other."""
        size = 1 << (size_bytes - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        is_pinned = self._lanes is not None
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        return _Buffer(memory)

    def _begun(self, handle: Handle) -> Tensor:
        """Begin to copy memory back, into memory of the stream of now."""
        flat = torch.empty(handle.size_bytes, dtype=torch.uint8, device=self.device)
        here = handle.buffer.memory[: handle.size_bytes]
        if self._lanes is None:
            return flat.copy_(here)
        back = self._lanes[1]
        back.wait_stream(torch.cuda.current_stream(self.device))  # who had this memory is done
        if handle.is_written is not None:
            back.wait_event(handle.is_written)
        with torch.cuda.stream(back):
            flat.copy_(here, non_blocking=True)
        handle.buffer.is_read = torch.cuda.Event()
        back.record_event(handle.buffer.is_read)
        return flat


_HOSTS: dict[torch.device, Host] = {}


def host_of(device: torch.device) -> Host:
    """Return the memory of the host for one device."""
    if device not in _HOSTS:
        _HOSTS[device] = Host(device)
    return _HOSTS[device]


def clear() -> None:
    """Let go of all buffers that are free."""
    for host in _HOSTS.values():
        host.clear()


class _Version(NamedTuple):
    """How often a tensor had been written to; torch does not look where there are hooks.

    Args:
        alias: That counts with the tensor; it need not have its memory.
        then: The count.
    """

    alias: Tensor
    then: int

    def check(self, size: torch.Size) -> None:
        """Raise as torch does if the tensor was written to since.

        Raises:
            RuntimeError: It was.
        """
        now = version_of(self.alias)
        if now != self.then:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(size)} is at version {now}; "
                f"expected version {self.then} instead"
            )


class _Stays(NamedTuple):
    """A tensor that does not go."""

    kept: Tensor
    version: _Version


class _Others(NamedTuple):
    """A tensor that does not go, as other hooks have it."""

    kept: object
    unpack: Callable[..., Tensor]


class _Gone(NamedTuple):
    """A tensor whose memory is on the host; offset, size and stride there."""

    handle: Handle
    place: tuple[int, torch.Size, tuple[int, ...]]
    version: _Version


class _Saving:
    """What autograd saves in one forward pass of a block.

    Args:
        module: The block.
    """

    def __init__(self, module: nn.Module):
        own = (t for t in (*module.parameters(), *module.buffers()) if t.layout is torch.strided)
        self._own = set(map(storage_key, own))
        self._outer = saving_hooks()
        self.handles: dict[tuple[WeakStorage, int, int], Handle] = {}

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> _Stays | _Others | _Gone:
        """Return what autograd keeps in the place of a tensor."""
        if not goes(tensor) or storage_key(tensor) in self._own:
            if self._outer is not None:
                return _Others(self._outer[0](tensor), self._outer[1])
            return _Stays(tensor, _Version(tensor, version_of(tensor)))
        storage, (start, end) = tensor.untyped_storage(), _part_of(tensor)
        at = WeakStorage(storage), version_of(tensor), start
        if at not in self.handles or self.handles[at].size_bytes < end - start:
            self.handles[at] = host_of(tensor.device).put(_bytes_of(storage)[start:end])
        offset = int(tensor.storage_offset()) - start // tensor.itemsize
        alias = tensor.detach()
        alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = offset, tensor.size(), tensor.stride()
        return _Gone(self.handles[at], place, _Version(alias, version_of(tensor)))


def _unpacked(packed: _Stays | _Others | _Gone) -> Tensor:
    if isinstance(packed, _Gone):
        handle, (offset, size, stride), version = packed
        version.check(size)
        with torch.no_grad():
            storage = handle.host.get(handle)
            empty = torch.empty_like(version.alias)
            return empty.set_(storage, offset, size, stride)  # pyright: ignore
    if isinstance(packed, _Others):
        return packed.unpack(packed.kept)
    packed.version.check(packed.kept.size())
    return packed.kept


def _part_of(tensor: Tensor) -> tuple[int, int]:
    """Return from where to where a tensor's memory is copied, in bytes: all of it, or less than half."""
    whole = tensor.untyped_storage().nbytes()
    start = int(tensor.storage_offset()) * tensor.itemsize
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    end = start + (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.itemsize
    return (start, end) if 2 * (end - start) < whole else (0, whole)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a memory as a tensor of bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)  # pyright: ignore[reportCallIssue, reportArgumentType]
