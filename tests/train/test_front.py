"""The front of accuracy and cost, against a search by hand, and the checkpoints that a run keeps."""

import dataclasses
import itertools
import json
import random

import pytest
import torch

from marvin import MuppetPolicy
from perfmodel.run import read_run
from perfmodel.summary import totals
from train import front as train_front
from train.config import to_dict
from train.front import Candidate, candidates_of, draw, front, main
from train.loop import evaluate
from train.records import RunFolder, read_csv


def test_nobody_on_the_front_is_beaten_and_everybody_else_is(tmp_path):
    generator = random.Random(1)
    for count in (1, 2, 3, 4, 7, 30) * 20:
        every = [
            Candidate(tmp_path, i, generator.randint(0, 9) / 10, generator.randint(1, 9))
            for i in range(count)
        ]
        found = front(every)
        pairs = {(own.accuracy, own.ebops) for own in every}
        best = {
            (a, c)
            for a, c in pairs
            if not any((x >= a and y < c) or (x > a and y <= c) for x, y in pairs)
        }
        assert {(own.accuracy, own.ebops) for own in found} == best
        costs = [own.ebops for own in found]
        assert costs == sorted(costs)
        for one, other in itertools.pairwise(found):
            assert one.ebops == other.ebops or one.accuracy < other.accuracy


@pytest.mark.parametrize("policy", ["loss-budget", "none"])
def test_a_run_keeps_the_checkpoints_of_its_front(run, tiny, tmp_path, capsys, policy):
    run(dataclasses.replace(tiny, policy=policy, epochs=5, keep_front=True))
    folder = tmp_path / "run"
    found = candidates_of(folder)
    rows = read_csv(folder / "metrics.csv")
    assert [own.accuracy for own in found] == [float(row["validation_accuracy"]) for row in rows]
    last = {total.name: total.value for total in totals(read_run(folder))}["EBOPs"]
    assert found[-1].ebops == pytest.approx(1e6 * last)
    best = front(found)
    assert sorted((folder / "front").iterdir()) == sorted(own.checkpoint for own in best)
    for own in best:
        state = torch.load(own.checkpoint, weights_only=True)
        assert state["progress"]["epoch"] == own.epoch
    main([str(folder), f"{folder}/", f"{folder}/front/.."])
    text = capsys.readouterr().out
    assert [text.count(str(own.checkpoint)) for own in best] == [1] * len(best)
    assert text.count(" M EBOPs ") == len(best)  # each run once, however it is spelled
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("share", "part"), [(0.0, "training"), (0.5, "validation")])
def test_the_picture_says_which_images_were_asked(run, tiny, tmp_path, monkeypatch, share, part):
    run(dataclasses.replace(tiny, policy="none", epochs=1, validation_share=share))
    drawn = []
    monkeypatch.setattr(train_front, "draw", lambda *own: drawn.append(draw(*own)) or drawn[-1])
    main([str(tmp_path / "run")])
    assert [axes.get_ylabel() for axes in drawn[0].axes] == [f"{part} accuracy, %"]


def test_an_epoch_that_ends_in_a_switch_is_measured_with_the_formats_that_it_keeps(
    run, prepare, tiny, tmp_path, monkeypatch
):
    """MuPPET's level rises at the end of epochs 2 and 4: accuracy, cost and checkpoint are of the new one."""
    falling = (1.0 / epoch for epoch in itertools.count(2))
    monkeypatch.setattr("marvin.policies.muppet.epoch_diversity", lambda *_: next(falling))
    monkeypatch.setattr("marvin.policies.muppet.threshold", lambda *_: 1.0)
    monkeypatch.setattr("train.optimizers._policy", lambda *_: MuppetPolicy(window=1, patience=1))
    monkeypatch.setattr("train.front.front", lambda found: found)  # all are kept
    config = dataclasses.replace(tiny, policy="muppet", normalize_gradients=False, lr=0.01)
    run(dataclasses.replace(config, keep_front=True, epochs=4))
    folder = tmp_path / "run"
    rows, found = read_csv(folder / "metrics.csv"), candidates_of(folder)
    assert [float(row["mean_word_length"]) for row in rows] == [8, 12, 12, 14]
    madds = sum(layer.madds for layer in read_run(folder).layers)
    assert [own.ebops for own in found] == [(bits - 1) ** 2 * madds for bits in (8, 12, 12, 14)]
    training = prepare(dataclasses.replace(config, run=str(tmp_path / "other")))
    for row, own in zip(rows, found, strict=True):
        training.load(RunFolder(folder).load_checkpoint(own.checkpoint))
        score = evaluate(training.evaluated, training.parts.validation, training.dataset, 32)
        assert (score.loss, score.accuracy) == (float(row["validation_loss"]), own.accuracy)


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"python -m train\.front: error: .*config\.json"):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    ("changes", "of"),
    [
        ({"dataset": "cifar10"}, "cifar10's validation"),
        ({"validation_share": 0.0}, "digits's training"),
        ({"validation_share": 0.25}, "digits's validation"),
        ({"limit": 7}, "digits's validation"),
    ],
    ids=["dataset", "validation", "share", "limit"],
)
def test_accuracies_of_other_images_are_not_compared(changes, of, tiny, tmp_path):
    for name, own in (("a", {}), ("b", changes), ("c", {"seed": 3})):
        (tmp_path / name).mkdir()
        values = to_dict(dataclasses.replace(tiny, **own))
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    got = rf"got those of digits's validation images \(--.*/a\) and {of} images \(--.*/b\)"
    with pytest.raises(SystemExit, match=got):
        main([str(tmp_path / name) for name in "abc"])
