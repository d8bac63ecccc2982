"""Make a model keep less for backward, in one line that can be undone.

from fixedpoint_kernels import forward_save
print(forward_save.convert(model, few_bit=3))  # activations keep 3 bits an element
forward_save.revert(model)
"""

from fixedpoint_kernels.forward_save.conversion import convert, revert
from fixedpoint_kernels.forward_save.report import Call, Kept, Replaced, Report

__all__ = ["Call", "Kept", "Replaced", "Report", "convert", "revert"]
