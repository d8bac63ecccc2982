"""Models of transformers and timm keep as much less as the documentation says."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.ops import real_models
from fixedpoint_kernels import forward_save
from fixedpoint_kernels.few_bit import named
from fixedpoint_kernels.forward_save import handlers, known, sample
from fixedpoint_kernels.forward_save.swap import undo_of

LEAST = {  # times less than exact: few_bit=3, DIVISION with 2 bits
    "Llama": 4,
    "Qwen2": 4,
    "RoBERTa": 4,
    "BERT": 4,
    "BERT, attention written out": 4,
    "GPT-2": 4,
    "T5": 3,
    "timm ViT-S": 5,
    "timm ConvNeXt-T": 5,
    "timm EfficientNet-B0": 5,
    "timm NF-ResNet-50": 5,
    "timm ResNet-50": 9,
}
QUICK = "Llama", "Qwen2", "BERT", "BERT, attention written out", "GPT-2", "T5"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of those packages
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def build(name):
    pytest.importorskip("timm" if name.startswith("timm") else "transformers")
    try:
        return real_models.build(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} cannot be built here: {error}")


def test_every_model_has_its_least():
    assert LEAST.keys() == real_models.MODELS.keys()


@pytest.mark.parametrize("name", LEAST)
def test_bytes_values_and_the_way_back(name):
    model, inputs = build(name)
    exact = sample.observe(model, inputs).size_bytes
    classes = [type(m) for m in model.modules()]
    keys = list(model.state_dict())
    want = values(model, inputs)
    report = forward_save.convert(
        model, few_bit=3, division={"block": 8, "bits": 2}, sample_input=inputs
    )
    converted = sample.observe(model, inputs)
    assert exact > LEAST[name] * converted.size_bytes
    torch.testing.assert_close(values(model, inputs), want, rtol=0, atol=0)
    told = {row.layer for row in (*report.replaced, *report.kept, *report.calls)}
    silent = {who.layer for storage in converted.saved for who in storage.savers} - told
    assert not silent  # whoever keeps memory is in the report
    forward_save.revert(model)
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == keys
    assert sample.observe(model, inputs).size_bytes == exact


def values(model, inputs):
    torch.manual_seed(3)
    for m in model.modules():  # a second pass has the same statistics
        if isinstance(m, nn.BatchNorm2d):
            m.reset_running_stats()
    out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return getattr(out, "last_hidden_state", out).detach()


@pytest.mark.parametrize("name", QUICK)
def test_gradients_with_eight_bits(name):
    model, inputs = build(name)
    want = real_models._gradient(model, inputs)
    forward_save.convert(model, few_bit=8, division={"bits": 8})
    got = real_models._gradient(model, inputs)
    assert (got - want).norm() < 0.03 * want.norm()


@pytest.mark.parametrize("name", ["RoBERTa", "Llama", "GPT-2", "T5"])
def test_few_bits_alone_find_the_activations(name):
    model, inputs = build(name)
    report = forward_save.convert(model, few_bit=3)
    bits = {"T5": {"1 bit an element"}}.get(name, {"3 bits an element"})
    assert {row.keeps for row in report.replaced} == bits
    assert len(report.replaced) >= real_models.LAYERS
    if name != "T5":
        got = real_models._gradient(model, inputs)
        forward_save.revert(model)
        want = real_models._gradient(model, inputs)
        assert 0 < (got - want).norm() < 0.15 * want.norm()


def test_what_each_class_is_known_as():
    model, _ = build("Llama")
    forward_save.convert(model, few_bit=3, division=True)
    layer = model.layers[0]
    bases = [undo_of(m).bases[0].__name__ for m in (layer.mlp.act_fn, layer.input_layernorm, layer)]
    assert bases == ["OwnValues", "OwnRMSNorm", "Scoped"]


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_an_rms_norm_by_its_formula_is_that_of_its_calls(name, monkeypatch):
    model, _ = build(name)
    kind = ("LlamaRMSNorm", "T5LayerNorm")[name == "T5"]
    norm = copy.deepcopy(next(m for m in model.modules() if type(m).__name__ == kind))
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    x = torch.randn(3, 5, norm.weight.numel(), requires_grad=True)
    want = torch.autograd.grad((norm(x) * 3 + 1).square().sum(), [x, norm.weight])
    forward_save.convert(norm, division={"bits": 8})
    got = torch.autograd.grad((norm(x) * 3 + 1).square().sum(), [x, norm.weight])
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()  # 8 bits


class Cubic(nn.Module):
    """An activation of one's own."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * torch.tanh(self.scale * x)


