import ast
import gc
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from numba.core.errors import TypingError
from numba.extending import overload

import fixedpoint_kernels
from fixedpoint_kernels import threads
from fixedpoint_kernels.few_bit import cpu as few_bit
from fixedpoint_kernels.histogram import cpu as histogram
from fixedpoint_kernels.llvm import calls
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

FORK_BY_HAND = """
import os, sys, torch
from fixedpoint_kernels import FixedPoint, quantize, quantize_many

torch.set_num_threads(2)
x, fmt = torch.linspace(-9, 9, 60_000), FixedPoint(8, 4)
expected = quantize(x, fmt)  # starts OpenMP's threads
child = os.fork()
if not child:
    found = quantize(x, fmt), quantize_many([x, x], [fmt, fmt])[0]
    # by NumPy: torch's own operators would wait for threads that the child has not
    same = [(y.numpy() == expected.numpy()).all() for y in found]
    os._exit(0 if all(same) else 7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

EVERY_KERNEL = """
import sys, warnings, numpy as np, torch

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fixedpoint_kernels as fk
    from fixedpoint_kernels import division, few_bit, observer
    from fixedpoint_kernels.few_bit import operators, partition

    assert fk.__file__.startswith(sys.argv[1]), fk.__file__
    torch.set_num_threads(2)
    x, fmt = torch.linspace(-9, 9, 60_000), fk.FixedPoint(8, 4)
    for part in x[:99], x:
        y = fk.quantize(part, fmt, rounding="nearest")
        assert torch.equal(y, (part * 16).round().clamp(-128, 127) / 16)
        assert torch.equal(fk.quantize_many([part], [fmt], rounding="nearest")[0], y)
        codes = fk.encode(part, fmt, rounding="nearest")
        assert torch.equal(fk.unpack(fk.pack(codes, 8), 8, codes.shape), codes)
        assert torch.equal(observer.round_and_observe(part, fmt)[0], y)
        observer.mask_and_observe(part, torch.ones_like(part, dtype=torch.uint8), clip=True)
        assert fk.histogram_candidates(part, [fmt], 10)[0].sum() == part.numel()
        key = operators.register(few_bit.solve("tanh", 2, grid=40))
        operators.decode(part, operators.encode(part, key), key, torch.float32)
        division.decompress(division.compress(part.view(-1, 3)))
    fk.histogram_candidates(x, [fmt], 10, rounding="expected")
    few_bit.solve("relu", 1, codes="interval", grid=40)
kept = [w for w in caught if "NUMBA_CACHE_DIR" in str(w.message)]
assert len(kept) == 1, list(map(str, caught))
"""

ONE_KERNEL = """
import sys, torch, fixedpoint_kernels as fk

assert fk.__file__.startswith(sys.argv[1]), fk.__file__
assert fk.pack(torch.tensor([1, 2]), 4).tolist() == [33]
"""

HOMELESS = """
import os, pwd, sys, warnings, torch

def nobody(uid):
    raise KeyError(uid)

pwd.getpwuid = nobody
for name in "HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR":
    del os.environ[name]
