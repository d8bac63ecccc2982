"""States in few bytes: kernels against the reference to the bit, and both against arithmetic of Python's."""

import math
from fractions import Fraction

import pytest
import torch

from fixedpoint_kernels import FixedPoint, compact
from fixedpoint_kernels.compact import Adam, Codes, Noise, Row, Sgd, cpu, reference
from fixedpoint_kernels.philox import Key, words

KINDS = "fixed", "signed", "squares"
SHAPES = (3, 5), (7, 700), (300, 256), (2, 3, 5, 5), (5, 1), (1, 1000), (0, 70), (129, 257)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def values(shape, kind, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * 0.01 * torch.rand(shape, generator=g).pow(6)
    x[torch.rand(shape, generator=g) < 0.1] = 0.0
    return x.square() if kind == "squares" else x


def value_of(code, kind):
    return {"fixed": code, "signed": code * abs(code), "squares": code**4}[kind]


@pytest.mark.parametrize("noise", [None, Noise(Key(1, 2, 77), 2), Noise(Key(1, 2, 128), 1)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_has_the_bits_of_the_reference(shape, kind, noise):
    x = values(shape, kind)
    found, wanted = cpu.encode(x, kind, noise), reference.encode(x, kind, noise)
    same(found, wanted)
    same(cpu.decode(found, kind), reference.decode(wanted, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_is_one_of_the_two_around_the_value_chosen_by_the_noise(kind):
    """In fractions: which code lies below, how far above it the value is, and what the noise says."""
    x, noise = values((3, 300), kind), Noise(Key(9, 4, 11), 1)
    codes = compact.encode(x, kind, noise)
    most = {"fixed": 2**15 - 1, "signed": 127, "squares": 255}[kind]
    drawn = words(1000, Key(9, 4, 0)).tolist()
    for i, (value, code) in enumerate(
        zip(x.flatten().tolist(), codes.codes.flatten().tolist(), strict=True)
    ):
        row, column = divmod(i, 300)
        scale = Fraction(codes.scales[row, column // 256].item())
        scaled = Fraction(value) / scale
        if kind == "signed" and code:
            assert (code > 0) == (value > 0)
        size = scaled if kind == "fixed" else abs(scaled)
        below = (
            math.floor(size)
            if kind == "fixed"
            else next(c for c in range(most + 1) if c == most or value_of(c + 1, kind) > size)
        )
        low, high = value_of(below, kind), value_of(below + 1, kind)
        half = drawn[(i + 11) >> 1] >> 16 * ((i + 11) & 1) & 0xFFFF
        chance = (Fraction(half * 0x9E35 % 2**16) + Fraction(1, 2)) / 2**16
        share = (size - low) / (high - low)
        if abs(share - chance) < Fraction(1, 2**15):  # float32 may see it otherwise
            continue
        own = abs(code) if kind == "signed" else code
        wanted = min(below + (share > chance), most)
        is_kept = kind == "squares" and value > 0  # above 0
        assert own == (max(wanted, 1) if is_kept else wanted), (i, value)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_unbiased_and_leaves_values_of_the_codes(kind):
    x = values((8, 512), kind) + (1e-6 if kind == "squares" else 0)
    draws = [compact.decode(compact.encode(x, kind, Noise(Key(3, i))), kind) for i in range(400)]
    found = torch.stack(draws).double()
    deviation = found.std(0).mean()
    # 5 deviations of a mean of means; a bias of half a step would be about one deviation
    assert (found.mean((0, 1, 2)) - x.double().mean()).abs() < 5 * deviation / (
        400 * 8 * 512
    ) ** 0.5
    again = compact.encode(draws[0], kind, Noise(Key(7, 7)))
    same(compact.decode(again, kind), draws[0])


def test_sizes_and_scales():
    x = values((4, 600), "fixed")
    for kind, item in (("fixed", 2), ("signed", 1), ("squares", 1)):
        assert compact.encode(x.abs(), kind).size_bytes == 2400 * item + 4 * 3 * 4
    lsb = compact.encode(x, "fixed").scales
    assert (lsb.frexp().mantissa == 0.5).all()  # powers of two
    most = x.abs().max()
    error = (compact.decode(compact.encode(x, "fixed"), "fixed") - x).abs().max()
    assert error <= most * 2.0**-15
    zero = compact.zeros(x, "squares")
    assert not zero.codes.any()
    assert not compact.decode(zero, "squares").any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_block_with_a_value_that_is_not_finite_is_nan(kind, wrong):
    x = values((2, 600), kind)
    x[1, 300] = wrong
    for found in (compact.encode(x, kind), reference.encode(x, kind, None)):
        back = compact.decode(found, kind)
        assert back[1, 256:512].isnan().all()
        assert int(back.isnan().sum()) == 256


def test_a_mean_of_squares_above_0_stays_above_0():
    x = torch.full((1, 256), 1e-30)
    x[0, 0] = 1.0
    back = compact.decode(compact.encode(x, "squares", Noise(Key(0, 0))), "squares")
    assert (back > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-38, 1e-42, 1e30])
def test_small_and_large_values(kind, scale):
    x = values((2, 300), kind) * scale
    same(cpu.encode(x, kind, None), reference.encode(x, kind, None))
    assert compact.decode(cpu.encode(x, kind, None), kind).isfinite().all()


def test_rows_are_blocks_of_their_own():
    x = values((6, 300), "signed")
    whole = compact.encode(x, "signed", Noise(Key(1, 1)))
    part = compact.encode(x[2:5], "signed", Noise(Key(1, 1, 600)))
    same(part, Codes(whole.codes[2:5], whole.scales[2:5]))


def test_one_dimension_is_refused():
    with pytest.raises(ValueError, match=r"two or more dimensions, got shape \(4,\)"):
        compact.encode(torch.zeros(4), "fixed")


MOVES = {
    "sgd": Sgd(0.1, 0.0, 0.0, False),
    "momentum": Sgd(0.1, 0.9, 1e-3, False),
    "nesterov": Sgd(0.1, 0.9, 1e-3, True),
    "adamw": Adam(1e-3, (0.9, 0.999), 1e-8, 0.01, True, 1),
    "adam": Adam(1e-3, (0.8, 0.99), 1e-6, 0.01, False, 1),
}


def rows(move, seed=1):
    """Compact masters that move, one that is float32, one without a format, one that stays."""
    g, found = torch.Generator().manual_seed(seed), []
    moments = KINDS[1:] if isinstance(move, Adam) else KINDS[1:2] if move.momentum else ()
    for i, shape in enumerate([(30, 300), (20,), (5, 70), (7, 3, 3, 40), (100, 513), (0, 64)]):
        master = torch.randn(shape, generator=g) * 0.1
        own = compact.encode(master, "fixed") if i != 1 else master
        kept = tuple(compact.zeros(master, kind) for kind in moments) if i != 1 else ()
        found.append(
            Row(
                own,
                torch.zeros(shape),
                None if i == 2 else FixedPoint(8, 6),
                5 + i,
                13 * i,
                None if i in (1, 3) else move,
                torch.randn(shape, generator=g),
                kept,
                900 + 4 * i,
            )
        )
    return found


def tensors_of(row):
    own = [*row.master] if isinstance(row.master, Codes) else [row.master]
    return [*own, row.weight, *(x for pair in row.moments for x in pair)]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", MOVES)
def test_a_step_has_the_bits_of_the_reference(name, rounding):
    found, wanted = rows(MOVES[name]), rows(MOVES[name])
    for step in (1, 2, 3):
        for run, own in ((compact, found), (reference, wanted)):
            if isinstance(MOVES[name], Adam):
                own = [r._replace(move=r.move and r.move._replace(step=step)) for r in own]
            run.step_many(own, rounding=rounding, seed=step)
        same([tensors_of(r) for r in found], [tensors_of(r) for r in wanted])


@pytest.mark.skipif(not cpu.has_bits_of_torch(), reason="torch rounds otherwise on this processor")
def test_threads_do_as_one(monkeypatch):
    found = []
    for chosen in (False, True):
        monkeypatch.setattr(cpu, "is_parallel", lambda _, chosen=chosen: chosen)
        own = rows(MOVES["adamw"])
        compact.step_many(own, rounding="stochastic", seed=3)
        encoded = compact.encode(values((50, 300), "fixed"), "fixed", Noise(Key(1, 1)))
        found.append([[tensors_of(r) for r in own], [*encoded, compact.decode(encoded, "fixed")]])
    same(*found)


@pytest.mark.parametrize("name", MOVES)
def test_a_step_is_torchs_but_for_the_rounding_of_states(name):
    """From zero moments and a master that is a number of the codes; the update in float64."""
    move = MOVES[name]
    row = rows(move)[0]
    start = compact.decode(row.master, "fixed").double().requires_grad_()
    kind = torch.optim.SGD if isinstance(move, Sgd) else torch.optim.AdamW
    options = {"lr": move.lr, "weight_decay": move.weight_decay}
    if isinstance(move, Sgd):
        options |= {"momentum": move.momentum, "nesterov": move.nesterov}
    else:
        kind = torch.optim.AdamW if move.decoupled else torch.optim.Adam
        options |= {"betas": move.betas, "eps": move.eps}
    optimizer = kind([start], **options)
    start.grad = row.grad.double()
    optimizer.step()
    compact.step_many([row], rounding="nearest", seed=0)
    lsb = row.master.scales.repeat_interleave(256, 1)[:, :300].double()
    off = compact.decode(row.master, "fixed").double() - start.detach()
    assert (off.abs() <= lsb * (1 + 1e-3)).all()
    for codes, kind, moment in zip(
        row.moments, ("signed", "squares"), list(optimizer.state[start].values())[-2:], strict=False
    ):
        moment = optimizer.state[start]["momentum_buffer"] if isinstance(move, Sgd) else moment
        got = compact.decode(codes, kind).double()
        share = {"signed": 2 * 127, "squares": 4 * 255**3}[kind] / {
            "signed": 127**2,
            "squares": 255**4,
        }[kind]
        assert ((got - moment).abs() <= moment.abs().max() * share * 1.01).all()
