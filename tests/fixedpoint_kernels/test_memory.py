"""What kernels may read and write: outputs apart from inputs, and tensors that lie in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fixedpoint_kernels import (
    FixedPoint,
    histogram_candidates,
    pack,
    quantize,
    quantize_many,
)
from fixedpoint_kernels.memory import Places, are_apart, check_apart, places_of

FMT = FixedPoint(8, 4)


def many(x, out):
    return quantize_many([x, torch.ones(3)], [FMT, FMT], out=[out, torch.empty(3)])


def one(x, out):
    return quantize(x, FMT, out=out)


def shifted(b):
    return b[:-200], b[200:]


def transposed(b):
    return b[:900].view(30, 30), b[:900].view(30, 30).t()


def other_type(b):
    return b[:500], b[:250].view(torch.bfloat16)


def every_second(b):
    return b[:900], b[::2][:900]


def repeated(b):
    return b[:900].view(30, 30), torch.zeros(30, 1).expand(30, 30)


def sliding(b):
    return b[:30].view(10, 3), torch.zeros(12).unfold(0, 3, 1)


def in_place_repeated(b):
    return b[:1].expand(30), b[:1].expand(30)


SHARED = shifted, transposed, other_type, every_second, repeated, sliding, in_place_repeated


@pytest.mark.parametrize("call", [one, many])
@pytest.mark.parametrize("pair", SHARED)
def test_an_output_that_overlaps_its_input_or_itself_is_refused(pair, call):
    b = torch.randn(2000)
    before = b.clone()
    with pytest.raises(RuntimeError, match=r"out must (share no memory|have memory of its own)"):
        call(*pair(b))
    assert torch.equal(b, before)


def columns(b):
    return b.view(-1, 2)[:, 0], b.view(-1, 2)[:, 1]


def halves(b):
    return b[:1000], b[1000:]


def itself(b):
    return b, b


def its_view(b):
    return b, b.view(-1)


def its_strided_view(b):
    return b.view(-1, 2).t(), b.view(-1, 2).t()


def empty(b):
    return b[5:5], b[5:5]


APART = columns, halves, itself, its_view, its_strided_view, empty


@pytest.mark.parametrize("call", [one, many])
@pytest.mark.parametrize("pair", APART)
def test_outputs_apart_from_their_inputs_or_in_place_are_taken(pair, call):
    x, out = pair(torch.randn(2000))
    expected = quantize(x.clone(), FMT)
    call(x, out)
    assert torch.equal(out, expected)


def test_outputs_of_a_list_are_apart_from_each_other_and_from_other_inputs():
    a, b, w = torch.randn(60), torch.randn(60), torch.randn(60, 2)
    for xs, out in [
        ([a, b], [w.view(-1)[:60]] * 2),
        ([a, b], [w.view(-1)[:60], w.view(-1)[59:119]]),
        ([a, b], [b, a]),
        ([a, a], [a, b]),
        ([a[:-1], b[:-1]], [a[1:], b[1:]]),
        ([w[:, 0], w[:, 1]], [w[:, 0], w[:, 0]]),
    ]:
        with pytest.raises(RuntimeError, match="out must share no memory with an input or another"):
            quantize_many(xs, [FMT, FMT], out=out)
    expected = quantize_many([w[:, 0].clone(), w[:, 1].clone()], [FMT, FMT])
    quantize_many([w[:, 0], w[:, 1]], [FMT, FMT], out=[w[:, 0], w[:, 1]])  # columns, in place
    assert torch.equal(w.T, torch.stack(expected))
    twice = quantize_many([a, a], [FMT, FMT], out=[torch.empty(60), b])  # inputs may be the same
    assert torch.equal(twice[1], quantize(a, FMT, stream=1))


@given(st.data())
def test_what_shares_memory_is_what_shares_elements(data):
    """Against the sets of places that the tensors have."""
    base, places = torch.zeros(40), torch.arange(40)

    def view(sizes):
        strides = data.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
        offset = data.draw(st.integers(0, 9))
        taken = places.as_strided(sizes, strides, offset).flatten().tolist()
        return base.as_strided(sizes, strides, offset), taken

    shapes = st.lists(st.integers(0, 3), min_size=1, max_size=3)
    shapes = data.draw(st.lists(shapes, min_size=1, max_size=3))
    pairs = [(view(sizes), view(sizes)) for sizes in shapes]
    xs, ys = [x for (x, _), _ in pairs], [y for _, (y, _) in pairs]
    written = [place for _, (_, taken) in pairs for place in taken]
    read = {place for (_, taken), (_, own) in pairs if taken != own for place in taken}
    if len(set(written)) == len(written) and not read & set(written):
        check_apart(xs, ys)
    else:
        with pytest.raises(RuntimeError, match="out must"):
            check_apart(xs, ys)


@given(st.lists(st.tuples(*[st.integers(0, 60)] * 2, st.integers(0, 9)), max_size=6))
def test_addresses_that_are_apart_share_no_element(rows):
    xs, ys, sizes = zip(*rows, strict=True) if rows else ((), (), ())
    written = [y + i for y, n in zip(ys, sizes, strict=True) for i in range(n)]
    read = {x + i for x, y, n in rows if x != y for i in range(n)}
    is_apart = len(set(written)) == len(written) and not read & set(written)
    found = are_apart(Places(tuple(xs), tuple(ys), tuple(sizes), 1))
    assert is_apart or not found  # where it says no, elements are looked at
    if not [x for x, y, n in rows if x != y and n]:
        assert found == is_apart


def test_an_output_that_requires_a_gradient_is_refused():
    weight = torch.ones(3, requires_grad=True)
    for call in (one, many):
        with pytest.raises(RuntimeError, match="out must not require a gradient"):
            call(torch.ones(3), weight)
    with torch.no_grad():
        assert quantize(torch.full((3,), 0.5), FMT, out=weight) is weight
    assert weight.tolist() == [0.5] * 3


def test_outputs_that_are_no_tensors_and_positions_that_are_no_integers_are_named():
    with pytest.raises(TypeError, match="out must be a tensor, got list"):
        quantize(torch.ones(2), FMT, out=[1.0, 2.0])
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        quantize_many([torch.ones(2)] * 3, [FMT] * 3, offsets=[0, 1.5, 3])
    with pytest.raises(ValueError, match="offset must be"):
        quantize_many([torch.ones(2)] * 2, [FMT] * 2, offsets=[0, 2**62])
    with pytest.raises(ValueError, match="stream must be"):
        quantize_many([torch.ones(2)] * 2, [FMT] * 2, stream=2**63 - 1)


def test_a_negation_that_waits_may_be_written_to():
    for n in (1, 4):  # of one element, it has no gaps
        base = torch.complex(torch.ones(n), torch.zeros(n))
        out = base.conj().imag
        assert out.is_neg()
        for call in (one, many):
            call(torch.full((n,), 0.5), out)
            assert out.tolist() == [0.5] * n
            assert base.imag.tolist() == [-0.5] * n
            out.zero_()


@pytest.mark.parametrize(
    "run",
    [
        lambda x: pack(x.to(torch.int8), 4),
        lambda x: histogram_candidates(x, [FMT], resolution=50),
    ],
)
def test_kernels_that_no_trace_sees_say_so(run):
    x = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"outside of torch\.jit\.trace and torch\.onnx"):
        torch.jit.trace(run, x, check_trace=False)
    with (
        FakeTensorMode() as mode,
        pytest.raises(TypeError, match="FakeTensor, which has no values"),
    ):
        run(mode.from_tensor(x))


def test_addresses_are_those_of_torch():
    xs = [torch.ones(5), torch.ones(9)[4:], torch.empty(0), torch.ones(6)[6:]]
    places = tuple(x.data_ptr() for x in xs)
    assert places_of(xs, []) == Places(places, (), (5, 5, 0, 0), 4)
    assert places_of(xs, xs) == Places(places, places, (5, 5, 0, 0), 4)
    assert places_of([torch.ones(4, 4).t()], []) is None


@pytest.mark.parametrize("script", ["lazy_tensors.py", "operators_by_hand.py"])
def test_nothing_that_is_not_there_is_read(script):
    """Run in a process of its own, which reading beyond a tensor may end."""
    path = Path(__file__).parent / script
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "cases" in done.stdout.splitlines()[-1]
