"""The command line: what it prints, draws and refuses."""

import subprocess
import sys

import numpy as np
import pytest

from fixedpoint_kernels import few_bit
from fixedpoint_kernels.few_bit import named
from fixedpoint_kernels.few_bit.__main__ import main
from fixedpoint_kernels.few_bit.plot import draw


def figure_of(name, *bits, weight="uniform"):
    tables = [named.table_of(*named.resolve(name), b, weight) for b in bits]
    return draw(name, named.function_of(*named.resolve(name)), tables), tables


def test_the_drawn_lines_are_the_derivative_the_table_and_the_error():
    figure, (table,) = figure_of("gelu", 3)
    above, below = figure.axes
    lines = {line.get_label(): line for line in above.lines}
    x, slope = lines["f'"].get_data()
    assert slope[np.abs(x).argmin()] == pytest.approx(0.5, abs=2e-3)  # x is not quite 0
    (stairs,) = (patch for patch in above.patches if patch.get_label() == "table")
    values, edges, _ = stairs.get_data()
    assert np.array_equal(values, table.levels[table.codes])
    assert np.array_equal(edges[1:-1].astype(np.float32), table.borders)
    error = max(below.lines, key=lambda line: len(line.get_xdata())).get_ydata()
    assert np.array_equal(error, slope - table(x))
    assert x[0] < table.borders[0] < table.borders[-1] < x[-1]


@pytest.mark.parametrize(("bits", "panels"), [((2,), 1), ((1, 2, 3, 4), 4), ((1, 2, 3, 4, 8), 5)])
def test_a_panel_for_each_number_of_bits(bits, panels):
    figure, tables = figure_of("silu", *bits, weight="normal")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == panels
    for title, table in zip(titles, tables, strict=True):
        assert title.startswith(f"{table.bits} bit")
        assert f"loss {table.loss:.3g}" in title


@pytest.mark.parametrize("name", ["relu", "hardtanh", "tanh"])
def test_plot_writes_a_file_and_prints_the_loss(name, tmp_path, capsys):
    out = tmp_path / "figure.png"
    main(["plot", name, "--bits", "1", "--codes", "interval", "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("1 bit: ")
    loss = few_bit.solve(name, 1, codes="interval").loss
    assert float(printed[0].split()[-1]) == pytest.approx(loss, rel=1e-5, abs=1e-12)
    assert printed[-1] == str(out)


def test_table_prints_every_piece(capsys):
    main(["table", "gelu", "--bits", "2", "3", "--weight", "normal"])
    printed = capsys.readouterr().out
    tables = [named.table_of("gelu", ("none",), bits, "normal") for bits in (2, 3)]
    assert len(printed.splitlines()) == sum(2 + len(table.codes) for table in tables)
    for table in tables:
        for level in table.levels[table.codes]:
            assert f"{level:12.6f}\n" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plot", "gleu"], "must be one of celu, .*swish, got 'gleu'"),
        (["table", "gelu", "--bits", "9"], "bits must be 1 to 8, got bits=9"),
        (["plot", "gelu", "--codes", "parity"], "needs f' and the weight to be even"),
        (["plot", "relu", "--out", "nowhere/figure.png"], "No such file or directory"),
        (["plot", "relu", "--out", "figure.doc"], "Format 'doc' is not supported"),
    ],
)
def test_errors_take_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message) as caught:
        main(arguments)
    assert str(caught.value).startswith("python -m fixedpoint_kernels.few_bit: error: ")
    assert "\n" not in str(caught.value)


def test_only_plot_loads_matplotlib():
    code = (
        "import sys; from fixedpoint_kernels.few_bit.__main__ import main\n"
        "main(['table', 'gelu']); assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
