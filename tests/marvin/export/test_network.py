import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import marvin
from fixedpoint_kernels import BlockFloat, FixedPoint
from marvin.export import (
    ExportError,
    calibrate,
    compare,
    describe,
    formats_of_weights,
    integer,
    masters_of,
    nearest_weights,
    verify,
    weight_formats,
)
from marvin.export.execute.simulate import simulate
from marvin.export.graph.formats import Formats, activation_formats, fitting
from marvin.export.graph.nodes import Affine, AveragePool, Conv, Round
from marvin.export.targets.packed import pack_state
from marvin.hooks import detach
from train.alexnet import alexnet
from train.resnet20 import resnet20


def outputs(model, x):
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize(("wl", "fl"), [(8, 5), (6, 3), (4, 2), (16, 12), (24, 20), (32, 26)])
def test_without_batch_norm_the_simulation_is_the_trained_model(plain, wl, fl):
    model, network, x = plain(wl, fl)
    found = simulate(network, x)
    torch.testing.assert_close(found[network.output], outputs(model, x), rtol=0, atol=0)


def test_every_layer_is_the_models_own(plain):
    model, network, x = plain()
    rows = compare(network, model, x)
    assert [row.name for row in rows] == ["0", "1", "2", "3", "4", "5", "6", "7", "8"]
    assert [row.different for row in rows] == [0] * 9
    assert max(row.elements for row in rows) == 5 * 8 * 4 * 4


def test_batch_norm_in_fixed_point_moves_few_values_by_one_step(digits):
    model, network, x = digits()
    rows = {row.name: row for row in compare(network, model, x)}
    assert rows["0"].different == 0  # before the first batch normalisation
    assert rows["1"].largest <= 1
    assert rows["1"].different < 0.02 * rows["1"].elements
    wide = digits(16, 12)
    for built, found, lost in ((model, network, 3), (*wide[:2], 0)):  # for 8-bit kernels
        norm = built[1]
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        (affine, _) = (op for op in found.operations if isinstance(op, Affine))
        step = affine.scale_fmt.lsb * 2**lost
        got = affine.scale.double() * affine.scale_fmt.lsb
        torch.testing.assert_close(got, scale.detach(), rtol=0, atol=step * 0.54)
        assert affine.scale_fmt.wl == 16
        assert not (affine.scale % 2**lost).any()


def test_trainers_networks():
    torch.manual_seed(0)
    for model, shape in ((resnet20(10, 1, 4), (1, 8, 8)), (alexnet(10, 3, 4), (3, 32, 32))):
        optimizer = marvin.MSGD(model.named_parameters(), init_wl=8, init_fl=5)
        marvin.quantize_activations(model, optimizer)
        model.eval()
        x = torch.randn(2, *shape)
        network = describe(model, x, optimizer.formats())
        assert set(network.weight_formats()) | {"bn"} >= {
            name.removesuffix(".weight") for name in optimizer.layers()
        }
        rows = verify(network, x)
        assert all(row.is_exact and not row.different for row in rows)
        assert all(row.is_bounded in (None, True) for row in rows)


def test_the_model_stays_as_it_is(digits):
    model, _, x = digits()
    model.train()
    model[4].eval()
    before = copy.deepcopy(model.state_dict())
    describe(model, x, {name: FixedPoint(8, 5) for name, _ in model.named_parameters()})
    assert model.training
    assert not model[4].training
    assert len(model[0]._forward_hooks) == 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_functions_and_methods_are_those_of_modules(make):
    class OneToThree(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 3, 3, padding=1)
            self.conv = nn.Conv2d(3, 3, 1)
            self.relu = nn.ReLU(inplace=True)
            self.fc = nn.Linear(3 * 64, 4)
            self.drop = nn.Dropout()

        def forward(self, x):
            x = self.relu(self.conv1(x))
            y = torch.add(F.relu(x), self.conv(x))
            y += self.relu(self.conv(x))  # the same layer twice
            return self.fc(self.drop(torch.flatten(y.relu(), 1)))

    model, network, x = make(OneToThree, (1, 8, 8))
    found = simulate(network, x)[network.output]
    torch.testing.assert_close(found, outputs(model, x), rtol=0, atol=0)
    assert sum(isinstance(op, Conv) for op in network.operations) == 3


def _in_place(y, _buffer):
    z = y * 2
    z -= y
    z += 0.5
    z -= 3
    return z


