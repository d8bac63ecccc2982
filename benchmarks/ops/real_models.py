"""What models that people train keep for backward, exact and converted: ``--op real_models``.

Models of transformers and timm are built from configurations, with few blocks of their usual width
and without a loss; nothing is downloaded. Bytes are counted in real runs on a CPU: storages that
autograd keeps, each once, parameters and buffers left out. They do not depend on the processor.
timm needs torchvision; where a package is missing, its rows are left out by name.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import sample

TESTS = "tests/fixedpoint_kernels/test_forward_save_real_models.py"
FEW_BIT = 3
DIVISION = {"block": 8, "bits": 2}
LAYERS = 2
TOKENS = 2, 128  # batch and length


class Row(NamedTuple):
    """One model: bytes kept, the largest part of what is left, and errors of the gradient."""

    model: str
    exact_bytes: int
    few_bit_bytes: int
    converted_bytes: int
    stays: str
    few_bit_error: float
    error: float

    @property
    def times_less(self) -> float:
        """Bytes kept exactly over those of the conversion."""
        return self.exact_bytes / self.converted_bytes


Model = tuple[nn.Module, sample.Inputs]


def _transformer(name: str, **settings: Any) -> Callable[[], Model]:
    def build() -> Model:
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{name}Config")(vocab_size=1000, **settings)
        ids = torch.randint(0, 1000, TOKENS)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name == "T5":
            inputs["decoder_input_ids"] = ids
        else:
            inputs.pop("attention_mask")
        return getattr(transformers, f"{name}Model")(config).train(), inputs

    return build


def _timm(name: str, **settings: Any) -> Callable[[], Model]:
    def build() -> Model:
        model = importlib.import_module("timm").create_model(name, **settings)
        return model.train(), (torch.randn(2, 3, 224, 224),)

    return build


_LLAMA = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": LAYERS}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
_ENCODER = {"num_hidden_layers": LAYERS}
MODELS: dict[str, Callable[[], Model]] = {
    "Llama": _transformer("Llama", **_LLAMA, **_HEADS),
    "Qwen2": _transformer("Qwen2", **_LLAMA, **_HEADS),
    "RoBERTa": _transformer("Roberta", **_ENCODER),
    "BERT": _transformer("Bert", **_ENCODER),
    "BERT, attention written out": _transformer("Bert", **_ENCODER, attn_implementation="eager"),
    "GPT-2": _transformer("GPT2", n_layer=LAYERS),
    "T5": _transformer("T5", num_layers=LAYERS),
    "timm ViT-S": _timm("vit_small_patch16_224", depth=LAYERS),
    "timm ConvNeXt-T": _timm("convnext_tiny"),
    "timm EfficientNet-B0": _timm("efficientnet_b0"),
    "timm NF-ResNet-50": _timm("nf_resnet50"),
    "timm ResNet-50": _timm("resnet50"),
}


def build(name: str) -> Model:
    """Return a model with fixed weights and its inputs.

    Raises:
        ImportError: Its package is missing.
    """
    torch.manual_seed(0)
    return MODELS[name]()


def row(name: str) -> Row:
    """Return what one model keeps."""
    model, inputs = build(name)
    exact, want = sample.observe(model, inputs).size_bytes, _gradient(model, inputs)
    few = copy.deepcopy(model)
    forward_save.convert(few, few_bit=FEW_BIT)
    forward_save.convert(model, few_bit=FEW_BIT, division=DIVISION)
    after = sample.observe(model, inputs)
    few_bytes = sample.observe(few, inputs).size_bytes
    errors = [float((_gradient(m, inputs) - want).norm() / want.norm()) for m in (few, model)]
    return Row(name, exact, few_bytes, after.size_bytes, _largest(after), *errors)


def _gradient(model: nn.Module, inputs: sample.Inputs) -> Tensor:
    """Return the gradient of a fixed random combination of the outputs; dropout draws the same."""
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    out = getattr(out, "last_hidden_state", out)
    generator = torch.Generator().manual_seed(2)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _largest(kept: sample.ForwardPass) -> str:
    """Return which functions keep most of what is left, whole tensors first."""
    sizes: dict[str, int] = {}
    for storage in kept.saved:
        functions = {saver.function or "packed" for saver in storage.savers}
        for function in functions:
            sizes[function] = sizes.get(function, 0) + storage.size_bytes
    largest = sorted(sizes, key=lambda name: -sizes[name])[:4]
    return ", ".join(f"{name} {sizes[name] / kept.size_bytes:.0%}" for name in largest)


def table() -> Iterator[str]:
    """Yield the lines of the table, then what is missing."""
    header = "model", "exact, MB", "few bits, times less", "times less", "error", "what is left"
    yield "| " + " | ".join(header) + " |"
    yield "|---|---:|---:|---:|---:|---|"
    missing = []
    for name in MODELS:
        try:
            made = row(name)
        except (ImportError, RuntimeError) as error:
            if name.startswith("timm") or isinstance(error, ImportError):
                missing.append(f"{name}: {error}")
                continue
            raise
        few = f"{made.exact_bytes / made.few_bit_bytes:.2f}"
        cells = f"{made.exact_bytes / 1e6:.1f}", few, f"{made.times_less:.2f}", f"{made.error:.2f}"
        yield "| " + " | ".join([name, *cells, made.stays]) + " |"
    yield from missing
