"""The fused step against torch's own optimizer and the rounding kernels, bit for bit."""

import itertools

import pytest
import torch

from fixedpoint_kernels import FixedPoint, quantize_many, sgd
from fixedpoint_kernels.sgd import Moves, Rates, reference

SHAPES = (3, 5), (1,), (1023,), (0,), (3, 7, 5), (64, 65), (4096,)
FORMATS = [FixedPoint(8, 4), None, FixedPoint(4, 2), FixedPoint(6, 3, signed=False)]
NOISE = {"seed": 5, "stream": 70}

pytestmark = pytest.mark.skipif(
    not sgd.has_bits_of_torch(), reason="torch rounds sums of products twice on this processor"
)


def tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) * 0.3 for shape in SHAPES]


def formats():
    return list(itertools.islice(itertools.cycle(FORMATS), len(SHAPES)))


def step_many(masters, weights, fmts, moves, *, offsets, **options):
    """Do one step, with the arguments of the reference."""
    return sgd.step_many(sgd.Targets(masters, weights, fmts, offsets), moves, **options)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def rounded(masters, fmts, rounding, offsets):
    """Round by the kernel of before, which takes those with a format."""
    weights = [master.clone() for master in masters]
    having = [i for i, fmt in enumerate(fmts) if fmt is not None]
    quantize_many(
        [masters[i] for i in having],
        [fmts[i] for i in having],
        rounding=rounding,
        offsets=[offsets[i] for i in having],
        out=[weights[i] for i in having],
        **NOISE,
    )
    return weights


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_bits_are_those_of_torch_and_of_the_rounding_kernel(
    momentum, decay, nesterov, rounding
):
    nesterov = nesterov and momentum > 0
    offsets = [0, 3, 128, 0, 100, 0, 7]
    params, own, fmts = tensors(0), tensors(0), formats()
    weights = [torch.full_like(p, torch.nan) for p in params]
    momenta = [torch.full_like(p, torch.nan) if momentum else None for p in params]
    optimizer = torch.optim.SGD(
        params, lr=0.07, momentum=momentum, weight_decay=decay, nesterov=nesterov
    )
    rates = Rates(0.07, momentum, decay, nesterov)
    targets = sgd.Targets(own, weights, fmts, offsets)
    for step in range(4):
        grads = tensors(10 + step)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()
        count = len(params)
        moves = Moves(range(count), grads, momenta, [step == 0] * count, [rates] * count)
        kept = [grad.clone() for grad in grads]
        assert sgd.step_many(targets, moves, rounding=rounding, **NOISE)
        same(own, params)
        same(grads, kept)
        same(weights, rounded(params, fmts, rounding, offsets))
        if momentum:
            same(momenta, [optimizer.state[p]["momentum_buffer"] for p in params])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_some_move_with_rates_of_their_own_and_the_others_are_rounded(rounding):
    masters, twins, fmts = tensors(1), tensors(1), formats()
    grads, offsets = tensors(2), [0] * len(SHAPES)
    rows = [1, 2, 5]
    rates = [Rates(0.1, 0.0, 0.0, False), Rates(0.2, 0.9, 0.1, True), Rates(0.3, 0.5, 0.0, False)]
    found = []
    for run, own in ((step_many, masters), (reference.step_many, twins)):
        weights = [torch.zeros_like(p) for p in own]
        momenta = [None, torch.ones_like(own[2]), torch.ones_like(own[5])]
        moves = Moves(rows, [grads[i] for i in rows], momenta, [False, False, True], rates)
        done = run(own, weights, fmts, moves, rounding=rounding, offsets=offsets, **NOISE)
        assert done in (True, None)  # the reference returns nothing
        found.append([*own, *weights, momenta[1], momenta[2]])
    same(*found)
    still = [i for i in range(len(SHAPES)) if i not in rows]
    same([masters[i] for i in still], [tensors(1)[i] for i in still])


def test_other_rows_may_move_at_each_step():
    masters, twins, fmts = tensors(1), tensors(1), formats()
    count, rates = len(SHAPES), Rates(0.1, 0.0, 0.0, False)
    weights, others = ([torch.zeros_like(p) for p in masters] for _ in range(2))
    targets = sgd.Targets(masters, weights, fmts, [0] * count)
    for step, rows in enumerate(([0, 2], [1, 3, 5], [1, 3, 6], [])):
        grads = [tensors(step)[row] for row in rows]
        moves = Moves(rows, grads, [None] * len(rows), [False] * len(rows), [rates] * len(rows))
        assert sgd.step_many(targets, moves, rounding="nearest", **NOISE)
        reference.step_many(
            twins, others, fmts, moves, rounding="nearest", offsets=[0] * count, **NOISE
        )
        same([*masters, *weights], [*twins, *others])


def test_special_values_are_as_torchs():
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, 3e38, -3e38])
    p, g = special.repeat_interleave(8).clone(), special.repeat(8).clone()
    for decay, momentum in itertools.product((0.0, 0.1), (0.0, 0.9)):
        master, twin = p.clone(), p.clone()
        buffer = torch.zeros_like(p) if momentum else None
        rates = Rates(0.1, momentum, decay, False)
        moves = Moves([0], [g], [buffer], [True], [rates])
        weight = torch.empty_like(p)
        options = {"rounding": "nearest", "offsets": [0], **NOISE}
        assert step_many([master], [weight], [None], moves, **options)
        twin.grad = g
        torch.optim.SGD([twin], lr=0.1, momentum=momentum, weight_decay=decay).step()
        same(master, twin)
        assert torch.equal(master.signbit(), twin.signbit())
        same(weight, master)


