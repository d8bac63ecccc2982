"""Chains of transformers that run fused: beside the same model unfused, and through what people do."""

import copy
import io
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import marvin
from fixedpoint_kernels import tokens
from fixedpoint_kernels.dropout import keeps
from marvin.hooks import rounders_of, state_of
from marvin.integer import convert, report, revert
from marvin.integer.fusion import Fused
from marvin.integer.graph import trace
from marvin.integer.token_run import TokenRun
from marvin.policies.observer import Observer, inputs_of
from marvin.rounder import formats_of
from tests.graphs import nodes_of
from tests.observed import nearly_the_same

pytestmark = pytest.mark.skipif(tokens.path() is None, reason="no path of tokens on this processor")


class Unflattened(nn.Module):
    """Attention as ``train.vit`` has it."""

    def __init__(self, width, heads, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Viewed(Unflattened):
    """With sizes from the input's shape, and parts by ``chunk``."""

    def forward(self, x):
        n, t, w = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(n, t, self.heads, w // self.heads).transpose(1, 2)
        k = k.view(n, t, self.heads, w // self.heads).transpose(1, 2)
        v = v.view(n, t, self.heads, w // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, scale=0.2)
        return self.out(y.transpose(1, 2).contiguous().view(n, t, w))


class Separate(nn.Module):
    """With a layer each for queries, keys and values."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            own(x).reshape(x.size(0), -1, self.heads, 16).permute(0, 2, 1, 3)
            for own in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.permute(0, 2, 1, 3).flatten(-2))


class Mixed(Unflattened):
    """Heads that lie otherwise than any chain takes: side by side in each feature."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (16, self.heads, 3)).permute(4, 0, 3, 1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Scaled(Unflattened):
    """Multiplies queries before attention, as Whisper and OPT do."""

    factor = 0.25  # which attention multiplies by itself: 16**-0.5

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q * self.factor
        q, k, v = (
            own.unflatten(-1, (self.heads, -1)).transpose(1, 2) for own in (q, k, self.values(q, v))
        )
        y = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self.out(y.transpose(1, 2).flatten(2))

    def values(self, q, v):
        return v


class ByOther(Scaled):
    factor = 0.3


class Twice(Scaled):
    """Takes scaled queries twice."""

    def values(self, q, v):
        return q + v


class Block(nn.Module):
    def __init__(self, width, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, attention=Unflattened, depth=2):
        super().__init__()
        self.embed = nn.Linear(6, 32)
        self.blocks = nn.Sequential(*(Block(32, attention(32, 2)) for _ in range(depth)))
        self.norm, self.fc = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x):
        return self.fc(self.norm(self.blocks(self.embed(x))).mean(1))


CHAINED = 8  # linear layers of ``Net`` in its chain


def make(seed=0, model=None, fused=True, policy=None, steps=2):
    """Return a model and its optimizer, after the two steps that the policy observes first."""
    torch.manual_seed(seed)
    model = Net() if model is None else model
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9)
    optimizer = marvin.Quantized(sgd, policy or marvin.LossBudgetPolicy(window=10**6), seed=seed)
    optimizer.activations = marvin.quantize_activations(model, optimizer)
    convert(model, fused=fused)
    train(model, optimizer, steps, -steps)
    return model, optimizer


def batch(seed, n=8):
    generator = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(n, 9, 6, generator=generator)
    return x, torch.randint(0, 4, (n,), generator=generator)


def step(model, optimizer, seed, n=8):
    x, y = batch(seed, n)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step(loss=loss)
    return loss.item()


def train(model, optimizer, steps, first=0):
    return [step(model, optimizer, first + i) for i in range(steps)]


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def is_fused(model, *args):
    """Say whether a forward pass goes through chains, of more than a layer alone."""
    return bool(operations(model(*args or batch(0)[:1])))


def operations(y):
    """Return how many operations each chain of a graph has, layers alone aside."""
    nodes = [node for node in nodes_of(y) if "Tokens" in type(node).__name__]
    return sorted(n for node in nodes if (n := len(node.program.segment.operations)) > 1)


def gradients(model, x, y, draws=8):
    """Return the mean of gradients, each with other noise."""
    model.zero_grad()
    for _ in range(draws):
        (F.cross_entropy(model(x), y) / draws).backward()
    return [p.grad for p in model.parameters()]


def twins(model=None):
    """Return a model after some steps, and a copy of it that is not fused."""
    model, optimizer = make(model=model, steps=6)  # the policy looks at the fifth, too
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    return model, twin, optimizer


def near(model, twin, draws=8):
    """Compare outputs, and gradients by how far the noise of gradients moves these itself."""
    x, y = batch(9, 32)
    assert (model(x) - twin(x)).abs().max() < 0.05 * twin(x).abs().max()
    state_of(model).gradients = state_of(twin).gradients = 1000  # the same noise
    found, wanted = (gradients(m, x, y, draws) for m in (model, twin))
    other = gradients(copy.deepcopy(twin), x, y, draws)
    for (name, _), a, b, c in zip(model.named_parameters(), found, wanted, other, strict=True):
        # that of a bias of keys is 0 but for rounding
        assert (a - b).norm() < 1.5 * (c - b).norm() + 0.02 * b.norm() + 1e-8, name


ATTENTIONS = {
    "unflattened": Unflattened,
    "viewed": Viewed,
    "separate": Separate,
    "causal": lambda width, heads: Unflattened(width, heads, causal=True),
}


def test_powers_of_two_before_attention_become_its_scale():
    models = [twins(Net(own))[0] for own in (Unflattened, Scaled)]
    x, _ = batch(0)
    y, other = (model(x) for model in models)
    assert operations(y) == operations(other) == [21]
    same(y, other)
    for own in ByOther, Twice:
        model, twin, _ = twins(Net(own))
        assert len(operations(model(x))) > 1
        near(model, twin)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_a_transformer_is_near_its_unfused_twin(kind):
    model, twin, _ = twins(Net(ATTENTIONS[kind]))
    traced = trace(model)
    assert len(traced.tokens) == 1
    assert sum(m.kind == "attention" for m in traced.tokens[0].members) == 2
    assert is_fused(copy.deepcopy(model))
    assert not is_fused(copy.deepcopy(twin))
    near(model, twin)
    run = next(
        m for m in model.forward._modes[True]._runs[frozenset()].chains if isinstance(m, TokenRun)
    )
    kinds = {type(op) for op in run._described_for([torch.zeros(8, 9, 32)], []).segment.operations}
    assert kinds == {tokens.Norm, tokens.Linear, tokens.Attention, tokens.Add, tokens.Curved}


class Encoding(nn.Module):
    """torch's encoder, spelled."""

    def __init__(self, norm_first=True, activation="gelu", batch_first=True, dropout=0.0):
        super().__init__()
        self.embed, self.fc = nn.Linear(6, 32), nn.Linear(32, 4)
        rest = dropout, activation, 1e-5, batch_first, norm_first
        layer = nn.TransformerEncoderLayer(32, 2, 64, *rest)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.encoder, self.batch_first = marvin.spell_attention(encoder), batch_first

    def forward(self, x, mask=None, padding=None):
        y = self.embed(x)
        y = y if self.batch_first else y.transpose(0, 1)
        y = self.encoder(y, mask, src_key_padding_mask=padding)
        return self.fc(y.mean(int(self.batch_first)))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_encoder_is_one_chain(norm_first, activation, batch_first):
    model, twin, _ = twins(Encoding(norm_first, activation, batch_first))
    x, _ = batch(0)
    assert operations(model(x)) == [24]
    near(model, twin)
    with torch.no_grad():
        y = model(x)
        same(y, model(x, None, padding=None))
        own = model.eval()(x)
        frozen = marvin.freeze(model)
        same(frozen(x), own)
        assert (own - twin.eval()(x)).abs().max() < 0.05 * own.abs().max()


def test_torchs_encoder_with_dropout_is_one_chain():
    model, twin, _ = twins(Encoding(dropout=0.5))
    x, _ = batch(0)
    assert operations(model(x)) == [30]
    state = torch.get_rng_state()
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    same(model(x), first)
    same(model(x), second)
    with torch.no_grad():
        own = model.eval()(x)
        same(own, model(x))  # dropout is off
        same(marvin.freeze(model)(x), own)
        assert (own - twin.eval()(x)).abs().max() < 0.05 * own.abs().max()


class Chance(Net):
    """With dropout of values, by modules and by a function, and of attention's weights."""

    class Attention(Unflattened):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            p = 0.2 if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, None, p, self.causal)
            return self.out(y.transpose(1, 2).flatten(2))

    def __init__(self):
        super().__init__(self.Attention)
        for block in self.blocks:
            block.drop = nn.Dropout(0.3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = F.dropout(self.norm(self.blocks(self.embed(x))), 0.4, self.training)
        return self.fc(self.drop(y).mean(1))


def with_masks_of(chain, monkeypatch):
    """Let PyTorch's dropout make 0 what a chain's makes 0 in its next call."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**62, ()))
    torch.set_rng_state(state)
    waiting = [
        (op.odds, seed, stream)
        for stream, op in enumerate(chain.operations)
        if isinstance(op, tokens.Dropout | tokens.Attention)
    ]

    def drop(x, p, training=True, inplace=False):
        odds, *key = waiting.pop(0)
        assert odds.p == p
        assert training
        return x * keeps(x.numel(), odds, *key).view(x.shape) * odds.factor

    def attend(q, k, v, mask, p, causal):
        odds, *key = waiting.pop(0)
        assert odds.p == p
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        samples, heads, count, _ = weights.shape
        shape = samples, heads, -(count // -16), count, 16
        kept = keeps(torch.Size(shape).numel(), odds, *key).view(shape)
        kept = kept.transpose(3, 4).flatten(2, 3)[:, :, :count]
        return weights * kept * odds.factor @ v

    monkeypatch.setattr(F, "dropout", drop)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return waiting


def test_a_chain_with_dropout_is_near_its_unfused_twin(monkeypatch):
    model, twin, _ = twins(Chance())
    x, y = batch(9, 32)
    assert operations(model(x)) == [25]
    (run,) = (
        own for own in model.forward._modes[True]._runs[frozenset()].chains
        if isinstance(own, TokenRun)
    )  # fmt: skip
    (chain,) = {own.segment for own in run._segments.values() if own is not None}
    state_of(model).gradients = state_of(twin).gradients = 1000
    model.zero_grad()
    twin.zero_grad()
    state = torch.get_rng_state()
    F.cross_entropy(model.train()(x), y).backward()
    torch.set_rng_state(state)
    waiting = with_masks_of(chain, monkeypatch)
    output = twin(x)
    assert not waiting
    F.cross_entropy(output, y).backward()
    torch.set_rng_state(state)
    monkeypatch.undo()
    assert (model(x) - output).abs().max() < 0.05 * output.abs().max()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 0.2 * b.grad.norm() + 1e-6, name


def test_dropout_draws_from_torchs_generator_where_there_is_any():
    for make_model, draws in ((Chance, True), (Net, False)):
        model, _, _ = twins(make_model())
        x, _ = batch(0)
        state = torch.get_rng_state()
        model(x)
        assert torch.equal(torch.get_rng_state(), state) is not draws
        state = torch.get_rng_state()
        with torch.no_grad():
            model.eval()(x)
        assert torch.equal(torch.get_rng_state(), state)


def test_one_backward_pass_of_two_sets_of_weights_is_two_of_one_each():
    """As over the tasks of first-order MAML."""
    model, _ = make()
    state, x = state_of(model), batch(0)[0]
    assert state is not None
    found = []
    for is_one in (False, True):
        state.gradients, losses = 0, []
        sets = [{n: f * p.detach() for n, p in model.named_parameters()} for f in (1.0, -0.5)]
        for own in sets:
            tensors = {name: p.requires_grad_() for name, p in own.items()}
            y = torch.func.functional_call(model, tensors, (x,))
            assert operations(y)
            losses.append(y.square().sum())
            if not is_one:
                losses.pop().backward()
        if is_one:
            sum(losses).backward()
        found.append([p.grad for own in sets for p in own.values()])
    same(*found)


def test_activation_checkpointing_drops_the_same():
    model, _, _ = twins(Chance())
    x, y = batch(0)
    model.zero_grad()
    torch.manual_seed(3)
    F.cross_entropy(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    state_of(model).gradients -= 1  # the noise of gradients
    model.zero_grad()
    torch.manual_seed(3)
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
    for p, wanted in zip(model.parameters(), expected, strict=True):
        assert (p.grad - wanted).norm() < 0.2 * wanted.norm() + 1e-6


def test_dropout_that_is_not_by_chance():
    for p in (0.0, 1.0):
        model = Chance()
        model.drop.p = p
        model, _, _ = twins(model)
        x, _ = batch(0)
        assert max(operations(model(x))) >= 24
        if p == 1.0:
            same(model(x), model.fc.bias.expand(8, 4))


def test_dropout_by_a_function_that_never_stops():
    """In eval mode too, as some estimate how sure a model is."""

    class Never(Chance):
        def forward(self, x):
            y = F.dropout(self.norm(self.blocks(self.embed(x))), 0.4)
            return self.fc(self.drop(y).mean(1))

    model, twin, _ = twins(Never())
    x, _ = batch(0)
    with torch.no_grad():
        model.eval(), twin.eval()
        ys = torch.stack([model(x) for _ in range(64)])
        others = torch.stack([twin(x) for _ in range(64)])
    assert ys.std(0).min() > 0
    assert (ys.mean(0) - others.mean(0)).abs().max() < 6 * (others.std(0) / 8).max()


MASKS = {
    "mask": torch.ones(9, 9, dtype=torch.bool).triu(1),
    "padding": torch.arange(9) >= torch.arange(8).view(-1, 1) + 2,
    "both": torch.zeros(9, 9).masked_fill(torch.ones(9, 9).bool().triu(1), -torch.inf),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", MASKS)
def test_torchs_encoder_with_masks_has_chains_between(kind, batch_first):
    given = {"mask" if kind == "both" else kind: MASKS[kind]}
    if kind == "both":
        given["padding"] = MASKS["padding"].float() * -1e9
    model, twin, _ = twins(Encoding(batch_first=batch_first))
    x, y = batch(0)
    assert operations(model(x)) == [24]
    assert operations(model(x, **given)) == [4, 7, 11]
    assert operations(model(x)) == [24]
    assert not torch.equal(model(x, **given), model(x))
    state_of(model).gradients = state_of(twin).gradients = 0
    outputs = [own(x, **given) for own in (model, twin)]
    assert (outputs[0] - outputs[1]).abs().max() < 0.05 * outputs[1].abs().max()
    found = [
        torch.autograd.grad(F.cross_entropy(own, y), [*m.parameters()])
        for own, m in zip(outputs, (model, twin), strict=True)
    ]
    for (name, _), a, b in zip(model.named_parameters(), *found, strict=True):
        if "key.bias" not in name:  # 0 but for rounding
            assert (a - b).norm() < 0.5 * b.norm(), name
    with torch.no_grad():
        own = model.eval()(x, **given)
        same(marvin.freeze(model)(x, **given), own)
        assert (own - twin.eval()(x, **given)).abs().max() < 0.05 * own.abs().max()
        assert not torch.equal(own, model(x))


def test_what_has_attention_of_torch_is_told_to_spell_it():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    optimizer = marvin.Quantized(
        torch.optim.SGD(model.named_parameters(), lr=0.1), marvin.StaticPolicy(6, 7)
    )
    marvin.quantize_activations(model, optimizer)
    rows = {row.name: row.reason for row in convert(model).rows}
    for name in ("layers.0.self_attn", "layers.0.self_attn.out_proj"):
        assert "write model = marvin.spell_attention(model) before" in rows[name]
    assert "spell" not in rows["layers.0.linear1"]


@pytest.mark.parametrize("default", [None, False, 2, 0.5, "a"])
def test_arguments_that_nobody_gives_are_their_defaults(default):
    class Optional(Net):
        def forward(self, x, other=default, *, last=default):
            if other == default and last == default:
                return super().forward(x)
            return super().forward(x) * 2

    model, _ = make(model=Optional())
    x, _ = batch(0)
    y = model(x)
    for args, kwargs in (
        ((x,), {}),
        ((x, default), {}),
        ((x,), {"other": default, "last": default}),
    ):
        assert is_fused(model, *args) or kwargs
        same(model(*args, **kwargs), y)
        assert operations(model(*args, **kwargs)) == [21]
    for args, kwargs in (((x, 7), {}), ((x,), {"last": 7})):
        twice = model(*args, **kwargs)
        assert operations(twice) == [21]
        same(twice, 2 * y)
    for args, kwargs in (((x, [7]), {}), ((x,), {"last": [7]})):
        twice = model(*args, **kwargs)
        assert operations(twice) == [20]  # of the blocks
        same(twice, 2 * y)
    with pytest.raises(TypeError, match="multiple values"):
        model(x, default, other=default)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(x, another=default)
    with pytest.raises(TypeError, match="positional argument"):
        model(x, default, default)


class Output(nn.Module):
    """As transformers have it: a layer, a sum with what came in before, and a norm."""

    def __init__(self, width=32):
        super().__init__()
        self.dense, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden, residual, scale=None):
        y = self.norm(self.dropout(self.dense(hidden)) + residual)
        return y if scale is None else y * scale


class Untraced(nn.Module):
    """Calls it in code that cannot be traced."""

    def __init__(self, call=lambda own, a, b: own(a, b)):
        super().__init__()
        self.embed, self.up, self.output = nn.Linear(6, 32), nn.Linear(32, 64), Output()
        self.fc, self.call = nn.Linear(32, 4), call

    def forward(self, x):
        y = self.embed(x) if len(x) else x
        return self.fc(self.call(self.output, self.up(y), y).mean(1))


def by_name(own, a, b):
    return own(residual=b, hidden=a)


@pytest.mark.parametrize("call", [lambda own, a, b: own(a, b), by_name])
def test_a_module_of_two_values_is_a_chain(call):
    model, twin, _ = twins(Untraced(call))
    assert operations(model(batch(0)[0])) == [3]
    assert not model.output.forward._others  # one trace, however they are given
    near(model, twin)
    with torch.no_grad():
        own, other = model.eval()(batch(0)[0]), twin.eval()(batch(0)[0])
    assert (own - other).abs().max() < 0.05 * own.abs().max()


def test_values_of_other_shapes_run_layer_by_layer():
    model, twin, _ = twins(Untraced(lambda own, a, b: own(a, b[:1])))
    x, _ = batch(0)
    assert not operations(model(x))
    same(model(x), twin(x))


@pytest.mark.parametrize("mode", ["training", "eval", "frozen"])
@pytest.mark.parametrize("place", ["layer", "sum", "both"])
def test_nan_goes_through_a_chain_as_through_layers(place, mode):
    def broken(own, a, b):
        a, b = a.clone(), b.clone()
        if place != "sum":
            a[2, 3, 5] = float("nan")
        if place != "layer":
            b[4, 1, 7] = float("nan")
        return own(a, b)

    model, twin, _ = twins(Untraced())
    for one in (model, twin):
        one.call = broken
        state_of(one).waiting.add("output.dense")
    if mode == "frozen":
        model, twin = marvin.freeze(model), marvin.freeze(twin)
    if mode == "eval":
        model, twin = model.eval(), twin.eval()
    x, _ = batch(0)
    with torch.set_grad_enabled(mode == "training"):
        y, other = model(x), twin(x)
    assert y.isnan().any(1).tolist() == [n in (2, 4) and (place, n) in NANS for n in range(8)]
    if place == "sum":
        assert (y - other)[[0, 1, 2, 3, 5, 6, 7]].abs().max() < 0.05
    else:
        same(y, other)
    if mode != "frozen":
        states = [state_of(own) for own in (model, twin)]
        counts = [(own.samples, own.gradients, own.waiting) for own in states]
        assert counts[0] == counts[1]
        assert "output.dense" not in states[0].waiting


NANS = {("layer", 2), ("sum", 4), ("both", 2), ("both", 4)}


def test_a_third_value_is_another_trace():
    scale = torch.linspace(1, 2, 32)
    model, twin, _ = twins(Untraced())
    x, _ = batch(0)
    for one in (model, twin):
        one.call = lambda own, a, b: own(a, b, scale=scale)
    assert operations(model(x)) == [3]
    y, other = model(x), twin(x)
    assert (y - other).abs().max() < 0.05 * y.abs().max()
    for one in (model, twin):
        one.call = lambda own, a, b: own(a, b, [2.0])  # neither a tensor nor a plain value
    with pytest.raises(TypeError):
        model(x)


@pytest.mark.parametrize("kind", ["positional", "keyword"])
def test_plain_values_are_other_traces(kind):
    model, twin, _ = twins(Untraced())
    x, _ = batch(0)
    for scale in (2.0, 2, True, 0.5, None, 2.0, True):
        for one in (model, twin):
            one.call = lambda own, a, b, scale=scale: (
                own(a, b, scale) if kind == "positional" else own(residual=b, scale=scale, hidden=a)
            )
        y, other = model(x), twin(x)
        assert operations(y) == [3]
        assert (y - other).abs().max() < 0.05 * y.abs().max()


def test_true_and_1_are_other_traces():
    class Own(Output):
        def forward(self, hidden, residual, scale=None):
            y = super().forward(hidden, residual)
            return -y if scale is True else y

    untraced = Untraced()
    untraced.output = Own()
    model, _, _ = twins(untraced)
    x, _ = batch(0)
    found = []
    for scale in (1, True, 1.0, True):
        model.call = lambda own, a, b, scale=scale: own(a, b, scale).detach()
        found.append(model(x) - model.fc.bias)
    for y in found[1:]:
        assert (y - found[0]).abs().max() < 1e-6 or (y + found[0]).abs().max() < 0.05
    assert [bool((y - found[0]).abs().max() < 1e-6) for y in found] == [True, False, True, False]


def test_too_many_plain_values_run_layer_by_layer():
    model, twin, _ = twins(Untraced())
    x, _ = batch(0)
    found = []
    for n in range(1, 30):
        for one in (model, twin):
            one.call = lambda own, a, b, n=n: own(a, b, n)
        y, other = model(x), twin(x)
        found.append(operations(y))
        assert (y - other).abs().max() < 0.05 * y.abs().max()
        if not found[-1]:
            same(y, other)
    assert found == 16 * [[3]] + 13 * [[]]


def test_children_are_chains_where_an_argument_is_no_plain_value():
    class Scaled(Net):
        def forward(self, x, scale=(1.0,)):
            return super().forward(x) * scale[0]

    model, twin, _ = twins(Scaled())
    x, _ = batch(0)
    assert operations(model(x)) == [21]
    assert operations(model(x, [2.0])) == [20]  # the blocks, without the norm behind them
    y = model(x)
    assert (model(x, [2.0]) - 2 * y).abs().max() < 0.1 * y.abs().max()
    near(model, twin)
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())


def test_what_takes_any_number_of_arguments_is_no_chain():
    class Any(Net):
        def forward(self, x, *args):
            return super().forward(x)

    assert trace(Any()) == "it takes any number of arguments"


def test_arguments_of_any_name_are_passed_on():
    class Any(Net):
        def forward(self, x, **others):
            y = super().forward(x)
            y = y * others["scale"] if "scale" in others else y
            return y + others["more"] if others.get("more") is not None else y

    model, _ = make(model=Any())
    x, _ = batch(0)
    y, more = model(x), torch.ones(4)
    for others, wanted in (
        ({"more": None}, y),
        ({"scale": 2.0}, 2 * y),
        ({"scale": torch.tensor([3.0])}, 3 * y),
        ({"more": more, "scale": 2.0}, 2 * y + more),
        ({"scale": 2.0, "more": more}, 2 * y + more),
    ):
        own = model(x, **others)
        assert operations(own) == [21]
        same(own, wanted)
    own = model(x, scale=[2.0][0], nothing=object())
    assert operations(own) == [20]
    same(own, 2 * y)


def test_heads_that_lie_otherwise_run_as_they_are():
    model, twin, _ = twins(Net(Mixed))
    assert not is_fused(copy.deepcopy(model))
    x, _ = batch(1)
    same(model(x), twin(x))


class ShapedBefore(Net):
    """Heads have the shape of what comes in, before a norm that is in no chain."""

    def __init__(self):
        super().__init__()
        self.first, self.before = nn.Linear(32, 32), nn.Softmax(-1)
        self.blocks[0].norm1 = nn.Identity()

    def forward(self, x):
        x = self.first(self.embed(x))
        n, t, w = x.shape
        own = self.blocks[0].attention
        q, k, v = own.qkv(self.before(x)).view(n, t, 3, own.heads, w // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, w)
        return self.fc(self.norm(self.blocks[1](x + own.out(y))).mean(1))


def test_heads_with_the_shape_of_another_chains_value_are_in_none():
    model, _ = make(model=ShapedBefore())
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x = batch(3)[0]
    torch.testing.assert_close(model(x), twin(x), rtol=0, atol=0.05)  # a code, here and there
    rows = {row.name: row.is_fused for row in report(model).rows}
    assert not rows["blocks.0.attention.qkv"]
    assert rows["blocks.1.attention.qkv"]


def test_linear_layers_alone_have_the_same_bits():
    """Products of integers, sums of two, ReLU: nothing rounds otherwise."""

    class Perceptron(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 16)

        def forward(self, x):
            return self.c(self.b(torch.relu(self.a(x))) + x).mean(-1)

    model, optimizer = make(model=Perceptron(), steps=0)
    data = [torch.randn(8, 32) for _ in range(6)]

    def run(own, its, x):
        its.zero_grad()
        loss = own(x).square().mean()
        loss.backward()
        its.step(loss=loss)

    for x in data:
        run(model, optimizer, x)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x = torch.randn(8, 32, requires_grad=True)
    assert is_fused(copy.deepcopy(model), x)
    y, other = model(x), twin(x)
    same(y, other)
    for one in (model, twin):
        one.zero_grad()
    found = torch.autograd.grad(y.square().mean(), [x, model.c.weight])
    wanted = torch.autograd.grad(other.square().mean(), [x, twin.c.weight])
    same(found[1], wanted[1])  # further back, noise comes from other streams
    assert (found[0] - wanted[0]).norm() < 0.05 * wanted[0].norm()


def test_layers_of_too_many_products_are_in_no_chain():
    """Scores of very many words."""

    class Words(Net):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 65_808)

        def forward(self, x):
            return self.fc(self.norm(self.blocks(self.embed(x))))[:, :, :4].mean(1)

    model, _ = make(model=Words())
    rows = {row.name: row for row in report(model).rows}
    assert sum(row.is_fused for row in rows.values()) == CHAINED
    assert not rows["fc"].is_fused
    assert is_fused(model)


def test_report_names_what_is_fused():
    model, _ = make()
    rows = {row.name: row for row in report(model).rows}
    assert sum(row.is_fused for row in rows.values()) == CHAINED
    assert not rows["fc"].is_fused
    assert is_fused(model)
    convert(model, fused=False)
    assert not any(row.is_fused for row in report(model).rows)
    assert not is_fused(model)


def test_what_forward_passes_count_is_counted():
    model, optimizer = make()
    twin, other = make(fused=False)
    for one in (model, twin):
        one(batch(0)[0]).sum().backward()
    state, wanted = (state_of(m) for m in (model, twin))
    assert (state.samples, state.gradients) == (wanted.samples, wanted.gradients)
    assert state.waiting == wanted.waiting == set()
    activations = [o.activations.saturation() for o in (optimizer, other)]
    assert activations[0].keys() == activations[1].keys()
    for name, share in activations[0].items():
        assert share == pytest.approx(activations[1][name], abs=2e-3), name


def test_the_policy_observes_and_changes_formats():
    model, optimizer = make(policy=marvin.LossBudgetPolicy(window=3), steps=0)
    before, fused = formats_of(model), []
    for i in range(9):
        fused.append(is_fused(copy.deepcopy(model)))
        step(model, optimizer, i)
    assert fused == [False] + 8 * [True]  # at first there are no formats
    assert formats_of(model) != before


def observe(model, x, y, only=None):
    """Let a step be observed; return what was seen of each layer, and all gradients."""
    observers = {}
    for i, own in enumerate(linear_layers(model)):
        if only is None or i == only:
            rounders_of(own)[0].observer = observers[i] = Observer()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for own in linear_layers(model):
        rounders_of(own)[0].observer = None
    return inputs_of(observers, len(x)), [p.grad for p in model.parameters()]


def linear_layers(model):
    return [own for own in model.modules() if isinstance(own, nn.Linear)]


class Gated(nn.Module):
    """Whose chain begins with a layer, and of which one value leaves that a layer takes, too."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        x = F.pad(x, (0, 26))
        y = F.relu(self.up(x)) * F.gelu(self.gate(x))
        return self.fc(self.down(y)).mean(1) + y.mean((1, 2)).unsqueeze(1)


OBSERVED = {"gated": Gated, **{name: lambda own=own: Net(own) for name, own in ATTENTIONS.items()}}


@pytest.mark.parametrize("only", [None, 1])
@pytest.mark.parametrize("kind", OBSERVED)
def test_observing_changes_no_bit(kind, only):
    model, _, _ = twins(OBSERVED[kind]())
    twin = copy.deepcopy(model)
    x, y = batch(3)
    F.cross_entropy(twin(4 * x), y).backward()
    found, grads = observe(model, 4 * x, y, only)  # much is clamped
    assert is_fused(copy.deepcopy(model))
    same(grads, [p.grad for p in twin.parameters()])
    assert len(found) == (len(linear_layers(model)) if only is None else 1)


@pytest.mark.parametrize("kind", OBSERVED)
def test_chains_show_the_policy_what_layers_do(kind):
    model, twin, _ = twins(OBSERVED[kind]())
    x, y = batch(3, 32)
    state_of(model).gradients = state_of(twin).gradients = 1000  # the same noise
    (found, _), (expected, _) = observe(model, 4 * x, y), observe(twin, 4 * x, y)
    assert found.keys() == expected.keys() == {*range(len(linear_layers(model)))}
    assert max(own.saturated for own in expected.values()) > 0.02
    nearly_the_same(found, expected)


def test_nothing_is_shown_twice_where_a_chain_meets_nan():
    model, twin, _ = twins()
    x, y = batch(3)
    x[0, 0] = float("nan")
    found, expected = observe(model, x, y)[0], observe(twin, x, y)[0]
    for i, own in expected.items():
        assert sum(found[i].counts) == sum(own.counts)


def test_what_is_shown_to_the_policy_takes_no_new_memory(monkeypatch):
    from fixedpoint_kernels import scratch

    model, _, _ = twins()
    for _ in range(2):
        observe(model, *batch(3))
    taken, own = [], scratch.new_bytes
    monkeypatch.setattr(
        scratch, "new_bytes", lambda size, *kind: taken.append(size) or own(size, *kind)
    )
    found, _ = observe(model, *batch(3))
    assert found
    assert taken == []


def test_resume_changes_no_bit():
    model, optimizer = make()
    train(model, optimizer, 4)
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], saved)
    expected = train(model, optimizer, 4, 4)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    other, its_optimizer = make(seed=5, policy=marvin.LossBudgetPolicy(kappa=0.5), steps=0)
    other.load_state_dict(states[0])
    its_optimizer.load_state_dict(states[1])
    assert train(other, its_optimizer, 4, 4) == expected
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        same(a, b)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_train_on_by_themselves(copied):
    pair = make()
    train(*pair, 4)
    twin = copied(pair)
    assert is_fused(copy.deepcopy(twin[0]))
    assert twin[0].forward.module is twin[0]
    expected = train(*pair, 3, 3)
    assert train(*twin, 3, 3) == expected