@pytest.mark.parametrize(
    "behind",
    [
        lambda y, _: sum([y, y]),
        lambda y, _: sum([F.max_pool2d(y, 2)]),
        lambda y, _: y + 3,
        lambda y, _: y - 0.1,
        lambda y, _: 1 - y,
        lambda y, _: 0 - y,
        lambda y, buffer: y - buffer,
        lambda y, buffer: buffer - y,
        lambda y, _: y - y.relu(),
        lambda y, _: torch.sub(y.flatten(2), 1.5),
        _in_place,
    ],
)
def test_numbers_are_added_and_values_taken_off(behind):
    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3, bias=False)
            self.register_buffer("buffer", torch.tensor([0.3, -1.75]).view(1, 2, 1, 1))

        def forward(self, x):
            return behind(self.conv(x), self.buffer)

    torch.manual_seed(0)
    x = torch.randn(5, 1, 6, 6)
    model = marvin.calibrate(Behind().eval(), [x])
    network = describe(model, x)
    want = outputs(model, x).double()
    torch.testing.assert_close(integer.run(network, x), want, rtol=0, atol=2**-14)  # 0.1 in 16 bits


@pytest.mark.parametrize("behind", [lambda y: sum([y, y]), lambda y: sum([F.avg_pool2d(y, 2)])])
def test_a_sum_that_begins_with_0_adds_nothing(behind):
    x = torch.randn(5, 1, 6, 6)
    network = describe(marvin.calibrate(Call(lambda m, y: behind(y)).eval(), [x]), x)
    assert not any(isinstance(op, Affine) for op in network.operations)


def test_formats_differ_between_layers(plain):
    model, _, x = plain()
    optimizer = marvin.MSGD(
        [{"params": [(n, p)], "init_wl": 6 + i, "init_fl": 4}
         for i, (n, p) in enumerate(model.named_parameters())]
    )  # fmt: skip
    for module in model.modules():
        detach(module)
    marvin.quantize_activations(model, optimizer)
    network = describe(model, x, optimizer.formats())
    found = simulate(network, x)[network.output]
    torch.testing.assert_close(found, outputs(model, x), rtol=0, atol=0)
    assert len(set(network.formats().values())) >= 3


