"""A whole step of training on integer codes, beside float32, bfloat16 autocast and the simulation.

"ours": the loss budget's formats on integer units, ``marvin.integer.convert``. "simulated": the same
without ``convert``. All others are PyTorch's own, by SGD with momentum. Each step has its loss,
backward, and the optimizer with its policy. The policy observes one step of 25, which then runs
unfused: a row of its own. One element is one image.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import marvin
from benchmarks.networks import padded_resnet20
from benchmarks.steps import Step, steps_in_floats, training_step
from benchmarks.timing import Case
from fixedpoint_kernels import products
from train.alexnet import alexnet
from train.resnet20 import resnet20
from train.vit import vit

TESTS = "tests/marvin/test_fusion.py"
SECONDS = 60.0  # a row: steps are long
WINDOW = 25
LATER = 1000  # a step
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # with images and their side
    "ResNet20, 128 images of 32x32": (resnet20, 128, 32),
    "ResNet20 of width 64, 32 images of 32x32": (lambda: resnet20(width=64), 32, 32),
    "ResNet20 with padded short-cuts, 128 images of 32x32": (padded_resnet20, 128, 32),
    "AlexNet, 128 images of 32x32": (alexnet, 128, 32),
    "ViT, 128 images of 32x32": (vit, 128, 32),
}


def cases() -> Iterator[Case]:
    """Yield a step of each network, then the step that the policy observes."""
    print(f"path: {products.path()}")
    for name, (make, images, side) in NETWORKS.items():
        x, y = torch.randn(images, 3, side, side), torch.randint(10, (images,))
        yield Case(name, images, contestants(make, x, y))
    make, images, side = next(iter(NETWORKS.values()))
    x, y = torch.randn(images, 3, side, side), torch.randint(10, (images,))
    observed: dict[str, Step] = {
        name: fixed_point(make, x, y, integer=name == "ours", window=1)
        for name in ("ours", "simulated")
    }
    yield Case("ResNet20, 128 images of 32x32, an observed step", images, observed)


def contestants(
    make: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    simulates: bool = True,
    own: Callable[[], nn.Module] | None = None,
) -> dict[str, Step]:
    """Return steps of a network by what computes them.

    Args:
        make: Builds it.
        x: A batch.
        y: Its classes.
        simulates: Also without integer units.
        own: Builds ours; default: ``make``.
    """
    found = {"ours": fixed_point(own or make, x, y, integer=True)}
    found |= steps_in_floats(make, x, y)
    if simulates:
        found["simulated"] = fixed_point(make, x, y, integer=False)
    return found


def fixed_point(
    make: Callable[[], nn.Module], x: Tensor, y: Tensor, *, integer: bool, window: int = 10**6
) -> Step:
    """Return a step in the loss budget's formats, which it has found."""
    return fixed_point_model(make, x, y, integer=integer, window=window)[1]


def fixed_point_model(
    make: Callable[[], nn.Module], x: Tensor, y: Tensor, *, integer: bool, window: int = 10**6
) -> tuple[nn.Module, Step]:
    """Return a network and a step of it; see ``fixed_point``."""
    torch.manual_seed(0)
    model, layout = make(), torch.channels_last
    model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]: torch has it
    x = x.contiguous(memory_format=layout) if x.dim() == 4 else x
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy(window=window))
    marvin.quantize_activations(model, optimizer)
    if integer:
        marvin.integer.convert(model)

    step = training_step(model, x, y, optimizer.zero_grad, lambda loss: optimizer.step(loss=loss))
    for _ in range(4):  # the first steps are observed
        step()
    state = optimizer.state_dict()
    state["marvin"]["step"] = (
        LATER  # each of the first steps looks whether weights outgrow their formats
    )
    optimizer.load_state_dict(state)
    step()
    return model, step
