"""What exports refuse, and what they say to write instead."""

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import fx, nn

import marvin
from fixedpoint_kernels import FixedPoint, Minifloat
from marvin import export
from marvin.export import ExportError, c, describe, integer, onnx, packed, qonnx
from marvin.export.graph.nodes import Round

X = torch.linspace(-2, 2, 96).reshape(4, 1, 4, 6)


class Model(nn.Module):
    """A convolution, and what comes behind it."""

    def __init__(self, behind=None):
        super().__init__()
        self.conv, self.behind = nn.Conv2d(1, 4, 3), behind
        self.register_buffer("grid", torch.ones(1, 4, 2, 4))

    def forward(self, x):
        y = self.conv(x)
        return y if self.behind is None else self.behind(self, y)


def fixed(behind=None):
    torch.manual_seed(0)
    return marvin.calibrate(Model(behind).eval(), [X], bits=8)


@fx.wrap
def stochastic_depth(x, p, mode, training=True):
    assert mode == "row"
    return x * torch.rand(len(x)).reshape(-1, 1, 1, 1) if training else x


def test_what_drops_nothing_in_eval_mode_is_left_out():
    model = fixed(lambda m, y: torch.relu(stochastic_depth(y, 0.5, "row", m.training)))
    network = describe(model, X)
    with torch.no_grad():
        torch.testing.assert_close(
            integer.run(network, X).float(), model(X), rtol=0, atol=1e-4
        )  # biases are rounded
    trains = fixed(lambda m, y: stochastic_depth(y, 0.5, "row"))
    with pytest.raises(ExportError, match="stochastic_depth"):
        describe(trains, X)


def test_quantizers_are_the_roundings_that_they_are():
    torch.manual_seed(0)
    x, fmt = torch.randn(20, 8), FixedPoint(5, 3)
    there = marvin.Quantizer(fmt, forward_rounding="nearest")
    layers = there, nn.Linear(8, 4, bias=False), there, nn.ReLU(), marvin.Quantizer(None, fmt)
    model = marvin.calibrate(nn.Sequential(*layers).eval(), [x])
    network = describe(model, x)
    rounds = [op for op in network.operations if isinstance(op, Round)]
    assert [op.fmt for op in rounds] == [fmt, fmt]
    with torch.no_grad():
        torch.testing.assert_close(integer.run(network, x).float(), model(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fmt", "rounding"), [(FixedPoint(8, 4), "stochastic"), (Minifloat(5, 2), "nearest")]
)
def test_quantizers_that_are_no_rounding_of_integers_are_named(fmt, rounding):
    own = nn.Sequential(fixed().conv, marvin.Quantizer(fmt, forward_rounding=rounding))
    with pytest.raises(ExportError, match="1: a Quantizer must round to a FixedPoint, to nearest"):
        describe(own, X)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Thing:
    def __init__(self, y):
        self.y = y


def test_named_tuples_are_tuples():
    network = describe(fixed(lambda m, y: Pair(y, torch.relu(y))), X)
    assert [*network.outputs] == ["output0", "output1"]


def _assigned(m, y):
    y[:, :2] = 0
    return y


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        (_assigned, "does not support item assignment; write torch.cat of the parts; where a size"),
        (lambda m, y: y + torch.zeros(y.shape[0], 4, 2, 4), "; a size must not be the number of"),
        (
            lambda m, y: nn.functional.max_pool2d(y, 2, return_indices=True)[0],
            "leave out return_indices",
        ),
        (lambda m, y: nn.ReLU()(y), "calls a ReLU that is no part of the model, .* nn.ModuleList"),
        (
            lambda m, y: y * torch.sigmoid(y.mean((2, 3), True)).expand_as(y),
            "leave it out where a product",
        ),
        (
            lambda m, y: nn.functional.scaled_dot_product_attention(m.grid, y, y),
            r"\(grid, .* the query must be .*, got a constant of shape \(1, 4, 2, 4\): of a learned query",
        ),
        (lambda m, y: y + y.mean((2, 3), True), r"\(4, 1, 1\).*: repeat the smaller, torch.cat"),
        (lambda m, y: torch.addcmul(y, y, y), "write a \\+ b \\* c"),
        (lambda m, y: y.to(torch.float64), "values are float32 on a CPU: leave it out"),
        (lambda m, y: y.type_as(y), "values are float32: leave it out"),
    ],
)
def test_it_says_what_to_write(behind, message):
    with pytest.raises(ExportError, match=message):
        describe(fixed(behind), X)


@pytest.mark.parametrize(
    "sizes",
    [
        lambda n: (n, 4, 2, 4),
        lambda n: ((n, 4, 2, 4),),
        lambda n: ([n, -1, -1, -1],),
    ],
)
def test_a_buffer_may_be_expanded_to_the_number_of_samples(sizes):
    model = fixed(lambda m, y: torch.cat([y, m.grid.expand(*sizes(y.shape[0]))], 1))
    want = describe(fixed(lambda m, y: torch.cat([y, m.grid.repeat(y.shape[0], 1, 1, 1)], 1)), X)
    network = describe(model, X)
    torch.testing.assert_close(integer.run(network, X), integer.run(want, X), rtol=0, atol=0)


def test_a_value_may_become_what_it_is():
    network = describe(fixed(lambda m, y: y.to(torch.float32).cpu().to("cpu", torch.float32)), X)
    assert len(network.operations) == len(describe(fixed(), X).operations)


