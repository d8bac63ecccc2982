"""Layers, batch normalisation and roundings as one integer kernel."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat
from marvin.export import describe, integer, round_sums, verify
from marvin.export.execute.arithmetic import round_fraction
from marvin.export.graph.bounds import first_value, value_of
from marvin.export.graph.nodes import Affine, Conv, Input, Network, Round
from marvin.export.passes.fold import absorbed, fold
from marvin.export.passes.shorten_scales import shorten_scales

SIGNED, UNSIGNED = FixedPoint(8, 0), FixedPoint(8, 0, signed=False)


def chain(scale, offset, *, weight=127, x=UNSIGNED, out=SIGNED, terms=1, channels=None):
    """Return a 1x1 convolution, a batch normalisation and a rounding: codes with their formats."""
    (scales, scale_fl), (offsets, offset_fl) = scale, offset
    codes = torch.full((len(scales), terms, 1, 1), weight)
    same = (1, 1), (0, 0), (1, 1), 1
    bias = None, FixedPoint(32, 0)
    operations = (
        Input("x", (), (terms, 1, 1)),
        Round("in", ("x",), x),
        Conv("conv", ("in",), codes, FixedPoint(8, 0), *bias, *same, per_channel=channels),
        Affine(
            "bn",
            ("conv",),
            torch.tensor(scales),
            FixedPoint(32, scale_fl),
            torch.tensor(offsets),
            FixedPoint(32, offset_fl),
        ),
        Round("out", ("bn",), out),
    )
    values = {"in": first_value(operations[1], (terms, 1, 1))}
    for op in operations[2:]:
        values[op.name] = value_of(op, [values[name] for name in op.inputs])
    return Network(operations, values, "trained")


def kernel(folded, x, zero_fl, fmt):
    """Return what an integer kernel makes of codes, one channel at a time, in float32."""
    out = []
    for channel, scale in enumerate(np.broadcast_to(folded.scales, len(folded.weight))):
        total = (folded.weight[channel].reshape(-1) * x).sum(-1) + folded.bias[channel]
        factor = np.float32(scale * 2.0 ** (fmt.fl - zero_fl))
        codes = np.rint(np.float32(total) * factor)
        out.append(np.clip(codes, fmt.min_code, fmt.max_code))
    return np.stack(out)


def by_fractions(network, x):
    """Return the codes in exact arithmetic."""
    bn, fmt = network.operation("bn"), network.operation("out").fmt
    rows = []
    for s, o in zip(bn.scale.tolist(), bn.offset.tolist(), strict=True):
        scale, offset = Fraction(s, 2**bn.scale_fmt.fl), Fraction(o, 2**bn.offset_fmt.fl)
        weight = int(network.operation("conv").weight[0, 0])
        rows.append([round_fraction(weight * int(v) * scale + offset, fmt) for v in x])
    return np.array(rows)


# of a signed 8-bit code, 7 bits: r may be 17
@pytest.mark.parametrize(("fl", "is_exact"), [(16, True), (17, True), (18, False)])
def test_the_limit_of_the_rule(fl, is_exact):
    """Scales whose products with sums have more bits than a float32, and all their ties."""
    scale = 2**15 + 1
    b = 2**14 - 5
    network = chain(([scale], fl), ([scale * b], fl), weight=1)
    folded = fold(network, network.operation("bn"), SIGNED)
    assert (folded is not None) is is_exact
    assert (network.operation("bn").name in absorbed(network)) is is_exact
    if folded:
        x = np.arange(256)[:, None]
        got = kernel(folded, x, 0, SIGNED)
        assert got.astype(int).tolist() == by_fractions(network, x[:, 0]).tolist()


@pytest.mark.parametrize(("fl", "is_exact"), [(22, True), (23, False)])
def test_zeros_that_a_channel_shares_do_not_count(fl, is_exact):
    """Five of them, in weights and offset: the limit of the rule is five further."""
    channels = ChannelFormat(FixedPoint(3, -5), (0, 5))
    scale, b = 2**15 + 1, 2**5 * (2**9 - 5)
    network = chain(
        ([scale, 0], fl), ([scale * b, 0], fl), weight=2**5, channels=channels, out=SIGNED
    )
    folded = fold(network, network.operation("bn"), SIGNED)
    assert (folded is not None) is is_exact
    assert (network.operation("bn").name in absorbed(network)) is is_exact
    lost = shorten_scales(network).operation("bn").scale[0] != scale
    assert lost is not is_exact
    if folded:
        assert folded.weight[0].tolist() == [[[1]]]
        assert folded.bias.tolist() == [2**9 - 5, 0]
        x = np.arange(256)[:, None]
        got = kernel(folded, x, 0, SIGNED)
        assert got.astype(int).tolist() == by_fractions(network, x[:, 0]).tolist()
    for given in (None, channels):  # without a format by channel, and with another offset
        scales, offsets = ([scale, 0], fl), ([scale * (b + (given is not None)), 0], fl)
        other = chain(scales, offsets, weight=2**5, channels=given)
        assert fold(other, other.operation("bn"), SIGNED) is None


@pytest.mark.parametrize(("fl", "is_exact"), [(17, True), (18, False)])
def test_the_limit_of_a_layer_alone(fl, is_exact):
    """Sums of 27 bits at their channel's own fl."""
    channels = ChannelFormat(FixedPoint(8, fl), (0, 5))
    network = chain(([1, 1], 0), ([0, 0], 0), terms=4096)
    conv = network.operation("conv")
    weight = torch.zeros_like(conv.weight)
    weight[0], weight[1, :9] = 127 * 2**5, 3
    conv = replace(conv, weight=weight, weight_fmt=channels.whole(), per_channel=channels)
    values = {"in": network.values["in"], "conv": value_of(conv, [network.values["in"]])}
    short = Network((*network.operations[:2], conv), values, "trained")
    assert values["conv"].channels[0].magnitude >> 5 > 2**26
    assert (fold(short, conv, SIGNED) is not None) is is_exact
    assert fold(short, conv, None) is None
    few = replace(conv, weight=torch.where(torch.arange(4096)[:, None, None] < 500, weight, 0))
    values["conv"] = value_of(few, [network.values["in"]])
    assert fold(Network((*network.operations[:2], few), values, "trained"), few, None) is not None


