"""Differences of runs that share no seeds."""

import pytest
from scipy import stats

from benchmarks.welch import Unpaired, main

OURS, THEIRS = (84.6, 84.5, 83.5, 84.8, 84.4), (84.4, 84.3, 84.6)


def test_bounds_are_those_of_scipy():
    found = Unpaired(OURS, THEIRS)
    result = stats.ttest_ind(OURS, THEIRS, equal_var=False)
    assert found.freedom == pytest.approx(result.df)
    assert found.mean / found.error == pytest.approx(result.statistic)
    interval = result.confidence_interval(0.9)  # two-sided: 5 % on each side
    assert found.bound() == pytest.approx(interval.low)
    assert found.bound(upper=True) == pytest.approx(interval.high)


@pytest.mark.parametrize(
    ("ours", "said"),
    [((84.4, 84.5, 84.3), "yes"), ((80.0, 80.1, 80.2), "no "), ((84.0, 86.0, 82.0), "not decided")],
)
def test_what_is_shown(ours, said):
    assert Unpaired(ours, THEIRS).verdict(0.5).startswith(said)


def test_the_command(tmp_path, capsys):
    rows = ["run,seed,test_accuracy", "a,0,0.845", "a,1,0.844", "b,0,0.846", "b,1,0.843", "c,0,0.8"]
    (tmp_path / "x.csv").write_text("\n".join([*rows, ""]))
    main([str(tmp_path / "x.csv"), "a", "b"])
    shown = capsys.readouterr().out
    assert "a: 84.45 ± 0.07 %, 2 seeds" in shown
    assert "difference: +0.00 ± 0.16 points" in shown
    assert "seed by seed, 2 seeds: +0.00 ± 0.10 points" in shown
    with pytest.raises(SystemExit, match="two runs of 'c' or more, got 1"):
        main([str(tmp_path / "x.csv"), "a", "c"])


def test_seed_by_seed_at_another_level(tmp_path, capsys):
    rows = [f"a,{seed},{value / 100}" for seed, value in enumerate(OURS)]
    rows += [f"b,{seed},{value / 100}" for seed, value in enumerate((84.4, 84.6, 83.6, 84.5), 1)]
    (tmp_path / "x.csv").write_text("\n".join(["run,seed,test_accuracy", *rows, ""]))
    pairs = [84.5 - 84.4, 83.5 - 84.6, 84.8 - 83.6, 84.4 - 84.5]
    for level in (95, 97.5):
        main([str(tmp_path / "x.csv"), "a", "b", "--level", str(level)])
        *_, means, _, last = capsys.readouterr().out.splitlines()
        unpaired = stats.ttest_ind(OURS, (84.4, 84.6, 83.6, 84.5), equal_var=False)
        assert f"{unpaired.confidence_interval(2 * level / 100 - 1).low:+.2f}" in means
        low = stats.ttest_1samp(pairs, 0).confidence_interval(2 * level / 100 - 1).low
        assert f"({low:+.2f})" in last or f"(bound {low:+.2f})" in last
    with pytest.raises(SystemExit):
        main([str(tmp_path / "x.csv"), "a", "b", "--level", "0.95"])
    assert "--level must be between 50 and 100, got 0.95" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("b,1,0.85\nb,2", "line 6 is cut off"),
        ("b,1,nan\n", "test_accuracy must be a number, got 'nan'"),
        ("b,0,0.84\n", "runs of 'b' with different seeds, got one twice"),
        ("b,1,84.0\n", "test_accuracy must be from 0 to 1, got 84"),
    ],
    ids=["cut", "nan", "twice", "percent"],
)
def test_tables_that_would_mislead_are_one_line(tmp_path, last, message):
    rows = ["run,seed,test_accuracy", "a,0,0.845", "a,1,0.844", "b,0,0.846", last]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    with pytest.raises(SystemExit, match=message):
        main([str(tmp_path / "x.csv"), "a", "b"])
