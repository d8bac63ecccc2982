"""Decoders as chains: gates, RMS norm, GELU by tanh, ``Conv1D``, causal attention, and tuples of tensors as arguments."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import forward_save, tokens
from marvin.integer import convert, report
from marvin.integer.fusion import Fused
from marvin.integer.graph import trace
from marvin.integer.token_inference import TokenInference
from tests.marvin.test_token_fusion import Net, batch, make, near, operations, same, twins

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(tokens.path() is None, reason="no path of tokens on this processor")


class Decoder(nn.Module):
    """A model of transformers between two layers; ``options`` are of its call."""

    def __init__(self, body, **options):
        super().__init__()
        self.embed, self.body, self.fc = nn.Linear(6, 32), body, nn.Linear(32, 4)
        body.set_input_embeddings(nn.Identity())  # words do not come
        self.options = options

    def forward(self, x):
        return self.fc(self.body(inputs_embeds=self.embed(x), **self.options)[0].mean(1))


def gpt2(**options):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 8}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return transformers.GPT2Model(transformers.GPT2Config(**sizes | ends | options))


def llama(kind="Llama", **options):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 48, "vocab_size": 8, "max_position_embeddings": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
    config = getattr(transformers, f"{kind}Config")(**sizes | ends | options)
    return getattr(transformers, f"{kind}Model")(config)


DECODERS = {  # and how many operations their chains have
    "GPT-2": (gpt2, [10, 10]),
    "GPT-2, scores by layer": (
        lambda: gpt2(scale_attn_by_inverse_layer_idx=True),
        [10, 10],
    ),
    "GPT-2, exact GELU": (lambda: gpt2(activation_function="gelu"), [10, 10]),
    "Llama": (llama, [16, 16]),
    "Llama, keys for two": (lambda: llama(num_key_value_heads=1), [16, 16]),
    "Qwen2": (lambda: llama("Qwen2", num_key_value_heads=2), [16, 16]),
    "Mistral": (lambda: llama("Mistral", num_key_value_heads=1), [16, 16]),
    "Gemma": (lambda: llama("Gemma", num_key_value_heads=2, head_dim=16), [16, 16]),
    "SmolLM3": (lambda: llama("SmolLM3", num_key_value_heads=1), [16, 16]),
    "GPT-NeoX": (lambda: llama("GPTNeoX"), [12, 12]),
    "Phi": (lambda: llama("Phi"), [13, 13]),
    "Phi-3": (lambda: llama("Phi3", num_key_value_heads=2), [15, 15]),
    "StableLM": (lambda: llama("StableLm", num_key_value_heads=2), [16, 16]),
    "Qwen3": (lambda: llama("Qwen3", num_key_value_heads=2, head_dim=16), [18, 18]),
    "Gemma 3": (
        lambda: llama("Gemma3Text", num_key_value_heads=2, head_dim=16),
        [20, 20],
    ),
    "OLMo 2": (lambda: llama("Olmo2", num_key_value_heads=2), [18, 18]),
    "Helium": (lambda: llama("Helium", num_key_value_heads=1, head_dim=16), [16, 16]),
    "Ernie 4.5": (lambda: llama("Ernie4_5", num_key_value_heads=1, head_dim=16), [16, 16]),
    "GLM-4": (lambda: llama("Glm4", num_key_value_heads=2, head_dim=16), [19, 19]),
    "Cohere": (lambda: llama("Cohere"), [5, 5, 6, 6]),
}


def check_twins(model, twin, counts):
    """Compare a model with its unfused twin in training, in eval mode and frozen."""
    x, _ = batch(0)
    assert operations(model(x)) == counts
    near(model, twin)
    with torch.no_grad():
        own, other = model.eval()(x), twin.eval()(x)
        assert (own - other).abs().max() < 0.05 * other.abs().max()
        same(marvin.freeze(model)(x), own)


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_are_near_their_unfused_twins(kind):
    body, counts = DECODERS[kind]
    torch.manual_seed(0)
    model, twin, _ = twins(Decoder(body()))
    check_twins(model, twin, counts)


@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_a_token_sees_those_before_it_only(kind):
    model, _, _ = twins(Decoder(DECODERS[kind][0]()))
    body, x = model.body, torch.randn(4, 9, 32)
    other = x.clone()
    other[:, 6:] = torch.randn(4, 3, 32)
    y = body(inputs_embeds=x)[0]
    assert operations(y)
    z = body(inputs_embeds=other)[0]
    same(y[:, :6], z[:, :6])
    assert not torch.equal(y[:, 6:], z[:, 6:])


def test_a_decoder_with_a_cache_has_chains_of_parts():
    model, twin, _ = twins(Decoder(gpt2(), use_cache=True))
    x, _ = batch(0)
    assert operations(model(x)) == [3, 3]  # what feeds forward
    assert (model(x) - twin(x)).abs().max() < 0.05 * twin(x).abs().max()
    found = report(model)
    assert found.refused == dict.fromkeys(
        ("body.h.0", "body.h.1"), "past_key_values, a DynamicCache"
    )
    assert str(found).endswith(
        "\nbody.h.0 and 1 more: ran part by part, for its last call had past_key_values, a DynamicCache: to train, "
        "write model.config.use_cache = False"
    )
    model.options["use_cache"] = False
    assert operations(model(x)) == [10, 10]
    assert not report(model).refused
    assert "part by part" not in str(report(model))


def test_lengths_of_texts_may_change():
    model, twin, _ = twins(Decoder(llama()))
    fused = {row.name for row in report(model).rows if row.is_fused}
    assert {"body.layers.0.self_attn.q_proj", "body.layers.1.self_attn.o_proj"} <= fused
    for count in (9, 5, 9, 1, 16):
        x = torch.randn(8, count, 6)
        y, other = model(x), twin(x)
        assert len(operations(y)) == 2, count
        assert (y - other).abs().max() < 0.05 * other.abs().max()


def test_conv1d_by_channel_runs_layer_by_layer():
    model, _ = make(
        model=Decoder(gpt2()), policy=marvin.LossBudgetPolicy(per_channel=True), steps=6
    )
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    x, _ = batch(0)
    assert operations(model(x)) == []
    same(model(x), twin(x))


# ---------------------------------------------------------------- parts


class Wrong(nn.Module):
    """A norm that is registered, whose number has another name."""

    def __init__(self, features):
        super().__init__()
        self.weight, self.small = nn.Parameter(torch.ones(features)), 1e-3

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.small).rsqrt() * self.weight


class Quick(nn.Module):
    """GELU by tanh, written out."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@pytest.fixture
