"""Memory that is kept from call to call."""

import threading

import numpy as np
import pytest
import torch

from fixedpoint_kernels import products, scratch
from fixedpoint_kernels.scratch import Scratch


@pytest.fixture(autouse=True)
def nothing_spare(monkeypatch):
    monkeypatch.setattr(scratch, "_spare", [])


@pytest.mark.parametrize("size", [1, 63, 64, 100_001])
def test_as_many_bytes_as_were_asked_for_at_a_multiple_of_64(size):
    with Scratch(size) as (memory, address):
        assert (memory.dtype, memory.shape) == (np.uint8, (size,))
        assert address == memory.ctypes.data
        assert address % 64 == 0
        memory[...] = 1


def test_the_next_call_that_needs_no_more_gets_the_same():
    with Scratch(1000) as (_, first):
        pass
    for size in (1000, 10, 1000):
        with Scratch(size) as (_, address):
            assert address == first


def test_more_is_new_and_then_kept():
    with Scratch(10):
        pass
    with Scratch(5000) as (memory, larger):
        assert memory.size == 5000
    with Scratch(10) as (_, address):
        assert address == larger


def test_two_at_a_time_share_nothing():
    with Scratch(100):
        pass  # that is spare
    with Scratch(100) as (one, _), Scratch(100) as (two, _):
        assert not np.shares_memory(one, two)


def test_an_error_gives_it_back():
    first = 0
    try:
        with Scratch(100) as (_, first):
            raise KeyError
    except KeyError:
        pass
    with Scratch(100) as (_, address):
        assert address == first


def test_much_memory_and_that_of_many_calls_is_not_kept(monkeypatch):
    monkeypatch.setattr(scratch, "_MOST", 1000)
    with Scratch(2000):
        pass
    assert not scratch._spare
    held = [Scratch(100) for _ in range(12)]
    for own in held:
        own.__enter__()
    for own in held:
        own.__exit__()
    assert len(scratch._spare) == 10


def test_python_threads_that_multiply_at_once_have_their_own():
    """A product of many calls at once is what it is alone."""
    torch.manual_seed(0)
    pairs = []
    for n in range(1, 5):
        x = torch.randint(0, 256, (n, 16, 9, 9)).to(torch.uint8)
        weight = torch.randint(-127, 128, (16, 16, 3, 3)).to(torch.int8)
        pairs.append((x, weight, products.convolve(x, weight, padding=1)))
    wrong = []

    def multiply(x, weight, wanted):
        for _ in range(50):
            if not torch.equal(products.convolve(x, weight, padding=1), wanted):
                wrong.append(len(x))

    threads = [threading.Thread(target=multiply, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
