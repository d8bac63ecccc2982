"""Runs in CSV files: what is written is what is read."""

from typing import NamedTuple

from benchmarks import runs


class Case(NamedTuple):
    name: str
    seed: int


class Found(NamedTuple):
    loss: float
    said: str


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "runs.csv"
    assert runs.read(Case, path) == []
    written = [
        (Case("a, b", 0), Found(0.1, 'says "no"')),
        (Case("ä", 1), Found(float("inf"), "two\nlines")),
    ]
    for case, found in written:
        runs.append(path, case, found)
    assert path.read_text().startswith("name,seed,loss,said\n")
    assert path.read_text().count("name,seed") == 1
    assert [*zip(runs.read(Case, path), runs.read(Found, path), strict=True)] == written
