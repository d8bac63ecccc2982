import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import marvin
from fixedpoint_kernels import FixedPoint, quantize
from marvin.channels import ChannelFormat
from marvin.export import describe, integer, packed
from marvin.export.deployed import Options
from marvin.export.frontend import trace
from marvin.export.graph.formats import activation_formats
from marvin.rounder import BUFFER
from train import demo, resnet20
from train import main as trainer
from train.config import Config
from train.export import deploy, main, open_run
from train.records import RunFolder

ROOT = Path(__file__).parents[2]
TINY = Config(
    model="resnet20",
    width=4,
    dataset="digits",
    limit=120,
    device="cpu",
    epochs=1,
    batch_size=40,
    lookback=(2, 4),
)


def train(folder, **settings):
    config = replace(TINY, run=str(folder), **settings)
    trainer.run(config, resnet20.resnet20, resnet20.MIN_SIDE)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run in fixed point of 8 bits."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return train(folder, init_wl=8, max_wl=8, buffer_bits=4, min_fl=3)


def export(run, *words):
    main([str(run), *words])


def test_a_log_on_a_full_disk_is_one_line(run, full, monkeypatch):
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(SystemExit) as caught:
        export(run, "--to", "c")
    required = "what is printed must go where it can be written, got: No space left on device"
    assert caught.value.code == f"python -m train.export: error: {required}"


