"""``python -m perfmodel tables``: what the papers print, beside what this package computes."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from perfmodel import papers
from perfmodel.forward_save import Division, conv_block_ratio, linear_block_ratio
from perfmodel.memory import Saved, SavedStorage, divided, largest_batch, saved_bytes
from perfmodel.text import table
from perfmodel.trace import MUPPET_ALEXNET, MUPPET_RESNET20

if TYPE_CHECKING:
    from torch import nn

__all__ = ["few_bit_sizes", "kept_by", "printed_batches", "released_division", "sections"]

MIB, GIB = 2**20, 2**30
DEVICE_MIB = 32 * 1024
COPIES = 4  # of the parameters: themselves, gradients, Adam's two moments
NONLINEAR = ("GELU", "NewGELU", "ReLU", "ReLU6", "SiLU", "Sigmoid", "Tanh")


def sections() -> Iterator[str]:
    """Yield the tables one by one, each with its title and a word on what differs."""
    yield "All modelled: nothing here is measured. Differences are ours minus the paper's."
    yield _few_bit()
    yield _batches()
    yield _division()
    yield _division_settings()
    yield _equations()
    yield _muppet()


@cache
def kept_by(name: str, batch: int, activation: str, side: int) -> Saved:
    """Return what a model of the zoo keeps for backward.

    Args:
        name: In ``perfmodel.zoo.MODELS``.
        batch: Samples.
        activation: Class in ``torch.nn`` put in place of the model's own, ``""`` for its own,
            ``"in-place"`` for a ReLU that overwrites its input.
        side: Of the images; ignored for tokens.
    """
    import torch

    from perfmodel.zoo import MODELS

    entry = MODELS[name]
    shape = entry.input_shape if entry.is_tokens else (3, side, side)
    dtype = torch.int64 if entry.is_tokens else torch.float32
    with torch.device("meta"):
        model = entry.build(_activation(activation, entry.activation))
        inputs = torch.empty((batch, *shape), dtype=dtype)
    return saved_bytes(model, inputs)


def _activation(name: str, own: "Callable[[], nn.Module]") -> "Callable[[], nn.Module]":
    from torch import nn

    if name == "in-place":
        return lambda: nn.ReLU(inplace=True)
    return getattr(nn, name) if name else own


def few_bit_sizes(name: str) -> tuple[float, float, float]:
    """Return parameters, all that is kept and what activation functions keep, in MiB.

    The paper's convention: one sample of 256 x 256 or 256 tokens, every activation function keeps
    its own input.
    """
    import torch

    from perfmodel.zoo import MODELS

    entry = MODELS[name]
    keeps_input = entry.is_tokens or name.startswith("EfficientNet")
    saved = kept_by(name, 1, "" if keeps_input else "GELU", 256)
    with torch.device("meta"):
        model = entry.build(entry.activation)
    parameters = sum(p.numel() * p.itemsize for p in model.parameters())
    sizes = parameters, saved.total_bytes, saved.of_modules(NONLINEAR)
    return sizes[0] / MIB, sizes[1] / MIB, sizes[2] / MIB


def printed_batches(model: float, kept: float, nonlinear: float) -> tuple[int, ...]:
    """Return the largest batches on 32 GiB, all in MiB: standard, then 1 to 4 bits.

    Source:
        Few-bit backward, section 2 of the review version.
    """
    shares = (1.0, *(bits / 32 for bits in range(1, 5)))
    per_sample = [kept - nonlinear + nonlinear * share for share in shares]
    return tuple(largest_batch(DEVICE_MIB, COPIES * model, size) for size in per_sample)


def released_division(saved: Saved, settings: Division) -> int:
    """Return the bytes kept as DIVISION's released code does it.

    The raw image stays, every layer packs for itself what it shares with others.
    """
    image = saved.kept[0]

    def size(kept: SavedStorage) -> int:
        parts = [divided(kept, saver, settings) for saver in kept.savers]
        return sum(kept.size_bytes if part is None else part[1] for part in parts)

    return image.size_bytes + sum(size(kept) for kept in saved.kept[1:])


def follows(printed: papers.Printed, number: int) -> bool:
    """Whether a printed batch follows from the sizes printed beside it, to a tenth of a MiB."""
    sizes = printed.model, printed.kept, printed.nonlinear
    corners = itertools.product(*((size - 0.05, size + 0.05) for size in sizes))
    found = [printed_batches(*corner)[number] for corner in corners]
    return min(found) <= printed.batches[number] <= max(found)


def _few_bit() -> str:
    rows = []
    for name, printed in papers.FEW_BIT.items():
        ours = few_bit_sizes(name)
        theirs = printed.model, printed.kept, printed.nonlinear
        cells = [name]
        for a, b in zip(ours, theirs, strict=True):
            cells += [f"{a:.2f}", f"{b:.1f}", f"{a / b - 1:+.1%}"]
        rows.append(cells)
    header = [
        "MiB",
        "model",
        "paper",
        "diff",
        "kept",
        "paper",
        "diff",
        "nonlinear",
        "paper",
        "diff",
    ]
    return _section(
        "Few-bit backward, appendix B: one sample, 256 x 256 or 256 tokens, float32",
        table(header, rows),
        "The paper's figures look like allocated memory, whose blocks are rounded up: a few "
        "percent higher. Our models have no dropout and nothing but what their papers describe. "
        "Not explained: the nonlinear part of EfficientNet, and GPT-2, of whose model causal "
        "masks would account for 12 MiB.",
    )


def _batches() -> str:
    rows, equal, within, cells = [], 0, 0, 0
    for name, printed in papers.FEW_BIT.items():
        from_print = printed_batches(printed.model, printed.kept, printed.nonlinear)
        from_model = printed_batches(*few_bit_sizes(name))
        equal += sum(a == b for a, b in zip(from_print, printed.batches, strict=True))
        within += sum(follows(printed, i) for i in range(len(from_print)))
        cells += len(from_print)
        pairs = zip(from_model, printed.batches, strict=True)
        rows.append([name, *(f"{a} ({a - b:+d})" for a, b in pairs)])
    header = ["batch", "standard", "1 bit", "2 bits", "3 bits", "4 bits"]
    return _section(
        "Few-bit backward, appendix B: largest batch on 32 GiB",
        table(header, rows),
        "From our sizes, with the difference to the paper's cell. From the sizes the paper itself "
        f"prints, {equal} of {cells} cells are equal, and {within} are within the rounding of "
        "these sizes to 0.1 MiB.",
    )


def _division() -> str:
    rows = []
    for name, batch, normal, small, ratio in papers.DIVISION_MEMORY:
        saved = kept_by(name, batch, "in-place", 224)
        released = released_division(saved, Division(is_cut=False))
        ours = saved.total_bytes / GIB, released / GIB, saved.total_bytes / released
        cells = [f"{name}, batch {batch}"]
        for a, b in zip(ours, (normal, small, ratio), strict=True):
            cells += [f"{a:.2f}", f"{b:g}", f"{a - b:+.2f}"]
        rows.append(cells)
    header = [
        "GiB",
        "normal",
        "paper",
        "diff",
        "DIVISION",
        "paper",
        "diff",
        "ratio",
        "paper",
        "diff",
    ]
    return _section(
        "DIVISION, table 1(a): kept for backward at 224 x 224, in-place ReLU, B = 8, Q = 2",
        table(header, rows),
        "As its released code does it: image kept raw, blocks left out at the edge, a tensor that "
        "two layers keep packed twice. Batch statistics weigh more in small batches: at batch 4 "
        "the ratios are 10.47 and 10.69.",
    )


def _division_settings() -> str:
    saved = kept_by("ResNet-18/CIFAR", 128, "in-place", 32)
    rows = []
    for block, bits, printed in papers.DIVISION_SETTINGS:
        released = released_division(saved, Division(block, bits, is_cut=False))
        ratio = saved.total_bytes / released
        cells = [f"{ratio:.2f}", f"{printed:.2f}", f"{ratio - printed:+.2f}"]
        rows.append([f"B = {block}, Q = {bits}", *cells])
    return _section(
        "DIVISION, table 2(b): ResNet-18 on CIFAR-10, batch 128",
        table(["ratio", "ours", "paper", "diff"], rows),
        "The paper gives B = 12 and 18 the same ratio, although their means differ in size.",
    )


def _equations() -> str:
    rows = []
    for side in (7, 14, 28, 56):
        printed = papers.DIVISION_RATIOS.get(side)
        difference = "" if printed is None else f"{conv_block_ratio(side) - printed:+.3f}"
        cells = [f"{conv_block_ratio(side):.3f}", f"{printed or ''}", difference]
        rows.append([f"equation 54, side {side}", *cells])
    for features in (64, 128):
        value = linear_block_ratio(features, 16)
        rows.append([f"equation 56, B = 16, {features} features", f"{value:.3f}", "", ""])
    return _section(
        "DIVISION, appendix P: ratio of a block of layers, Q = 2",
        table(["", "ours", "paper", "diff"], rows),
        "The paper charges a plain ReLU one byte an element.",
    )


def _muppet() -> str:
    rows = []
    schedules = ("AlexNet", MUPPET_ALEXNET), ("ResNet20", MUPPET_RESNET20)
    for name, schedule in schedules:
        memory, su = schedule.memory_ratio, 64 / (32 * schedule.memory_ratio + 32)
        printed = papers.MUPPET[name]
        pairs = zip((memory, su), printed, strict=True)
        cells = [c for a, b in pairs for c in (f"{a:.4f}", f"{b:.2f}", f"{a - b:+.4f}")]
        rows.append([f"MuPPET, {name}", *cells])
    return _section(
        "MARViN, table 4: MuPPET's schedules",
        table(["", "MEM", "paper", "diff", "SU", "paper", "diff"], rows),
        "MEM is cut off, not rounded, in the paper. SU was published by MuPPET, from a model of "
        "its own of a GPU's kernels; ours is equation 8 without a search.",
    )


def _section(title: str, body: str, note: str) -> str:
    return "\n".join([title, "", body, "", note])