def test_beyond_the_limit_float32_is_wrong():
    """The reason for the rule: just above a tie, float32 has the tie itself."""
    r = 25  # t * s / 2**r is k + 1/2 + 2**-r, k even
    factors = ((t, (2**24 + 1) * pow(t, -1, 2**r) % 2**r) for t in range(3, 128, 2))
    total, s = next((t, s) for t, s in factors if s < 2**24 and (t * s >> r) % 2 == 0)
    exact = Fraction(total * s, 2**r)
    got = np.rint(np.float32(total) * np.float32(s * 2.0**-r))
    assert round(exact) == got + 1
    network = chain(([s], r), ([s * (total - 1)], r), weight=1)
    assert fold(network, network.operation("bn"), SIGNED) is None


def test_sums_beyond_float32_saturate():
    """Sums of up to 2**27: those that float32 rounds are far outside the codes."""
    terms, fmt = 4096, FixedPoint(8, 0, signed=False)
    network = chain(([3], 16), ([0], 16), terms=terms, out=fmt)
    assert network.values["conv"].magnitude > 2**26
    folded = fold(network, network.operation("bn"), fmt)
    assert folded is not None
    chance = np.random.default_rng(0)
    x = chance.integers(0, 256, (400, terms))
    x[np.arange(terms) > np.arange(400)[:, None]] = 0
    got = kernel(folded, x, 0, fmt)[0]
    want = [round_fraction(Fraction(127 * 3 * int(v), 2**16), fmt) for v in x.sum(1)]
    assert got.astype(int).tolist() == want
    assert 255 in want
    assert len(set(want)) > 100


def test_signs_go_to_the_weights_where_they_can():
    scales, offsets = [-5, 7, 0, -3], [-5 * 11, 7 * -2, 77, 0]
    for weight, flipped in ((-127, True), (-128, False)):
        network = chain((scales, 9), (offsets, 9), weight=weight, x=SIGNED)
        folded = fold(network, network.operation("bn"), SIGNED)
        assert folded is not None
        assert (folded.scales[[0, 3]] > 0).all() == flipped
        assert (folded.weight[2] == 0).all()
        x = np.arange(-128, 128)[:, None]
        got = kernel(folded, x, 0, SIGNED)
        assert got.astype(int).tolist() == by_fractions(network, x[:, 0]).tolist()


def test_offsets_that_are_no_multiples_are_not_folded():
    network = chain(([5], 9), ([7], 9))
    assert network.operation("bn").shift(0) is None
    assert fold(network, network.operation("bn"), SIGNED) is None
    coarse = replace(network.operation("bn"), offset_fmt=FixedPoint(32, 8))
    assert coarse.shift(0) is None


