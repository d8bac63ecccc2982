"""LSQ, learned step sizes, in the trainer that everything else here runs in.

    python -m benchmarks.lsq --bits 4 --model resnet20 --dataset digits --epochs 40

trains as ``python -m train.resnet20 --policy none --no-normalize-gradients`` does, with the same flags,
data, augmentation and run folder; only layers differ: weight and input of each convolution and linear
layer are rounded to multiples of a step that is learned with the weights. Steps are real numbers, not
powers of two, so hardware needs a multiplication to scale. The first and the last layer have 8 bits.

Source: Esser, McKinstry, Bablani, Appuswamy and Modha, Learned Step Size Quantization, 2020. Differs:
trained from the beginning, where the paper fine-tunes a float32 network; weight decay on steps too.
"""

from perfmodel.arguments import Parser, stop_at_interrupt

NAMES = "resnet20", "alexnet", "vit"
PARSER = Parser(
    "python -m benchmarks.lsq",
    (__doc__ or "").partition("\n")[0],
    epilog="Any other flag is one of python -m train.MODEL.",
)
PARSER.add_argument("--model", choices=NAMES, default="resnet20")
PARSER.add_argument("--bits", type=int, choices=range(2, 9), default=4)

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_known_args()

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train import alexnet, resnet20, vit
from train.main import main as train_main

__all__ = ["LsqConv2d", "LsqLinear", "Quantizer", "convert", "main", "quantize"]

ENDS_BITS = 8
MODELS = {
    "resnet20": (resnet20.DEFAULTS, resnet20.resnet20, resnet20.MIN_SIDE),
    "alexnet": (alexnet.DEFAULTS, alexnet.alexnet, alexnet.MIN_SIDE),
    "vit": (vit.DEFAULTS, vit.vit, vit.MIN_SIDE),
}


def quantize(x: Tensor, step: Tensor, bits: int, *, signed: bool) -> Tensor:
    """Round to codes of ``bits`` bits times ``step``; the gradient to ``step`` is the paper's, scaled.

    Equations 1 to 3 and section 2.2: the gradient to the step is divided by the root of the number of
    values times the largest code.
    """
    low, high = code_range(bits, signed=signed)
    scale = 1 / math.sqrt(x.numel() * high)
    own = (step - step * scale).detach() + step * scale
    codes = (x / own).clamp(low, high)
    return ((codes.round() - codes).detach() + codes) * own


def code_range(bits: int, *, signed: bool) -> tuple[int, int]:
    """Return the smallest and the largest code."""
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


class Quantizer(nn.Module):
    """Rounds by a step that is learned; the first batch sets it, and whether values have signs.

    Args:
        bits: Of a code.
    """

    signed: Tensor

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.step = nn.Parameter(torch.zeros(()))  # 0: not set yet
        self.register_buffer("signed", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        """Return values of the shape of ``x``."""
        if x.is_meta:  # perfmodel counts shapes alone
            return x
        if self.training and torch.is_grad_enabled() and not self.step:
            self._set(x.detach())
        if not self.step:
            return x
        return quantize(x, self.step, self.bits, signed=bool(self.signed))

    def get_extra_state(self) -> int:
        """Return the bits, which a checkpoint keeps beside the step."""
        return self.bits

    def set_extra_state(self, state: int) -> None:
        """Refuse a checkpoint of other bits.

        Raises:
            ValueError: It is one.
        """
        if state != self.bits:
            raise ValueError(f"--bits must be {state}, as in the checkpoint, got {self.bits}")

    @torch.no_grad()
    def _set(self, x: Tensor) -> None:
        """Take the paper's first step, section 2.1."""
        self.signed.fill_(bool((x < 0).any()))
        largest = code_range(self.bits, signed=bool(self.signed))[1]
        self.step.copy_(2 * x.abs().mean() / math.sqrt(largest))


class LsqConv2d(nn.Conv2d):
    """A convolution that rounds its weight and input."""

    weight_quantizer: Quantizer
    input_quantizer: Quantizer

    def forward(self, input: Tensor) -> Tensor:
        """Return (samples, outputs, height, width) of (samples, channels, height, width)."""
        x, weight = self.input_quantizer(input), self.weight_quantizer(self.weight)
        padding = self.padding
        assert not isinstance(padding, str)
        return F.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, self.groups)


class LsqLinear(nn.Linear):
    """A linear layer that rounds its weight and input."""

    weight_quantizer: Quantizer
    input_quantizer: Quantizer

    def forward(self, input: Tensor) -> Tensor:
        """Return (samples, ..., outputs) of (samples, ..., features)."""
        return F.linear(self.input_quantizer(input), self.weight_quantizer(self.weight), self.bias)


def convert(model: nn.Module, bits: int) -> nn.Module:
    """Make every convolution and linear layer round; the first and the last to 8 bits."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: LsqConv2d, nn.Linear: LsqLinear}
    layers = [module for module in model.modules() if type(module) in kinds]
    for place, module in enumerate(layers):
        own = ENDS_BITS if place in (0, len(layers) - 1) else bits
        module.__class__ = kinds[type(module)]
        module.add_module("weight_quantizer", Quantizer(own))
        module.add_module("input_quantizer", Quantizer(own))
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Train; all flags but ``--model`` and ``--bits`` are those of the trainers."""
    own, rest = PARSER.parse_known_args(argv)
    defaults, build, min_side = MODELS[own.model]
    defaults = replace(
        defaults,
        policy="none",
        normalize_gradients=False,
        lr=0.1,
        schedule="cosine",
        run=f"runs/lsq{own.bits}-{own.model}",
    )

    def built(classes: int, channels: int, width: int, activation: type[nn.Module]) -> nn.Module:
        return convert(build(classes, channels, width, activation), own.bits)

    train_main(defaults, built, min_side, rest)


if __name__ == "__main__":
    main()
