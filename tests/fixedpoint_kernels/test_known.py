"""Classes of other packages that are known by what they compute."""

import copy
import importlib

import pytest
import torch
from torch import nn

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save.known import Known, known

pytest.importorskip("transformers")


def norm_of(kind):
    """Return a model's RMS norm, with a weight of its own."""
    name = kind.lower()
    found = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = getattr(found, f"{kind}RMSNorm")(32)
    with torch.no_grad():
        own.weight.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    return own


@pytest.mark.parametrize(
    ("kind", "eps", "offset"),
    [
        ("Granite", "variance_epsilon", 0.0),
        ("SmolLM3", "variance_epsilon", 0.0),
        ("Olmo2", "variance_epsilon", 0.0),
        ("Llama4", "eps", 1.0),
        ("Gemma", "eps", 1.0),
        ("Gemma3", "eps", 1.0),
        ("Llama", "variance_epsilon", 0.0),
    ],
)
def test_copies_of_rms_norms_are_known(kind, eps, offset):
    if kind == "Llama4":
        llama4 = importlib.import_module("transformers.models.llama4.modeling_llama4")
        own, offset = llama4.Llama4TextRMSNorm(32), 0.0
    else:
        own = norm_of(kind)
    assert known(own) == Known("rms_norm", eps=eps, offset=offset)


def test_a_copy_keeps_less():
    model = nn.Sequential(nn.Linear(32, 32), norm_of("Granite"), nn.Linear(32, 32))
    plain = copy.deepcopy(model)
    report = forward_save.convert(model, division=forward_save.Division(bits=8))
    assert "1  GraniteRMSNorm  means of blocks" in str(report)
    x = torch.randn(64, 32)
    for net in (model, plain):
        net(x).square().sum().backward()
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad - other.grad).norm() < 0.05 * other.grad.norm()


class _Twice(nn.Module):
    """Looks like a norm of transformers, and computes something else."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x):
        return 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _Once(_Twice):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize(
    ("base", "module", "name", "is_known"),
    [
        (_Once, "transformers.models.mine.modeling_mine", "MineRMSNorm", True),
        (_Twice, "transformers.models.mine.modeling_mine", "TwiceRMSNorm", False),
        (_Once, "mine.modeling", "MineRMSNorm", False),
        (_Once, "transformers.models.mine.modeling_mine", "MineNorm", False),
    ],
)
def test_names_alone_do_not_count(base, module, name, is_known):
    cls = type(name, (base,), {"__module__": module})
    assert (known(cls()) is not None) == is_known


def test_a_class_that_inherits_its_forward_counts_as_the_same():
    mistral = importlib.import_module("transformers.models.mistral.modeling_mistral")
    own = type("Mine", (mistral.MistralRMSNorm,), {})(32)
    assert known(own) == Known("rms_norm", eps="variance_epsilon")
    other = type("Other", (mistral.MistralRMSNorm,), {"forward": lambda self, x: x})(32)
    assert known(other) is None


def test_weights_need_no_values():
    cls = type("LaterRMSNorm", (_Once,), {"__module__": "transformers.models.later.modeling_later"})
    with torch.device("meta"):
        own = cls()
    assert known(own) == Known("rms_norm", eps="eps")