os.chdir(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fixedpoint_kernels import pack

    assert pack(torch.tensor([1, 2]), 4).tolist() == [33]
assert ["NUMBA_CACHE_DIR" in str(w.message) for w in caught] == [True], caught
"""

FULL_DISK = """
import resource, signal, warnings, torch

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fixedpoint_kernels import pack

    assert pack(torch.tensor([1, 2]), 4).tolist() == [33]
    assert pack(torch.tensor([1, 2]).int(), 4).tolist() == [33]
assert ["NUMBA_CACHE_DIR" in str(w.message) for w in caught] == [True], caught
"""

TWO_TYPES = """
import torch
from fixedpoint_kernels import pack

for dtype in torch.int16, torch.int32, torch.int64:
    assert pack(torch.tensor([1, 2, 3, 4], dtype=dtype), 4).tolist() == [33, 67], dtype
"""

NOISE = """
import pathlib, sys, torch
from fixedpoint_kernels import FixedPoint, quantize

drawn = quantize(torch.full((99,), 0.5), FixedPoint(8, 0), seed=1)
pathlib.Path(sys.argv[1]).write_bytes(drawn.numpy().tobytes())
"""

IN_A_ZIP = """
import sys
sys.path.insert(0, sys.argv[2])
"""

SPAWNED = """
import concurrent.futures, multiprocessing, os
from fixedpoint_kernels.threads import is_parallel

os.environ["OMP_NUM_THREADS"] = "2"
with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
    assert pool.submit(is_parallel, 60_000).result()
"""

WITHOUT_OPENMP = """
import threading, torch
from fixedpoint_kernels import FixedPoint, quantize
from fixedpoint_kernels.threads import is_parallel

torch.set_num_threads(2)
x, fmt, found = torch.linspace(-9, 9, 400_000), FixedPoint(8, 4), []
wanted = quantize(x, fmt, seed=1)

def call():
    found.append(all(torch.equal(quantize(x, fmt, seed=1), wanted) for _ in range(40)))

threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
assert is_parallel(400_000)
call()
for thread in threads:
    thread.join()
assert found == [True] * 4, found
"""

INNER = """
from numba import njit
from fixedpoint_kernels.llvm.calls import inner

@inner
def doubled(x):
    return 2 * x

@inner
def tripled(x):
    return 3 * x

@njit
def kernel(x):
    return doubled(x) + 100 * tripled(x)

for _ in range(2):  # before a kernel is compiled, and after
    try:
        doubled(3)
    except TypeError as error:
        assert "doubled must be called by a kernel" in str(error), error
    else:
        raise AssertionError("Python called it")
    assert kernel(3) == 906
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


def run(script, *arguments, first="", **environment):
    path = os.pathsep.join(map(str, filter(None, [first, *sys.path])))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=first or None,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "script",
    [FORK, FORK_BY_HAND, SPAWNED, NUMBERS],
    ids=["multiprocessing", "os.fork", "spawn", "numbers"],
)
def test_in_a_new_process(script):
    """A forked child runs the serial kernel; torch's number of threads is left alone."""
    run(script)


def test_threads_of_python_may_meet_where_numba_finds_no_openmp():
    run(WITHOUT_OPENMP, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2")


def test_what_only_kernels_call_refuses_python():
    run(INNER)  # in a process of its own, which a call without a way in would end


@pytest.fixture
def package(tmp_path):
    """Return a folder with a copy of the package that holds nothing compiled."""
    source = Path(fixedpoint_kernels.__file__).parent
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, tmp_path / "fixedpoint_kernels", ignore=skipped)
    return tmp_path


@pytest.fixture
def without_places(package):
    """Return the settings under which nothing can be kept, and take them back afterwards.

    No folder can be made where a file is: this stops the superuser, too, as modes do not.
    """
    folders = [package, *package.rglob("*/")]
    for folder in folders:
        (folder / "__pycache__").touch()
        folder.chmod(0o555)
    nowhere = str(package / "__pycache__" / "none")
    yield dict.fromkeys(["HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"], nowhere)
    for folder in folders:
        folder.chmod(0o755)


@pytest.mark.slow
def test_every_kernel_runs_where_nothing_can_be_written(package, without_places):
    run(EVERY_KERNEL, str(package), first=package, **without_places)


def test_a_place_may_be_given(package, without_places, tmp_path_factory):
    place = tmp_path_factory.mktemp("compiled")
    run(
        ONE_KERNEL, str(package), first=package, **{**without_places, "NUMBA_CACHE_DIR": str(place)}
    )
    assert any(place.rglob("*.nbc"))


def test_no_folder_is_named_like_the_home_that_is_not_there(package, without_places):
    """As with ``docker run --user 1234``, or a scheduler that passes no variables."""
    place = package / "cwd"
    place.mkdir()
    run(HOMELESS, str(place), first=package, **without_places)
    assert list(place.iterdir()) == []


def test_a_full_disk_ends_no_call(package):
    run(FULL_DISK, first=package, NUMBA_CACHE_DIR=str(package / "compiled"))


