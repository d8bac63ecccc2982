"""Sharded checkpoints that are damaged or foreign: one error that names the folder, no code run."""

import copy
import os
import pickle
import random
import shutil

import pytest
import torch
from torch import nn

import marvin
from tests.same import assert_same


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def made(width=3):
    model = nn.Linear(width, 2)
    return model, marvin.MSGD(model.named_parameters())


def trained():
    model, optimizer = made()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step(loss=1.0)
    return model, optimizer


@pytest.fixture
def saved(tmp_path):
    model, optimizer = trained()
    marvin.save_sharded(tmp_path / "whole", model, optimizer, {"epoch": 3})
    return tmp_path / "whole"


def test_what_is_whole_loads(saved):
    assert marvin.load_sharded(saved, *made()) == {"epoch": 3}


def test_metadata_run_no_code(saved, tmp_path):
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(ValueError, match=r"whole must hold .*it names \w+\.mkdir"):
        marvin.load_sharded(saved, *made())
    assert not (tmp_path / "made").exists()


def test_what_is_said_to_be_no_tensor_runs_no_code(saved, tmp_path, monkeypatch):
    """torch would unpickle it, whatever stands in its place in the model."""
    real = torch.distributed.checkpoint.save

    def save(state, **where):
        changed = {**state["model"], "weight": Evil(tmp_path / "made")}
        real({**state, "model": changed}, **where)

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint, "save", save)
        marvin.save_sharded(saved, *made())
    with pytest.raises(ValueError, match=r"folder must hold tensors alone, .*: model\.weight"):
        marvin.load_sharded(saved, *made())
    assert not (tmp_path / "made").exists()


def test_a_model_with_other_values_is_named(saved):
    kind = type("Own", (nn.Linear,), {"get_extra_state": lambda _: {"a": 1}})
    model = kind(3, 2)
    optimizer = marvin.MSGD(model.named_parameters())
    with pytest.raises(TypeError, match=r"model's state must hold tensors alone, .*_extra_state"):
        marvin.save_sharded(saved, model, optimizer)
    assert marvin.load_sharded(saved, *made()) == {"epoch": 3}  # which is still there


def test_another_model_is_named(saved):
    with pytest.raises(ValueError, match=r"whole must hold a whole checkpoint .* of this model"):
        marvin.load_sharded(saved, *made(width=4))


def test_what_is_refused_leaves_the_model_as_it_is(saved):
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.named_parameters())
    optimizer = marvin.Quantized(adam, marvin.MarvinPolicy())  # the checkpoint is of SGD
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"of this model and optimizer: .*must be of Adam .*got SGD"
    ):
        marvin.load_sharded(saved, model, optimizer)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damage_is_named(saved, tmp_path, name):
    chance, content = random.Random(name), (saved / name).read_bytes()
    folder, refused = tmp_path / "damaged", []
    for number in range(30):
        changed = bytearray(content)
        if number % 2:
            changed = changed[: chance.randrange(len(content))]
        else:
            for _ in range(20):
                changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        (folder / name).write_bytes(bytes(changed))
        try:
            marvin.load_sharded(folder, *made())
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) >= 15
    assert all(line.startswith(f"{folder} must hold a whole checkpoint") for line in refused)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(ValueError, match="damaged must hold a whole checkpoint"):
        marvin.load_sharded(folder, *made())


def test_a_checkpoint_that_was_half_overwritten_is_none(saved, monkeypatch):
    """Its files may be of two checkpoints, each whole, with the older one's metadata."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(TypeError, match="plain values"):
        marvin.save_sharded(saved, *made(), {"a": {1}})
    assert marvin.load_sharded(saved, *made()) == {"epoch": 3}
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            marvin.save_sharded(saved, *made(), {"epoch": 4})
    with pytest.raises(ValueError, match="whole must hold a whole checkpoint of save_sharded"):
        marvin.load_sharded(saved, *made())
    marvin.save_sharded(saved, *made(), {"epoch": 4})
    assert marvin.load_sharded(saved, *made()) == {"epoch": 4}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_that_torch_loads_in_place_is_refused(tmp_path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    model, optimizer = trained()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"got '0', '1'.* use marvin\.save_sharded"):
        dcp.load({"optimizer": trained()[1]}, checkpoint_id=tmp_path)


def test_keys_of_text_are_refused_and_change_nothing():
    (_, optimizer), (_, other) = trained(), trained()
    state = optimizer.state_dict()
    state["state"] = {str(key): own for key, own in state["state"].items()}
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="must be the integers that its groups have"):
        other.load_state_dict(state)
    assert_same(other.state_dict(), before)
