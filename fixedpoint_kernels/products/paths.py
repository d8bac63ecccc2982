"""Which instructions products use, on a CPU and elsewhere, and why.

``FIXEDPOINT_KERNELS_PRODUCTS`` in the environment, or ``force``, names a path; a path that this
processor cannot take is refused by name.
"""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

VARIABLE = "FIXEDPOINT_KERNELS_PRODUCTS"
_INSTRUCTIONS = {  # LLVM's names of what each path needs, and one function that it must lower
    "amx": (
        ("amx-int8", "amx-tile", "avx512f", "avx512bw"),
        "declare void @llvm.x86.tdpbusd(i8, i8, i8)\n"
        "define void @f() { call void @llvm.x86.tdpbusd(i8 0, i8 1, i8 2) ret void }",
    ),
    "avx512_vnni": (("avx512f", "avx512bw", "avx512vnni"), 512),
    "avx_vnni": (("avx2", "avxvnni"), 256),
    "avx2": (
        ("avx2",),
        "declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)\n"
        "define <8 x i32> @f(<16 x i16> %a) "
        "{ %b = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %a, <16 x i16> %a) "
        "ret <8 x i32> %b }",
    ),
}
OWN = tuple(_INSTRUCTIONS)
PATHS = (*OWN, "stock", "float")
FORCED = "it is forced"
_forced: str | None = None


class Path(NamedTuple):
    """How a product is computed, and why not by what comes before it in ``PATHS``."""

    name: str
    reason: str

    @property
    def is_own(self) -> bool:
        """Whether a kernel of this package computes it; the others are many times slower."""
        return self.name in OWN


def path(device: "torch.device | None" = None) -> Path:
    """Say which path products take, and why.

    Args:
        device: Where the codes are; None: on a CPU.

    Returns:
        Its name: ``"triton"`` on a GPU, ``"reference"`` on other devices, which is plain PyTorch,
        and on a CPU one of ``"amx"``, ``"avx512_vnni"``, ``"avx_vnni"``, ``"avx2"`` (Numba),
        ``"stock"`` (PyTorch's own int8 product) and ``"float"`` (float32 products of codes, added up where
        float32 is exact), and the reason in words.

    Raises:
        ValueError: The forced path is not a path, or this processor cannot take it.
    """
    if device is None or device.type == "cpu":
        return chosen(None)
    if device.type == "cuda":
        return Path("triton", "the codes are on a GPU")
    return Path("reference", f"there is no kernel for the device {device.type}")


@contextmanager
def force(name: str | None) -> Iterator[None]:
    """Take one path for all products on CPUs while the context is open; None: the best.

    Raises:
        ValueError: There is no such path, or this processor cannot take it.
    """
    global _forced
    if name is not None:
        _check(name)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def chosen(name: str | None) -> Path:
    """See ``path``; ``name`` forces one."""
    name = name or _forced or os.environ.get(VARIABLE) or None
    if name is None:
        return _best()
    _check(name)
    return Path(name, FORCED)


@cache
def unavailable() -> dict[str, str]:
    """Return the paths that this process cannot take, each with the reason."""
    reasons = {name: _why_not(name) for name in OWN}
    if not has_vnni():
        reasons["stock"] = "PyTorch's int8 product is exact on processors with VNNI alone"
    return {name: reason for name, reason in reasons.items() if reason}


@cache
def _best() -> Path:
    missing = unavailable()
    name = next(name for name in PATHS if name not in missing)
    before = PATHS[: PATHS.index(name)]
    reasons = "; ".join(f"no {other}: {missing[other]}" for other in before)
    return Path(name, reasons or "the processor has it")


def _check(name: str) -> None:
    if name not in PATHS:
        raise ValueError(f"the path of products must be one of {PATHS}, got {name!r}")
    if name in unavailable():
        raise ValueError(f"path {name!r} is not possible here: {unavailable()[name]}")


@cache
def _host_features() -> frozenset[str]:
    """Return LLVM's names of what this processor has; none where it is no x86."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    from llvmlite import binding  # takes a while to import

    return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)


def has_vnni() -> bool:
    """Say whether this processor adds four products at once; without, other packages may add pairs in 16 bits."""
    return bool(_host_features() & {"avx512vnni", "avxvnni", "amx-int8"})


def _why_not(name: str) -> str:
    """Return why this process cannot take one of our own paths, or nothing."""
    needed, function = _INSTRUCTIONS[name]
    missing = [feature for feature in needed if feature not in _host_features()]
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    from numba import config

    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return "NUMBA_DISABLE_JIT is set"
    # a name of the user's for the processor: LLVM aborts the process where it cannot lower
    is_told = config.CPU_NAME or config.CPU_FEATURES is not None or not config.ENABLE_AVX  # type: ignore[attr-defined]
    text = function if isinstance(function, str) else _dot(function)
    if is_told and not _lowers(text):
        return f"LLVM is told of another processor ({_told()})"
    return "" if name != "amx" or _may_use_tiles() else "the system grants no tiles"


def _told() -> str:
    names = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _dot(bits: int) -> str:
    """Return LLVM's text of a function of one ``vpdpbusd``."""
    words = f"<{bits // 32} x i32>"
    numbers = f"{words} %a, {words} %a, {words} %a"
    name = f"@llvm.x86.avx512.vpdpbusd.{bits}"
    return (
        f"declare {words} {name}({words}, {words}, {words})\n"
        f"define {words} @f({words} %a) {{ %b = call {words} {name}({numbers}) ret {words} %b }}"
    )


def _lowers(text: str) -> bool:
    """Say whether LLVM makes code of ``text`` for the processor that Numba is told of."""
    from numba.core import codegen, config

    script = (
        "import sys\n"
        "from llvmlite import binding\n"
        "binding.initialize_native_target()\n"
        "binding.initialize_native_asmprinter()\n"
        "module = binding.parse_assembly(sys.argv[1])\n"
        "target = binding.Target.from_default_triple()\n"
        "machine = target.create_target_machine(cpu=sys.argv[2], features=sys.argv[3])\n"
        "machine.emit_object(module)\n"
    )
    from llvmlite import binding

    name = config.CPU_NAME or binding.get_host_cpu_name()  # type: ignore[attr-defined]
    features = config.CPU_FEATURES  # type: ignore[attr-defined]
    features = codegen.get_host_cpu_features() if features is None else features
    command = [
        sys.executable,
        "-c",
        script,
        text,
        name,
        features,
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for tiles; the kernel gives them to a process that asks."""
    if sys.platform != "linux":
        return False
    arch_prctl, request, data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request, data) == 0
