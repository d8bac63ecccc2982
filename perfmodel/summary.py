"""What a run cost and saved, as plain values: the content of the report, the figure and JSON."""

from dataclasses import asdict, dataclass

from perfmodel.cost import (
    ebops,
    float32_cost,
    inference_speedup,
    layer_cost,
    memory_ratio,
    run_cost,
    size_ratio,
    speedup,
    weights_of,
)
from perfmodel.run import Run
from perfmodel.trace import MUPPET_ALEXNET, MUPPET_RESNET20, Trace

__all__ = ["LayerRow", "Total", "WhatIf", "as_dict", "layer_rows", "totals", "what_ifs"]


@dataclass(frozen=True)
class LayerRow:
    """One layer of a run.

    Args:
        layer: Name of its weight.
        kind: As ``Layer.kind``, or the shape of its weight where that alone is recorded.
        madds: Multiply-adds of one sample's forward pass.
        elements: Of its weight.
        wl_min: Shortest word length of any step.
        wl_mean: Mean over the steps, bits.
        wl_last: After the last step, bits.
        input_wl_mean: Of the layer's inputs: mean over the steps, bits.
        input_wl_last: The same after the last step.
        cost_share: Of the run's cost, its search for formats included.
        size_bytes: Of its weight after the last step, packed.
        forward: Cost of its forward passes, over the cost of the whole run in float32.
        backward: The same of its backward passes.
        search: The same of PushDown and PushUp.
    """

    layer: str
    kind: str
    madds: int
    elements: int
    wl_min: int
    wl_mean: float
    wl_last: int
    input_wl_mean: float
    input_wl_last: int
    cost_share: float
    size_bytes: int
    forward: float
    backward: float
    search: float


@dataclass(frozen=True)
class Total:
    """One figure of a whole run: its name, value and what it means."""

    name: str
    value: float
    meaning: str


@dataclass(frozen=True)
class WhatIf:
    """A run that was not: SU without a search, MEM and SZ."""

    name: str
    speedup: float
    memory: float
    size: float


def layer_rows(run: Run) -> list[LayerRow]:
    """Return one row for each weight, in the order of the model."""
    kinds = {row.weight: row.kind for row in reversed(run.layers)}
    whole = run_cost(run.trace, run.layers, run.samples) or 1.0
    base = float32_cost(run.layers, run.samples, run.trace.steps) or 1.0
    rows = []
    for w in weights_of(run.layers):
        trace = run.trace if w.name else Trace((), run.trace.steps, 32, kept={"*": 32})
        passes, search = layer_cost(w, run.trace, run.samples)
        backward = run.trace.steps * run.samples * w.madds * 32.0
        rows.append(
            LayerRow(
                layer=w.name or "(products of activations)",
                kind=kinds[w.name],
                madds=w.madds,
                elements=w.elements,
                wl_min=trace.lowest(w.name),
                wl_mean=trace.mean(w.name),
                wl_last=trace.final(w.name),
                input_wl_mean=trace.input_mean(w.name),
                input_wl_last=trace.segments(w.name)[-1].input_wl,
                cost_share=(passes + search) / whole,
                size_bytes=(w.elements * trace.final(w.name) + 7) // 8,
                forward=(passes - backward) / base,
                backward=backward / base,
                search=search / base,
            )
        )
    return rows


def totals(run: Run) -> list[Total]:
    """Return SU, MEM and SZ with their definitions."""
    trace, layers = run.trace, run.layers
    arguments = (trace, layers, run.batch_size, run.accumulation_steps)
    memory = memory_ratio(trace, layers, weighted=True)
    found = [
        Total("SU", speedup(*arguments), "cost of the same steps in float32 over cost, eq. 8"),
        Total(
            "SU, linear search",
            speedup(*arguments, "linear"),
            "PushDown by a histogram in one pass instead of eq. 6",
        ),
        Total("SU, no search", speedup(*arguments, "none"), "multiply-adds alone"),
        Total("SU, inference", inference_speedup(trace, layers), "forward pass, last word lengths"),
        Total("MEM", memory_ratio(trace, layers), "mean word length over steps and layers / 32"),
        Total("MEM, weighted", memory, "the same, layers counted by their elements"),
        Total(
            "MEM with masters",
            1 + memory,
            "weights and float32 masters, over weights in float32: training takes more",
        ),
        Total("SZ", size_ratio(trace, layers), "last word length, mean over layers / 32"),
        Total(
            "SZ, weighted",
            size_ratio(trace, layers, weighted=True),
            "size of the trained weights over float32",
        ),
    ]
    meaning = "weight bits times input bits over multiply-adds, last formats, millions"
    found.append(Total("EBOPs", ebops(trace, layers) / 1e6, meaning))
    return [*found, *_input_totals(run)] if trace.has_inputs else found


def _input_totals(run: Run) -> list[Total]:
    rows = [row for row in layer_rows(run) if row.elements]
    mean = sum(row.input_wl_mean for row in rows) / len(rows) / 32
    last = sum(row.input_wl_last for row in rows) / len(rows) / 32
    return [
        Total("MEM, inputs", mean, "mean word length of layers' inputs over steps and layers / 32"),
        Total("SZ, inputs", last, "their last word length, mean over layers / 32"),
    ]


def what_ifs(run: Run) -> list[WhatIf]:
    """Return what fixed word lengths and MuPPET's published schedules would have given."""
    found = []
    for wl in (8, 16):
        kept = run.trace.keeping(wl)
        su = speedup(kept, run.layers, run.batch_size, run.accumulation_steps)
        ratios = memory_ratio(kept, run.layers), size_ratio(kept, run.layers)
        found.append(WhatIf(f"every layer kept at {wl} bits", su, *ratios))
    for name, schedule in (("AlexNet", MUPPET_ALEXNET), ("ResNet20", MUPPET_RESNET20)):
        mean = 32 * schedule.memory_ratio
        found.append(
            WhatIf(
                f"MuPPET's published schedule, {name}", 64 / (mean + 32), schedule.memory_ratio, 1.0
            )
        )
    return found


def as_dict(run: Run) -> dict[str, object]:
    """Return all of it for JSON."""
    return {
        "run": str(run.path),
        "title": run.title,
        "steps": run.trace.steps,
        "batch_size": run.batch_size,
        "accumulation_steps": run.accumulation_steps,
        "modelled": {
            "layers": [asdict(row) for row in layer_rows(run)],
            "totals": [asdict(total) for total in totals(run)],
            "what_if": [asdict(row) for row in what_ifs(run)],
        },
        "lacks_products": run.lacks_products,
        "measured": {"images_per_s": run.images_per_s, "on": run.machine or None},
    }
