"""A whole step and inference on integer codes of networks that are linear layers for the most part.

As ``int8_training`` and ``int8_inference``: "ours" beside PyTorch's own; one element is one sample. BERT, GPT-2 and Llama,
of transformers, have 4 layers of 256 features and 4 heads, or 2 of 768 and 12 as BERT-base has them; the two decoders have
no cache, and no dropout. Whisper's encoder has the sizes of its smallest model, without dropout. torch's encoder
has 4 layers of 256 features and 8 heads, or 2 of 768 and 12; ours is spelled, see ``marvin.spell_attention``. Rows say
where there is dropout: of 0.1, as it is by default. Without transformers, or without timm and the torchvision that it
needs, their rows are left out by name.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import marvin
from benchmarks.ops import int8_inference, int8_training
from benchmarks.timing import Case
from fixedpoint_kernels import products
from train.vit import vit

TESTS = "tests/marvin/test_lone_run.py"
SECONDS = 20.0  # a row

_Made = Callable[[], nn.Module]


class _Network(NamedTuple):
    """What makes a network, what it takes, and what makes ours if that is another."""

    make: _Made
    x: Tensor
    spelled: _Made | None = None


def cases() -> Iterator[Case]:
    """Yield a step of each network, and its inference."""
    print(f"path: {products.path()}")
    for name, (make, x, spelled) in _networks().items():
        y, own = torch.randint(10, (len(x),)), spelled or make
        steps = int8_training.contestants(make, x, y, False, own)
        yield Case(f"{name}, training", len(x), steps)
        frozen = int8_inference.frozen_model(own, x)
        yield Case(f"{name}, inference", len(x), int8_inference.contestants(make, frozen, x))


def _networks() -> dict[str, _Network]:
    found: dict[str, _Network] = {
        "perceptron, 128 samples": _Network(_perceptron, torch.randn(128, 512)),
        "ViT, 128 images of 32x32": _Network(vit, torch.randn(128, 3, 32, 32)),
        "ViT, 8 images of 32x32": _Network(vit, torch.randn(8, 3, 32, 32)),
    }
    few, wide = torch.randn(32, 64, 256), torch.randn(8, 128, 768)
    found |= {
        f"torch's encoder{more}": _Network(make, x, partial(_spelled, make))
        for more, make, x in (
            (", 32 samples of 64 tokens", _Encoder, few),
            (", 32 samples of 64 tokens, dropout", partial(_Encoder, dropout=0.1), few),
            (" of 768 features, 8 samples of 128 tokens", partial(_Encoder, 2, 768, 12), wide),
        )
    }
    if (transformers := _imported("transformers", "BERT, GPT-2, Llama, Whisper")) is not None:
        few, wide = torch.randint(1, 1000, (16, 64)), torch.randint(1, 1000, (8, 128))
        rest = transformers, 2, 768, 12
        for size, x in ((4, 256, 4), few), ((2, 768, 12), wide):
            name = f" of {size[1]} features, {x.shape[0]} texts of {x.shape[1]} words"
            for kind in ("GPT-2", "Llama"):
                found[kind + name] = _Network(partial(_Decoder, transformers, kind, *size), x)
        found |= {
            "BERT, 16 texts of 64 words": _Network(partial(_Bert, transformers), few),
            "BERT of 768 features, 8 texts of 128 words": _Network(partial(_Bert, *rest), wide),
            "BERT of 768 features, 8 texts of 128 words, dropout": _Network(
                partial(_Bert, *rest, dropout=0.1), wide
            ),
            "Whisper-tiny's encoder, 4 sounds of 5 s": _Network(
                partial(_Whisper, transformers), torch.randn(4, 80, 500)
            ),
        }
    if (timm := _imported("timm", "vgg11, vit_small_patch16_224")) is not None:
        for name, images, side in (("vgg11", 16, 64), ("vit_small_patch16_224", 8, 224)):
            row = f"timm {name}, {images} images of {side}x{side}"
            make = partial(timm.create_model, name, num_classes=10)
            found[row] = _Network(make, torch.randn(images, 3, side, side))
    return found


def _imported(name: str, rows: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # torchvision of another torch
        print(f"left out, for {name} cannot be imported ({error}): {rows}")
        return None


def _spelled(make: _Made) -> nn.Module:
    return marvin.spell_attention(make())


def _perceptron() -> nn.Module:
    layers = nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(1024, 10))


class _Encoder(nn.Module):
    """Classes of sequences."""

    def __init__(
        self, layers: int = 4, features: int = 256, heads: int = 8, dropout: float = 0.0
    ) -> None:
        super().__init__()
        rest = dropout, "gelu", 1e-5, True, True  # batch and norms first
        layer = nn.TransformerEncoderLayer(features, heads, 4 * features, *rest)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.fc = nn.Linear(features, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (samples, 10)."""
        return self.fc(self.encoder(x).mean(1))


class _Bert(nn.Module):
    """Logits of words."""

    def __init__(
        self,
        transformers: Any,
        layers: int = 4,
        features: int = 256,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        config = transformers.BertConfig(
            hidden_size=features,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * features,
            num_labels=10,
            vocab_size=1000,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, shape (samples, 10)."""
        return self.bert(input_ids=ids).logits


class _Decoder(nn.Module):
    """Logits of words, from what a decoder makes of the last."""

    def __init__(
        self, transformers: Any, kind: str, layers: int, features: int, heads: int
    ) -> None:
        super().__init__()
        if kind == "GPT-2":
            dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            sizes = {"n_layer": layers, "n_embd": features, "n_head": heads}
            config = transformers.GPT2Config(vocab_size=1000, use_cache=False, **sizes, **dropout)
            self.body = transformers.GPT2Model(config)
        else:
            config = transformers.LlamaConfig(
                hidden_size=features,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=3 * features,
                vocab_size=1000,
                use_cache=False,
            )
            self.body = transformers.LlamaModel(config)
        self.fc = nn.Linear(features, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, shape (samples, 10)."""
        return self.fc(self.body(input_ids=ids).last_hidden_state[:, -1])


class _Whisper(nn.Module):
    """Classes of sounds, by the encoder of Whisper's smallest model."""

    def __init__(self, transformers: Any) -> None:
        super().__init__()
        sizes = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 1}
        sizes |= {"encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
        config = transformers.WhisperConfig(max_source_positions=250, **sizes)
        self.body = transformers.WhisperModel(config).get_encoder()
        self.fc = nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (samples, 10), of (samples, 80 frequencies, 500 frames of 10 ms)."""
        return self.fc(self.body(x).last_hidden_state.mean(1))
