"""LSQ: its rounding and the gradient to its step, against the paper's equations in float64."""

import json
import math

import pytest
import torch
from torch import nn

from benchmarks.lsq import LsqConv2d, LsqLinear, Quantizer, convert, main, quantize
from train.resnet20 import resnet20


@pytest.mark.parametrize(("bits", "signed"), [(2, True), (4, False), (4, True), (8, False)])
def test_values_and_gradients_are_the_papers(bits, signed):
    torch.manual_seed(0)
    x = torch.randn(500, dtype=torch.float64, requires_grad=True)
    step = torch.tensor(0.23, dtype=torch.float64, requires_grad=True)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    y = quantize(x, step, bits, signed=signed)
    ratio = (x / step).detach()
    codes = torch.round(torch.clamp(ratio, low, high))
    torch.testing.assert_close(y.detach(), codes * 0.23)
    upstream = torch.randn(500, dtype=torch.float64)
    y.backward(upstream)
    inside = (ratio > low) & (ratio < high)
    # equation 3: the code outside; inside, the code less the ratio
    to_step = torch.where(inside, codes - ratio, codes)
    want = (upstream * to_step).sum() / math.sqrt(500 * high)
    torch.testing.assert_close(step.grad, want)
    torch.testing.assert_close(x.grad, torch.where(inside, upstream, 0.0))


def test_the_first_batch_sets_step_and_sign():
    quantizer = Quantizer(4)
    x = torch.rand(64)
    torch.testing.assert_close(quantizer.eval()(x), x)  # nothing is set outside of training
    quantizer.train()(x)
    assert not quantizer.signed
    assert quantizer.step.item() == pytest.approx(2 * x.mean().item() / math.sqrt(15), rel=1e-6)
    before = quantizer.step.item()
    assert len(quantizer(x * 5).unique()) <= 16
    assert quantizer.step.item() == before
    other = Quantizer(4)
    other(x - 0.5)
    assert other.signed


def test_every_layer_is_converted_and_the_ends_have_8_bits():
    model = convert(resnet20(10, 1, 4), 3)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert all(isinstance(m, LsqConv2d | LsqLinear) for m in layers)
    assert len(layers) == 22
    bits = [(m.weight_quantizer.bits, m.input_quantizer.bits) for m in layers]
    assert bits == [(8, 8)] + [(3, 3)] * 20 + [(8, 8)]
    model.train()(torch.randn(4, 1, 8, 8)).sum().backward()
    for m in layers:
        assert m.weight_quantizer.step.grad is not None
        codes = m.weight_quantizer(m.weight) / m.weight_quantizer.step
        assert len(codes.detach().round().unique()) <= 2**m.weight_quantizer.bits


def test_it_learns_in_the_trainer_and_resumes(tmp_path, capsys):
    words = ["--dataset", "digits", "--bits", "4", "--width", "4", "--limit", "600", "--batch-size"]
    words += ["32", "--device", "cpu", "--run", str(tmp_path / "run"), "--epochs", "4"]
    main(words)
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    losses = [float(row.split(",")[3]) for row in rows[1:]]
    assert losses[-1] < 0.7 * losses[0]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    main([*words, "--resume"])
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    capsys.readouterr()


def test_it_resumes_with_the_bits_it_began_with_only(tmp_path):
    words = ["--dataset", "digits", "--width", "2", "--limit", "20", "--batch-size", "10"]
    words += ["--device", "cpu", "--run", str(tmp_path / "run"), "--schedule", "plateau"]
    words += ["--ema", "0.5", "--validation-share", "0", "--batch-norm-batches", "0"]
    main([*words, "--bits", "8", "--epochs", "1"])
    before = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(SystemExit) as end:
        main([*words, "--bits", "2", "--epochs", "2", "--resume"])
    assert "--bits must be 8, as in the checkpoint, got 2" in str(end.value)
    assert (tmp_path / "run" / "config.json").read_text() == before
    main([*words, "--bits", "8", "--epochs", "2", "--resume"])
