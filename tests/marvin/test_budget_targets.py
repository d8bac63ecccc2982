"""Targets and options of the loss budget, judged by the formats that the optimizer ends with."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
import perfmodel
from marvin import LossBudgetPolicy, Quantized

WIDTHS = 8, 24, 20, 16, 24, 12, 20, 16, 24, 12, 16, 4


def make(lr: float = 0.05, activation: type[nn.Module] = nn.ReLU, **options):
    torch.manual_seed(0)
    layers = [
        layer for a, b in itertools.pairwise(WIDTHS) for layer in (nn.Linear(a, b), activation())
    ]
    model = nn.Sequential(*layers[:-1])
    sgd = torch.optim.SGD(model.named_parameters(), lr=lr, momentum=0.9)
    optimizer = Quantized(sgd, LossBudgetPolicy(window=4, **options), normalize_gradients=True)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def train(model, optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 8, generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step(loss=loss.item())


def mean_bits(optimizer) -> float:
    """Means of weights and of inputs, by hand."""
    own, inputs = optimizer.formats(), optimizer.input_formats()
    assert len(own) == len(inputs) == len(WIDTHS) - 1
    every = [fmt.wl for fmt in own.values()] + [fmt.wl for fmt in inputs.values()]
    return sum(every) / len(every)


MADDS = tuple((f"{2 * i}.weight", a * b) for i, (a, b) in enumerate(itertools.pairwise(WIDTHS)))


def ebops(optimizer) -> int:
    own, inputs = optimizer.formats(), optimizer.input_formats()
    return sum(
        madds * (own[name].wl - 1) * (inputs[name].wl - inputs[name].signed)
        for name, madds in MADDS
    )


@pytest.mark.parametrize("target", [4.3, 5.0, 6.5, 7.8])
@pytest.mark.parametrize("kappa", [1e-6, 0.01, 10.0])
def test_bits_are_met_whatever_kappa(target, kappa):
    model, optimizer = make(target_bits=target, kappa=kappa)
    for steps in (1, 4, 15):  # to the first switch, and to later ones
        train(model, optimizer, steps)
        assert mean_bits(optimizer) == pytest.approx(target, abs=0.5 / 22 + 1e-9, rel=0)


@pytest.mark.parametrize("target", [50_000, 90_000])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])  # inputs without signs, and with them
def test_ebops_are_met(target, activation):
    model, optimizer = make(activation=activation, target_ebops=target, madds=MADDS)
    train(model, optimizer, 20)
    assert ebops(optimizer) == pytest.approx(target, rel=0.02)
    free, without = make(activation=activation)
    train(free, without, 20)
    assert ebops(without) != pytest.approx(target, rel=0.02)


@pytest.mark.parametrize(
    ("target", "length"), [({"target_ebops": 1.0}, 4), ({"target_ebops": 1e12}, 8)]
)
def test_out_of_reach_the_nearest_is_taken_and_named(target, length):
    model, optimizer = make(**target, madds=MADDS)
    with pytest.warns(UserWarning, match=r"target_ebops=\S+ is not met: the nearest .* 4 to 8"):
        train(model, optimizer, 4)
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        train(model, optimizer, 8, start=4)
    assert {fmt.wl for fmt in optimizer.formats().values()} == {length}


def test_a_target_that_ends_leave_no_room_for_is_named():
    options = {"target_bits": 4.0, "ends_wl": 8}
    model, optimizer = make(**options)
    with pytest.warns(
        UserWarning,
        match=r"target_bits=4 is not met: the nearest formats have 4\.7\d*, with words of 4 to 8 bits, and of 8 "
        "in the first and the last layer; set another target_bits, ends_wl, min_wl or max_wl",
    ):
        train(model, optimizer, 4)


def test_the_target_keeps_the_order_of_the_rule():
    """A factor on all noise: who had longer words without a target has no shorter ones with it."""
    options = {"kappa": 1e-3, "max_noise": (1e3, 1e3), "max_wl": 16, "min_wl": 2}
    found = []
    for target in (None, 5.0):
        model, optimizer = make(target_bits=target, **options)
        train(model, optimizer, 2)  # both switches of the same steps
        found.append([row for row in optimizer.trace if row.step == 2])
    plain, steered = found
    assert [r.weight_gradient for r in plain] != [r.weight_gradient for r in steered]
    gradients = [row.weight_gradient for row in steered]
    lengths = [row.fl for row in steered]
    assert len(set(lengths)) > 1
    finest = [fl for _, fl in sorted(zip(gradients, lengths, strict=True))]
    assert finest == sorted(finest)  # steps follow gradients alone, where noise has no other limit


def test_resume_equals_never_stopping():
    options = {"target_bits": 5.5, "free_zeros": True, "loss_floor": 0.3, "late": True}
    model, optimizer = make(**options)
    train(model, optimizer, 7)
    optimizer.param_groups[0]["lr"] = 0.02
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 9, start=7)
    other, again = make(lr=0.3)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert again.policy == optimizer.policy
    train(other, again, 9, start=7)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert again.shared == optimizer.shared
    assert again.trace == optimizer.trace


def test_late_words_are_long_until_the_rate_falls():
    model, optimizer = make(late=True, kappa=10.0, max_noise=(1.0, 1.0))
    train(model, optimizer, 8)
    assert mean_bits(optimizer) == 8
    optimizer.param_groups[0]["lr"] *= 0.6
    train(model, optimizer, 4, start=8)
    assert mean_bits(optimizer) == 8
    optimizer.param_groups[0]["lr"] *= 0.6
    train(model, optimizer, 4, start=12)
    assert mean_bits(optimizer) < 6.5
    optimizer.param_groups[0]["lr"] /= 0.6  # a warm restart
    train(model, optimizer, 4, start=16)
    assert mean_bits(optimizer) == 8


def test_late_words_of_the_ends_have_their_own_lengths():
    model, optimizer = make(late=True, ends_wl=5)
    train(model, optimizer, 8)
    lengths = [fmt.wl for fmt in optimizer.formats().values()]
    assert lengths == [5] + [8] * (len(WIDTHS) - 3) + [5]


def test_zeros_are_charged_nothing():
    """Behind a ReLU, steps may be coarser by the square root of the share of zeros."""
    one, other = make(max_wl=16, min_wl=2), make(max_wl=16, min_wl=2, free_zeros=True)
    for model, optimizer in (one, other):
        train(model, optimizer, 1)  # the same float step, so the same observations
    before, after = one[1].input_formats(), other[1].input_formats()
    differences = [before[name].fl - after[name].fl for name in before]
    assert differences[0] == 0  # of images: no zeros
    assert set(differences) <= {0, 1}
    assert sum(differences) >= 2
    assert one[1].formats() == other[1].formats()


def test_the_budget_has_a_floor():
    shared = marvin.policies.range_policy.Window(loss_sum=0.3, losses=3, first_loss=2.0)
    for floor, loss in ((0.0, 0.1), (0.01, 0.1), (0.4, 0.8)):
        policy = LossBudgetPolicy(loss_floor=floor)
        assert policy.share(shared, 4, policy.settings()) == pytest.approx(loss / 4)
    model, optimizer = make()
    train(model, optimizer, 9)
    losses = optimizer.shared.first_loss
    assert 0.5 < losses < 3
    assert optimizer.shared.emptied(9).first_loss == losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_bits": 3}, "target_bits must be min_wl to max_wl bits, got target_bits=3"),
        ({"target_bits": 5, "target_ebops": 9.0, "madds": MADDS}, "must be without target_bits"),
        ({"target_ebops": 0, "madds": MADDS}, "target_ebops must be above 0"),
        ({"target_ebops": 5.0}, "madds must be given with target_ebops"),
        ({"loss_floor": 1.5}, "loss_floor must be 0 to 1"),
        ({"loss_floor": 0.5, "window": 1}, "loss_floor must be 0 where window is 1"),
        ({"late": 0.3}, r"late must be one of \(False, True\), got 0\.3"),
        ({"free_zeros": "no"}, "free_zeros must be one of"),
        ({"per_channel": 2}, "per_channel must be one of"),
        ({"target_ebops": 9.0, "madds": dict(MADDS)}, "madds must be pairs of a weight's name and"),
        ({"target_ebops": 9.0, "madds": (row for row in MADDS)}, "madds must be pairs of a weight"),
        (
            {"target_ebops": 9.0, "madds": perfmodel.layers(nn.Linear(4, 2), (4,))},
            r"madds must be pairs .* \(tuple\(\(own\.weight, own\.madds\) for own in perfmodel",
        ),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LossBudgetPolicy(**options)


def test_a_layer_without_multiply_adds_is_named():
    model, optimizer = make(target_ebops=5.0, madds=MADDS[:-1])
    with pytest.raises(ValueError, match=r"madds must have every layer .* got none of 20\.weight"):
        train(model, optimizer, 1)


class Tied(nn.Module):
    """Two modules that share a weight, and a third."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.last(self.again(self.first(x).relu()).relu())


