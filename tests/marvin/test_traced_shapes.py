"""Models whose code asks for shapes while it is traced: chains run where what was assumed holds, and nowhere else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import tokens
from marvin.integer import convert
from marvin.integer.graph import trace
from marvin.integer.sizes import Assumed
from tests.marvin.test_token_fusion import Net, Viewed, batch, operations, same, twins

pytestmark = pytest.mark.skipif(tokens.path() is None, reason="no path of tokens on this processor")


class Asking(Net):
    """A transformer that does something else for some shapes."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def forward(self, x):
        y = super().forward(x)
        return 2 * y if self.ask(x) else y


ASKED = {
    "more tokens": (lambda x: x.shape[1] > 4, [5, 4, 9, 1]),
    "as many or more": (lambda x: x.size(1) >= 4, [4, 3]),
    "fewer": (lambda x: x.size()[1] < 4, [4, 3]),
    "fewer or as many": (lambda x: x.shape[-2] <= 4, [5, 4]),
    "so many": (lambda x: x.shape[1] == 7, [7, 8]),
    "not so many": (lambda x: x.shape[1] != 7, [7, 8]),
    "samples and tokens": (lambda x: x.shape[0] == x.shape[1], [8, 9]),
    "features": (lambda x: x.shape[2] != 6, [9]),
    "a number itself": (lambda x: x.dim() == 3, [9]),
    "dimensions": (lambda x: x.ndim > 3, [9]),
    "how many sizes": (lambda x: len(x.shape) == 3, [9]),
    "parts of a shape": (lambda x: (*x.shape[1:], 2)[0] > 3, [3, 9]),
    "two questions": (lambda x: x.shape[1] > 4 and x.shape[1] <= 6, [4, 6, 7]),
}


@pytest.mark.parametrize("kind", ASKED)
def test_code_may_branch_on_shapes(kind):
    ask, counts = ASKED[kind]
    model, twin, _ = twins(Asking(ask))
    for count in (*counts, *counts):
        x = torch.randn(8, count, 6)
        y, other = model(x), twin(x)
        assert operations(y) == [21], count
        assert (y - other).abs().max() < 0.05 * y.abs().max()


@pytest.mark.parametrize("ask", [lambda x: x.sum() > 0, lambda x: x.shape[1] % 2 == 0, lambda x: x])
def test_code_that_branches_on_values_is_not_traced(ask):
    assert str(trace(Asking(ask))).startswith("torch.fx cannot trace it")


def test_many_shapes_that_take_other_ways_run_by_parts():
    model, twin, _ = twins(Asking(lambda x: any(x.shape[1] == n for n in (3, 4, 5, 6, 7, 8))))
    found = []
    for count in (3, 4, 5, 6, 7, 8, 9, 3):
        x = torch.randn(8, count, 6)
        y, other = model(x), twin(x)
        found.append(operations(y))
        assert (y - other).abs().max() < 0.05 * y.abs().max()
    assert found == [[21]] * 4 + [[20], [20], [21], [21]]  # the steps before had 9


def converted(model):
    """Return a model that is converted, after the steps that the policy observes, and its copy that is not fused."""
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy(window=10**6))
    marvin.quantize_activations(model, optimizer)
    for _ in range(6):
        loss = model.b(model.act(model.a(torch.randn(8, 5, 32)))).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    convert(model)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    return model, twin


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)


def test_other_numbers_of_dimensions_are_other_traces():
    class Apart(Layers):
        def forward(self, x):
            return self.b(self.act(self.a(x))).view(*x.shape[:-1], 4, 8).transpose(-1, -2)

    model, twin = converted(Apart())
    for shape in ((8, 5, 32), (8, 32), (4, 3, 2, 32), (8, 5, 32), (1, 32)):
        x = torch.randn(shape)
        y = model(x)
        assert y.shape == (*shape[:-1], 8, 4)
        same(y, twin(x))
        assert operations(y) == [3], shape


