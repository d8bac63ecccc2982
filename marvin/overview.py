"""What users ask of an optimizer: the formats of its layers, as values, a table and a plot."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from marvin.display import columns, plot_word_lengths
from marvin.policies.records import word_length
from marvin.rounding import Format
from marvin.saved import SavesState
from marvin.wrappers import for_wrappers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ShowsFormats"]


@for_wrappers
class ShowsFormats(SavesState):
    """An optimizer that says which formats its layers have; see ``Quantized``."""

    def formats(self) -> dict[str, Format]:
        """Return the format of every quantised parameter, in parameter order.

        Keys are names, or positions (``"0"``, ``"1"``, ...) where the parameters have none.
        """
        found = ((name, self.format_of(p)) for p, name in self._layout.names.items())
        return {name: fmt for name, fmt in found if fmt is not None}

    def __repr__(self) -> str:
        if not hasattr(self, "_counts"):  # while it is made
            return f"{type(self).__name__} (not ready)"
        of = "" if type(self.optimizer).__module__.startswith("marvin") else type(self.optimizer)
        name = type(self).__name__ + (f"({of.__name__})" if of else "")
        rates = ", ".join(f"{float(group['lr']):g}" for group in self.param_groups if "lr" in group)
        head = f"{name} with {type(self.policy).__name__}, {self._counts.step} steps, lr {rates}"
        formats, inputs, layers = self.formats(), self.input_formats(), self.layers()
        if not layers:
            return f"{head}\n0 layers: no parameter of two or more dimensions is trained"
        count = f"{len(layers)} layer" + "s" * (len(layers) != 1)
        mean = f"{count}, on average {self.mean_word_length():.1f} bits of weights"
        rows = [(n, str(formats.get(n, "float32")), str(inputs.get(n, "float32"))) for n in layers]
        if not any(handle.is_attached for handle in self._carriers.handles):
            mean += "; inputs are float32 without marvin.quantize_activations"
            return f"{head}\n{mean}\n{columns(('layer', 'weight'), [row[:2] for row in rows])}"
        if inputs:
            mean += f", {self.mean_input_word_length():.1f} of inputs"
        return f"{head}\n{mean}\n{columns(('layer', 'weight', 'inputs'), rows)}"

    def plot(self) -> "Figure":
        """Draw each layer's word length over the steps, from ``trace``; a notebook shows it.

        Returns:
            A figure of matplotlib's: ``savefig(path)`` writes it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        formats = self.formats()
        own = {name: formats.get(name) for name in self.layers()}
        return plot_word_lengths(self.trace, own, self._counts.step)

    def layers(self) -> list[str]:
        """Return the names of the parameters that have a format of their own."""
        return [self._layout.names[p] for p in self._present()]

    def mean_word_length(self) -> float:
        """Return the mean word length over the layers, in bits; NaN without layers."""
        return _mean_length(self.state[p]["layer"].fmt for p in self._present())

    def input_formats(self) -> dict[str, Format]:
        """Return the format of each layer's inputs, by the layer's name; without it they are float.

        It holds where ``marvin.quantize_activations`` rounds them.
        """
        found = (
            (self._layout.names[p], self.policy.activation_formats(self.state[p]["layer"]).inputs)
            for p in self._present()
        )
        return {name: fmt for name, fmt in found if fmt is not None}

    def mean_input_word_length(self) -> float:
        """Return the mean word length over ``input_formats``, in bits; NaN where it is empty."""
        return _mean_length(self.input_formats().values())

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has left out."""
        return self._counts.skipped

    @property
    def lr_scale(self) -> float:
        """What the policy has multiplied the learning rates by so far."""
        return self.policy.lr_scale_at(self.shared)

    @property
    def should_stop(self) -> bool:
        """Whether the training is over as far as the policy is concerned."""
        return self.policy.should_stop_at(self.shared)

    def _present(self) -> Iterator[Tensor]:
        """Yield the trained layers that did not leave their models."""
        gone = self._carriers.gone
        return (p for _, p in self._trained() if p not in gone)


def _mean_length(formats: Iterable[Format | None]) -> float:
    """Return the mean word length, in bits; NaN where there are no formats."""
    lengths = [word_length(fmt) for fmt in formats]
    return sum(lengths) / len(lengths) if lengths else float("nan")
