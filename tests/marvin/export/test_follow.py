"""What a trace cannot see is refused, and a network that is another than its model is found."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune, weight_norm

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.export import ExportError, Formats, describe, integer
from marvin.export.frontend import trace
from marvin.export.graph.nodes import Affine, Conv, Linear, Relu


def settle(model):
    """Give batch normalisation statistics and scales."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for x in (module.running_mean, module.weight.data, module.bias.data):
                x.uniform_(0.2, 1.5)
            module.running_var.uniform_(0.3, 2)


class Net(nn.Module):
    """Calls one function with its layers."""

    def __init__(self, function):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 36, 5)
        self.relu, self.flat = nn.ReLU(inplace=True), nn.Flatten()
        self.same, self.drop = nn.Identity(), nn.Dropout(inplace=True)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def exported(build, *, before=None, after=None):
    """Return a model in fixed point, changed before or after that, and its network."""
    torch.manual_seed(0)
    model = build().eval()
    settle(model)
    if before:
        before(model)
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=8, init_fl=5)
    marvin.quantize_activations(model, optimizer)
    if after:
        after(model)
    return model, describe(model, torch.randn(4, 1, 6, 6), optimizer.formats())


def assert_equal(model, network):
    x = 2 * torch.randn(50, *network.input.shape)
    with torch.no_grad():
        want = model(x.clone()).double()
    torch.testing.assert_close(integer.run(network, x), want, rtol=0, atol=0)


def relu_of_what_is_added(m, x):
    h = m.c1(x)
    return m.fc((m.c2(torch.relu_(h)) + h).flatten(1))


def sum_under_two_names(m, x):
    h = m.c1(x)
    k = h
    h += m.c2(h)
    return m.fc((h + k).flatten(1))


def relu_by_keyword(m, x):
    h = m.c1(x)
    y = F.relu(h, inplace=True)
    return m.fc((m.c2(y) + h).flatten(1))


def relu_by_position(m, x):
    h = m.c1(x)
    y = F.relu(h, True)
    return m.fc((m.c2(y) + h).flatten(1))


def relu_module(m, x):
    h = m.c1(x)
    y = m.relu(h)
    return m.fc((m.c2(y) + h).flatten(1))


def method_relu(m, x):
    h = m.c1(x)
    h.relu_()
    return m.fc((m.c2(h) + h).flatten(1))


def method_add(m, x):
    h = m.c1(x)
    h.add_(m.c2(h))
    return m.fc(h.flatten(1))


def through_modules_that_give_back_what_they_take(m, x):
    h = m.c1(x)
    m.drop(m.same(h)).relu_()
    return m.fc((m.c2(h) + h).flatten(1))


def doubled(m, x):
    h = m.c1(x)
    h += h
    return m.fc(h.flatten(1))


def only_the_view_is_used(m, x):
    return m.fc(m.relu(m.flat(m.c1(x))))


def the_view_comes_after(m, x):
    h = m.c1(x)
    early = h.flatten(1)
    h.relu_()
    return m.fc(m.flat(h) + torch.relu(h).flatten(1)) if early is not None else h


def product_in_place(m, x):
    h = m.c1(x)
    h *= h
    return m.fc(h.flatten(1))


IN_PLACE = [
    relu_of_what_is_added,
    sum_under_two_names,
    relu_by_keyword,
    relu_by_position,
    relu_module,
    method_relu,
    method_add,
    through_modules_that_give_back_what_they_take,
    doubled,
    only_the_view_is_used,
    the_view_comes_after,
    product_in_place,
]


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_compared", [True, False])
def test_operations_in_place_are_computed_as_the_model_does(function, is_compared, monkeypatch):
    if not is_compared:  # the trace is right by itself
        monkeypatch.setattr(trace.Follower, "follow", lambda *_args: None)
    assert_equal(*exported(lambda: Net(function)))


def base_of_a_view(m, x):
    h = m.c1(x)
    torch.relu_(h.flatten(1))
    return m.fc((m.c2(h) + h).flatten(1))


def view_of_a_base(m, x):
    h = m.c1(x)
    g = h.flatten(1)
    h.relu_()
    return m.fc(g)


def base_of_a_module(m, x):
    h = m.c1(x)
    m.relu(m.flat(h))
    return m.fc(h.flatten(1))


def data_replaced(m, x):
    h = m.c1(x)
    h.data = F.relu(h)
    return m.fc(h.flatten(1))


