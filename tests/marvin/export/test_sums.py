import pytest
import torch

from fixedpoint_kernels import FixedPoint
from marvin.export import ExportError, compare, integer, round_sums
from marvin.export.execute.simulate import simulate
from marvin.export.graph.bounds import first_value, value_of
from marvin.export.graph.functions import Clip, Table
from marvin.export.graph.nodes import Add, Conv, Input, Network, Round
from marvin.export.passes import round_sums as rounding
from marvin.export.passes.round_sums import sum_formats
from train.resnet20 import resnet20


def terms(network):
    return [name for op in network.operations if isinstance(op, Add) for name in op.inputs]


def test_terms_get_words_that_hold_the_sample(ranged):
    _, network, x = ranged()
    rounded = round_sums(network, x)
    assert len(terms(rounded)) == 4
    formats = sum_formats(rounded)
    assert set(formats) == set(terms(rounded))
    assert {fmt.wl for fmt in formats.values()} == {8}
    signed = {name: fmt.signed for name, fmt in formats.items()}
    assert signed == {"bn2.term": True, "pool1.term": False, "bn3.term": True, "bn4.term": True}
    exact = simulate(rounded, x, dtype=torch.float64)
    for name, fmt in formats.items():
        (source,) = rounded.operation(name).inputs
        assert exact[source].min() > fmt.min - fmt.lsb / 2
        assert exact[source].max() < fmt.max + fmt.lsb / 2
        finer = FixedPoint(8, fmt.fl + 1, signed=fmt.signed)
        out = (exact[source].min() < finer.min) | (exact[source].max() > finer.max)
        assert out  # the finest that holds it
    assert set(network.formats()) == set(rounded.formats()) - set(formats)
    assert {n: rounded.formats()[n] for n in network.formats()} == network.formats()


def test_longer_terms_are_nearer_to_exact_sums(ranged):
    _, network, x = ranged()
    want = integer.run(network, x)
    gaps = [
        (integer.run(round_sums(network, x, wl), x) - want).abs().mean() for wl in (3, 5, 8, 16)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < gaps[0] / 10


def test_terms_that_are_short_already_stay(digits):
    _, network, x = digits(6, 4)
    before = terms(network)
    rounded = round_sums(network, x)
    assert terms(rounded) == before
    assert not sum_formats(rounded)
    assert [op.name for op in rounded.operations] == [op.name for op in network.operations]
    assert terms(round_sums(network, x, 4)) == ["4.bn.out.term", "3.term"]


def test_a_term_is_stored_once(ranged):
    """What is rounded besides, to as few bits, takes the term; longer words do not lose bits."""
    _, network, x = ranged(bits=(6, 6))
    assert network.operation("depthwise.in").inputs == ("pool1",)
    for wl, source in ((8, "pool1.term"), (6, "pool1.term"), (5, "pool1")):
        rounded = round_sums(network, x, wl)
        assert rounded.operation("depthwise.in").inputs == (source,)
        assert rounded.operation("add_1").inputs == ("bn3.term", "bn4.term")


@pytest.mark.parametrize(("largest", "fl"), [(3.9, 5), (4.1, 5), (24.0, 2)])
def test_a_term_has_the_format_of_a_layer_that_moves_it_less(largest, fl):
    """One value saturates in the layer's format, which is finer; by much, and the sum has its own."""
    layer, weight = FixedPoint(8, 5), torch.full((1, 1, 1, 1), 3)
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    operations = (
        Input("x", (), (1, 32, 32)),
        Round("in", ("x",), FixedPoint(16, 8)),
        Round("layer.in", ("in",), layer),
        Conv("layer", ("layer.in",), weight, FixedPoint(6, 2), None, FixedPoint(16, 7), **options),
        Add("y", ("layer", "in")),
    )
    values = {"in": first_value(operations[1], (1, 32, 32))}
    for op in operations[2:]:
        values[op.name] = value_of(op, [values[name] for name in op.inputs])
    x = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[0, 0, 0, 0] = largest
    rounded = round_sums(Network(operations, values, "trained"), x)
    assert rounded.formats()["in.term"] == FixedPoint(8, fl)
    assert rounded.operation("layer.in").inputs == ("in.term",)


@pytest.mark.parametrize("wl", [2, 3, 4, 8])
def test_what_is_behind_a_sum_has_its_binary_point(wl):
    """Bounds, and tables: against the function of what the sum is after its terms were rounded."""
    short, low, high = FixedPoint(6, 3), -5.0, 6.0
    table = ((torch.arange(-128, 128) / 16) ** 2).mul(4).round().long()
    operations = (
        Input("x", (), (2, 8, 8)),
        Round("a", ("x",), short),
        Round("b", ("x",), FixedPoint(6, 4)),
        Add("y", ("a", "b")),
        Clip("clip", ("y",), int(low * 16), int(high * 16), 4),
        Table("table", ("y",), table, -128, 4, FixedPoint(10, 2), "squares"),
    )
    values = {op.name: first_value(op, (2, 8, 8)) for op in operations[1:3]}
    for op in operations[3:]:
        values[op.name] = value_of(op, [values[name] for name in op.inputs])
    heads = ("clip", "clip"), ("table", "table")
    x = 2 * torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    rounded = round_sums(Network(operations, values, "trained", heads), x, wl)
    found = integer.run_all(rounded, x)
    fl = rounded.values["y"].fl
    assert (fl == 4) == (wl == 8)
    y = torch.from_numpy(found["y"]).double() * 2.0**-fl
    clipped = torch.from_numpy(found["clip"]).double() * 2.0**-fl
    bounds = [round(bound * 2**fl) * 2.0**-fl for bound in (low, high)]
    assert torch.equal(clipped, y.clamp(*bounds))
    squares = torch.from_numpy(found["table"]).double() / 4
    assert torch.equal(squares, (y.clamp(-8, 7.9375) ** 2 * 4).round() / 4)


def test_the_reference_and_the_report_have_the_roundings(ranged):
    model, network, x = ranged()
    rounded = round_sums(network, x)
    codes = integer.run_all(rounded, x)
    for op in rounded.operations:
        if isinstance(op, Round) and op.name in terms(rounded):
            assert codes[op.name].min() >= op.fmt.min_code
            assert len(set(codes[op.name].reshape(-1).tolist())) > 20
    assert [row.name for row in compare(rounded, model, x)] == [
        row.name for row in compare(network, model, x)
    ]


def test_what_is_not_finite_is_named(ranged):
    _, network, x = ranged()
    rounded = round_sums(network, x * 1e30)  # saturates
    assert len(terms(rounded)) == 4
    with pytest.raises(ExportError, match="must be finite to be calibrated"):
        round_sums(network, x * torch.nan)


def test_values_of_a_sample_are_kept_while_something_takes_them(ranged, monkeypatch):
    most, forget = [], rounding._Rewriter.forget

    def counted(self, names):
        most.append(len(self.found))
        forget(self, names)

    monkeypatch.setattr(rounding._Rewriter, "forget", counted)
    _, network, x = ranged(lambda: resnet20(10, 2, 2), (5, 6))
    round_sums(network, x)
    assert len(most) == len(network.operations) - 1
    assert max(most) <= 8
