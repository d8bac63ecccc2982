"""The command that measures operations."""

import gc
import json
import re
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
from torch import nn

from benchmarks import run
from benchmarks.timing import Case


def case(name, elements=4, **calls):
    return Case(name, elements, calls)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Return a function that runs the command on cases, and gives the file that it writes."""
    path = tmp_path / "made" / "x.json"
    words = ["--op", "quantize", "--json", str(path), "--seconds", "0.001", "--malloc", "default"]
    monkeypatch.setattr(run, "_require_green", lambda tests: None)
    monkeypatch.setattr(sys, "argv", ["run", *words])

    def measure(cases):
        op = SimpleNamespace(TESTS="", cases=cases)
        monkeypatch.setattr(run.importlib, "import_module", lambda name: op)
        run.main()

    return measure, path


def test_a_row_lacks_what_only_others_have(measure, capsys):
    command, path = measure
    command(lambda: iter([case("a", ours=int, theirs=int), case("b", 8, ours=int)]))
    head, rule, first, second, _, about = capsys.readouterr().out.splitlines()
    assert head == "| quantize | ours / theirs | ours | theirs | runs |"
    assert rule == "| --- | ---: | ---: | ---: | ---: |"
    assert first.startswith("| a | ")
    assert "|  |" not in first
    assert second.startswith("| b |  | ")
    assert second.count("|  |") == 2
    assert "torch" in about
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["a", "b"]
    assert rows[0]["median_s"].keys() == {"ours", "theirs"}
    assert rows[1]["elements"] == 8


def test_rows_that_were_measured_stay_where_a_later_one_breaks(measure, capsys):
    def cases():
        yield case("a", ours=int)
        raise MemoryError

    command, path = measure
    with pytest.raises(MemoryError):
        command(cases)
    assert "\n| a | " in capsys.readouterr().out
    assert [row["case"] for row in json.loads(path.read_text())["rows"]] == ["a"]


def test_networks_of_earlier_rows_are_gone(measure):
    made = []

    def cases():
        for name in "abcd":
            network = nn.Linear(1, 1)
            network.register_buffer("own", None)
            vars(network)["itself"] = network
            made.append(weakref.ref(network))
            assert sum(own() is not None for own in made) <= 2
            yield case(name, ours=network.eval)

    gc.disable()  # as where few objects are many bytes
    try:
        measure[0](cases)
    finally:
        gc.enable()
    assert len(made) == 4


def test_an_operation_without_rows_says_so(measure):
    command, path = measure
    with pytest.raises(SystemExit, match="quantize found nothing to measure"):
        command(lambda: iter(()))
    assert not path.exists()


def test_make_bench_runs_every_operation():
    makefile = (run.ROOT / "Makefile").read_text().replace("$$", "$")
    listed = re.search(r"for op in \$\((ls .*?)\); do", makefile)
    assert listed is not None
    found = subprocess.run(listed[1], shell=True, cwd=run.ROOT, capture_output=True, text=True)
    assert sorted(found.stdout.split()) == run.OPS