def test_eval_and_no_grad_are_not_fused():
    model, twin, _ = twins()
    x, _ = batch(3)
    for one in (model, twin):
        one.eval()
    same(model(x), twin(x))
    with torch.inference_mode():
        same(model(x), twin(x))
    model.train()
    with torch.no_grad():
        assert model(x).grad_fn is None


def test_revert_leaves_nothing_and_freeze_a_copy():
    model, optimizer = make()
    train(model, optimizer, 2)
    frozen = marvin.freeze(model)
    assert isinstance(model.forward, Fused)
    assert frozen.forward.module is frozen
    revert(model)
    assert not any("forward" in vars(m) for m in model.modules())
    x, _ = batch(1)
    same(frozen(x), model.eval()(x))


@pytest.mark.parametrize("where", ["blocks.0.fc1", "blocks.1.norm2", "blocks.0.act", "blocks.1"])
@pytest.mark.parametrize("kind", ["forward_hook", "full_backward_hook"])
def test_hooks_of_others_are_called(where, kind):
    model, _ = make()
    calls = []
    handle = getattr(model.get_submodule(where), f"register_{kind}")(lambda *_: calls.append(1))
    assert not is_fused(model)
    model(batch(0)[0]).sum().backward()
    assert calls
    handle.remove()
    assert is_fused(model)


