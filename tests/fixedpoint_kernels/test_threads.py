import os
import subprocess
import sys

import pytest

from fixedpoint_kernels.few_bit import cpu as few_bit
from fixedpoint_kernels.histogram import cpu as histogram
from fixedpoint_kernels.packing import cpu as packing
from fixedpoint_kernels.rounding import cpu as rounding

FORK = """
import multiprocessing, sys, torch
from fixedpoint_kernels import FixedPoint, quantize

torch.set_num_threads(2)
x = torch.ones(60_000)
quantize(x, FixedPoint(8, 4), seed=1)  # starts OpenMP's threads
child = multiprocessing.get_context("fork").Process(target=quantize, args=(x, FixedPoint(8, 4)))
child.start()
child.join(60)
sys.exit(child.exitcode)
"""

NUMBERS = """
import torch
from fixedpoint_kernels import FixedPoint, quantize, quantize_many

for threads in 1, 3:
    torch.set_num_threads(threads)
    quantize(torch.ones(60_000), FixedPoint(8, 4))
    quantize_many([torch.ones(60_000)], [FixedPoint(8, 4)])
    assert torch.get_num_threads() == threads, torch.get_num_threads()
"""


@pytest.mark.parametrize("module", [few_bit, histogram, packing, rounding])
def test_serial_and_parallel_kernels_share_no_cache(module):
    kernels = [value for value in vars(module).values() if hasattr(value, "py_func")]
    cached = [kernel.py_func for kernel in kernels if kernel.stats.cache_path]
    places = {(function.__qualname__, function.__code__.co_firstlineno) for function in cached}
    assert len(places) == len(cached) >= 4


@pytest.mark.parametrize("script", [FORK, NUMBERS])
def test_in_a_new_process(script):
    """A forked child runs the serial kernel; torch's number of threads is left alone."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, timeout=120, check=False
    )
    assert done.returncode == 0
