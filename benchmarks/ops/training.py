"""A training step of ResNet20 in fixed point, beside float32 and the same with QPyTorch.

Batch 128, images of 28x28 with one channel. "weights": MSGD alone; "weights and activations": with
quantised activations as well. QPyTorch rounds weights after each step, from float32 masters, and
activations at the same places, to one format. One element is one image.
"""

from collections.abc import Iterator

import torch
from torch import nn

import marvin
from benchmarks import qpytorch
from benchmarks.steps import Step, training_step
from benchmarks.timing import Case
from train.resnet20 import resnet20

TESTS = "tests/marvin/test_activations.py"
BATCH = 128
WL, FL = 12, 8


def cases() -> Iterator[Case]:
    """Yield a step with quantised weights, then with quantised activations too."""
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    for name, activations in (("weights", False), ("weights and activations", True)):
        contestants = {"ours": _ours(x, y, activations), "float32": _float32(x, y)}
        if theirs := _qpytorch(x, y, activations):
            contestants["QPyTorch"] = theirs
        yield Case(f"ResNet20, {name}", BATCH, contestants)


def _ours(x: torch.Tensor, y: torch.Tensor, activations: bool) -> Step:
    model = resnet20(channels=1)
    marvin.tnvs_(model)
    optimizer = marvin.MSGD(model.named_parameters(), buffer_bits=8)
    if activations:
        marvin.quantize_activations(model, optimizer)
    return training_step(model, x, y, optimizer.zero_grad, lambda loss: optimizer.step(loss=loss))


def _float32(x: torch.Tensor, y: torch.Tensor) -> Step:
    model = resnet20(channels=1)
    sgd = _sgd(model)
    return training_step(model, x, y, sgd.zero_grad, lambda _: sgd.step())


def _qpytorch(x: torch.Tensor, y: torch.Tensor, activations: bool) -> Step | None:
    quant = qpytorch.load()
    if quant is None:
        return None
    from qtorch import FixedPoint
    from qtorch.optim import OptimLP

    fmt = FixedPoint(WL, FL)
    model = resnet20(channels=1)
    if activations:
        rounded = quant.Quantizer(forward_number=fmt, forward_rounding="stochastic")
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.AvgPool2d | nn.Linear):
                module.register_forward_hook(lambda _m, _x, out: rounded(out))
                module.register_forward_pre_hook(lambda _m, x: (rounded(x[0]),))
    weights = quant.quantizer(forward_number=fmt, forward_rounding="stochastic")
    optimizer = OptimLP(_sgd(model), weight_quant=weights, acc_quant=lambda master: master)
    return training_step(model, x, y, optimizer.zero_grad, lambda _: optimizer.step())


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
