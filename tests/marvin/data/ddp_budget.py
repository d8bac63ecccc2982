"""One process of ``test_loss_budget_ddp.py``: a loss budget on its part of each batch."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import marvin

SAMPLES = 12


def train(rank, world, wrap):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
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
        loss = nn.functional.cross_entropy(parallel(x), (x[:, 1] > 0).long())
        loss.backward()
        optimizer.step(loss=loss)
    return model, optimizer


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = train(rank, dist.get_world_size(), DistributedDataParallel)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()
