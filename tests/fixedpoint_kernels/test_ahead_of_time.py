"""Every Triton kernel compiles for GPUs that are not here, and keeps its values in registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ahead_of_time.py"
pytestmark = pytest.mark.slow


def compile_all(target, *options, cache):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)  # conftest sets it: interpreted, nothing compiles
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-W", "error", str(SCRIPT), target, *options]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_compiles_without_stack(target, pytestconfig):
    done = compile_all(target, cache=pytestconfig.cache.mkdir("triton"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_spilled_registers_and_kernels_without_a_case_are_seen(pytestconfig):
    done = compile_all("sm_90", "--max-registers=16", cache=pytestconfig.cache.mkdir("triton"))
    assert done.returncode == 1
    assert re.search(r"missing=.*'_pack_kernel'.*spilled=.*'_compress_kernel'", done.stdout), done