def test_dropout_that_is_turned_on_is_not_passed_over():
    model, _ = make()
    x, _ = batch(0)
    same(model(x), model(x))
    model.blocks[0].drop.p = 0.5
    assert not torch.equal(model(x), model(x))


def test_several_passes_before_one_backward():
    model, _ = make()
    model.zero_grad()
    twin = copy.deepcopy(model)
    noise = state_of(model).gradients
    losses = [F.cross_entropy(model(x), y) for x, y in map(batch, range(3))]
    sum(losses).backward()
    state_of(twin).gradients = noise
    for i in range(3):
        x, y = batch(i)
        F.cross_entropy(twin(x), y).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_backward_twice_over_one_graph():
    model, _ = make()
    model.zero_grad()
    x, y = batch(0)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model(batch(1)[0]).sum()  # other work in between
    model.zero_grad()
    loss.backward()
    for a, b in zip(first, model.parameters(), strict=True):
        same(a, b.grad)


def test_batches_and_numbers_of_tokens_may_change():
    model, optimizer = make()
    for i, n in enumerate((8, 3, 8, 1, 5, 8)):
        assert step(model, optimizer, i, n) < 10
    for count in (1, 4, 17, 40):
        assert is_fused(model, torch.randn(2, count, 6))
    assert len(list(model.children())) == 4  # nothing became part of the model


