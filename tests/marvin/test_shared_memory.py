"""Formats and weights that are written into a model's own tensors, by this process or, in shared memory, by another."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn

import marvin
from marvin import integer
from marvin.model_formats import decode_formats, encode_formats
from marvin.rounder import channels_of
from tests.same import assert_same


def make(bits, *, on_integers=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(weights=8, activations=bits))
    marvin.quantize_activations(model, optimizer)
    if on_integers:
        integer.convert(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    return model.eval(), optimizer


def write(buffers, values):
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def write_elsewhere(buffers, values):
    """Let another process write to tensors in shared memory."""
    args = buffers, [value.clone() for value in values]
    process = mp.get_context("spawn").Process(target=write, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def counted(target, values, _):
    write(target.state_dict().values(), values.values())


def uncounted(target, values, _):
    """As NumPy and ``torch.distributed.broadcast`` write: torch does not count it."""
    for name, own in target.state_dict().items():
        own.numpy()[...] = values[name].numpy()


def checkpoint(target, values, folder):
    dcp.save({"model": values}, checkpoint_id=folder, no_dist=True)
    dcp.load({"model": target.state_dict()}, checkpoint_id=folder, no_dist=True)


def kinds(bits, on_integers):
    """Return a model that trained, a frozen one, and a prepared one."""
    model, _ = make(bits, on_integers=on_integers)
    torch.manual_seed(1)
    prepared = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    marvin.prepare(prepared)
    prepared.load_state_dict(model.state_dict())
    return {"trained": model, "frozen": marvin.freeze(model), "prepared": prepared.eval()}


@pytest.mark.parametrize("on_integers", [False, True], ids=["simulated", "integer"])
@pytest.mark.parametrize("way", [counted, uncounted, checkpoint])
@pytest.mark.parametrize("kind", ["trained", "frozen", "prepared"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_formats_that_are_written_in_place_are_seen(kind, way, on_integers, tmp_path):
    model, other = kinds(3, on_integers)[kind], kinds(8, on_integers)["trained"]
    x = torch.randn(4, 32)
    with torch.no_grad():
        before, wanted = model(x), other(x)
        way(model, other.state_dict(), tmp_path)
        assert_same(copy.deepcopy(model)(x), wanted)
        assert_same(model(x), wanted)
    assert not torch.equal(before, wanted)


@torch.no_grad()
def test_a_frozen_model_rounds_by_the_formats_that_it_is_lent():
    with torch.enable_grad():
        model, other = (kinds(bits, False)["frozen"] for bits in (3, 8))
    x = torch.randn(4, 32)
    compiled = torch.compile(model, backend="eager")
    wanted = model(x), other(x)
    assert_same(compiled(x), wanted[0])
    assert_same(torch.func.functional_call(model, other.state_dict(), (x,)), wanted[1])
    assert_same(compiled(x), wanted[0])
    assert_same(model(x), wanted[0])
    counted(model, other.state_dict(), None)
    assert_same(model(x), wanted[1])  # compiled code knows it from here on
    assert_same(compiled(x), wanted[1])


@torch.no_grad()
def test_a_frozen_model_refuses_what_is_no_format():
    with torch.enable_grad():
        frozen = kinds(3, False)["frozen"]
    x, whole = torch.randn(4, 32), frozen[2].fixed_point.clone()
    wanted = frozen(x)
    frozen[2].fixed_point.mul_(2)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Linear\.fixed_point must hold formats"):
            frozen(x)
    frozen[2].fixed_point.copy_(whole)
    assert_same(frozen(x), wanted)
    stochastic = replace(decode_formats(whole, ""), eval_rounding="stochastic")
    frozen[2].fixed_point.copy_(encode_formats(stochastic, channels_of(frozen[2])))
    for _ in range(2):
        with pytest.raises(ValueError, match="must round to nearest in eval mode"):
            frozen(x)


@pytest.mark.parametrize("kind", ["trained", "frozen"])
@pytest.mark.parametrize("on_integers", [False, True], ids=["simulated", "integer"])
@torch.no_grad()
def test_formats_that_another_process_writes_are_seen(on_integers, kind):
    with torch.enable_grad():
        model = kinds(3, on_integers)[kind]
        other = kinds(8, on_integers)[kind]
    x = torch.randn(4, 32)
    model(x)
    model.share_memory()  # after formats were read
    before = model(x)
    write_elsewhere([*model.state_dict().values()], [*other.state_dict().values()])
    assert_same(model.state_dict(), other.state_dict())
    assert_same(model(x), other(x))
    assert not torch.equal(model(x), before)


def test_formats_that_another_process_wrote_are_written_anew():
    model, optimizer = make(3)
    model.share_memory()
    buffer, wanted = model[0].fixed_point, model[0].fixed_point.clone()
    write_elsewhere([buffer], [make(8)[0][0].fixed_point])
    assert not torch.equal(buffer, wanted)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(buffer, wanted)


def test_formats_that_are_half_written_are_read_again(monkeypatch):
    model, _ = make(3)
    model.share_memory()
    whole, x = model[0].fixed_point.clone(), torch.randn(4, 32)
    wanted = model(x)
    model[0].fixed_point[4] += 1
    tries = []

    def sleep(seconds):
        tries.append(seconds)
        if len(tries) == 2:
            model[0].fixed_point.copy_(whole)

    monkeypatch.setattr("marvin.model_formats.time.sleep", sleep)
    assert_same(model(x), wanted)
    assert len(tries) == 2
    model[0].fixed_point[4] += 1
    with pytest.raises(ValueError, match="must hold formats"):
        model(x)
