"""FSDP2: parameters that processes share get the formats and bits of whole ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import marvin

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "marvin" / "data" / "fsdp.py"
sys.path.insert(0, str(SCRIPT.parent))

import fsdp  # noqa: E402  pyright: ignore[reportMissingImports]  it is a script

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)


def run(world, folder, what):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), str(SCRIPT), str(folder), what]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / f"{what}.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two processes compare sharded with whole parameters; how often layers switched."""
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, run(2, folder, "compare")


@pytest.mark.slow
def test_sharded_parameters_are_as_whole_ones(trained):
    _, switches = trained
    assert {kind for kind, count in switches.items() if count >= 6} == {
        *(
            "msgd",
            "adamw",
            "options",
            "fine",
            "budget",
            "channels",
            "growing",
            "compact",
            "compact_adamw",
        )
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", fsdp.SAVED)
def test_one_process_goes_on_from_a_sharded_checkpoint(trained, kind):
    fsdp.resume(trained[0], kind, spread=False)


@pytest.mark.slow
def test_three_processes_go_on_from_a_sharded_checkpoint(trained):
    assert run(3, trained[0], "resume")["msgd"] >= 6


def test_one_process_saves_and_loads_too(tmp_path):
    model = fsdp.make_model()
    optimizer = fsdp.msgd(model)
    marvin.save_sharded(tmp_path / "one", model, optimizer)
    other = fsdp.make_model()
    assert marvin.load_sharded(tmp_path / "one", other, fsdp.msgd(other, seed=5)) == {}
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.fixture
def one_process(tmp_path):
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{"weight_decay": 0.1}, {"momentum": 0.0}])
def test_some_parameters_may_be_left_whole(one_process, settings):
    models = fsdp.make_model(), fsdp.make_model()
    fully_shard(models[1], ignored_params={*models[1][3].parameters()})
    optimizers = [fsdp.msgd(model, **settings) for model in models]
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            fsdp.backward(model, step)
            optimizer.step(loss=1.0)
    fsdp.assert_same(dict(models[1].state_dict()), dict(models[0].state_dict()))
    fsdp.assert_same(*(optimizer.state_dict()["optimizer"]["state"] for optimizer in optimizers))
    assert optimizers[0].formats() == optimizers[1].formats()


def test_a_model_that_is_sharded_after_its_optimizer_was_made_is_refused(one_process):
    model = fsdp.make_model()
    optimizer = fsdp.msgd(model)
    fully_shard(model)
    optimizer.param_groups[0]["params"] = [*model.parameters()]  # as Accelerate does
    with pytest.raises(ValueError, match=r"must be sharded before .* in the place of 0\.weight"):
        optimizer.step()


def test_a_sharded_model_is_not_copied(one_process):
    model = fully_shard(fsdp.make_model())
    marvin.prepare(model)
    calls = marvin.freeze, marvin.spell_attention, lambda m: marvin.calibrate(m, [torch.ones(2, 3)])
    for call in calls:
        with pytest.raises(ValueError, match="must have whole parameters, got sharded ones: call"):
            call(model)


def test_formats_in_a_dtensor_are_refused(one_process):
    model = nn.Sequential(nn.Linear(4, 4))
    marvin.prepare(model)
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match="got a DTensor, as tensor parallelism"):
        model(torch.ones(1, 4))


def test_the_report_says_that_layers_are_sharded(one_process):
    model = nn.Sequential(nn.Linear(4, 4))
    marvin.prepare(model)
    fully_shard(model[0])
    (row,) = marvin.integer.convert(model).rows
    assert row.reason == "its parameters are sharded: call integer.convert before fully_shard"


def test_a_state_whose_formats_would_be_dropped_is_refused():
    model = fsdp.make_model()
    optimizer = fsdp.msgd(model)
    with pytest.raises(
        RuntimeError, match=r"it would drop the formats; write marvin\.save_sharded"
    ):
        get_optimizer_state_dict(model, optimizer)
    saved = optimizer.state_dict()
    dropped = {name: saved[name] for name in ("state", "param_groups")}  # as it was saved before
    with pytest.raises(ValueError, match=r"without the formats: torch\.distributed\.checkpoint"):
        optimizer.load_state_dict(dropped)


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path):
    model = fsdp.make_model()
    optimizer = fsdp.msgd(model)
    with pytest.raises(ValueError, match="must hold a whole checkpoint of save_sharded"):
        marvin.load_sharded(tmp_path, model, optimizer)
    with pytest.raises(TypeError, match=r"<class 'set'> in extra/a"):
        marvin.save_sharded(tmp_path / "bad", model, optimizer, {"a": {1}})
