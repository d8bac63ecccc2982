"""Mean word lengths at the end of a run."""

import math
from typing import TYPE_CHECKING

import marvin
from marvin.policies.records import word_length

if TYPE_CHECKING:
    from train.loop import Training

__all__ = ["mean_word_lengths"]


def mean_word_lengths(training: "Training") -> dict[str, float]:
    """Return mean word lengths, in bits, by their names in ``result.json``.

    ``mean_word_length`` counts each layer's weight once; ``mean_input_word_length`` the inputs of
    layers that round them, and is missing where none do. ``..._by_size`` weighs each by its
    number of elements, inputs by those of one sample. Empty in float32.
    """
    optimizer = training.optimizer
    if not isinstance(optimizer, marvin.Quantized):
        return {}
    formats, inputs = optimizer.formats(), optimizer.input_formats()
    weights = {name: word_length(formats.get(name)) for name in optimizer.layers()}
    named = training.model.named_parameters()
    found = _means("mean_word_length", weights, {name: p.numel() for name, p in named})
    if training.activations is not None and inputs:
        sizes = {layer.weight: math.prod(layer.input_shape) for layer in training.layers}
        lengths = {name: word_length(fmt) for name, fmt in inputs.items()}
        found |= _means("mean_input_word_length", lengths, sizes)
    return found


def _means(name: str, lengths: dict[str, int], sizes: dict[str, int]) -> dict[str, float]:
    total = sum(sizes[layer] for layer in lengths)
    weighted = sum(bits * sizes[layer] for layer, bits in lengths.items())
    return {name: sum(lengths.values()) / len(lengths), f"{name}_by_size": weighted / total}