def test_what_follows_from_shapes_is_not_assumed():
    class Asking(Layers):
        def forward(self, x):
            n, t, _ = x.shape
            y = self.b(self.act(self.a(x)))
            heads = y.contiguous().view(n, t, 4, -1).transpose(1, 2)
            seen = F.scaled_dot_product_attention(heads, heads, heads)
            back = seen.transpose(1, 2).reshape(y.shape) + y
            if y.shape[2] != 32 or heads.shape[1] != 4 or heads.shape[2] > t or seen.ndim < 4:
                return x
            return back if len(back.shape) == 3 and back.shape[0] == n else x

    model, twin = converted(Asking())
    traced = trace(model)
    assert not isinstance(traced, str)
    assert traced.assumed == Assumed({"x": 3})
    x = torch.randn(8, 5, 32)
    same(model(x), twin(x))


def test_sums_have_the_wider_size():
    class Asking(Layers):
        def __init__(self, how):
            super().__init__()
            self.how = how

        def forward(self, x, other):
            y = self.b(self.act(self.a(x)))
            own, wanted = self.how(y, x, other)
            return y if own == wanted else -y

    for how, truth in (
        (lambda y, x, other: ((y + x).shape[2], 32), True),
        (lambda y, x, other: ((x + y).shape[2], 32), True),
        (lambda y, x, other: ((y.view(1, -1, 32) + y).shape[0], y.shape[0]), True),
        (lambda y, x, other: ((y + y.view(1, -1, 32)).shape[0], y.shape[0]), True),
        (lambda y, x, other: ((other + x).shape[1], 5), None),
        (lambda y, x, other: ((other + y.view(-1, 32)).shape[1], 5), None),
    ):
        traced = trace(converted(Asking(how))[0])
        assert isinstance(traced, str) is (truth is None)
        assert truth is None or not traced.assumed.answers


def test_what_is_not_known_of_shapes_is_not_assumed():
    class Asking(Layers):
        def __init__(self, ask):
            super().__init__()
            self.ask = ask

        def forward(self, x):
            y = self.b(self.act(self.a(x)))
            return y if self.ask(x, y) else x

    for ask in (
        lambda x, y: y.repeat(2, 1, 1).shape[0] > 4,
        lambda x, y: y.view(-1, 32).shape[0] > 4,
        lambda x, y: y.view(torch.int32).shape[0] > 4,
        lambda x, y: y.transpose(0, x.shape[1] - 1).shape[0] > 4,
        lambda x, y: (y + x.mean(0)).shape[0] > 4,
        lambda x, y: y.shape[x.dim() - 1] > 4,
        lambda x, y: x.shape[5] > 4,
        lambda x, y: y.shape,
    ):
        assert str(trace(converted(Asking(ask))[0])).startswith("torch.fx cannot trace it")


