"""A network as a module of torch that computes the integers themselves."""

import torch
from torch import Tensor, nn

from marvin.compiled import is_traced
from marvin.export.errors import ExportError
from marvin.export.execute.samples import check_numbers, check_samples
from marvin.export.execute.simulate import simulate
from marvin.export.execute.transformers import check_indices
from marvin.export.graph.nodes import Network, check_network
from marvin.export.graph.transformers import Embedding

__all__ = ["ExactModule", "exact_module"]

_DOUBLE_BITS = 53


class ExactModule(nn.Module):
    """See ``exact_module``.

    Args:
        network: All its values are exact in float64.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the output, float64; those with labels by these.

        Args:
            x: Samples, shape ``(n, *network.input.shape)``, float32; int64 where they are indices.

        Raises:
            ExportError: ``x`` has another shape, or holds a NaN or what is no index. What ``torch.compile``,
                ``torch.export`` or ``torch.jit`` makes of the module does not look.
            TypeError: ``x`` is not a tensor.
        """
        if not is_traced():
            self._check(x)
        values = simulate(self.network, x, dtype=torch.float64)
        found = {label: values[name] for label, name in self.network.outputs.items()}
        return found if self.network.heads else found["output"]

    def _check(self, x: Tensor) -> None:
        """Refuse what the integer reference refuses."""
        check_samples(self.network, x)
        if x.is_meta:  # has no values
            return
        for op in self.network.users[self.network.input.name]:
            if isinstance(op, Embedding):
                check_indices(op, x)
            else:
                check_numbers(x)


def exact_module(network: Network) -> ExactModule:
    """Return a module of torch whose outputs are those of the integer reference, bit for bit.

    ``marvin.freeze`` keeps the model's own norms, softmax and batch normalisation, in floats. Here they
    are what is exported, so the module's accuracy is the accuracy of the files. Values are float64, each
    a code times ``2**-fl``; norms and softmax are int64 inside. It runs where its input is. Its ``state_dict()`` is
    empty: save the module, ``torch.save(exact, path)``, or the network, ``marvin.export.packed.save(network, path)``.

    Args:
        network: From ``describe``, ``round_sums`` or a packed file.

    Raises:
        ExportError: A sum takes more than 53 bits; named.
        TypeError: ``network`` is not a ``Network``.

    Examples:
        >>> exact = marvin.export.exact_module(network)
        >>> assert torch.equal(exact(x), marvin.export.integer.run(network, x))
    """
    check_network(network)
    for name, value in network.values.items():
        if not value.is_exact(_DOUBLE_BITS):
            bits = value.significand.bit_length()
            raise ExportError(
                f"{name}: sums must take {_DOUBLE_BITS} bits at most, got {bits}: choose shorter formats for "
                "what comes in or for its weights, or run marvin.export.integer, packed or C, which take longer sums"
            )
    return ExactModule(network)
