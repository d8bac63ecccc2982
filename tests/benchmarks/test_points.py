"""The picture of a table of runs."""

import pytest

from benchmarks.figure import Point, draw
from benchmarks.points import main, read
from perfmodel.files import RunError

HEADER = "run,seed,test_accuracy,weight_bits,input_bits"
ROWS = [
    "float32,0,0.87,32,32",
    "lsq-4,0,0.864,4.25,4.5",
    "static-4,0,0.86,4,5",
    "static-4,1,0.862,5,6",
]


def table(folder, rows):
    path = folder / "x.csv"
    path.write_text("\n".join([HEADER, *rows, ""]))
    return path


def test_a_kind_of_run_is_a_point(tmp_path):
    float32, lsq, static = read(table(tmp_path, ROWS))
    assert (float32.name, lsq.name, static.name) == ("float32", "LSQ 4", "static 4")
    assert lsq.bits == [4.375]
    assert static.bits == [4.5, 5.5]
    assert static.accuracy == pytest.approx([86, 86.2])


def test_one_point_has_its_name_and_several_a_legend(tmp_path):
    points = read(table(tmp_path, ROWS))
    (axes,) = draw(points, "").axes
    assert [text.get_text() for text in axes.texts if text.get_text()] == [p.name for p in points]
    assert axes.get_legend() is None
    (axes,) = draw(read(table(tmp_path, [*ROWS, "static-5,0,0.87,5,5"])), "").axes
    shown = [text.get_text() for text in axes.texts if text.get_text()]
    assert shown == ["float32", "LSQ 4", "4", "5"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["static, bits"]


def test_a_family_whose_points_are_named_has_no_legend():
    points = [Point("float32", [32.0], [87.0]), Point("float32, plain", [32.0], [86.5])]
    (axes,) = draw(points, "").axes
    assert axes.get_legend() is None


def test_the_command(tmp_path):
    main([str(table(tmp_path, ROWS)), str(tmp_path / "x.png"), "--title", "Runs"])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "must have a row, has none"),
        (["static-4,0,0.86,4,"], "line 2 is cut off"),
        (["static-4,0,86,4,5"], "test_accuracy must be from 0 to 1, got 86"),
        (["static-4,0,0.86,4,many"], "input_bits must be a number, got 'many'"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, rows, message):
    with pytest.raises(RunError, match=message):
        read(table(tmp_path, rows))
    with pytest.raises(SystemExit, match=message):
        main([str(tmp_path / "x.csv"), str(tmp_path / "x.png")])
    assert not (tmp_path / "x.png").exists()
