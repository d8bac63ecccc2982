"""C files compute what the integer reference computes, under sanitizers and warnings as errors."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.export import ExportError, c, describe, integer, packed, round_sums
from marvin.export.__main__ import main
from marvin.export.graph.bounds import first_value, value_of
from marvin.export.graph.functions import Clip, Mul, Table
from marvin.export.graph.nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Input,
    Linear,
    MaxPool,
    Network,
    Relu,
    Round,
)
from marvin.export.graph.transformers import Constant
from marvin.export.graph.views import Concat, Pad, Reshape, Slice, Transpose
from marvin.export.targets import safetensors
from marvin.export.targets.c import compiler
from marvin.export.targets.c.memory import Buffer, plan
from marvin.export.targets.c.proof import prove, report
from marvin.export.targets.c.runtime import Helpers
from marvin.export.targets.c.schedule import schedule
from marvin.export.targets.c.terms import Lines, Term, _rounded
from marvin.export.targets.c.words import Tables

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
needs_clang = pytest.mark.skipif(not shutil.which("clang"), reason="clang is not installed")
needs_arm = pytest.mark.skipif(
    not compiler.cortex_m4(), reason="arm-none-eabi-gcc or qemu-system-arm is not installed"
)


def outputs(network, x, folder, tool="gcc", **options):
    """Return what the C file computes, with vectors and without, checked by sanitizers."""
    source, path = c.write(network, "net", **options), folder / "net.c"
    c.save(network, path, **options)
    sanitize, found = compiler.SANITIZE if tool == "gcc" else (), []
    for flags in ((), (compiler.small(path),)) if "ROW(" in source.code else ((),):
        compiler.compile_program(tool, path, folder / "net", ("-O1", *sanitize, *flags))
        got = compiler.run_program([str(folder / "net")], c.input_codes(network, x))
        found.append(c.output_codes(network, source, got))
    return found


def assert_same(network, x, folder, tool="gcc", **options):
    for got in outputs(network, x, folder, tool, **options):
        assert got.keys() == network.outputs.keys()
        for label, want in integer.run_heads(network, x).items():
            torch.testing.assert_close(got[label], want, rtol=0, atol=0)


@needs_gcc
@pytest.mark.parametrize("wl", range(2, 17))
def test_every_word_length(digits, wl, tmp_path):
    _, network, x = digits(wl, max(0, wl - 4))
    assert_same(network, x, tmp_path, nibbles=wl % 2 == 0)


@needs_clang
@pytest.mark.parametrize("wl", [3, 8, 16])
def test_another_compiler(ranged, digits, wl, tmp_path):
    _, network, x = ranged(bits=(wl, wl)) if wl <= 8 else digits(wl, 12)
    assert_same(network, x, tmp_path, "clang", nibbles=True)


@needs_clang
def test_rows_that_are_in_place_take_no_helper_that_a_compiler_warns_of(tmp_path):
    layers = Linear("l", ("in",), codes(7, 6), FixedPoint(8, 5), None, FixedPoint(8, 5))
    assert_same(network_of((6,), layers), 8 * torch.randn(5, 6), tmp_path, "clang")


@needs_gcc
@pytest.mark.parametrize(("wl", "fl"), [(4, 2), (8, 5), (16, 10), (24, 16)])
def test_strides_groups_and_averages(plain, wl, fl, tmp_path):
    _, network, x = plain(wl, fl)
    assert_same(network, x, tmp_path)


@needs_gcc
@pytest.mark.parametrize("bits", [(6, 6), (8, 8), (8, 7)])
@pytest.mark.parametrize("flags", [("-O3", "-march=native"), ("-O3", "-march=x86-64")])
def test_vectors_of_this_processor(ranged, bits, flags, tmp_path):
    """Rows of bytes, of 16 bits where no instruction multiplies bytes, and what is behind their end."""
    _, network, x = ranged(bits=bits)
    assert_same_with(flags, round_sums(network, x), x, tmp_path)


def assert_same_with(flags, network, x, folder):
    if not cpu_can(flags):
        pytest.skip(f"gcc does not know {flags[1]}")
    source, path = c.write(network, "net"), folder / "net.c"
    c.save(network, path)
    compiler.compile_program("gcc", path, folder / "net", flags)
    got = compiler.run_program([str(folder / "net")], c.input_codes(network, x))
    (found,) = c.output_codes(network, source, got).values()
    torch.testing.assert_close(found, integer.run(network, x), rtol=0, atol=0)


def cpu_can(flags):
    words = ["gcc", *flags, "-x", "c", "-E", "-"]
    return not subprocess.run(
        words, input="", capture_output=True, text=True, check=False
    ).returncode


@needs_gcc
@pytest.mark.parametrize("signed", [True, False])
def test_rows_are_as_long_as_vectors(signed, tmp_path):
    """Groups, outputs that are no multiple of 4, windows shorter and longer than a vector, one after the other."""
    fmt = FixedPoint(8, 4, signed=signed)
    network = network_of(
        (8, 5, 5),
        conv("a", "in", codes(6, 8, 3, 3), padding=(1, 1)),
        Round("r", ("a",), fmt),
        conv("b", "r", codes(8, 3, 1, 1), groups=2),
        Round("s", ("b",), fmt),
        conv("d", "s", codes(12, 2, 3, 3), groups=4, stride=(2, 2)),
        Round("t", ("d",), fmt),
        Flatten("f", ("t",)),
        Linear("l", ("f",), codes(7, 48), FixedPoint(8, 5), None, FixedPoint(8, 5)),
        fmt=fmt,
    )
    assert_same(network, 8 * torch.randn(9, 8, 5, 5), tmp_path)


def of_width(width):
    """Return a network of images of a width: windows, groups, pixels in place; and samples."""
    fmt = FixedPoint(8, 4, signed=False)
    network = network_of(
        (3, 2, width),
        conv("a", "in", codes(8, 3, 3, 3), padding=(1, 1)),
        Round("r", ("a",), fmt),
        conv("b", "r", codes(8, 4, 1, 3), padding=(0, 1), groups=2),
        Round("s", ("b",), fmt),
        conv("d", "s", codes(9, 8, 1, 1), stride=(2, 1)),
        Round("t", ("d",), fmt),
        conv("e", "t", codes(2, 9, 1, 1)),
    )
    return network, 8 * torch.randn(5, 3, 2, width)


@needs_gcc
@pytest.mark.parametrize("width", [1, 5, 8, 9, 11, 16, 19])
def test_images_are_computed_some_pixels_at_a_time(width, tmp_path):
    """Widths that are no multiple of any block: the last begins within the one before."""
    network, x = of_width(width)
    assert_same(network, x, tmp_path)
    assert_same_with(("-O3", "-march=native"), network, x, tmp_path)


@needs_gcc
def test_branches(ranged, tmp_path):
    _, network, x = ranged()
    assert_same(network, x, tmp_path)
    assert_same(round_sums(network, x), x, tmp_path)


@needs_gcc
def test_weights_of_channels_are_as_short_as_in_training(channelled, tmp_path):
    model, formats, x = channelled(bits=(4, 6))
    network = describe(model, x, formats)
    assert_same(network, x, tmp_path, nibbles=True)
    code = (tmp_path / "net.c").read_text()
    assert not re.search(r"int(16|32)_t \w+_weight", code)


def network_of(shape, *ops, fmt=None):
    """Return a network of operations by hand; the first rounds what comes in."""
    fmt = fmt or FixedPoint(8, 4)
    operations = Input("x", (), shape), Round("in", ("x",), fmt), *ops
    values = {"in": first_value(operations[1], shape)}
    for op in ops:
        is_first = op.inputs == ("x",)
        inputs = [values[name] for name in op.inputs if name in values]
        values[op.name] = first_value(op, shape) if is_first else value_of(op, inputs)
    return Network(operations, values, "trained")


def conv(name, x, weight, fmt=None, bias=None, **options):
    found = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1} | options
    fmt = fmt or FixedPoint(8, 3)
    return Conv(name, (x,), weight, fmt, bias, FixedPoint(16, 5), **found)


def codes(*shape, wl=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2 ** (wl - 1)), 2 ** (wl - 1), shape, generator=generator)


@needs_gcc
@pytest.mark.parametrize(
    "options",
    [
        {"padding": (2, 1), "dilation": (2, 1), "stride": (1, 2)},
        {"padding": (0, 3), "groups": 2},
        {"groups": 4, "padding": (1, 1), "stride": (2, 2)},
        {"stride": (3, 1)},
        {"padding": (4, 4), "stride": (2, 3), "groups": 4, "dilation": (1, 3)},
    ],
    ids=str,
)
def test_windows(options, tmp_path):
    weight = codes(8 if options.get("groups") != 4 else 4, 4 // options.get("groups", 1), 3, 2)
    op = conv("c", "in", weight, bias=codes(len(weight)), **options)
    network = network_of((4, 7, 5), op)
    assert_same(network, 8 * torch.randn(4, 4, 7, 5), tmp_path)


@needs_gcc
def test_layers_of_one_by_one_read_in_place(tmp_path):
    network = network_of((4, 5, 5), conv("c", "in", codes(6, 4, 1, 1), stride=(2, 2)))
    assert_same(network, 8 * torch.randn(4, 4, 5, 5), tmp_path)
    assert "ky" not in (tmp_path / "net.c").read_text()


@needs_gcc
def test_pools_with_zeros_around_and_odd_windows(tmp_path):
    big, small = FixedPoint(9, 6), FixedPoint(4, -2)
    network = network_of(
        (3, 7, 6),
        MaxPool("m", ("in",), (3, 2), (2, 1), (1, 1), (1, 1)),
        AveragePool("a", ("m",), (3, 3), (1, 2), (1, 0), big),
        AveragePool("b", ("a",), (3, 1), (1, 1), (0, 0), small),
        MaxPool("d", ("b",), (2, 2), (1, 1), (0, 0), (1, 1)),
    )
    assert_same(network, 8 * torch.randn(20, 3, 7, 6), tmp_path)


@needs_gcc
def test_images_are_flattened_in_the_networks_order(tmp_path):
    scale = codes(2 * 3 * 4, wl=5)
    same = Linear("l", ("f",), codes(24, 24), FixedPoint(8, 5), codes(24), FixedPoint(8, 2))
    network = network_of(
        (2, 3, 4),
        conv("c", "in", codes(2, 2, 1, 1)),
        Flatten("f", ("c",)),
        Affine("n", ("f",), scale, FixedPoint(5, 3), codes(24), FixedPoint(8, 1)),
        same,
        Add("s", ("l", "n")),
        Relu("r", ("s",)),
    )
    x = 8 * torch.randn(9, 2, 3, 4)
    assert_same(network, x, tmp_path)
    flat = network_of((2, 3, 4), Flatten("f", ("in",)), replace(same, name="g"))
    assert_same(flat, x, tmp_path)
    assert_same(network_of((2, 3, 4), Relu("f", ("in",))), x, tmp_path)


@needs_gcc
def test_formats_of_every_kind(tmp_path):
    formats = [
        FixedPoint(8, 9),
        FixedPoint(5, -3),
        FixedPoint(7, 2, symmetric=True),
        FixedPoint(6, 1, signed=False),
        FixedPoint(32, 31),
        FixedPoint(2, -31),
    ]
    ops = [Round(f"r{i}", ("in",), fmt) for i, fmt in enumerate(formats)]
    for i in range(1, len(ops)):
        before = f"s{i - 1}" if i > 1 else "r0"
        ops.append(Add(f"s{i}", (before, f"r{i}")))
    network = network_of((40,), *ops, fmt=FixedPoint(16, 8))
    assert_same(network, 64 * torch.randn(20, 40), tmp_path)


@needs_gcc
@given(
    st.integers(-(2**20), 2**20),
    st.integers(-12, 40),
    st.integers(0, 200),
    st.booleans(),
)
def test_bounds_of_roundings_hold(code, shift, divisor, is_symmetric):
    """What a rounding can be is what its ends become."""
    odd = 2 * divisor + 1
    want = round(Fraction(code, odd) * Fraction(2) ** -shift)
    assert _rounded(code, shift, odd) == want
    lines = Lines("s", Tables(), Helpers("s"), [])
    fmt = FixedPoint(12, 3, is_symmetric)
    term = Term("v", 3 + shift, (-abs(code),), (abs(code),))
    got = lines.rounded(term, fmt, "r", odd)
    assert got.lows[0] <= min(max(want, fmt.min_code), fmt.max_code) <= got.highs[0]


@needs_gcc
@pytest.mark.parametrize(("wl", "fl"), [(2, 0), (8, 5), (8, -2), (16, 12), (24, 3), (32, 31)])
@pytest.mark.parametrize("signed", [True, False])
def test_floats_are_encoded_as_training_rounds_them(wl, fl, signed, tmp_path):
    fmt = FixedPoint(wl - (not signed), fl, signed=signed)
    ends = [fmt.min, fmt.max, fmt.min - fmt.lsb / 2, fmt.max + fmt.lsb / 2]
    steps = [(k + half) * fmt.lsb for k in (-3, -2, -1, 0, 1, 2, 3) for half in (0.25, 0.5, 0.75)]
    special = [0.0, -0.0, float("inf"), -float("inf"), 1e30, -1e30, 1e-40]
    x = torch.tensor([*ends, *steps, *special, *(torch.randn(60) * fmt.max).tolist()])
    network = network_of((len(x),), Relu("r", ("in",)), fmt=fmt)
    c.save(network, tmp_path / "net")
    numbers = ", ".join("NAN" if v != v else f"{v!r}F" if abs(v) < 1e35 else "HUGE_VALF" if v > 0 else "-HUGE_VALF" for v in x.tolist())  # fmt: skip
    (tmp_path / "main.c").write_text(
        f"#include <math.h>\n#include <stdio.h>\n#include <stdint.h>\n"
        f'#include "net.h"\nint main(void) {{ static const float x[] = {{{numbers}}};\n'
        "static net_input codes[NET_INPUTS]; net_encode(x, codes);\n"
        'for (int i = 0; i < NET_INPUTS; i++) printf("%lld\\n", (long long)codes[i]); return 0; }'
    )
    words = ["gcc", "-std=c99", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    words += [str(tmp_path / "main.c"), str(tmp_path / "net.c"), "-o", str(tmp_path / "main")]
    subprocess.run(words, check=True)
    done = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True)
    want = integer.encode_input(x[None], fmt)[0].tolist()
    assert [int(line) for line in done.stdout.split()] == want


@needs_arm
@pytest.mark.parametrize("wl", [4, 8, 16])
def test_a_microcontroller_computes_the_same(digits, wl, tmp_path):
    _, network, x = digits(wl, wl - 4)
    c.save(network, tmp_path / "net", nibbles=True)
    got = compiler.run_on_cortex_m4(tmp_path / "net.c", tmp_path, c.input_codes(network, x))
    want = integer.run_all(network, x)[network.output]
    assert got.tolist() == want.tolist()


@needs_gcc
def test_a_proof_names_what_differs(digits, tmp_path, monkeypatch):
    _, network, x = digits()
    c.save(network, tmp_path / "network")
    source, path = c.write(network), tmp_path / "network.c"
    (got,), who = prove(network, source, path, x)
    torch.testing.assert_close(got, integer.run(network, x), rtol=0, atol=0)
    assert "under address and undefined sanitizers" in who
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ExportError, match="no-such-compiler cannot be run"):
        prove(network, source, path, x)
    monkeypatch.setenv("CC", "gcc -DNETWORK_H")
    with pytest.raises(ExportError, match=r"must compile network\.c, got .*error"):
        prove(network, source, path, x)


@needs_gcc
def test_memory_is_read_and_written_in_bounds(digits, tmp_path):
    """The sanitizers see what is beyond a buffer."""
    _, network, x = digits()
    c.save(network, tmp_path / "net")
    code = (tmp_path / "net.c").read_text()
    (tmp_path / "net.c").write_text(re.sub(r"memory_8\[\d+\]", "memory_8[400]", code))
    compiler.compile_program(
        "gcc", tmp_path / "net.c", tmp_path / "net", ("-O1", *compiler.SANITIZE)
    )
    with pytest.raises(ExportError, match="must run, got"):
        compiler.run_program([str(tmp_path / "net")], c.input_codes(network, x))


@needs_gcc
def test_what_it_takes_is_reported(digits, tmp_path):
    _, network, _ = digits()
    c.save(network, tmp_path / "network")
    source = c.write(network)
    lines = "\n".join(report(network, source, tmp_path / "network.c"))
    weights = 54 + 324 + 60
    first, block, last = 54 * 64, 324 * 16, 60
    assert source.tables_bytes > weights
    # 64 pixels of 6 channels, and 16 of them behind the pool
    assert source.memory.peak_bytes == 64 * 6 + 16 * 6
    assert f"RAM: {source.memory.size_bytes:,} bytes" in lines
    assert f"multiply-adds: {first + block + last:,}:" in lines
    assert f"EBOPs: {first * 7 * 7 + (block + last) * 7 * 7:,}" in lines


@needs_gcc
@pytest.mark.parametrize(
    "tool", ["gcc", "cc", "/usr/bin/cc", "env gcc", "c99", "versioned-gcc-12.3"]
)
def test_every_compiler_has_its_sizes(tool, digits, tmp_path, monkeypatch):
    _, network, _ = digits()
    source = c.write(network)
    c.save(network, tmp_path / "network.c")
    code, constants = compiler.section_bytes("gcc", tmp_path / "network.c")
    assert code > 0
    assert constants >= source.tables_bytes
    if tool.startswith("versioned"):  # of a cross compiler, whose tools have its prefix
        (tmp_path / tool).symlink_to(shutil.which("gcc"))
        (tmp_path / "versioned-size").write_text("#!/bin/sh\necho .text 1000000 0\n")
        (tmp_path / "versioned-size").chmod(0o755)
        tool, code, constants = f"{tmp_path / tool} -g", 1000000, 0
    if not shutil.which(tool.split()[0]):
        pytest.skip(f"{tool} is not installed")
    monkeypatch.setenv("CC", tool)
    monkeypatch.setattr(compiler, "_ARM", "no-such-compiler")
    (tmp_path / "network.o").write_text("mine")
    text = report(network, source, tmp_path / "network.c")[0]
    assert text.endswith(f"; {code:,} of code and {constants:,} of constants ({tool}, -Os)")
    assert (tmp_path / "network.o").read_text() == "mine"


@needs_gcc
def test_tables_that_a_compiler_leaves_out_are_no_code(tmp_path):
    numbers = ", ".join(map(str, range(1000)))
    used = "static const int used[2] = {5, 7};\nint second(int i) { return used[i & 1]; }\n"
    text = (
        f"static const int table[1000] = {{{numbers}}};\nint first(void) {{ return table[3]; }}\n"
    )
    (tmp_path / "network.c").write_text(text + used)
    code, constants = compiler.section_bytes("gcc", tmp_path / "network.c")
    assert 0 < code < 200
    assert constants == 8


@needs_gcc
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("SIZE", "no-such-size", "no-such-size cannot be run"),
        ("SIZE", "false", "false must succeed, got"),
        ("SIZE", "true", "true must print a table of sizes"),
        ("CC", "no-such-compiler", "no-such-compiler cannot be run"),
        ("CC", "gcc -DNETWORK_H", "gcc must succeed, got"),
    ],
)
def test_sizes_that_are_not_known_end_no_export(
    variable, value, reason, digits, tmp_path, monkeypatch
):
    _, network, _ = digits()
    c.save(network, tmp_path / "network.c")
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(compiler, "_ARM", "no-such-compiler")
    first, second, *_ = report(network, c.write(network), tmp_path / "network.c")
    assert f", -Os) are not known: {reason}" in first
    assert second.startswith("RAM: ")


def test_words_of_four_bits_are_half_as_long(digits):
    _, network, _ = digits(4, 2)
    saved = c.write(network).tables_bytes - c.write(network, nibbles=True).tables_bytes
    assert saved == 54 // 9 * 4 + 324 // 2 + 60 // 2


@needs_gcc
@pytest.mark.parametrize("nibbles", [False, True])
def test_a_layer_that_is_called_several_times_has_its_weights_once(nibbles, tmp_path):
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 40), torch.rand(8, 40)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), layer)
    fixed = marvin.calibrate(model.eval(), [x], bits=8, weight_bits=4)
    network = describe(fixed, x)
    size = 40 * 40 // (2 if nibbles else 1)
    assert size < c.write(network, nibbles=nibbles).tables_bytes < 2 * size
    assert_same(network, x, tmp_path, nibbles=nibbles)


def test_memory_that_is_needed_together_is_apart():
    generator = np.random.default_rng(0)
    for _ in range(50):
        words = ["int8_t", "uint8_t", "int16_t", "int64_t"]
        buffers = [
            Buffer(words[generator.integers(4)], int(generator.integers(1, 50)), t, t + int(generator.integers(4)))
            for t in range(12)
        ]  # fmt: skip
        memory = plan(buffers)
        assert memory.size_bytes >= memory.peak_bytes
        for i, x in enumerate(buffers):
            bits = int(re.sub(r"\D", "", x.word))
            assert x.offset + x.count <= memory.counts[bits]
            for y in buffers[:i]:
                is_alive = x.first <= y.last and y.first <= x.last
                is_apart = x.offset >= y.offset + y.count or y.offset >= x.offset + x.count
                assert not is_alive or is_apart or bits != int(re.sub(r"\D", "", y.word))


def test_no_long_sum_is_stored(digits):
    _, network, _ = digits()
    steps = schedule(network, {"0.in"})
    assert [len(step.stored) for step in steps] == [1] * len(steps)
    assert [type(step.operations[0]).__name__ for step in steps] == [
        "Conv", "MaxPool", "Conv", "AveragePool", "Linear"
    ]  # fmt: skip


def test_what_cannot_be_written_is_named(digits, tmp_path):
    _, network, _ = digits()
    for name in ("my-net", "9", "", "näme"):
        with pytest.raises(ExportError, match="letters, digits and _, got"):
            c.save(network, tmp_path / f"{name}.c" if name else tmp_path / "a b")
    assert not list(tmp_path.iterdir())
    two = network_of((3,), Round("other", ("x",), FixedPoint(4, 2)), Add("s", ("in", "other")))
    with pytest.raises(ExportError, match="C takes an input of one format, got in <8, 4>, other"):
        c.write(two)
    fmt = FixedPoint(32, 0)
    wide = Linear("wide", ("in",), torch.full((2, 9), 2**31 - 1), fmt, None, fmt)
    with pytest.raises(ExportError, match=r"wide needs sums of 6[6-8] bits, C has 64"):
        c.write(network_of((9,), wide, fmt=fmt))


def test_an_unknown_operation_is_named(digits):
    class Strange(Relu):
        pass

    network = network_of((3,), Relu("r", ("in",)))
    operations = (*network.operations[:2], Strange("odd", ("in",)))
    values = {"in": network.values["in"], "odd": network.values["r"]}
    with pytest.raises(ExportError, match="odd: Strange cannot be written as C"):
        c.write(Network(operations, values, "trained"))


def needed(network, *names):
    """Return a network with these outputs, and what they are made of."""
    used = {*names}
    for op in reversed(network.operations):
        used |= {*op.inputs} if op.name in used else set()
    operations = tuple(op for op in network.operations if op.name in used)
    return replace(network, operations=operations, heads=tuple((name, name) for name in names))


@needs_gcc
def test_transpositions_move_nothing(tmp_path):
    """They join the layer before them, unless two orders would meet."""
    weight, short = codes(4, 3, 1, wl=6), FixedPoint(8, 3)
    layer = Conv("conv", ("in",), weight, FixedPoint(6, 3), None, short, (1,), (0,), (1,), 1)
    network = network_of(
        (3, 4),
        layer,
        Transpose("turned", ("conv",), (1, 0)),
        Round("y", ("turned",), short),
        Transpose("back", ("y",), (1, 0)),
        Add("square", ("y", "back")),
        Reshape("cube", ("y",), (2, 2, 4)),
        Transpose("cubes", ("cube",), (2, 0, 1)),
        Slice("part", ("cubes",), 0, 1, 3, 1),
    )
    steps = schedule(network, {"in"})
    first = [op.name for op in steps[0].operations]
    assert first == ["conv", "turned", "y", "back", "cube", "cubes"]
    assert "square" in [op.name for op in steps[-1].operations + steps[-2].operations]
    x = torch.randn(5, 3, 4)
    for heads in ("turned",), ("square",), ("cubes",), ("back", "y", "cubes", "part", "square"):
        assert_same(needed(network, *heads), x, tmp_path)
    counts = c.write(needed(network, "square", "part")).memory.counts
    assert counts[8] == 16 + 16  # y, and y in the other order of the square


@needs_gcc
def test_a_header_is_for_cplusplus_too(digits, tmp_path):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    _, network, _ = digits()
    c.save(network, tmp_path / "net")
    (tmp_path / "main.cpp").write_text('#include "net.h"\nint main() { return NET_INPUTS - 64; }')
    subprocess.run(
        ["g++", "-Wall", "-Werror", str(tmp_path / "main.cpp"), "-o", str(tmp_path / "main")],
        check=True,
    )
    subprocess.run([str(tmp_path / "main")], check=True)


def test_nets_of_one_pixel_or_channel(make, tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed")

    def build():
        return nn.Sequential(
            nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(9, 2)
        )

    _, network, x = make(build, (1, 3, 3))
    assert_same(network, x, tmp_path)


@needs_gcc
def test_tables_and_bounds(tmp_path):
    fmt, wide = FixedPoint(9, 6), torch.arange(-128, 128) ** 2 - 900
    eight = conv("c", "in", codes(2, 2, 1, 1) << 3, FixedPoint(16, 6))  # its codes end with zeros
    network = network_of(
        (2, 3, 3),
        Table("t", ("in",), wide.clamp(-256, 255), -128, 4, fmt, "square"),
        Clip("b", ("t",), -77, 200, 6),
        eight,
        Clip("e", ("c",), -1001, 20003, 10),
        Round("r", ("e",), FixedPoint(8, 4)),
        Table("u", ("r",), torch.arange(256) - 256, -128, 4, FixedPoint(10, 3), "shifted"),
        Add("s", ("u", "b")),
    )
    assert_same(network, 8 * torch.randn(50, 2, 3, 3), tmp_path)


@needs_gcc
@pytest.mark.parametrize("bound", [5, 4095])
def test_a_bound_may_lie_between_numbers_that_end_with_zeros(bound, tmp_path):
    """Scales and offsets share zeros, which C leaves out; what is beyond the bound becomes the bound."""
    scale, offset = torch.tensor([16, 48]), torch.tensor([0, 1024])
    network = network_of(
        (2, 3, 3),
        conv("c", "in", codes(2, 2, 1, 1)),
        Affine("a", ("c",), scale, FixedPoint(8, 6), offset, FixedPoint(32, 12)),
        Clip("b", ("a",), -bound, bound, 13),
    )
    assert_same(network, torch.randn(50, 2, 3, 3), tmp_path)


@needs_gcc
@pytest.mark.parametrize("factors", [2, 3])
def test_what_is_0_throughout_needs_no_scale(factors, tmp_path):
    """That of a far finer value beside it is longer than int32, or than int64."""
    fine = Round("m1", ("in",), FixedPoint(8, 31))
    products = [Mul(f"m{i}", (f"m{i - 1}", "m1")) for i in range(2, factors + 1)]
    network = network_of(
        (6,),
        Clip("zeros", ("in",), 0, 0, 4),
        fine,
        *products,
        Add("sum", (f"m{factors}", "zeros")),
        Concat("both", ("sum", "zeros"), 0),
        Clip("bounded", ("both",), -9, 9, 31 * factors),
    )
    assert_same(network, torch.randn(50, 6) * 2.0**-29, tmp_path)


@needs_gcc
@pytest.mark.parametrize("name", ["scale", "offset", "weight", "scale_2"])
def test_tables_are_called_apart(name, tmp_path):
    """By whatever name an activation goes that is computed with the layer before it."""
    squares = (torch.arange(-128, 128) ** 2 // 128).clamp(max=127)
    network = network_of(
        (2, 3, 3),
        conv("c", "in", codes(4, 2, 2, 2)),
        Affine("a", ("c",), codes(4), FixedPoint(8, 5), codes(4, seed=1), FixedPoint(8, 5)),
        Round("r", ("a",), FixedPoint(8, 4)),
        Table(name, ("r",), squares, -128, 4, FixedPoint(8, 4), "square"),
        Affine("b", (name,), codes(4), FixedPoint(8, 5), codes(4, seed=1), FixedPoint(8, 5)),
        Round("s", ("b",), FixedPoint(8, 4)),
        Table(f"{name}.", ("s",), squares // 2, -128, 4, FixedPoint(8, 4), "half"),
    )
    assert_same(network, 8 * torch.randn(9, 2, 3, 3), tmp_path)


@needs_gcc
@pytest.mark.parametrize("name", ["input", "run", "0_l", "0_l_weight", "shifts_are_arithmetic"])
def test_constants_are_called_apart(name, tmp_path):
    fmt = FixedPoint(8, 4)
    network = network_of(
        (6,),
        Linear("l", ("in",), codes(4, 6), FixedPoint(8, 5), None, FixedPoint(8, 5)),
        Round("r", ("l",), fmt),
    )
    values = network.values | {name: value_of(Constant(name, (), codes(4), fmt), [])}
    total = Add("sum", ("r", name))
    values["sum"] = value_of(total, [values["r"], values[name]])
    operations = *network.operations, Constant(name, (), codes(4), fmt), total
    network = replace(network, operations=operations, values=values)
    assert_same(network, 8 * torch.randn(9, 6), tmp_path)


@needs_gcc
@pytest.mark.parametrize("are_small", [(), ("net",), ("net", "other")])
def test_two_networks_are_one_translation_unit(digits, are_small, tmp_path):
    """As of CMake's UNITY_BUILD: each gives its own codes, and what other files define is left as it was."""
    _, first, x = digits()
    second = network_of(
        (1, 8, 8),
        conv("c", "in", codes(4, 1, 3, 3), padding=(1, 1)),
        Round("r", ("c",), FixedPoint(8, 4)),
        conv("d", "r", codes(4, 4, 1, 1)),
        AveragePool("a", ("d",), (3, 3), (1, 1), (0, 0), FixedPoint(9, 5)),
        Round("s", ("a",), FixedPoint(9, 3)),
    )
    both = {"net": first, "other": second}
    for name, network in both.items():
        c.save(network, tmp_path / name)
    included = "\n".join(f'#include "{name}.c"' for name in both)
    ends = "\n".join(f"#ifdef {macro}\n#error\n#endif" for macro in ("ROW", "PIXELS"))
    for name, network in both.items():
        (tmp_path / "unity.c").write_text(f"{included}\n{ends}\n")
        flags = [f"-D{small.upper()}_SMALL" for small in are_small]
        flags = ("-O1", *compiler.SANITIZE, *flags, f"-D{name.upper()}_MAIN")
        compiler.compile_program("gcc", tmp_path / "unity.c", tmp_path / "unity", flags)
        got = compiler.run_program([str(tmp_path / "unity")], c.input_codes(network, x))
        found = c.output_codes(network, c.write(network, name), got)
        for label, want in integer.run_heads(network, x).items():
            torch.testing.assert_close(found[label], want, rtol=0, atol=0)


