"""Whatever lies in a run folder: it is read, or refused in one line that names it."""

import dataclasses
import json
import math
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from perfmodel.files import RunError
from perfmodel.report import report
from perfmodel.run import read_run
from train import loop, main, plot, resnet20, table
from train.config import Config
from train.errors import UserError
from train.monitor import Silence
from train.records import RunFolder

DEEP = "[" * 100_000
NAMES = ("config.json", "environment.json", "result.json", "checkpoint.pt")
NAMES += ("layers.csv", "metrics.csv", "trace.csv", "timing.csv")
FOREIGN = ["", "\0", "null", "{}", DEEP, "a,b\n1\n"]
HOSTILE = [None, True, -1, 0, 10**9, 10**30, 10**400, 1e300, math.nan, math.inf, "x", "3", [], {}]
TENSORS = [torch.zeros(2), torch.zeros(0), torch.zeros(2, dtype=torch.int64), torch.tensor(1.0)]
POLICIES = [
    {},
    {"policy": "muppet"},
    {"policy": "loss-budget", "per_channel": True},
    {"optimizer": "sgd"},
]


class Stop(Exception):
    """Stands for the end of the process."""


def small(folder, **settings) -> Config:
    return Config(
        model="resnet20",
        width=2,
        dataset="digits",
        limit=60,
        run=str(folder),
        device="cpu",
        epochs=2,
        batch_size=10,
        checkpoint_steps=3,
        lookback=(1, 3),
        **settings,
    )


def stop_after(steps, monkeypatch):
    real, left = loop.train_step, [steps]

    def step(*args):
        if not left[0]:
            raise Stop
        left[0] -= 1
        return real(*args)

    monkeypatch.setattr(loop, "train_step", step)


def train_on(config, steps, monkeypatch) -> None:
    """Begin or resume a run, and leave it after some steps."""
    with monkeypatch.context() as patch:
        stop_after(steps, patch)
        training = main.prepare(config, resnet20.resnet20, resnet20.MIN_SIDE)
        with training.folder.claim(training.config), main.round_onednn(training.model):
            main.resume(training)
            with pytest.raises(Stop):
                loop.fit(training, Silence())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    main.run(small(folder), resnet20.resnet20, resnet20.MIN_SIDE)
    return folder


@pytest.fixture(scope="module")
def prepared(whole):
    config = dataclasses.replace(small(whole), resume=True)
    return main.prepare(config, resnet20.resnet20, resnet20.MIN_SIDE)


def read_all(folder: Path, prepared) -> int:
    """Call every reader of a run folder; return how many refused it by name."""
    training = dataclasses.replace(prepared, folder=RunFolder(folder))
    config = dataclasses.replace(training.config, run=str(folder))

    def resume() -> None:
        with training.folder.claim(config):
            main.resume(training)
            training.folder.add_row("timing.csv", dict.fromkeys(("epoch", *loop.TIMES), 1))

    readers = [
        lambda: RunFolder(folder).read_config(),
        lambda: RunFolder(folder).read_result(),
        lambda: table.table([folder]),
        lambda: report(read_run(folder)),
        lambda: plot.read(folder),
        resume,
    ]
    refused = []
    for reader in readers:
        try:
            reader()
        except (UserError, RunError) as error:
            refused.append(str(error))
    assert all(str(folder) in line for line in refused)
    return len(refused)