@pytest.mark.parametrize("estimator", ["noise", "max"])
def test_formats_found_for_describe_are_those_of_a_calibrated_model(estimator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    x = torch.randn(20, 1, 8, 8)
    formats = calibrate(model, [x[:10], (x[10:], torch.zeros(10))], 8, estimator)
    assert model.training
    if estimator == "max":
        assert formats["0"].input == fitting((float(x.min()), float(x.max())), 8)
    own = marvin.calibrate(model, x.split(10), bits=8, estimator=estimator)
    weights = formats_of_weights(model, 8, estimator)
    assert weights == weight_formats(own)
    assert {name: f.input for name, f in activation_formats(own).items()} == {
        name: f.input for name, f in formats.items()
    }
    network = describe(nearest_weights(model, weights).eval(), x, weights, formats)
    wanted = describe(own, x)
    assert (network.origin, wanted.origin) == ("calibrated", "trained")
    assert torch.equal(integer.run(network, x), integer.run(wanted, x))
    above = calibrate(model, [x.abs()], 8, estimator)
    assert (above["0"].input.signed, formats["0"].input.signed) == (False, True)
    for batches, message in (([], "must see a batch"), ([x * torch.inf], "0 must see finite")):
        with pytest.raises(ExportError, match=message):
            calibrate(model, batches)


@pytest.mark.parametrize(
    ("low", "high", "fl"), [(0, 0, 31), (-1, 0.9, 7), (-1, 1, 6), (0, 127.4, 0), (-4e4, 0, -9)]
)
def test_the_finest_format_that_fits(low, high, fl):
    assert fitting((low, high), 8) == FixedPoint(8, fl)


def test_masters_are_rounded_to_nearest():
    torch.manual_seed(0)
    model = nn.Linear(200, 3)
    floats = model.weight.detach().clone()
    optimizer = marvin.MSGD(model.named_parameters())
    exported = nearest_weights(model, optimizer.formats(), masters_of(model, optimizer))
    assert not torch.equal(exported.weight, model.weight)  # of which one is a stochastic draw
    assert (exported.weight - floats).abs().max() <= optimizer.formats()["weight"].lsb / 2


def test_nothing_is_observed_without_quantised_activations():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    assert activation_formats(model) == {}
    with pytest.raises(ExportError, match=r"no activations: .*, or describe marvin\.calibrate"):
        describe(model, torch.ones(1, 1, 2, 2), {})
    with pytest.raises(ExportError, match=r"or give formats from marvin\.export\.calibrate"):
        describe(model, torch.ones(1, 1, 2, 2), {"0.weight": FixedPoint(8, 4)})


def test_a_model_of_no_step_has_no_formats_yet():
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    marvin.quantize_activations(model, marvin.Quantized(sgd, marvin.StaticPolicy()))
    with pytest.raises(ExportError, match="got a model of no step: train it"):
        describe(model, torch.ones(1, 1, 2, 2), {})


class Call(nn.Module):
    """Calls one function on the output of a layer."""

    def __init__(self, function):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, x):
        return self.function(self, self.conv(x))


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2, 3, ceil_mode=True),
        nn.MaxPool2d(1, 3, ceil_mode=True),
        nn.MaxPool2d(3, 4, 1, ceil_mode=True),
        nn.AvgPool2d(2, 3, ceil_mode=True),
    ],
    ids=str,
)
def test_ceil_mode_may_leave_out_its_window(pool):
    """Each would begin behind a side of 9."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 1, bias=False), pool, nn.Flatten(), nn.Linear(18, 2, bias=False)
    model, x = nn.Sequential(*layers).eval(), torch.randn(4, 1, 9, 9)
    fixed = marvin.calibrate(model, [x])
    want = outputs(fixed, x).double()
    torch.testing.assert_close(integer.run(describe(fixed, x), x), want, rtol=0, atol=0)


def test_sides_without_a_window_of_ceil_mode_are_named():
    layers = nn.Conv2d(1, 2, 1), nn.MaxPool2d(3, ceil_mode=True)
    x = torch.randn(4, 1, 1, 1)
    fixed = marvin.calibrate(nn.Sequential(*layers), [x])
    with pytest.raises(ExportError, match=r"on a side of 1: use sides of 3, or ceil_mode=False"):
        describe(fixed, x)


class Bare(nn.Module):
    """Calls one function on the output of a layer, perhaps another on its input; has nothing else."""

    def __init__(self, function, first=lambda x: x):
        super().__init__()
        self.conv, self.function, self.first = nn.Conv2d(1, 2, 1), function, first

    def forward(self, x):
        return self.function(self, self.conv(self.first(x)))


def tied(layer):
    return lambda: nn.Sequential(nn.Conv2d(1, 2, 1), layer)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_where_memory_ends_the_samples_are_not_blamed(error, monkeypatch):
    model, x = (
        marvin.freeze(marvin.calibrate(nn.Linear(3, 2), [torch.rand(4, 3)])),
        torch.rand(4, 3),
    )

    def end(*_):
        raise error

    monkeypatch.setattr(torch.nn.functional, "linear", end)
    with pytest.raises(error):
        marvin.export.describe(model, x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (tied(nn.GLU(1)), "1: GLU cannot be exported"),
        (tied(nn.PReLU(2)), "1: a PReLU must have one slope, got 2"),
        (tied(nn.ConvTranspose2d(2, 2, 2)), "1: ConvTranspose2d cannot"),
        (tied(nn.MaxPool2d(3, ceil_mode=True)), "ceil_mode must add no window, .* use sides of 3"),
        (tied(nn.AvgPool2d(3, ceil_mode=True)), "ceil_mode must add no window, .* use sides of 3"),
        (tied(nn.AvgPool2d(2, divisor_override=3)), "1: average pooling must divide"),
        (tied(nn.MaxPool2d(2, return_indices=True)), "return_indices=False"),
        (tied(nn.AvgPool2d(2, padding=1, count_include_pad=False)), "count_include_pad"),
        (tied(nn.AdaptiveAvgPool2d(3)), r"windows must be of one size, got \(4, 4\) to \(3, 3\)"),
        (tied(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")), "got circular"),
        (lambda: Bare(lambda m, y: y**2), r"pow_1: pow\(conv, 2\) cannot be exported"),
        (lambda: Bare(lambda m, y: y * y.flatten(1)), "the model must take samples of shape"),
        (tied(nn.Flatten(0)), "1: must leave the batch alone"),
        (lambda: Bare(lambda m, y: y.flatten()), "flatten: flatten.* must leave the batch alone"),
        (lambda: Bare(lambda m, y: y.transpose(0, 1)), "must leave the batch alone"),
        (lambda: Bare(lambda m, y: y.mean()), "mean: .* give the dimensions"),
        (lambda: Bare(lambda m, y: y.mean((0, 2))), "mean: .* must leave the batch alone"),
        (lambda: Bare(lambda m, y: y[1:]), "getitem: .* must leave the batch alone"),
        (lambda: Bare(lambda m, y: y[:, [0, 0]]), "getitem: .* indices must be slices in order"),
        (lambda: Bare(lambda m, y: F.dropout(y)), r"dropout: dropout\(conv\) cannot be exported"),
        (
            tied(nn.Sequential(Bare(lambda m, y: F.dropout(y), lambda x: x[:, :1]))),
            r"dropout: dropout\(.*\) in 1\.0 cannot be exported: use nn\.Dropout",
        ),
        (
            tied(nn.BatchNorm2d(2, track_running_stats=False)),
            "1: .* must have running statistics, got none: write track_running_stats=True",
        ),
        (
            lambda: Call(lambda m, y: y * torch.arange(16.0).view(4, 4)),
            "numbers must be one a channel",
        ),
        (lambda: Call(lambda m, y: torch.sub(y, y, alpha=2)), r"for alpha=, write a - b \* alpha"),
        (lambda: Call(lambda m, y: torch.add(y, y, alpha=2)), r"for alpha=, write a \+ b \* alpha"),
        (lambda: Call(lambda m, y: y + float("inf")), r"add\(conv, inf\) .* must be finite"),
        (lambda: Call(lambda m, y: torch.cat([y, y])), "cat: cat.* must leave the batch alone"),
        (lambda: Bare(lambda m, y: (y, None)), "must give tensors, or tuples.* got output1=None"),
        (lambda: Bare(lambda m, y: y + y[:, :1]), r"must have one shape, got \(2, 4, 4\) and \(1,"),
        (lambda: Call(lambda m, y: y if y.sum() > 0 else -y), "traceable.* no if and no loop may"),
        (lambda: Bare(lambda m, y: y.max(-1)[0]), r"max\(conv, -1\) can.* use nn.AdaptiveMax"),
        (
            lambda: Bare(lambda m, y: torch.sort(y)[0]),
            r"sort: sort\(conv\) cannot be exported: comp",
        ),
        (
            lambda: Bare(lambda m, y: y.exp()),
            r"exp: exp\(conv\) cannot .* the documentation, 'Deploy: Which",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(2), nn.LSTM(16, 4)),
            "2: LSTM cannot be exported: use Conv1d or attention",
        ),
        (tied(nn.Upsample(scale_factor=2)), "Upsample cannot be exported: repeat columns by torch"),
        (
            lambda: Bare(lambda m, y: y, lambda x: x - 1),
            "sub takes the network's input .* to the samples",
        ),
        (
            lambda: Bare(lambda m, y: y, lambda x: x + x),
            "add takes the network's input .* to the samples.* let a convolution of one pixel come before",
        ),
    ],
)
def test_what_cannot_be_exported_is_named(build, message, make):
    with pytest.raises(ExportError, match=message):
        make(build, (1, 4, 4))


def test_a_model_of_other_floats_is_named(plain):
    model, _, x = plain()
    with pytest.raises(ExportError, match=r"float32, got torch.bfloat16 in 0.weight: .*float\(\)"):
        describe(model.bfloat16(), x.bfloat16())


def test_layers_in_floats_are_named(digits):
    model, _, x = digits()
    formats = {name: FixedPoint(8, 5) for name, _ in model.named_parameters()}
    del formats["4.conv.weight"]
    with pytest.raises(ExportError, match=r"4\.conv\.weight has no format: .* in weights"):
        describe(model, x, formats)
    with pytest.raises(ExportError, match=r"0\.weight must hold numbers of <8, 3>"):
        describe(model, x, formats | {"0.weight": FixedPoint(8, 3)})


def test_float_biases_take_the_point_of_the_products(plain):
    model, _, x = plain()
    formats = {n: FixedPoint(8, 5) for n, _ in model.named_parameters() if n.endswith("weight")}
    network = describe(model, x, formats)
    conv = network.operations[2]
    assert isinstance(conv, Conv)
    assert conv.bias_fmt == FixedPoint(32, 10)
    torch.testing.assert_close(
        conv.bias.double() * 2.0**-10, model[0].bias.detach().double(), rtol=0, atol=2.0**-11
    )


def test_average_pooling_over_any_window():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.AvgPool2d(3, 2, padding=1)).eval()
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=8, init_fl=4)
    marvin.quantize_activations(model, optimizer)
    x = torch.randn(9, 1, 9, 9) * 3
    network = describe(model, x, optimizer.formats())
    assert isinstance(network.operations[-1], AveragePool)
    assert sum(row.different for row in verify(network, x)) == 0
    torch.testing.assert_close(
        simulate(network, x)[network.output], outputs(model, x), rtol=0, atol=0
    )


class Spare(nn.Module):
    """Has a parameter beside its layer, and so rounds what comes in and goes out."""

    def __init__(self, returned="tensor"):
        super().__init__()
        self.conv, self.spare = nn.Conv2d(1, 1, 1), nn.Parameter(torch.ones(4, 4))
        self.returned = returned

    def forward(self, x):
        y = self.conv(x + self.spare) * 0.375
        return {"tensor": y, "tuple": (y, F.relu(y)), "dict": {"a": y}}[self.returned]


def test_what_rounds_around_its_layers_is_followed(make):
    model, network, x = make(lambda: nn.Sequential(Spare(), nn.ReLU()), (1, 4, 4), 6, 2)
    rounds = [op.fmt for op in network.operations if isinstance(op, Round)]
    assert FixedPoint(6, 2) in rounds
    torch.testing.assert_close(integer.run(network, x), outputs(model, x).double(), rtol=0, atol=0)


@pytest.mark.parametrize("returned", ["tensor", "tuple", "dict"])
def test_a_model_that_rounds_around_its_layers_is_followed(make, returned):
    model, network, x = make(lambda: Spare(returned), (1, 4, 4), 6, 2)
    rounds = [op.fmt for op in network.operations if isinstance(op, Round)]
    assert rounds[0] == FixedPoint(6, 2)
    with torch.no_grad():
        found = list(integer.run_heads(network, x).values())
        wanted = model(x)
    given = list(wanted.values()) if returned == "dict" else list(wanted)
    for got, y in zip(found, [wanted] if returned == "tensor" else given, strict=True):
        torch.testing.assert_close(got, y.double(), rtol=0, atol=0)


class Scaled(nn.Module):
    """Multiplies what batch normalisation gives, as layer scale does."""

    def __init__(self, factors):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)
        self.factors = factors

    def forward(self, x):
        y = self.norm(self.conv(x))
        for factor in self.factors:
            y = y * factor
        return self.last(F.relu(y))


@pytest.mark.parametrize("factors", [(0.37,), (0.37, 1.3), (0.5, 0.37)])
def test_a_product_behind_batch_norm_keeps_its_scale(factors):
    torch.manual_seed(0)
    x = torch.randn(8, 1, 8, 8)
    fixed = marvin.calibrate(Scaled(factors), [x])
    network = describe(fixed, x)
    scales = [op.scale for op in network.operations if isinstance(op, Affine)]
    assert len(scales) == 1 + len(factors)
    assert all(scale.all() for scale in scales)
    gap = (integer.run(network, x) - outputs(fixed, x)).abs().max()
    assert gap < 0.01 * outputs(fixed, x).abs().max()


class LayerScale(nn.Module):
    """Multiplies by a number a channel, as ConvNeXt, CaiT and FrozenBatchNorm2d do."""

    def __init__(self, way):
        super().__init__()
        self.conv, self.last, self.way = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3), way
        self.gamma = nn.Parameter(torch.tensor([0.3, -1.7, 2.5, 0.01]))

    def forward(self, x):
        y, gamma = self.conv(x), self.gamma.view(-1, 1, 1)
        if self.way == "times":
            y = gamma * y
        elif self.way == "in place":
            y *= gamma
        elif self.way == "divided":
            y = y / gamma
        elif self.way == "last":
            y = (y.permute(0, 2, 3, 1) * self.gamma).permute(0, 3, 1, 2)
        elif self.way == "grid":
            y = y * (gamma * torch.arange(6))
        return self.last(F.relu(y))


@pytest.mark.parametrize("way", ["times", "in place", "divided", "last"])
def test_a_number_a_channel_is_multiplied(way):
    torch.manual_seed(0)
    x = torch.randn(8, 1, 8, 8)
    fixed = marvin.calibrate(LayerScale(way), [x])
    network = describe(fixed, x)
    (scaled,) = (op for op in network.operations if isinstance(op, Affine))
    gamma = fixed.gamma.detach().double()
    found = scaled.scale.double() * scaled.scale_fmt.lsb
    wanted = 1 / gamma if way == "divided" else gamma
    half = 2**6 * scaled.scale_fmt.lsb / 2  # scales lose up to 6 bits for integer kernels
    torch.testing.assert_close(found, wanted, rtol=0, atol=half)
    gap = (integer.run(network, x) - outputs(fixed, x)).abs().max()
    assert gap < 0.01 * outputs(fixed, x).abs().max()


def test_numbers_of_more_than_channels_are_refused():
    x = torch.randn(8, 1, 8, 8)
    fixed = marvin.calibrate(LayerScale("grid"), [x])
    with pytest.raises(ExportError, match=r"numbers must be one a channel, the same in all other"):
        describe(fixed, x)


@pytest.mark.parametrize("samples", [torch.zeros(0, 1, 4, 4), torch.zeros(2, 1, 0, 4)])
def test_samples_of_nothing_are_refused(plain, samples):
    with pytest.raises(ExportError, match=r"samples must hold some, to compare on, got shape \("):
        describe(plain()[0], samples)


def test_a_wrapped_model_is_refused(plain):
    model, _, x = plain()
    with pytest.raises(ExportError, match=r"without DataParallel: write describe\(model.module"):
        describe(nn.DataParallel(model), x)
    with pytest.raises(ExportError, match=r"without AveragedModel: write describe\(model.module"):
        describe(AveragedModel(model), x)


@pytest.mark.parametrize("per_channel", [False, True])
def test_values_that_changed_since_their_formats_were_found_may_be_rounded(per_channel):
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)), torch.rand(8, 4)
    average = AveragedModel(marvin.calibrate(model.eval(), [x], per_channel=per_channel))
    average.module[0].weight.data.mul_(0.9)
    with pytest.raises(
        ExportError, match=r"0\.weight must .*nearest_weights\(model, formats\) rounds"
    ):
        describe(average.module, x)
    rounded = nearest_weights(average.module, weight_formats(average.module))
    assert describe(rounded, x).operations


def test_a_bias_that_no_format_holds_is_named():
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.rand(8, 4)
    model[0].bias.data[1] = 1e30
    fixed = marvin.calibrate(model.eval(), [x])
    with pytest.raises(ExportError, match=r"0\.bias: a format of 32 bits must hold"):
        describe(fixed, x)


def test_the_reference_takes_tensors_alone(plain):
    _, network, x = plain()
    with pytest.raises(
        TypeError, match=r"samples must be a tensor, one batch, got ndarray: write torch.from_numpy"
    ):
        integer.run(network, x.numpy())


def test_a_layer_that_is_not_called_does_no_harm(make):
    def build():
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
        model[0].spare = nn.Linear(2, 2)  # which Conv2d does not call
        return model

    _, network, _ = make(build, (1, 4, 4))
    assert [op.name for op in network.operations][-2:] == ["0.out", "1"]


def test_block_floating_point_is_refused_by_name():
    model = nn.Sequential(nn.Conv2d(1, 2, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.MuppetPolicy())
    marvin.quantize_activations(model, optimizer)
    with pytest.raises(
        ExportError, match=r"activations of .* must have a fixed-point format, got b"
    ):
        describe(model.eval(), torch.ones(1, 1, 2, 2))
    marvin.prepare(model).remove()  # as the error says
    fixed = marvin.calibrate(model, [torch.ones(1, 1, 2, 2)])
    network = describe(fixed, torch.ones(1, 1, 2, 2))
    assert sum(row.different for row in verify(network, torch.ones(1, 1, 2, 2))) == 0


def test_formats_that_no_target_has_are_named(plain):
    model, _, x = plain()
    fmt: Any = BlockFloat(8)
    formats = dict.fromkeys(dict(model.named_parameters()), fmt)
    with pytest.raises(ExportError, match=r"0\.weight must have a fixed-point format, got block"):
        describe(model, x, formats)
    bare = copy.deepcopy(model)
    for module in bare.modules():
        detach(module)
    with pytest.raises(ExportError, match=r"0\.in must have a fixed-point format, got block"):
        describe(bare, x, formats, {"0": Formats(fmt, fmt)})
    with pytest.raises(ExportError, match="for one that rounds at 0: leave them out"):
        describe(model, x, formats, {"0": Formats(fmt, fmt)})
    with pytest.raises(ExportError, match=r"0\.weight must have a fixed-point"):
        pack_state(model.state_dict(), formats)


def test_formats_of_a_range_policy_are_the_models_own(ranged):
    model, network, x = ranged(bits=(5, 7))
    formats = network.formats()
    assert formats["conv.in"].signed
    assert not formats["pointwise.in"].signed
    assert formats["pool"] == model_format(model, "fc")  # rounded once, as fc takes it
    before = {name: fmt for name, fmt in formats.items() if name.endswith(".in")}
    assert {fmt.wl for fmt in before.values()} == {7}
    rows = {row.name: row for row in compare(network, model, x)}
    assert rows["conv"].different == 0  # before the first batch normalisation


def model_format(model, name):
    return activation_formats(model)[name].input


def test_an_average_has_the_format_of_each_layer_that_takes_it():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.pool = nn.Conv2d(1, 2, 1), nn.AvgPool2d(2)
            self.left, self.right = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x):
            x = self.pool(self.conv(x))
            return self.left(x) + self.right(x)

    def formats(**fls):
        return {name: Formats(FixedPoint(8, fl), None) for name, fl in fls.items()}

    model, x = Twice(), torch.randn(3, 1, 4, 4)
    weights = {name: FixedPoint(8, 5) for name, p in model.named_parameters() if p.ndim > 1}
    model = nearest_weights(model, weights)
    network = describe(model, x, weights, formats(conv=4, left=5, right=5))
    assert averages(network) == {"pool": FixedPoint(8, 5)}
    network = describe(model, x, weights, formats(conv=4, left=5, right=6))
    assert averages(network) == {"pool": FixedPoint(8, 5), "pool.2": FixedPoint(8, 6)}
    assert network.chosen == {}
    # one of the layers rounds nothing: the means get a format by their range
    network = describe(model, x, weights, formats(conv=4, left=5), wl=7)
    found = averages(network)
    assert found["pool"] == FixedPoint(8, 5)
    assert network.chosen == {"pool.2": found["pool.2"]}
    assert found["pool.2"].wl == 7


def averages(network):
    return {op.name: op.fmt for op in network.operations if isinstance(op, AveragePool)}


class Optional(nn.Module):
    """Has arguments that nobody need give."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(8, 8), nn.Linear(8, 3), forward

    def forward(self, x, mask=None, *, features=False, **others):
        hidden = self.first(x)
        if mask is not None:
            hidden = hidden * mask
        return hidden if features or others else self.how(self.last(hidden))


