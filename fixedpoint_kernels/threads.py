"""When a CPU kernel may use several threads."""

import multiprocessing

import torch

_PARALLEL_FROM = 50_000  # elements; below, a parallel region costs more than it saves


def is_parallel(elements: int) -> bool:
    """Say whether a kernel over ``elements`` should run in parallel.

    A forked child (a ``DataLoader`` worker) must not: GNU OpenMP kills it there.
    """
    return (
        elements >= _PARALLEL_FROM
        and torch.get_num_threads() > 1
        and multiprocessing.parent_process() is None
    )
