"""torch's own attention and encoder layers: torch's values and, nearly, gradients, from fewer bytes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fixedpoint_kernels import forward_save

FINE = {"block": 8, "bits": 8}
NEAR = 0.03  # relative error of a gradient whose operands have 8 bits
LONG, BATCH, WIDE = 24, 3, 32
CAUSAL = torch.triu(torch.ones(LONG, LONG, dtype=torch.bool), 1)
PADDING = torch.arange(LONG).expand(BATCH, -1) >= torch.tensor([[LONG], [20], [7]])


def run(module, *inputs, **options):
    """Return the outputs and gradients of one training step with dropout from a fixed seed."""
    module.zero_grad()
    torch.manual_seed(3)
    out = module(*inputs, **options)
    first = out[0] if isinstance(out, tuple) else out
    (first * torch.arange(first.numel()).sin().view_as(first)).sum().backward()
    outs = [x.detach() for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    return outs, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def kept_bytes(module, *inputs, **options):
    """Count storages that autograd saves, parameters apart: the count shares no code with ours."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found = {}

    def pack(x):
        found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = module(*inputs, **options)
    del out
    return sum(s.nbytes() for at, s in found.items() if at not in own)


def check(module, *inputs, less=2.0, **options):
    before, gradients = run(module, *inputs, **options)
    exact = kept_bytes(module, *inputs, **options)
    forward_save.convert(module, division=FINE)
    after, noisy = run(module, *inputs, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for a, b in zip(noisy, gradients, strict=True):
        assert (a - b).norm() <= NEAR * b.norm() + 1e-3  # the key's bias has a gradient of 0
    assert sum((a - b).norm() for a, b in zip(noisy, gradients, strict=True)) > 0
    assert less * kept_bytes(module, *inputs, **options) < exact
    forward_save.revert(module)
    back, again = run(module, *inputs, **options)
    assert all(torch.equal(a, b) for a, b in zip(back + again, before + gradients, strict=True))


OPTIONS = {
    "plain": {},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "float mask": {"attn_mask": torch.zeros(LONG, LONG).masked_fill(CAUSAL, float("-inf"))},
    "mask of heads": {"attn_mask": CAUSAL.expand(4 * BATCH, -1, -1)},
    "padding": {"key_padding_mask": PADDING},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_calls_of_attention(name, batch_first, need_weights):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDE, 4, dropout=0.1, batch_first=batch_first)
    x = torch.randn(BATCH, LONG, WIDE)
    x = x if batch_first else x.transpose(0, 1)
    check(attention, x, x, x, need_weights=need_weights, **OPTIONS[name])


@pytest.mark.parametrize(
    "made",
    [
        {"kdim": 16, "vdim": 48},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
    ],
    ids=str,
)
def test_kinds_of_attention(made):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDE, 4, batch_first=True, **made)
    sizes = WIDE, made.get("kdim", WIDE), made.get("vdim", WIDE)
    inputs = [torch.randn(BATCH, LONG, size) for size in sizes]
    check(attention, *inputs, average_attn_weights=False)
    check(attention, *(x[0] for x in inputs), need_weights=False)  # one sample, without a batch


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers(kind, norm_first):
    torch.manual_seed(0)
    layer = kind(WIDE, 4, 64, batch_first=True, norm_first=norm_first)
    x = torch.randn(BATCH, LONG, WIDE)
    check(layer, x, *([x + 1] if kind is nn.TransformerDecoderLayer else []))


def test_an_encoder_layer_in_few_bits():
    layer, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(8, 48, 64)
    exact = kept_bytes(layer, x)
    report = forward_save.convert(layer, few_bit=3, division=True, sample_input=x)
    assert exact / kept_bytes(layer, x) > 12
    assert not report.kept
    rows = {row.layer: row.keeps for row in report.replaced}
    assert rows["self_attn"].endswith("operands of attention with twice the bits")
    assert "self_attn.out_proj" not in rows  # never called
    assert [(c.layer, c.function, c.keeps) for c in report.calls] == [
        ("", "relu", "1 bit an element")
    ]


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_scope(need_weights):
    attention, x = nn.MultiheadAttention(WIDE, 4), torch.randn(LONG, BATCH, WIDE)
    with forward_save.saving(division=FINE) as scope:
        attention(x, x, x, attn_mask=CAUSAL, need_weights=need_weights)
    operands = {"baddbmm", "softmax", "bmm"} if need_weights else {"scaled_dot_product_attention"}
    assert set(scope.handled) == {"multi_head_attention_forward", "linear"} | operands
    with forward_save.saving(few_bit=3) as scope:
        attention(x, x, x)
    assert not scope.handled


def test_a_mask_that_learns_gets_its_gradient():
    attention, x = nn.MultiheadAttention(WIDE, 4), torch.randn(LONG, BATCH, WIDE)
    mask = torch.randn(LONG, LONG, requires_grad=True)

    def gradient():
        attention(x, x, x, attn_mask=mask)[0].square().sum().backward()
        found, mask.grad = mask.grad, None
        return found

    expected = gradient()
    forward_save.convert(attention, division=FINE)
    found = gradient()
    assert 0 < (found - expected).norm() < NEAR * expected.norm()


def test_autocast():
    attention, x = nn.MultiheadAttention(WIDE, 4), torch.randn(LONG, BATCH, WIDE)
    with torch.autocast("cpu", torch.bfloat16):
        for need_weights in (True, False):
            check(attention, x, x, x, attn_mask=CAUSAL, need_weights=need_weights, less=1.0)


class Ops(TorchDispatchMode):
    """Note the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_eval_takes_the_fast_path():
    layer = nn.TransformerEncoderLayer(WIDE, 4, 64, batch_first=True).eval()
    attention, x = nn.MultiheadAttention(WIDE, 4, batch_first=True).eval(), torch.randn(2, 5, WIDE)

    def seen():
        with torch.no_grad(), Ops() as ops:
            outs = [layer(x), attention(x, x, x)[0]]
        return outs, ops.names

    expected, fast = seen()
    assert "aten::_transformer_encoder_layer_fwd" in fast
    assert "aten::_native_multi_head_attention" in fast
    forward_save.convert(layer, few_bit=3, division=True)
    forward_save.convert(attention, division=True)
    found, names = seen()
    assert names == fast
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_eval_with_gradients_is_exact():
    attention, x = nn.MultiheadAttention(WIDE, 4).eval(), torch.randn(LONG, BATCH, WIDE)
    before, gradients = run(attention, x, x, x)
    forward_save.convert(attention, division=True)
    after, found = run(attention, x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(after + found, before + gradients, strict=True))


def test_copies_and_reasons():
    layer, x = nn.TransformerEncoderLayer(WIDE, 4, 64), torch.randn(LONG, BATCH, WIDE)
    report = forward_save.convert(layer, few_bit=3)
    assert {k.layer: k.reason for k in report.kept}["self_attn"] == "division is not asked for"
    forward_save.revert(layer)
    forward_save.convert(layer, few_bit=3, division=FINE)
    kept = kept_bytes(layer, x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert kept_bytes(twin, x) == kept
        forward_save.revert(twin)
        assert type(twin.self_attn) is nn.MultiheadAttention
        assert kept_bytes(twin, x) > 2 * kept
