"""Tables of speed follow from the results, and say which is slower."""

import json
import re

import pytest

from benchmarks import speed
from benchmarks.reproduce import RunError


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Return a function that writes a file of results: medians in seconds by case."""

    def write(name, **cases):
        memory = "kept" if name == "a" else "as malloc likes"
        facts = {"date": "2026-11-27T10:00:00+00:00", "freed memory": memory}
        rows = [
            {"case": case, "elements": 8, "runs": 9 + i, "median_s": medians}
            for i, (case, medians) in enumerate(cases.items())
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": facts, "rows": rows}))

    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    return write


def test_the_pages_are_those_that_the_results_give():
    assert speed.page(speed.PAGE.read_text()) == speed.PAGE.read_text()
    assert speed.readme(speed.README.read_text()) == speed.README.read_text()


def test_the_readme_has_every_case_on_every_processor():
    block = re.search(r"<!-- speed: begin -->\n(.*?)\n<!--", speed.README.read_text(), re.DOTALL)
    assert block is not None
    lines = block[1].splitlines()
    assert len(lines) == 2 + len(speed.SHOWN)
    assert all(re.search(r"\| [\d.]+, [\d.]+ \| [\d.]+, [\d.]+ \|$", line) for line in lines[2:])


def test_ours_is_compared_with_the_faster_layout(results):
    net = {"ours": 0.5, "float32": 4.0, "float32 channels last": 2.0}
    results("a", net=net | {"bfloat16": 1.0, "bfloat16 channels last": 3.0, "simulated": 9.0})
    assert speed.table({"here": ("a",)}, "training").splitlines()[2] == "| net | 4.0, 2.0 |"


@pytest.mark.parametrize(
    ("float32", "cell"), [(0.94, "**0.9**"), (0.96, "**1.0**"), (1.0, "1.0"), (1.04, "1.0")]
)
def test_what_is_slower_is_bold_also_where_it_rounds_to_one(results, float32, cell):
    results("a", net={"ours": 1.0, "float32": float32})
    assert speed.table({"here": ("a",)}, "training").splitlines()[2] == f"| net | {cell} |"


def test_of_a_case_that_two_files_have_the_first_counts(results):
    results("a", net={"ours": 1.0, "float32": 2.0})
    results("b", net={"ours": 1.0, "float32": 3.0}, other={"ours": 1.0, "float32": 4.0})
    lines = speed.table({"here": ("a", "b")}, "training").splitlines()
    assert lines[2:4] == ["| net | 2.0 |", "| other | 4.0 |"]
    assert lines[-1] == (
        "- here: `a.json`, 2026-11-27, 9 to 9 runs, malloc keeps freed memory; "
        "`b.json`, 2026-11-27, 9 to 10 runs."
    )


def test_steps_and_inference_of_one_file_have_tables_of_their_own(results):
    both = {"ours": 1.0, "float32": 2.0, "prepacked": 0.5}
    results("a", **{"net, training": {"ours": 1.0, "float32": 3.0}, "net, inference": both})
    assert "| net | 3.0 |" in speed.table({"here": ("a",)}, "training", "prepacked")
    table = speed.table({"here": ("a",)}, "inference", "prepacked").splitlines()
    assert table[0] == "|  | here | here, prepacked |"
    assert table[2] == "| net | 2.0 | 4.0 |"


def test_an_observed_step_has_no_row_for_nothing_is_beside_it(results):
    results("a", net={"ours": 1.0, "float32": 3.0}, observed={"ours": 1.0, "simulated": 3.0})
    assert "observed" not in speed.table({"here": ("a",)}, "training")


def test_a_page_without_the_end_of_a_table_is_refused():
    with pytest.raises(RunError, match="must end with"):
        speed.readme("<!-- speed: begin -->\nold\n")
