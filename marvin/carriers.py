"""Models whose modules round by an optimizer's formats: writing them, and asking what came in."""

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor

from marvin.activations import Entry, QuantizedActivations
from marvin.masters import WithMasters
from marvin.model_formats import ModuleFormats
from marvin.policies.observer import Observer
from marvin.policies.records import ActivationFormats

__all__ = ["Carriers"]


class Carriers:
    """The models that carry an optimizer's formats.

    Attributes:
        handles: Of ``marvin.quantize_activations``.
        observers: Of the layers whose inputs the next step wants to know, by position.
    """

    def __init__(self) -> None:
        self.handles: list[QuantizedActivations] = []
        self.observers: dict[int, Observer] = {}

    def add(self, handle: QuantizedActivations) -> None:
        """Take a model, and let go of those that were freed."""
        self.handles = [h for h in self.handles if h.is_attached] + [handle]

    def publish(self, optimizer: WithMasters) -> None:
        """Let the models carry the formats that hold now."""
        for handle in self.handles:
            for entry in handle.entries:
                formats = _formats_for(entry, handle, optimizer)
                if not entry.rounder.has(entry.module, formats) and entry.is_live:
                    entry.rounder.write(entry.module, formats)

    def observe(self, layers: Sequence[tuple[int, Tensor]]) -> None:
        """Let modules show what comes into these layers, and no others; forget what they saw."""
        if not layers and not self.observers:
            return
        self.observers = {}
        for entry in (entry for handle in self.handles for entry in handle.entries):
            own = {id(p) for p in entry.parameters}
            layer = next((index for index, p in layers if id(p) in own), None)
            entry.rounder.observer = None
            if layer is not None:
                entry.rounder.observer = self.observers.setdefault(layer, Observer())

    def name_uncalled(self, waiting: set[str]) -> None:
        """Warn of weights that have a gradient though their module was never called.

        Args:
            waiting: Names of modules that were not called yet; those that are named leave it.
        """
        if not waiting:
            return
        names = {
            entry.rounder.name
            for handle in self.handles
            for entry in handle.entries
            if entry.rounder.name in waiting
            and any(p.grad is not None for p in entry.module.parameters(recurse=False))
        }
        waiting -= names
        if names:
            warnings.warn(
                "activations are not rounded where a model uses a weight without calling its "
                f"module: {', '.join(sorted(names))}",
                stacklevel=6,
            )


def _formats_for(
    entry: Entry, handle: QuantizedActivations, optimizer: WithMasters
) -> ModuleFormats:
    """Return what a module is to carry."""

    def first(parameters: Iterable[Tensor]) -> ActivationFormats:
        found = (optimizer.activation_formats(p) for p in parameters if p in optimizer)
        return next((formats for formats in found if formats is not None), ActivationFormats())

    takes_samples = entry.rounder.is_root and optimizer.policy.rules.quantizes_input
    own = first(entry.parameters)
    return ModuleFormats(
        inputs=own.inputs,
        outputs=own.outputs,
        gradients=own.gradients,
        samples=first(entry.module.parameters()).outputs if takes_samples else None,
        weights=tuple(
            optimizer.format_of(p) if p in optimizer else None
            for p in entry.module.parameters(recurse=False)
        ),
        ste=handle.ste,
        eval_rounding=handle.eval_rounding,
    )
