"""What policies see of inputs, compared."""

from collections.abc import Mapping

import pytest

from marvin.policies.observer import Inputs


def nearly_the_same(found: Mapping[int, Inputs], expected: Mapping[int, Inputs]) -> None:
    """Compare what chains showed of each layer with what the layers showed one by one."""
    for i, own in expected.items():
        one = found[i]
        assert sum(one.counts) == sum(own.counts)
        moved = sum(abs(a - b) for a, b in zip(one.counts, own.counts, strict=True))
        assert moved < 0.05 * sum(own.counts)
        assert one.power == pytest.approx(own.power, rel=0.02)
        assert one.saturated == pytest.approx(own.saturated, abs=0.005)
        assert one.gradient == pytest.approx(own.gradient, rel=0.2)