def test_weights_that_are_frozen_get_no_gradient():
    model, _ = make()
    model.zero_grad()
    model.blocks[0].fc1.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    x, y = batch(0)
    assert is_fused(model)
    F.cross_entropy(model(x), y).backward()
    assert model.blocks[0].fc1.weight.grad is None
    assert model.norm.bias.grad is None
    assert model.blocks[0].norm1.weight.grad is not None
    model.embed.requires_grad_(False)  # nothing wants the gradient of the chain's input
    model.zero_grad()
    assert is_fused(model)
    F.cross_entropy(model(x), y).backward()
    assert model.blocks[0].norm1.weight.grad.isfinite().all()


def test_weights_changed_between_forward_and_backward_are_refused():
    model, _ = make()
    loss = model(batch(0)[0]).sum()
    with torch.no_grad():
        model.blocks[0].fc2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_activation_checkpointing():
    """A second forward pass takes other noise."""
    model, _ = make()
    twin = copy.deepcopy(model)
    x, y = batch(0)
    one, other = ([g.clone() for g in gradients(twin, x, y, 1)] for _ in range(2))
    model.zero_grad()
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
    for p, a, b in zip(model.parameters(), one, other, strict=True):
        assert (p.grad - a).norm() <= 2 * (b - a).norm() + 0.05 * a.norm()