@needs_gcc
def test_all_names_begin_with_that_of_the_file(digits, tmp_path):
    c.save(digits()[1], tmp_path / "net.c")
    for flags in ([], ["-DNET_SMALL"]):
        words = ["gcc", "-c", *flags, str(tmp_path / "net.c"), "-o", str(tmp_path / "net.o")]
        subprocess.run(words, check=True)
        words = ["nm", str(tmp_path / "net.o")]
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        names = [line.split()[-1] for line in listed.splitlines()]
        assert len(names) > 9
        assert [name for name in names if not re.match("net_|_?mem(cpy|set)", name)] == []
    code = (tmp_path / "net.c").read_text()
    types = re.findall(r"^typedef \w+ (\w+)", code, flags=re.MULTILINE)
    assert len(types) > 9
    assert [name for name in types if not name.startswith("net_")] == []


def average(name, x, kernel):
    return AveragePool(name, (x,), kernel, (1,) * len(kernel), (0,) * len(kernel), FixedPoint(9, 5))


@needs_gcc
def test_channels_are_put_together_and_taken_apart(tmp_path):
    network = network_of(
        (4, 5, 3),
        conv("a", "in", codes(6, 4, 3, 3), padding=(1, 1)),
        conv("b", "in", codes(2, 4, 1, 1), FixedPoint(8, 5)),
        Concat("ab", ("a", "in", "b"), 0),
        Round("r", ("ab",), FixedPoint(8, 1)),
        Slice("s", ("r",), 0, 1, 12, 2),
        Slice("t", ("s",), 2, 1, 3),
        conv("d", "t", codes(3, 6, 2, 1)),
        Concat("rows", ("d", "d"), 1),
    )
    assert_same(network, 8 * torch.randn(9, 4, 5, 3), tmp_path)


