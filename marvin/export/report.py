"""What an export tells the user: layer by layer, then in one line each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from marvin.export.deployed import Deployed
from marvin.export.execute import integer
from marvin.export.execute.verify import Row, compare, verify
from marvin.export.graph.nodes import Affine, Network, Operation, Weighted
from marvin.export.graph.transformers import Norm, Softmax
from marvin.export.passes.round_sums import sum_formats
from marvin.export.targets.packed import Size, sizes

__all__ = ["Trained", "first_head", "layer_rows", "proof_lines", "size_line", "table"]

_TOGETHER = 256  # samples that are computed at one time
_SHOWN = "conv", "linear", "affine", "averagepool", "norm", "softmax", "matmul"


@dataclass(frozen=True)
class Trained:
    """The trained model, and what its export is compared with it on.

    Args:
        path: Where it was read.
        title: What it is.
        model: In eval mode.
        samples: What it takes, shape ``(n, ...)``, float32.
        labels: Of the samples, int64; None where they are not known.
        unit: What a sample is.
        notes: More to tell.
        carried: What formats of activations are called that the model carries.
    """

    path: Path
    title: str
    model: nn.Module
    samples: Tensor
    labels: Tensor | None
    unit: str = "images"
    notes: tuple[str, ...] = ()
    carried: str = "trained"

    def accuracy(self, logits: Tensor) -> float:
        """Return the share of right answers; ``logits`` (samples, classes) are of the first samples."""
        assert self.labels is not None
        return float((logits.argmax(1) == self.labels[: len(logits)]).double().mean())


def layer_rows(deployed: Deployed, sample: Tensor) -> list[dict[str, object]]:
    """Return format, bytes and verdict of each layer.

    ``float32`` says what the simulation of training makes of the layer: ``exact`` whatever comes
    in, equal on the sample, or how often it differs.
    """
    stored = {size.name: size for size in sizes(deployed.packed())}
    rows = verify(deployed.network, sample)
    return [_layer(row, deployed.network, stored) for row in rows if row.kind in _SHOWN]


def _layer(row: Row, network: Network, stored: dict[str, Size]) -> dict[str, object]:
    own = [stored[n] for n in (f"{row.name}.weight", f"{row.name}.bias") if n in stored]
    outputs = network.formats()
    output = outputs.get(f"{row.name}.out", outputs.get(row.name))
    return {
        "layer": row.name,
        "kind": row.kind,
        "weights": _weights(row, network.operation(row.name)),
        "output": str(output or ""),
        "K": row.terms,
        "sum_bits": row.bits,
        "bytes": sum(size.packed_bytes for size in own),
        "float_bytes": sum(size.float_bytes for size in own),
        "float32": row.verdict,
    }


def _weights(row: Row, op: Operation) -> str:
    """Return the format of weights or of a scale; with an ``fl`` for each channel, the coarsest and the finest."""
    if isinstance(op, Weighted) and op.per_channel:
        fmt = op.per_channel
        return f"<{fmt.wl}, {fmt.fl + min(fmt.shifts)} to {fmt.fl + max(fmt.shifts)}>"
    return str(row.fmt or "") if row.kind != "averagepool" else ""


def table(rows: Sequence[dict[str, object]]) -> str:
    """Return rows as text, one line each, under a header."""
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def size_line(deployed: Deployed) -> str:
    """Return the bytes of all parameters and buffers, packed and in floats."""
    rows = sizes(deployed.packed())
    ours, floats = sum(r.packed_bytes for r in rows), sum(r.float_bytes for r in rows)
    return f"parameters and buffers {ours:,} bytes, in floats {floats:,}: {ours / floats:.1%}"


@torch.no_grad()
def proof_lines(
    trained: Trained,
    deployed: Deployed,
    rows: Sequence[dict[str, object]],
    reference: Mapping[str, Tensor],
) -> list[str]:
    """Return what is known of the network beside the trained model, on its samples.

    Args:
        trained: The model.
        deployed: Its network.
        rows: Of its layers.
        reference: What the network computes of the samples, in integers, by output.
    """
    exact = sum(row["float32"] == "exact" for row in rows)
    samples = trained.samples
    parts = [first_head(trained.model(part)) for part in samples.split(_TOGETHER)]
    wanted = torch.cat(parts)
    logits = first_head(dict(reference))
    is_rounded = deployed.exact is not deployed.network
    exact_logits = logits
    if is_rounded:
        exact_logits = first_head(integer.run_heads(deployed.exact, samples))
    gaps = compare(deployed.network, deployed.model, samples[:64])
    moved = [gap for gap in gaps if gap.different]
    first = f"from {moved[0].name} on" if moved else "nowhere"
    far = (exact_logits - wanted).abs()
    lines = [
        f"float32 simulation is exact in {exact} of {len(rows)} layers",
        f"modules that differ from the trained ones: {len(moved)} of {len(gaps)}, {first}",
        *_bias_lines(deployed),
        *_integer_lines(deployed.network),
        f"outputs differ from the trained model's by {far.mean():.2g} on average, {far.max():.2g} at "
        f"most, of up to {wanted.abs().max():.2g}{_rounded(deployed)}",
        *_sum_lines(deployed.network),
        *_chosen_lines(deployed.network),
        *_default_lines(deployed.network),
    ]
    if len(deployed.network.outputs) > 1:
        lines.append(
            f"outputs: {', '.join(deployed.network.outputs)}; these lines tell of the first"
        )
    if trained.labels is not None:
        before = f"with exact sums {trained.accuracy(exact_logits):.2%}, " if is_rounded else ""
        lines.append(
            f"test accuracy: trained {trained.accuracy(wanted):.2%}, {before}"
            f"exported {trained.accuracy(logits):.2%} ({len(samples)} {trained.unit})"
        )
    return lines


def _bias_lines(deployed: Deployed) -> list[str]:
    """Return how far biases without a format are from those of training."""
    state, gaps = deployed.model.state_dict(), {}
    for op in deployed.network.operations:
        name = f"{op.name}.bias"
        is_float = name in state and name not in deployed.formats
        if is_float and isinstance(op, Weighted) and op.bias is not None:
            exported = op.bias.double() * op.bias_fmt.lsb
            gaps[op.name] = float((exported - state[name].cpu().double()).abs().max())
    if not gaps:
        return []
    named = ", ".join(f"{name} by up to {gap:.2g}" for name, gap in gaps.items())
    return [f"biases that training left in floats are rounded: {named}"]


def _integer_lines(network: Network) -> list[str]:
    """Return what training computes in floats, norms of rows and softmax, and the export in integers."""
    kinds = ((Norm, "norms of rows"), (Softmax, "softmax"))
    found = [
        f"{what} {', '.join(op.name for op in network.operations if isinstance(op, kind))}"
        for kind, what in kinds
        if any(isinstance(op, kind) for op in network.operations)
    ]
    return [f"in floats in training, in integers here: {'; '.join(found)}"] if found else []


def _rounded(deployed: Deployed) -> str:
    """Return what the export rounds and training did not, as far as there is some of it."""
    network = deployed.network
    kinds = {type(op) for op in network.operations}
    named = (
        ("norms of rows", Norm in kinds),
        ("softmax", Softmax in kinds),
        ("batch normalisation", Affine in kinds),
        ("biases", bool(_bias_lines(deployed))),
        ("terms of sums and means", bool(sum_formats(network))),
        ("what training left open", bool(network.chosen)),
    )
    *first, last = [name for name, is_there in named if is_there] or [""]
    words = f"{', '.join(first)} and {last}" if first else last
    return f": {words} rounded here" if words else ""


def first_head(outputs: object) -> Tensor:
    """Return the first tensor of what a model gives: a tensor, or tuples, lists and dictionaries."""
    while not isinstance(outputs, Tensor):
        assert isinstance(outputs, tuple | list | dict)
        outputs = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return outputs


def _chosen_lines(network: Network) -> list[str]:
    if not network.chosen:
        return []
    named = ", ".join(f"{name} {fmt}" for name, fmt in network.chosen.items())
    return [f"formats that training left open, calibrated: {named}"]


def _default_lines(network: Network) -> list[str]:
    if not network.defaults:
        return []
    named = ", ".join(network.defaults)
    return [
        f"taken at its default: {named}; a model that is called with another computes something else"
    ]


def _sum_lines(network: Network) -> list[str]:
    formats = sum_formats(network)
    if not formats:
        return []
    named = ", ".join(f"{name} {fmt}" for name, fmt in formats.items())
    return [f"terms of sums and means, calibrated: {named}"]
