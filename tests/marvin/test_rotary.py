"""Rotary position embeddings in chains, however models spell them, and heads of keys and values for several of queries."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import tokens
from tests.marvin.test_token_fusion import batch, near, operations, same, twins

pytestmark = pytest.mark.skipif(tokens.path() is None, reason="no path of tokens on this processor")

TOKENS, SIZE = 9, 16


def one_for_all(_):
    return tables()


def tables(batch=1, turned=SIZE, tokens=TOKENS):
    """Cosines and sines of (batch, tokens, turned), each half the same as models have them."""
    starts = 3 * torch.arange(batch).view(-1, 1, 1)
    places = starts + torch.arange(tokens).view(-1, 1)
    angles = places * 10.0 ** -torch.arange(0, 2, 4 / turned)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def doubled(x):
    return x.repeat_interleave(2, -1)


def halves(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def half_turned(x, cos, sin):
    return x * cos + halves(x) * sin


class Rotary(nn.Module):
    """Attention of four heads that are turned; two of keys and values."""

    keys = 2

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 4 * SIZE), nn.Linear(32, self.keys * SIZE)
        self.v, self.out = nn.Linear(32, self.keys * SIZE), nn.Linear(4 * SIZE, 32)
        with torch.no_grad():  # so that tokens look at few others
            self.q.weight *= 6
            self.k.weight *= 6

    def heads(self, x):
        sizes = *x.shape[:-1], -1, SIZE
        return (own(x).view(sizes).transpose(1, 2) for own in (self.q, self.k, self.v))

    def turned(self, x, cos, sin):
        return half_turned(x, cos.unsqueeze(1), sin.unsqueeze(1))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.keys < 4)

    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        y = self.attend(self.turned(q, cos, sin), self.turned(k, cos, sin), v)
        return self.out(y.transpose(1, 2).flatten(2))


class EachItsOwn(Rotary):
    keys = 4


class Repeated(Rotary):
    """Keys and values are repeated for each head, as transformers does."""

    def attend(self, q, k, v):
        n, heads, length, size = k.shape
        k, v = (x[:, :, None].expand(n, heads, 2, length, size) for x in (k, v))
        k, v = (x.reshape(n, 2 * heads, length, size) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class SinesFirst(Rotary):
    def turned(self, x, cos, sin):
        return torch.add(sin[:, None] * halves(x), cos[:, None] * x)


class BySlices(Rotary):
    """Each half by itself, with a difference."""

    def turned(self, x, cos, sin):
        cos, sin = cos[:, None], sin[:, None]
        a, b = x[..., : SIZE // 2], x[..., SIZE // 2 :]
        half = SIZE // 2
        return torch.cat(
            [a * cos[..., :half] - b * sin[..., :half], b * cos[..., half:] + a * sin[..., half:]],
            -1,
        )


class TokensFirst(Rotary):
    """Turned before heads and tokens change places."""

    def forward(self, x, cos, sin):
        sizes = *x.shape[:-1], -1, SIZE
        q, k, v = (own(x).view(sizes) for own in (self.q, self.k, self.v))
        q, k = (half_turned(own, cos.unsqueeze(2), sin.unsqueeze(2)) for own in (q, k))
        y = self.attend(*(own.transpose(1, 2) for own in (q, k, v)))
        return self.out(y.transpose(1, 2).flatten(2))


class Partly(Rotary):
    """Only the first features of a head are turned."""

    def turned(self, x, cos, sin):
        turned = cos.shape[-1]
        one, rest = x[..., :turned], x[..., turned:]
        return torch.cat([half_turned(one, cos.unsqueeze(1), sin.unsqueeze(1)), rest], -1)


class Backwards(Rotary):
    """The other way round: no operation does this."""

    def turned(self, x, cos, sin):
        return x * cos.unsqueeze(1) + -halves(x) * sin.unsqueeze(1)


class Unlike(Rotary):
    """Both halves turned to the same side: no operation does this."""

    def turned(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((b, a), -1) * sin.unsqueeze(1)


def neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


class InPairs(Rotary):
    """Neighbours are turned with each other."""

    def turned(self, x, cos, sin):
        return x * cos.unsqueeze(1) + neighbours(x) * sin.unsqueeze(1)


class AsGlm(Rotary):
    """The same of the first features, with tables for half of these, and dtypes that change nothing."""

    def turned(self, x, cos, sin):
        cos, sin = (
            t[..., : t.shape[-1] // 2].unsqueeze(1).repeat_interleave(2, dim=-1) for t in (cos, sin)
        )
        turned = cos.shape[-1]
        one, rest = x[..., :turned].float(), x[..., turned:]
        return torch.cat([(one * cos + neighbours(one) * sin).to(x.dtype), rest], -1)


class Mixed(Rotary):
    """Cosines are of halves, sines of neighbours: no operation does this."""

    def turned(self, x, cos, sin):
        return halves(x) * cos.unsqueeze(1) + neighbours(x) * sin.unsqueeze(1)


class HeadNorms(Rotary):
    """Queries and keys are normalised head by head, before they are turned."""

    def __init__(self, features=SIZE):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(features, eps=1e-5), nn.LayerNorm(features)
        with torch.no_grad():  # so that tokens look at few others
            self.q_norm.weight.copy_(torch.linspace(2, 4, features))
            self.k_norm.weight.copy_(torch.linspace(3, 1, features))
            self.k_norm.bias.copy_(torch.linspace(-1, 1, features))

    def heads(self, x):
        sizes = *x.shape[:-1], -1, SIZE
        q, k = self.q_norm(self.q(x).view(sizes)), self.k_norm(self.k(x).view(sizes))
        return (own.transpose(1, 2) for own in (q, k, self.v(x).view(sizes)))


class HeadsFirst(HeadNorms):
    """The same after heads and tokens have changed places."""

    def heads(self, x):
        q, k, v = Rotary.heads(self, x)
        return self.q_norm(q), self.k_norm(k), v


class NormsBehind(HeadNorms):
    """Heads are normalised when they have been turned."""

    heads = Rotary.heads

    def attend(self, q, k, v):
        return super().attend(self.q_norm(q), self.k_norm(k), v)


class TwoHeads(HeadNorms):
    """What is normalised together are two heads."""

    def __init__(self):
        super().__init__(2 * SIZE)

    def heads(self, x):
        sizes = *x.shape[:-1], -1, 2 * SIZE
        q = self.q_norm(self.q(x).view(sizes)).view(*x.shape[:-1], -1, SIZE)
        k = self.k_norm(self.k(x)).view(*x.shape[:-1], -1, SIZE)  # all of its features
        return (own.transpose(1, 2) for own in (q, k, self.v(x).view(*x.shape[:-1], -1, SIZE)))


class Across(HeadNorms):
    """What is normalised together is a feature of each head: no operation does this."""

    def heads(self, x):
        sizes = *x.shape[:-1], SIZE, -1
        q, k = (own(x).view(sizes).transpose(2, 3) for own in (self.q, self.k))
        q, k, v = self.q_norm(q), self.k_norm(k), self.v(x).view(*x.shape[:-1], -1, SIZE)
        return (own.transpose(1, 2) for own in (q, k, v))


class NormUsed(HeadNorms):
    """Normalised queries are used elsewhere, too."""

    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        y = self.attend(self.turned(q, cos, sin), self.turned(k, cos, sin), v)
        return self.out(y.transpose(1, 2).flatten(2)) + q.mean((1, 3))[..., None]


class Raw(Rotary):
    """Keys and values are what comes in."""

    def __init__(self):
        super().__init__()
        del self.k, self.v

    def heads(self, x):
        sizes = *x.shape[:-1], -1, SIZE
        return (own.view(sizes).transpose(1, 2) for own in (self.q(x), x, x))


class Used(Rotary):
    """Turned queries are used elsewhere, too."""

    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        q = self.turned(q, cos, sin)
        y = self.attend(q, self.turned(k, cos, sin), v)
        return self.out(y.transpose(1, 2).flatten(2)) + q.mean((1, 3))[..., None]


class Learned(Raw):
    """Keys and values are parameters, which a layer takes, too."""

    def __init__(self):
        super().__init__()
        self.words = nn.Parameter(torch.randn(1, TOKENS, 2 * SIZE))

    def heads(self, x):
        sizes = 1, TOKENS, 2, SIZE
        own = self.words.view(sizes).transpose(1, 2).expand(x.shape[0], -1, -1, -1)
        return self.q(x).view(*x.shape[:-1], -1, SIZE).transpose(1, 2), own, own

    def attend(self, q, k, v):
        return super().attend(q, k, v) + self.q(self.words).mean()


class UsedBehind(TokensFirst):
    """The same, behind a transposition that attention takes, too."""

    def attend(self, q, k, v):
        return super().attend(q, k, v) + q.mean((1, 3))[:, None, :, None]


class Broadcast(EachItsOwn):
    """One head of keys for all, which PyTorch repeats by itself."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k[:, :1], v, is_causal=True)


