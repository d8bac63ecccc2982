import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import madds


def test_convolution_counts_every_product():
    assert madds.convolution((8, 4, 3, 3), (2, 8, 5, 5)) == 2 * 8 * 5 * 5 * 4 * 9
    assert madds.convolution((8, 1, 3), (1, 8, 10)) == 8 * 10 * 3  # depthwise
    assert madds.transposed_convolution((4, 8, 2, 2), (1, 4, 5, 5)) == 4 * 25 * 8 * 4


sides = st.integers(1, 5)


@given(sides, sides, sides, sides)
def test_matmul(batch, rows, inner, columns):
    assert madds.matmul((rows, inner), (inner, columns)) == rows * inner * columns
    wanted = batch * rows * inner * columns
    assert madds.matmul((batch, rows, inner), (batch, inner, columns)) == wanted
    assert madds.matmul((rows, inner), (inner,)) == rows * inner
    assert madds.matmul((inner,), (inner,)) == inner


@given(st.lists(st.integers(1, 3), max_size=3), st.lists(st.booleans(), min_size=6, max_size=6))
def test_matmul_of_batches_that_are_broadcast(batch, ones):
    left = [1 if one else side for one, side in zip(ones, batch, strict=False)]
    right = [1 if one else side for one, side in zip(ones[3:], batch, strict=False)]
    product = torch.ones(*left, 2, 4) @ torch.ones(*right, 4, 6)
    assert madds.matmul((*left, 2, 4), (*right, 4, 6)) == product.numel() * 4
    assert madds.matmul((2, 4), (*right, 4, 6)) == math.prod(right) * 2 * 4 * 6
    with pytest.raises(ValueError, match="batches must be broadcast, got"):
        madds.matmul((4, 2, 4), (3, 4, 6))


def test_matmul_of_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"inner dimensions must agree, got \(2, 3\) and \(4, 5\)"):
        madds.matmul((2, 3), (4, 5))


def test_attention_with_shared_heads_and_other_value_size():
    query, key, value = (2, 8, 5, 16), (2, 2, 7, 16), (2, 2, 7, 4)
    assert madds.attention(query, key, value) == 2 * 8 * 5 * 7 * (16 + 4)


def test_bilinear_is_the_einsum_it_stands_for():
    rows, left, weight, right = 3, 4, (2, 4, 5), 5
    a, w, b = torch.ones(rows, left), torch.ones(weight), torch.ones(rows, right)
    products = torch.einsum("ni,oij,nj->nijo", a, w, b)
    assert madds.bilinear(a.shape, weight) == products.numel()
    assert madds.bilinear((3, 0), (2, 0, 4)) == 0
    assert F.bilinear(a, b, w).shape == (rows, 2)
