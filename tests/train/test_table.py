import io
import json
import sys

import pytest

from train.config import Config, to_dict
from train.errors import UserError
from train.table import main, table


def finished(folder, accuracy, bits, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_dict(Config(dataset="digits", **config))))
    result = {"test_accuracy": accuracy, "mean_word_length": bits}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_seeds_are_taken_together(tmp_path):
    runs = [finished(tmp_path / f"m{s}", 0.9 + s / 100, 16.0 + s, seed=s) for s in range(3)]
    runs.append(finished(tmp_path / "s", 0.9, None, optimizer="sgd"))
    rows = table(runs).splitlines()[2:]
    assert rows[0] == "| resnet20 | digits | msgd | 100 | 0, 1, 2 | 91.00 ± 1.00 | 17.00 ± 1.00 |"
    assert rows[1] == "| resnet20 | digits | sgd | 100 | 0 | 90.00 | 32 |"


def test_a_seed_counts_once(tmp_path):
    runs = [finished(tmp_path / name, 0.9, 16.0, seed=0) for name in ("a", "b")]
    for pair in (runs, runs[:1] * 2):
        with pytest.raises(
            UserError, match=r"seeds of their own, got seed 0 of \S+a and of \S+: le"
        ):
            table(pair)


def test_an_unfinished_run_is_named(tmp_path):
    run = finished(tmp_path / "m", 0.9, 16.0)
    (run / "result.json").unlink()
    with pytest.raises(UserError, match=r"must be a finished run, found no result\.json"):
        table([run])


def test_a_reader_that_leaves_hears_nothing(tmp_path, unread, capfd):
    run = finished(tmp_path / "m", 0.9, 16.0)
    with unread(), pytest.raises(SystemExit) as caught:
        main([str(run)])
    assert caught.value.code == 1
    assert capfd.readouterr().err == ""


def test_an_output_in_ascii_has_plus_and_minus(tmp_path, monkeypatch):
    runs = [finished(tmp_path / f"m{s}", 0.9 + s / 100, 16.0 + s, seed=s) for s in range(3)]
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    main([str(run) for run in runs])
    assert b"| 91.00 +- 1.00 | 17.00 +- 1.00 |" in output.buffer.getvalue()


def test_a_log_on_a_full_disk_is_one_line(tmp_path, full, monkeypatch):
    run = finished(tmp_path / "m", 0.9, 16.0)
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(SystemExit) as caught:
        main([str(run)])
    required = "what is printed must go where it can be written, got: No space left on device"
    assert caught.value.code == f"python -m train.table: error: {required}"
