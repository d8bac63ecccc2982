"""One process of ``test_ddp.py``: what processes must have in common, and models that have nothing in common."""

import gc
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import marvin


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def msgd(model, **settings):
    return marvin.MSGD(model.named_parameters(), lr=0.05, **settings)


def budget(model, seed=0, **settings):
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    return marvin.Quantized(adamw, marvin.LossBudgetPolicy(window=4, **settings), seed=seed)


def train(optimizer, parallel, number, steps=9, *, tells=True):
    """Each number has samples of its own, and their scale."""
    for i in range(steps):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * i + number))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel((1 + 7 * number) * x), (x[:, 0] > 0).long())
        loss.backward()
        optimizer.step(loss=loss if tells else None)


def train_alone(number, wrap=lambda model: model):
    """A model of its own, steps of its own number; what came of it."""
    model = make_model(number)
    optimizer = budget(model)
    marvin.quantize_activations(model, optimizer)
    train(optimizer, wrap(model), number, 9 + number)
    weights = [p.tolist() for p in model.parameters()]
    return weights, [str(row) for row in optimizer.trace]


def train_together(model, optimizer, wrap=DistributedDataParallel, *, tells=True):
    """Train in both processes; the refusal, or whether both have the same weights."""
    marvin.quantize_activations(model, optimizer)
    parallel = wrap(model)
    try:
        with warnings.catch_warnings():  # the second process takes the weights of the first
            warnings.filterwarnings("ignore", message="weights changed outside")
            train(optimizer, parallel, dist.get_rank(), tells=tells)
    except RuntimeError as error:
        return str(error)
    weights = [getattr(p, "full_tensor", p.detach)().tolist() for p in model.parameters()]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (weights, [str(row) for row in optimizer.trace]))
    return everyone[0] == everyone[1]


def shard(model, shape=(2,)):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "rows")[-len(shape) :])
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def average_by_hand(model, group):
    """Gradients that hooks average, as they come."""

    def average(p):
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)
    return model


def by_hand(**settings):
    model = make_model(0)
    optimizer = budget(model)
    for name, value in settings.items():
        setattr(optimizer, name, value)
    return train_together(model, optimizer, lambda m: average_by_hand(m, dist.group.WORLD))


def frozen_objects():
    """A collector that was told to leave all alone does not hide the model."""
    model = make_model(0)
    optimizer = budget(model)
    parallel = DistributedDataParallel(model)
    gc.freeze()
    found = train_together(model, optimizer, lambda _: parallel)
    assert gc.get_freeze_count() > 0  # as before
    gc.unfreeze()
    return found


def collectives():
    """How many each step has beside those of DistributedDataParallel."""
    model, counts, all_reduce = make_model(0), [], dist.all_reduce
    optimizer = msgd(model)
    parallel = DistributedDataParallel(model)
    dist.all_reduce = lambda *args, **more: counts.append(1) or all_reduce(*args, **more)
    found = []
    for _ in range(3):
        train(optimizer, parallel, 0, steps=1)
        found.append(sum(counts))
        counts.clear()
    dist.all_reduce = all_reduce
    return found


def dropped():
    """Train together, then alone, each its own number of steps."""
    model = make_model(0)
    optimizer = msgd(model)
    parallel = DistributedDataParallel(model)
    train(optimizer, parallel, 0, steps=2)
    del parallel
    return warned(lambda: train(optimizer, model, 0, steps=2 + dist.get_rank()))


def begin(make, seed=0, wrap=None, **settings):
    """Train what begins with a seed of the model and settings of the optimizer; ``wrap`` comes before that, else DDP after."""
    model = make_model(seed)
    if wrap is None:
        return train_together(model, make(model, **settings))
    model = wrap(model)
    return train_together(model, make(model, **settings), lambda m: m)


def dealt_out():
    """Each process has an optimizer of some parameters."""
    model = make_model(0)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    try:
        marvin.Quantized(zero, marvin.MarvinPolicy())
    except ValueError as error:
        return str(error)


def warned(run):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if "trains alone" in str(w.message)]


def main(folder):
    rank = dist.get_rank()
    own = [dist.new_group([i]) for i in range(2)][rank]
    columns = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "other"))["data"]
    found = {
        "alone": train_alone(rank),
        "groups": train_alone(rank, lambda m: DistributedDataParallel(m, process_group=own)),
        "warned": warned(lambda: train_alone(rank)),
        "not warned": warned(lambda: by_hand(process_group=None)),
        "seed": begin(lambda m: budget(m, seed=rank)),
        "masters": begin(msgd, seed=rank),
        "taken": begin(budget, seed=rank),
        "settings": begin(budget, max_wl=7 + rank),
        "batch_size": begin(budget, batch_size=8 + rank),
        "loss": train_together(model := make_model(0), budget(model), tells=rank == 0),
        "no loss": train_together(model := make_model(0), msgd(model), tells=False),
        "resumed": resumed(rank),
        "sharded": begin(budget, seed=rank, wrap=shard),
        "sharded seed": begin(lambda m: budget(m, seed=rank), wrap=shard),
        "replicas": begin(budget, seed=rank, wrap=lambda m: shard(m, (2, 1))),
        "same replicas": begin(budget, wrap=lambda m: shard(m, (2, 1))),
        "mesh": sharded_alone(rank, columns),
        "by hand": by_hand(process_group=dist.group.WORLD),
        "frozen": frozen_objects(),
        "collectives": collectives(),
        "dealt out": dealt_out(),
        "dropped": dropped(),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def resumed(rank):
    """The second process goes on from a state, the first begins."""
    model = make_model(0)
    optimizer = msgd(model)
    if rank:
        other = make_model(0)
        before = msgd(other)
        before.process_group = None
        train(before, other, 0, steps=1)
        optimizer.load_state_dict(before.state_dict())
    return train_together(model, optimizer)


def sharded_alone(rank, mesh):
    """A mesh of one process has nothing to do with the other."""
    model = make_model(rank)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = budget(model)
    marvin.quantize_activations(model, optimizer)
    train(optimizer, model, rank, 9 + rank)
    weights = [p.full_tensor().tolist() for p in model.parameters()]
    return weights, [str(row) for row in optimizer.trace]


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    main(sys.argv[1])
    dist.destroy_process_group()