def registered(monkeypatch):
    entries = {**forward_save.known._entries}
    monkeypatch.setattr(forward_save.known, "_entries", entries)
    forward_save.register(Wrong, "rms_norm", eps="small")
    forward_save.register(Quick, "activation", name="gelu_tanh")
    forward_save.known._lookup.cache_clear()
    yield
    forward_save.known._lookup.cache_clear()


class Gated(nn.Module):
    def __init__(self, norm, act):
        super().__init__()
        self.embed, self.norm, self.act = nn.Linear(6, 32), norm, act
        self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down, self.fc = nn.Linear(64, 32), nn.Linear(32, 4)

    def forward(self, x):
        y = self.embed(x)
        z = self.norm(y)
        y = y + self.down(self.act(self.gate(z)) * self.up(z))
        return self.fc(y.mean(1))


NORMS = {
    "torch's": lambda: nn.RMSNorm(32),
    "with a number": lambda: nn.RMSNorm(32, eps=0.1),
    "without a weight": lambda: nn.RMSNorm(32, elementwise_affine=False),
    "registered": lambda: Wrong(32),
    "Llama's": lambda: transformers.models.llama.modeling_llama.LlamaRMSNorm(32, eps=0.1),
    "layer norm": lambda: nn.LayerNorm(32),
}
ACTS = {
    "SiLU": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "hardswish": nn.Hardswish,
    "leaky ReLU": lambda: nn.LeakyReLU(0.2),
    "GELU by tanh": lambda: nn.GELU("tanh"),
    "registered": Quick,
    "NewGELU": lambda: transformers.activations.NewGELUActivation(),
    "GELU": nn.GELU,
    "ReLU": nn.ReLU,
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("norm", "act"),
    [*((norm, "SiLU") for norm in NORMS), *(("torch's", act) for act in ACTS if act != "SiLU")],
)
def test_gates_are_near_their_unfused_twins(norm, act):
    model, twin, _ = twins(Gated(NORMS[norm](), ACTS[act]()))
    x, _ = batch(0)
    assert operations(model(x)) == [7]
    near(model, twin)
    with torch.no_grad():
        own, other = model.eval()(x), twin.eval()(x)
    assert (own - other).abs().max() < 0.05 * other.abs().max()