def data_changed(m, x):
    h = m.c1(x)
    h.data.relu_()
    return m.fc(h.flatten(1))


def part_written(m, x):
    h = m.c1(x)
    h[:, 0] = 0
    return m.fc(h.flatten(1))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (base_of_a_view, "c2 uses c1, whose memory relu_ may have changed in place"),
        (view_of_a_base, "fc uses flatten, whose memory relu_ may have changed in place"),
        (base_of_a_module, "flatten uses c1, whose memory relu may have changed in place"),
        (data_replaced, "an attribute of a value is set, data"),
        (data_changed, r"getattr\(c1, data\) cannot be exported"),
        (part_written, "must be traceable by torch.fx"),
    ],
)
def test_what_no_trace_can_follow_is_refused(function, message):
    with pytest.raises(ExportError, match=message):
        exported(lambda: Net(function))


def sequence():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.Flatten(), nn.Linear(144, 5),
    )  # fmt: skip


def larger(*arguments):
    return 1.5 * arguments[2] if len(arguments) == 3 else 1.5 * arguments[1][0]


def bent(*arguments):
    return larger(*arguments).sin()


def doubling(name, function=lambda x: 2 * x):
    def change(model):
        module = model.get_submodule(name)
        forward = module.forward
        module.forward = lambda x: function(forward(x))

    return change


def bending(name):
    return doubling(name, torch.sin)


CHANGES = [
    (lambda m: m[0].register_forward_hook(larger), "0 has a hook after forward .*, larger"),
    (lambda m: m[2].register_forward_hook(larger), "2 has a hook after forward .*, larger"),
    (lambda m: m[2].register_forward_pre_hook(larger), "2 has a hook before forward .*, larger"),
    (lambda m: m.register_forward_hook(larger), "the model has a hook after forward"),
    (lambda m: m.register_forward_pre_hook(larger), "the model has a hook before forward"),
    (lambda m: m[3].register_forward_hook(bent), "sin.* cannot be exported"),
    (doubling("2"), "2 has a forward of its own"),
    (doubling(""), "the model has a forward of its own"),
    (bending("3"), "sin.* cannot be exported"),
    (lambda m: parametrizations.spectral_norm(m[5]), "5 must have plain weights, got a par.* of w"),
    (lambda m: prune.random_unstructured(m[0], "weight", 0.5), "0 has a hook before forward"),
    (lambda m: weight_norm(m[5]), "5 has a hook before forward .*, WeightNorm"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda x: x if type(x) is str else "")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_what_changes_a_module_from_outside_is_refused(change, message, when):
    with pytest.raises(ExportError, match=message):
        exported(sequence, **{when: change})


def test_hooks_on_all_modules_are_refused():
    handle = register_module_forward_hook(larger)
    try:
        with pytest.raises(ExportError, match="no hook on all modules may be set, got larger"):
            exported(sequence)
    finally:
        handle.remove()


def test_a_class_that_changes_forward_is_refused():
    class Larger(nn.ReLU):
        def forward(self, x):
            return 2 * super().forward(x)

    Larger.__module__ = "torch.nn.modules.activation"  # so that the trace does not look inside
    with pytest.raises(ExportError, match="1: Larger cannot be exported"):
        exported(lambda: nn.Sequential(nn.Conv2d(1, 2, 1), Larger()))


def test_hooks_on_what_is_traced_through_are_exported():
    def plain():
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 1)), nn.Flatten(), nn.Linear(64, 5)
        )

    def clipped(_module, _inputs, output):
        return output.relu_()

    model, network = exported(plain, after=lambda m: m[0].register_forward_hook(clipped))
    assert_equal(model, network)
    assert sum(isinstance(op, Relu) for op in network.operations) == 1


def test_the_sample_stays_as_it_is():
    def function(m, x):
        y = m.fc(m.relu(m.c1(x)).flatten(1))
        x.zero_()
        return y

    x = torch.ones(2, 1, 6, 6)
    model = Net(function).eval()
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=8, init_fl=5)
    marvin.quantize_activations(model, optimizer)
    with pytest.raises(ExportError, match="zero_"):
        describe(model, x, optimizer.formats())
    assert (x == 1).all()


