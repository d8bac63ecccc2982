"""Processes measure together: the loss budget decides as one process with all samples would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "marvin" / "data" / "ddp_budget.py"
sys.path.insert(0, str(SCRIPT.parent))

import ddp_budget  # noqa: E402  pyright: ignore[reportMissingImports]  it is a script


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes_decide_as_one(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT), str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for kind in (ddp_budget.Chain, ddp_budget.Branches):
        first, second = (torch.load(tmp_path / f"{kind.__name__}{i}.pt") for i in range(2))
        torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
        assert repr(first["optimizer"]) == repr(second["optimizer"])
        _, alone = ddp_budget.train(0, 1, lambda model: model, kind)
        rows = first["optimizer"]["marvin"]["trace"]
        formats = "wl", "fl", "input_wl", "input_fl", "input_signed"
        for row, expected in zip(rows, alone.trace, strict=True):
            assert [row[f] for f in formats] == [getattr(expected, f) for f in formats]
            for name in ("weight_gradient", "input_gradient", "saturated"):
                # sums of float32 in another order; the weights differ by that too
                assert row[name] == pytest.approx(getattr(expected, name), rel=1e-3, nan_ok=True)
