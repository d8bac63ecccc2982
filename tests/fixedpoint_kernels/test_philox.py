"""The noise to its last bit, in every execution: an oracle of its own, in Python's integers."""

import pytest
import torch

from fixedpoint_kernels import FixedPoint, philox, quantize_many, rounding
from fixedpoint_kernels.histogram import Bins, cpu, gpu, reference
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding import cpu as rounding_cpu
from fixedpoint_kernels.rounding import gpu as rounding_gpu

KEYS = [Key(0, 0), Key(7, 2**40 + 3, 5), Key(2**63 - 1, 2**62 + 1, 2**34 - 9)]
WHOLE = FixedPoint(4, 0)  # in steps of 1, a fraction is the probability to go up


def word(seed, stream, index):
    """Return the 32-bit word of an element: Philox-4x32-10, as its authors write it."""
    x = [index >> 2 & 0xFFFFFFFF, index >> 34, stream & 0xFFFFFFFF, stream >> 32]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ x[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return x[index & 3]


def noise(n, key):
    """Return the noise of ``n`` elements: exact, for 24 bits are what float32 holds."""
    return torch.tensor([(word(*key[:2], key.offset + i) >> 8) / 2**24 for i in range(n)])


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_words_and_uniform_numbers(key):
    assert philox.words(301, key).tolist() == [
        word(key.seed, key.stream, key.offset + i) for i in range(301)
    ]
    assert torch.equal(philox.uniform(301, key), noise(301, key))


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize(
    "implementation",
    [rounding.reference, rounding_cpu, rounding_gpu],
    ids=["torch", "cpu", "gpu"],
)
def test_a_fraction_goes_up_where_the_noise_is_below_it(implementation, key, device):
    """A fraction equal to the noise stays down; the next larger one goes up."""
    u = noise(701, key)
    for x, expected in ((u, 0.0), (u + 2.0**-24, 1.0)):
        x = x.to(device if implementation is rounding_gpu else "cpu")
        y = torch.empty_like(x)
        implementation.quantize(x, y, None, WHOLE, "stochastic", key)
        assert (y == expected).all()


def test_each_of_many_has_the_next_stream():
    sizes, offsets = (5, 300, 1), (0, 131, 2**33 + 2)
    for step, expected in ((0.0, 0.0), (2.0**-24, 1.0)):
        keys = [Key(5, 9 + j, offset) for j, offset in enumerate(offsets)]
        xs = [noise(n, key) + step for n, key in zip(sizes, keys, strict=True)]
        ys = quantize_many(xs, [WHOLE] * 3, seed=5, stream=9, offsets=offsets)
        assert all((y == expected).all() for y in ys)


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("implementation", [reference, cpu, gpu], ids=["torch", "cpu", "gpu"])
def test_sampled_histograms_have_the_same_noise(implementation, key, device):
    u, bins = noise(701, key), Bins(0.0, 1.0, 2)
    for x, expected in ((u, [701, 0]), (u + 2.0**-24, [0, 701])):
        x = x.to(device if implementation is gpu else "cpu")
        counts = implementation.sampled(x, [WHOLE], bins, "stochastic", key)
        assert counts[1].tolist() == expected