def changed(kind, change):
    """Return a pass that changes the first operation of a kind, as a fault in a translation would."""

    def do(network):
        op = next(op for op in network.operations if isinstance(op, kind))
        operations = tuple(change(o) if o is op else o for o in network.operations)
        return replace(network, operations=operations)

    return do


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Conv, lambda op: replace(op, weight=op.weight + (op.weight == 1)), r"0\.weight: "),
        (Conv, lambda op: replace(op, weight=op.weight.flip(3)), r"0\.weight: "),
        (Conv, lambda op: replace(op, bias=op.bias + 1), r"0\.bias: 4 of 4 exported numbers are"),
        (Affine, lambda op: replace(op, scale=op.scale + 200), r"1\.scale: 4 of 4 exported"),
        (Affine, lambda op: replace(op, offset=-op.offset), r"1\.offset: 4 of 4 exported"),
    ],
)
def test_a_number_that_rounding_does_not_explain_is_named(kind, change, message, monkeypatch):
    monkeypatch.setattr(trace, "shorten_scales", changed(kind, change))
    with pytest.raises(ExportError, match=message):
        exported(sequence)


def test_a_layer_that_computes_something_else_is_named(monkeypatch):
    def dilated(op):
        return replace(op, padding=(2, 2), dilation=(2, 2))

    monkeypatch.setattr(trace, "shorten_scales", changed(Conv, dilated))
    with pytest.raises(ExportError, match="0 computes something else than what is exported for it"):
        exported(sequence)


def test_the_first_module_that_differs_is_named_with_the_gap(monkeypatch):
    """Behind one fault, another: each module is compared on its own inputs."""
    monkeypatch.setattr(trace, "check_own", lambda *_: None)

    def change(model):
        model[3][0].register_forward_hook(lambda _m, _i, y: y + 1)
        model[5].register_forward_hook(lambda _m, _i, y: 2 * y)

    message = r"3\.0 computes something else .*: \d+ of 576 values are up to 1 from what round"
    with pytest.raises(ExportError, match=message):
        exported(sequence, before=change)


def test_values_changed_between_modules_are_found(monkeypatch):
    monkeypatch.setattr(trace, "check_own", lambda *_: None)
    for name, where in (("2", "2 takes something else than 1.out"), ("", "0 takes something else")):
        with pytest.raises(ExportError, match=where):
            exported(
                sequence,
                after=lambda m, n=name: m.get_submodule(n).register_forward_pre_hook(larger),
            )
    with pytest.raises(ExportError, match="the model gives something else than its last call"):
        exported(sequence, after=lambda m: m.register_forward_hook(larger))


def test_stochastic_rounding_in_evaluation_is_refused():
    model = sequence().eval()
    optimizer = marvin.MSGD(model.named_parameters(), init_wl=8, init_fl=5)
    marvin.quantize_activations(model, optimizer, eval_rounding="stochastic")
    with pytest.raises(ExportError, match="0 takes something else than input_1"):
        describe(model, torch.randn(4, 1, 6, 6), optimizer.formats())