class Apart(Net):
    """Runs its blocks otherwise than the rest, if it is told so."""

    way = None

    def forward(self, x):
        y = self.embed(x)
        if self.way == "gradients":
            with torch.no_grad():
                y = self.blocks(y)
        elif self.way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                y = self.blocks(y).float()
        elif self.way == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(self.seen.append, lambda _: None):
                y = self.blocks(y)
        elif self.way is not None:
            for block in self.blocks:
                y = checkpoint(block, y, use_reentrant=self.way == "reentrant")
        else:
            y = self.blocks(y)
        return self.fc(self.norm(y).mean(1))


@pytest.mark.parametrize("way", ["gradients", "autocast", "hooks", "reentrant", "checkpoint"])
def test_parts_that_run_otherwise_than_the_rest_do_so(way):
    model, twin, _ = twins(Apart())
    x, y = batch(0)
    assert operations(model(x)) == [21]
    for own in (model, twin):
        own.seen = []
        own.way = way
        own.zero_grad()
    assert not operations(model(x))
    convert(model)
    state_of(model).gradients = state_of(twin).gradients = 1000
    found, other = model(x), twin(x)
    chains = {"hooks": [20], "reentrant": [], "checkpoint": [10, 10]}.get(way, [])
    assert operations(found) == chains
    assert (found - other).abs().max() < 0.05 * other.abs().max()
    assert way != "autocast" or torch.equal(found, other)
    assert bool(model.seen) is bool(twin.seen) is (way == "hooks")
    if way != "hooks":
        for own in (found, other):
            F.cross_entropy(own, y).backward()
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (a.grad is None) is (b.grad is None), name
            assert a.grad is None or (a.grad - b.grad).norm() < 0.5 * b.grad.norm() + 1e-6, name
    if way != "reentrant":  # torch warns
        with torch.no_grad():
            own, other = model.eval()(x), twin.eval()(x)
        assert (own - other).abs().max() < 0.05 * other.abs().max()


