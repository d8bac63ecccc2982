"""Fused transformers: against their reference in plain PyTorch, and that against autograd in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fixedpoint_kernels import FixedPoint, decode, encode, functions, tokens
from fixedpoint_kernels.dropout import Odds, keeps
from fixedpoint_kernels.philox import Key, words
from fixedpoint_kernels.products import jobs, paths
from fixedpoint_kernels.tokens import (
    Add,
    Attention,
    Curve,
    Curved,
    Cut,
    Dropout,
    Linear,
    Multiply,
    Norm,
    Parameters,
    Part,
    Relu,
    Rotary,
    Segment,
    execute,
    reference,
)
from fixedpoint_kernels.tokens.program import Program

HERE = [name for name in tokens.PATHS if name not in paths.unavailable()]
SIGNED, UNSIGNED, WEIGHT = FixedPoint(8, 5), FixedPoint(7, 5, signed=False), FixedPoint(8, 7)

pytestmark = [
    pytest.mark.skipif(not HERE, reason="no path of tokens on this processor"),
    pytest.mark.usefixtures("full_memory"),
]


def block(width=32, heads=2, *, causal=False, signed=SIGNED, unsigned=UNSIGNED, weight=WEIGHT):
    """One of a pre-norm transformer."""
    size = width // heads
    parts = (Part(2, i * width, size) for i in range(3))
    operations = (
        Norm(0),
        Linear(1, signed, weight, (3 * width, width)),
        Attention(*parts, heads, size, size**-0.5, causal),
        Linear(3, signed, weight, (width, width), clip=False),
        Add(0, 4),
        Norm(5, 1e-3),
        Linear(6, signed, weight, (2 * width, width)),
        Curved(7, Curve("gelu")),
        Linear(8, unsigned, weight, (width, 2 * width)),
        Add(9, 5),
    )
    return Segment((width,), operations, (10,))


def dropping(width=32, heads=2, p=0.1, of_attention=0.3, causal=False):
    """A post-norm block as models for text have it: with dropout of weights of attention, and of values."""
    size = width // heads
    parts = (Part(1, i * width, size) for i in range(3))
    odds = Odds(of_attention) if of_attention else None
    operations = (
        Linear(0, SIGNED, WEIGHT, (3 * width, width)),
        Attention(*parts, heads, size, size**-0.5, causal, odds),
        Linear(2, SIGNED, WEIGHT, (width, width)),
        Dropout(3, Odds(p)),
        Add(0, 4),
        Norm(5),
        Linear(6, SIGNED, WEIGHT, (2 * width, width)),
        Curved(7, Curve("gelu")),
        Dropout(8, Odds(p)),
        Linear(9, SIGNED, WEIGHT, (width, 2 * width)),
        Dropout(10, Odds(p)),
        Add(11, 6),
        Norm(12),
    )
    return Segment((width,), operations, (13,))


def separate():
    """Queries, keys and values of layers of their own, keys and values of one head after the other."""
    operations = (
        Linear(0, SIGNED, WEIGHT, (48, 32)),
        Linear(0, SIGNED, WEIGHT, (112, 32)),
        Attention(Part(1, 0, 16), Part(2, 0, 32), Part(2, 16, 32), 3, 16, 0.3),
    )
    return Segment((32,), operations, (3, 2))


def two_inputs():
    """A sum of what comes in, values that leave and are taken, and no linear layer behind one."""
    operations = (
        Linear(0, SIGNED, WEIGHT, (48, 16)),
        Add(2, 1),
        Relu(3),
        Norm(3),
        Linear(4, UNSIGNED, WEIGHT, (48, 48)),
        Add(6, 3),
    )
    return Segment((16, 48), operations, (5, 7))


def gated(curve="silu", *, centred=False):
    """The feed-forward half of a block with a gate, behind RMS normalisation; and a square."""
    operations = (
        Norm(0, 1e-6, centred),
        Linear(1, SIGNED, WEIGHT, (64, 32)),
        Linear(1, SIGNED, WEIGHT, (64, 32)),
        Curved(2, Curve(curve)),
        Multiply(4, 3),
        Linear(5, SIGNED, WEIGHT, (32, 64)),
        Add(6, 0),
        Multiply(7, 7),
    )
    return Segment((32,), operations, (7, 8))


def cut():
    """Gate and values of one layer; pieces that overlap, of what comes in, and one that leaves."""
    operations = (
        Linear(0, SIGNED, WEIGHT, (128, 64)),
        Cut(1, 0, 64),
        Cut(1, 64, 64),
        Curved(2, Curve("silu")),
        Multiply(4, 3),
        Linear(5, SIGNED, WEIGHT, (64, 64)),
        Cut(0, 16, 48),
        Cut(0, 3, 48),
        Add(7, 8),
        Cut(1, 32, 48),
        Cut(9, 32, 16),
        Add(6, 0),
    )
    return Segment((64,), operations, (12, 10, 11))


def curves():
    """Each activation function, of what comes in and in a row."""
    own = [Curve(name, 0.25 * (name == "leaky_relu")) for name in functions.CURVES]
    operations = [Curved(0, curve) for curve in own] + [Curved(1, own[0]), Multiply(2, 0)]
    return Segment((80,), tuple(operations), tuple(range(1, len(operations) + 1)))


def turned():
    """Attention as decoders have it: queries and keys turned by their position, four heads for two of keys and values."""
    operations = (
        Norm(0, 1e-6, centred=False),
        Linear(1, SIGNED, WEIGHT, (64, 32)),
        Linear(1, SIGNED, WEIGHT, (32, 32)),
        Linear(1, SIGNED, WEIGHT, (32, 32)),
        Rotary(Part(2, 0, 16), 4, 16, 16),
        Rotary(Part(3, 0, 16), 2, 16, 16),
        Attention(Part(5, 0, 16), Part(6, 0, 16), Part(4, 0, 16), 4, 16, 0.25, True, groups=2),
        Linear(7, SIGNED, WEIGHT, (32, 64)),
        Add(8, 0),
    )
    return Segment((32,), operations, (9,))


def normed_heads():
    """Heads of queries and keys are normalised, then turned; keys by layer norm, in one part the whole value."""
    operations = (
        Linear(0, SIGNED, WEIGHT, (64, 32)),
        Linear(0, SIGNED, WEIGHT, (32, 32)),
        Linear(0, SIGNED, WEIGHT, (32, 32)),
        Norm(1, 1e-6, centred=False, size=16),
        Norm(2, size=16),
        Norm(3, size=32),
        Rotary(Part(4, 0, 16), 4, 16, 16),
        Rotary(Part(5, 0, 16), 2, 16, 16),
        Attention(Part(7, 0, 16), Part(8, 0, 16), Part(6, 0, 16), 4, 16, 0.25, True, groups=2),
        Linear(9, SIGNED, WEIGHT, (32, 64)),
        Norm(10, 1e-6, centred=False, size=16),
    )
    return Segment((32,), operations, (11, 4))


def partly_turned():
    """A quarter of each head, of one layer for queries, keys and values; samples have positions of their own."""
    operations = (
        Linear(0, SIGNED, WEIGHT, (240, 32)),
        Rotary(Part(1, 0, 96), 2, 32, 8, True),
        Rotary(Part(1, 32, 96), 2, 32, 10, True),
        Attention(Part(2, 32, -32), Part(3, 0, 32), Part(1, 64, 96), 2, 32, 0.2),
        Rotary(Part(4, 0, 32), 2, 32, 32, True),
    )
    return Segment((32,), operations, (5, 1))


def in_pairs(segment):
    """The same; neighbours are turned with each other."""
    own = segment.operations
    operations = [replace(op, in_pairs=True) if isinstance(op, Rotary) else op for op in own]
    return replace(segment, operations=tuple(operations))


def by_channel(segment):
    """The same; each weight has a fractional length for each output."""
    own = segment.operations
    operations = [replace(op, by_channel=True) if isinstance(op, Linear) else op for op in own]
    return replace(segment, operations=tuple(operations))


SEGMENTS = {
    "block": block(),
    "causal": block(48, 3, causal=True),
    "separate": separate(),
    "two inputs": two_inputs(),
    "seven bits": block(weight=FixedPoint(7, 6)),
    "few bits": block(
        signed=FixedPoint(5, 2), unsigned=FixedPoint(5, 3, signed=False), weight=FixedPoint(5, 4)
    ),
    "linear": Segment((64,), (Linear(0, UNSIGNED, WEIGHT, (96, 64)),), (1,)),
    "by channel": by_channel(block()),
    "by channel two inputs": by_channel(two_inputs()),
    "gated": gated(),
    "gated by tanh": gated("gelu_tanh", centred=True),
    "curves": curves(),
    "cut": cut(),
    "turned": turned(),
    "partly turned": partly_turned(),
    "normed heads": normed_heads(),
    "turned in pairs": in_pairs(turned()),
    "partly turned in pairs": in_pairs(partly_turned()),
    "turned and taken": Segment(
        (32,),
        (Linear(0, SIGNED, WEIGHT, (32, 32)), Rotary(Part(1, 0, 16), 2, 16, 16), Relu(1)),
        (2, 3),
    ),
    "dropout": dropping(),
    "dropout causal": dropping(48, 3, 0.5, 0.9, causal=True),
    "dropout of values": dropping(of_attention=0.0),
    "dropout first": Segment(
        (16, 16), (Dropout(0, Odds(0.25)), Dropout(1, Odds(0.5)), Add(2, 3), Relu(4)), (3, 5)
    ),
}


SHORT = (
    "block",
    "by channel",
    "dropout",
    "turned",
    "partly turned",
    "normed heads",
    "turned in pairs",
)


def parameters(segment, seed=0, samples=4, tokens=8):
    generator = torch.Generator().manual_seed(seed)
    widths, found = segment.widths()[len(segment.inputs) :], []
    for n, (op, width) in enumerate(zip(segment.operations, widths, strict=True)):
        shift = 0.1 * torch.randn(width, generator=generator)
        if isinstance(op, Linear):
            weight = torch.randn(op.shape, generator=generator) * op.shape[1] ** -0.5
            found.append(Parameters(weight, shift if n % 2 else None, (seed, n)))
            if op.by_channel:
                shifts = torch.randint(5, (width,), generator=generator)
                weight *= 2.0 ** -shifts[:, None]
                found[-1].shifts, found[-1].second_stream = tuple(shifts.tolist()), n + 100
        elif isinstance(op, Norm):
            size = op.size or width
            scale = 1 + 0.1 * torch.randn(size, generator=generator)
            shift = shift[:size].clone() if op.centred else None
            found.append(Parameters(scale, shift) if n != 5 else Parameters())
        elif isinstance(op, Rotary):
            angles = torch.randn(samples, tokens, op.turned, generator=generator)
            angles = angles if op.by_sample else angles[0].contiguous()
            found.append(Parameters(angles.cos(), angles.sin()))  # halves may differ
        else:
            found.append(Parameters(noise=(seed + 2**40, n + 2**35)))
    return found


def inputs(segment, samples, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(samples, tokens, width, generator=generator) for width in segment.inputs]


def program(segment, samples, tokens, path=None, threads=1, needs=None, weights=None):
    path = path or HERE[0]
    paths.chosen(path)  # asks for AMX
    needs = needs or [True] * len(segment.inputs)
    weights = weights or [True] * len(segment.operations)
    return Program(segment, samples, tokens, path, threads, needs, weights)


def close(found, wanted, rtol=1e-4):
    assert found.shape == wanted.shape
    assert (found - wanted).norm() <= rtol * wanted.norm() + 1e-12


def check(segment, made, seed=0):
    sizes = made.samples, made.tokens
    xs, own = inputs(segment, *sizes, seed), parameters(segment, seed, *sizes)
    expected, kept = reference.forward(segment, xs, own)
    ys, memory = execute.forward(made, xs, own)
    assert all(map(torch.equal, ys, expected))
    for i, op in enumerate(segment.operations):
        if isinstance(op, Linear):
            assert made.clamped[i].sum() == (~kept.made[i][1]).sum()
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [torch.randn(y.shape, generator=generator) * 1e-3 for y in ys]
    dxs, found = execute.backward(made, memory, own, grads)
    wanted_dxs, wanted = reference.backward(segment, kept, own, grads)
    # a code of a gradient that differs moves all that follow
    rtol = 3e-2 if len(segment.operations) > 1 else 1e-5
    for dx, other, needed in zip(dxs, wanted_dxs, made.needs_inputs, strict=True):
        assert (dx is not None) == needed
        if needed:
            close(dx, other, rtol)
    for op, pair, pair_wanted in zip(segment.operations, found, wanted, strict=True):
        if isinstance(op, Linear | Norm):
            for one, other in zip(pair, pair_wanted, strict=True):
                if one is not None:
                    close(one, other, rtol)
    return ys, dxs, found


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize(("samples", "tokens"), [(3, 16), (5, 5), (2, 21), (9, 1)])
def test_kernels_equal_their_reference(name, samples, tokens):
    check(SEGMENTS[name], program(SEGMENTS[name], samples, tokens))


@pytest.mark.parametrize("path", HERE[1:])
@pytest.mark.parametrize("name", ["seven bits", "few bits", *SHORT])
def test_other_paths_have_the_same_bits(name, path):
    check(SEGMENTS[name], program(SEGMENTS[name], 3, 12, path))


@pytest.mark.parametrize("name", SHORT)
def test_threads_have_the_same_bits(name):
    own = SEGMENTS[name]
    found = [check(own, program(own, 40, 9, threads=threads), seed=3) for threads in (1, 2)]
    (ys, dxs, grads), (other_ys, other_dxs, other_grads) = found
    assert all(map(torch.equal, ys, other_ys))
    assert all(map(torch.equal, dxs, other_dxs))
    for pair, other in zip(grads, other_grads, strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(pair, other, strict=True))


def test_what_nothing_turns_has_a_gradient_of_0():
    """Features between the heads: what lay in memory before is not their gradient."""
    operations = Linear(0, SIGNED, WEIGHT, (64, 32)), Rotary(Part(1, 0, 48), 2, 16, 16)
    segment = Segment((32,), operations, (2,))
    made = program(segment, 4, 8)
    for seed in range(3):
        _, _, found = check(segment, made, seed)
        assert (found[0][0][16:48] == 0).all()
        assert (found[0][0][:16] != 0).any()


def test_what_needs_no_gradient_gets_none():
    segment = two_inputs()
    weights = [True, False, False, False, False, False]
    made = program(segment, 4, 6, needs=[False, True], weights=weights)
    _, dxs, found = check(segment, made)
    assert dxs[0] is None
    assert found[0][0] is not None
    assert found[4][0] is None


@settings(max_examples=25)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_a_linear_layer_has_the_bits_of_its_products(samples, tokens, outputs, features, seed):
    shape = 16 * outputs, 16 * features
    segment = Segment((shape[1],), (Linear(0, SIGNED, WEIGHT, shape),), (1,))
    made = program(segment, samples, tokens)
    xs, own = inputs(segment, samples, tokens, seed), parameters(segment, seed)
    grad = torch.randn(samples, tokens, shape[0], generator=torch.Generator().manual_seed(seed))
    _, memory = execute.forward(made, xs, own)
    (dx,), ((weight, bias),) = execute.backward(made, memory, own, [grad])
    _, kept = reference.forward(segment, xs, own)
    (wanted,), ((of_weight, of_bias),) = reference.backward(segment, kept, own, [grad])
    assert torch.equal(dx, wanted)
    assert torch.equal(weight, of_weight)
    close(bias, of_bias, 1e-5)


@pytest.mark.parametrize("path", HERE)
def test_gradients_far_apart_and_many_rows_are_exact(path):
    """Sums of more rows than are laid out at once, of samples of other powers of two."""
    segment = Segment((128,), (Linear(0, UNSIGNED, WEIGHT, (96, 128)),), (1,))
    samples, tokens = 12, 300
    made = program(segment, samples, tokens, path)
    assert made.details[0, jobs.LONGEST] < samples * tokens // 2
    xs, own = inputs(segment, samples, tokens), parameters(segment)
    powers = 2.0 ** torch.tensor([0, -3, 0, 9, -9, 2, 2, 0, -3, 1, 0, 3])
    grad = torch.randn(samples, tokens, 96) * powers[:, None, None]
    grad[..., :32] = grad[..., :32].abs()  # in one power, int32 does not hold their sums
    _, memory = execute.forward(made, xs, own)
    _, ((weight, _),) = execute.backward(made, memory, own, [grad])
    _, kept = reference.forward(segment, xs, own)
    _, ((wanted, _),) = reference.backward(segment, kept, own, [grad])
    assert torch.equal(weight, wanted)


@pytest.mark.parametrize("path", HERE)
def test_samples_of_many_rows_are_laid_out_in_pieces(path):
    """A sample of more codes than a job has."""
    segment = Segment((512,), (Linear(0, SIGNED, WEIGHT, (80, 512)),), (1,))
    made = program(segment, 3, 700, path, threads=2)
    assert 1 < made.details[0, jobs.BAND] < 700
    check(segment, made)


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_weight_that_lies_turned_gives_the_bits_of_one_that_does_not(path, threads):
    shape, samples, count, found = (80, 48), 9, 130, []
    x, weight = torch.randn(samples, count, 48), torch.randn(shape) / 7
    grad = torch.randn(samples, count, 80) * 2.0 ** torch.arange(-4, 5).view(-1, 1, 1)
    for is_turned in (False, True):
        op = Linear(0, SIGNED, WEIGHT, shape, is_turned=is_turned)
        segment = Segment((48,), (op, Relu(1)), (2,))
        made = program(segment, samples, count, path, threads)
        lies = weight.T.contiguous() if is_turned else weight
        own = [Parameters(lies, None, (1, 2)), Parameters()]
        ys, memory = execute.forward(made, [x], own)
        (dx,), ((of_weight, _), _) = execute.backward(made, memory, own, [grad])
        assert of_weight.is_contiguous()
        expected, kept = reference.forward(segment, [x], own)
        _, ((wanted, _), _) = reference.backward(segment, kept, own, [grad])
        assert torch.equal(ys[0], expected[0])
        assert torch.equal(of_weight, wanted)
        found.append((ys[0], dx, of_weight.T if is_turned else of_weight))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_seen(bad):
    segment = block()
    made, xs, own = program(segment, 4, 8), inputs(segment, 4, 8), parameters(segment)
    ys, memory = execute.forward(made, xs, own)
    grad = torch.randn_like(ys[0])
    grad[2, 3, 1] = bad
    (dx,), found = execute.backward(made, memory, own, [grad])
    assert not dx[2].isfinite().any()
    assert dx[[0, 1, 3]].isfinite().all()
    assert found[8][0].isnan().all()


def test_two_passes_before_their_backward():
    segment = block()
    made, own = program(segment, 4, 8), parameters(segment)
    xs = [inputs(segment, 4, 8, seed) for seed in range(2)]
    grad = torch.randn(4, 8, 32)
    alone = []
    for x in xs:
        _, memory = execute.forward(made, x, own)
        alone.append(execute.backward(made, memory, own, [grad])[0][0])
    memories = [execute.forward(made, x, own)[1] for x in xs]
    for memory, wanted in zip(memories, alone, strict=True):
        assert torch.equal(execute.backward(made, memory, own, [grad])[0][0], wanted)


def test_two_passes_of_other_formats_before_their_backward():
    """One program has both: weights are laid out anew where they are others."""
    segment = SEGMENTS["by channel"]
    made, xs, grad = program(segment, 4, 8), inputs(segment, 4, 8), torch.randn(4, 8, 32)
    every = [parameters(segment, seed) for seed in range(2)]
    wanted = []
    for own in every:
        _, kept = reference.forward(segment, xs, own)
        wanted.append(reference.backward(segment, kept, own, [grad])[0][0])
    memories = [execute.forward(made, xs, own)[1] for own in every]
    for memory, own, dx in zip(memories, every, wanted, strict=True):
        close(execute.backward(made, memory, own, [grad])[0][0], dx, 3e-2)


@pytest.mark.parametrize("in_place", [False, True])
def test_two_passes_of_other_weights_before_their_backward(in_place):
    """As with ``functional_call``, or with values that are swapped through ``.data``, which nothing counts."""
    segment = block()
    made, xs, grad = program(segment, 4, 8), inputs(segment, 4, 8), torch.randn(4, 8, 32)
    own, other = (parameters(segment, seed) for seed in range(2))
    _, memory = execute.forward(made, xs, own)
    (wanted,), _ = execute.backward(made, memory, own, [grad])
    _, memory = execute.forward(made, xs, own)
    if in_place:
        before = [each.first.clone() for each in own if each.first is not None]
        for each in own:
            if each.first is not None:
                each.first.neg_()
        execute.forward(made, xs, own)
        for each, value in zip((e for e in own if e.first is not None), before, strict=True):
            each.first.copy_(value)
    else:
        execute.forward(made, xs, other)
    assert torch.equal(execute.backward(made, memory, own, [grad])[0][0], wanted)


@pytest.mark.parametrize("offset", [0, 16])
def test_what_is_kept_may_be_moved(offset):
    """Hooks on saved tensors give back copies, which lie as they like."""
    segment = block()
    made, own, xs = program(segment, 4, 8), parameters(segment), inputs(segment, 4, 8)
    grad = torch.randn(4, 8, 32)
    _, memory = execute.forward(made, xs, own)
    (wanted,), _ = execute.backward(made, memory, own, [grad])
    place = torch.empty(len(memory) + 128, dtype=torch.uint8)
    start = -place.data_ptr() % 64 + offset
    moved = place[start : start + len(memory)].copy_(memory)
    memory.fill_(0xFF)
    assert torch.equal(execute.backward(made, moved, own, [grad])[0][0], wanted)


# ------------------------------------------------------------------ the reference itself


class Round(torch.autograd.Function):
    """Rounds float64 to a format; backward passes the gradient where nothing was clamped."""

    @staticmethod
    def forward(ctx, x, fmt):
        ctx.save_for_backward((x * fmt.scale).round().clamp(fmt.min_code, fmt.max_code) * fmt.lsb)
        ctx.inside = ((x * fmt.scale).round() >= fmt.min_code) & (
            (x * fmt.scale).round() <= fmt.max_code
        )
        return decode(encode(x.float(), fmt, rounding="nearest"), fmt).double()

    @staticmethod
    def backward(ctx, grad):
        return torch.where(ctx.inside, grad, 0.0), None


def parts_of(values, op):
    """Return queries, keys and values, (samples, heads, tokens, size)."""
    return [
        torch.stack(
            [
                values[p.value][..., p.start + p.step * (h // shared) :][..., : op.size]
                for h in range(op.heads)
            ],
            1,
        )
        for p, shared in zip(op.parts, (1, op.groups, op.groups), strict=True)
    ]


def turned_by_hand(values, op, cos, sin):
    """Turn two features at a time, one head after the other."""
    half, heads = op.turned // 2, []
    for h in range(op.heads):
        x = values[op.part.value][..., op.part.start + op.part.step * h :][..., : op.size]
        found = [*x.unbind(-1)]
        for e in range(half):
            i, j = (2 * e, 2 * e + 1) if op.in_pairs else (e, half + e)
            found[i] = x[..., i] * cos[..., i] - x[..., j] * sin[..., i]
            found[j] = x[..., j] * cos[..., j] + x[..., i] * sin[..., j]
        heads += found
    return torch.stack(heads, -1)


def dropped_by_hand(weights, op, mine):
    """Drop weights of attention, one number at a time."""
    samples, heads, tokens, _ = weights.shape
    blocks = -(tokens // -16)
    stays = keeps(samples * heads * blocks * tokens * 16, op.odds, *mine.noise).tolist()
    found = torch.zeros_like(weights)
    for n in range(samples):
        for head in range(heads):
            for i in range(tokens):
                tile = ((n * heads + head) * blocks + i // 16) * tokens * 16
                for j in range(tokens):
                    found[n, head, i, j] = stays[tile + 16 * j + i % 16]
    return weights * found * op.odds.factor


def attended_in_torch(values, op, mine):
    """Attend as PyTorch does, which draws other numbers."""
    q, k, v = parts_of(values, op)
    if op.odds is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=op.causal, scale=op.scale)
    else:
        weights = (q @ k.mT * op.scale).softmax(-1)
        y = dropped_by_hand(weights, op, mine) @ v
    return y.transpose(1, 2).flatten(2)


def in_torch(curve, x):
    """What PyTorch has of this name."""
    if curve.name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return getattr(F, curve.name)(x, *[curve.number] * (curve.name == "leaky_relu"))


SIMPLE = {
    Curved: lambda op, values: in_torch(op.curve, values[op.source]),
    Multiply: lambda op, values: values[op.source] * values[op.other],
    Add: lambda op, values: values[op.source] + values[op.other],
    Cut: lambda op, values: values[op.source][..., op.start : op.start + op.width],
}


def in_float64(segment, xs, own):
    values = [x.double().requires_grad_() for x in xs]
    xs, leaves = list(values), []
    for op, mine in zip(segment.operations, own, strict=True):
        first, second = (
            None if p is None else p.double().requires_grad_() for p in (mine.first, mine.second)
        )
        leaves.append((first, second))
        if isinstance(op, Linear):
            moved = 2.0 ** torch.tensor(mine.shifts or [0] * len(first)).view(-1, 1)
            weight = Round.apply(first * moved, op.weight) / moved
            y = F.linear(Round.apply(values[op.source], op.inputs), weight, second)
        elif isinstance(op, Norm):
            x = values[op.source]
            x = x if op.size is None else x.view(*x.shape[:-1], x.shape[-1] // op.size, op.size)
            if op.centred:
                y = F.layer_norm(x, x.shape[-1:], first, second, op.eps)
            else:
                y = F.rms_norm(x, x.shape[-1:], first, op.eps)
            y = y.view(values[op.source].shape)
        elif type(op) in SIMPLE:
            y = SIMPLE[type(op)](op, values)
        elif isinstance(op, Dropout):
            x = values[op.source]
            y = x * keeps(x.numel(), op.odds, *mine.noise).view(x.shape) * op.odds.factor
        elif isinstance(op, Rotary):
            y = turned_by_hand(values, op, first.detach(), second.detach())
        else:
            y = attended_in_torch(values, op, mine)
        values.append(y)
    return [values[v] for v in segment.outputs], xs, leaves


@pytest.mark.parametrize(
    "segment",
    [
        *(block(), block(causal=True), by_channel(block()), dropping(), gated(), curves(), cut()),
        *(turned(), partly_turned(), normed_heads()),
        *(in_pairs(turned()), in_pairs(partly_turned())),
    ],
    ids=[
        *("block", "causal", "by channel", "dropout", "gated", "curves", "cut"),
        *("turned", "partly turned", "normed heads", "turned in pairs", "partly turned in pairs"),
    ],
)
def test_the_reference_is_near_autograd_in_float64(segment):
    """Rounding to formats as fine as 8 bits allow, and a mean over the noise of gradients."""
    wide = FixedPoint(8, 5)
    operations = [
        replace(op, inputs=wide, clip=True) if isinstance(op, Linear) else op
        for op in segment.operations
    ]
    segment = replace(segment, operations=tuple(operations))
    xs, own = inputs(segment, 4, 11), parameters(segment, 0, 4, 11)
    for op, mine in zip(segment.operations, own, strict=True):  # so that rounding changes no weight
        if isinstance(op, Linear):
            moved = 2.0 ** torch.tensor(mine.shifts or [0] * len(mine.first)).view(-1, 1)
            codes = encode(mine.first * moved, WEIGHT, rounding="nearest")
            mine.first = decode(codes, WEIGHT) / moved
    ys, kept = reference.forward(segment, xs, own)
    wanted, leaves, parameters64 = in_float64(segment, xs, own)
    for y, other in zip(ys, wanted, strict=True):
        close(y.double(), other, 2e-2)  # a code may lie on the other side of a middle
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(y.shape, generator=generator) for y in ys]
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    draws, total, of_weights = 64, 0, [0] * len(own)
    for i in range(draws):
        is_linear = [isinstance(op, Linear) for op in segment.operations]  # dropout stays as it was
        noisy = [
            replace(mine, noise=(i + 1, mine.noise[1])) if is_one else mine
            for mine, is_one in zip(own, is_linear, strict=True)
        ]
        (dx,), found = reference.backward(segment, kept, noisy, grads)
        total = total + dx / draws
        for n, (first, _) in enumerate(found):
            of_weights[n] = of_weights[n] + (0 if first is None else first / draws)
    close(total.double(), leaves[0].grad, 3e-2)
    for n, (first, _) in enumerate(parameters64):
        if first is not None and not isinstance(segment.operations[n], Rotary):
            close(of_weights[n].double(), first.grad, 3e-2)


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999, 1 - 1e-9])
def test_what_dropout_makes_0(p):
    odds = Odds(p)
    assert 0 < odds.threshold < 2**16
    assert abs(odds.threshold / 2**16 - p) <= 2**-16
    assert odds.factor * (1 - odds.threshold / 2**16) == 1
    stays = keeps(2**20, odds, 5, 6)
    share = 1 - stays.double().mean().item()
    expected = odds.threshold / 2**16
    assert abs(share - expected) < 5 * (expected * (1 - expected) / 2**20) ** 0.5
    halves = stays.view(-1, 2)  # of one word: they know nothing of each other
    both = (~halves).all(1).double().mean().item()
    assert abs(both - expected**2) < 5 * (expected**2 * (1 - expected**2) / 2**19) ** 0.5 + 1e-12
    assert torch.equal(keeps(1001, odds, 5, 6), stays[:1001])
    assert p < 1e-3 or not torch.equal(keeps(2**20, odds, 5, 7), stays)


def test_words_of_noise_decide_what_dropout_makes_0():
    """As ``fixedpoint_kernels.philox`` says it: low half first."""
    word = words(3, Key(11, 2**40 + 1)).tolist()
    odds = Odds(0.5)
    wanted = [half >= 2**15 for w in word for half in (w % 2**16, w // 2**16)]
    assert keeps(6, odds, 11, 2**40 + 1).tolist() == wanted


@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize(
    ("samples", "tokens", "width"), [(5, 3, 16), (3, 77, 48), (1, 1, 16), (9, 64, 64), (24, 7, 48)]
)
def test_dropout_has_the_bits_of_its_definition(path, samples, tokens, width):
    """Wherever a sample begins among the words of noise; and nothing is written behind."""
    segment = Segment((width,), (Dropout(0, Odds(0.3)),), (1,))
    made = program(segment, samples, tokens, path, threads=min(2, samples))
    xs, own = inputs(segment, samples, tokens), [Parameters(noise=(3, 2**33))]
    (y,), memory = execute.forward(made, xs, own)
    stays = keeps(y.numel(), Odds(0.3), 3, 2**33).view(y.shape)
    factor = torch.tensor(Odds(0.3).factor)
    assert torch.equal(y, torch.where(stays, xs[0] * factor, 0.0))
    grad = torch.randn(y.shape)
    (dx,), _ = execute.backward(made, memory, own, [grad])
    assert torch.equal(dx, torch.where(stays, grad * factor, 0.0))


def test_functions_are_near_those_of_float64():
    x = torch.cat([torch.linspace(-87, 0, 10001), torch.tensor([0.0, -1e-30])])
    exact = x.double().exp()
    assert ((functions.exp(x) - exact).abs() <= 2.4e-7 * exact).all()
    z = torch.linspace(-8, 8, 20001)
    wanted = 0.5 * (1 + torch.erf(z.double() * 0.5**0.5))
    assert ((functions.normal(z) - wanted).abs() <= 2.5e-7).all()
    assert functions.exp(torch.tensor([float("nan")])).isnan().all()


def wide(outputs, inputs):
    return Segment((inputs,), (Linear(0, SIGNED, WEIGHT, (outputs, inputs)),), (1,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segment((24,), (Norm(0),), (1,)), "multiples of 16"),
        (lambda: Segment((32,), (Linear(0, SIGNED, WEIGHT, (32, 16)),), (1,)), "takes 32"),
        (lambda: Segment((32,), (Add(0, 1),), (1,)), "not made before"),
        (lambda: Segment((32,), (Norm(0),), (0,)), "outputs must be"),
        (lambda: wide(32, 65_808), "65793 products or fewer"),
        (lambda: wide(65_808, 32), "65793 products or fewer"),
        (lambda: Segment((32,), (Norm(0), Norm(0)), (1,)), "each value"),
        (lambda: Segment((32,), (Norm(0, size=8),), (1,)), "multiple of 16 features, of 32"),
        (lambda: Segment((48,), (Norm(0, size=32),), (1,)), "multiple of 16 features, of 48"),
        (lambda: Segment((32,), (Norm(0, size=0),), (1,)), "multiple of 16 features, of 32"),
        (lambda: Segment((32,), (Linear(0, SIGNED, UNSIGNED, (32, 32)),), (1,)), "8 bits"),
        (lambda: Segment((16, 32), (Add(0, 1),), (2,)), "takes 16 and 32"),
        (
            lambda: Segment((32,), (Norm(0), Attention(*[Part(1, 0, 8)] * 3, 4, 8, 1.0)), (2,)),
            "of a head",
        ),
        (
            lambda: Segment((32,), (Norm(0), Attention(*[Part(1, 16, 16)] * 3, 2, 16, 1.0)), (2,)),
            "does not lie",
        ),
    ],
)
def test_segments_that_are_none(make, message):
    with pytest.raises(ValueError, match=message):
        make()
