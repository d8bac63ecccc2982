"""Models whose code compares dtypes while it is traced: chains run where what was assumed holds, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fixedpoint_kernels import tokens
from marvin.integer.graph import trace
from tests.marvin import test_traced_shapes
from tests.marvin.test_decoders import Decoder, check_twins
from tests.marvin.test_token_fusion import Net, operations, same, twins

pytestmark = pytest.mark.skipif(tokens.path() is None, reason="no path of tokens on this processor")


class Asking(test_traced_shapes.Asking):
    """A transformer that does something else for some dtypes."""

    def forward(self, x):
        y = self.norm(self.blocks(self.embed(x)))
        return self.fc(2 * y if self.ask(x, y, self.fc.weight) else y).mean(1)


ASKED = {
    "an argument's": lambda x, y, w: x.dtype == torch.float16,
    "another than a weight's": lambda x, y, w: y.dtype != w.dtype,
    "one of some": lambda x, y, w: w.dtype in (torch.float16, torch.bfloat16),
    "that of a view": lambda x, y, w: y[:, 0].transpose(0, 1).reshape(-1).dtype == torch.float64,
    "that of a sum": lambda x, y, w: (y * 2 + y).dtype != torch.float32,
    "that of a function": lambda x, y, w: F.gelu(F.linear(y, w)).dtype != torch.float32,
    "that of a piece": lambda x, y, w: torch.cat(y.chunk(2, -1)).dtype != y.dtype,
    "after a cast to a weight's": lambda x, y, w: y.to(w.dtype).dtype == torch.float16,
    "two questions": lambda x, y, w: y.dtype != w.dtype and w.dtype != torch.int8,
}


@pytest.mark.parametrize("kind", ASKED)
def test_code_may_branch_on_dtypes(kind):
    model, twin, _ = twins(Asking(ASKED[kind]))
    assert not isinstance(trace(model), str)
    x = torch.randn(8, 5, 6)
    y, other = model(x), twin(x)
    assert operations(y)
    assert (y - other).abs().max() < 0.05 * y.abs().max()


UNKNOWN = {
    "a function of others": lambda x, y, w: torch.fft.rfft(y).dtype == torch.float32,
    "a sum with what is not known": lambda x, y, w: (y + torch.fft.rfft(y).real).dtype == w.dtype,
    "a dtype that is asked for": lambda x, y, w: (
        torch.softmax(y, -1, torch.float64).dtype == w.dtype
    ),
    "words, as arguments come": lambda x, y, w: str(y.dtype) == "torch.float16",
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_dtypes_that_are_not_known_are_not_assumed(kind):
    assert str(trace(Asking(UNKNOWN[kind]))).startswith("torch.fx cannot trace it")


def test_what_others_make_of_a_result_is_not_known():
    model = Asking(lambda x, y, w: y.dtype == torch.float64)
    refused = "torch.fx cannot trace it"
    assert not str(trace(model)).startswith(refused)
    model.norm.register_forward_hook(lambda module, args, y: y.double())
    assert str(trace(model)).startswith(refused)


class Masked(Net):
    """Takes a mask of truths, or what values are multiplied by."""

    def forward(self, x, mask=None):
        y = self.embed(x)
        if mask is not None:
            y = y * mask if mask.dtype == torch.float32 else y.masked_fill(mask, 0.0)
        return self.fc(self.norm(self.blocks(y))).mean(1)


def test_calls_with_other_dtypes_are_other_traces():
    model, twin, _ = twins(Masked())
    x, mask = torch.randn(8, 5, 6), torch.rand(8, 5, 1) < 0.5
    for own in (mask, (~mask).float(), mask):
        y, other = model(x, own), twin(x, own)
        assert operations(y)
        assert (y - other).abs().max() < 0.05 * y.abs().max()


class Gated(Net):
    """Does something else for another dtype, or another shape, of a buffer that it does not compute with."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gate", torch.ones(4))

    def forward(self, x):
        y = super().forward(x)
        is_other = self.gate.dtype == torch.float64 or self.gate.shape[0] == 5
        return 2 * y if is_other else y


def set_data(model):
    model.gate.data = model.gate.data.double()


OTHERS = {
    "other data": set_data,
    "another tensor": lambda model: setattr(model, "gate", model.gate.double()),
    "another buffer": lambda model: model.register_buffer("gate", torch.ones(5)),
    "another size": lambda model: model.gate.resize_(5),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_buffers_that_become_others_are_seen(kind):
    model, _, _ = twins(Gated())
    x = torch.randn(8, 5, 6)
    before = model(x)
    assert operations(before) == [21]
    OTHERS[kind](model)
    same(model(x), 2 * before)


class OfItsOwn(Net):
    """Asks for the dtype of a parameter."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = super().forward(x) * self.gain.float()
        return 2 * y if self.gain.dtype == torch.bfloat16 else y


def test_a_parameter_that_gets_another_dtype_is_seen():
    model, _, _ = twins(OfItsOwn())
    model.gain.data.fill_(1.0)
    x = torch.randn(8, 5, 6)
    before = model(x)
    assert operations(before)
    model.gain.data = model.gain.data.bfloat16()
    same(model(x), 2 * before)


def encoder(kind, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": 8}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
    sizes |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    config = getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=16, **options)
    return getattr(transformers, f"{kind}Model")(config).get_encoder()


class Heard(nn.Module):
    """Whisper's encoder, for six features in place of frequencies."""

    def __init__(self):
        super().__init__()
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        body = encoder("Whisper", num_mel_bins=6, max_source_positions=9, **ends)
        body.embed_positions.requires_grad_(True)  # as the test compares all gradients
        self.body, self.fc = body, nn.Linear(32, 4)

    def forward(self, x):
        return self.fc(self.body(x.transpose(1, 2).repeat(1, 1, 2))[0].mean(1))


def t5(**options):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "d_model": 32,
        "d_kv": 16,
        "num_heads": 2,
        "d_ff": 48,
        "num_layers": 2,
        "vocab_size": 8,
    }
    config = transformers.T5Config(**sizes, dropout_rate=0.0, use_cache=False, **options)
    return transformers.T5Model(config).get_encoder()


ENCODERS = {  # that ask for dtypes, and how many operations their chains have
    "BART": (lambda: encoder("Bart"), [12, 12]),
    "mBART": (lambda: encoder("MBart"), [12, 12]),
    "Whisper": (Heard, [12, 12]),
    "T5": (t5, [5, 5]),
    "T5, gated": (lambda: t5(feed_forward_proj="gated-gelu"), [7, 7]),
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_that_clamp_float16_are_near_their_unfused_twins(kind):
    body, counts = ENCODERS[kind]
    torch.manual_seed(0)
    model, twin, _ = twins(Heard() if body is Heard else Decoder(body()))
    check_twins(model, twin, counts)
