"""One process of ``test_fsdp.py``: sharded parameters beside whole ones with the same gradients.

fsdp.py FOLDER compare   train both, compare every step; save in the middle, and the end
fsdp.py FOLDER resume    load what was saved, go on with the gradients, compare the end
"""

import copy
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import marvin

STEPS, SAVED_AFTER = 14, 7
ADAPTIVE = {"lookback": (2, 4), "resolution": (10, 20)}
SAVED = "msgd", "adamw", "compact", "compact_adamw"


class Balance(torch.optim.Optimizer):
    """Needs whole gradients: it counts how many values are above 0 and how many below."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * (p.grad + p.grad.sign().sum()))


def msgd(model, **settings):
    return marvin.MSGD(model.named_parameters(), lr=0.05, **ADAPTIVE, **settings)


def adamw(model, **settings):
    wrapped = torch.optim.AdamW(model.named_parameters(), lr=5e-3)
    policy = marvin.MarvinPolicy(**ADAPTIVE)
    return marvin.Quantized(wrapped, policy, normalize_gradients=True, **settings)


def budget(model):
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    return marvin.Quantized(sgd, marvin.LossBudgetPolicy(window=4, max_wl=12))


def channels(model):
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    return marvin.Quantized(sgd, marvin.StaticPolicy(window=4, per_channel=True))


def growing(model):
    """Weights that begin small are beyond their formats after a step."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-3)
    adam = torch.optim.Adam(model.named_parameters(), lr=0.05)
    return marvin.Quantized(adam, marvin.StaticPolicy(12, 12))


def fixed(model):
    wrapped = torch.optim.RMSprop(model.named_parameters(), lr=1e-3)
    return marvin.Quantized(wrapped, marvin.FixedPolicy(8, 6), quantize_gradients=True)


def whole(model):
    return marvin.Quantized(Balance(model.named_parameters()), marvin.FixedPolicy(8, 5))


def compact_amsgrad(model):
    """Not in one pass: torch moves the decoded masters."""
    wrapped = torch.optim.AdamW(model.named_parameters(), lr=5e-3, amsgrad=True)
    return marvin.Quantized(wrapped, marvin.FixedPolicy(8, 6), compact_state=True)


OPTIMIZERS = {
    "msgd": msgd,
    "adamw": adamw,
    "budget": budget,
    "channels": channels,
    "growing": growing,
    "fixed": fixed,
    "whole": whole,
    "compact": lambda model: msgd(model, compact_state=True),
    "compact_adamw": lambda model: adamw(model, compact_state=True),
    "compact_amsgrad": compact_amsgrad,
    "fine": lambda model: msgd(model, pushdown_range="full", kl_eps=1e-7),
    "options": lambda model: msgd(
        model,
        quantize_gradients=True,
        init_wl=14,
        init_fl=10,
        l1=1e-3,
        l1_params="all",
        kl_counts="sampled",
        pushdown_range="full",
        normalize_gradients=False,
    ),
}


def make_model():
    """Rows that no number of processes divides: a shard of one row, and empty ones."""
    torch.manual_seed(1)
    layers = [nn.Conv1d(3, 5, 3), nn.Flatten(), nn.ReLU(), nn.Linear(90, 17), nn.LayerNorm(17)]
    return marvin.tnvs_(nn.Sequential(*layers, nn.ReLU(), nn.Linear(17, 1)))


def shard(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(model, step):
    g = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(8, 3, 20, generator=g)
    target = (x[:, 0, :1] > 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), target)
    loss.backward()
    return loss.detach()


def full(value):
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {k: full(v) for k, v in value.items()}
    return [full(v) for v in value] if isinstance(value, list) else value


def assert_same(a, b):
    torch.testing.assert_close(full(a), full(b), rtol=0, atol=0, equal_nan=True)


