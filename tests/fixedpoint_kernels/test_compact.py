"""States in few bytes: kernels against the reference to the bit, and both against arithmetic of Python's."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fixedpoint_kernels import FixedPoint, compact
from fixedpoint_kernels.compact import (
    Adam,
    Codes,
    Moves,
    Noise,
    Row,
    Sgd,
    Sum,
    Targets,
    cpu,
    flattened,
    reference,
)
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


def added():
    """Codes and float32 tensors, what is added to each, and the noise of most codes."""
    g, before, xs, keys = torch.Generator().manual_seed(0), [], [], []
    for i, shape in enumerate([*SHAPES, (700, 300), (2, 40_000)]):
        x, is_coded = torch.randn(shape, generator=g), i not in (1, 9)
        before.append(compact.encode(x, "signed") if is_coded else x)
        xs.append(torch.randn(shape, generator=g) * 0.1)
        noise = Noise(Key(5, 40 + i, 7 * i), i % 4)
        keys.append(noise if is_coded and i != 2 else None)
    return before, xs, keys


def sums_of(before, xs):
    """What is to be encoded, by numpy."""
    sums = []
    for own, x in zip(before, xs, strict=True):
        if isinstance(own, Codes):
            codes = own.codes.flatten(1).numpy().astype(np.int64)
            blocks = own.scales.numpy().repeat(256, 1)[:, : codes.shape[1]]
            own = ((codes * abs(codes)).astype(np.float32) * blocks).reshape(x.shape)
        sums.append(np.asarray(own) + x.numpy())
    return sums


@pytest.mark.parametrize("parallel", [False, True])
def test_sums_have_the_bits_of_adding_and_encoding(parallel, monkeypatch):
    monkeypatch.setattr(cpu, "is_parallel", lambda _: parallel)
    before, xs, keys = added()
    old = copy.deepcopy(before)
    found, norms = compact.add_many(before, xs, keys)
    same(before, old)
    for own, x, key, total, norm, result in zip(
        before, xs, keys, sums_of(before, xs), norms.tolist(), found, strict=True
    ):
        wanted = torch.from_numpy(total)
        if isinstance(own, Codes):
            assert result.before is own
            same(result.x, x)
            result, wanted = result.codes, reference.encode(wanted, "signed", key)
        same(result, wanted)
        exact = math.fsum(v * v for v in total.flatten().tolist()) ** 0.5
        assert abs(norm - exact) <= 1e-12 * exact  # float64, added up in another order


def test_sums_of_the_reference_and_of_other_strides():
    before, xs, keys = added()
    wide = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in xs]
    results = [
        compact.add_many(before, wide, keys),
        reference.add_many(before, xs, keys, torch.float64),
        compact.add_many(before, xs, keys),
    ]
    codes = [
        [x.codes if isinstance(x, Sum) else x.contiguous() for x in sums] for sums, _ in results
    ]
    for other, (_, norms) in zip(codes[:2], results, strict=False):
        same(other, codes[2])
        torch.testing.assert_close(norms, results[2][1], rtol=1e-12, atol=0)  # another order


def test_a_sum_that_is_not_finite_is_nan_in_its_block_alone():
    before, xs, keys = added()
    xs[8][3, 260] = math.inf
    found, norms = compact.add_many(before, xs, keys)
    assert [i for i, norm in enumerate(norms.tolist()) if not math.isfinite(norm)] == [8]
    back = compact.decode(found[8].codes, "signed")
    assert back[3, 256:].isnan().all()
    assert int(back.isnan().sum()) == 44


MOVES = {
    "sgd": Sgd(0.1, 0.0, 0.0, False),
    "momentum": Sgd(0.1, 0.9, 1e-3, False),
    "nesterov": Sgd(0.1, 0.9, 1e-3, True),
    "adamw": Adam(1e-3, (0.9, 0.999), 1e-8, 0.01, True, 1),
    "eps0": Adam(1e-3, (0.9, 0.999), 0.0, 0.0, True, 1),
    "adam": Adam(1e-3, (0.8, 0.99), 1e-6, 0.01, False, 1),
}


def case(move, seed=1):
    """Compact masters that move, float32 ones that do if they can, one without a format, some that stay."""
    g, rows, moving, grads = torch.Generator().manual_seed(seed), [], [], []
    moments = KINDS[1:] if isinstance(move, Adam) else KINDS[1:2] if move.momentum else ()
    shapes = (30, 300), (20,), (5, 70), (7, 3, 3, 40), (100, 513), (0, 64), (9000,), (17, 3, 7, 7)
    for i, shape in enumerate([*shapes, (4, 5)]):
        master = torch.randn(shape, generator=g) * 0.1
        is_float = i in (1, 6, 8)
        own = master if is_float else compact.encode(master, "fixed")
        kept = [] if i == 1 else moments
        kept = [
            torch.randn(shape, generator=g) if is_float else compact.zeros(master, k) for k in kept
        ]
        fmt = None if i in (2, 8) else FixedPoint(8, 6)
        if not (i in (1, 3) or (is_float and isinstance(move, Adam))):
            moving.append(i)
            grads.append(torch.randn(shape, generator=g))
        rows.append(Row(own, torch.zeros(shape), fmt, 5 + i, 13 * i, tuple(kept), 900 + 4 * i))
    return rows, Moves(moving, grads, [move] * len(moving))


def tensors_of(rows):
    return [row.tensors for row in rows]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", MOVES)
def test_a_step_has_the_bits_of_the_reference(name, rounding):
    (found, moves), (wanted, _) = case(MOVES[name]), case(MOVES[name])
    targets = Targets(found)
    key = {"stream": 3, "noise": 70, "rounding": rounding}
    for step in (1, 2, 3):
        if isinstance(MOVES[name], Adam):
            moves = moves._replace(moves=[move._replace(step=step) for move in moves.moves])
        compact.step_many(targets, moves, seed=step, **key)
        reference.step_many(wanted, moves, seed=step, **key)
        same(tensors_of(found), tensors_of(wanted))


@pytest.mark.skipif(not cpu.has_bits_of_torch(), reason="torch rounds otherwise on this processor")
def test_targets_that_got_other_memory_are_looked_up_again():
    """The same tensors: their memory is another one, and what lay in the old one stays."""
    (found, moves), (wanted, _) = case(MOVES["momentum"]), case(MOVES["momentum"])
    targets, old = Targets(found), []
    for step in (1, 2):
        compact.step_many(targets, moves, rounding="nearest", seed=step)
        reference.step_many(wanted, moves, rounding="nearest", seed=step, stream=0, noise=0)
        same(tensors_of(found), tensors_of(wanted))
        old += [x.data for x in found[0].tensors]  # whose memory lives on
        for x in found[0].tensors:
            x.data = x.data.clone()
    old.append(found[4].weight.data)
    for row in (found[4], wanted[4]):  # and without a kernel
        row.weight.data = row.weight.data.t().contiguous().t()
    compact.step_many(targets, moves, rounding="nearest", seed=3)
    reference.step_many(wanted, moves, rounding="nearest", seed=3, stream=0, noise=0)
    same(tensors_of(found), tensors_of(wanted))


def test_targets_know_their_tensors():
    found, _ = case(MOVES["momentum"])
    targets, tensors = Targets(found), flattened(row.master for row in found)
    tensors += [row.weight for row in found] + flattened(x for row in found for x in row.moments)
    assert targets.holds(tensors)
    assert not targets.holds(tensors[:-1])
    assert not targets.holds([*tensors[:-1], tensors[-1].clone()])


def test_a_float32_master_that_is_to_move_by_adam_is_refused():
    found, moves = case(MOVES["adam"])
    rows = [*moves.rows[:-1], 8]
    with pytest.raises(TypeError, match="must move by Sgd, got Adam"):
        compact.step_many(Targets(found), moves._replace(rows=rows), rounding="nearest", seed=0)


@pytest.mark.skipif(not cpu.has_bits_of_torch(), reason="torch rounds otherwise on this processor")
def test_threads_do_as_one(monkeypatch):
    found = []
    for chosen in (False, True):
        monkeypatch.setattr(cpu, "is_parallel", lambda _, chosen=chosen: chosen)
        own, moves = case(MOVES["adamw"])
        compact.step_many(Targets(own), moves, rounding="stochastic", seed=3)
        encoded = compact.encode(values((50, 300), "fixed"), "fixed", Noise(Key(1, 1)))
        found.append([tensors_of(own), [*encoded, compact.decode(encoded, "fixed")]])
    same(*found)


@pytest.mark.parametrize("name", MOVES)
def test_a_step_is_torchs_but_for_the_rounding_of_states(name):
    """From zero moments and a master that is a number of the codes; the update in float64."""
    move = MOVES[name]
    (row, *_), moves = case(move)
    start = compact.decode(row.master, "fixed").double().requires_grad_()
    kind = torch.optim.SGD if isinstance(move, Sgd) else torch.optim.AdamW
    options = {"lr": move.lr, "weight_decay": move.weight_decay}
    if isinstance(move, Sgd):
        options |= {"momentum": move.momentum, "nesterov": move.nesterov}
    else:
        kind = torch.optim.AdamW if move.decoupled else torch.optim.Adam
        options |= {"betas": move.betas, "eps": move.eps}
    optimizer = kind([start], **options)
    start.grad = moves.grads[0].double()
    optimizer.step()
    only = Moves([0], moves.grads[:1], [move])
    compact.step_many(Targets([row]), only, rounding="nearest", seed=0)
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


@pytest.mark.parametrize(
    "change",
    [
        lambda codes, scales: (codes[:2], scales),
        lambda codes, scales: (codes, scales[:, :1].clone()),
        lambda codes, scales: (codes.float(), scales),
        lambda codes, scales: (codes, scales.double()),
        lambda codes, scales: (codes.flatten(), scales),
        lambda codes, scales: (codes.T.contiguous().T, scales),
        lambda codes, scales: (codes, scales.T.contiguous().T),
    ],
    ids=["rows", "blocks", "float", "float64", "flat", "transposed", "transposed scales"],
)
def test_what_kernels_would_read_behind_is_refused(change):
    x = values((3, 300), "signed")
    for kind in KINDS:
        wrong = Codes(*change(*compact.encode(x.abs(), kind)))
        with pytest.raises(ValueError, match=f"{kind} codes must be torch.* contiguous, got"):
            compact.decode(wrong, kind)
    wrong = Codes(*change(*compact.encode(x, "signed")))
    with pytest.raises(ValueError, match="signed codes must be"):
        compact.add_many([wrong], [x], [None])
    masters = compact.encode(x, "fixed")
    for row in (
        Row(Codes(*change(*masters)), x.clone(), None, 0, 0),
        Row(masters, x.clone(), None, 0, 0, (wrong,)),
        Row(masters, x.clone(), None, 0, 0, (compact.encode(x, "signed"), wrong)),
    ):
        with pytest.raises(ValueError, match="codes must be"):
            Targets([row])
    more = compact.encode(torch.cat([x, x]), "signed")  # fewer rows abort the process
    with pytest.raises(ValueError, match=r"signed codes must be torch.int8 of \(3, 300\)"):
        compact.add_many([more], [x], [None])
    with pytest.raises(ValueError, match=r"signed codes must be torch.int8 of \(3, 300\)"):
        Targets([Row(masters, x.clone(), None, 0, 0, (more,))])
    with pytest.raises(ValueError, match="before must have shape"):
        compact.add_many([x[:2]], [x], [None])
    with pytest.raises(ValueError, match="a state must be of"):
        Targets([Row(x[:2], x.clone(), None, 0, 0)])


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, moves: (rows, moves._replace(grads=[moves.grads[0][:3], *moves.grads[1:]])),
        lambda rows, moves: (rows, moves._replace(grads=[moves.grads[0].T, *moves.grads[1:]])),
        lambda rows, moves: ([rows[0]._replace(moments=()), *rows[1:]], moves),
        lambda rows, moves: ([rows[0]._replace(moments=rows[0].moments * 2), *rows[1:]], moves),
    ],
    ids=["shorter gradient", "turned gradient", "no moments", "more moments"],
)
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_step_refuses_what_it_would_read_behind(name, change):
    rows, moves = case(MOVES[name])
    before = [[x.clone() for x in row.tensors] for row in rows]
    changed, moved = change(rows, moves)
    with pytest.raises(ValueError, match=r"must (have (its weight's shape|\d moments)|be torch)"):
        compact.step_many(Targets(changed), moved, rounding="nearest", seed=0)
    same(tensors_of(rows), before)


@pytest.mark.skipif(not cpu.has_bits_of_torch(), reason="torch rounds otherwise on this processor")
def test_a_weight_that_became_bfloat16_is_written_as_such():
    (found, moves), (wanted, _) = case(MOVES["momentum"]), case(MOVES["momentum"])
    room = torch.full((30 * 300 * 2,), -1.0, dtype=torch.bfloat16)
    for row, more in (found[0], room[: 30 * 300]), (wanted[0], room[: 30 * 300].clone()):
        row.weight.data = more.view(30, 300)
    compact.step_many(Targets(found), moves, rounding="nearest", seed=3)
    reference.step_many(wanted, moves, rounding="nearest", seed=3, stream=0, noise=0)
    same(tensors_of(found), tensors_of(wanted))
    assert (room[30 * 300 :] == -1).all()


def test_a_weight_that_got_memory_of_another_shape_is_refused():
    rows, moves = case(MOVES["momentum"])
    targets = Targets(rows)
    compact.step_many(targets, moves, rounding="nearest", seed=0)
    rows[0].weight.data = torch.zeros(15, 600)
    moves = moves._replace(grads=[moves.grads[0].view(15, 600), *moves.grads[1:]])
    with pytest.raises(ValueError, match=r"fixed codes must be .*of \(15, 600\)"):
        compact.step_many(targets, moves, rounding="nearest", seed=0)


def test_sums_of_other_dtypes_are_refused():
    x = torch.randn(3, 300)
    own = compact.encode(x, "signed")
    for before, more in (own, x.double()), (own, x.bfloat16()), (x.bfloat16(), x):
        with pytest.raises(TypeError, match=r"must be float32 \(write x.float\(\)\), got"):
            compact.add_many([before], [more], [None])
    with pytest.raises(ValueError, match=r"zip\(\)"):
        compact.add_many([own], [x], [])


def test_codes_of_freed_memory_are_refused():
    x = torch.randn(3, 300)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="its storage was freed"):
        compact.encode(x, "fixed")
