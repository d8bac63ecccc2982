"""A step in ``model.join()`` on each process; writes what refused it."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import marvin

dist.init_process_group("gloo")
layer = nn.Linear(8, 3)
optimizer = marvin.MSGD(layer.named_parameters())
model = nn.parallel.DistributedDataParallel(layer)
try:
    with model.join():
        for _ in range(1 + dist.get_rank()):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step(loss=loss)
except RuntimeError as error:
    Path(sys.argv[1], f"{dist.get_rank()}.txt").write_text(str(error))
dist.destroy_process_group()