def bfloat16(x):
    return x.bfloat16()


def spread(x):
    return x.new_zeros(*x.shape, 2)[..., 0]


@pytest.mark.parametrize("change", [bfloat16, spread, lambda x: x.to("meta"), lambda x: x[:-1]])
@pytest.mark.parametrize("which", ["master", "weight", "grad", "momentum"])
def test_what_it_does_not_take_is_left_as_it_was(change, which):
    found = {name: torch.rand(6) for name in ("master", "weight", "grad", "momentum")}
    found[which] = change(found[which])
    before = {n: x.clone() for n, x in found.items()}
    versions = [x._version for x in found.values()]
    moves = Moves([0], [found["grad"]], [found["momentum"]], [False], [Rates(1.0, 0.9, 0.1, False)])
    fmts, options = [FixedPoint(8, 4)], {"rounding": "nearest", "offsets": [0], **NOISE}
    assert not step_many([found["master"]], [found["weight"]], fmts, moves, **options)
    assert versions == [x._version for x in found.values()]
    if found[which].device.type == "cpu":
        same(found, before)


def test_gradients_lie_as_their_masters():
    master, grad = torch.rand(3, 4).t(), torch.rand(4, 3)
    options = {"rounding": "nearest", "offsets": [0], **NOISE}
    rates, wanted = [Rates(0.5, 0.0, 0.0, False)], master - 0.5 * grad
    moves = Moves([0], [grad], [None], [False], rates)
    assert not step_many([master], [torch.empty_like(master)], [None], moves, **options)
    turned = torch.empty_like(master).copy_(grad)
    moves = moves._replace(grads=[turned])
    assert step_many([master], [torch.empty_like(master)], [None], moves, **options)
    same(master, wanted)


def test_shared_memory_is_left_to_torch():
    x = torch.rand(12)
    moves = Moves([0], [x[:6]], [None], [False], [Rates(1.0, 0.0, 0.0, False)])
    options = {"rounding": "nearest", "offsets": [0], **NOISE}
    assert not step_many([x[3:9]], [torch.empty(6)], [None], moves, **options)


def test_autograd_knows_of_the_writes():
    x, weight = torch.rand(6), torch.rand(6)
    moves = Moves([0], [torch.rand(6)], [None], [False], [Rates(1.0, 0.0, 0.0, False)])
    options = {"rounding": "nearest", "offsets": [0], **NOISE}
    assert step_many([x], [weight], [None], moves, **options)
    assert x._version == weight._version == 1


def test_numbers_out_of_range_are_refused():
    x = torch.rand(3)
    moves = Moves([], [], [], [], [])
    with pytest.raises(ValueError, match="seed"):
        step_many(
            [x], [x.clone()], [None], moves, rounding="nearest", seed=-1, stream=0, offsets=[0]
        )


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    "change",
    [lambda x: x.t_(), lambda x: x.untyped_storage().resize_(0), lambda x: x.resize_(2, 2)],
)
def test_what_changes_between_steps_is_seen(which, change):
    found = [torch.rand(4, 3) for _ in range(3)]
    master, weight, momentum = found
    targets = sgd.Targets([master], [weight], [FixedPoint(8, 4)], [0])
    moves = Moves([0], [torch.rand(4, 3)], [momentum], [False], [Rates(0.1, 0.9, 0.0, False)])
    assert sgd.step_many(targets, moves, rounding="nearest", **NOISE)
    change(found[which])
    assert not sgd.step_many(targets, moves, rounding="nearest", **NOISE)


def test_other_memory_is_found_between_steps():
    master, weight = torch.nn.Parameter(torch.rand(6)), torch.rand(6)
    targets = sgd.Targets([master], [weight], [None], [0])
    grad = torch.rand(6)
    moves = Moves([0], [grad], [None], [False], [Rates(0.5, 0.0, 0.0, False)])
    with torch.no_grad():
        assert sgd.step_many(targets, moves, rounding="nearest", **NOISE)
        old = master.data
        master.data = master.detach() * 2
        wanted = master - 0.5 * grad
        kept = old.clone()
        assert sgd.step_many(targets, moves, rounding="nearest", **NOISE)
    same(master.data, wanted.data)
    same(weight, master.data)
    same(old, kept)


def test_many_threads_do_as_one(monkeypatch):
    from fixedpoint_kernels.sgd import cpu

    found = []
    for is_parallel in (False, True):
        monkeypatch.setattr(cpu, "is_parallel", lambda _, chosen=is_parallel: chosen)
        masters, grads, fmts = tensors(1), tensors(2), formats()
        weights, momenta = [torch.zeros_like(p) for p in masters], tensors(3)
        count, rates = len(masters), Rates(0.1, 0.9, 0.01, True)
        moves = Moves(range(count), grads, momenta, [False] * count, [rates] * count)
        options = {"rounding": "stochastic", "offsets": [5] * count, **NOISE}
        assert step_many(masters, weights, fmts, moves, **options)
        found.append([*masters, *weights, *momenta])
    same(*found)
