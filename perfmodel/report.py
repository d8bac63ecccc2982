"""The printed report of a run."""

from perfmodel.run import LACKS_PRODUCTS, Run
from perfmodel.summary import LayerRow, layer_rows, totals, what_ifs
from perfmodel.text import binary, metric, table

__all__ = ["one_line", "report"]

HEADER = "layer", "kind or shape", "MAdds", "bits min", "mean", "last"
INPUTS = "inputs mean", "last"


def report(run: Run) -> str:
    """Return the tables of a run: layers, totals with their definitions, what might have been."""
    trace = run.trace
    lines = [
        f"{run.title}: {trace.steps:,} steps of {run.batch_size} x {run.accumulation_steps} samples",
        "All modelled (multiply-adds weighted by word length) unless it says measured.",
        *([LACKS_PRODUCTS] if run.lacks_products else []),
        "",
        _layers(layer_rows(run), trace.has_inputs),
        "",
        _totals(run),
        "",
        "For comparison",
        _what_ifs(run),
    ]
    if run.images_per_s is not None:
        lines += ["", f"training, measured on {run.machine}: {run.images_per_s:,.0f} images/s"]
    return "\n".join(lines)


def one_line(run: Run) -> str:
    """Return SU, MEM, SZ and EBOPs in one line."""
    values = {t.name: t.value for t in totals(run)}
    named = "  ".join(f"{name} {values[name]:.2f}" for name in ("SU", "MEM", "SZ"))
    return f"{named}  EBOPs {values['EBOPs']:.3g} M (modelled)"


def _layers(rows: list[LayerRow], has_inputs: bool) -> str:
    lines = [
        (
            row.layer.removesuffix(".weight"),
            row.kind,
            metric(row.madds),
            str(row.wl_min),
            f"{row.wl_mean:.1f}",
            str(row.wl_last),
            *((f"{row.input_wl_mean:.1f}", str(row.input_wl_last)) if has_inputs else ()),
            f"{row.cost_share:.1%}",
            binary(row.size_bytes),
        )
        for row in rows
    ]
    madds, size = sum(r.madds for r in rows), sum(r.size_bytes for r in rows)
    inputs = INPUTS if has_inputs else ()
    blank = "", "", "", *("" for _ in inputs)
    lines.append(("total", "", metric(madds), *blank, "100.0%", binary(size)))
    return table((*HEADER, *inputs, "cost", "size"), lines)


def _totals(run: Run) -> str:
    found = totals(run)
    width = max(len(t.name) for t in found)
    return "\n".join(f"{t.name:{width}}  {t.value:6.3f}  {t.meaning}" for t in found)


def _what_ifs(run: Run) -> str:
    rows = [
        (f"  {w.name}", f"{w.speedup:.3f}", f"{w.memory:.3f}", f"{w.size:.3f}")
        for w in what_ifs(run)
    ]
    return table(("", "SU", "MEM", "SZ"), rows)
