"""One process of ``test_loss_budget_ddp.py``: a loss budget on its part of each batch."""

import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import marvin

SAMPLES = 12


class Branches(nn.Module):
    """The first half of the samples takes one branch, the other half the other."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x, first):
        x, found = self.stem(x).relu(), []
        half = max(SAMPLES // 2 - first, 0)
        for branch, scale, part in zip(self.branches, (1, 32), (x[:half], x[half:]), strict=True):
            if len(part):
                found.append(branch(scale * part).relu())
        return self.head(torch.cat(found))


class Chain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, _):
        return super().forward(x)


def train(rank, world, wrap, kind):
    torch.manual_seed(1)
    model = kind()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy(window=4, max_wl=12))
    marvin.quantize_activations(model, optimizer)
    parallel = wrap(model)
    part = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    for i in range(13):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(SAMPLES, 6, generator=g)[part]
        if rank == 0:
            x[0, 0] = 99  # that only one process sees
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(x, part.start), (x[:, 1] > 0).long())
        loss.backward()
        optimizer.step(loss=loss)
    return model, optimizer


if __name__ == "__main__":
    # of a branch that the other process alone called
    warnings.filterwarnings("error", "activations are not rounded")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for kind in (Chain, Branches):
        wrap = partial(DistributedDataParallel, find_unused_parameters=kind is Branches)
        model, optimizer = train(rank, dist.get_world_size(), wrap, kind)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, Path(sys.argv[1]) / f"{kind.__name__}{rank}.pt")
    dist.destroy_process_group()
