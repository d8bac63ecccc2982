"""Settings every test shares."""

import os
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    import numpy as np

    from tests.guards import Guards

# No deadline: a kernel's first call compiles it. "ci" tries the same inputs every time; "long",
# chosen by HYPOTHESIS_PROFILE=long, tries others each time, and more of them.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on CPU tensors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not HAS_CUDA:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN, 255, ... too
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that programs of chains get holds NaN and the like: what others left there changes nothing."""
    from fixedpoint_kernels.fused.memory import Memory
    from fixedpoint_kernels.scratch import Scratch

    enter, lend = Scratch.__enter__, Memory.lend

    def full(scratch: Scratch) -> "tuple[np.ndarray, int]":
        memory, address = enter(scratch)
        memory[...] = 0xFF
        return memory, address

    monkeypatch.setattr(Scratch, "__enter__", full)
    monkeypatch.setattr(Memory, "lend", lambda self, size: lend(self, size).fill_(0xFF))


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch, full_memory: None) -> "Guards":
    """Guards behind what chains write; see ``tests.guards``."""
    from tests.guards import Guards

    return Guards(monkeypatch)


@pytest.fixture
def device() -> str:
    """Where Triton kernels run: on the GPU, or in the interpreter on CPU tensors."""
    return "cuda" if HAS_CUDA else "cpu"
