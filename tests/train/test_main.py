import errno
import json
import logging
import os
import sys
import threading
from dataclasses import replace

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from fixedpoint_kernels import products
from train import demo, table
from train import main as main_module
from train.main import choose_device, main, print_log, round_onednn
from train.monitor import errors_once
from train.resnet20 import DEFAULTS, MIN_SIDE, resnet20


@pytest.fixture(autouse=True)
def _not_our_process(monkeypatch):
    """A script owns its process; a test does not."""
    monkeypatch.setattr(main_module, "own_process", lambda config: None)


def train(*words: str) -> None:
    main(DEFAULTS, resnet20, MIN_SIDE, words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lookback 50 20", "error: --lookback must be"),
        ("--init-fl 9", "error: --init-fl must be 0 or more and below --init-wl, got --init-fl=9"),
        ("--device nowhere", "error: --device must be one that torch can use, got nowhere"),
        ("--device meta", "error: --device must be one that torch can use, got meta: "),
        ("--resume", "must be the folder of a run"),
        ("--limit 1 --validation-share 0.9", "at least one training image must be left"),
    ],
)
def test_errors_of_the_user_are_one_line_and_write_nothing(words, message, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as caught:
        train("--dataset", "digits", "--width", "2", "--run", str(folder), *words.split())
    assert message in str(caught.value.code)
    assert "\n" not in str(caught.value.code)
    assert not folder.exists()


def test_a_run_prints_its_epochs_and_a_summary(tmp_path, capsys):
    folder = tmp_path / "run"
    words = "--dataset digits --width 2 --limit 100 --batch-size 50 --epochs 2"
    train(*words.split(), "--run", str(folder))
    out = capsys.readouterr().out
    for word in ("CC BY 4.0", "epoch 1/2", "epoch 2/2", "validation loss", "test accuracy"):
        assert word in out
    assert out.count("mean word length") == 3
    with pytest.raises(SystemExit) as caught:
        train(*words.split(), "--run", str(folder))
    assert "holds a run: add --resume" in str(caught.value.code)


def test_a_run_whose_outputs_are_closed_trains(tmp_path, monkeypatch):
    """As of a service: ``python -m train.resnet20 ... >&- 2>&-``."""
    folder = tmp_path / "run"
    words = "--dataset digits --width 2 --limit 40 --batch-size 20 --epochs 1"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        train(*words.split(), "--run", str(folder))
    assert (folder / "result.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        table.main([str(folder)])


def test_auto_takes_the_gpu_where_there_is_one():
    want = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == want


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("prepare", "stopped before the run began: start it again with the same command"),
        ("fit", "stopped; the same command with --resume continues from the last checkpoint"),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_ctrl_c_says_how_to_continue(place, said, is_named, monkeypatch, tmp_path, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    words = ["--dataset", "digits"] if is_named else ["--run", "here"]
    words += ["--width", "2", "--limit", "50", "--epochs", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(main_module, place, interrupt)
        with pytest.raises(SystemExit) as caught:
            train(*words)
    assert caught.value.code == 130
    assert capsys.readouterr().err == f"\n{said}\n"
    train(*words, *(["--resume"] if place == "fit" else []))  # as it says


def test_a_reader_that_leaves_is_told_how_to_continue(tmp_path, unread):
    words = ["--dataset", "digits", "--width", "2", "--limit", "50", "--epochs", "1", "--run"]
    said = "stopped; the same command with --resume continues from the last checkpoint"
    with unread(), pytest.raises(SystemExit, match=f"^{said}$"):
        train(*words, str(tmp_path / "run"))
    train(*words, str(tmp_path / "run"), "--resume")
    assert (tmp_path / "run" / "result.json").exists()


def test_the_demo_has_help_and_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(demo, "train", None)
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    assert caught.value.code == 0
    assert "in float32 and in fixed point" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        demo.main(["--epochs", "3"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_demo_compares_what_it_trained(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "own_process", lambda config: None)
    monkeypatch.setattr(demo, "DEMO", replace(demo.DEMO, width=4, epochs=2, limit=128))
    demo.main([])
    printed = capsys.readouterr().out
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    has_units = products.path().is_own
    assert runs == (["demo-int8"] if has_units else []) + ["demo-msgd", "demo-sgd"]
    table = {line[:24].strip(): line[24:].split() for line in printed.splitlines()}
    for row, (name, run) in enumerate(zip(table[""], sorted(runs, reverse=True), strict=False)):
        assert name == {"demo-sgd": "float32", "demo-msgd": "MSGD"}.get(run, "int8")
        result = json.loads((tmp_path / "runs" / run / "result.json").read_text())
        assert table["test accuracy"][row] == f"{result['test_accuracy']:.2%}"
        assert float(table["images a second"][row].replace(",", "")) > 0
    assert table["weights, mean bits"][0] == "32"
    assert "-" not in table["model size SZ"]


def test_the_demo_says_where_there_are_no_integer_units(monkeypatch, capsys):
    result = {"test_accuracy": 0.5, "test_images": 10, "epochs": 2, "images_per_s": 1.0}
    monkeypatch.setattr(demo, "train", lambda config: result)
    with products.force("float"):
        demo.main([])
    printed = capsys.readouterr().out
    assert "No run on integer units: float, it is forced" in printed
    assert "int8" not in printed


def test_a_model_that_has_no_room_is_one_line(tmp_path, monkeypatch):
    def build(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory\nframes")

    words = ["--dataset", "digits", "--width", "60000", "--run", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as caught:
        main(DEFAULTS, build, MIN_SIDE, words)
    assert "--width must leave room for the model, got 60000: " in str(caught.value.code)
    assert "\n" not in str(caught.value.code)


@pytest.mark.parametrize(
    ("capability", "width", "goes_round"),
    [("AVX2", 4, True), ("AVX2", 8, False), ("AVX512", 4, False), ("DEFAULT", 4, True)],
)
def test_narrow_networks_go_round_onednn_where_it_fails(monkeypatch, capability, width, goes_round):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    before = torch.backends.mkldnn.enabled

    def use():
        with round_onednn(resnet20(width=width)) as found:
            assert found == goes_round
            assert torch.backends.mkldnn.enabled == (before and not goes_round)
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert torch.backends.mkldnn.enabled == before


def test_only_a_model_on_the_processor_goes_round_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with round_onednn(resnet20(width=4).to("meta")) as found:
        assert not found


@pytest.mark.parametrize("is_first", [True, False])
def test_one_process_tells_that_onednn_is_off(monkeypatch, tiny, run, capsys, is_first):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(main_module.distributed, "is_first", lambda: is_first)
    run(replace(tiny, epochs=1, limit=40))
    assert capsys.readouterr().out.count("without oneDNN") == is_first


def test_what_kernels_log_is_printed_once_after_several_runs(monkeypatch, capsys):
    logger = logging.getLogger("fixedpoint_kernels")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(logger, "_cache", {})
    for _ in range(3):
        print_log()
    logger.info("compiling")
    assert capsys.readouterr().out == "compiling\n"


@pytest.mark.parametrize("writes", [0, 9], ids=["from the start", "later"])
def test_a_disk_without_room_for_tensorboard_is_one_line(writes, tmp_path, monkeypatch, capfd):
    own, left = RecordWriter.write, [writes]

    def write(self: RecordWriter, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own(self, data)

    monkeypatch.setattr(RecordWriter, "write", write)
    folder = tmp_path / "run"
    words = ["--dataset", "digits", "--width", "2", "--limit", "100", "--epochs", "1"]
    words += ["--batch-size", "10", "--run", str(folder)]
    with pytest.raises(SystemExit) as caught:
        train(*words)
    said = str(caught.value.code)
    assert f"must be one that can be written, got {folder}/tensorboard (No space left on" in said
    assert "\n" not in said
    assert "Exception in thread" not in capfd.readouterr().err
    monkeypatch.setattr(RecordWriter, "write", own)
    train(*words, "--resume")  # as the line says
    assert (folder / "result.json").exists()


def test_other_threads_still_print_their_errors(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with errors_once():
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    assert [failed.exc_type for failed in told] == [ZeroDivisionError]
    assert threading.excepthook == told.append