class GemmaLike(nn.Module):
    """A norm with an offset."""

    def __init__(self):
        super().__init__()
        self.weight, self.small = nn.Parameter(torch.randn(16) / 4), 1e-5

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.small).rsqrt() * (1 + self.weight)


class Standardised(nn.Linear):
    """Makes its weight from the parameter."""

    def forward(self, x):
        weight = self.weight / self.weight.norm(dim=1, keepdim=True)
        return nn.functional.linear(x, weight, self.bias)


@pytest.fixture
def entries(monkeypatch):
    monkeypatch.setattr(known, "_entries", dict(known._entries))
    yield
    known._lookup.cache_clear()


@pytest.mark.usefixtures("entries")
def test_a_class_that_runs_again_has_the_tensors_of_a_functional_call():
    forward_save.register(Standardised, "recompute")
    model, other = (nn.Sequential(Standardised(16, 16)) for _ in range(2))
    x, given = torch.randn(256, 16), dict(other.named_parameters())
    want = torch.autograd.grad(other(x).square().sum(), [*given.values()])
    forward_save.convert(model, division={"bits": 8})
    y = torch.func.functional_call(model, given, (x,))
    got = torch.autograd.grad(y.square().sum(), [*given.values()])
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()  # 8 bits


@pytest.mark.usefixtures("entries")
def test_classes_of_ones_own():
    here = __name__
    forward_save.register(Cubic, "activation")
    forward_save.register(f"{here}.GemmaLike", "rms_norm", eps="small", offset=1.0)
    forward_save.register(Standardised, "recompute")
    model = nn.Sequential(Cubic(0.5), Cubic(2.0), GemmaLike(), Standardised(16, 16))
    x = torch.randn(256, 16, requires_grad=True)
    grads = [x, *model.parameters()]
    y = model(x)
    want = torch.autograd.grad(y.square().sum(), grads)
    report = forward_save.convert(model, few_bit=8, division={"bits": 8}, sample_input=x)
    assert [row.layer for row in report.replaced] == ["0", "1", "2", "3"]
    assert report.calls == ()
    got_y = model(x)
    torch.testing.assert_close(got_y, y, rtol=0, atol=0)
    for a, b in zip(torch.autograd.grad(got_y.square().sum(), grads), want, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()  # 8 bits
    plan_bytes = sample.observe(model, x).size_bytes
    forward_save.revert(model)
    plan = forward_save.plan(model, x, budget_bytes=2 * plan_bytes)
    assert [row.layer for row in plan.layers] == ["0", "1", "2", "3"]
    forward_save.convert(model, plan=plan)
    assert sample.observe(model, x).size_bytes == plan.predicted_bytes


class OwnGELU(nn.Module):
    """An activation of one's own that torch has, too."""

    def forward(self, x):
        return nn.functional.gelu(x)


@pytest.mark.usefixtures("entries")
def test_activations_of_ones_own_compile_without_graph_breaks():
    torch._dynamo.reset()
    named.table_of.cache_clear()  # as in a process that has run nothing else
    named._shipped.cache_clear()
    forward_save.register(Cubic, "activation")
    forward_save.register(OwnGELU, "activation", name="gelu")
    model = nn.Sequential(nn.Linear(4, 64), Cubic(0.5), OwnGELU(), Cubic(2.0), nn.Linear(64, 2))
    forward_save.convert(model, few_bit=3)
    x, weights = torch.randn(32, 4), [*model.parameters()]
    found = []
    for dynamic in (None, True):  # True makes symbols of their numbers
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        found.append(torch.autograd.grad(compiled(x).square().sum(), weights))
    want = torch.autograd.grad(model(x).square().sum(), weights)
    torch.testing.assert_close(found, [want] * 2, rtol=1e-5, atol=1e-5)  # sums in another order


def test_what_register_refuses():
    with pytest.raises(ValueError, match=r"with its module, 'module.Class', got 'Nope'"):
        forward_save.register("Nope", "activation")
    with pytest.raises(TypeError, match="a class, or its path as text, got GELU"):
        forward_save.register(nn.GELU(), "activation")  # pyright: ignore
    with pytest.raises(ValueError, match="kind must be one of activation, rms_norm"):
        forward_save.register(Cubic, "norm")
    with pytest.raises(ValueError, match="the name must be one of"):
        forward_save.register(Cubic, "activation", name="cube")


def test_only_a_class_that_has_the_forward_is_known():
    assert known.known(nn.GELU()) is None
    assert "relu" in handlers.HANDLERS