@pytest.mark.parametrize("damage", ["exchanged", "cut", "empty", "one bit"])
def test_a_kept_file_that_is_not_what_was_kept_is_compiled_anew(package, damage):
    place = package / "compiled"
    kept = {"NUMBA_CACHE_DIR": str(place)}
    run(TWO_TYPES, first=package, **kept)
    files = sorted(place.rglob("*.nbc"))
    held = [file.read_bytes() for file in files]
    assert len(files) == 3
    for i, file in enumerate(files):
        middle = len(held[i]) // 2
        other = held[i][:middle] + bytes([held[i][middle] ^ 1]) + held[i][middle + 1 :]
        damaged = {"exchanged": held[i - 1], "cut": held[i][:-9], "empty": b"", "one bit": other}
        file.write_bytes(damaged[damage])
    run(TWO_TYPES, first=package, **kept)
    again = sorted(place.rglob("*"))
    assert [file for file in again if file.is_file()] == files
    run(TWO_TYPES, first=package, **kept)
    assert all(file.read_bytes() != b"" for file in files)


def test_a_kernel_that_is_kept_is_not_compiled_again(package):
    kept = {"NUMBA_CACHE_DIR": str(package / "compiled")}
    run(TWO_TYPES, first=package, **kept)
    when = {file: file.stat().st_mtime_ns for file in package.rglob("*.nbc")}
    run(TWO_TYPES, first=package, **kept)
    assert {file: file.stat().st_mtime_ns for file in package.rglob("*.nbc")} == when


def test_a_kernel_is_compiled_anew_where_a_file_it_is_made_of_changed(package, tmp_path):
    """Also where size and time of the file are what they were, as installers leave them."""
    kept = {"NUMBA_CACHE_DIR": str(package / "compiled"), "PYTHONDONTWRITEBYTECODE": "1"}
    drawn, other = tmp_path / "drawn", package / "fixedpoint_kernels/philox/cpu.py"
    run(NOISE, str(drawn), first=package, **kept)
    before, text, when = drawn.read_bytes(), other.read_text(), other.stat()
    assert "range(10)" in text
    other.write_text(text.replace("range(10)", "range(11)"))
    os.utime(other, ns=(when.st_atime_ns, when.st_mtime_ns))
    run(NOISE, str(drawn), first=package, **kept)
    assert drawn.read_bytes() != before


def test_kernels_of_another_zip_file_are_compiled_anew(package, tmp_path):
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "compiled"), "PYTHONDONTWRITEBYTECODE": "1"}
    folder, drawn = package / "fixedpoint_kernels", tmp_path / "drawn"
    other, found = folder / "philox/cpu.py", []
    for rounds in "range(10)", "range(11)":
        other.write_text(other.read_text().replace("range(10)", rounds))
        archive = shutil.make_archive(str(tmp_path / "zipped"), "zip", package, folder.name)
        run(IN_A_ZIP + NOISE, str(drawn), archive, **kept)
        found.append(drawn.read_bytes())
    assert found[0] != found[1]


def test_whatever_is_kept_compiled_may_find_no_place():
    """``cache=True`` alone would end the first call there: ``threads.compiled`` is for that."""
    for path in Path(fixedpoint_kernels.__file__).parent.rglob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        names = {keyword.arg for call in calls for keyword in call.keywords}
        assert "cache" not in names, path


LOGGED = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stdout)
import fixedpoint_kernels as fk

x = torch.linspace(-1, 1, 99)
fk.quantize(x, fk.FixedPoint(8, 6))
fk.quantize_many([x], [fk.FixedPoint(8, 6)])
"""


def test_the_log_says_once_that_kernels_are_compiled(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", LOGGED],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    text = "fixedpoint_kernels: compiling kernels for this processor, once"
    assert said[0].startswith(text)
    assert said[0].count("\n") == 1
    assert said[1] == ""


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["compiled", "called"])
def test_no_garbage_is_collected_while_a_kernel_is_compiled(way, fails, collects, monkeypatch):
    seen = []

    def marked():
        raise AssertionError("compiled code alone calls it")

    @overload(marked)
    def _compiled_with_it():
        seen.append(gc.isenabled())
        return None if fails else lambda: 1

    def kernel():
        return marked()

    monkeypatch.setattr(calls, "_compiled", {})
    monkeypatch.setattr(threads, "kept", lambda made, _function: made)
    monkeypatch.setattr(calls, "kept", threads.kept)
    make = threads.compiled() if way == "compiled" else calls.called
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(TypingError) if fails else nullcontext():
            made = make(kernel)
            if way == "compiled":
                assert made() == 1
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert seen
    assert not any(seen)
