"""What decides formats: the policies, and what a policy of one's own is made of."""

from marvin.policies.base import FixedPolicy, Policy
from marvin.policies.loss_budget import LossBudgetPolicy, StaticPolicy
from marvin.policies.marvin import MarvinPolicy
from marvin.policies.muppet import MuppetPolicy
from marvin.policies.records import (
    ActivationFormats,
    Layer,
    LayerFormat,
    Measured,
    PlainRecord,
    Rules,
    Step,
    Update,
    word_length,
)
from marvin.policies.trace import Switch

__all__ = [
    "ActivationFormats",
    "FixedPolicy",
    "Layer",
    "LayerFormat",
    "LossBudgetPolicy",
    "MarvinPolicy",
    "Measured",
    "MuppetPolicy",
    "PlainRecord",
    "Policy",
    "Rules",
    "StaticPolicy",
    "Step",
    "Switch",
    "Update",
    "word_length",
]
