"""Make a model keep less for backward, in one line that can be undone.

from fixedpoint_kernels import forward_save
print(forward_save.convert(model, few_bit=3, division={"block": 8, "bits": 2}))
chosen = forward_save.plan(model, batch, budget_bytes=200_000_000)  # or bits for each layer,
forward_save.convert(model, plan=chosen)                            # so that it fits
forward_save.state(model)   # what the noise of division needs in a checkpoint
forward_save.revert(model)
with forward_save.saving(few_bit=3, division=True):  # without a conversion
    loss = model(batch)
forward_save.register(MyGELU, "activation", name="gelu")  # what a class does
"""

from fixedpoint_kernels.forward_save.calls import saving
from fixedpoint_kernels.forward_save.conversion import convert, revert
from fixedpoint_kernels.forward_save.known import register
from fixedpoint_kernels.forward_save.noise import load_state, state
from fixedpoint_kernels.forward_save.plan import CHOICES, LEVELS, plan
from fixedpoint_kernels.forward_save.planned import Candidate, Plan, PlannedLayer
from fixedpoint_kernels.forward_save.report import Call, Kept, Replaced, Report
from fixedpoint_kernels.forward_save.settings import METHODS, Division, FewBit

__all__ = [
    "CHOICES",
    "LEVELS",
    "METHODS",
    "Call",
    "Candidate",
    "Division",
    "FewBit",
    "Kept",
    "Plan",
    "PlannedLayer",
    "Replaced",
    "Report",
    "convert",
    "load_state",
    "plan",
    "register",
    "revert",
    "saving",
    "state",
]