@dataclass
class Both(OrderedDict):
    """As transformers return values: by name, by place, and as a dictionary."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    third: float | None = None

    def __post_init__(self):
        self.update({k: v for k, v in vars(self).items() if v is not None})

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else [*self.values()][key]


class Own(dict):
    pass


@dataclass
class Plain:
    first: torch.Tensor
    second: torch.Tensor


Named = namedtuple("Named", "first second")
RECORDS = {
    "both": lambda a, b: Both(a, b),
    "both, a number": lambda a, b: Both(a, None, 2.5),
    "ordered": lambda a, b: OrderedDict(second=b, first=a),
    "dictionary": lambda a, b: {"first": a, "second": {"third": (b, 2)}},
    "named": Named,
    "plain": Plain,
    "list": lambda a, b: [a, (b, None)],
}


@pytest.mark.parametrize("kind", RECORDS)
def test_what_a_model_returns_is_of_its_class(kind):
    class Returning(Net):
        def forward(self, x):
            y = super().forward(x)
            return RECORDS[kind](y, 2 * y)

    model, _, _ = twins_of_records(Returning())
    x, _ = batch(0)
    found, wanted = model(x), type(model).forward(model, x)
    assert type(found) is type(wanted)
    leaves, spec = flat(found)
    others, other_spec = flat(wanted)
    assert spec == other_spec
    assert operations(leaves[0]) == [21]
    for a, b in zip(leaves, others, strict=True):
        assert a is b or a == b if not isinstance(a, torch.Tensor) else True
        assert not isinstance(a, torch.Tensor) or (a - b).abs().max() < 0.05 * b.abs().max()
    if kind.startswith("both"):
        assert found[0] is found.first is found["first"]


def test_a_dictionary_that_no_graph_can_make_anew_leaves_the_model_as_it_is():
    class Returning(Net):
        def forward(self, x):
            return Own(first=super().forward(x))

    model, _, _ = twins_of_records(Returning())
    x, _ = batch(0)
    found = model(x)
    assert type(found) is Own
    assert operations(found["first"]) == [20]
    assert "makes a Own" in str(trace(model))


def flat(x):
    """Return values of a record, and how they lie in it."""
    if isinstance(x, dict):
        parts = [(type(x), [*x]), *map(flat, x.values())]
    elif isinstance(x, Plain):
        parts = [(Plain,), *map(flat, vars(x).values())]
    elif isinstance(x, tuple | list):
        parts = [(type(x),), *map(flat, x)]
    else:
        return [x], "leaf"
    return [leaf for own in parts[1:] for leaf in own[0]], (parts[0], [own[1] for own in parts[1:]])


def twins_of_records(model):
    """Do as ``twins`` where the loss is of the first value."""
    forward = type(model).forward
    type(model).forward = lambda self, x: flat(forward(self, x))[0][0]
    try:
        found, twin, optimizer = twins(model)
    finally:
        type(model).forward = forward
    convert(found)
    return found, twin, optimizer


class Scale(nn.Module):
    """Has a parameter of its own, and so rounds what it takes."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(32, 32))
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return self.layers(x) + x @ self.gamma


