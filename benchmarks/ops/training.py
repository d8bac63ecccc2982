"""A training step of ResNet20 with MSGD, simulated, beside float32, bfloat16 autocast and QPyTorch.

128 images of 32x32. "weights": MSGD alone; "weights and activations": with quantised activations
as well, rounded with noise as MARViN has it. Ours has its channels last, as the trainers do;
PyTorch's own are there in both layouts. QPyTorch rounds weights after each step, from float32
masters, and activations at the same places, to one format. One element is one image.
"""

from collections.abc import Iterator

import torch
from torch import nn

import marvin
from benchmarks import qpytorch
from benchmarks.steps import Step, steps_in_floats, training_step
from benchmarks.timing import Case
from train.resnet20 import resnet20

TESTS = "tests/marvin/test_activations.py"
SECONDS = 60.0  # a row: steps are long
BATCH = 128
WL, FL = 12, 8


def cases() -> Iterator[Case]:
    """Yield a step with quantised weights, then with quantised activations too."""
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    for name, activations in (("weights", False), ("weights and activations", True)):
        contestants = {"ours": _ours(x, y, activations)} | steps_in_floats(resnet20, x, y)
        if theirs := _qpytorch(x, y, activations):
            contestants["QPyTorch"] = theirs
        yield Case(f"ResNet20, {name}", BATCH, contestants)


def _ours(x: torch.Tensor, y: torch.Tensor, activations: bool) -> Step:
    layout = torch.channels_last
    model = resnet20()
    model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]: torch has it
    marvin.tnvs_(model)
    optimizer = marvin.MSGD(model.named_parameters(), buffer_bits=8)
    if activations:
        marvin.quantize_activations(model, optimizer)
    own = x.contiguous(memory_format=layout)
    return training_step(model, own, y, optimizer.zero_grad, lambda loss: optimizer.step(loss=loss))


def _qpytorch(x: torch.Tensor, y: torch.Tensor, activations: bool) -> Step | None:
    quant = qpytorch.load()
    if quant is None:
        return None
    from qtorch import FixedPoint
    from qtorch.optim import OptimLP

    fmt = FixedPoint(WL, FL)
    model = resnet20()
    if activations:
        rounded = quant.Quantizer(forward_number=fmt, forward_rounding="stochastic")
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.AvgPool2d | nn.Linear):
                module.register_forward_hook(lambda _m, _x, out: rounded(out))
                module.register_forward_pre_hook(lambda _m, x: (rounded(x[0]),))
    weights = quant.quantizer(forward_number=fmt, forward_rounding="stochastic")
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    optimizer = OptimLP(sgd, weight_quant=weights, acc_quant=lambda master: master)
    return training_step(model, x, y, optimizer.zero_grad, lambda _: optimizer.step())