@needs_gcc
def test_zeros_are_put_around_values(tmp_path):
    """In any order of memory, on any side; what is above 0 has zeros around it too."""
    network = network_of(
        (4, 5, 3),
        conv("a", "in", codes(6, 4, 3, 3), padding=(1, 1)),
        Pad("image", ("a",), (0, 2, 0), (0, 0, 1)),
        Round("r", ("image",), FixedPoint(8, 1)),
        conv("b", "r", codes(2, 6, 3, 2)),
        Pad("channels", ("b",), (3, 0, 0), (1, 0, 0)),
        Clip("above", ("in",), 3, 40, 4),
        Pad("all", ("above",), (1, 1, 1), (0, 2, 0)),
        Transpose("turned", ("all",), (1, 2, 0)),
        Pad("one", ("turned",), (0, 0, 2), (0, 0, 0)),
    )
    network = replace(network, heads=(("channels", "channels"), ("one", "one")))
    x = 8 * torch.randn(9, 4, 5, 3)
    assert_same(network, x, tmp_path)
    found = integer.run_all(network, x)
    assert found["above"].min() == 3
    assert found["one"].min() == network.values["all"].low == 0


@needs_gcc
def test_values_put_together_are_long_before_they_are_multiplied(tmp_path):
    """Codes of 8 and 16 bits, at the binary point of another value, have more than 32."""
    network = network_of(
        (4, 5, 3),
        conv("b", "in", codes(2, 4, 1, 1), FixedPoint(8, 26)),
        Round("r", ("in",), FixedPoint(16, 8)),
        Concat("ab", ("in", "r", "b"), 0),
    )
    x = 8 * torch.randn(9, 4, 5, 3)
    assert_same(network, x, tmp_path)
    assert "int64_t" in c.write(network, "net").code
    short = network_of(
        (4, 5, 3),
        conv("b", "in", codes(2, 4, 1, 1), FixedPoint(8, 5)),
        Concat("ab", ("in", "b"), 0),
    )
    assert_same(short, x, tmp_path)
    assert "int64_t" not in c.write(short, "net").code