def test_a_shared_weight_counts_with_each_module_that_has_it():
    torch.manual_seed(0)
    model = Tied()
    madds = ("first.weight", 256), ("first.weight", 256), ("last.weight", 64)
    assert madds == tuple((own.weight, own.madds) for own in perfmodel.layers(model, (16,)))
    policy = LossBudgetPolicy(window=4, target_ebops=16_000, madds=madds)
    optimizer = Quantized(torch.optim.Adam(model.named_parameters()), policy)
    marvin.quantize_activations(model, optimizer)
    for _ in range(12):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step(loss=loss.item())
    own, inputs = optimizer.formats(), optimizer.input_formats()
    met = sum(
        count * (own[name].wl - 1) * (inputs[name].wl - inputs[name].signed)
        for name, count in madds
    )
    assert met == pytest.approx(16_000, rel=0.1)  # two layers have few formats between them


@pytest.mark.parametrize("when", [0, 9], ids=["before the first step", "in mid-training"])
def test_a_layer_that_was_replaced_has_no_part_in_a_target(when):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    policy = LossBudgetPolicy(window=3, target_bits=5)
    optimizer = Quantized(torch.optim.Adam(model.parameters()), policy)
    marvin.quantize_activations(model, optimizer)
    for step in range(30):
        if step == when:
            model[2] = nn.Linear(16, 16)
            optimizer.add_param_group({"params": model[2].parameters()})
            marvin.quantize_activations(model, optimizer)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(8, 16)), torch.randint(16, (8,)))
        loss.backward()
        optimizer.step(loss=loss.item())
    records = [optimizer.state[model[i].weight]["layer"] for i in (0, 2)]
    bits = [fmt.wl for own in records for fmt in (own.fmt, own.inputs)]
    assert sum(bits) / 4 == 5
    assert len(optimizer.layers()) == len(optimizer.input_formats()) == 2
    assert optimizer.mean_word_length() == (bits[0] + bits[2]) / 2
    assert {row.layer for row in optimizer.trace[-2:]} == {*optimizer.layers()}