class Sharp(nn.Module):
    """A function near GELU."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Shifted(Wrong):
    def forward(self, x):
        return super().forward(x) + 0.01


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["activation", "norm", "an error"])
def test_what_is_registered_as_another_function_runs_as_it_is(kind):
    class Refusing(nn.Module):
        def forward(self, x):
            if x.shape[-1] == 64 and x.dim() == 3:
                return F.gelu(x, approximate="tanh")
            raise TypeError("other shapes")

    for cls in (Sharp, Refusing):
        forward_save.register(cls, "activation", name="gelu_tanh")
    forward_save.register(Shifted, "rms_norm", eps="small")
    norm = Shifted(32) if kind == "norm" else nn.RMSNorm(32)
    model, twin, _ = twins(
        Gated(norm, {"activation": Sharp, "an error": Refusing}.get(kind, nn.SiLU)())
    )
    x, _ = batch(0)
    assert operations(model(x)) == ([5] if kind == "norm" else [2, 3])
    near(model, twin)


@pytest.mark.usefixtures("registered")
def test_what_known_modules_have_besides_is_theirs():
    """A number of another name, and attributes that are called as a layer's parameters are."""
    act, norm = Quick(), Wrong(32)
    act.weight, norm.bias = 3.0, nn.Parameter(torch.ones(32), requires_grad=False)
    model, twin, _ = twins(Gated(norm, act))
    x, _ = batch(0)
    assert operations(model(x)) == [7]
    assert (model(x) - twin(x)).abs().max() < 0.05 * twin(x).abs().max()
    del norm.small
    with pytest.raises(AttributeError, match="small"):
        model(x)
    assert "small" not in str(trace(model))


@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_decoders_may_keep_their_weights_laid_out(kind):
    model, _, _ = twins(Decoder(DECODERS[kind][0]()))
    x, _ = batch(0)
    frozen = marvin.freeze(model.eval())
    with torch.no_grad():
        y = frozen(x)
        marvin.integer.prepack(frozen)
        for _ in range(2):
            same(frozen(x), y)
    runs = [own for own in frozen.modules() if isinstance(vars(own).get("forward"), Fused)]
    modes = [mode for own in runs for mode in own.forward._all(False)]
    chains = [run for mode in modes for made in mode._runs.values() for run in made.chains]
    chains = [run for run in chains if isinstance(run, TokenInference)]
    assert chains
    assert all(run._given is not None for run in chains)


class OfOneLayer(nn.Module):
    """Gate and values of one layer, as ``pieces`` spells it."""

    def __init__(self, pieces, features=128):
        super().__init__()
        self.embed, self.both = nn.Linear(6, 32), nn.Linear(32, features)
        self.down, self.fc, self.pieces = nn.Linear(64, 32), nn.Linear(32, 4), pieces

    def forward(self, x):
        y = self.embed(x)
        gate, up = self.pieces(self.both(y))
        return self.fc((y + self.down(F.silu(gate) * up)).mean(1))


def in_threes(y):
    a, b, c = y.chunk(3, dim=-1)
    return a * c, b


