import errno
import json
import os
import re
import shutil
import sys

import pytest

from perfmodel.__main__ import main
from perfmodel.figure import step_costs
from perfmodel.files import replace_file
from perfmodel.layers import Layer
from perfmodel.report import one_line, report
from perfmodel.run import RunError, read_run
from perfmodel.summary import as_dict, layer_rows, totals


def test_what_is_read(folder):
    run = read_run(folder)
    assert (run.title, run.trace.steps, run.samples) == ("net on digits, msgd", 100, 128)
    assert [(r.weight, r.madds, r.elements) for r in run.layers] == [
        ("a.weight", 1000, 10),
        ("b.weight", 3000, 90),
    ]
    assert run.trace.word_lengths("b.weight") == [8] * 50 + [16] * 50
    assert (run.images_per_s, run.machine) == (100.0, "A processor, threads: 1")


def test_the_rows_add_up(folder):
    run = read_run(folder)
    rows = layer_rows(run)
    values = {t.name: t.value for t in totals(run)}
    assert sum(r.cost_share for r in rows) == pytest.approx(1)
    cost = sum(r.forward + r.backward + r.search for r in rows)
    assert 1 / cost == pytest.approx(values["SU"])
    assert sum(r.forward + r.backward for r in rows) == pytest.approx(1 / values["SU, no search"])
    costs, base = step_costs(run)
    assert base * len(costs) / costs.sum() == pytest.approx(values["SU"])
    assert [r.size_bytes for r in rows] == [25, 180]
    assert values["MEM with masters"] == 1 + values["MEM, weighted"]


def test_report_says_what_is_modelled_and_what_is_measured(folder):
    text = report(read_run(folder))
    assert "All modelled" in text
    assert "training, measured on A processor, threads: 1: 100 images/s" in text
    assert "MuPPET" in text
    assert "every layer kept at 8 bits" in text
    assert one_line(read_run(folder)).endswith("(modelled)")


def test_a_run_in_float32(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"optimizer": "sgd"}))
    (folder / "trace.csv").unlink()
    values = {t.name: t.value for t in totals(read_run(folder))}
    assert values["SU"] == values["MEM"] == values["SZ"] == 1


def test_files_that_a_spreadsheet_saved_are_read(folder):
    wanted = read_run(folder).trace
    for path in (folder / "trace.csv", folder / "layers.csv"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_run(folder).trace == wanted


@pytest.mark.parametrize(
    ("policy", "first", "has_inputs"),
    [
        ("loss-budget", 32, True),
        ("static", 32, True),
        ("muppet", 8, False),
        ("fixed:6,4", 6, False),
        ("fixed:006,4", 6, False),  # as earlier versions stored it
    ],
)
def test_a_run_of_another_policy(folder, policy, first, has_inputs):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"policy": policy}))
    rows = [] if "fixed" in policy else [(1, "a.weight", 4, 0, 7 * has_inputs)]
    lines = [
        ",".join(map(str, row)) for row in [("step", "layer", "wl", "lookback", "input_wl"), *rows]
    ]
    (folder / "trace.csv").write_text("\n".join([*lines, ""]))
    run = read_run(folder)
    assert run.title.endswith(policy)
    assert run.trace.word_lengths("b.weight") == [first] * 100
    values = {t.name: t.value for t in totals(run)}
    assert values["SU"] == values["SU, no search"]
    assert ("SZ, inputs" in values) == ("inputs mean" in report(run)) == has_inputs
    if has_inputs:
        assert values["SZ, inputs"] == (7 + 32) / 64
        floats = config | {"policy": policy, "quantize_activations": False}
        (folder / "config.json").write_text(json.dumps(floats))
        assert not read_run(folder).trace.has_inputs


@pytest.mark.parametrize("policy", ["marvin", "muppet", "fixed:6,4", "static:6,6", "loss-budget"])
def test_ebops_of_float32_activations(folder, policy):
    config = json.loads((folder / "config.json").read_text()) | {"policy": policy}
    (folder / "trace.csv").write_text("step,layer,wl,lookback\n1,a.weight,4,1\n1,b.weight,5,1\n")
    for rounds_inputs, wanted in ((True, 1000 * 9 + 3000 * 16), (False, 31 * (3000 + 12000))):
        values = config | {"quantize_activations": rounds_inputs}
        (folder / "config.json").write_text(json.dumps(values))
        assert {t.name: t.value for t in totals(read_run(folder))}["EBOPs"] == wanted / 1e6