@needs_gcc
def test_outputs_have_the_words_of_their_longest_channel(tmp_path):
    """Scales that all end with zeros are multiplied last."""
    weight = codes(4, 6)
    weight[0] = 0
    four = torch.full((4,), 2**24)
    network = network_of(
        (6,),
        Linear("l", ("in",), weight, FixedPoint(8, 5), None, FixedPoint(8, 5)),
        Affine("a", ("l",), four, FixedPoint(30, 20), 0 * four, FixedPoint(8, 0)),
    )
    assert_same(network, 8 * torch.randn(9, 6), tmp_path)


@needs_gcc
def test_channels_are_shuffled(tmp_path):
    network = network_of(
        (6, 4, 3),
        Reshape("g", ("in",), (2, 3, 4, 3)),
        Transpose("t", ("g",), (1, 0, 2, 3)),
        Reshape("c", ("t",), (6, 4, 3)),
        conv("d", "c", codes(6, 1, 3, 3), groups=6, padding=(1, 1)),
        Add("s", ("d", "c")),
        Relu("u", ("s",)),
    )
    assert_same(network, 8 * torch.randn(9, 6, 4, 3), tmp_path)


@needs_gcc
def test_sequences(tmp_path):
    sides = {"stride": (2,), "padding": (2,), "dilation": (1,), "groups": 1}
    network = network_of(
        (3, 11),
        conv("c", "in", codes(4, 3, 3), bias=codes(4), **sides),
        Round("r", ("c",), FixedPoint(8, 3)),
        MaxPool("m", ("r",), (2,), (1,), (1,), (1,)),
        average("a", "m", (3,)),
        conv("d", "a", codes(4, 1, 2), **sides | {"groups": 4, "stride": (1,)}),
        Flatten("f", ("d",)),
        Linear("l", ("f",), codes(3, 36), FixedPoint(8, 6), None, FixedPoint(8, 6)),
    )
    assert_same(network, 8 * torch.randn(9, 3, 11), tmp_path)


