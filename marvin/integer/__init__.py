"""Layers on integer units: outputs and both gradients from 8-bit codes, exact.

    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy())
    marvin.quantize_activations(model, optimizer)
    print(marvin.integer.convert(model))   # what runs on integers, and why the rest does not
    ...                                    # train as before
    marvin.integer.revert(model)

One layer, read in this order: ``conversion.convert`` gives it a class of ``layers``, whose
``forward`` asks ``formats.choose`` whether its formats fit, and hands its input to
``autograd.IntegerProduct``, which encodes, multiplies with ``fixedpoint_kernels.products``, and
does the same with the gradient that comes back.
"""

from marvin.integer.conversion import Report, Row, convert, prepack, report, revert
from marvin.integer.layers import IntegerConv1d, IntegerConv2d, IntegerLinear

__all__ = [
    "IntegerConv1d",
    "IntegerConv2d",
    "IntegerLinear",
    "Report",
    "Row",
    "convert",
    "prepack",
    "report",
    "revert",
]
