"""Paired differences, against formulas and numbers from tables of Student's t."""

import json
import math
import random

import pytest
from scipy.stats import ttest_1samp

from benchmarks.paired import Paired, main, paired, read_group
from perfmodel.files import RunError


def test_only_seeds_that_both_have_count():
    found = paired({0: 3.0, 1: 5.0, 4: 1.0}, {1: 2.0, 0: 2.5, 7: 9.0})
    assert found == Paired((0, 1), (0.5, 3.0))
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_errors_and_bounds():
    found = Paired((0, 1, 2), (-5.0, -6.0, -1.0))
    assert found.mean == -4
    assert found.error == pytest.approx(math.sqrt(7 / 3))
    assert found.t == pytest.approx(-4 / math.sqrt(7 / 3))
    assert found.bound() == pytest.approx(-4 - 2.920 * math.sqrt(7 / 3), abs=1e-3)  # t table, 2
    assert found.bound(upper=True) == pytest.approx(-4 + 2.920 * math.sqrt(7 / 3), abs=1e-3)
    assert found.shown() == "-4.00 ± 1.53"


@pytest.mark.parametrize("margin", [0.1, 0.5, 2.0])
def test_the_verdict_is_that_of_a_t_test(margin):
    generator = random.Random(3)
    seen = set()
    for _ in range(200):
        center, count = generator.uniform(-3, 1), generator.randint(2, 6)
        values = tuple(generator.gauss(center, 0.6) for _ in range(count))
        verdict = Paired(tuple(range(count)), values).verdict(margin).partition(" (")[0]
        above = ttest_1samp(values, -margin, alternative="greater").pvalue < 0.05
        below = ttest_1samp(values, -margin, alternative="less").pvalue < 0.05
        assert verdict == ("yes" if above else "no" if below else "not decided")
        seen.add(verdict)
    assert seen == {"yes", "no", "not decided"}


def test_one_seed_decides_nothing():
    found = Paired((3,), (0.7,))
    assert (found.error, found.t, found.bound()) == (None, None, None)
    assert found.verdict() == "one seed: not decided"
    assert found.shown() == "+0.70"


def run(folder, seed, accuracy, loss, bits=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    lengths = {"mean_word_length": bits, "mean_input_word_length": bits}
    (folder / "result.json").write_text(json.dumps({"test_accuracy": accuracy, **lengths}))
    (folder / "metrics.csv").write_text(f"train_loss\n2.0\n{loss}\n")
    return str(folder)


def test_the_tables(tmp_path, capsys):
    plain = [run(tmp_path / f"p{s}", s, 0.6 + s / 100, 1.0) for s in range(3)]
    eight = [run(tmp_path / f"e{s}", s, 0.601 + s / 100, 1.1 + s / 50, 6.0) for s in range(3)]
    main([f"float32={plain[0]}", *plain[1:], f"int8={eight[0]}", *eight[1:]])
    text = capsys.readouterr().out
    assert "| float32 | 0, 1, 2 | 1.0000 ± 0.0000 | 61.00 ± 1.00 | 32.00 ± 0.00 | 32.00 ±" in text
    assert "| int8 | 0, 1, 2 | 1.1200 ± 0.0200 | 61.10 ± 1.00 | 6.00 ± 0.00 | 6.00 ±" in text
    # .1, .12, .14: a standard error of .02 / sqrt(3)
    assert "| int8 less float32 | 3 | +0.1200 ± 0.0115 | +10.4 | +0.10 ± 0.00 | yes (" in text


def test_what_is_wrong_is_named(tmp_path, capsys):
    one = run(tmp_path / "a", 1, 0.5, 1.0)
    with pytest.raises(RunError, match="different seeds, got 1"):
        read_group([tmp_path / "a", tmp_path / "a"])
    (tmp_path / "a" / "result.json").unlink()
    with pytest.raises(SystemExit, match=r"result\.json"):
        main([f"x={one}"])
    with pytest.raises(SystemExit):
        main([one])
    assert "must have a name, as NAME=RUN" in capsys.readouterr().err


def test_a_name_that_comes_twice_does_not_drop_a_group(capsys):
    with pytest.raises(SystemExit):
        main(["a=x", "b=y", "a=z"])
    assert "names of groups must be unique, got a twice" in capsys.readouterr().err


def test_folders_may_have_an_equals_sign_in_their_names(tmp_path, capsys):
    runs = [run(tmp_path / f"lr=0.1,seed={s}", s, 0.6, 1.0) for s in range(3)]
    main([f"lr=0.1={runs[0]}", *runs[1:]])
    assert "| lr=0.1 | 0, 1, 2 | 1.0000" in capsys.readouterr().out
    main([f"a={runs[0]}", f"b={runs[1]}"])
    assert "| b | 1 | 1.0000" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(runs)
    assert "must have a name, as NAME=RUN" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="gone must be the folder of a run"):
        main([f"a={tmp_path / 'gone'}"])