@needs_gcc
def test_tokens_of_an_image(tmp_path):
    network = network_of(
        (3, 4, 4),
        conv("c", "in", codes(5, 3, 2, 2), stride=(2, 2)),
        Reshape("f", ("c",), (5, 4)),
        Transpose("t", ("f",), (1, 0)),
        Slice("s", ("t",), 0, 1, 4),
        Relu("r", ("s",)),
        Transpose("u", ("r",), (1, 0)),
        Concat("o", ("u", "f"), 1),
    )
    assert_same(network, 8 * torch.randn(9, 3, 4, 4), tmp_path)


@needs_gcc
def test_products_of_values(tmp_path):
    """One number for each channel, for each pixel, for each row; and squares."""
    network = network_of(
        (4, 5, 3),
        conv("c", "in", codes(4, 4, 3, 3), padding=(1, 1)),
        Round("r", ("c",), FixedPoint(8, 1)),
        AveragePool("a", ("r",), (5, 3), (5, 3), (0, 0), FixedPoint(9, 5)),
        conv("gate", "a", codes(4, 4, 1, 1)),
        Clip("g", ("gate",), 0, 900, 8),
        Mul("scaled", ("r", "g")),
        Round("s", ("scaled",), FixedPoint(9, 2)),
        conv("d", "s", codes(1, 4, 1, 1)),
        Mul("product", ("d", "r")),
        Round("by pixel", ("product",), FixedPoint(8, 1)),
        conv("column", "r", codes(4, 4, 1, 3)),
        MaxPool("m", ("column",), (5, 1), (5, 1), (0, 0), (1, 1)),
        Mul("by channel", ("m", "by pixel")),
        Slice("row", ("r",), 1, 2, 3),
        Mul("by row", ("row", "by channel")),
        Round("short", ("by row",), FixedPoint(8, 2)),
        Mul("square", ("short", "short")),
    )
    assert_same(network, 2 * torch.randn(9, 4, 5, 3), tmp_path)


