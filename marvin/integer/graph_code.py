"""Graphs of ``torch.fx`` as functions."""

from types import SimpleNamespace
from typing import Any

from torch import fx, nn

__all__ = ["GraphCode"]


class GraphCode:
    """What a graph computes, as a function of its placeholders.

    ``fx.GraphModule`` does this too, but torch keeps the source of each that was ever made.

    Args:
        graph: Of a module, with calls of chains.
        module: The module.
        chains: Modules that are called, by names that the module does not have.

    Attributes:
        chains: These modules.
    """

    def __init__(self, graph: fx.Graph, module: nn.Module, chains: dict[str, nn.Module]) -> None:
        made = graph.python_code("self")
        # what comes before would make torch remember the functions of ``fx.wrap`` once more
        source = "def forward(" + made.src.partition("def forward(")[2]
        known = {**made.globals}
        exec(compile(source, "<traced graph>", "exec", dont_inherit=True), known)
        self._forward = known["forward"]
        called = (str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr"))
        owners = dict.fromkeys(name.partition(".")[0] for name in called)
        own = {name: getattr(module, name) for name in owners if name not in chains}
        self._own = SimpleNamespace(**own, **chains)
        self.chains = tuple(chains.values())

    def __call__(self, *xs: object) -> Any:
        """Run it."""
        return self._forward(self._own, *xs)