PIECES = {  # how pieces are taken, features of the layer, operations
    "chunk": (lambda y: y.chunk(2, dim=-1), 128, [7]),
    "split": (lambda y: torch.split(y, [64, 64], dim=2), 128, [7]),
    "slices": (lambda y: (y[:, :, 64:], y[..., :64]), 128, [7]),
    "sizes asked for": (lambda y: y.split(y.shape[-1] // 2, -1), 128, [7]),
    "views first": (lambda y: y.unflatten(-1, (2, 64)).unbind(2), 128, [7]),
    "that overlap": (lambda y: (y[..., :64], y[..., 32:96]), 128, [7]),
    "of pieces": (lambda y: y.chunk(2, -1)[0].chunk(2, dim=-1), 256, [7]),
    "three": (in_threes, 192, [9]),
    "the whole": (lambda y: (y, y[..., :]), 64, [6]),
    "of neighbours": (lambda y: (y[..., ::2], y[..., 1::2]), 128, [2]),
    "neighbours by views": (lambda y: y.unflatten(-1, (64, 2)).unbind(-1), 128, []),
    "of one token": (lambda y: (y[:, :1], y), 64, [2]),
    "by numbers": (lambda y: (y[..., 3:67], y[..., 5:69]), 80, [7]),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_a_value_are_taken_in_chains(name):
    pieces, features, counts = PIECES[name]
    model, twin, _ = twins(OfOneLayer(pieces, features))
    check_twins(model, twin, counts)


FUNCTIONS = {
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "a method": lambda x: x.sigmoid(),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_as_modules(name):
    class Called(nn.Module):
        def forward(self, x):
            return FUNCTIONS[name](x)

    model, twin, _ = twins(Gated(nn.RMSNorm(32), Called()))
    assert operations(model(batch(0)[0])) == [7]
    near(model, twin)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["eps", "small"])
def test_numbers_that_change_are_seen(name):
    model, _, _ = twins(Gated(nn.RMSNorm(32) if name == "eps" else Wrong(32), nn.SiLU()))
    x, _ = batch(0)
    before = model(x)
    setattr(model.norm, name, 10.0)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    assert (model(x) - twin(x)).abs().max() < 0.05 * twin(x).abs().max()
    assert not torch.equal(model(x), before)


FOREIGN = {
    "a short norm": (Gated, "norm", torch.ones(1)),
    "a long norm": (Gated, "norm", torch.ones(96)),
    "fewer outputs": (Decoder, "c_fc", torch.randn(32, 64)),
    "turned": (Decoder, "c_fc", torch.randn(128, 32)),
}


def outcome(model, x):
    try:
        return model(x)
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:weights must be numbers of their format")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", FOREIGN)
def test_weights_of_other_shapes_are_left_to_pytorch(kind, training):
    cls, name, value = FOREIGN[kind]
    llamas = transformers.models.llama.modeling_llama.LlamaRMSNorm(32)
    model, _, _ = twins(Decoder(gpt2()) if cls is Decoder else Gated(llamas, nn.SiLU()))
    x, _ = batch(0)
    assert operations(model(x))
    owner = model.body.h[0].mlp if cls is Decoder else model
    getattr(owner, name).weight = nn.Parameter(value)
    twin = copy.deepcopy(model)
    convert(twin, fused=False)
    with torch.set_grad_enabled(training):
        found, wanted = (outcome(own.train(training), x) for own in (model, twin))
    assert isinstance(found, str) == isinstance(wanted, str)
    if isinstance(wanted, torch.Tensor):
        same(found.detach(), wanted.detach())


def test_products_with_what_is_repeated_run_layer_by_layer():
    class Repeated(Gated):
        def forward(self, x):
            z = self.norm(self.embed(x))
            return self.fc(self.down(self.gate(z) * self.up(z[:, :1])).mean(1))

    model, twin, _ = twins(Repeated(nn.RMSNorm(32), nn.SiLU()))
    x, _ = batch(0)
    same(model(x), twin(x))


ONE, SOME = [25], [4, 8, 11]  # operations of chains
SCALES = {
    "times a power of two": (lambda q: q * 0.25, ONE),
    "a power of two times": (lambda q: 0.25 * q, ONE),
    "over a power of two": (lambda q: q / 4.0, ONE),
    "times another": (lambda q: q * 0.3, SOME),
    "over another": (lambda q: q / 3.0, SOME),
    "a power of two over": (lambda q: 0.25 / q, SOME),
    "times a sum": (lambda q: q * (0.25 + q.mean()), SOME),
}


@pytest.mark.parametrize("kind", SCALES)
def test_queries_that_are_scaled_by_powers_of_two_stay_in_chains(kind):
    way, counts = SCALES[kind]

    class Scaled(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

        def forward(self, x):
            q, k, v = (
                own.unflatten(-1, (2, -1)).transpose(1, 2)
                for own in (way(self.q(x)), self.k(x), self.v(x))
            )
            y = F.scaled_dot_product_attention(q, k, v, scale=1.0)
            return self.out(y.transpose(1, 2).flatten(2))

    model, twin, _ = twins(Net(Scaled))
    assert operations(model(batch(0)[0])) == counts
    if kind != "a power of two over":  # whose gradients are too large to compare
        near(model, twin)


# ---------------------------------------------------------------- arguments


class Tupled(Net):
    """Takes a tuple of tensors, and a list or a tuple of numbers."""

    def forward(self, x, pair=None, numbers=()):
        y = super().forward(x)
        for one in pair or ():
            y = y * one
        return y + sum(numbers)


def test_tuples_of_tensors_are_arguments():
    model, twin, _ = twins(Tupled())
    x, _ = batch(0)
    one, two = torch.rand(1, 4), torch.rand(8, 1)
    for pair in ((one,), (one, two), (two, one), (two,), ()):
        for _ in range(2):
            y = model(x, pair)
            assert operations(y) == ([21] if pair else [20]), len(pair)
            assert (y - twin(x, pair)).abs().max() < 0.05 * y.abs().max()
    same(model(x, (one, two)), model(x, pair=(one, two)))
    assert operations(model(x, None, (1.0, 2))) == [21]
    same(model(x, None, (1.0, 2)), model(x) + 3.0)
    assert operations(model(x, None, [1.0, 2])) == [20]


def test_tuples_do_not_take_the_place_of_others():
    """A tuple's first tensor, and an argument of the name that it would have."""

    class Odd(Net):
        def forward(self, x, pair=None, pair__0=None):
            y = super().forward(x)
            y = y if pair is None else y + pair[0]
            return y if pair__0 is None else y * pair__0

    model, twin, _ = twins(Odd())
    x, _ = batch(0)
    one, two = torch.rand(8, 4), torch.rand(8, 4)
    for call in (((one,), two), ((one,), None), (None, two)):
        y, other = model(x, *call), twin(x, *call)
        assert (y - other).abs().max() < 0.05 * other.abs().max()


def test_what_only_some_calls_can_be_traced_with_is_fused_in_these():
    class Needs(Net):
        def forward(self, x, pair=None):
            a, b = pair  # there is no trace without
            return super().forward(x) * a + b

    model = Needs()
    assert "cannot unpack" in trace(model)
    x, _ = batch(0)
    pair = torch.rand(8, 4), torch.rand(8, 4)
    bound = model.forward
    model.eval()
    assert bound(x, pair).shape == (8, 4)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Needs()

        def forward(self, x):
            return self.net(x, (x[:, 0, :4], x.sum((1, 2), keepdim=True)[:, 0] * 0))

    model, twin, _ = twins(Whole())
    assert operations(model(x)) == [21]
    near(model, twin)

    class Outer(Whole):
        def forward(self, x):
            with torch.no_grad():
                pair = x[:, 0, :4], x[:, 1, :4]
            return self.net(x, pair)

    model, twin, _ = twins(Outer())
    assert operations(model(x)) == [21]
    assert str(report(model)).count("fused") == 8
    near(model, twin)