def damaged(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return content[: chance.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(chance.choice((1, 8, 100))):
        bit = chance.randrange(8 * len(content))
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_what_is_whole_is_read(whole, prepared, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    assert read_all(tmp_path / "run", prepared) == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_in_a_files_place(whole, prepared, tmp_path, name, capsys):
    chance, content = random.Random(name), (whole / name).read_bytes()
    outside = tmp_path / "outside"

    def replace(path: Path, kind: object) -> None:
        path.unlink()
        if isinstance(kind, bytes):
            path.write_bytes(kind)
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(outside if kind == "link" else "nowhere")

    kinds: list[object] = [damaged(content, chance) for _ in range(6)]
    kinds += [text.encode() for text in FOREIGN]
    kinds += [b"\xff\xfe\x00", "folder", "link", "lost link"]
    kinds += ["pipe"] if hasattr(os, "mkfifo") else []
    for number, kind in enumerate(kinds):
        outside.write_bytes(content)
        folder = tmp_path / f"run{number}"
        shutil.copytree(whole, folder)
        replace(folder / name, kind)
        refused = read_all(folder, prepared)
        if kind in ("folder", "pipe"):
            assert refused
        if isinstance(kind, bytes) and len(kind) > 90_000:  # nested so deep that Python gives up
            assert refused or name == "checkpoint.pt"
        assert outside.read_bytes() == content
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["config.json", "environment.json", "result.json"])
def test_hostile_values(whole, prepared, tmp_path, name):
    values = json.loads((whole / name).read_text())
    shutil.copytree(whole, tmp_path / "run")
    chance = random.Random(name)
    for key in values:
        for hostile in chance.sample([*HOSTILE, "../../etc", "__init__", "a\0b", DEEP[:900]], 1):
            text = json.dumps({**values, key: hostile}).replace(f'"{DEEP[:900]}"', DEEP[:900])
            (tmp_path / "run" / name).write_text(text + "]" * 900 * (hostile == DEEP[:900]))
            read_all(tmp_path / "run", prepared)
            for other in NAMES[:3]:
                shutil.copy(whole / other, tmp_path / "run" / other)


@pytest.mark.parametrize("name", ["layers.csv", "metrics.csv", "trace.csv", "timing.csv"])
def test_hostile_cells(whole, prepared, tmp_path, name):
    lines = (whole / name).read_text().splitlines()
    shutil.copytree(whole, tmp_path / "run")
    chance = random.Random(name)
    cells = ["", "-1", "0", "nan", "inf", "1e400", "9" * 30, "9" * 5000, "x", "٣", '"', "$\\frac{"]
    for _ in range(25):
        rows = [line.split(",") for line in lines]
        row = chance.choice(rows)
        row[chance.randrange(len(row))] = chance.choice(cells)
        if chance.random() < 0.2:
            row.append("more")
        text = "\n".join(map(",".join, rows)) + "\n"
        (tmp_path / "run" / name).write_text(text)
        read_all(tmp_path / "run", prepared)
        for other in NAMES:
            shutil.copy(whole / other, tmp_path / "run" / other)


def leaves(value, path=()):
    if path:
        yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))


def changed(value, path, new):
    """Return ``value`` with what is at ``path`` replaced, or left out where ``new`` is Stop."""
    name, *rest = path
    pairs = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    if rest:
        pairs[name] = changed(pairs[name], rest, new)
    elif new is Stop:
        del pairs[name]
    else:
        pairs[name] = new
    return pairs if isinstance(value, dict) else type(value)(pairs.values())