def test_ebops_of_a_layer_whose_inputs_stay_float32(folder):
    head = "step,layer,wl,lookback,has_float_inputs\n"
    (folder / "trace.csv").write_text(f"{head}1,a.weight,4,1,False\n1,b.weight,5,1,True\n")
    values = {t.name: t.value for t in totals(read_run(folder))}
    assert values["EBOPs"] == (1000 * 3 * 3 + 3000 * 4 * 31) / 1e6


def test_without_timing(folder):
    (folder / "timing.csv").unlink()
    assert "measured on" not in report(read_run(folder))


@pytest.mark.parametrize("name", ["config.json", "layers.csv", "trace.csv", "metrics.csv"])
@pytest.mark.parametrize("damage", ["gone", "empty", "binary", "cut"])
def test_damage_names_the_file(folder, name, damage):
    path = folder / name
    content = path.read_bytes()
    damaged = {"empty": b"", "binary": b"\xff\x00\xfe", "cut": content.rstrip()[:-1]}
    path.unlink()
    if damage != "gone":
        path.write_bytes(damaged[damage])
    with pytest.raises(RunError, match=name):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("config.json", '"batch_size": 64, ', "", "missing batch_size"),
        ("trace.csv", "30,a.weight", "x,a.weight", "step must be a whole number from .* got 'x'"),
        ("trace.csv", "30,a.weight", "300,a.weight", "within 100 steps, got step 300"),
        (
            "trace.csv",
            "a.weight,12",
            "a.weight,99",
            "wl must be a whole number from 2 to 32, got '99'",
        ),
        ("trace.csv", "30,a.weight", "30,c.weight", "the layers of layers.csv, got c.weight"),
        ("layers.csv", "madds", "flops", "must have a column madds, .* --model"),
        ("metrics.csv", "1,50\r\n2,100\r\n", "", "one whole epoch, got none"),
    ],
)
def test_wrong_content_says_what(folder, name, old, new, message):
    path = folder / name
    text = path.read_bytes().decode()
    assert old in text
    path.write_bytes(text.replace(old, new).encode())
    with pytest.raises(RunError, match=message) as caught:
        read_run(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[" * 100_000, "config.json must hold a JSON object"),
        ("config.json", "[]", "config.json must hold a JSON object, got list"),
        (
            "config.json",
            '{"dataset": "\\ud800"}',
            "config.json must hold a JSON object: .*surrogates",
        ),
        ("environment.json", "{", "environment.json must hold a JSON object"),
        ("environment.json", '{"a":' * 100_000, "environment.json must hold a JSON object"),
        ("timing.csv", "images_per_s\nnan\n", "images_per_s must be a number, got 'nan'"),
        ("metrics.csv", "step\n-5\n", "step must be a whole number from 1 .* got '-5'"),
        ("metrics.csv", "step\n" + "9" * 30 + "\n", "step must be a whole number from 1 "),
        ("layers.csv", "layer,elements,madds\na.weight,1,1e400\n", "madds must be a whole number"),
        ("layers.csv", "layer,elements,madds\na.weight,-1,1\n", "elements must be a whole number"),
        ("layers.csv", "layer,elements,madds\na.weight,1,1,7\n", "a column for each cell"),
    ],
)
def test_foreign_files_are_named(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(RunError, match=message) as caught:
        read_run(folder)
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 3),
        ("policy", []),
        ("batch_size", "64"),
        ("batch_size", 0),
        ("accumulation_steps", 10**400),
        ("init_wl", -1),
        ("init_wl", True),
        ("lookback", 7),
        ("lookback", [1, "x"]),
        ("resolution", [0, 5]),
        ("policy", "fixed:99,4"),
        ("policy", "fixed:x"),
        ("policy", "hello"),
    ],
)
def test_foreign_settings_are_named(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(RunError, match=rf"config\.json: {key}.* must be"):
        read_run(folder)


def test_the_figure_is_not_written_through_a_link(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("years of work")
    (folder / "performance.png").symlink_to(outside)
    main([str(folder)])
    assert outside.read_text() == "years of work"
    assert (folder / "performance.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob(".*"))


def test_names_that_look_like_formulas_are_drawn_as_they_are(folder):
    text = (folder / "layers.csv").read_text() + "$\\frac{$,1x1,3,3\r\n"
    (folder / "layers.csv").write_bytes(text.encode())
    main([str(folder)])


def test_a_model_that_differs_names_the_layers(folder, two_layers):
    other = Layer("c", "linear", 5, 5, (), (), "c.weight", 5)
    bigger = Layer("a", "linear", 1000, 11, (), (), "a.weight", 11)
    with pytest.raises(
        RunError, match=r"only in the run: b.weight; only in the model: c.weight; of"
    ):
        read_run(folder, [bigger, other])
    assert read_run(folder, two_layers).layers == two_layers


def test_command(folder, capsys):
    main([str(folder)])
    text = capsys.readouterr().out
    assert str(folder / "performance.png") in text
    assert (folder / "performance.png").read_bytes().startswith(b"\x89PNG")
    assert report(read_run(folder)) in text


def test_command_json(folder, capsys):
    main([str(folder), "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values == as_dict(read_run(folder))
    assert [row["layer"] for row in values["modelled"]["layers"]] == ["a.weight", "b.weight"]
    assert not (folder / "performance.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere must be the folder of a run, found no config.json in it"),
        (["model", "nothing", "--input", "3"], "must be module:function, got 'nothing'"),
        (["model", "torch.nn:Nope", "--input", "3"], "must be a model or make one: .*Nope"),
        (["model", "torch.nn:Linear(3)", "--input", "3"], r"name or name\(argument=value\), got"),
        (["model", "os:getcwd", "--input", "3"], "must make a torch module, got str"),
        (["model", "torch.nn:ReLU", "--input", "3", "--dtype", "no"], "one of torch's, got 'no'"),
        (
            ["model", "torch.nn:Embedding(num_embeddings=3,embedding_dim=2)", "--input", "3"],
            r"tokens are of torch\.int64 \(--dtype int64\)",
        ),
    ],
)
def test_what_the_user_can_put_right_is_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: RUN"),
        (["run", "--model", "a:b"], "--model and --input go together"),
        (["run", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["model", "a:b"], "the following arguments are required: --input"),
        (["model", "a:b", "--input", "x"], "--input: must be sizes of at least 1 .* got 'x'"),
        (["model", "a:b", "--input", "3,0"], "--input: must be sizes of at least 1 .* got '3,0'"),
        (["model", "a:b", "--input", "3", "--memory", "nan"], "--memory: .* above 0, got 'nan'"),
        (["model", "a:b", "--input", "3", "--memory", "-1"], "--memory: .* above 0, got '-1'"),
        (["model", "a:b", "--input", "3", "--copies", "-1"], "--copies: .* at least 0, got '-1'"),
        (["tables", "x"], "unrecognized arguments: x"),
        (
            ["modle", "a:b", "--input", "3"],
            "unrecognized arguments: a:b: modle must be a run folder, model, batch or tables",
        ),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert re.search(f"^python -m perfmodel.*: error: .*{message}", shown)


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("model", ["of the parameters", "16", "4"]),
        ("batch", ["float32", "2", "exact,checkpointing,few-bit,few-bit+division", "1"]),
    ],
)
def test_help_tells_defaults(command, defaults, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"(default: {own})" in shown.replace("that of", "of") for own in defaults)


def test_command_model(capsys):
    main(["model", "train.resnet20:resnet20(width=8)", "--input", "3,32,32", "--by-layer"])
    text = capsys.readouterr().out
    assert "blocks.3.shortcut.0" in text
    assert "All modelled" in text
    assert "DIVISION, B = 8, Q = 2" in text
    main(["model", "train.resnet20:resnet20", "--input", "3,32,32", "--json"])
    values = json.loads(capsys.readouterr().out)["modelled"]
    assert values["madds"] == 40_813_184
    kept = values["kept_by_batch_of_2"]
    assert sum(row["size_bytes"] for row in kept["by_layer"]) == kept["total_bytes"]


def test_command_model_lists_what_it_cannot_count(tmp_path, monkeypatch, capsys):
    code = (
        "import torch\n"
        "class Distances(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.cdist(x, x)\n"
    )
    (tmp_path / "distances_net.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    main(["model", "distances_net:Distances", "--input", "4,4"])
    assert "NOT COUNTED, unknown operations: model: aten._cdist_forward" in capsys.readouterr().out
    sys.modules.pop("distances_net")


def test_a_run_needs_no_torch(folder):
    import subprocess

    code = f"import sys; from perfmodel.__main__ import main; main([{str(folder)!r}, '--json'])"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    shutil.rmtree(folder)


def test_what_a_kill_left_is_in_nobodys_way(tmp_path):
    """In containers process ids repeat, and another process may be writing the same file."""
    other = tmp_path / f".performance.png.{os.getpid()}.part"
    other.write_bytes(b"half")
    replace_file(tmp_path / "performance.png", b"new")
    assert (tmp_path / "performance.png").read_bytes() == b"new"
    assert other.read_bytes() == b"half"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("perfmodel.files.os.replace", full)
    path = tmp_path / "performance.png"
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        replace_file(path, b"new")
    assert list(tmp_path.iterdir()) == []
