"""Waiting for each other, for threads that are in one parallel loop: without asking the system.

A parallel loop lets its threads sleep at its end; to wake one takes 40 microseconds. Threads that
meet here spin, and let others run after a while. That needs every thread to be there: ``all_come``
finds out, before anything is done. Places are addresses of int64; all begin at 0.
"""

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from fixedpoint_kernels.llvm.tiles import call
from fixedpoint_kernels.llvm.vectors import I64, intrinsic

__all__ = ["CAN_MEET", "SIZE", "all_come", "have_met", "wait"]

CAN_MEET = hasattr(os, "sched_yield")
"""Whether this system can let others run."""

SIZE = 24
"""How many int64 a barrier has, zeros."""

_COME, _GONE = 1, 2  # what all decide
_SPINS = 4096  # before others may run
_PATIENCE = 2000 * _SPINS  # before those who came do without the rest: about a tenth of a second


def _place(builder: Any, address: Any, number: int) -> Any:
    """Return a pointer to a place; each has a line of the cache to itself."""
    return builder.inttoptr(builder.add(address, I64(64 * number)), I64.as_pointer())


def _spin(builder: Any, is_done: Any, most: int = 0) -> None:
    """Repeat until ``is_done()``; or, with ``most``, until so many times are over."""
    count = cgutils.alloca_once_value(builder, I64(0))
    again, rest, end = (builder.append_basic_block(name) for name in ("again", "rest", "met"))
    builder.branch(again)
    builder.position_at_end(again)
    builder.cbranch(is_done(), end, rest)
    builder.position_at_end(rest)
    call(builder, "x86.sse2.pause", ir.VoidType())
    spins = builder.add(builder.load(count), I64(1))
    builder.store(spins, count)
    is_long = builder.icmp_signed("==", builder.and_(spins, I64(_SPINS - 1)), I64(0))
    with builder.if_then(is_long, likely=False):
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
    if most:
        builder.cbranch(builder.icmp_signed("<", spins, I64(most)), again, end)
    else:
        builder.branch(again)
    builder.position_at_end(end)


@intrinsic
def wait(_context, address, goal):
    """Wait until threads have come here ``goal`` times in all, at 64 bytes behind ``address``."""

    def codegen(context, builder, _signature, arguments):
        place = _place(builder, arguments[0], 1)
        builder.atomic_rmw("add", place, I64(1), "seq_cst")
        _spin(
            builder,
            lambda: builder.icmp_signed(
                ">=", builder.load_atomic(place, "acquire", 8), arguments[1]
            ),
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def all_come(_context, address, threads):
    """Wait until all threads are here; return 1, or 0 to each if some do not come.

    Where a loop has fewer threads than turns, one thread would wait for its own next turn.
    """

    def codegen(_context, builder, _signature, arguments):
        address, threads = arguments
        present, decided = _place(builder, address, 0), _place(builder, address, 2)
        before = builder.atomic_rmw("add", present, I64(1), "seq_cst")
        is_last = builder.icmp_signed("==", builder.add(before, I64(1)), threads)

        def is_done() -> Any:
            known = builder.load_atomic(decided, "acquire", 8)
            return builder.or_(is_last, builder.icmp_signed("!=", known, I64(0)))

        _spin(builder, is_done, _PATIENCE)
        own = builder.select(is_last, I64(_COME), I64(_GONE))
        builder.cmpxchg(decided, I64(0), own, "seq_cst")  # the first one decides
        found = builder.load_atomic(decided, "acquire", 8)
        return builder.zext(builder.icmp_signed("==", found, I64(_COME)), I64)

    return types.int64(types.int64, types.int64), codegen


def have_met(barrier: np.ndarray) -> bool:
    """Say whether all threads came, after the loop."""
    return int(barrier[16]) == _COME
