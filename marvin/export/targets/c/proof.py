"""What is known of a C file: what it takes, and that it computes the same."""

import tempfile
from pathlib import Path

import numpy as np
from torch import Tensor

from marvin.export.errors import ExportError
from marvin.export.execute.arithmetic import Codes
from marvin.export.graph.nodes import Network
from marvin.export.targets.c import Source, costs, input_codes, output_codes
from marvin.export.targets.c.compiler import (
    CORTEX_M4,
    SANITIZE,
    compile_program,
    compilers,
    cortex_m4,
    has_sanitizers,
    run_on_cortex_m4,
    run_program,
    section_bytes,
    small,
)

__all__ = ["prove", "report"]

_SANITIZED = 10**9  # multiply-adds, some seconds
_EMULATED = 10**8
_NO_BOARD = "no arm-none-eabi-gcc or qemu-system-arm"


def report(network: Network, source: Source, path: Path) -> list[str]:
    """Return flash, RAM and multiply-adds in words.

    Args:
        network: From ``describe``.
        source: From ``write``.
        path: Of the C file.
    """
    memory = source.memory
    lines = [f"flash: {source.tables_bytes:,} bytes of weights and constants as written"]
    for compiler, what in ((CORTEX_M4, "Cortex-M4"), *((c, c) for c in compilers()[:1])):
        if compiler != CORTEX_M4 or cortex_m4():
            try:
                code, constants = section_bytes(compiler, path)
                lines[0] += f"; {code:,} of code and {constants:,} of constants ({what}, -Os)"
            except ExportError as error:  # what is not known of a file is no reason to have none
                lines[0] += f"; bytes of code ({what}, -Os) are not known: {error}"
    lines.append(
        f"RAM: {memory.size_bytes:,} bytes, of which {memory.peak_bytes:,} are needed at one time; "
        f"input {source.input.count:,} {source.input.word}, "
        + ", ".join(f"{label} {y.count:,} {y.word}" for label, y in source.outputs.items())
    )
    rows = costs(network)
    each = ", ".join(f"{r.madds:,} of {r.weight_bits} x {r.input_bits} bits" for r in rows)
    lines.append(f"multiply-adds: {sum(r.madds for r in rows):,}: {each}")
    lines.append(f"EBOPs: {sum(r.ebops for r in rows):,}")
    return lines


def prove(network: Network, source: Source, path: Path, x: Tensor) -> tuple[list[Tensor], str]:
    """Compile a C file by every compiler that is there, run it, and compare all outputs.

    Args:
        network: From ``describe``.
        source: From ``write``.
        path: Of the C file.
        x: Samples, shape ``(n, *network.input.shape)``, float32.

    Returns:
        What it computes, by its outputs, and what was run, in words.

    Raises:
        ExportError: There is no compiler, one warns, or a program computes something else.
    """
    found = compilers()
    if not found:
        raise ExportError("a C compiler must be there to verify: install gcc or clang, or set CC")
    codes = input_codes(network, x)
    each = max(1, sum(row.madds for row in costs(network)))
    first: Codes | None = None
    said = []
    missing = "" if cortex_m4() else f"; not run for Cortex-M: {_NO_BOARD}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for compiler in found:
            compile_program(compiler, path, folder / "plain", ("-O3",))
            got = run_program([str(folder / "plain")], codes)
            first = got if first is None else first
            said.append((compiler, got))
        if has_sanitizers(found[0], folder):
            some = codes[: max(1, _SANITIZED // each)]
            for flags, what in (((), "with vectors"), ((small(path),), "without")):
                compile_program(found[0], path, folder / "sanitized", ("-O1", *SANITIZE, *flags))
                got = run_program([str(folder / "sanitized")], some)
                said.append((f"{found[0]} {what} under address and undefined sanitizers", got))
        else:
            missing += f"; not under sanitizers: {found[0]} has none"
        if cortex_m4():
            some = codes[: max(1, _EMULATED // each)]
            said.append(("an emulated Cortex-M4", run_on_cortex_m4(path, folder, some)))
    assert first is not None
    for who, got in said:
        if not np.array_equal(got, first[: len(got)]):
            raise ExportError(f"the outputs of {who} differ from those of {found[0]}")
    whole = ", ".join(who for who, got in said if len(got) == len(codes))
    parts = "".join(f"; {who}: {len(got)} samples" for who, got in said if len(got) < len(codes))
    found = list(output_codes(network, source, first).values())
    return found, f"{whole}{parts}{missing}"
