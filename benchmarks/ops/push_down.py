"""PushDown of one layer, beside the same search candidate by candidate in plain torch.

Both look at every fractional length from 4 to 16 and then at every word length up to 24. The plain
way rounds the weights anew and counts them with ``torch.histc`` for each candidate.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import Case
from fixedpoint_kernels import FixedPoint
from marvin.policies.push_down import expected_divergence, kl, push_down, sampled_divergence

TESTS = "tests/marvin/test_push_down.py"
LAYERS = {
    "ResNet20, 16x16x3x3": 2_304,
    "ResNet20, 64x64x3x3": 36_864,
    "AlexNet, 256x384x3x3": 884_736,
}
UPPER, RESOLUTION = FixedPoint(24, 16), 50


def cases() -> Iterator[Case]:
    """Yield layers of three sizes, with the weights of a trained layer's spread."""
    for name, n in LAYERS.items():
        weights = torch.randn(n) * 0.05
        contestants: dict[str, Callable[[], object]] = {
            "ours": lambda w=weights: push_down(expected_divergence(w, RESOLUTION), UPPER),
            "by candidate": lambda w=weights: push_down(_by_candidate(w), UPPER),
            "ours, sampled": lambda w=weights: push_down(sampled_divergence(w, RESOLUTION), UPPER),
        }
        yield Case(name, n, contestants)


def _by_candidate(weights: Tensor) -> Callable[[Sequence[FixedPoint]], np.ndarray]:
    low, high = (bound.item() for bound in weights.aminmax())
    own = torch.histc(weights, RESOLUTION, low, high).double().numpy()

    def counts(fmt: FixedPoint) -> np.ndarray:
        rounded = torch.floor(weights * fmt.scale + torch.rand_like(weights))
        rounded = rounded.clamp_(fmt.min_code, fmt.max_code).mul_(fmt.lsb).clamp_(low, high)
        return torch.histc(rounded, RESOLUTION, low, high).double().numpy()

    return lambda fmts: np.array([kl(counts(fmt), own) for fmt in fmts])
