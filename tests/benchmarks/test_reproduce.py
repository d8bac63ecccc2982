import json
from pathlib import Path

import pytest

from benchmarks import reproduce
from benchmarks.experiments import EXPERIMENTS
from train.config import Config, parse

SMALL = [
    "--dataset",
    "digits",
    "--epochs",
    "1",
    "--width",
    "4",
    "--limit",
    "60",
    "--batch-size",
    "20",
    "--device",
    "cpu",
]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_flags_are_those_of_the_training_scripts(name):
    experiment = EXPERIMENTS[name]
    configs = {parse(Config(), [*experiment.common, *f]) for f in experiment.variants.values()}
    assert len(configs) == len(experiment.variants)


@pytest.mark.slow
def test_in_pieces_and_written_once(tmp_path, capfd):
    results = tmp_path / "results.md"
    results.write_text("# Results\n")
    command = ["marvin", *SMALL, "--folder", str(tmp_path / "runs"), "--results", str(results)]
    reproduce.main([*command, "--minutes", "0"])
    assert results.read_text().count("none finished") == 2
    reproduce.main(command)
    text = results.read_text()
    assert text.startswith("# Results\n\n<!-- marvin-digits-resnet20: begin -->\n### marvin")
    assert "none finished" not in text
    result = json.loads((tmp_path / "runs/marvin-seed0/result.json").read_text())
    assert f"| MARViN | 0 | {100 * result['test_accuracy']:.2f} |" in text
    first_line = "    python -m benchmarks.reproduce marvin " + " ".join(SMALL)
    assert first_line in text.splitlines()
    capfd.readouterr()
    reproduce.main(command)
    assert "seed 0" not in capfd.readouterr().out  # what is finished is not run again
    assert results.read_text() == text


def test_a_section_replaces_its_own_only():
    text = reproduce.put("# A\n", "x", "1")
    text = reproduce.put(text, "y", "2")
    text = reproduce.put(text, "x", "3")
    assert text == (
        "# A\n\n<!-- x: begin -->\n3\n<!-- x: end -->\n\n<!-- y: begin -->\n2\n<!-- y: end -->\n"
    )


def test_time_over_interrupts_and_the_next_call_goes_on(tmp_path):
    script = tmp_path / "train"
    script.mkdir()
    (script / "__init__.py").touch()
    (script / "sleeper.py").write_text(
        "import sys, time, pathlib\n"
        "run = pathlib.Path(sys.argv[sys.argv.index('--run') + 1])\n"
        "run.mkdir(exist_ok=True)\n"
        "(run / 'config.json').touch()\n"
        "if '--resume' in sys.argv:\n"
        '    (run / "result.json").write_text(\'{"epochs": 1}\')\n'
        "    sys.exit()\n"
        "try:\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    (run / 'interrupted').touch()\n"
    )
    run = reproduce.Run("a", 0, tmp_path / "run", ())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        reproduce.go_on([run], "sleeper", 1, 0.05)
        assert Path("run/interrupted").exists()
        assert run.result(1) is None
        reproduce.go_on([run], "sleeper", 1, None)
    assert run.result(1) == {"epochs": 1}
    assert run.result(2) is None