@pytest.mark.filterwarnings("ignore:parameters that left")
def test_a_layer_that_left_a_model_and_is_used_still_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = Quantized(torch.optim.Adam(model.parameters()), LossBudgetPolicy(window=3))
    marvin.quantize_activations(model, optimizer)
    left, model[2] = model[2], nn.Identity()
    marvin.quantize_activations(model, optimizer)
    for _ in range(7):
        optimizer.zero_grad()
        loss = F.cross_entropy(left(model(torch.randn(8, 16))), torch.randint(16, (8,)))
        loss.backward()
        optimizer.step(loss=loss.item())
    assert optimizer.state[left.weight]["layer"].fmt.wl <= 8


def test_a_warm_up_from_0_is_early():
    model, optimizer = make(late=True)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)
    assert mean_bits(optimizer) == 8
    for steps, lr, bits in (3, 0.1, 8), (4, 0.0, None):  # a schedule may end at 0, too
        for group in optimizer.param_groups:
            group["lr"] = lr
        train(model, optimizer, steps)
        assert mean_bits(optimizer) == 8 if bits else mean_bits(optimizer) < 8


def test_a_groups_shortest_words_may_be_above_the_target():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    groups = [
        {"params": [*model[0].parameters()], "min_wl": 6},
        {"params": [*model[2].parameters()]},
    ]
    optimizer = Quantized(torch.optim.Adam(groups), LossBudgetPolicy(window=3, target_bits=5))
    marvin.quantize_activations(model, optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(8, 16)), torch.randint(16, (8,)))
        loss.backward()
        optimizer.step(loss=loss.item())
    records = [optimizer.state[model[i].weight]["layer"] for i in (0, 2)]
    assert [own.fmt.wl for own in records] == [6, 4]
    assert [own.inputs.wl for own in records] == [6, 4]
