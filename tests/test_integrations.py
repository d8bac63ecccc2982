"""The examples of docs/integrations.md that need a package run where it is installed."""

import re
from pathlib import Path

import pytest

from fixedpoint_kernels import forward_save

PAGE = Path(__file__).parents[1] / "docs" / "integrations.md"
RECIPES = PAGE.with_name("recipes.md")
BLOCKS = re.findall(r"~~~python\n(.*?)~~~", PAGE.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore")  # those packages' own
@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_the_example_trains(package, tmp_path, monkeypatch, capsys):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (code,) = (block for block in BLOCKS if re.search(rf"^(import|from) {package}\b", block, re.M))
    names = {"__name__": "__main__"}
    exec(compile(code, PAGE.name, "exec"), names)
    out = capsys.readouterr().out
    assert "FixedPoint(wl=" in out
    optimizer = names["trainer"].optimizers[0] if package == "lightning" else names["own"]
    assert len(optimizer.trace) >= 4  # 2 layers: the loss came through, and formats changed
    assert len(optimizer.state_dict()["marvin"]["policy"]["shared"]["losses"]) >= 20


@pytest.mark.filterwarnings("ignore")  # those packages' own
def test_the_trainer_of_transformers_trains(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"~~~python\n(.*?)~~~", RECIPES.read_text(), re.DOTALL)
    names = {"__name__": "__main__"}
    exec(compile(code, RECIPES.name, "exec"), names)
    state = names["optimizer"].state_dict()["marvin"]
    assert state["step"] == names["trainer"].state.global_step == 8
    assert names["trainer"].loss == 0  # came through, for the budget needs it


@pytest.mark.filterwarnings("ignore")  # those packages' own
def test_the_trainer_of_transformers_gives_the_loss_of_all_micro_batches(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"~~~python\n(.*?)~~~", RECIPES.read_text(), re.DOTALL)
    code = code.replace("num_train_epochs=1,", "num_train_epochs=1, gradient_accumulation_steps=2,")
    parts, seen = [], []
    code = code.replace("        return part", "        parts.append(float(part)); return part")
    code = code.replace(
        "        return given", "        seen.append(float(keywords['loss'])); return given"
    )
    names = {"__name__": "__main__", "parts": parts, "seen": seen}
    exec(compile(code, RECIPES.name, "exec"), names)
    assert len(parts) == 2 * len(seen) == 8
    assert seen == pytest.approx([a + b for a, b in zip(parts[::2], parts[1::2], strict=True)])


@pytest.mark.filterwarnings("ignore")  # those packages' own
@pytest.mark.parametrize("package", ["transformers", "lightning", "accelerate"])
def test_the_recipe_of_forward_save_keeps_the_noise(package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    pytest.importorskip("accelerate")  # which transformers' Trainer needs
    monkeypatch.chdir(tmp_path)
    page = PAGE.with_name("forward_save.md")
    blocks = re.findall(r"~~~python\n(.*?)~~~", page.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if re.search(rf"^(import|from) {package}\b", block, re.M))
    names = {"__name__": "__main__"}
    exec(compile(code, page.name, "exec"), names)
    now, kept = forward_save.state(names["model"]), names["kept"]
    assert kept["count"] > 0
    assert now == (kept | {"count": 2 * kept["count"]} if package == "lightning" else kept)


@pytest.mark.filterwarnings("ignore")  # those packages' own
def test_the_adapters_of_peft_are_read_with_their_formats(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    (code,) = (block for block in BLOCKS if re.search(r"^import peft\b", block, re.M))
    names = {"__name__": "__main__"}
    exec(compile(code, PAGE.name, "exec"), names)
    merged, fixed = names["merged"](names["x"]), names["fixed"](names["x"])
    assert names["loss"] < 0.3
    assert all(fmt.wl <= 8 for fmt in names["optimizer"].formats().values())
    assert (fixed.argmax(1) == merged.argmax(1)).float().mean() > 0.95


def test_each_example_is_of_a_package():
    assert len(BLOCKS) == 3
