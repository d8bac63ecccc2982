"""Figures as the papers print them; nothing here is computed."""

from dataclasses import dataclass

__all__ = [
    "DIVISION_MEMORY",
    "DIVISION_RATIOS",
    "DIVISION_SETTINGS",
    "FEW_BIT",
    "MUPPET",
    "Printed",
]


@dataclass(frozen=True)
class Printed:
    """One row of Few-bit backward's appendix B, in MiB.

    Args:
        model: Size of the parameters.
        kept: "All activations size".
        nonlinear: "Nonlinearity activations size".
        batches: Largest batch on 32 GiB: standard, then 1 to 4 bits.
    """

    model: float
    kept: float
    nonlinear: float
    batches: tuple[int, int, int, int, int]


# Review version, whose formula and cells agree; the arXiv version has other figures for
# DenseNet-161, EfficientNet-B7, RoBERTa and GPT-2.
FEW_BIT = {
    "ResNet-18": Printed(44.6, 40.0, 11.5, (813, 1127, 1113, 1100, 1086)),
    "ResNet-50": Printed(99.2, 156.8, 47.9, (206, 293, 289, 285, 281)),
    "ResNet-101": Printed(171.4, 234.5, 73.4, (136, 196, 193, 190, 188)),
    "ResNet-152": Printed(232.3, 328.2, 104.9, (97, 140, 138, 136, 134)),
    "DenseNet-121": Printed(30.9, 243.8, 79.1, (133, 195, 192, 189, 186)),
    "DenseNet-161": Printed(112.4, 458.8, 147.0, (70, 102, 100, 99, 97)),
    "DenseNet-169": Printed(54.7, 296.3, 95.3, (109, 159, 157, 155, 152)),
    "DenseNet-201": Printed(77.4, 382.2, 123.9, (84, 123, 122, 120, 118)),
    "EfficientNet-B0": Printed(20.4, 112.4, 32.4, (290, 403, 398, 393, 388)),
    "EfficientNet-B3": Printed(47.5, 218.6, 59.5, (149, 202, 200, 197, 195)),
    "EfficientNet-B7": Printed(256.3, 674.8, 179.3, (47, 63, 62, 61, 61)),
    "VGG-11": Printed(507.2, 100.9, 37.0, (304, 472, 464, 456, 448)),
    "VGG-16": Printed(528.2, 163.8, 68.5, (187, 314, 307, 301, 295)),
    "VGG-19": Printed(548.4, 178.8, 75.0, (171, 288, 281, 275, 270)),
    "RoBERTa-base": Printed(480.7, 185.6, 36.0, (166, 204, 203, 201, 200)),
    "RoBERTa-large": Printed(1355.6, 482.1, 96.0, (56, 70, 69, 69, 68)),
    "GPT-2": Printed(491.0, 297.1, 146.2, (103, 198, 192, 187, 182)),
}

# DIVISION, table 1(a), "Act Mem (GB)": model, batch, normal, DIVISION, ratio.
DIVISION_MEMORY = (
    ("ResNet-50", 64, 5.14, 0.49, 10.5),
    ("ResNet-50", 128, 10.25, 0.99, 10.4),
    ("ResNet-50", 256, 20.48, 1.97, 10.4),
    ("WRN-50-2", 64, 6.70, 0.64, 10.5),
    ("WRN-50-2", 128, 13.38, 1.27, 10.5),
    ("WRN-50-2", 256, 26.75, 2.52, 10.6),
)
# DIVISION, table 2(b), ResNet-18 on CIFAR-10: block, bits, ratio.
DIVISION_SETTINGS = ((18, 2, 10.18), (12, 2, 10.18), (8, 2, 9.74), (8, 4, 5.74), (8, 8, 3.25))
DIVISION_RATIOS = {7: 10.35}  # appendix P: side of a map, "at least"

# MARViN, table 4: MEM and SU of MuPPET on CIFAR-10.
MUPPET = {"AlexNet": (0.66, 1.33), "ResNet20": (0.61, 1.38)}
