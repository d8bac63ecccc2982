"""Deploy a trained network: files for other runtimes, and the proof that they compute the same.

One export, from the model to the file:

1. ``frontend.load.load_frozen`` or ``train.export.open_run`` reads a model and ``graph.formats`` its formats.
2. ``deployed.deploy`` hands both to ``describe``, with formats from ``frontend.calibrate`` where there are none.
3. ``frontend.trace.describe`` traces the model and gives each call to its handler in ``frontend.layers``.
4. A handler takes numbers from ``passes.batch_norm`` and ``passes.biases``, and adds operations of ``graph.nodes``
   to a ``frontend.builder.Builder``; ``graph.bounds`` says what their codes can be. That is a ``Network``.
5. ``passes.shorten_scales`` fits its scales to integer kernels, ``passes.round_sums`` what is added, if asked.
6. ``frontend.follow`` compares it with the model, ``execute.verify`` with ``execute.integer``, layer by layer.
7. ``command.export`` prints that by ``report``, and hands the network to ``targets.write``.
8. There ``targets.packed``, ``onnx`` (by ``passes.fold``), ``qonnx``, ``hls4ml`` or ``c`` saves the file, runs it, and
   compares every output with ``execute.integer``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from marvin.lazy import Alias, load

if TYPE_CHECKING:  # for readers; Python loads each when it is first used
    from marvin.export.deployed import Deployed, Options, deploy
    from marvin.export.errors import ExportError
    from marvin.export.execute import integer
    from marvin.export.execute import simulate as simulate
    from marvin.export.execute.exact import exact_module
    from marvin.export.execute.verify import compare, verify
    from marvin.export.frontend.calibrate import calibrate
    from marvin.export.frontend.load import load_frozen
    from marvin.export.frontend.trace import describe
    from marvin.export.graph import nodes as nodes
    from marvin.export.graph.formats import (
        Formats,
        activation_formats,
        formats_of_weights,
        masters_of,
        nearest_weights,
        weight_formats,
    )
    from marvin.export.graph.nodes import Network
    from marvin.export.passes.round_sums import round_sums
    from marvin.export.targets import c, hls4ml, onnx, packed, qonnx

__all__ = [
    "Deployed",
    "ExportError",
    "Formats",
    "Network",
    "Options",
    "activation_formats",
    "c",
    "calibrate",
    "compare",
    "deploy",
    "describe",
    "exact_module",
    "formats_of_weights",
    "hls4ml",
    "integer",
    "load_frozen",
    "masters_of",
    "nearest_weights",
    "onnx",
    "packed",
    "qonnx",
    "round_sums",
    "verify",
    "weight_formats",
]

_HOMES = {  # the module of each name
    "Deployed": "deployed",
    "ExportError": "errors",
    "Formats": "graph.formats",
    "Network": "graph.nodes",
    "Options": "deployed",
    "activation_formats": "graph.formats",
    "calibrate": "frontend.calibrate",
    "compare": "execute.verify",
    "deploy": "deployed",
    "describe": "frontend.trace",
    "exact_module": "execute.exact",
    "formats_of_weights": "graph.formats",
    "load_frozen": "frontend.load",
    "masters_of": "graph.formats",
    "nearest_weights": "graph.formats",
    "round_sums": "passes.round_sums",
    "verify": "execute.verify",
    "weight_formats": "graph.formats",
}
# whoever uses these wants no rooms in their names: from marvin.export.onnx import save
_MODULES = {
    "c": "targets.c",
    "hls4ml": "targets.hls4ml",
    "integer": "execute.integer",
    "network": "graph.nodes",
    "nodes": "graph.nodes",
    "onnx": "targets.onnx",
    "packed": "targets.packed",
    "qonnx": "targets.qonnx",
    "simulate": "execute.simulate",
}


for _name, _home in _MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = Alias(f"{__name__}.{_name}", f"{__name__}.{_home}")


def __getattr__(name: str) -> Any:
    found = (
        import_module(f"{__name__}.{_MODULES[name]}")
        if name in _MODULES
        else load(__name__, _HOMES, name)
    )
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
