"""Guards behind the memory of chains: what a kernel writes behind its own is seen, whoever lies there.

Each buffer, each part of a thread's memory, each piece that forward keeps and each array of a program is followed by bytes
that nobody owns and that hold 255. After a pass they must still do so. Buffers share no memory here.
"""

import ctypes
from typing import NamedTuple

import numpy as np

from fixedpoint_kernels.fused import execute, inference, layout
from fixedpoint_kernels.fused import fields as f
from fixedpoint_kernels.fused import program as programs
from fixedpoint_kernels.fused.operations import Buffer
from fixedpoint_kernels.products import jobs

GUARD = 4096  # bytes
SLACK = 64  # that may be written behind what is one's own: whole registers are


class Zone(NamedTuple):
    """Bytes that nobody owns."""

    what: str
    start: int
    size: int


def rounded(size):
    return -(size // -SLACK) * SLACK


class Guards:
    """What is behind the memory of chains that are made from now on; memory that is lent must hold 255.

    Attributes:
        passes: How many were looked at.
    """

    def __init__(self, monkeypatch):
        self.passes, self._arrays, self._buffers = 0, [], []
        for owner, name, own in (
            (layout.Layout, "array", self._array),
            (layout.Layout, "keep", self._keep),
            (programs, "place_buffers", self._place_buffers),
            (programs.Program, "_finished", self._finished),
            (programs.Program, "_make_scratch", self._make_scratch),
            (execute, "_run", self._run),
            (inference, "place_buffers", self._place_buffers),
            (inference.Program, "_make_contexts", self._make_contexts),
            (inference.Program, "go", self._go),
        ):
            monkeypatch.setattr(owner, name, self._with(getattr(owner, name), own))

    @staticmethod
    def _with(before, own):
        def called(*args, **options):
            return own(before, *args, **options)

        return called

    def check(self, zones, base):
        """Look at zones that begin at an address."""
        self.passes += 1
        for what, start, size in zones:
            memory = (ctypes.c_uint8 * size).from_address(base + start)
            assert (np.frombuffer(memory, np.uint8) == 255).all(), f"written behind {what}"
        for memory in self._arrays:
            assert (memory == 255).all(), "written behind an array of a program"

    def _array(self, array, own, count, dtype=np.uint8):
        whole = array(own, count + GUARD // np.dtype(dtype).itemsize, dtype)
        self._arrays.append(whole[count:].view(np.uint8)[SLACK:])
        self._arrays[-1][:] = 255
        return whole[:count]

    def _keep(self, keep, own, size):
        found, zones = keep(own, size), own.__dict__.setdefault("kept_zones", [])
        zones.append(Zone(f"{size} bytes that are kept", own.kept_bytes + SLACK, GUARD - SLACK))
        own.kept_bytes += GUARD
        return found

    def _place_buffers(self, _, turns):
        end, self._buffers = 0, []
        buffers = {
            number: op.numbers.get(f.KIND)
            for operations in turns
            for op in operations
            for number in op.numbers.values()
            if isinstance(number, Buffer)
        }
        for buffer, kind in buffers.items():
            buffer.offset, end = end, end + rounded(buffer.size)
            what = f"a buffer of {buffer.size} bytes, first of operation {kind}"
            self._buffers.append(Zone(what, end + SLACK, GUARD - SLACK))
            end += GUARD
        return end

    def _finished(self, finished, own, *rest):
        found = finished(own, *rest)
        own.__dict__.setdefault("buffer_zones", {})[found.table.ctypes.data] = self._buffers
        return found

    @staticmethod
    def _make_scratch(make_scratch, own):
        sizes, own._places = own._places, [size + GUARD for size in own._places]
        make_scratch(own)
        own.scratch_zones = [
            Zone(
                f"part {i} of a thread",
                own._scratch_at + int(begin) + rounded(size) + SLACK,
                GUARD - SLACK,
            )
            for i, (begin, size) in enumerate(zip(own._begins, sizes, strict=True))
        ]
        own.work_bytes += GUARD

    def _run(self, run, program, direction, kept, *rest):
        run(program, direction, kept, *rest)
        work = int(direction.context[f.C_SCRATCH]) - program._scratch_at
        self.check(program.kept_zones, kept.data_ptr())
        self.check(program.buffer_zones[direction.table.ctypes.data], work)
        for thread in range(program.threads):
            self.check(program.scratch_zones, work + thread * program._scratch_bytes)
        spare = program._spare_bytes * program.threads
        self.check([Zone("weights that are laid out", spare, GUARD)], work + program._spare_at)

    def _make_contexts(self, make_contexts, own, operations):
        own.zones, sizes = self._buffers, [0] * 7
        for op, row in zip(operations, own._details, strict=True):
            sizes[0] = max(sizes[0], int(row[jobs.WORK_BYTES]))
            row[jobs.WORK_BYTES] += GUARD
            for part, size in op.scratch.items():
                sizes[part] = max(sizes[part], size)
            op.scratch = {part: size + GUARD for part, size in op.scratch.items()}
        make_contexts(own, operations)
        begins = own._held[-1].tolist()
        for i, size in enumerate(sizes):
            start, end = begins[i] + rounded(size) + SLACK, begins[i + 1]
            own.zones.append(
                Zone(f"part {i} of a thread", own._scratch_at + start, max(0, end - start))
            )
        own.zones.append(Zone("a thread's memory", own._thread_bytes + SLACK, GUARD - SLACK))
        own._thread_bytes += GUARD
        own.work_bytes = own._thread_bytes * own.threads + own._spare_bytes * own.packers + GUARD

    def _go(self, go, own, images):
        go(own, images)
        work = int(own._contexts[0, f.C_SCRATCH]) - own._scratch_at
        for thread in range(own.threads):
            self.check(own.zones, work + thread * own._thread_bytes)
        end = own._thread_bytes * own.threads + own._spare_bytes * own.packers
        self.check([Zone("weights that are laid out", end, GUARD)], work)