@needs_gcc
def test_channels_are_multiplied_behind_another_shape(tmp_path):
    network = network_of(
        (6, 4, 3),
        conv("c", "in", codes(6, 6, 1, 1)),
        Reshape("v", ("c",), (2, 12, 3)),
        Affine("n", ("v",), codes(2), FixedPoint(8, 4), codes(2), FixedPoint(8, 1)),
        Slice("s", ("in",), 0, 0, 2),
        AveragePool("a", ("s",), (4, 3), (4, 3), (0, 0), FixedPoint(9, 5)),
        Mul("m", ("n", "a")),
        Relu("r", ("v",)),
        Mul("o", ("a", "r")),
        Add("both", ("m", "o")),
    )
    assert_same(network, 2 * torch.randn(9, 6, 4, 3), tmp_path)


class Gated(nn.Module):
    """Squeeze and excitation, a linear layer over positions, two outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.mix, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(16)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        tokens = self.norm(self.mix(x.flatten(2).transpose(1, 2)))
        return {"class": self.last(tokens.mean(1)), "tokens": tokens}


@needs_gcc
def test_gates_positions_and_outputs_of_a_model(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(8, 3, 4, 4)
    network = describe(marvin.calibrate(Gated().eval(), [x]), x)
    assert_same(network, x, tmp_path)
    assert_same(round_sums(network, x), x, tmp_path)


def with_heads(network, *heads):
    return replace(network, heads=heads)


@needs_gcc
def test_several_outputs(tmp_path):
    """Of different lengths of words; one is used again, one is there twice, one is the input's codes."""
    network = network_of(
        (3, 4, 4),
        conv("c", "in", codes(5, 3, 3, 3)),
        Relu("r", ("c",)),
        Round("o", ("r",), FixedPoint(4, 1)),
        Flatten("f", ("o",)),
        Flatten("flat", ("in",)),
        Linear("l", ("f",), codes(2, 20), FixedPoint(8, 5), codes(2), FixedPoint(8, 2)),
    )
    heads = ("image", "o"), ("0.a", "l"), ("0_a", "l"), ("x", "flat"), ("sum", "r")
    network = with_heads(network, *heads)
    assert_same(network, 4 * torch.randn(9, 3, 4, 4), tmp_path)
    header = (tmp_path / "net.h").read_text()
    for line in (
        "#define NET_OUTPUTS_IMAGE 20",
        "#define NET_OUTPUT_IMAGE_FL (1)",
        "typedef uint8_t net_output_image;",
        "net_output_0_a_0 *output_0_a_0, net_output_0_a_1 *output_0_a_1",
    ):
        assert line in header
    one = with_heads(network, ("logits", "l"))
    assert_same(one, 4 * torch.randn(9, 3, 4, 4), tmp_path)
    header = (tmp_path / "net.h").read_text()
    assert "#define NET_OUTPUTS_LOGITS 2\n#define NET_OUTPUT_LOGITS_FL (" in header