def test_scales_become_as_short_as_they_must():
    network = chain(([40_001, -30_003, 9], 20), ([40_001 * 50, 30_003 * 9, 9 * 89], 20))
    bn = network.operation("bn")
    assert fold(network, bn, SIGNED) is None
    short = shorten_scales(network)
    new = short.operation("bn")
    assert fold(short, new, SIGNED) is not None
    assert new.scale.tolist() == [40_000, -30_000, 9]  # 3 bits less, or so few that all are exact
    assert new.shift(0)[0].tolist() == [50, -9, 89]
    assert short.values["bn"].high < network.values["bn"].high
    wide = chain(([40_001], 20), ([0], 20), out=FixedPoint(9, 0))
    assert shorten_scales(wide).operation("bn") is wide.operation("bn")


def test_an_offset_stays_within_its_format():
    """The nearest multiple of the shorter scale is beyond the largest code of 32 bits."""
    scale, b = 26_311, 81_619
    network = chain(([scale], 24), ([scale * b], 24))
    new = shorten_scales(network).operation("bn")
    assert new.scale.tolist() == [26_368]
    assert new.offset.tolist() == [26_368 * ((2**31 - 1) // 26_368)]


@pytest.mark.parametrize(("scale", "is_kept"), [(501, True), (33, True), (31, False), (3, False)])
def test_a_scale_that_long_sums_leave_no_bits_stays_where_it_moves_a_code(scale, is_kept):
    """Sums of nearly ``2**25``, times ``2**-31``: a scale of 32 moves them by half a step."""
    network = chain(([scale], 31), ([0], 31), terms=2**10)
    assert network.values["conv"].magnitude.bit_length() == 25
    assert fold(network, network.operation("bn"), SIGNED) is None
    found = shorten_scales(network).operation("bn").scale.tolist()
    assert found == ([scale] if is_kept else [0])


@pytest.mark.parametrize("bits", [(4, 4), (6, 6), (8, 8)])
def test_float32_has_what_is_made_of_batch_normalisations(ranged, bits):
    _, network, x = ranged(bits=bits)
    network = round_sums(network, x)
    names = {op.name for op in network.operations if isinstance(op, Affine)}
    assert names <= {row.name for row in verify(network, 2 * x) if row.verdict == "exact"}


def test_offsets_are_near_those_of_training(ranged):
    model, network, _ = ranged(bits=(8, 8))
    for op in network.operations:
        if isinstance(op, Affine):
            norm = model.get_submodule(op.name)
            assert isinstance(norm, nn.BatchNorm2d)
            rate = norm.weight / (norm.running_var + norm.eps).sqrt()
            want = norm.bias - norm.running_mean * rate
            found = op.offset.double() * op.offset_fmt.lsb
            step = rate.abs().double() * 2.0 ** -network.values[op.inputs[0]].fl
            rounded = (op.scale_fmt.lsb / rate.abs().clamp(min=1e-9)).double() * want.abs()
            gap = (found - want.double()).abs()
            assert (gap <= step + rounded + op.offset_fmt.lsb).all()
            assert op.shift(network.values[op.inputs[0]].fl) is not None


def test_the_reference_computes_what_fractions_do():
    network = chain(([40_001, -30_003, 0], 20), ([40_001 * 50, 30_003 * 9, 9 * 89], 20))
    x = torch.arange(256.0).reshape(-1, 1, 1, 1)
    got = integer.run_all(network, x)["out"][:, :, 0, 0].T
    assert got.tolist() == by_fractions(network, np.arange(256)).tolist()


class Smooth(nn.Module):
    """A small layer, batch normalisation and SiLU: the sums do not fill the format in front of the table."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 3, 3, padding=1), nn.Conv1d(3, 3, 3, padding=1)
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        x = F.silu(self.norm(self.second(F.relu(self.first(x)))))
        return self.head(x.mean(2))


@pytest.mark.parametrize("seed", [31, 32])
def test_shorter_scales_reach_no_code_that_a_table_lacks(seed):
    torch.manual_seed(seed)
    model = Smooth().eval()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.1, 2)
    nn.init.normal_(model.norm.weight)
    x = torch.randn(16, 2, 8)
    fixed = marvin.freeze(marvin.calibrate(model, [x], bits=8))
    found = integer.run(describe(fixed, x), x)
    torch.testing.assert_close(found.float(), fixed(x), atol=0.05, rtol=0)
