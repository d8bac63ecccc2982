"""A hyper-parameter has one default, wherever it stands."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import marvin
from fixedpoint_kernels import few_bit
from fixedpoint_kernels.forward_save.maps import Division
from marvin.conversion import quantize_activations
from marvin.model_formats import ModuleFormats
from marvin.policies import adaptation, push_down, push_up
from train.config import MSGD_KEYWORDS, QUANTIZED_KEYWORDS, Config

ROOT = Path(__file__).parents[1]
NONE = inspect.Parameter.empty


def of_signature(function, **renamed):
    """Return the defaults of a function's arguments, by the names of the hyper-parameters."""
    known = inspect.signature(function).parameters.items()
    return {renamed.get(n, n): p.default for n, p in known if p.default is not NONE}


def of_fields(kind, **renamed):
    missing = dataclasses.MISSING
    fields = ((f.name, f.default) for f in dataclasses.fields(kind) if f.default is not missing)
    return {renamed.get(name, name): default for name, default in fields}


def of_table(path, heading):
    """Return the defaults of a table whose first two columns are names and defaults."""
    table = (ROOT / path).read_text().split(f"| `{heading}` | default |")[1].split("\n\n")[0]
    found = {}
    for row in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", table, re.MULTILINE):
        names = re.findall(r"`(\w+)`", row[0])
        value = ast.literal_eval(row[1].strip("` "))
        found |= zip(names, value if len(names) > 1 else [value], strict=True)
    return found


MSGD = of_signature(marvin.MSGD)
CONFIG = of_fields(Config)
KL = {"smoothing": "kl_smoothing", "direction": "kl_direction"}
BUDGET_FLAGS = "kappa", "max_noise", "per_channel", "free_zeros", "loss_floor", "late"
BUDGET, STATIC = marvin.LossBudgetPolicy, marvin.StaticPolicy
PLACES = {  # what must agree: where the defaults come from, and other places of the same names
    "MSGD": (
        MSGD,
        {
            "MarvinPolicy": of_fields(marvin.MarvinPolicy),
            "FixedPolicy": {"symmetric": of_fields(marvin.FixedPolicy)["symmetric"]},
            "flags": {name: CONFIG[name] for name in MSGD_KEYWORDS},
            "push_down": of_signature(push_down.push_down),
            "kl": of_signature(push_down.kl, **KL),
            "expected": of_signature(push_down.expected_divergence, **KL),
            "sampled": {
                name: default
                for name, default in of_signature(push_down.sampled_divergence, **KL).items()
                if name != "stream"  # of the noise
            },
            "push_up": of_signature(push_up.push_up),
            "suggestions": of_signature(push_up.suggestions, variant="pushup"),
            "lookback": of_signature(
                adaptation.adapt_lookback,
                momentum="lookback_momentum",
                rounding="lookback_rounding",
            ),
            "strategy": of_signature(adaptation.adapt_strategy, margin="strategy_margin"),
        },
    ),
    "LossBudgetPolicy": (
        of_fields(BUDGET),
        {
            "docs": of_table("docs/loss_budget.md", "LossBudgetPolicy"),
            "flags": {name: CONFIG[name] for name in BUDGET_FLAGS},
            "StaticPolicy": {n: v for n, v in of_fields(STATIC).items() if n in of_fields(BUDGET)},
        },
    ),
    "quantize_activations": (
        of_signature(quantize_activations),
        {
            "flags": {"ste": CONFIG["ste"]},
            "ModuleFormats": {n: of_fields(ModuleFormats)[n] for n in ("ste", "eval_rounding")},
            "handle": {
                n: of_fields(marvin.QuantizedActivations)[n] for n in ("ste", "eval_rounding")
            },
            "fake_quantize": {"ste": of_signature(marvin.fake_quantize)["ste"]},
        },
    ),
    "tnvs_": (of_signature(marvin.tnvs_), {"flags": {"scale": CONFIG["init_scale"]}}),
    "Division": (
        of_fields(Division),
        {
            "flags": {
                "block": CONFIG["block"],
                "bits": CONFIG["division_bits"],
                "method": CONFIG["division_method"],
            }
        },
    ),
    "few_bit": (of_signature(few_bit.gelu), {"flags": {"bits": CONFIG["bits"]}}),
}
PAIRS = [(owner, place) for owner, (_, others) in PLACES.items() for place in others]


@pytest.mark.parametrize(("owner", "place"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_a_default_is_the_same_everywhere(owner, place):
    defaults, others = PLACES[owner]
    assert others[place]
    assert others[place] == {name: defaults.get(name, NONE) for name in others[place]}


def test_every_argument_of_msgd_has_a_flag_and_every_field_an_argument():
    assert {*MSGD_KEYWORDS} == {*MSGD}
    assert {*of_fields(marvin.MarvinPolicy)} < {*MSGD}
    assert {*QUANTIZED_KEYWORDS} < {*of_signature(marvin.Quantized)}
    assert {*of_table("docs/loss_budget.md", "LossBudgetPolicy")} == {*of_fields(BUDGET)}


def test_quantized_differs_from_msgd_in_what_a_policy_decides_and_in_normalisation():
    rules = marvin.MarvinPolicy.rules
    decided = {"one_dim": rules.one_dim, "quantize_gradients": rules.quantizes_gradients}
    own = of_signature(marvin.Quantized)
    assert {name for name, value in own.items() if value is None} == {*decided}
    assert own | decided | {"normalize_gradients": True} == {name: MSGD[name] for name in own}
    assert own["normalize_gradients"] is False