class Layer(nn.Module):
    """What a decoder has around attention; its tables come from elsewhere."""

    def __init__(self, attention):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), attention()

    def forward(self, x, cos, sin):
        return x + self.attention(self.norm(x), cos, sin)


class Net(nn.Module):
    def __init__(self, attention=Rotary, make=one_for_all):
        super().__init__()
        self.embed, self.layer, self.fc = nn.Linear(6, 32), Layer(attention), nn.Linear(32, 4)
        self.make = make

    def forward(self, x):
        cos, sin = self.make(len(x))
        return self.fc(self.layer(self.embed(x), cos, sin).mean(1))


NETS = {
    "half": (Rotary, one_for_all),
    "each its own": (EachItsOwn, one_for_all),
    "repeated": (Repeated, one_for_all),
    "sines first": (SinesFirst, one_for_all),
    "by slices": (BySlices, one_for_all),
    "tokens first": (TokensFirst, one_for_all),
    "partly": (Partly, lambda n: tables(turned=8)),
    "of wider tables": (Rotary, lambda n: [t[..., ::2] for t in map(doubled, tables())]),
    "by sample": (Rotary, tables),
    "by sample, partly": (Partly, lambda n: tables(n, 4)),
    "in pairs": (InPairs, one_for_all),
    "in pairs, by sample": (InPairs, tables),
    "in pairs, partly": (AsGlm, lambda n: tables(turned=8)),
}
NORMED = {
    "head by head": HeadNorms,
    "heads first": HeadsFirst,
    "behind": NormsBehind,
    "two heads": TwoHeads,
}
NETS |= {f"normed {name}": (own, one_for_all) for name, own in NORMED.items()}


