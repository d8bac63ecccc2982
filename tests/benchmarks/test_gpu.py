"""The GPU kit on a CPU: every section at a tiny size, kernels in Triton's interpreter."""

import contextlib
import dataclasses
import json
import math
import re
import types
import warnings
from pathlib import Path

import pytest
import torch

import fixedpoint_kernels
from benchmarks.gpu import __main__ as kit
from benchmarks.gpu import bandwidth, clock, correctness, report
from benchmarks.gpu.kernels import JOBS
from benchmarks.gpu.sizes import Sizes

TINY = Sizes((70,), 2048, 1, 1, 1, 8, 4, (9, 32))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # the second need not be there
SLOW = {"celu", "elu", "hardswish", "swish", "relu6", "leaky_relu", "hardtanh", "hardshrink"}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def job_of(name):
    return next(job for job in JOBS if job.name == name)


def some_jobs(group):
    return [job for job in JOBS if job.group == group and job.name.split(" ")[0] not in SLOW]


def test_every_kernel_has_a_job():
    root = Path(fixedpoint_kernels.__file__).parent
    found = {
        (path.parent.name, name)
        for path in root.rglob("gpu.py")
        for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert found == {(job.group, job.kernel) for job in JOBS}
    assert len({job.name for job in JOBS}) == len(JOBS)


@pytest.mark.parametrize("group", sorted({job.group for job in JOBS}))
def test_kernels_are_checked(group):
    rows = correctness.rows(DEVICE, TINY, some_jobs(group))
    assert [row["wrong"] for row in rows] == [""] * len(rows)


@pytest.mark.parametrize(
    ("name", "output"), [("quantize, nearest", 0), ("encode, 3 bits", 0), ("silu and its code", 1)]
)
def test_a_wrong_bit_is_seen(name, output):
    job = job_of(name)

    def make(n, device):
        work = job.make(n, device)

        def run(code, inputs, outputs):
            found = work.run(code, inputs, outputs)
            if code is correctness.implementation(job, "gpu"):
                found[output][5] += 1
            return found

        return work._replace(run=run)

    (row,) = correctness.rows(DEVICE, TINY, [dataclasses.replace(job, make=make)])
    assert f"70 elements, output {output}: 1 differ, the first at 5" in row["wrong"]


def test_what_is_not_written_is_seen():
    """Even where memory happens to hold the right numbers, of an earlier call say."""
    job = job_of("quantize, nearest, to int16")
    gpu = correctness.implementation(job, "gpu")

    def make(n, device):
        work = job.make(n, device)
        work.run(gpu, work.inputs, work.outputs)
        return work._replace(run=lambda code, x, y: y if code is gpu else work.run(code, x, y))

    (row,) = correctness.rows(DEVICE, TINY, [dataclasses.replace(job, make=make)])
    assert "differ" in row["wrong"]


def test_differences():
    zero, nan = torch.zeros(2), torch.full((2,), math.nan)
    assert correctness.difference(nan, nan.clone()) == ""
    assert "2 differ" in correctness.difference(zero, -zero)
    assert "2 differ" in correctness.difference(zero, nan)
    assert (
        correctness.difference(zero, zero.double()) == "torch.float32 (2,), not torch.float64 (2,)"
    )
    one = torch.ones(1)
    above = torch.nextafter(one, 2 * one)
    assert correctness.units_between(above, one).item() == 1
    least = torch.tensor([1e-45])
    assert correctness.units_between(least, -least).item() == 2


def test_bandwidth():
    jobs = [job_of("quantize, nearest"), job_of("pack, 3 bits"), job_of("encode, 2 bits")]
    rows = bandwidth.rows(DEVICE, TINY, jobs)
    assert [row["kernel"] for row in rows] == [
        "quantize, nearest",
        "pack, 3 bits",
    ]  # 2 bits: untimed
    assert [row["bytes an element"] for row in rows] == [8.0, 1 + 3 / 8]
    assert all(row["share of a copy's bandwidth"] > 0 for row in rows)


@pytest.mark.parametrize("name", kit.SECTIONS)
def test_sections(name):
    rows = kit.SECTIONS[name][0](DEVICE, TINY)
    assert len({len(row) for row in rows}) == 1
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert numbers
    assert all(0 < value < math.inf for value in numbers)
    assert len(report._table(rows)) == 2 + len(rows)


@pytest.fixture
def small_kit(monkeypatch):
    """Two kernels, and two sections that say that they ran."""
    jobs = [job_of("quantize, nearest"), job_of("encode, 1 bits")]
    monkeypatch.setattr(kit, "JOBS", jobs)
    monkeypatch.setattr(
        kit.correctness,
        "rows",
        lambda device, sizes: [{"group": j.group, "kernel": j.name, "wrong": ""} for j in jobs],
    )
    sections = {
        "optimizer": (lambda device, sizes: [{"step": "a", "us": 1.5}], ("rounding",)),
        "models": (lambda device, sizes: [{"way": "b", "ms": None}], ("few_bit",)),
    }
    monkeypatch.setattr(kit, "SECTIONS", sections)


def test_record(small_kit, tmp_path):
    record = kit.run(DEVICE, TINY, tmp_path / "gpu.json", 8.0)
    assert kit.problems(record) == []
    assert json.loads((tmp_path / "gpu.json").read_text()) == record
    text = (tmp_path / "gpu.md").read_text()
    assert "None of 2: bit for bit" in text
    assert "| a | 1.5 |" in text
    assert "| b |  |" in text
    assert text.count("| quantize, nearest |") == 1


def test_figures_of_wrong_kernels_are_refused(small_kit, tmp_path, monkeypatch, capsys):
    rows = [
        {"group": "rounding", "kernel": "quantize, nearest", "wrong": "70 elements: 3 differ"},
        {"group": "few_bit", "kernel": "encode, 1 bits", "wrong": ""},
    ]
    monkeypatch.setattr(kit.correctness, "rows", lambda device, sizes: rows)
    sections = kit.run(DEVICE, TINY, tmp_path / "gpu.json", 8.0)["sections"]
    assert [row["kernel"] for row in sections["bandwidth"]["rows"]] == ["encode, 1 bits"]
    assert sections["optimizer"] == {"refused": "not as the reference: quantize, nearest"}
    assert "rows" in sections["models"]
    errors = capsys.readouterr().err
    assert "quantize, nearest: 70 elements: 3 differ" in errors
    assert "optimizer refused" in errors


def test_without_a_check_there_are_no_figures(small_kit, tmp_path, monkeypatch):
    monkeypatch.setattr(kit.correctness, "rows", _fail)
    sections = kit.run(DEVICE, TINY, tmp_path / "gpu.json", 8.0)["sections"]
    assert sections["correctness"] == {"failed": "RuntimeError: out of memory"}
    assert sections["bandwidth"]["rows"] == []
    assert "refused" in sections["optimizer"]
    assert "refused" in sections["models"]


def _fail(device, sizes):
    raise RuntimeError("out of memory")


def test_a_failure_stops_no_other_section(small_kit, tmp_path, monkeypatch):
    monkeypatch.setitem(kit.SECTIONS, "optimizer", (_fail, ()))
    record = kit.run(DEVICE, TINY, tmp_path / "gpu.json", 8.0)
    assert kit.problems(record) == ["optimizer failed: RuntimeError: out of memory"]
    assert "rows" in record["sections"]["models"]
    assert "failed: RuntimeError: out of memory" in (tmp_path / "gpu.md").read_text()


def test_no_section_begins_too_late(small_kit, tmp_path):
    sections = kit.run(DEVICE, TINY, tmp_path / "gpu.json", 0.0)["sections"]
    assert sections["models"] == {"failed": "no time was left of 0 minutes"}


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SystemExit, match="needs a GPU that PyTorch can use through CUDA, found none"
    ):
        kit.main([])