@pytest.mark.slow
@pytest.mark.parametrize("settings", POLICIES, ids=lambda s: s.get("policy", s.get("optimizer")))
def test_checkpoints_that_are_whole_but_foreign(settings, tmp_path, monkeypatch):
    config = small(tmp_path / "run", **settings)
    train_on(config, 8, monkeypatch)
    path = RunFolder(tmp_path / "run").checkpoint
    state = torch.load(path, weights_only=True)
    places: dict[tuple, list] = {}
    for place in leaves(state):
        kind = [part for part in place if not isinstance(part, int)][:4]
        places.setdefault(tuple(kind), []).append(place)
    chance, refused = random.Random(0), []
    resumed = dataclasses.replace(config, resume=True)
    values = [*HOSTILE, *TENSORS, Stop]
    for _ in range(25):
        place = chance.choice(places[chance.choice(list(places))])
        torch.save(changed(state, place, chance.choice(values)), path)
        try:
            train_on(resumed, 3, monkeypatch)
        except UserError as error:
            refused.append(str(error))
        except FloatingPointError:
            pass
    assert len(refused) > 12
    assert all(line.startswith(str(path)) for line in refused)
    torch.save(state, path)
    train_on(resumed, 3, monkeypatch)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("version",), "1", "version is '1'"),
        (("version",), math.nan, "version is nan"),
        (("version",), -1, "version is -1"),
        (("model", "conv.weight"), torch.zeros(3), r"model.conv.weight must be \(2, 1, 3, 3\)"),
        (("model", "conv.weight"), Stop, "model must have .* names, .*conv.weight"),
        (("optimizer",), {}, "param_groups"),
        (("optimizer", "state"), {}, "parameter 0 has no .*master"),
        (
            ("optimizer", "optimizer", "state", 0, "momentum_buffer"),
            Stop,
            "parameter 0 has no momentum_buffer",
        ),
        (("optimizer", "state", 0, "stream"), -1, "stream of parameter 0 is -1"),
        (("optimizer", "state", 0, "master"), torch.zeros(1), r"master must be \(2, 1, 3, 3\)"),
        (("optimizer", "state", 0, "layer", "resolution"), 10**9, "resolution of parameter 0 is"),
        (("optimizer", "param_groups", 0, "momentum"), 5.0, "momentum is 5.0, not 0.9"),
        (("optimizer", "param_groups", 0, "lr"), "fast", "lr must be like 0.05, got 'fast'"),
        (("optimizer", "marvin", "policy", "shared", "level"), "highest", "its level is 'highest'"),
        (("optimizer", "marvin", "policy", "settings", "kl_eps"), 0.5, "kl_eps is 0.5, not 0.01"),
        (("optimizer", "marvin", "policy", "shared"), {}, "shared must have 2 names, others are"),
        (
            ("optimizer", "marvin", "policy", "shared", "losses"),
            Stop,
            r"shared must have 2 names, others are \['losses'\]",
        ),
        (("optimizer", "param_groups", 0, "batch_size"), [1, 2], "batch_size must be a whole numb"),
        (("progress", "rows", 1, "validation_accuracy"), 1e300, "accuracy must be 0 to 1, got 1e"),
        (("progress", "rows", 0, "mean_word_length"), math.inf, "length must be 0 to 32, got inf"),
        (("progress", "rows", 0, "lr"), math.nan, "lr must be 0 to .*, got nan"),
        (("progress", "rows", 1, "step"), 7, "metrics of epoch 2 have 2 and step 7"),
        (("scheduler", "step"), 7, r"schedule misses \[\], and has \['step'\]"),
        (("scheduler", "patience"), 7, "its schedule has patience 7, not 10"),
        (("progress", "epoch"), -3, "at step 0 of 5 in epoch -2"),
        (("progress", "seen"), 10**6, "right of 1000000 of 54 images"),
        (("data",), 5, "data is 5"),
    ],
)
def test_what_is_foreign_is_named(place, value, message, whole, tmp_path, prepared):
    shutil.copytree(whole, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    state = torch.load(folder.checkpoint, weights_only=True)
    torch.save(changed(state, place, value), folder.checkpoint)
    training = dataclasses.replace(prepared, folder=folder)
    with pytest.raises(UserError, match=message) as caught:
        main.resume(training)
    assert str(caught.value).startswith(str(folder.checkpoint))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss_sum", math.nan, "loss_sum must be a finite number, got nan"),
        ("first_loss", Stop, "shared must have 11 names, others are"),
        ("begun", Stop, None),  # earlier versions have none
    ],
)
def test_the_window_of_a_loss_budget_is_one_of_a_run(name, value, message, tmp_path, monkeypatch):
    config = small(tmp_path / "run", policy="loss-budget")
    train_on(config, 4, monkeypatch)
    path = RunFolder(tmp_path / "run").checkpoint
    place = "optimizer", "marvin", "policy", "shared", name
    torch.save(changed(torch.load(path, weights_only=True), place, value), path)
    resumed = dataclasses.replace(config, resume=True)
    if message is None:
        train_on(resumed, 1, monkeypatch)
        return
    with pytest.raises(UserError, match=message):
        train_on(resumed, 1, monkeypatch)


def test_a_run_with_the_earlier_tolerance_goes_on_with_it(tmp_path, monkeypatch):
    config = small(tmp_path / "run", policy="static", policy_bits=(8, 16))
    train_on(config, 4, monkeypatch)
    path = RunFolder(tmp_path / "run").checkpoint
    state = torch.load(path, weights_only=True)
    tolerances = (
        ("optimizer", "marvin", "policy", "settings", "sat_tol"),
        ("optimizer", "param_groups", 0, "sat_tol"),
    )
    for value, message in ((1e-3, None), (1e-2, "sat_tol is 0.01, not None")):
        for place in tolerances:
            state = changed(state, place, value)
        torch.save(state, path)
        resumed = dataclasses.replace(config, resume=True)
        if message is None:
            train_on(resumed, 1, monkeypatch)
            continue
        with pytest.raises(UserError, match=message):
            train_on(resumed, 1, monkeypatch)


def test_nothing_in_a_run_folder_says_where_to_write(whole, tmp_path, prepared):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(whole, folder)
    outside.mkdir()
    shutil.rmtree(folder / "tensorboard")
    (folder / "tensorboard").symlink_to(outside)
    with pytest.raises(UserError, match="tensorboard must be a folder of this run, got a link"):
        RunFolder(folder).prepare(dataclasses.replace(small(folder), resume=True))
    assert not list(outside.iterdir())


def test_a_leftover_folder_blocks_no_resume(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / ".x.tmp").mkdir()
    RunFolder(folder).prepare(dataclasses.replace(small(folder), resume=True))
    assert (folder / ".x.tmp").is_dir()
