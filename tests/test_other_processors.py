"""What the documentation calls equal to the bit on every processor is so on another one, as far as
PyTorch, oneDNN, numpy and Numba let a processor be played."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EQUAL = {
    "quantize",
    "quantize_block",
    "encode and pack",
    "histogram_candidates",
    "few-bit gradients",
    "DIVISION",
    "first output, simulated",
    "first output, integer",
}
NUMPY = "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
PROCESSORS = {
    "two threads": {"OMP_NUM_THREADS": "2"},
    "PyTorch without vectors": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "numpy without AVX-512": {"NPY_DISABLE_CPU_FEATURES": NUMPY},
    "Numba for AVX2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"},
}


def computed(variables):
    done = subprocess.run(
        [sys.executable, "-m", "tests.other_processor"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def own():
    return computed({})


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_and_first_outputs_have_the_same_bits(processor, own):
    found = computed(PROCESSORS[processor])
    assert set(own) == set(found) > EQUAL
    assert {name for name in EQUAL if found[name] != own[name]} == set()