@pytest.mark.parametrize("policy", [marvin.LossBudgetPolicy, lambda: marvin.StaticPolicy(5, 5)])
def test_modules_that_round_what_they_take_do_so_within_a_model(policy):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = Scale()

        def forward(self, x):
            return self.fc(self.norm(self.scale(self.blocks(self.embed(x)))).mean(1))

    model, _ = make(model=Scaled(), policy=policy(), steps=6)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x, _ = batch(0)
    assert formats_of(model)["scale"].inputs is not None
    y, other = model(x), twin(x)
    assert (y - other).abs().max() <= 1e-6 * other.abs().max()
    assert isinstance(vars(model.scale)["forward"], Fused)
    assert operations(y) == [3, 20]
    with torch.no_grad():
        same(model.eval()(x), twin.eval()(x))
        same(marvin.freeze(model)(x), twin(x))


def test_layers_that_stop_fitting_run_unfused():
    model, _ = make(policy=marvin.StaticPolicy(12, 8))
    assert not is_fused(model)
    model, _ = make(policy=marvin.FixedPolicy(8, 5))  # rounds stochastically
    assert not is_fused(model)
    model, _ = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_fused(model)
    with pytest.raises(TypeError, match="float64"):
        model.double()(batch(0)[0].double())


def test_attention_of_other_makes_ends_a_chain():
    """What is between runs as it is; nothing runs before what it needs."""

    class Masked(Unflattened):
        def __init__(self, width, heads):
            super().__init__(width, heads)
            self.register_buffer("mask", torch.ones(9, 9).tril().bool())

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
            return self.out(y.transpose(1, 2).flatten(2))

    model, twin, _ = twins(Net(Masked))
    traced = trace(model)
    assert [len(chain.layers) for chain in traced.tokens] == [1, 4, 3]
    near(model, twin)


def test_children_are_fused_where_the_model_cannot_be_traced():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return self.net(x) if x.sum() > -1e9 else x

    model, _ = make(model=Outer())
    assert isinstance(model.net.forward, Fused)
    assert is_fused(model)


def test_convolutions_and_tokens_in_one_model():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3)
            self.block, self.fc = Block(32, Unflattened(32, 2)), nn.Linear(32, 4)

        def forward(self, x):
            h = torch.relu(self.b(torch.relu(self.a(x))))
            return self.fc(self.block(h.flatten(2).transpose(1, 2)).mean(1))

    torch.manual_seed(0)
    model = Both()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy(window=10**6))
    marvin.quantize_activations(model, optimizer)
    convert(model)
    x = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    assert sum(row.is_fused for row in report(model).rows) == 6
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    y = model(x)
    names = {
        type(module).__name__ for module in model.forward._modes[True]._runs[frozenset()].chains
    }
    assert {"ChainRun", "TokenRun"} <= names
    assert (y - twin(x)).abs().max() < 0.05 * twin(x).abs().max()


@pytest.mark.parametrize("features", [24, 20])
def test_features_that_are_no_multiples_of_16_run_as_they_are(features):
    model = nn.Sequential(nn.Linear(32, features), nn.GELU(), nn.Linear(features, 16))
    convert(model)
    assert not any(row.is_fused for row in report(model).rows)


RANKS = """
import sys, torch, torch.distributed as dist
from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from torch.nn.parallel import DistributedDataParallel
spec = spec_from_file_location("own", {file!r})
own = module_from_spec(spec)
spec.loader.exec_module(own)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{folder}/meet", rank=rank, world_size=2)
found = []
for fused in (True, False):
    model, optimizer = own.make(fused=fused, steps=0)
    parallel = DistributedDataParallel(model)
    for i in range(5):
        optimizer.zero_grad()
        for k in range(2):  # two batches a step: gradients meet at the second
            x, y = own.batch(4 * i + 2 * k + rank)
            context = parallel.no_sync() if k == 0 else nullcontext()
            with context:
                loss = own.F.cross_entropy(parallel(x), y) / 2
                loss.backward()
        optimizer.step(loss=loss)
    assert own.is_fused(model) == fused
    found.append([p.detach() for p in model.parameters()])
torch.save(found, f"{folder}/{{rank}}")
"""


@pytest.mark.slow
def test_ranks_train_alike_and_add_up_batches(tmp_path):
    """Weights of two processes end equal, and near those of layers that run one by one."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(file=__file__, folder=tmp_path))
    runs = [subprocess.Popen([sys.executable, script, str(rank)]) for rank in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    same(first, second)
    start = [p.detach() for p in make(steps=0)[0].parameters()]
    for p, fused, alone in zip(start, *first, strict=True):
        assert (fused - alone).norm() <= 0.3 * (alone - p).norm() + 0.01 * p.norm()


# ------------------------------------------------------------------ eval mode


@pytest.fixture
def passes(monkeypatch):
    """Operations of each segment that ran forward."""
    from fixedpoint_kernels.tokens import execute

    found, own = [], execute.forward

    def counted(program, *rest):
        found.append(len(program.segment.operations))
        return own(program, *rest)

    monkeypatch.setattr(execute, "forward", counted)
    return found


class Dropping(Net):
    """With dropout, of modules and of attention, that is off in eval mode."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.drop = nn.Dropout(0.3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.blocks(self.embed(x)))).mean(1))


def by_channel():
    """Return a model whose layers have outputs of other sizes, and a policy of formats by channel."""
    model = Net()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight *= 2.0 ** -(torch.arange(len(layer.weight)) % 4).view(-1, 1)
    return model, marvin.LossBudgetPolicy(per_channel=True)


def test_formats_by_channel_are_near_their_unfused_twin(passes):
    own, policy = by_channel()
    model, optimizer = make(model=own, policy=policy, steps=6)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    formats = formats_of(model).values()
    assert all(max(own.weights[0].shifts) > 1 for own in formats if own.inputs)
    passes.clear()
    near(model, twin)
    assert max(passes) > CHAINED
    x, _ = batch(3)
    wanted = model(x).detach()
    passes.clear()
    frozen = marvin.freeze(model)
    same(frozen(x), wanted)
    assert max(passes) > CHAINED
    expected = train(*copy.deepcopy((model, optimizer)), 3)
    assert train(model, optimizer, 3) == expected


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_eval_mode_computes_what_training_does(kind, passes):
    model, twin, _ = twins(Net(ATTENTIONS[kind]))
    x, _ = batch(3, 19)
    wanted = model(x).detach()
    assert max(passes) > CHAINED
    model.eval()
    twin.eval()
    passes.clear()
    with torch.no_grad():
        found, other = model(x), twin(x)
    assert max(passes) > CHAINED
    same(found, wanted)
    assert (found - other).abs().max() < 0.05 * other.abs().max()
    frozen = marvin.freeze(model)
    passes.clear()
    same(frozen(x), found)
    assert max(passes) > CHAINED