@needs_gcc
def test_outputs_whose_names_differ_in_case_alone_have_macros_of_their_own(tmp_path):
    """And those of which one is called as another would be, to tell it from a third."""
    network = network_of(
        (6,),
        Linear("a", ("in",), codes(2, 6), FixedPoint(8, 5), None, FixedPoint(8, 5)),
        Linear("b", ("in",), codes(3, 6), FixedPoint(8, 4), None, FixedPoint(8, 5)),
        Relu("c", ("a",)),
    )
    for labels in (("logits", "Logits", "x"), ("0.a", "0_a", "0_A_0")):
        network = with_heads(network, *zip(labels, "abc", strict=True))
        assert_same(network, 8 * torch.randn(9, 6), tmp_path)
        header = (tmp_path / "net.h").read_text()
        macros = re.findall(r"#define (NET_OUTPUT\w+) (.*)", header)
        assert len(dict(macros)) == len(macros) == 6
        counts = [value for name, value in macros if name.startswith("NET_OUTPUTS_")]
        assert counts == ["2", "3", "2"]


@needs_gcc
@pytest.mark.parametrize(
    "name",
    [
        '**// __attribute__((constructor)) static void f(void){ extern int puts(const char*); puts("f"); } /**//',
        "*/ int f; /*",
        "/* /",
        "a\\\n#error a\r\n#error b",
        "??/\n#error c",
        "\u2028\u00e9\0",
        "",
    ],
)
def test_no_name_of_a_file_gets_out_of_a_comment(name, tmp_path):
    network = network_of(
        (6,),
        Linear("a", ("in",), codes(4, 6), FixedPoint(8, 5), None, FixedPoint(8, 5)),
        Slice("b", ("a",), 0, 0, 4, 2),
        Relu("c", ("b",)),
    )
    content = packed.to_bytes(packed.pack_network(network))
    tensors, metadata = safetensors.read(content)
    fields = json.loads(metadata["marvin"])
    for i, op in enumerate(fields["network"]["operations"]):
        op["name"] = f"{i}{name}"
        op["inputs"] = [
            f"{['x', 'in', 'a', 'b', 'c'].index(source)}{name}" for source in op["inputs"]
        ]
    fields["network"]["heads"] = [[f"0{name}", f"4{name}"], [f"1{name}", f"2{name}"]]
    fields["sha256"] = packed._digest(tensors, fields)
    written = safetensors.write(tensors, {"marvin": json.dumps(fields)})
    loaded = packed.from_bytes(written).network
    assert_same(loaded, 8 * torch.randn(9, 6), tmp_path)
    for text in ((tmp_path / "net.c").read_text(), (tmp_path / "net.h").read_text()):
        assert re.fullmatch(r"[ -~\n]*", text)
        assert "#error" not in re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