def test_the_clock_gives_each_the_same_turns():
    calls = []
    contestants = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = clock.compare(contestants, CPU, turns=3, calls=2)
    assert all(0 < value < math.inf for value in seconds.values())
    assert calls.count("a") == calls.count("b") == 1 + 3 * (1 + 2)
    assert clock.host_waits(lambda: None, CPU) is None
    assert clock.launches(lambda: None, CPU) is None
    assert clock.peak_bytes(lambda: None, CPU) is None


class Event:
    """A CUDA event of a device that takes 2 s a call."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)  # ms


def test_the_clock_of_a_device(monkeypatch):
    def call():
        Event.now += 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert clock.compare({"a": call}, CUDA, turns=3, calls=4) == {"a": 2.0}


def test_waits_are_counted_and_the_mode_is_put_back(monkeypatch):
    modes = []

    def call():
        warnings.warn("something else", stacklevel=1)
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert clock.host_waits(call, CUDA) == 3
    with pytest.raises(RuntimeError, match="out of memory"):
        clock.host_waits(lambda: _fail(CUDA, TINY), CUDA)
    assert modes == ["warn", "default"] * 2


def test_launches_are_those_of_both_interfaces(monkeypatch):
    names = {"cudaLaunchKernel": 5, "cuLaunchKernelEx": 2, "cudaMemcpyAsync": 9, "aten::add": 7}

    class Profiler(contextlib.nullcontext):
        def __init__(self, activities, acc_events):
            super().__init__(self)

        def key_averages(self):
            return [types.SimpleNamespace(key=k, count=n) for k, n in names.items()]

    monkeypatch.setattr(clock, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert clock.launches(lambda: None, CUDA) == 7
    names.clear()
    assert clock.launches(lambda: None, CUDA) is None  # where the profiler may not look


def test_the_peak_is_above_what_was_there(monkeypatch):
    for name, value in {"memory_allocated": 100, "max_memory_allocated": 250}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    assert clock.peak_bytes(lambda: None, CUDA) == 150


@pytest.mark.gpu
def test_waits_launches_and_memory_of_a_gpu():
    x, device = torch.ones(1000, device="cuda"), torch.device("cuda")
    assert clock.host_waits(lambda: x.sum().item(), device) == 1
    assert clock.host_waits(lambda: x.sum(), device) == 0
    assert clock.launches(lambda: x + 1, device) in (1, None)
    assert clock.peak_bytes(lambda: torch.empty(10**6, device="cuda"), device) >= 4 * 10**6
