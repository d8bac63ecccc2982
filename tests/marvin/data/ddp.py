"""One process of ``test_ddp.py``: train with DistributedDataParallel, save what came of it."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import marvin


def make_model():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 70), nn.LayerNorm(70), nn.ReLU(), nn.Linear(70, 3))
    return marvin.tnvs_(model)


def make_optimizer(model, kind):
    policy = {"lookback": (2, 4), "resolution": (10, 20)}
    compact = kind == "compact"
    if kind in ("msgd", "compact"):
        return marvin.MSGD(model.named_parameters(), lr=0.05, compact_state=compact, **policy)
    adamw = torch.optim.AdamW(model.named_parameters(), lr=5e-3)
    return marvin.Quantized(adamw, marvin.MarvinPolicy(**policy))


def main(folder, kind):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    optimizer = make_optimizer(model, kind)
    marvin.quantize_activations(model, optimizer)
    parallel = DistributedDataParallel(model)
    grads, losses = [], []
    for i in range(12):
        g = torch.Generator().manual_seed(100 * i + rank)  # each process has its own samples
        x = torch.randn(8, 6, generator=g)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(x), (x[:, 0] > 0).long())
        loss.backward()
        optimizer.step(loss=loss)
        grads.append([p.grad.clone() for p in model.parameters()])
        losses.append(loss.item())
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "grads": grads,
        "losses": losses,
        "world": world,
    }
    torch.save(saved, Path(folder) / f"{kind}{rank}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in ("msgd", "adamw", "compact"):
        main(sys.argv[1], name)
    dist.destroy_process_group()
