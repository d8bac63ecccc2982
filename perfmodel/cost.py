"""The paper's performance model: speedup, model size and memory from a trace of word lengths.

Everything here is modelled: multiply-adds weighted by word length, as on hardware whose time is
proportional to both. It is not a measurement of any machine.

Source:
    MARViN, section 4.1.2, equations 6 to 8. Differs, because as printed they contradict the
    paper's own tables: the search for formats costs once an optimiser step (printed: once a
    sample); SZ and MEM are ours over theirs, below 1 (printed: the inverse); MEM is the mean word
    length over 32 (printed: with 32 added to both). Where inputs have word lengths of their own, a
    product costs what its longer factor does.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from perfmodel.checks import check_layers, check_whole
from perfmodel.layers import Layer
from perfmodel.trace import Schedule, Segment, Trace

__all__ = [
    "Overhead",
    "Weight",
    "check_match",
    "ebops",
    "float32_cost",
    "inference_speedup",
    "layer_cost",
    "memory_ratio",
    "pushdown_ops",
    "pushup_ops",
    "run_cost",
    "schedule_cost",
    "size_ratio",
    "speedup",
    "weights_of",
]

Overhead = Literal["paper", "linear", "none"]
"""What a search for formats is charged: as the paper prints it, one comparison an element, or nothing; see ``pushdown_ops``."""
FLOAT_BITS = 32
WORD_LENGTHS = (8, 32)  # bounds of the paper's two bisections


@dataclass(frozen=True)
class Weight:
    """What the model of costs knows of one weight.

    Args:
        name: ``""`` for all products of two activations: no weight, so 32 bits.
        madds: Multiply-adds of one sample's forward pass with it.
        elements: How many numbers it has.
    """

    name: str
    madds: int
    elements: int


def weights_of(layers: Iterable[Layer]) -> list[Weight]:
    """Return the weights of a model; a weight used in several places is one."""
    found: dict[str, Weight] = {}
    for row in layers:
        before = found.get(row.weight, Weight(row.weight, 0, 0))
        elements = max(before.elements, row.elements)
        found[row.weight] = Weight(row.weight, before.madds + row.madds, elements)
    return list(found.values())


def pushdown_ops(elements: int, resolution: int = 150, overhead: Overhead = "paper") -> float:
    """Return the operations of one PushDown: equation 6.

    Two bisections of the word length, each probe with three passes over the weight: quantise,
    histogram, divergence. ``"paper"`` compares each element with each bin; ``"linear"`` is a
    histogram that finds the bin at once.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is below 0, or ``overhead`` unknown.
    """
    check_whole(0, elements=elements, resolution=resolution)
    _check_overhead(overhead)
    lower, upper = WORD_LENGTHS
    compares = {"paper": resolution, "linear": 1, "none": 0}[overhead]
    return 2 * math.log2(upper - lower) * compares * 3 * elements


def pushup_ops(elements: int, lookback: int = 100, overhead: Overhead = "paper") -> float:
    """Return the operations of one PushUp, at most: equation 7.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is below 0, or ``overhead`` unknown.
    """
    check_whole(0, elements=elements, lookback=lookback)
    _check_overhead(overhead)
    return 0 if overhead == "none" else (lookback + 1) * elements + 1


def layer_cost(
    weight: Weight, trace: Trace, samples: int, overhead: Overhead = "paper"
) -> tuple[float, float]:
    """Return what one layer costs over a run: its terms of equation 8.

    Args:
        weight: The layer.
        trace: Its word lengths.
        samples: Of one optimiser step: batch size times accumulation steps.
        overhead: How PushDown and PushUp are charged.

    Returns:
        Forward in the layer's bits with backward in 32, then the search for formats; both in
        multiply-adds times bits.

    Raises:
        TypeError: ``trace`` is no ``Trace``, or ``samples`` no whole number.
        ValueError: ``samples`` is below 1, or ``overhead`` unknown.
    """
    _check_trace(trace)
    check_whole(1, samples=samples)
    passes = search = 0.0
    once = pushdown_ops(weight.elements, trace.resolution[1], overhead)
    once += pushup_ops(weight.elements, trace.lookback[1], overhead)
    if not weight.name:
        return trace.steps * samples * weight.madds * 2.0 * FLOAT_BITS, 0.0
    for s in trace.segments(weight.name):
        passes += s.steps * samples * weight.madds * (s.product_wl + FLOAT_BITS)
        search += s.steps * FLOAT_BITS * once / s.lookback
    return passes, search


def run_cost(
    trace: Trace, layers: Iterable[Layer], samples: int, overhead: Overhead = "paper"
) -> float:
    """Return what a run costs: equation 8, in multiply-adds times bits.

    Raises:
        TypeError: ``trace`` is no ``Trace``, ``layers`` are none, or a number is not whole.
        ValueError: There are no layers, ``samples`` is below 1, or ``overhead`` unknown.
    """
    weights = weights_of(check_layers(layers))
    return sum(sum(layer_cost(w, trace, samples, overhead)) for w in weights)


def float32_cost(layers: Iterable[Layer], samples: int, steps: int) -> float:
    """Return what as many steps cost in float32: 32 bits forward and 32 backward.

    Raises:
        TypeError: ``layers`` are none, or a number is not whole.
        ValueError: There are no layers, ``samples`` is below 1, or ``steps`` below 0.
    """
    check_whole(1, samples=samples)
    check_whole(0, steps=steps)
    layers = check_layers(layers)
    return sum(row.madds for row in layers) * samples * steps * 2.0 * FLOAT_BITS


def schedule_cost(schedule: Schedule, layers: Iterable[Layer]) -> float:
    """Return what a schedule costs, without a search: equation 8.

    Raises:
        TypeError: ``layers`` are none.
        ValueError: There are no layers.
    """
    layers = check_layers(layers)
    samples = schedule.batch_size * schedule.accumulation_steps
    bits = sum(epochs * (wl + FLOAT_BITS) for wl, epochs in schedule.levels)
    return sum(row.madds for row in layers) * samples * schedule.steps_per_epoch * float(bits)


def speedup(
    trace: Trace,
    layers: Iterable[Layer],
    batch_size: int,
    accumulation_steps: int = 1,
    overhead: Overhead = "paper",
    baseline: Schedule | None = None,
) -> float:
    """Return SU, modelled: cost of the baseline over cost of the run.

    Args:
        trace: Word lengths of the run.
        layers: Of its model, from ``perfmodel.layers``.
        batch_size: Samples of a forward pass.
        accumulation_steps: Forward passes of an optimiser step.
        overhead: How the search for formats is charged: ``"paper"`` (equation 6 as printed),
            ``"linear"`` (a histogram in one pass) or ``"none"``.
        baseline: What to compare with; default: the same steps and batches in float32. Another
            training has its own steps and batches.

    Returns:
        Above 1 where the run is cheaper; 1 where both cost nothing.

    Raises:
        TypeError: ``trace`` is no ``Trace``, ``layers`` are none, or a number is not whole.
        ValueError: The trace has layers that the model has not, there are no layers, or a value is
            out of range.

    Source:
        MARViN, section 4.1.2.
    """
    check_whole(1, batch_size=batch_size, accumulation_steps=accumulation_steps)
    layers = check_layers(layers)
    check_match(trace, layers)
    samples = batch_size * accumulation_steps
    ours = run_cost(trace, layers, samples, overhead)
    if baseline is None:
        other = float32_cost(layers, samples, trace.steps)
    else:
        other = schedule_cost(baseline, layers)
    return other / ours if ours else 1.0


def check_match(trace: Trace, layers: Iterable[Layer]) -> None:
    """Check that a model has every layer of a trace.

    Raises:
        TypeError: ``trace`` is no ``Trace``, or ``layers`` are none.
        ValueError: It has not; names the layers. Or there are none.
    """
    _check_trace(trace)
    names = {row.weight for row in check_layers(layers)}
    extra = sorted({*trace.by_layer, *trace.kept} - names - {"*"})
    if extra:
        never = sorted(names - set(trace.by_layer) - {""})
        raise ValueError(
            f"the trace must be of this model, got layers it has not: {', '.join(extra)}"
            + (f"; layers of the model that never switch: {', '.join(never)}" if never else "")
        )


def size_ratio(trace: Trace, layers: Iterable[Layer], *, weighted: bool = False) -> float:
    """Return SZ, modelled: word length after the last step, mean over the layers, over 32.

    Args:
        trace: Word lengths of the run.
        layers: Of its model.
        weighted: Count each layer by its elements, which gives bytes over bytes; default: the
            paper's plain mean.

    Raises:
        TypeError: ``trace`` is no ``Trace``, or ``layers`` are none.
        ValueError: There are no layers.
    """
    _check_trace(trace)
    return _mean_bits([(w, trace.final(w.name)) for w in _sized(layers)], weighted) / FLOAT_BITS


def memory_ratio(trace: Trace, layers: Iterable[Layer], *, weighted: bool = False) -> float:
    """Return MEM, modelled: mean word length over the steps and the layers, over 32.

    The float32 masters are not in it: with them, weights take 1 + MEM of what float32 training
    needs, so while training fixed point adds memory.

    Args:
        trace: Word lengths of the run.
        layers: Of its model.
        weighted: Count each layer by its elements; default: the paper's plain mean.

    Raises:
        TypeError: ``trace`` is no ``Trace``, or ``layers`` are none.
        ValueError: There are no layers.
    """
    _check_trace(trace)
    return _mean_bits([(w, trace.mean(w.name)) for w in _sized(layers)], weighted) / FLOAT_BITS


def inference_speedup(trace: Trace, layers: Iterable[Layer]) -> float:
    """Return how much cheaper the trained model's forward pass is than in float32, modelled.

    Raises:
        TypeError: ``trace`` is no ``Trace``, or ``layers`` are none.
        ValueError: There are no layers.
    """
    _check_trace(trace)
    found = weights_of(check_layers(layers))
    bits = sum(
        w.madds * (trace.segments(w.name)[-1].product_wl if w.name else FLOAT_BITS) for w in found
    )
    return FLOAT_BITS * sum(w.madds for w in found) / bits if bits else 1.0


def ebops(trace: Trace, layers: Iterable[Layer]) -> int:
    """Return EBOPs of the trained model: weight bits times input bits, over its multiply-adds.

    Bits are those after the last step, without signs. Float32 counts as 32 bits, and so do products of
    two activations, which are not rounded. Every multiply-add counts: zeros of weights, and bits that
    are 0 in all of a weight's values, are not taken away.

    Args:
        trace: Word lengths of the run.
        layers: Of its model.

    Raises:
        TypeError: ``trace`` is no ``Trace``, or ``layers`` are none.
        ValueError: There are no layers.

    Source:
        HGQ (Sun et al., Gradient-based Automatic Mixed Precision Quantization for Neural Networks
        On-Chip, 2024), section III: an estimate of LUT + 55 DSP of an unrolled design on an FPGA.
    """
    _check_trace(trace)
    float_once = Segment(FLOAT_BITS, 0, math.inf, FLOAT_BITS).ebops
    return sum(
        w.madds * (trace.segments(w.name)[-1].ebops if w.name else float_once)
        for w in weights_of(check_layers(layers))
    )


def _check_trace(trace: Trace) -> None:
    if not isinstance(trace, Trace):
        raise TypeError(
            f"the trace must be a perfmodel.trace.Trace, got {type(trace).__name__}: write "
            "Trace.of(optimizer, steps)"
        )


def _check_overhead(overhead: Overhead) -> None:
    if overhead not in get_args(Overhead):
        raise ValueError(f"overhead must be 'paper', 'linear' or 'none', got {overhead!r}")


def _sized(layers: Iterable[Layer]) -> list[Weight]:
    return [w for w in weights_of(check_layers(layers)) if w.name]


def _mean_bits(pairs: Sequence[tuple[Weight, float]], weighted: bool) -> float:
    shares = [w.elements if weighted else 1 for w, _ in pairs]
    total = sum(shares)
    if not total:
        return float(FLOAT_BITS)
    return sum(bits * share for (_, bits), share in zip(pairs, shares, strict=True)) / total