@pytest.mark.parametrize("name", NETS)
def test_turned_heads_are_near_their_unfused_twins(name):
    attention, make = NETS[name]
    torch.manual_seed(0)
    model, twin, _ = twins(Net(attention, make))
    x, _ = batch(0)
    assert operations(model(x)) == [11 if issubclass(attention, HeadNorms) else 9]
    near(model, twin)
    with torch.no_grad():
        own, other = model.eval()(x), twin.eval()(x)
        assert (own - other).abs().max() < 0.02 * other.abs().max()
        same(marvin.freeze(model)(x), own)
        frozen = marvin.freeze(model)
        marvin.integer.prepack(frozen)
        same(frozen(x), own)
        same(frozen(x), own)
        model.make = twin.make = lambda *n: [t.flip(-2) for t in make(*n)]  # other positions
        turned, other = model(x), twin(x)
        assert (turned - other).abs().max() < 0.02 * other.abs().max()
        assert (turned - own).abs().max() > 0.1 * other.abs().max()


@pytest.mark.parametrize("samples", [1, 2, TOKENS, 32])
def test_as_many_samples_as_tokens(samples):
    """Tables of (samples, ...) and of one for all cannot be taken for each other."""
    torch.manual_seed(0)
    model, twin, _ = twins(Net(Rotary, tables))
    for make in (tables, one_for_all):
        model.make = twin.make = make
        x, _ = batch(3, samples)
        y, other = model(x), twin(x)
        assert operations(y) == [9]
        assert (y - other).abs().max() < 0.02 * other.abs().max()


@pytest.mark.parametrize(
    "attention",
    [Backwards, Unlike, Mixed, Used, UsedBehind, Broadcast, Across, NormUsed, Raw, Learned],
)
def test_what_turns_otherwise_stays_as_it_is(attention):
    torch.manual_seed(0)
    model, twin, _ = twins(Net(attention))
    x, _ = batch(0)
    assert max(operations(model(x)), default=0) <= 4
    near(model, twin)


def test_tables_that_learn_stay_outside():
    torch.manual_seed(0)
    model, twin, _ = twins(Net())
    cos, sin = tables()
    own, other = (nn.Parameter(cos.clone()) for _ in range(2))
    model.make, twin.make = lambda n: (own, sin), lambda n: (other, sin)
    x, _ = batch(0)
    y = model(x)
    assert operations(y) == []
    y.square().sum().backward()
    twin(x).square().sum().backward()
    assert own.grad.norm() > 0
    assert (own.grad - other.grad).norm() < 0.05 * other.grad.norm()


def test_tables_of_another_dtype_are_not_taken():
    torch.manual_seed(0)
    model, twin, _ = twins(Net())
    model.make = twin.make = lambda n: [t.bfloat16() for t in tables()]
    x, _ = batch(0)
    assert operations(model(x)) == []
    same(model(x), twin(x))


def test_lengths_may_change():
    torch.manual_seed(0)
    model, twin, _ = twins(Net())
    for count in (9, 5, 1, 16, 9):
        model.make = twin.make = lambda n, count=count: tables(tokens=count)
        x = torch.randn(8, count, 6)
        y, other = model(x), twin(x)
        assert operations(y) == [9]
        assert (y - other).abs().max() < 0.02 * other.abs().max()


def test_training_learns_to_the_bit_after_a_resume():
    def losses(model, optimizer, seeds):
        found = []
        for seed in seeds:
            x, y = batch(seed)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step(loss=loss)
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    model, _, optimizer = twins(Net())
    losses(model, optimizer, range(3))
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    wanted = losses(model, optimizer, range(3, 6))
    torch.manual_seed(1)
    other, _, own = twins(Net())
    other.load_state_dict(states[0])
    own.load_state_dict(states[1])
    assert losses(other, own, range(3, 6)) == wanted
