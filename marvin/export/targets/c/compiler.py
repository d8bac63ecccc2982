"""Compiling and running what was written, to compare it."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes

__all__ = [
    "CORTEX_M4",
    "SANITIZE",
    "STRICT",
    "compile_program",
    "compilers",
    "cortex_m4",
    "has_sanitizers",
    "run_on_cortex_m4",
    "run_program",
    "section_bytes",
    "small",
]

CORTEX_M4 = "arm-none-eabi-gcc -mcpu=cortex-m4 -mthumb"
_ARM = CORTEX_M4.split()[0]
_EMULATOR = (
    *("qemu-system-arm", "-machine", "mps2-an386", "-nographic", "-monitor", "none"),
    *("-serial", "none", "-semihosting-config", "enable=on,target=native"),
)
# where a Cortex-M finds its stack and its first instruction; the board has RAM up to this address
_VECTORS = """\
extern void _start(void);
__attribute__((section(".vectors"), used)) static const struct {
    void *stack;
    void (*start)(void);
} vectors = {(void *)0x20400000, _start};
"""
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
# what stands before the name of a compiler stands before that of its tools, too; a version does not
_COMPILER = re.compile(r"(.*-)?(?:gcc|clang|cc|c99)(?:-[\d.]+)?(?:\.exe)?")
# names of ELF, and of Mach-O, in what `size -A` prints
_SECTION = re.compile(r"^[._]*(text\b|rodata\b|const\b|literal)\S*\s+(\d+)", re.MULTILINE)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compilers() -> list[str]:
    """Return the compilers that are there: ``$CC`` if it is set, else gcc and clang, or cc."""
    if own := os.environ.get("CC"):
        return [own]
    found = [name for name in ("gcc", "clang") if shutil.which(name)]
    return found or [name for name in ("cc",) if shutil.which(name)]


def compile_program(
    compiler: str, source: Path, program: Path, flags: Sequence[str] = ("-O2",)
) -> None:
    """Compile a C file of this package, with its ``main``, warnings as errors.

    Args:
        compiler: Of C99, such as ``gcc``; words behind it are flags.
        source: The C file.
        program: To write.
        flags: More flags.

    Raises:
        ExportError: It does not compile; says what the compiler says.
    """
    main = f"-D{source.stem.upper()}_MAIN"
    words = [*compiler.split(), *STRICT, *flags, main, str(source), "-o", str(program)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ExportError(f"{compiler} cannot be run: {error}") from error
    if done.returncode:
        raise ExportError(f"{compiler} must compile {source.name}, got {done.stderr.strip():.500}")


def run_program(program: Sequence[str], codes: Codes) -> Codes:
    """Return what a compiled program makes of samples.

    Args:
        program: The command.
        codes: Of samples, from ``input_codes``.

    Returns:
        int64, shape ``(samples, outputs)``.

    Raises:
        ExportError: It fails; says how.
    """
    lines = (" ".join(map(str, sample)) for sample in codes.tolist())
    text = "\n".join(lines) + "\n"
    done = subprocess.run(program, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExportError(f"the C program must run, got {done.returncode}: {done.stderr:.500}")
    rows = [[int(code) for code in line.split()] for line in done.stdout.splitlines()]
    return np.array(rows, dtype=np.int64).reshape(len(codes), -1)


def has_sanitizers(compiler: str, folder: Path) -> bool:
    """Say whether a compiler can link programs with sanitizers; it writes to ``folder``."""
    (folder / "nothing.c").write_text("int main(void) { return 0; }\n")
    words = [*compiler.split(), *SANITIZE, str(folder / "nothing.c"), "-o", str(folder / "nothing")]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def cortex_m4() -> bool:
    """Say whether there are a compiler and an emulator of this microcontroller."""
    return all(shutil.which(name) for name in (_ARM, "arm-none-eabi-size", _EMULATOR[0]))


def run_on_cortex_m4(source: Path, folder: Path, codes: Codes) -> Codes:
    """Compile a C file for a Cortex-M4 and run it on an emulated board: see ``run_program``.

    Args:
        source: The C file.
        folder: For what is compiled.
        codes: Of samples, from ``input_codes``.

    Raises:
        ExportError: It does not compile, or it fails.
    """
    vectors, program = folder / "vectors.c", folder / "cortex_m4.elf"
    vectors.write_text(_VECTORS)
    flags = (str(vectors), "-Os", "--specs=rdimon.specs", "-Wl,--section-start=.vectors=0")
    compile_program(CORTEX_M4, source, program, flags)
    return run_program([*_EMULATOR, "-kernel", str(program)], codes)


def small(source: Path) -> str:
    """Return the flag with which a C file takes less memory, and no vectors."""
    return f"-D{source.stem.upper()}_SMALL"


def section_bytes(compiler: str, source: Path) -> tuple[int, int]:
    """Return the bytes of code, and of constants, that a compiler makes for little memory, without ``main``.

    Of constants these may be fewer than the file has: a compiler leaves out what it finds to be of no effect.

    Raises:
        ExportError: It does not compile, or no ``size`` reads what was compiled; says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder, "network.o"))
        flags = *STRICT, "-Os", small(source)
        _said([*compiler.split(), *flags, "-c", str(source), "-o", target])
        reasons = []
        for tool in _size_tools(compiler):
            try:
                table = _said([*tool.split(), "-A", target])
            except ExportError as error:
                reasons.append(str(error))
                continue
            found = [(name, int(size)) for name, size in _SECTION.findall(table)]
            code = [size for name, size in found if name.startswith("text")]
            if code:
                return sum(code), sum(size for _, size in found) - sum(code)
            reasons.append(f"{tool} must print a table of sizes")
    raise ExportError(f"{'; '.join(reasons)}: install binutils, or set SIZE")


def _size_tools(compiler: str) -> list[str]:
    """Return the commands that may print the sizes of what a compiler makes, the best first."""
    if own := os.environ.get("SIZE"):
        return [own]
    found = []
    for word in compiler.split():  # others may come before: env gcc, ccache gcc
        if match := _COMPILER.fullmatch(Path(word).name):
            name = (match[1] or "") + "size"
            found += [str(Path(word).with_name(name)), name]
            break
    return list(dict.fromkeys([*found, "size"]))


def _said(words: Sequence[str]) -> str:
    """Return what a command prints.

    Raises:
        ExportError: It cannot be run, or fails.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ExportError(f"{words[0]} cannot be run: {error}") from error
    if done.returncode:
        raise ExportError(f"{words[0]} must succeed, got {' '.join(done.stderr.split()):.300}")
    return done.stdout