def test_formats_that_no_operation_has_are_found():
    """A ReLU is exported without a rounding: formats that say so are not left out in silence."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, 2, 1, bias=False))
    formats = {"0.weight": FixedPoint(8, 6), "2.weight": FixedPoint(8, 6)}
    model = marvin.export.nearest_weights(model, formats)
    rounds = {"0": Formats(FixedPoint(8, 5), None), "2": Formats(FixedPoint(8, 5), None)}
    x = torch.randn(9, 1, 4, 4)
    assert describe(model, x, formats, rounds).origin == "calibrated"
    with pytest.raises(ExportError, match="1 computes something else"):
        describe(model, x, formats, rounds | {"1": Formats(None, FixedPoint(4, 1))})


@pytest.mark.parametrize("bits", [(3, 4), (4, 4), (6, 6)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_float_biases_change_no_rounding(bits, per_channel):
    """With words of up to 6 bits, and a layer whose sums nothing rounds as the last."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32, 20), nn.ReLU(), nn.Linear(20, 5),
    )  # fmt: skip
    for module in (model[0], model[2], model[6], model[8]):
        nn.init.normal_(module.bias, 0, 0.3)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.0)
    policy = marvin.StaticPolicy(*bits, per_channel=per_channel)
    optimizer = marvin.Quantized(sgd, policy, one_dim="float")
    marvin.quantize_activations(model, optimizer)
    for _ in range(2):  # the first is in floats
        loss = model(torch.randn(32, 2, 8, 8)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    model.eval()
    network = describe(model, torch.randn(8, 2, 8, 8), optimizer.formats())
    x, last = torch.randn(100, 2, 8, 8), network.operation("8")
    assert isinstance(last, Linear)
    with torch.no_grad():
        want = model(x).double()
    step = float(network.values["8"].fl)
    # the last bias is rounded to a step; float32 has 24 bits of each sum
    gap = (integer.run(network, x) - want).abs()
    assert gap.max() <= 2.0**-step + 2.0**-22 * want.abs().max()


def finer_than_sums(change=None):
    """Return a network whose first layer's output format is finer than its exported sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 3, bias=False))
    formats = {"0.weight": FixedPoint(4, 2), "1.weight": FixedPoint(3, 3)}
    model = marvin.export.nearest_weights(model, formats)
    if change:
        model[0].register_forward_hook(change)
    long = FixedPoint(32, 24)
    rounds = {"0": Formats(FixedPoint(8, 5), long), "1": Formats(long, None)}
    return describe(model, torch.randn(40, 8), formats, rounds)


def test_a_rounding_that_is_left_out_is_one_of_the_model(monkeypatch):
    """The bias is exported coarser than the output's format; the model's own sums are rounded to that."""
    network = finer_than_sums()
    assert [type(op).__name__ for op in network.operations[1:]] == ["Round", "Linear", "Linear"]
    assert network.values["0"].fl < 24
    assert network.values["1"].is_exact(24)  # as exported; the model's own sums are longer
    monkeypatch.setattr(trace, "check_own", lambda *_: None)
    with pytest.raises(ExportError, match=r"0 computes something else .* up to 3.*e-05 from"):
        finer_than_sums(lambda _m, _i, y: y + 2.0**-15)


@pytest.mark.parametrize("seed", [3, 5, 15, 19])
def test_formats_of_two_calibrations_are_followed(seed):
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)), torch.randn(8, 4)
    short, long = (marvin.calibrate(model, [x], bits=n, weight_bits=4) for n in (9, 16))
    second = {k: v for k, v in long.state_dict().items() if k.startswith("1.")}
    short.load_state_dict(short.state_dict() | second)
    network = describe(marvin.freeze(short), x)
    assert network.values["1"].fl < 16
    assert network.output == "1"


def test_one_module_between_layers_of_different_formats():
    """What comes in already rounded says nothing of what a module rounds."""
    model = Net(lambda m, x: m.fc(m.same(m.c2(m.same(m.c1(x)))).flatten(1))).eval()
    groups = [
        {"params": [(name, p)], "init_wl": 8 + ("c2" in name), "init_fl": 5}
        for name, p in model.named_parameters()
    ]
    optimizer = marvin.MSGD(groups)
    marvin.quantize_activations(model, optimizer)
    assert_equal(model, describe(model, torch.randn(4, 1, 6, 6), optimizer.formats()))


def test_the_largest_numbers_of_long_formats_are_those_of_float32():
    """The largest code of <32, 24> is 128 - 2^-24; float32 has 128 - 2^-17."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.FixedPolicy(32, 24))
    marvin.quantize_activations(model, optimizer)
    x = 500 * torch.randn(16, 4)
    assert (model[:1].eval()(x) > 127).any()
    assert describe(model, x, optimizer.formats()).operations


class Gate(nn.Module):
    """Multiplies half of the channels by a function of the others, which lie between them."""

    def __init__(self, layer, dim, function, *behind):
        super().__init__()
        self.layer, self.dim, self.function = layer, dim, function
        self.same = nn.Identity()
        self.rest = nn.Sequential(*behind)

    def forward(self, x):
        p, q = self.layer(x).chunk(2, self.dim)
        return self.rest(p * self.function(self.same(q)))


@pytest.mark.parametrize(
    "function", [torch.sigmoid, F.silu, F.gelu], ids=["sigmoid", "silu", "gelu"]
)
@pytest.mark.parametrize("kind", ["norm", "output", "image"])
def test_functions_of_parts_are_computed_as_they_lie(kind, function):
    """PyTorch computes a function of every other row by another kernel, which may differ in the last bit."""
    torch.manual_seed(0)
    layer, dim, x = nn.Linear(8, 32), -1, torch.randn(32, 5, 8)
    if kind == "image":
        layer, dim, x = nn.Conv2d(3, 8, 3), 1, torch.randn(8, 3, 9, 9)
    behind = [nn.LayerNorm(16), nn.Linear(16, 3)] if kind == "norm" else []
    model = marvin.calibrate(Gate(layer, dim, function, *behind), [x])
    assert "mul" in describe(model, x).values
