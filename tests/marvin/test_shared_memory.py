"""Models in shared memory, whose formats and weights another process writes."""

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import marvin
from marvin import integer
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


@pytest.mark.parametrize("on_integers", [False, True], ids=["simulated", "integer"])
@torch.no_grad()
def test_formats_that_another_process_writes_are_seen(on_integers):
    with torch.enable_grad():
        model, _ = make(3, on_integers=on_integers)
        other, _ = make(8, on_integers=on_integers)
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

    monkeypatch.setattr("marvin.rounder.time.sleep", sleep)
    assert_same(model(x), wanted)
    assert len(tries) == 2
    model[0].fixed_point[4] += 1
    with pytest.raises(ValueError, match="must hold formats"):
        model(x)