@pytest.mark.parametrize("samples", [(X * 10).to(torch.uint8), X.double()])
def test_samples_of_another_dtype_are_named(samples):
    with pytest.raises(ExportError, match=rf"samples of {samples.dtype} and shape .*\.float\(\)"):
        describe(fixed(), samples)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (X[:0], r"calibration must hold some, to compare on, got shape \(0, 1"),
        ([X], r"calibration must be a tensor, one batch, got list: write torch.cat\(batches\)"),
        (X.to("meta"), "calibration must have values, got a tensor of the device meta"),
        (X * torch.nan, "the input must be numbers, got NaN"),
    ],
)
def test_samples_for_ranges_are_looked_at(calibration, message):
    model = fixed(lambda m, y: nn.functional.silu(y))
    with pytest.raises((ExportError, TypeError), match=message):
        describe(model, X, calibration=calibration)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wl": 0}, "wl must be 2 to 32 bits, got wl=0"),
        ({"wl": "8"}, "wl must be a whole number of bits, got wl='8'"),
        ({"wl": True}, "wl must be a whole number of bits, got wl=True"),
        ({"scale_wl": 1}, "^scale_wl must be 2 to 32 bits, got scale_wl=1"),
        ({"scale_wl": 99}, "scale_wl must be 2 to 32 bits"),
        ({"sums_wl": 0}, "sums_wl must be 2 to 32 bits, got sums_wl=0"),
        ({"estimator": "mean"}, r"estimator must be one of \('noise', "),
        ({"recalibrate": "yes"}, "recalibrate must be True or False, got 'yes'"),
    ],
)
def test_settings_are_looked_at_first(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        export.Options(**settings)
    if settings.keys() <= {"wl", "scale_wl"}:
        with pytest.raises((ExportError, TypeError), match=message):
            describe(fixed(), X, **settings)
    if settings.keys() <= {"wl", "estimator"}:
        with pytest.raises((ValueError, TypeError), match=message):
            export.formats_of_weights(Model(), **settings)


def test_names_that_the_model_lacks_are_refused():
    model = Model()
    formats = export.formats_of_weights(model)
    wrong = {"conv.wieght": formats["conv.weight"]}
    with pytest.raises(ExportError, match=r"formats .* got conv.wieght: .* as conv.weight$"):
        export.nearest_weights(model, wrong)
    with pytest.raises(ExportError, match=r"masters must be of parameters"):
        export.nearest_weights(model, formats, {"conv.wieght": model.conv.weight})
    with pytest.raises(ExportError, match=r"masters must be there .* got none of conv.weight"):
        export.nearest_weights(model, formats, {})


def test_masters_are_of_the_optimizers_model():
    model = Model()
    adam = torch.optim.Adam(model.named_parameters())
    optimizer = marvin.Quantized(adam, marvin.LossBudgetPolicy())
    with pytest.raises(ExportError, match="must have parameters of the model, got another"):
        export.masters_of(Model(), optimizer)
    with pytest.raises(TypeError, match=r"optimizer must be a marvin.Quantized, got Adam"):
        export.masters_of(model, adam)


NETWORKS = {
    "c.write": c.write,
    "c.costs": c.costs,
    "c.input_codes": lambda net: c.input_codes(net, X),
    "onnx.container_of": onnx.container_of,
    "onnx.in_floats": onnx.in_floats,
    "qonnx.is_exact": qonnx.is_exact,
    "packed.pack_network": packed.pack_network,
    "compare": lambda net: export.compare(net, net, X),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_in_place_of_a_network_is_refused(name):
    with pytest.raises(TypeError, match="a network must come first, got Model: write network = de"):
        NETWORKS[name](fixed())


@pytest.mark.parametrize("take", [packed.sizes, packed.to_bytes])
def test_a_network_in_place_of_a_packed_one_is_refused(take):
    with pytest.raises(TypeError, match=r"got Network: write pack_network\(network\)"):
        take(describe(fixed(), X))


@pytest.mark.parametrize(
    "take",
    [
        export.weight_formats,
        export.activation_formats,
        export.formats_of_weights,
        lambda model: export.nearest_weights(model, {}),
        lambda model: export.compare(describe(fixed(), X), model, X),
        lambda model: export.deploy(model, {}, X, export.Options()),
    ],
)
def test_what_is_no_model_is_refused(take):
    with pytest.raises(TypeError, match=r"a model \(torch.nn.Module\) must come first, got None"):
        take(None)


@pytest.mark.parametrize(
    "take",
    [
        lambda net, x: c.input_codes(net, x),
        lambda net, x: integer.run(net, x),
        lambda net, x: export.round_sums(net, x),
        lambda net, x: describe(fixed(), x),
        lambda net, x: export.deploy(fixed(), {}, x, export.Options()),
        lambda net, x: integer.encode_input(x, net.operations[1].fmt),
    ],
)
def test_arrays_are_told_of_tensors(take):
    with pytest.raises(
        TypeError, match=r"must be a tensor.*, got ndarray: write torch.from_numpy\("
    ):
        take(describe(fixed(), X), np.ones((2, 1, 4, 6)))


def test_input_codes_have_the_shape_of_the_network():
    with pytest.raises(ExportError, match=re.escape("must have shape (n, (1, 4, 6)), got (4, 9)")):
        c.input_codes(describe(fixed(), X), torch.randn(4, 9))


@pytest.mark.parametrize(
    ("formats", "options", "message"),
    [
        (
            None,
            export.Options(),
            "formats must be a mapping of names, got NoneType: write weight_f",
        ),
        ({}, 8, r"options must be an Options, got int: write Options\(\)"),
    ],
)
def test_deploy_says_what_it_takes(formats, options, message):
    with pytest.raises(TypeError, match=message):
        export.deploy(fixed(), formats, X, options)
