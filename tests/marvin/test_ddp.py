"""DistributedDataParallel: every process takes the same decisions and writes the same bits."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from marvin import ranks
from marvin.ranks import ALONE, Processes, rank

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "marvin" / "data" / "ddp.py"
sys.path.insert(0, str(SCRIPT.parent))

import ddp  # noqa: E402  pyright: ignore[reportMissingImports]  it is a script
import processes  # noqa: E402  pyright: ignore[reportMissingImports]  it is a script


def run(world, folder, script=SCRIPT):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), str(script), str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_are_the_same_to_the_bit_and_one_process_too(world, tmp_path):
    run(world, tmp_path)
    for kind in ("msgd", "adamw", "compact"):
        ranks = [torch.load(tmp_path / f"{kind}{i}.pt") for i in range(world)]
        first = ranks[0]
        assert first["world"] == world
        assert len({tuple(r["losses"]) for r in ranks}) == world  # each saw its own samples
        for other in ranks[1:]:
            torch.testing.assert_close(other["model"], first["model"], rtol=0, atol=0)
            assert repr(other["optimizer"]) == repr(first["optimizer"])
        means = [sum(step) / world for step in zip(*(r["losses"] for r in ranks), strict=True)]
        kept = first["optimizer"]["marvin"]["policy"]["shared"]["losses"]
        assert kept == pytest.approx(means[-len(kept) :], rel=1e-6)
        assert_one_process_gives_the_same(kind, first, means)


def assert_one_process_gives_the_same(kind, expected, losses):
    model = ddp.make_model()
    optimizer = ddp.make_optimizer(model, kind)
    for grads, loss in zip(expected["grads"], losses, strict=True):
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step(loss=loss)
    weights = {k: v for k, v in expected["model"].items() if not k.endswith("fixed_point")}
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    trace = optimizer.state_dict()["marvin"]["trace"]
    # gradients are given by hand here: the model is not called, and no inputs are rounded
    wanted = [row | {"has_float_inputs": True} for row in expected["optimizer"]["marvin"]["trace"]]
    assert repr(trace) == repr(wanted)
    assert len(trace) >= 4


def test_without_other_processes_the_loss_stays():
    loss = torch.tensor(3.0)
    assert ALONE.mean(loss, torch.device("cpu")) is loss
    assert ALONE.mean(None, torch.device("cpu")) is None
    assert rank() == 0


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_a_step_in_join_is_refused_before_any_process_waits(tmp_path):
    run(2, tmp_path, SCRIPT.with_name("join.py"))
    for rank_ in range(2):
        assert "got a step in model.join()" in (tmp_path / f"{rank_}.txt").read_text()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What ``processes.py`` found, by process."""
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    folder = tmp_path_factory.mktemp("processes")
    run(2, folder, SCRIPT.with_name("processes.py"))
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize(
    ("case", "name", "remedy"),
    [
        ("seed", "seed", "give the optimizer the same seed="),
        (
            "masters",
            "masters",
            "call torch.manual_seed with the same seed before the model is made",
        ),
        ("settings", "settings", "the same arguments in each"),
        ("resumed", "formats, masters", "load the same state in each"),
        ("sharded seed", "seed", "give the optimizer the same seed="),
        ("replicas", "masters", "or make the optimizer after DistributedDataParallel"),
        ("loss", "use of loss=", "the process's own loss in each process, or no loss in any"),
    ],
    ids=["seed", "masters", "settings", "resumed", "sharded seed", "replicas", "loss"],
)
def test_processes_that_begin_with_other_things_all_refuse(found, case, name, remedy):
    for own in found:
        assert f"got other {name} in some: " in own[case]
        assert remedy in own[case]


def test_masters_that_other_seeds_made_need_no_advice():
    """DistributedDataParallel sends weights that the first process has rounded by its seed."""

    class WithAnother(Processes):
        def min(self, x):
            return x - 1  # the other process has smaller numbers

    told = [("seed", 0), ("masters", 1)]
    remedies = ranks._REMEDIES
    for begun in (told, told[1:]):
        with pytest.raises(RuntimeError, match="got other ") as refused:
            WithAnother().check_alike(begun, torch.device("cpu"))
        assert f"{', '.join(name for name, _ in begun)} in some: {remedies[begun[0][0]]}" in str(
            refused.value
        )
        assert str(refused.value).endswith(remedies[begun[0][0]])


@pytest.mark.parametrize(
    "case", ["taken", "batch_size", "sharded", "same replicas", "by hand", "frozen", "no loss"]
)
def test_processes_that_train_together_end_alike(found, case):
    """Weights of the first process that all take, samples of their own, rows of their own."""
    for own in found:
        assert own[case] is True


@pytest.mark.parametrize("case", ["alone", "groups", "mesh"])
def test_a_model_of_one_process_has_nothing_to_do_with_the_others(found, case):
    for number, own in enumerate(found):
        weights, trace = json.loads(json.dumps(processes.train_alone(number)))
        assert own[case] == [weights, trace]
        assert len(trace) > 3


def test_a_process_says_once_that_it_trains_alone(found):
    for own in found:
        (said,) = own["warned"]
        assert "write optimizer.process_group = torch.distributed.group.WORLD" in said
        assert own["not warned"] == []


def test_processes_that_dropped_their_wrapper_train_alone(found):
    for own in found:
        (said,) = own["dropped"]
        assert "this process trains alone" in said


def test_a_look_for_models_lets_no_garbage_stay():
    class Cycle:
        def __init__(self):
            self.own = self

    gc.freeze()
    try:
        cycle = Cycle()
        waits = weakref.ref(cycle)
        del cycle
        ranks._parallel_models()
        gc.collect()
        assert waits() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_first_step_has_one_collective_more(found):
    assert [own["collectives"] for own in found] == [[2, 1, 1]] * 2


def test_optimizers_that_are_dealt_out_are_refused_by_name(found):
    for own in found:
        assert "got ZeroRedundancyOptimizer, which deals them out" in own["dealt out"]