def assert_same_state(a, b):
    a, b = full(a.state_dict()), full(b.state_dict())
    assert repr(a["marvin"]) == repr(b["marvin"])
    assert repr(a) == repr(b)
    tensors = [[s[k] for s in d["state"].values() for k in s if k != "layer"] for d in (a, b)]
    assert_same(*tensors)
    if "optimizer" in a:
        assert_same(*({i: dict(s) for i, s in d["optimizer"]["state"].items()} for d in (a, b)))


def compare(folder, kind):
    """Return how many layers switched, after comparing sharded and whole parameters."""
    twin, model = make_model(), shard(make_model())
    optimizers = [OPTIMIZERS[kind](m) for m in (twin, model)]
    optimizers[0].process_group = dist.group.WORLD  # it gets the gradients by hand
    handles = [marvin.quantize_activations(*p) for p in zip((twin, model), optimizers, strict=True)]
    grads, losses = [], []
    for step in range(STEPS):
        for m, optimizer in zip((twin, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = backward(m, step)
        grads.append([p.grad.full_tensor() for p in model.parameters()])
        for p, grad in zip(twin.parameters(), grads[-1], strict=True):
            p.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step(loss=loss)
        losses.append(loss)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
        assert optimizers[0].formats() == optimizers[1].formats()
        if kind in SAVED and step + 1 == SAVED_AFTER:
            extra = {"steps": step + 1, "pair": (1, 2.5), "none": None, "x": torch.arange(3)}
            marvin.save_sharded(folder / kind, model, optimizers[1], extra)
    assert_same_state(*optimizers)
    for handle in handles:
        handle.remove()
    if kind in SAVED and dist.get_rank() == 0:
        end = {"model": twin.state_dict(), "trace": switches_of(optimizers[0])}
        mean = mean_losses(losses)
        torch.save({**end, "grads": grads, "losses": mean}, folder / f"{kind}.pt")
    elif kind in SAVED:
        mean_losses(losses)
    return len(optimizers[0].trace)


def switches_of(optimizer):
    """Return the trace as text; who gives gradients by hand calls no model, so no inputs are rounded."""
    return repr([replace(row, has_float_inputs=False) for row in optimizer.trace])


def mean_losses(losses):
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def resume(folder, kind, spread):
    """Load, go on with the gradients that were stored, and compare with the end that was."""
    want = torch.load(folder / f"{kind}.pt")
    model = shard(make_model()) if spread else make_model()
    optimizer = OPTIMIZERS[kind](model)
    handle = marvin.quantize_activations(model, optimizer)
    extra = marvin.load_sharded(folder / kind, model, optimizer)
    handle.remove()  # gradients are given, and no model is called
    assert (extra["steps"], extra["pair"], extra["none"]) == (SAVED_AFTER, (1, 2.5), None)
    assert extra["x"].tolist() == [0, 1, 2]
    for step in range(SAVED_AFTER, STEPS):
        for p, grad in zip(model.parameters(), want["grads"][step], strict=True):
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if spread else grad
        optimizer.step(loss=want["losses"][step])
    assert_same(dict(model.state_dict()), want["model"])
    assert switches_of(optimizer) == want["trace"]


def damage_is_refused_by_all(folder):
    """Each process compares a share of the checksums; a single damaged record ends the loading of all."""
    model = shard(make_model())
    optimizer = msgd(model)
    marvin.save_sharded(folder / "damaged", model, optimizer)
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    files = [folder / "damaged" / f"__{number}_0.distcp" for number in range(2)]
    for number, file in enumerate(files):
        whole = file.read_bytes()
        rows = model[3].weight.to_local().detach().numpy().tobytes()
        if dist.get_rank() == number:
            place = whole.index(rows) + 3
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        dist.barrier()
        with pytest.raises(ValueError, match=r"wrong checksum of \w+/data/0"):
            marvin.load_sharded(folder / "damaged", model, optimizer)
        if dist.get_rank() == number:
            file.write_bytes(whole)
        dist.barrier()
        assert_same(dict(model.state_dict()), before)
    assert marvin.load_sharded(folder / "damaged", model, optimizer) == {}


def refusals():
    """What cannot be shared between processes says so."""
    model = shard(make_model())
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match="MuppetPolicy needs whole parameters, got sharded"):
        marvin.Quantized(sgd, marvin.MuppetPolicy())
    with pytest.raises(ValueError, match="store_codes needs whole parameters"):
        marvin.store_codes(model, msgd(model))
    weight = model[3].weight.detach()
    columns = distribute_tensor(weight.full_tensor(), weight.device_mesh, [Shard(1)])
    with pytest.raises(ValueError, match="must be split by rows"):
        marvin.MSGD([nn.Parameter(columns)], lr=0.1)


def collectives_do_not_grow_with_the_layers():
    """Loss, norms, the policy's norms; where windows end, ranges and a histogram a layer; one at first."""
    model = shard(make_model())
    optimizer, counts, switched = msgd(model), [], []
    all_reduce = dist.all_reduce
    try:
        for step in range(6):
            backward(model, step)
            dist.all_reduce = lambda *args, **more: counts.append(step) or all_reduce(*args, **more)  # noqa: B023
            optimizer.step(loss=1.0)
            dist.all_reduce = all_reduce
            switched.append(sum(row.step == step + 1 for row in optimizer.trace))
    finally:
        dist.all_reduce = all_reduce
    found = [counts.count(step) for step in range(6)]
    wanted = [3 + (n > 0) + n + (step == 0) for step, n in enumerate(switched)]
    assert found == wanted, (found, switched)
    assert 0 < sum(n > 0 for n in switched) < 6


def weights_that_are_not_finite_are_named_by_all():
    """One process holds the NaN; all must stop, or the others would wait for it.

    The smallest of NaN and a number is one or the other in gloo, as place and process will have it.
    """
    for layer, holder in ((0, 0), (0, 1), (3, 0), (3, 1), (6, 0)):
        model = shard(make_model())
        optimizer = marvin.MSGD(model.named_parameters(), lr=0.05, lookback=(1, 1))
        if dist.get_rank() == holder:
            optimizer.state[model[layer].weight]["master"][0, 0] = float("nan")
        backward(model, 0)
        with pytest.raises(FloatingPointError, match=rf"must be finite, got {layer}\.weight"):
            optimizer.step(loss=1.0)


def a_whole_state_loads():
    """A state of one process goes to sharded parameters, compact or not."""
    for settings in ({}, {"compact_state": True}):
        _a_whole_state_loads(settings)


def _a_whole_state_loads(settings):
    twin, model = make_model(), shard(make_model())
    optimizers = [adamw(twin, **settings), adamw(model)]
    optimizers[0].process_group = dist.group.WORLD
    for step in range(5):
        twin.zero_grad()
        loss = backward(twin, step)
        for p in twin.parameters():
            dist.all_reduce(p.grad)
        optimizers[0].step(loss=loss)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert_same_state(*optimizers)
    assert {p.grad is None for p in model.parameters()} == {True}


def main(folder, what):
    if what == "resume":
        for kind in SAVED:
            resume(folder, kind, spread=True)
        counts = {"msgd": compare(folder / "other", "options")}
    else:
        counts = {kind: compare(folder, kind) for kind in OPTIMIZERS}
        refusals()
        damage_is_refused_by_all(folder)
        collectives_do_not_grow_with_the_layers()
        a_whole_state_loads()
        weights_that_are_not_finite_are_named_by_all()
    if dist.get_rank() == 0:
        (folder / f"{what}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    main(Path(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
    # A mesh keeps gloo's threads alive beyond this. One of them that lets go of a tensor while Python
    # shuts down aborts the process (seen once in some hundred runs; pytorch/pytorch pull 179291).
    sys.stdout.flush()
    os._exit(0)
