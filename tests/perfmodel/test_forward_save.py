"""What a converted model is measured to keep is what the options predict."""

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import forward_save
from perfmodel.forward_save import Division, compact_bytes
from perfmodel.memory import division, few_bit, saved_bytes
from perfmodel.zoo import MODELS
from perfmodel.zoo.resnet import ResNet, Shape
from perfmodel.zoo.transformer import Size, ViT

SMALL = Shape((1, 1, 1, 1), is_bottleneck=False, is_small=True, classes=10)


def block():
    return ViT(Size(1, 64, 4, tokens=16, vocabulary=10), 8)


def measured(model, x):
    return saved_bytes(model, x, measure=True).total_bytes


@pytest.mark.parametrize(
    ("act", "bits"), [(nn.ReLU, 3), (nn.GELU, 1), (nn.GELU, 3), (nn.SiLU, 8), (nn.Hardtanh, 1)]
)
def test_few_bit_on_a_resnet(act, bits):
    model, x = ResNet(SMALL, act), torch.randn(2, 3, 32, 32)
    exact = saved_bytes(model, x)
    forward_save.convert(model, few_bit=bits)
    assert measured(model, x) == exact.with_option(few_bit(bits))
    forward_save.revert(model)
    assert measured(model, x) == exact.total_bytes


@pytest.mark.parametrize("bits", [1, 3])
def test_few_bit_on_a_transformer_block(bits):
    model, x = block(), torch.randn(3, 3, 32, 32)
    exact = saved_bytes(model, x)
    forward_save.convert(model, few_bit=bits)
    got = measured(model, x)
    assert got == exact.with_option(few_bit(bits))
    code = -(3 * 17 * 256 // -1024) * 128 * bits  # 17 tokens of 4 * 64 features
    assert exact.total_bytes - got == 3 * 17 * 256 * 4 - code


def per_layer_norm(tokens):
    """Bytes of float32 mean and scale, of which ``division`` predicts that 2 each are kept."""
    return 2 * 2 * tokens


@pytest.mark.parametrize("settings", [(8, 2), (8, 4), (12, 2), (3, 1)])
def test_division_on_a_resnet(settings):
    block, bits = settings
    model, x = ResNet(SMALL), torch.randn(2, 3, 32, 32)
    exact = saved_bytes(model, x)
    forward_save.convert(model, division={"block": block, "bits": bits})
    assert measured(model, x) == exact.with_option(division(Division(block, bits)))
    assert forward_save.state(model)["count"] == 0  # measured on a copy
    forward_save.revert(model)
    assert measured(model, x) == exact.total_bytes


def test_division_and_few_bit_on_a_transformer_block():
    model, x = block(), torch.randn(2, 3, 32, 32)
    exact, tokens = saved_bytes(model, x), 2 * 17
    forward_save.convert(model, division=True, few_bit=3, calls=False)

    def both(kept):
        is_smooth = {s.op for s in kept.savers} == {"gelu"}
        return (few_bit(3) if is_smooth else division())(kept)

    # the head reads one token of 17: packed by itself, where the option keeps the whole storage
    token = tokens * 64 * 4 - Division().size_bytes((2, 64))
    assert measured(model, x) == exact.with_option(both) + 3 * per_layer_norm(tokens) - token


@pytest.mark.parametrize("calls", [False, True])
def test_a_converted_transformer_is_predicted_on_shapes(calls):
    model, x = block(), torch.randn(2, 3, 32, 32)
    forward_save.convert(model, division=True, few_bit=3, calls=calls)
    assert saved_bytes(model, x).total_bytes == measured(model, x)


def test_a_plan_keeps_what_it_predicts():
    model, x = ResNet(SMALL), torch.randn(2, 3, 32, 32)
    exact = measured(model, x)
    plan = forward_save.plan(model, x, budget_bytes=exact // 4)
    assert plan.exact_bytes == exact
    forward_save.convert(model, plan=plan)
    assert measured(model, x) == plan.predicted_bytes <= exact // 4


@pytest.mark.parametrize(
    ("name", "batch", "factor"), [("ResNet-18/CIFAR", 128, 10.75), ("ResNet-50", 64, 11.66)]
)
def test_the_papers_networks_keep_a_tenth(name, batch, factor):
    """On shapes alone: no tensor of this size is made."""
    entry = MODELS[name]
    with torch.device("meta"):
        model, x = entry.build(entry.activation), torch.empty(batch, *entry.input_shape)
    exact = saved_bytes(model, x).total_bytes
    forward_save.convert(model, division=True)
    assert exact / saved_bytes(model, x).total_bytes == pytest.approx(factor, abs=0.01)


@pytest.mark.parametrize("share", [0.25, 0.3, 0.9])
def test_rows_of_linear_layers(share):
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 8))
    x = torch.randn(5, 11, 64)
    exact = saved_bytes(model, x)
    kept = -(-55 * share // 1)
    forward_save.convert(model, division={"rows": share})
    got = measured(model, x)
    assert got == exact.with_option(division(Division(rows=share))) + per_layer_norm(55)
    assert got == saved_bytes(model, x).total_bytes
    whole = saved_bytes(nn.Sequential(*model[:1]), x, measure=True).total_bytes
    assert whole == kept * (64 * 4 + 4)


def test_grouped_queries_to_the_byte():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    config = transformers.LlamaConfig(**sizes, **heads)

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.LlamaModel(config)

        def forward(self, tokens):
            return self.model(tokens).last_hidden_state

    model, tokens = Hidden(), torch.randint(20, (2, 24))
    assert saved_bytes(model, tokens).total_bytes == measured(model, tokens)
    forward_save.convert(model, few_bit=3, division=True)
    assert saved_bytes(model, tokens).total_bytes == measured(model, tokens)


@pytest.mark.parametrize(
    ("states", "make", "policy", "tensors"),
    [
        ("sgd", lambda ps: torch.optim.SGD(ps, lr=0.1), marvin.FixedPolicy(8, 6), 0),
        ("momentum", lambda ps: torch.optim.SGD(ps, momentum=0.9), marvin.FixedPolicy(8, 6), 0),
        ("momentum", lambda ps: torch.optim.SGD(ps, momentum=0.9), marvin.StaticPolicy(), 0),
        ("adam", torch.optim.AdamW, marvin.FixedPolicy(8, 6), 0),
        ("adam", torch.optim.Adam, marvin.MarvinPolicy(lookback=(2, 4)), 1),
    ],
)
def test_compact_states(states, make, policy, tensors):
    layers = nn.Conv2d(8, 12, 3), nn.Flatten(), nn.Linear(48, 300), nn.Linear(300, 7, bias=False)
    net = nn.Sequential(*layers)
    optimizer = marvin.Quantized(make(net.parameters()), policy, compact_state=True)
    net(torch.randn(2, 8, 4, 4)).square().mean().backward()
    optimizer.step(loss=1.0)
    found = [
        own.values() for own in (*optimizer.state.values(), *optimizer.optimizer.state.values())
    ]
    measured = sum(x.nbytes for own in found for x in own if isinstance(x, torch.Tensor))
    assert measured == compact_bytes([p.shape for p in net.parameters()], states, tensors)


def test_states_that_are_unknown():
    with pytest.raises(ValueError, match="states must be one of sgd, momentum, adam, got 'lion'"):
        compact_bytes([(3, 4)], "lion")