def test_dropout_is_off_in_eval_mode(passes):
    model, _ = make(model=Dropping())
    model.eval()
    x, _ = batch(3)
    with torch.no_grad():
        found = model(x)
    assert max(passes) > CHAINED
    twin = copy.deepcopy(model)
    for own in twin.modules():
        if type(own) is nn.Dropout:
            own.p = 0.0
    same(found, twin.train()(x).detach())


def test_a_dropout_module_in_another_mode_leaves_the_chain_unfused():
    model, _ = make(model=Dropping())
    x, _ = batch(0)
    assert operations(model(x)) == [24]
    model.drop.eval()
    assert not operations(model(x))
    model.drop.train()
    assert operations(model(x)) == [24]
    model.eval()
    model.drop.train()
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))


def test_modes_take_turns():
    model, _ = make()
    x, _ = batch(3)
    first = model(x)
    model.eval()
    with torch.inference_mode():
        second = model(x)
    third = model.train()(x)
    same(second, first.detach())
    same(third, first)
    assert is_fused(model)


def test_eval_mode_with_gradients_runs_layer_by_layer(passes):
    model, twin, _ = twins()
    model.eval()
    twin.eval()
    passes.clear()
    x = batch(3)[0].requires_grad_()
    same(model(x), twin(x))
    assert not passes


@pytest.mark.parametrize("what", ["hook", "hook of a norm", "training part"])
def test_eval_mode_runs_layer_by_layer_where_it_must(what, passes):
    model, twin, _ = twins()
    seen = []
    for own in (model, twin):
        own.eval()
        if what == "hook":
            own.blocks[0].fc1.register_forward_hook(lambda *_: seen.append(1))
        if what == "hook of a norm":
            own.blocks[1].norm2.register_forward_hook(lambda *_: seen.append(1))
        if what == "training part":
            own.blocks[0].norm1.train()
    x, _ = batch(3)
    passes.clear()
    with torch.no_grad():
        same(model(x), twin(x))
    assert len(seen) == (0 if what == "training part" else 2)
    assert all(count == 1 for count in passes)


def test_linear_layers_in_eval_mode_have_the_bits_of_layers_one_by_one(passes):
    layers = nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)
    model, _ = make(model=nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 4)))
    model.eval()
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x, _ = batch(3)
    passes.clear()
    with torch.no_grad():
        found = model(x)
        assert max(passes) == 3  # the first has six features
        passes.clear()
        same(found, twin(x))
        assert not passes
    frozen = marvin.freeze(model)
    same(frozen(x), found)
    exported = torch.export.export(frozen, (x,)).module()
    same(exported(x), found)


FOREIGN = {
    "fewer outputs": ("fc1", "weight", torch.randn(32, 32)),
    "one bias": ("fc1", "bias", torch.ones(1)),
    "a long bias": ("fc1", "bias", torch.ones(99)),
    "one scale": ("norm1", "weight", torch.ones(1)),
    "a long shift": ("norm1", "bias", torch.ones(99)),
}


def outcome(model, x):
    try:
        return model(x)
    except (RuntimeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore:weights must be numbers of their format")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_chains_leave_what_their_kernels_would_read_wrongly(change, training):
    """They know shapes of before, and go through memory by them."""
    name, what, value = change
    model, _ = make()
    assert is_fused(model)
    setattr(getattr(model.blocks[0], name), what, nn.Parameter(value))
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x = batch(1)[0]
    with torch.set_grad_enabled(training):
        found, wanted = (outcome(own.train(training), x) for own in (model, twin))
    if not isinstance(wanted, torch.Tensor):
        assert found == wanted
        return
    assert not training or not any(n > 1 for n in operations(found))
    same(found.detach(), wanted.detach())


def test_a_layer_that_got_fewer_outputs_and_says_so_is_fused_again():
    model, _ = make()
    assert is_fused(model)
    with torch.no_grad():
        model.eval()(batch(1)[0])
    block = model.blocks[0]
    first, second = block.fc1.weight.detach(), block.fc2.weight.detach()
    block.fc1.weight = nn.Parameter(first[:32].clone())
    block.fc1.bias = nn.Parameter(block.fc1.bias.detach()[:32].clone())
    block.fc2.weight = nn.Parameter(second[:, :32].clone())
    block.fc1.out_features = block.fc2.in_features = 32
    assert is_fused(model.train())
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            found, wanted = (own.train(training)(batch(1)[0]) for own in (model, twin))
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:-64] if x.dtype is torch.uint8 else x,
        lambda x: x.double() if x.dtype is torch.float32 else x,
        lambda x: torch.cat([x, x]) if x.dtype is torch.float32 else x,
    ],
    ids=["fewer codes", "float64 weights", "more outputs"],
)
def test_hooks_that_give_back_something_else_are_refused(change):
    model, _ = make()
    with torch.autograd.graph.saved_tensors_hooks(lambda own: own, change):
        y = model(batch(1)[0])
    with pytest.raises(ValueError, match="hooks on saved tensors must give back what they got"):
        y.sum().backward()


class Shows(Net):
    """Returns its logits, and a value in the middle if it is told to."""

    def __init__(self, shown):
        super().__init__(Separate)
        self.shown, self.shows = shown, False

    def forward(self, x):
        made = {"embedding": self.embed(x)}
        block, x = self.blocks[0], made["embedding"]
        made["norm"] = block.norm1(x)
        x = x + block.attention(made["norm"])
        made["layer"] = block.fc1(block.norm2(x))
        made["curve"] = block.act(made["layer"])
        made["sum"] = x + block.fc2(made["curve"])
        y = self.fc(self.norm(self.blocks[1](made["sum"])).mean(1))
        return (y, made[self.shown]) if self.shows else y


SHOWN = {"embedding": [25], "norm": [4, 20], "layer": [9, 16], "curve": [10, 15], "sum": [12, 13]}


@pytest.mark.parametrize("shown", SHOWN)
def test_values_that_a_model_returns_have_whole_gradients(shown):
    model, twin, _ = twins(Shows(shown))
    model.shows = twin.shows = True
    x, y = batch(9, 32)
    assert operations(model(x)[0]) == SHOWN[shown]
    for alone in (True, False):
        state_of(model).gradients = state_of(twin).gradients = 1000  # the same noise
        grads = []
        for own in (model, twin):
            output, value = own(x)
            loss = F.cross_entropy(output, y) + (0 if alone else 1e-3 * value.square().sum())
            grads += torch.autograd.grad(loss, value)
        assert (grads[0] - grads[1]).norm() < 0.05 * grads[
            1
        ].norm()  # bfloat16 moves codes of 8 bits
