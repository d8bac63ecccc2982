"""Spelled attention computes what torch's does, whoever calls it, and loses nothing silently."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import marvin
from marvin import attention
from marvin.tracing import Tracer


class Layers(nn.Module):
    """Calls an encoder, its layers and their attention, each by itself."""

    def __init__(self, batch_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        y = self.encoder(x)
        for layer in self.encoder.layers:
            y = layer(y)
        return self.encoder.layers[0].self_attn(y, y, y)[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_keep_their_order_of_dimensions_where_others_call_them(batch_first):
    model, x = Layers(batch_first).eval(), torch.randn(3, 5, 8)
    torch.testing.assert_close(marvin.spell_attention(model)(x), model(x))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x):
        y, _ = self.a(x, x, x)
        return self.b(y, y, y)[0]


def test_shared_parameters_stay_shared_or_are_refused():
    model, x = Two().eval(), torch.randn(3, 5, 8)
    model.b.out_proj.weight = model.a.out_proj.weight
    spelled = marvin.spell_attention(model)
    assert spelled.a.out_proj.weight is spelled.b.out_proj.weight
    assert spelled.a.out_proj.weight is not model.a.out_proj.weight
    torch.testing.assert_close(spelled(x), model(x))
    model.b.in_proj_weight = model.a.in_proj_weight
    with pytest.raises(ValueError, match="'a' and 'b' must not share in_proj_weight"):
        marvin.spell_attention(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.a.register_forward_hook(lambda *_: None), "got the hook <function"),
        (lambda m: m.a.register_forward_pre_hook(lambda *_: None), "got the hook <function"),
        (lambda m: m.a.register_full_backward_hook(lambda *_: None), "got the hook <function"),
        (lambda m: m.a.register_full_backward_pre_hook(lambda *_: None), "got the hook <function"),
        (lambda m: m.a.register_state_dict_pre_hook(lambda *_: None), "got the hook <function"),
        (lambda m: m.a.register_state_dict_post_hook(lambda *_: None), "got the hook <function"),
        (lambda m: m.a.register_load_state_dict_pre_hook(lambda *_: None), "got the hook <func"),
        (lambda m: m.a.register_load_state_dict_post_hook(lambda *_: None), "got the hook <func"),
        (lambda m: m.a.out_proj.register_state_dict_post_hook(lambda *_: None), "got the hook <f"),
        (lambda m: setattr(m.a, "forward", m.a.forward), "got a forward of its own"),
        (lambda m: parametrizations.weight_norm(m.a.out_proj), "got parametrised ones"),
        (lambda m: parametrizations.weight_norm(m.a, "in_proj_weight"), "got parametrised ones"),
    ],
    ids=[
        *(
            "hook",
            "pre-hook",
            "backward",
            "backward pre",
            "state pre",
            "state",
            "loading",
            "loaded",
        ),
        *("state of out_proj", "forward", "parametrised", "parametrised itself"),
    ],
)
def test_what_a_spelled_module_would_lose_is_refused(change, message):
    model = Two()
    change(model)
    with pytest.raises(ValueError, match=f"'a' must .* to be spelled, {message}"):
        marvin.spell_attention(model)


def test_what_is_one_call_in_a_trace_keeps_its_name():
    """``marvin.export`` may be imported meanwhile, and looks calls up by what it found then."""
    found = []

    class Looks(nn.Module):
        def forward(self, x):
            found.append((attention.padded_attention, attention.attention_weights))
            return attention.padded_attention(x, x, x, None, None, False)

    before = attention.padded_attention, attention.attention_weights
    graph = Tracer().trace(Looks())
    assert found == [before]
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [before[0]]