@needs_gcc
def test_the_rounded_input_is_a_network_too(tmp_path):
    assert_same(network_of((3, 4, 4)), 8 * torch.randn(9, 3, 4, 4), tmp_path)


@needs_gcc
def test_the_command_writes_runs_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiler, "_ARM", "no-such-compiler")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.0, init_wl=4, init_fl=2)
    marvin.quantize_activations(model, optimizer)
    model(torch.randn(4, 12))
    torch.save(marvin.freeze(model), tmp_path / "net.pt")
    words = [str(tmp_path / "net.pt"), "--to", "c", "--nibbles", "--shape", "12", "--verify"]
    main(words)
    text = capsys.readouterr().out
    folder = tmp_path / "net-export/c"
    assert {"network.c", "network.h"} <= {file.name for file in folder.iterdir()}
    assert "multiply-adds: 120: 96 of 4 x 4 bits, 24 of 4 x 3 bits\nEBOPs: 1,080\n" in text
    assert "not run for Cortex-M: no arm-none-eabi-gcc or qemu-system-arm" in text
    assert "all 192 outputs of 64 samples equal the integers" in text
    assert "((w[k] & 15) ^ 8) - 8" in (folder / "network.c").read_text()
    facts = json.loads((folder / "export.json").read_text())
    assert facts["notes"][-1] == "EBOPs: 1,080"