def test_arguments_with_defaults_have_these():
    x = torch.randn(16, 8)
    fixed = marvin.calibrate(Optional(torch.relu), [x], bits=16)
    network = describe(fixed, x)
    assert (integer.run(network, x) - fixed(x)).abs().max() < 1e-2
    assert network.defaults == ("mask=None", "features=False")


class Variable(nn.Module):
    """Takes more arguments than it names, and one that is given by name alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x, *rest, flag=0):
        return self.layer(x) if flag == 0 and not rest else x


def test_arguments_by_name_alone_have_their_own_defaults():
    x = torch.randn(16, 8)
    assert describe(marvin.calibrate(Variable(), [x]), x).defaults == ("flag=0",)


def first_rows(y):
    place = [slice(None)] * y.dim()
    place[2] = slice(0, 2)
    return y[tuple(place)].mean((2, 3))


def columns_added(y):
    total = y[:, :, :, 0]
    for i in range(1, y.shape[3]):
        total = total + y[:, :, :, i]
    return total.mean(2)


def pixels_in_a_row(y):
    count, *sizes = y.shape
    pixels = 1
    for size in sizes[1:]:
        pixels *= size
    return y.reshape(count, int(sizes[0]), pixels).mean(2)


def by_rank(y):
    if y.ndim != 4 or y.shape[2] % 2 or y.dtype == torch.float16:
        return None
    return y.mean(tuple(range(2, len(y.shape))))


def asserted(y):
    torch._assert(y.dim() == 4, f"must have 4 dimensions, got {y.shape}")
    return y.mean((2, 3))


def tokens_to_image(y):
    tokens = y.flatten(2).transpose(1, 2)
    n, count, channels = tokens.shape
    side, other = int(count**0.5), int(math.sqrt(count))
    return tokens.transpose(1, 2).reshape(n, channels, side, other).mean((2, 3))


def padded_as_others_do(y):
    side = y.shape[2]
    pad = max((math.ceil(side / 4) - 1) * 4 + 5 - side, 0)
    if pad > 0:
        y = F.pad(y, [pad // 2, pad - pad // 2] * 2)
    half, rest = divmod(round(y.shape[2] / 2), 1)
    return y[:, :, : half + rest, : int(y.shape[3] * 0.5)].mean((2, 3)) * (1 / float(half))


def added_where_shapes_are_equal(y):
    z, half = y * 0.5, y[:, :, ::2]
    if y.shape == z.shape and y.size() != half.shape and y.shape[0] == half.shape[0]:
        y = y + z
    if y.shape[:2] != z.shape[:2] or y.shape == (16, 2, 6, 7) or y.shape == z.shape[1:]:
        y = y * 4
    return y.mean((2, 3)) * {6: 0.5}[y.shape[3]]


def if_many(y):
    return y.mean((2, 3)) if y.shape[0] > 1 else y.amax((2, 3))


def if_as_many(y):
    return y.mean((2, 3)) if y.shape == (16, 2, 6, 6) else y.amax((2, 3))


def half_of_them(y):
    return y.mean((2, 3)) * round(y.shape[0] / 2)


def one_by_one(y):
    return sum(y for _ in range(y.shape[0])).mean((2, 3))


def if_large(y):
    return y.mean((2, 3)) if y.max().item() > 0 else y.amax((2, 3))


def images(function):
    torch.manual_seed(0)
    x = torch.randn(16, 1, 6, 6)
    return marvin.calibrate(Bare(lambda _m, y: function(y)), [x], bits=16), x


@pytest.mark.parametrize(
    "function",
    [
        first_rows,
        columns_added,
        pixels_in_a_row,
        by_rank,
        asserted,
        tokens_to_image,
        padded_as_others_do,
        added_where_shapes_are_equal,
    ],
)
def test_code_may_ask_for_ranks_and_for_sizes_of_a_sample(function):
    model, x = images(function)
    far = integer.run(describe(model, x, wl=16), x) - model(x)
    assert far.abs().max() < 1e-3


@pytest.mark.parametrize("function", [if_many, if_as_many, half_of_them, one_by_one, if_large])
def test_code_may_not_ask_how_many_samples_come_or_for_values(function):
    model, x = images(function)
    with pytest.raises(ExportError, match="on values of tensors, or on how many samples come"):
        describe(model, x)


def test_other_ways_to_write_a_number_of_samples_are_named():
    model, x = images(lambda y: y.view(len(y), -1))
    with pytest.raises(ExportError, match=r"length of a value; of a tensor, write x.shape\[0\]"):
        describe(model, x)


@pytest.mark.parametrize("name", ["x", "args"])
def test_a_forward_that_does_not_name_its_input_is_refused(name):
    class Unnamed(Bare):
        def forward(self, *x):
            return super().forward(*x) if name == "args" else super().forward(x[0])

    x = torch.randn(16, 1, 6, 6)
    fixed = marvin.calibrate(Unnamed(lambda _m, y: y), [x])
    with pytest.raises(ExportError, match=r"its input, got \*x: write forward\(self, x\)$"):
        describe(fixed, x)


@pytest.mark.parametrize("size", [[1, 1], [None, 3], (3, 3)], ids=str)
def test_sizes_of_pools_may_be_lists(size):
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 1), nn.AdaptiveMaxPool2d(size), nn.AdaptiveAvgPool2d([1, 1])
    x = torch.randn(16, 1, 6, 6)
    fixed = marvin.calibrate(nn.Sequential(*layers), [x], bits=16)
    far = integer.run(describe(fixed, x, wl=16), x) - fixed(x)
    assert far.abs().max() < 1e-3
    function, _ = images(lambda y: F.adaptive_avg_pool2d(y, [1, 1]))
    assert describe(function, x).operations


def test_lists_that_a_size_makes_longer_are_named():
    def changed(y):
        parts = [1] * (y.shape[2] * y.shape[0])
        parts[0] = 2
        return y

    model, x = images(changed)
    with pytest.raises(
        ExportError, match=r"'a value or a size' .* write the number, such as range"
    ):
        describe(model, x)


def test_values_that_no_format_holds_are_named():
    torch.manual_seed(0)
    x = 1e9 * torch.randn(16, 1, 6, 6)
    model = Bare(lambda _m, y: y.mean((2, 3)))
    model.conv.weight.data *= 1e9
    fixed = marvin.calibrate(model, [x])
    with pytest.raises(
        ExportError, match=r"mean: a format of 8 bits must hold .* \(--wl, or wl= of"
    ):
        describe(fixed, x)