@pytest.mark.parametrize("target", ["packed", "onnx"])
def test_a_run_is_exported_and_verified(run, target, capsys, tmp_path):
    pytest.importorskip("onnxruntime")
    out = tmp_path / "out"
    export(run, "--to", target, "--verify", "--out", str(out))
    text = capsys.readouterr().out
    assert "formats of activations: trained" in text
    assert "verified: " in text
    assert text.count("exact") >= 44
    facts = json.loads((out / "export.json").read_text())
    assert len(facts["layers"]) == 44
    assert {row["float32"] for row in facts["layers"]} == {"exact"}
    if target == "onnx":
        assert "network.onnx (int8)" in text
        shown = [line for line in text.splitlines() if line.startswith("test accuracy")]
        exported = shown[0].split("exported ")[1].split(" ")[0]
        assert shown[1].startswith(f"test accuracy of what was written: {exported} ")
    export(run, "--to", target, "--out", str(out))  # again
    assert "not verified" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_report_that_nobody_reads_stops_no_export(run, unread, tmp_path):
    with unread():
        export(run, "--to", "packed", "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / "export.json").exists()


def test_a_run_for_integer_hardware(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    folder = train(tmp_path / "run", policy="static", policy_bits=(6, 7))
    out = tmp_path / "out"
    export(folder, "--to", "onnx", "--out", str(out))
    text = capsys.readouterr().out
    assert "network.onnx (int8); " in text
    assert "are not rounded, which is slower: try --sums-wl 8" in text
    assert "terms of sums" not in text
    assert "biases that training left in floats are rounded: fc by up to " in text
    assert "outputs differ from the trained model's by " in text
    export(folder, "--to", "onnx", "--sums-wl", "8", "--vnni", "--verify", "--out", str(out))
    text = capsys.readouterr().out
    assert "terms of sums and means, calibrated: relu.term unsigned <8, " in text
    assert "%, with exact sums " in text
    assert "network.onnx (int8); all 22 layers on integer kernels, " in text
    assert "try --sums-wl" not in text
    assert "verified: " in text
    facts = json.loads((out / "export.json").read_text())
    assert {row["float32"] for row in facts["layers"]} == {"exact"}


def test_formats_of_channels_are_integer_kernels(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    folder = train(tmp_path / "run", policy="static", policy_bits=(5, 6), per_channel=True)
    for words in ((), ("--sums-wl", "8")):
        export(folder, "--to", "onnx", "--verify", *words, "--out", str(tmp_path / "onnx"))
        text = capsys.readouterr().out
        assert "verified: " in text
        assert "network.onnx (int8)" in text
    formats = formats_of(folder)
    rows = json.loads((tmp_path / "onnx" / "export.json").read_text())["layers"]
    assert {row["float32"] for row in rows} == {"exact"}
    shown = [row["weights"] for row in rows if row["kind"] in ("conv", "linear")]
    ends = [(fmt["fmt"]["fl"], fmt["shifts"]) for fmt in formats]
    assert shown == [f"<5, {fl + min(more)} to {fl + max(more)}>" for fl, more in ends]


def test_formats_of_channels_are_packed_as_they_are(tmp_path):
    folder = train(tmp_path / "run", policy="static", policy_bits=(5, 6), per_channel=True)
    export(folder, "--to", "packed", "--verify", "--out", str(tmp_path / "out"))
    loaded = packed.load(tmp_path / "out" / "network.safetensors")
    found = [fmt for fmt in loaded.formats.values() if isinstance(fmt, ChannelFormat)]
    wanted = formats_of(folder)
    assert [list(fmt.shifts) for fmt in found] == [list(fmt["shifts"]) for fmt in wanted]
    assert {fmt.wl for fmt in found} == {5}


def formats_of(folder):
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["optimizer"]["state"]
    return [values["layer"]["fmt"] for values in state.values() if "layer" in values]


def test_packed_weights_are_the_masters_rounded_to_nearest(run, tmp_path, capsys):
    export(run, "--to", "packed", "--out", str(tmp_path / "out"))
    loaded = packed.load(tmp_path / "out" / "network.safetensors")
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    master, fmt = state["optimizer"]["state"][0]["master"], loaded.formats["conv.weight"]
    want = torch.round(master * fmt.scale).clamp(fmt.min_code, fmt.max_code)
    torch.testing.assert_close(loaded.codes["conv.weight"].float(), want, rtol=0, atol=0)
    assert loaded.activations["conv.out"] == fmt
    export(run, "--to", "packed", "--weights", "last", "--out", str(tmp_path / "last"))
    last = packed.load(tmp_path / "last" / "network.safetensors").state_dict()
    for name, value in state["model"].items():
        torch.testing.assert_close(last[name], value, rtol=0, atol=0)


def test_a_run_on_integer_units_is_exported(tmp_path, capsys):
    folder = train(tmp_path / "run", policy="static", policy_bits=(6, 7), execution="int8")
    export(folder, "--to", "packed", "--verify")
    assert "verified: " in capsys.readouterr().out


def test_a_float_run_is_calibrated(tmp_path, capsys):
    folder = train(tmp_path / "run", optimizer="sgd")
    export(folder, "--to", "packed", "--verify", "--wl", "6")
    text = capsys.readouterr().out
    assert "formats of activations: calibrated" in text
    assert (folder / "export/packed/network.safetensors").is_file()
    network = deploy(open_run(folder), Options(wl=6)).network
    assert {fmt.wl for fmt in network.formats().values()} == {6}


def test_ranges_of_a_run_are_taken_again(tmp_path, capsys):
    folder = train(tmp_path / "run", policy="static", policy_bits=(6, 7))
    run = open_run(folder)
    trained = deploy(run, Options())
    for estimator in ("noise", "max"):
        deployed = deploy(run, Options(recalibrate=True, estimator=estimator))
        wanted = marvin.calibrate(trained.model, run.train.split(64), estimator=estimator)
        assert activation_formats(deployed.model) == activation_formats(wanted)
        assert torch.equal(
            integer.run(deployed.network, run.test[:8]),
            integer.run(describe(wanted, run.train[:32], calibration=run.train), run.test[:8]),
        )
        assert deployed.network.weight_formats() == trained.network.weight_formats()
        assert (trained.network.origin, deployed.network.origin) == ("trained", "calibrated")
    assert deployed.network.formats() != trained.network.formats()
    export(folder, "--to", "packed", "--verify", "--recalibrate", "--estimator", "max")
    text = capsys.readouterr().out
    assert "formats of activations: calibrated" in text
    assert "verified: " in text
    loaded = packed.load(folder / "export/packed/network.safetensors").network
    assert torch.equal(
        integer.run(loaded, run.test[:8]), integer.run(deployed.network, run.test[:8])
    )


def test_a_run_in_fixed_point_without_activations_is_calibrated(tmp_path):
    folder = train(tmp_path / "run", quantize_activations=False)
    deployed = deploy(open_run(folder), Options(wl=9))
    assert deployed.network.origin == "calibrated"
    assert {fmt.wl for fmt in deployed.network.formats().values()} == {9}
    weights = deployed.network.weight_formats()
    assert weights["conv"] == deployed.formats["conv.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "checkpoint.pt").unlink(), "must be a run with a checkpoint"),
        (lambda p: (p / "checkpoint.pt").write_bytes(b"x"), "must hold a whole checkpoint"),
        (lambda p: (p / "config.json").unlink(), "must be the folder of a run"),
        (lambda p: (p / "config.json").write_text("{}}"), "must hold a run's configuration"),
    ],
)
def test_damaged_runs_end_with_one_line_and_write_nothing(run, change, message, tmp_path):
    for name in ("config.json", "checkpoint.pt"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    change(tmp_path)
    with pytest.raises(SystemExit) as caught:
        export(tmp_path, "--to", "packed")
    assert message in str(caught.value.code)
    assert "\n" not in str(caught.value.code)
    assert not (tmp_path / "export").exists()


def test_a_network_that_cannot_be_exported_writes_nothing(tmp_path, monkeypatch):
    folder = train(tmp_path / "run", activation="gelu")
    monkeypatch.delitem(trace._KINDS, torch.nn.GELU)
    with pytest.raises(SystemExit) as caught:
        export(folder, "--to", "packed")
    assert "relu: GELU cannot be exported" in str(caught.value.code)
    assert not (folder / "export").exists()


def test_a_failed_proof_leaves_the_old_export(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    export(run, "--to", "packed", "--out", str(out))
    before = sorted(path.name for path in out.iterdir())
    real = packed.load

    def damaged(path):
        loaded = real(path)
        loaded.codes["conv.weight"][0] += 1
        return loaded

    monkeypatch.setattr(packed, "load", damaged)
    with pytest.raises(SystemExit) as caught:
        export(run, "--to", "packed", "--verify", "--out", str(out))
    assert "the packed weights differ from the model's" in str(caught.value.code)
    assert sorted(path.name for path in out.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_folders_are_not_replaced(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="must be an earlier export or not there"):
        export(run, "--to", "packed", "--out", str(tmp_path))
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "fashion-mnist"])
def test_a_configuration_does_not_say_where_data_is_made(run, dataset, tmp_path, monkeypatch):
    def fetch(*_: object) -> None:
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr("urllib.request.urlopen", fetch)
    folder, outside = tmp_path / "run", tmp_path / "home/data"
    shutil.copytree(run, folder)
    config = json.loads((folder / "config.json").read_text())
    hostile = config | {"dataset": dataset, "data_dir": str(outside)}
    (folder / "config.json").write_text(json.dumps(hostile))
    monkeypatch.setattr("train.fashion_mnist.DEBIAN", tmp_path / "none")
    with pytest.raises(SystemExit) as caught:
        export(folder, "--to", "packed")
    assert "looked for" in str(caught.value.code)
    assert str(outside) in str(caught.value.code)
    assert "\n" not in str(caught.value.code)
    assert not outside.parent.exists()


def test_a_data_folder_of_the_users_own_may_be_made(run, tmp_path, monkeypatch):
    asked = []

    def load(name: str, data_dir: Path, *, may_fetch: bool = True):
        asked.append((str(data_dir), may_fetch))
        return digits(name, data_dir)

    digits = trainer.load
    monkeypatch.setattr(trainer, "load", load)
    open_run(run)
    open_run(run, str(tmp_path))
    assert asked == [("data", False), (str(tmp_path), True)]


def test_exports_of_a_run_stay_in_its_folder(run, tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(run, folder)
    outside.mkdir()
    (folder / "export").symlink_to(outside)
    with pytest.raises(SystemExit, match="export must be a folder, got a link"):
        export(folder, "--to", "packed")
    assert not list(outside.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "packed", "--wl", "99"], "argument --wl: must be a whole number from 2 to 32"),
        (["--to", "packed", "--wl", "-1"], "argument --wl: must be a whole number from 2 to 32"),
        (["--to", "packed", "--scale-wl", "x"], "argument --scale-wl: must be a whole number"),
        (["--to", "packed", "--sums-wl", "0"], "argument --sums-wl: must be a whole number"),
        (["--to", "packed", "--samples", "-3"], "argument --samples: must be a whole number"),
        (["--to", "paper"], "argument --to: invalid choice: 'paper'"),
        ([], "the following arguments are required: --to"),
    ],
)
def test_wrong_arguments_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["nowhere", *words])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"python -m train.export: error: {message}")
    assert shown.count("\n") == 1