SIZES = {  # of what is made of (samples, tokens, 32 features), and what it is; None: no trace can know
    "what is left": (lambda y: y.view(y.shape[0], -1, 32).shape[1], lambda y: y.shape[1]),
    "heads": (lambda y: y.view(*y.shape[:2], -1, 8).shape[2], 4),
    "twice as many": (lambda y: y.view(y.shape[0], -1, 16).shape[1], None),
    "samples and tokens": (lambda y: y.view(-1, 32).shape[0], None),
    "no whole number": (lambda y: y.view(*y.shape[:2], -1, 32 // y.dim()).shape[2], None),
    "the first half": (lambda y: y[..., : y.shape[-1] // 2].shape[-1], 16),
    "the second half": (lambda y: y[..., y.shape[-1] // 2 :].shape[-1], 16),
    "a part": (lambda y: y[..., 4:-8].shape[2], 20),
    "others of a part": (lambda y: y[..., 4:-8].shape[1], lambda y: y.shape[1]),
    "every second": (lambda y: y[..., 1::2].shape[-1], 16),
    "every third of a part": (lambda y: y[..., 4:-8:3].shape[-1], 7),
    "one beside the other": (lambda y: torch.stack([y, -y], -1).shape[-1], 2),
    "stacked": (lambda y: torch.stack((y, y), dim=1).shape[-1], 32),
    "neighbours": (lambda y: torch.stack([y, -y], -1).flatten(-2).shape[-1], 64),
    "flat": (lambda y: y.flatten(1).shape[1], None),
    "others of what is flat": (lambda y: y.flatten(1).shape[0], lambda y: y.shape[0]),
    "twice each": (lambda y: y.repeat_interleave(2, dim=-1).shape[-1], 64),
    "twice each, others": (lambda y: y.repeat_interleave(2, -1).shape[1], lambda y: y.shape[1]),
    "some times each": (lambda y: y.repeat_interleave(2).shape[0], None),
    "a part of some": (lambda y: y.transpose(1, 2)[..., :2].shape[-1], None),
    "halves": (lambda y: torch.cat((-y[..., 16:], y[..., :16]), dim=-1).shape[-1], 32),
    "both": (lambda y: torch.cat([y, y[..., :8]], -1).shape[-1], 40),
    "others of both": (lambda y: torch.cat([y, y], -1).shape[0], lambda y: y.shape[0]),
    "one behind the other": (lambda y: torch.cat([y, y], 1).shape[1], None),
    "a place more": (lambda y: y.unsqueeze(1).shape[1], 1),
    "behind it": (lambda y: y.unsqueeze(1).shape[2], lambda y: y.shape[1]),
    "a place at the end": (lambda y: torch.unsqueeze(y, -1).shape[2], 32),
    "pieces": (lambda y: y.split(8, dim=-1)[1].shape[-1], None),
    "others of pieces": (lambda y: y.chunk(2, -1)[1].shape[1], lambda y: y.shape[1]),
    "pieces of samples": (lambda y: torch.split(y, 2)[0].shape[0], None),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_parts_are_known(name):
    how, wanted = SIZES[name]

    class Asking(Layers):
        def forward(self, x):
            y = self.b(self.act(self.a(x)))
            own = wanted(y) if callable(wanted) else wanted
            return y if how(y) == (1 if own is None else own) else -y

    model, twin = converted(Asking())
    if wanted is None:
        assert str(trace(model)).startswith("torch.fx cannot trace it")
        return
    traced = trace(model)
    assert not traced.assumed.answers
    for shape in ((8, 5, 32), (3, 7, 32)):
        x = torch.randn(shape)
        same(model(x), twin(x))
        assert operations(model(x)) == [3]


def test_sums_of_arguments_are_asked_which_is_wider():
    class Asking(Layers):
        def forward(self, x, other):
            y = self.b(self.act(self.a(x)))
            return y if (x * other).shape[0] < 9 else -y

    model, twin = converted(Asking())
    found = []
    for many, others in ((8, 8), (16, 1), (1, 16), (8, 1), (16, 16), (1, 1), (8, 8), (1, 8)):
        x, other = torch.randn(many, 5, 32), torch.randn(others, 5, 32)
        y = model(x, other)
        same(y, twin(x, other))
        found.append(operations(y))
    assert found.count([]) < 4, found  # four ways are traced, others run layer by layer


def test_a_trace_of_many_sums_of_itself_is_short():
    class Doubling(Layers):
        def forward(self, x):
            y = self.b(self.act(self.a(x)))
            for _ in range(200):
                y = y + y
            return y if y.shape[1] > 1 else x

    assert not isinstance(trace(converted(Doubling())[0]), str)


class Used(Viewed):
    """Sizes and heads are used behind attention, too."""

    what = ""

    def forward(self, x):
        n, t, w = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (x.view(n, t, self.heads, w // self.heads).transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        if self.what == "between":
            y = y * y.shape[2]
        y = self.out(y.transpose(1, 2).contiguous().view(n, t, w))
        if self.what == "size":
            return y * t
        if self.what == "heads":
            return y + q.transpose(1, 2).reshape(n, t, w).sin()
        return torch.sin(y) + k.mean() * n if self.what == "both" else y


@pytest.mark.parametrize("passes", ["training", "eval"])
@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("", [21]),
        ("size", [3, 6, 8]),
        ("heads", [3, 6, 8]),
        ("both", [3, 6, 8]),
        ("between", []),  # heads that are not side by side are no value of a chain
    ],
)
def test_sizes_and_heads_may_be_used_behind_attention(what, wanted, passes):
    class Own(Used):
        pass

    Own.what = what
    model, twin, _ = twins(Net(Own))
    x, _ = batch(0)
    if passes == "eval":
        model, twin = model.eval(), twin.eval()
    with torch.set_grad_enabled(passes == "training"):
        y, other = model(x), twin(x)
    if passes == "training":
        assert operations(y) == wanted
    assert (y - other).abs().max() < 0.05 * y.abs().max()


def of_transformers(kind, dropout):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 4}
    rest = {
        "intermediate_size": 64,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    if kind == "Bert":
        config = transformers.BertConfig(**sizes, **rest, vocab_size=50)
        return transformers.BertForSequenceClassification(config)
    config = transformers.ViTConfig(**sizes, **rest, image_size=16, patch_size=4)
    return transformers.ViTForImageClassification(config)


def of_images(seed, n=8):
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def of_words(seed, n=8):
    return torch.randint(1, 50, (n, 9), generator=torch.Generator().manual_seed(seed))


WORDS = {"Bert": of_words, "ViT": of_images}
ENCODER = {"Bert": [24], "ViT": [12, 12]}


def trained(kind, steps=6, dropout=0.0):
    """Return a model of transformers after some steps, and its copy that is not fused."""
    torch.manual_seed(0)
    model = of_transformers(kind, dropout)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.02, momentum=0.9)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy(window=10**6), seed=0)
    marvin.quantize_activations(model, optimizer)
    convert(model)
    for i in range(steps):
        loss = F.cross_entropy(model(WORDS[kind](i)).logits, torch.arange(8) % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    return model, twin


def compare(model, twin, *args, **kwargs):
    y, other = model(*args, **kwargs), twin(*args, **kwargs)
    assert (y.logits - other.logits).abs().max() < 0.05 * y.logits.abs().max()
    return y


@pytest.mark.parametrize("kind", WORDS)
def test_layers_of_transformers_are_one_chain_each(kind):
    model, twin = trained(kind)
    x = WORDS[kind](9)
    y = compare(model, twin, x)
    assert operations(y.logits) == ENCODER[kind]
    for own in (model, twin):
        own.zero_grad()
        F.cross_entropy(own(x).logits, torch.arange(8) % 4).backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 0.2 * b.grad.norm() + 1e-5, name
    with torch.no_grad():
        compare(model.eval(), twin.eval(), x)
        frozen = marvin.freeze(model)
        same(frozen(x).logits, model(x).logits)


def test_words_that_are_masked_leave_attention_to_pytorch():
    model, twin = trained("Bert")
    x = of_words(9)
    mask = torch.ones_like(x)
    y = compare(model, twin, x, attention_mask=mask)
    assert operations(y.logits) == [24]  # no word is left out
    mask[3, 4:] = 0
    y = compare(model, twin, x, attention_mask=mask)
    assert operations(y.logits) == [3, 8, 11]
    other = x.clone()
    other[3, 4:] = 7
    same(model(other, attention_mask=mask).logits[3], y.logits[3])


@pytest.mark.parametrize("kind", WORDS)
def test_another_attention_is_seen(kind):
    model, twin = trained(kind)
    x = WORDS[kind](9)
    for own in (model, twin):
        own.set_attn_implementation("eager")
    y = compare(model, twin, x)
    assert 12 not in operations(y.logits)
    for own in (model, twin):
        own.set_attn_implementation("sdpa")
    assert operations(compare(model, twin, x).logits) == [12, 12]


@pytest.mark.parametrize("kind", WORDS)
def test_outputs_that_are_asked_for_come(kind):
    model, twin = trained(kind)
    x = WORDS[kind](9)
    y = compare(model, twin, x, output_hidden_states=True)
    assert len(y.hidden_states) == 3
    same(y.hidden_states[0], twin(x, output_hidden_states=True).hidden_states[0])
    for own in (model, twin):
        own.set_attn_implementation("eager")
    y = compare(model, twin, x, output_attentions=True)
    assert len(y.attentions) == 2
    torch.testing.assert_close(y.attentions[0].sum(-1), torch.ones(8, 2, y.attentions[0].shape[-1]))


def test_one_word_alone_runs():
    model, twin = trained("Bert")
    y = compare(model, twin, of_words(9)[:, :1])
    assert operations(y.logits) == [24]


@pytest.mark.parametrize("kind", WORDS)
def test_layers_with_dropout_are_one_chain_each(kind):
    """As BERT is by default."""
    model, twin = trained(kind, dropout=0.1)
    x = WORDS[kind](9)
    assert sum(operations(model(x).logits)) == 28
    with torch.no_grad():
        ys, others = (torch.stack([own(x).logits for _ in range(64)]) for own in (model, twin))
        assert (ys.mean(0) - others.mean(0)).abs().max() < 6 * (others.std(0) / 8).max()
        assert 0.7 < ys.std(0).mean() / others.std(0).mean() < 1.4
        compare(model.eval(), twin.eval(), x)
