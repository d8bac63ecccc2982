"""Models that users change, or share, after activations were quantised."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import marvin
import marvin.integer
from fixedpoint_kernels import FixedPoint
from marvin import masters
from marvin.rounder import formats_of
from marvin.rounding import round_many
from tests.same import assert_same

OF_OTHERS = "rounds by the formats of another optimizer or of a loaded state"


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def make_optimizer(parameters):
    return marvin.Quantized(torch.optim.SGD(parameters, lr=0.05), marvin.LossBudgetPolicy())


def train(model, *optimizers, steps=3):
    for _ in range(steps):
        model.zero_grad()
        loss = F.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step(loss=loss)


def trained(steps=3):
    model = make_model()
    optimizer = make_optimizer(model.named_parameters())
    handle = marvin.quantize_activations(model, optimizer)
    train(model, optimizer, steps=steps)
    return model, optimizer, handle


def inputs_seen(model, name):
    """Return what comes into a layer, behind all hooks there are."""
    seen = []
    layer = model.get_submodule(name)
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.eval()(torch.randn(16, 8))
    model.train()
    hook.remove()
    return seen[0]


def is_in(x, fmt):
    codes = x.detach().double() * 2.0**fmt.fl
    low, high = (-(2 ** (fmt.wl - 1)), 2 ** (fmt.wl - 1) - 1) if fmt.signed else (0, 2**fmt.wl - 1)
    return torch.equal(codes, codes.round()) and low <= codes.min() and codes.max() <= high


@pytest.mark.parametrize("split", [2, 4])
def test_two_optimizers_of_one_model(split):
    model = make_model()
    named = list(model.named_parameters())
    first, second = make_optimizer(named[:split]), make_optimizer(named[split:])
    handles = [marvin.quantize_activations(model, own) for own in (first, second)]
    train(model, first, second)
    formats = {**first.input_formats(), **second.input_formats()}
    assert [*formats] == ["0.weight", "2.weight", "4.weight"]
    for name, fmt in formats.items():
        assert is_in(inputs_seen(model, name.partition(".")[0]), fmt)
    assert [len(handle.layers()) for handle in handles] == [split // 2, 3 - split // 2]
    assert set(handles[1].report.left.values()) == {OF_OTHERS}
    x = torch.randn(4, 8)
    assert torch.equal(marvin.freeze(model)(x), model.eval()(x))


def test_a_weight_and_its_bias_may_have_two_optimizers():
    """The optimizer of the weight decides; both write what the module carries, in either order."""

    def trained(order):
        torch.manual_seed(0)
        model = make_model()
        named = list(model.named_parameters())
        hidden = [own for own in named if own[0] in ("0.weight", "2.weight")]
        rest = [
            own for own in named if own[0] not in dict(hidden)
        ]  # whose layer, the last, gives biases formats
        weights = marvin.Quantized(torch.optim.SGD(hidden, lr=0.05), marvin.LossBudgetPolicy())
        others = marvin.Quantized(torch.optim.AdamW(rest), marvin.FixedPolicy(12, 6))
        pair = [weights, others]
        handles = [marvin.quantize_activations(model, own) for own in pair[::order]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, weights, others, steps=6)
            others.param_groups[0]["wl"] = 10
            train(model, weights, others)
        return model, weights, handles[::order]

    for order in (1, -1):
        model, weights, handles = trained(order)
        assert [handle.layers() for handle in handles] == [["0", "2"], ["4"]]
        assert handles[1].report.left["0"] == OF_OTHERS
        carried = formats_of(model)
        for name in ("0", "2"):
            assert carried[name].inputs == weights.input_formats()[f"{name}.weight"]
            assert is_in(inputs_seen(model, name), carried[name].inputs)
            assert carried[name].weights == (weights.formats()[f"{name}.weight"], FixedPoint(10, 6))
        assert carried["4"].inputs == FixedPoint(10, 6)
        x = torch.randn(4, 8)
        assert torch.equal(marvin.freeze(model)(x), model.eval()(x))


def with_a_backbone(how="file", **chosen):
    """Return a model whose first layer is frozen, and the optimizer of the others."""
    model = make_model()
    if how != "float":
        marvin.prepare(model)
    if how == "file":
        model.load_state_dict(trained()[0].state_dict())
    model[0].requires_grad_(False)
    torch.manual_seed(0)
    optimizer = make_optimizer([*model.named_parameters()][2:])
    handle = marvin.quantize_activations(model, optimizer, **chosen)
    train(model, optimizer)
    model[0].requires_grad_(True)
    return model, optimizer, handle


@pytest.mark.parametrize("how", ["float", "prepared", "file"])
def test_a_prepared_layer_that_comes_later_rounds_by_the_optimizer(how):
    model, optimizer, handle = with_a_backbone(how)
    first = formats_of(model).get("0")
    assert (how == "file") == bool(first and first.inputs)
    assert (how == "float") != (handle.report.left["0"] == OF_OTHERS)
    optimizer.add_param_group({"params": model[0].named_parameters(prefix="0")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, steps=30)
    assert handle.layers() == ["0", "2", "4"]
    assert not handle.report.left
    inputs = optimizer.input_formats()["0.weight"]
    assert formats_of(model)["0"].inputs == inputs
    assert is_in(inputs_seen(model, "0"), inputs)


def test_a_prepared_layer_that_comes_later_and_is_excluded_stays():
    model, optimizer, handle = with_a_backbone(exclude=["0"])
    before = formats_of(model)["0"].inputs
    optimizer.add_param_group({"params": model[0].named_parameters(prefix="0")})
    train(model, optimizer, steps=30)
    assert handle.layers() == ["2", "4"]
    assert formats_of(model)["0"].inputs == before


def test_a_refused_group_leaves_a_prepared_layer_as_it_was(monkeypatch):
    model, optimizer, handle = with_a_backbone()
    state, hooks = copy.deepcopy(model.state_dict()), dict(model[0]._forward_pre_hooks)
    monkeypatch.setattr(type(optimizer.policy), "init", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.add_param_group({"params": model[0].named_parameters(prefix="0")})
    monkeypatch.undo()
    assert dict(model[0]._forward_pre_hooks) == hooks
    assert handle.report.left["0"] == OF_OTHERS
    assert handle.layers() == ["2", "4"]
    assert_same(model.state_dict(), state)
    optimizer.add_param_group({"params": model[0].named_parameters(prefix="0")})
    assert handle.layers() == ["0", "2", "4"]


def test_an_optimizer_of_all_parameters_takes_the_place_of_two():
    model = make_model()
    named = list(model.named_parameters())
    handles = [
        marvin.quantize_activations(model, make_optimizer(own)) for own in (named[:2], named[2:])
    ]
    whole = make_optimizer(named)
    handle = marvin.quantize_activations(model, whole)
    train(model, whole)
    assert [own.layers() for own in (*handles, handle)] == [[], [], ["0", "2", "4"]]


def test_a_module_of_another_optimizer_is_the_model_itself():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 8))
            self.layers = make_model()

        def forward(self, x):
            return self.layers(x * self.scale)

    model = Scaled()
    first = make_optimizer([("scale", model.scale)])
    marvin.quantize_activations(model, first)
    second = make_optimizer(model.layers.named_parameters())
    handle = marvin.quantize_activations(model, second)
    train(model, first, second)
    assert handle.layers() == ["layers.0", "layers.2", "layers.4"]
    fmt = first.input_formats()["scale"]
    assert is_in(inputs_seen(model, ""), fmt)


def test_a_layer_that_took_the_place_of_another():
    model, optimizer, _ = trained()
    model[4] = nn.Linear(16, 3)
    with pytest.warns(UserWarning, match=r"not trained: 4\.bias, 4\.weight; load states"):
        train(model, optimizer, steps=10)
    new = [(f"new.{name}", p) for name, p in model[4].named_parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": new})
        marvin.quantize_activations(model, optimizer)
        train(model, optimizer, steps=25)
    assert is_in(inputs_seen(model, "4"), optimizer.input_formats()["new.weight"])


@pytest.mark.parametrize("between", [lambda _: None, lambda optimizer: optimizer.state_dict()])
def test_modules_that_came_are_named_at_the_first_step(between):
    """Where their parameters were given, and quantize_activations was not called again."""
    model, optimizer, _ = trained()
    model.append(nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": model[5].named_parameters(prefix="5")})
        between(optimizer)
    with pytest.warns(UserWarning, match="do not round: 5; call it again") as seen:
        train(model, optimizer, steps=1)
    assert {own.filename for own in seen} == {__file__}
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        train(model, optimizer, steps=25)


def make_replaced(is_given=True):
    """Return a model whose layer was replaced, and its optimizer, which has both."""
    model = nn.ModuleDict({"body": nn.Linear(8, 16), "fc": nn.Linear(16, 3)})
    model.forward = lambda x: model["fc"](model["body"](x).relu())
    optimizer = make_optimizer(model.named_parameters())
    marvin.quantize_activations(model, optimizer)
    model["fc"] = nn.Linear(16, 3)
    if is_given:
        optimizer.add_param_group({"params": model["fc"].named_parameters(prefix="fc.new")})
        marvin.quantize_activations(model, optimizer)
    return model, optimizer


def test_a_layer_with_the_names_of_the_one_before_is_told_others():
    model, optimizer = make_replaced(is_given=False)
    new = model["fc"].named_parameters(prefix="fc")
    message = (
        r"got \['fc\.bias', 'fc\.weight'\] .*model\.fc\.named_parameters\(prefix=\"fc\.new\"\)"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": new})
    assert len(optimizer.param_groups) == len(optimizer.optimizer.param_groups) == 1


def test_a_layer_that_left_and_has_a_gradient_still_gets_formats_that_hold_it():
    """The old weight is in the loss, as in what keeps new weights near it; it grows."""
    model = nn.ModuleDict({"body": nn.Linear(8, 8, bias=False), "fc": nn.Linear(8, 8, bias=False)})
    optimizer = marvin.Quantized(
        torch.optim.SGD(model.named_parameters(), lr=0.1), marvin.StaticPolicy(8, 8)
    )
    x, old = torch.ones(4, 8), model["body"].weight
    marvin.quantize_activations(model, optimizer)

    def step(pull):
        optimizer.zero_grad(set_to_none=False)
        loss = model["fc"](model["body"](x)).square().mean() - pull * old.sum()
        loss.backward()
        optimizer.step(loss=loss.detach())

    step(0)
    model["body"] = nn.Linear(8, 8, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layer left
        for _ in range(4):
            step(200)
    master = optimizer.state[old]["master"]
    assert master.min() > 60
    torch.testing.assert_close(old.detach(), master, atol=1.0, rtol=0)
    rows = [row for row in optimizer.trace if row.layer == "body.weight"]
    assert rows[-1].fl == optimizer.formats()["body.weight"].fl


def test_a_replaced_layer_learns_and_resumes():
    torch.manual_seed(0)
    model, optimizer = make_replaced()
    train(model, optimizer)
    torch.manual_seed(1)
    other, resumed = make_replaced()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    before = model["fc"].weight.clone()
    for pair in ((model, optimizer), (other, resumed)):
        torch.manual_seed(2)
        train(*pair)
    assert (model["fc"].weight != before).any()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_parameters_that_a_state_replaced():
    model, optimizer, _ = trained()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.warns(UserWarning, match=r"0\.bias, 0\.weight, 2\.bias and 3 more; load states"):
        train(model, optimizer, steps=10)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        train(model, optimizer, steps=25)


@pytest.mark.parametrize("steps", [1, 100])
def test_a_model_that_left_its_optimizer_is_named_where_formats_do_not_change(steps):
    """Moved to the meta device, a model has other parameters; in part, where layers are replaced."""
    model = make_model()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.0)
    optimizer = marvin.Quantized(sgd, marvin.FixedPolicy(8, 4))
    marvin.quantize_activations(model, optimizer)
    train(model, optimizer, steps=1)
    optimizer.zero_grad()
    if steps == 1:
        state = copy.deepcopy(model.state_dict())
        model.to("meta").to_empty(device="cpu").load_state_dict(state)
    else:
        model[4] = nn.Linear(16, 3)
    with pytest.warns(UserWarning, match="parameters that left the model are trained in vain"):
        train(model, optimizer, steps=steps)


def test_weights_that_got_other_memory():
    model, optimizer, _ = trained()
    model[0].weight.data = torch.zeros(16, 8)
    with pytest.warns(UserWarning, match=r"the new masters, rounded: 0\.weight"):
        train(model, optimizer, steps=1)
    assert optimizer.state[model[0].weight]["master"].abs().max() <= 0.05 * 10


def test_other_memory_at_the_same_address():
    model, optimizer, _ = trained()
    weight = model[0].weight
    memory = bytearray(weight.nbytes)

    def lie_there(values):
        weight.data = torch.empty(0)  # nobody holds the memory now, and it could be given to others
        there = torch.frombuffer(memory, dtype=torch.float32).view(16, 8)
        weight.data = there.copy_(values)

    lie_there(weight.detach().clone())
    train(model, optimizer, steps=1)
    lie_there(torch.zeros(16, 8))
    with pytest.warns(UserWarning, match=r"the new masters, rounded: 0\.weight"):
        train(model, optimizer, steps=1)
    assert optimizer.state[weight]["master"].abs().max() <= 0.05 * 10


def test_other_part_of_the_same_memory():
    model, optimizer, _ = trained()
    weight = model[0].weight
    both = torch.stack([weight.detach(), torch.zeros(16, 8)])
    weight.data = both[0]
    train(model, optimizer, steps=1)
    weight.data = both[1]
    with pytest.warns(UserWarning, match=r"the new masters, rounded: 0\.weight"):
        train(model, optimizer, steps=1)
    assert optimizer.state[weight]["master"].abs().max() <= 0.05 * 10


def test_pruned_weights_stay_pruned():
    model, optimizer, _ = trained()
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    train(model, optimizer)
    prune.remove(model[2], "weight")
    zeros = model[2].weight == 0
    with pytest.warns(UserWarning, match=r"the new masters, rounded: 2\.weight"):
        train(model, optimizer, steps=1)
    assert zeros.sum() >= 128
    master = optimizer.state[model[2].weight]["master"]
    assert master[zeros].abs().max() < 0.1 < master[~zeros].abs().max()


def climb_and_go_back(model, optimizer, *, exactly, steps=6, size=0.05):
    """Train with perturbed weights, as SAM does."""
    for _ in range(steps):
        weights = [*model.parameters()]
        old = [p.detach().clone() for p in weights]
        with torch.no_grad():
            moves = [size * torch.randn(p.shape).to(p.dtype) for p in weights]
            for p, move in zip(weights, moves, strict=True):
                p.add_(move)
        model.zero_grad()
        x = torch.randn(16, 8, dtype=weights[0].dtype)
        F.cross_entropy(model(x), torch.randint(3, (16,))).backward()
        with torch.no_grad():
            for p, move, before in zip(weights, moves, old, strict=True):
                if exactly:
                    p.copy_(before)
                else:
                    p.sub_(move)
        optimizer.step(loss=1.0)


@pytest.mark.parametrize("size", [1e-3, 0.05])
@pytest.mark.parametrize(
    "policy",
    [
        marvin.StaticPolicy(6, 8),
        marvin.StaticPolicy(6, 8, per_channel=True),
        marvin.StaticPolicy(16, 16),
        marvin.MarvinPolicy(),
        marvin.MuppetPolicy(),
    ],
)
@pytest.mark.parametrize("compact_state", [False, True])
def test_what_is_taken_back_but_for_rounding_is_no_change(policy, size, compact_state):
    found = []
    for exactly in (True, False):  # without a warning, which would be an error here
        model = make_model()
        sgd = torch.optim.SGD(model.named_parameters(), lr=1e-3)
        options = {"compact_state": compact_state, "one_dim": "previous"}
        optimizer = marvin.Quantized(sgd, policy, **options)
        train(model, optimizer, steps=1)  # from now on all have formats
        climb_and_go_back(model, optimizer, exactly=exactly, size=size)
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


def test_what_is_taken_back_is_as_it_was_when_a_state_is_saved():
    model = make_model()
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05)  # rounds by noise
    train(model, optimizer)
    weight = model[0].weight
    before, move = weight.detach().clone(), 0.01 * torch.randn(16, 8)
    with torch.no_grad():
        weight.add_(move).sub_(move)
    assert not torch.equal(weight, before)
    optimizer.state_dict()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wl", [4, 8, 16])
def test_what_rounding_leaves_in_16_bits_is_added_to_masters(wl, dtype):
    torch.manual_seed(0)
    p = nn.Parameter((torch.randn(64, 32) * 0.1).to(dtype))
    optimizer = marvin.Quantized(torch.optim.SGD([p], lr=0.01), marvin.StaticPolicy(wl, 8))
    p.grad = torch.randn_like(p)
    optimizer.step(loss=1.0)
    master, before = optimizer.state[p]["master"].clone(), p.detach().float()
    move = (0.01 * torch.randn(p.shape)).to(dtype)
    with torch.no_grad():
        p.add_(move).sub_(move)
    off = p.detach().float() - before
    optimizer.state_dict()
    large = before.abs() > move.float().abs()
    assert off[large].any()
    wanted = master + off
    assert torch.equal(optimizer.state[p]["master"][large], wanted[large])


def test_a_small_change_of_float32_weights_is_exact():
    model, optimizer, _ = trained()
    weight, lsb = model[0].weight, optimizer.formats()["0.weight"].lsb
    master = optimizer.state[weight]["master"].clone()
    with torch.no_grad():
        weight[0] += lsb / 8
    changed = weight[0].detach().clone()
    optimizer.state_dict()
    assert torch.equal(optimizer.state[weight]["master"][0], changed)
    assert torch.equal(optimizer.state[weight]["master"][1:], master[1:])


def test_changes_are_named_once():
    model, optimizer, _ = trained()
    told = []
    for names in (["0"], ["0"], ["2", "0"], ["2"]):
        with torch.no_grad():
            for name in names:
                model.get_submodule(name).weight.clamp_(-0.11, 0.11)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, steps=1)
        told.append([str(w.message).partition("rounded: ")[2] for w in caught])
    assert told == [["0.weight"], [], ["2.weight"], []]


class _ByFirstBatch(nn.Module):
    """Normalises as the first batch says, as ActNorm does."""

    def __init__(self):
        super().__init__()
        self.bias, self.linear = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)
        self.is_new = True

    def forward(self, x):
        if self.is_new:
            self.is_new = False
            self.bias.data.sub_(x.mean(0))
            self.linear.weight.data.mul_(0.5)
        return self.linear(x + self.bias)


@pytest.mark.parametrize("policy", [marvin.StaticPolicy(), marvin.MarvinPolicy()])
def test_a_first_forward_may_write_into_data(policy):
    model = _ByFirstBatch()
    before = model.linear.weight.detach().clone()
    optimizer = marvin.Quantized(torch.optim.SGD(model.named_parameters(), lr=0.0), policy)
    x = 3 + torch.rand(8, 4)
    model(x).sum().backward()
    with pytest.warns(UserWarning, match=r"are the new masters, rounded: bias, linear\.weight"):
        optimizer.step(loss=0.0)
    torch.testing.assert_close(optimizer.state[model.bias]["master"], -x.mean(0))
    assert (optimizer.state[model.linear.weight]["master"] - before / 2).abs().max() < 0.03


def test_a_master_that_is_not_finite_is_refused_in_the_first_step():
    model = make_model()
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05, lookback=(1, 1))
    optimizer.state[model[0].weight]["master"][0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"must be finite, got 0\.weight"):
        train(model, optimizer, steps=1)


@pytest.mark.parametrize("steps", [1, 99])
@pytest.mark.parametrize("policy", [marvin.StaticPolicy(), marvin.MarvinPolicy()])
def test_what_is_written_into_data_is_named(policy, steps):
    model = make_model()
    optimizer = marvin.Quantized(torch.optim.SGD(model.named_parameters(), lr=0.05), policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, steps=steps)
    model[2].weight.data.clamp_(-0.01, 0.01)
    with pytest.warns(
        UserWarning, match=r"weight\.data is lost at the next step: 2\.weight; write"
    ):
        train(model, optimizer, steps=1)
    model[0].weight.data.clamp_(-0.01, 0.01)
    optimizer.adopt_weights()
    with torch.no_grad():
        model[4].bias.mul_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, steps=101)


def test_what_another_process_writes_is_named():
    model = make_model().share_memory()
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05)
    train(model, optimizer, steps=1)
    model[2].weight.data.clamp_(-0.01, 0.01)  # as the step of another, which no version counts
    with pytest.warns(UserWarning, match=r"by one of them, got others' values .*: 2\.weight; let"):
        train(model, optimizer, steps=1)


@pytest.mark.parametrize(("numbers", "calls"), [(1 << 24, 1), (200, 3)])
def test_a_look_rounds_many_weights_at_once(monkeypatch, numbers, calls):
    model = make_model()
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05)
    train(model, optimizer, steps=1)
    model[0].bias.data.zero_()
    model[2].weight.data.clamp_(-0.01, 0.01)
    rounded = []

    def count(xs, *args, **options):
        rounded.append([tuple(x.shape) for x in xs])
        return round_many(xs, *args, **options)

    monkeypatch.setattr(masters, "_PIECE", numbers)
    monkeypatch.setattr(masters, "round_many", count)
    with pytest.warns(UserWarning, match=r"at the next step: 0\.bias, 2\.weight; write"):
        optimizer._name_unseen()
    assert len(rounded) == calls
    assert [s for call in rounded for s in call] == [tuple(p.shape) for p in model.parameters()]


@pytest.mark.parametrize("policy", [marvin.LossBudgetPolicy(), marvin.MarvinPolicy()])
def test_memory_alone_changes_no_master(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 3, 3, bias=False))
    optimizer = marvin.Quantized(torch.optim.SGD(model.named_parameters(), lr=0.05), policy)
    marvin.quantize_activations(model, optimizer)

    def step(own, of):
        own.zero_grad()
        loss = own(torch.ones(2, 4, 6, 6, dtype=own[0].weight.dtype)).float().square().mean()
        loss.backward()
        of.step(loss=loss)

    step(model, optimizer)
    master = optimizer.state[model[0].weight]["master"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.to(memory_format=torch.channels_last)
        copied = copy.deepcopy((model, optimizer))
        for own, of in ((model, optimizer), copied):
            own.zero_grad()
            of.step(loss=1.0)
            assert torch.equal(of.state[own[0].weight]["master"], master)
        step(model.half(), optimizer)


@pytest.mark.filterwarnings("ignore:weights that .* has rounded")
def test_a_new_optimizer_is_told_of_a_model_that_rounds_by_the_one_before():
    model, _before, _ = trained()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy())
    with pytest.warns(UserWarning, match="the optimizer that had these parameters before"):
        optimizer.step(loss=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "weights that .* has rounded")
        another = make_optimizer(model.named_parameters())
        marvin.quantize_activations(model, another)
        train(model, another)


def test_handles_know_when_they_are_gone():
    _model, _optimizer, handle = trained()
    handle.remove()
    assert handle.layers() == []
    assert str(handle.report).startswith("0 modules round activations")


def test_what_the_user_leaves_out_does_not_round_though_it_is_the_model_itself():
    model = nn.Linear(8, 3)
    optimizer = make_optimizer(model.named_parameters())
    with pytest.raises(ValueError, match="no module that may round is left"):
        marvin.quantize_activations(model, optimizer, exclude=nn.Linear)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_float64_is_refused_where_it_would_not_be_rounded(is_frozen):
    model, _optimizer, _ = trained()
    model = marvin.freeze(model) if is_frozen else model.eval()
    with pytest.raises(TypeError, match=r"got float64: write model\.float\(\)"):
        model.double()(torch.randn(4, 8, dtype=torch.float64))


def test_batches_of_no_sample_are_named():
    model, optimizer, _ = trained()
    optimizer.zero_grad()
    model(torch.randn(0, 8)).sum().backward()
    with pytest.raises(ValueError, match="leave out empty batches"):
        optimizer.step(loss=0.0)


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("way", ["vmap", "grad", "jvp", "jacrev"])
def test_transforms_of_torch_func_are_named(way, mode, is_converted):
    model, _optimizer, _ = trained()
    if is_converted:
        marvin.integer.convert(model)
    model.train(mode == "train")
    x, parameters = torch.randn(4, 8), {k: p.detach() for k, p in model.named_parameters()}
    ways = {
        "vmap": lambda: torch.func.vmap(model)(x),
        "grad": lambda: torch.func.grad(
            lambda own: torch.func.functional_call(model, own, (x,)).sum()
        )(parameters),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
        "jacrev": lambda: torch.func.jacrev(model)(x),
    }
    with pytest.raises(TypeError, match=r"inside of torch\.func, whose transforms"):
        ways[way]()
