"""``--policy``: the same harness with other policies."""

import dataclasses
import itertools
import json

import pytest
import torch

import marvin
from fixedpoint_kernels import BlockFloat, FixedPoint
from perfmodel.run import read_run
from perfmodel.summary import totals
from train.arguments import parse
from train.config import Config, run_folder
from train.records import read_csv
from train.resnet20 import DEFAULTS


@pytest.mark.parametrize(
    ("policy", "kind", "fmt"),
    [
        ("marvin", marvin.MarvinPolicy, FixedPoint(8, 4)),
        ("muppet", marvin.MuppetPolicy, BlockFloat(8)),
        ("fixed:10,6", marvin.FixedPolicy, FixedPoint(10, 6)),
    ],
)
def test_policies_make_their_optimizer(prepare, tiny, policy, kind, fmt):
    training = prepare(dataclasses.replace(tiny, policy=policy))
    assert isinstance(training.policy, kind)
    assert training.optimizer.formats()["conv.weight"] == fmt
    assert training.activations is not None


def test_policies_for_integer_hardware_take_their_flags(prepare, tiny):
    flags = [
        "--policy",
        "loss-budget",
        "--kappa",
        "0.03",
        "--max-noise",
        "0.1",
        "0.2",
        "--policy-bits",
        "3",
        "7",
    ]
    config = parse(tiny, [*flags, "--ends-bits", "8", "--no-quantize-activations"])
    expected = marvin.LossBudgetPolicy(
        kappa=0.03, max_noise=(0.1, 0.2), min_wl=3, max_wl=7, ends_wl=8, batch_size=32
    )
    assert prepare(config).policy.settings() == expected.settings()
    policy = prepare(parse(tiny, ["--policy", "static", "--policy-bits", "4", "5"])).policy
    assert policy.settings() == marvin.StaticPolicy(4, 5).settings()
    training = prepare(parse(tiny, ["--policy", "static"]))
    assert training.policy.settings() == marvin.StaticPolicy().settings()
    assert training.optimizer.param_groups[0]["one_dim"] == "float"


def test_mean_word_lengths_are_in_the_result(run, tiny, tmp_path):
    summary = run(dataclasses.replace(tiny, policy="loss-budget", ends_bits=8))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"layers' inputs {result['mean_input_word_length']:.1f} bits" in summary
    rows = read_csv(tmp_path / "run" / "trace.csv")
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    for name, column in (("mean_word_length", "wl"), ("mean_input_word_length", "input_wl")):
        bits = [int(row[column]) for row in last]
        assert result[name] == pytest.approx(sum(bits) / len(bits))
        assert max(bits) == bits[0] == bits[-1] == 8
        assert min(bits) < result[f"{name}_by_size"] < 8
    # the first and the last layer have 8 bits and few weights: by size they count for less
    assert result["mean_word_length_by_size"] < result["mean_word_length"]


def test_no_policy_is_float32(prepare, tiny):
    config = parse(DEFAULTS, ["--policy", "none"])
    assert config.optimizer == config.method == "sgd"
    training = prepare(dataclasses.replace(tiny, policy="none"))
    assert isinstance(training.optimizer, torch.optim.SGD)
    assert training.policy is None


def test_names_of_runs_tell_the_policy():
    config = Config(dataset="digits", policy="fixed:8,-2", seed=3)
    assert str(run_folder(config)) == "runs/resnet20-digits-fixed-8--2-seed3"
    with pytest.raises(ValueError, match=r"--policy must be marvin, .* got fixed:8"):
        Config(policy="fixed:8")


def test_muppet_owns_the_rate_and_the_end(run, tiny, tmp_path, monkeypatch):
    short = marvin.MuppetPolicy(levels=(8, 32), window=1, patience=1, epochs_per_lr=1, lr_decays=1)
    # a diversity of one epoch is always 1: no violation, so say when
    falling = (1.0 / epoch for epoch in itertools.count(2))
    monkeypatch.setattr("marvin.policies.muppet.epoch_diversity", lambda *_: next(falling))
    monkeypatch.setattr("marvin.policies.muppet.threshold", lambda *_: 1.0)
    monkeypatch.setattr("train.optimizers._policy", lambda *_: short)
    run(dataclasses.replace(tiny, policy="muppet", epochs=9, plateau_patience=0))
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    assert [float(r["mean_word_length"]) for r in rows] == [8, 32, 32, 32]
    assert [float(r["lr"]) for r in rows] == pytest.approx([0.02, 0.02, 0.02, 0.002])


def test_targets_of_the_loss_budget(run, tiny, tmp_path):
    run(dataclasses.replace(tiny, policy="loss-budget", target_bits=5.0))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    bits = (result["mean_word_length"] + result["mean_input_word_length"]) / 2
    assert bits == pytest.approx(5.0, rel=0.02)
    folder = tmp_path / "ebops"
    run(dataclasses.replace(tiny, policy="loss-budget", target_ebops=2e6, run=str(folder)))
    found = {total.name: total.value for total in totals(read_run(folder))}
    assert found["EBOPs"] == pytest.approx(2.0, rel=0.02)


def test_a_rate_that_never_falls_is_told_where_words_wait_for_it(run, tiny, tmp_path):
    late = dataclasses.replace(tiny, policy="loss-budget", target_bits=5.0, late=True)
    assert "--late: the learning rate did not fall to half of its highest, so words kept 8" in run(
        late
    )
    falls = dataclasses.replace(late, schedule="cosine", run=str(tmp_path / "falls"))
    assert "--late" not in run(falls)


def test_options_of_the_loss_budget_are_of_no_other_policy():
    with pytest.raises(ValueError, match="--target-bits must be with --policy loss-budget"):
        Config(policy="static", target_bits=5.0)
