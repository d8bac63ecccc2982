"""The transformer under each policy: layers are found, word lengths recorded, and it learns."""

import csv
import dataclasses
import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import perfmodel
from fixedpoint_kernels import few_bit
from perfmodel.report import report
from perfmodel.run import LACKS_PRODUCTS, read_run
from perfmodel.summary import totals
from train import front, main, plot, vit
from train.arguments import parse
from train.config import Config
from train.records import read_csv

LAYERS = 1 + 4 * 4 + 1  # patches, four in each of four blocks, classifier


@pytest.fixture
def small(tmp_path) -> Config:
    """6 epochs of 9 steps of a narrow transformer."""
    torch.manual_seed(0)  # places are drawn from the process's generator, which a script seeds
    words = "--dataset digits --limit 320 --width 16 --batch-size 32 --epochs 6 --device cpu"
    config = parse(vit.DEFAULTS, words.split())
    return dataclasses.replace(config, lookback=(3, 6), lr=0.01, run=str(tmp_path / "run"))


@pytest.mark.parametrize("policy", ["none", "marvin", "loss-budget", "static"])
def test_it_learns_under_every_policy(small, tmp_path, policy):
    main.run(dataclasses.replace(small, policy=policy), vit.vit, vit.MIN_SIDE)
    folder = tmp_path / "run"
    losses = [float(row["train_loss"]) for row in read_csv(folder / "metrics.csv")]
    assert min(losses) < losses[0] - 0.1  # of 2.3, chance; float32 without policy gains 0.2
    if policy == "none":
        return
    with (folder / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = {row["layer"]: row for row in rows}
    assert len(last) == LAYERS
    weights = [row for row in read_csv(folder / "layers.csv") if row["elements"] != "0"]
    assert len(weights) == LAYERS
    result = json.loads((folder / "result.json").read_text())
    mean = sum(int(row["wl"]) for row in last.values()) / LAYERS
    assert result["mean_word_length"] == pytest.approx(mean)
    if policy != "marvin":  # inputs of all layers are seen, and have formats of their own
        assert all(4 <= int(row["input_wl"]) <= 8 for row in last.values())
        notes = {row["note"] for row in rows if int(row["step"]) > 1}
        assert notes <= {"", "weight: it grew beyond its format"}
        mean = sum(int(row["input_wl"]) for row in last.values()) / LAYERS
        assert result["mean_input_word_length"] == pytest.approx(mean)


def test_only_what_multiplies_has_a_format(small):
    training = main.prepare(dataclasses.replace(small, policy="static"), vit.vit, vit.MIN_SIDE)
    names = training.optimizer.layers()
    assert len(names) == LAYERS
    assert "positions.values" not in names
    assert not [row for row in training.layers if row.kind == "unknown"]
    attention = [row for row in training.layers if row.kind == "attention"]
    assert [row.madds for row in attention] == [2 * 16 * 16 * 16] * 4  # two products of 16 tokens


def test_costs_of_a_run_have_products_of_activations(small, tmp_path, capsys):
    """The tables say what TensorBoard and the checkpoints of the front were told."""
    config = dataclasses.replace(small, policy="static", epochs=1, keep_front=True)
    main.run(config, vit.vit, vit.MIN_SIDE)
    folder = tmp_path / "run"
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    last = {
        "EBOPs": events.Scalars("ebops_modelled")[-1].value / 1e6,
        "SU": events.Scalars("speedup/so_far_modelled")[-1].value,
    }
    read = read_run(folder)
    assert not read.lacks_products
    assert sum(row.madds for row in read.layers if not row.weight) == 4 * 2 * 16 * 16 * 16
    values = {total.name: total.value for total in totals(read)}
    assert {name: values[name] for name in last} == pytest.approx(last)
    assert [own.ebops / 1e6 for own in front.candidates_of(folder)] == [values["EBOPs"]]
    assert len(plot.read(folder).layers) == LAYERS

    table = folder / "layers.csv"  # as earlier versions wrote it
    kept = [row for row in table.read_text().splitlines() if ".attention,attention," not in row]
    table.write_text("\n".join([*kept, ""]))
    old = read_run(folder)
    assert old.lacks_products
    assert LACKS_PRODUCTS in report(old)
    front.main([str(folder)])
    assert LACKS_PRODUCTS in capsys.readouterr().out
    model = perfmodel.layers(vit.vit(10, 1, 16), (1, 32, 32))
    assert {t.name: t.value for t in totals(read_run(folder, model))} == pytest.approx(values)


def test_forward_save_finds_its_functions(small):
    config = dataclasses.replace(small, forward_save="few-bit+division", policy="none")
    model = main.prepare(config, vit.vit, vit.MIN_SIDE).model
    assert isinstance(model.blocks[0].gelu, few_bit.GELU)
    assert "_division" in vars(model.blocks[3].fc1)
