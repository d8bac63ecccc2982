"""A training step of ResNet20 at whose end formats switch, beside one without: what a policy costs.

With a window of 25 steps, the policy's share of training is 1/25 of what the ratio is above 1.
Weights and activations are quantised, batch 128, images of 28x28 with one channel. One element is
one image.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import marvin
from benchmarks.steps import Step, training_step
from benchmarks.timing import Case
from train.resnet20 import resnet20

TESTS = "tests/marvin/test_loss_budget.py"
SECONDS = 20.0  # a row: steps are long
BATCH = 128
NEVER = 10**9


def cases() -> Iterator[Case]:
    """Yield a row for each policy that measures ranges."""
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    policies: dict[str, Callable[[int], marvin.Policy]] = {
        "loss budget": lambda window: marvin.LossBudgetPolicy(window=window),
        "static": lambda window: marvin.StaticPolicy(window=window),
    }
    for name, policy in policies.items():
        contestants = {"ours": _step(policy(1), x, y), "no switch": _step(policy(NEVER), x, y)}
        yield Case(f"ResNet20, {name}", BATCH, contestants)


def _step(policy: marvin.Policy, x: Tensor, y: Tensor) -> Step:
    model = resnet20(channels=1)
    marvin.tnvs_(model)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01, momentum=0.9)
    optimizer = marvin.Quantized(sgd, policy)
    marvin.quantize_activations(model, optimizer)
    zero_grad, update = optimizer.zero_grad, lambda loss: optimizer.step(loss=loss)
    step = training_step(model, x, y, zero_grad, update)
    for _ in range(12):  # after which formats switch at the ends of windows alone
        step()
    return step