def test_a_checkpoint_of_another_run_is_one_line(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    state["optimizer"]["state"] = {}
    torch.save(state, tmp_path / "run/checkpoint.pt")
    with pytest.raises(SystemExit) as caught:
        export(tmp_path / "run", "--to", "packed")
    assert "checkpoint.pt must hold a checkpoint of this run, got a foreign one" in str(
        caught.value.code
    )


def test_what_was_averaged_and_tested_is_exported(tmp_path):
    folder = train(tmp_path / "run", policy="loss-budget", ema=0.9, schedule="one-cycle", epochs=2)
    run = open_run(folder)
    result = json.loads((folder / "result.json").read_text())
    logits = run.model(run.test)
    loss = torch.nn.functional.cross_entropy(logits, run.labels).item()
    assert loss == pytest.approx(result["test_loss"], rel=1e-5)  # means of other batches
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert run.masters is not None
    for name, master in run.masters.items():
        torch.testing.assert_close(master, state["average"]["masters"][name], rtol=0, atol=0)
    assert not torch.equal(run.model.fc.bias, state["model"]["fc.bias"])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_an_epoch_of_the_front_is_exported(tmp_path, capsys):
    folder = train(tmp_path / "run", policy="loss-budget", epochs=3, keep_front=True)
    shorter = train(tmp_path / "shorter", policy="loss-budget", epochs=2, keep_front=True)
    epoch = 2  # which ones are on the front, the processor's last bits decide
    shutil.copy(shorter / "checkpoint.pt", RunFolder(folder).kept(epoch))
    RunFolder(folder).kept(3).unlink(missing_ok=True)
    export(folder, "--to", "packed", "--verify", "--epoch", str(epoch))
    assert "verified: " in capsys.readouterr().out
    assert (folder / "export" / f"epoch-{epoch}" / "packed" / "export.json").exists()
    assert not (folder / "export" / "packed").exists()
    stored = torch.load(RunFolder(folder).kept(epoch))["model"]
    name = next(key for key in stored if key.endswith("running_mean"))
    assert torch.equal(open_run(folder, epoch=epoch).model.state_dict()[name], stored[name])
    assert not torch.equal(open_run(folder).model.state_dict()[name], stored[name])
    with pytest.raises(
        SystemExit, match=rf"epoch-0003\.pt; train with --keep-front, kept are: .*{epoch:04}"
    ):
        export(folder, "--to", "packed", "--epoch", "3")
    RunFolder(folder).kept(epoch).rename(RunFolder(folder).kept(3))
    with pytest.raises(SystemExit, match=rf"must be of epoch 3, got one of epoch {epoch}"):
        export(folder, "--to", "packed", "--epoch", "3")
    RunFolder(folder).kept(3).write_bytes(b"")
    with pytest.raises(SystemExit, match="the run's other checkpoints do not need it"):
        export(folder, "--to", "packed", "--epoch", "3")


@pytest.mark.slow
def test_the_runs_of_the_demo_become_c(monkeypatch, tmp_path, capsys):
    """As a user types it: what make demo trains, in fixed point, in float32 and on integer units."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "own_process", lambda config: None)
    monkeypatch.setattr(demo, "DEMO", replace(demo.DEMO, width=4, epochs=1, limit=128))
    monkeypatch.setenv("CC", "gcc")
    demo.main([])
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert {"demo-msgd", "demo-sgd"} <= set(runs)
    capsys.readouterr()
    for run in runs:
        main([f"runs/{run}", "--to", "c", "--verify", "--samples", "16"])
        text = capsys.readouterr().out
        assert "all 160 outputs of 16 samples equal the integers" in text
        assert "EBOPs: " in text
        files = {path.name for path in (tmp_path / "runs" / run / "export/c").iterdir()}
        assert {"network.c", "network.h", "export.json"} <= files


@pytest.mark.parametrize("weights", ["nearest", "last"])
def test_a_run_in_block_floating_point_is_calibrated(tmp_path, capsys, weights):
    folder = train(tmp_path / "run", policy="muppet", normalize_gradients=False)
    export(folder, "--to", "packed", "--verify", "--weights", weights)
    text = capsys.readouterr().out
    assert "formats of activations: calibrated" in text
    assert "verified: " in text
    trained = open_run(folder)
    assert trained.masters is not None
    own = trained.masters if weights == "nearest" else trained.model.state_dict()
    network = deploy(trained, Options(), weights)
    name, fmt = "fc.weight", network.formats["fc.weight"]
    assert isinstance(fmt, FixedPoint)
    assert fmt.wl == 8
    want = quantize(own[name], fmt, rounding="nearest")
    torch.testing.assert_close(network.model.state_dict()[name], want, rtol=0, atol=0)
    assert not activation_formats(network.model)
    assert "fc." + BUFFER in trained.model.state_dict()  # which stays as it is
