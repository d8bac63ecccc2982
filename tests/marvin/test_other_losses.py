"""Losses that are no mean log-likelihood, and values that formats do not reach."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from fixedpoint_kernels import quantize
from marvin import FixedPolicy, LossBudgetPolicy, Quantized

BELOW = "the loss budget is a share of the loss, got a mean loss of -"


def make(policy, lr=0.05, inputs=8):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4)
    )
    sgd = torch.optim.SGD(model.named_parameters(), lr=lr)
    optimizer = Quantized(sgd, policy)
    return model, optimizer, marvin.quantize_activations(model, optimizer)


def train(model, optimizer, steps, loss_of=F.cross_entropy, start=0, scale=1.0):
    for step in range(start, start + steps):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = loss_of(model(scale * x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step(loss=loss)


def lengths(optimizer):
    own = optimizer.formats(), optimizer.input_formats()
    return [fmt.wl for formats in own for fmt in formats.values()]


def shifted(out, y):
    return F.cross_entropy(out, y) - 10


def test_a_loss_below_0_gets_the_longest_words_and_ranges_follow():
    model, optimizer, _ = make(LossBudgetPolicy(window=4, max_wl=7))
    with pytest.warns(UserWarning, match=BELOW):
        train(model, optimizer, 8, shifted)
    before = optimizer.formats()["2.weight"]
    with torch.no_grad():
        model[2].weight.mul_(16)
    optimizer.adopt_weights()
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        train(model, optimizer, 4, shifted, start=8)
    assert lengths(optimizer) == [7] * 6
    assert optimizer.formats()["2.weight"].fl == before.fl - 4
    later, other, _ = make(LossBudgetPolicy(window=4, max_wl=7))
    other.load_state_dict(optimizer.state_dict())
    later.load_state_dict(model.state_dict())
    with warnings.catch_warnings():  # it was said
        warnings.simplefilter("error")
        train(later, other, 4, shifted, start=12)


def test_a_target_is_met_where_the_loss_is_below_0():
    model, optimizer, _ = make(LossBudgetPolicy(window=4, target_bits=6))
    with pytest.warns(UserWarning, match=BELOW):
        train(model, optimizer, 8, shifted)
    assert sum(lengths(optimizer)) / 6 == pytest.approx(6, abs=1 / 6)


def test_a_floor_gives_losses_below_0_a_budget():
    model, optimizer, _ = make(LossBudgetPolicy(window=4, loss_floor=0.5))
    train(model, optimizer, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 4, shifted, start=8)
    assert max(lengths(optimizer)) < 8


def total(out, y):
    return F.cross_entropy(out, y, reduction="sum")


@pytest.mark.parametrize(
    ("loss_of", "options"),
    [
        (lambda out, y: 1024 * F.cross_entropy(out, y), {"kappa": 10.24}),
        (total, {"batch_size": 1}),
        (total, {"kappa": 0.32}),
    ],
)
def test_settings_give_other_scales_of_a_loss_the_same_formats(loss_of, options):
    found = []
    for own, more in ((F.cross_entropy, {}), (loss_of, options), (loss_of, {})):
        policy = LossBudgetPolicy(**{"window": 4, "max_noise": (9.0, 9.0), "kappa": 0.01, **more})
        model, optimizer, _ = make(policy, lr=0.0)
        train(model, optimizer, 8, own)
        found.append((optimizer.formats(), optimizer.input_formats()))
    assert found[0] == found[1]
    assert found[0] != found[2]  # without, words are longer


def test_what_formats_do_not_reach_is_named():
    model, optimizer, handle = make(FixedPolicy(8, 4))  # -8 to 7.9
    with torch.no_grad():
        model[2].bias.fill_(2.0)
        model[4].weight.fill_(7.5)  # all outputs are above 8
    optimizer.adopt_weights()
    with pytest.warns(
        UserWarning, match=r"gradients are 0, .*: outputs of 4, which reach 8 at most"
    ):
        train(model, optimizer, 1)
    shares = handle.saturation()
    assert shares["4"] > 0.9  # of outputs: 12 inputs beside 4 outputs do not hide it
    assert max(shares["0"], shares["2"]) < 0.05
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        train(model, optimizer, 199, start=1)


def test_data_that_grow_beyond_given_formats_are_named():
    model, optimizer, _ = make(FixedPolicy(12, 8))  # up to 8
    train(model, optimizer, 99)
    with pytest.warns(UserWarning, match=r"clamped, .*inputs of 0.* which reach 8 at most"):
        train(model, optimizer, 102, start=99, scale=64.0)


@pytest.mark.parametrize("policy", [marvin.StaticPolicy, LossBudgetPolicy])
def test_data_that_grow_between_switches_are_named_once(policy):
    model, optimizer, _ = make(policy(window=20))
    train(model, optimizer, 3)
    train(model, optimizer, 30, start=3, scale=64.0)  # formats are new: step 5 clamps much, too
    with pytest.warns(UserWarning, match=r"quarter of .* 0\.weight clamped in step 40: ") as told:
        train(model, optimizer, 30, start=33, scale=2.0**12)
    assert len(told) == 1
    other, resumed, _ = make(policy(window=20))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train(other, resumed, 20, start=63, scale=2.0**18)  # once is enough


class OwnLoss(nn.Module):
    """Has class centres and returns its loss, as ArcFace and many published models do."""

    def __init__(self, form, reduction="mean"):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.centres = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 4))
        self.form, self.reduction = form, reduction

    def forward(self, x, y):
        z = F.normalize(self.layer(x)) @ F.normalize(self.centres, dim=0)
        loss = F.cross_entropy(64 * z, y, reduction=self.reduction)
        self.loss = loss.detach()
        return self.form(loss, z)


FORMS = {
    "tensor": lambda loss, _: loss,
    "dictionary": lambda loss, z: {"logits": z, "loss": loss},
    "tuple": lambda loss, z: (z, loss),
}


def loss_in(output):
    output = output.values() if isinstance(output, dict) else output
    return output if isinstance(output, torch.Tensor) else [*output][-1]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_loss_that_a_module_with_parameters_returns_is_not_rounded(form):
    model, x = OwnLoss(form), torch.randn(64, 8)
    y = x[:, :4].argmax(1)
    optimizer = marvin.MSGD(model.named_parameters())
    marvin.quantize_activations(model, optimizer)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_in(model(x, y))
        assert torch.equal(loss, model.loss)
        losses.append(loss.item())
        loss.backward()
        optimizer.step(loss=loss)
    assert losses[-1] < losses[0] / 2
    assert losses[0] > 8  # which the format does not reach
    frozen = marvin.freeze(model)
    prepared = OwnLoss(form)
    marvin.prepare(prepared)
    prepared.load_state_dict(model.state_dict())
    for own in (model, frozen, prepared):
        with torch.no_grad():
            output = own.eval()(x, y)
        assert torch.equal(loss_in(output), own.loss)
        assert loss_in(output).item() % 2**-4  # no number of the format
        if form is not FORMS["tensor"]:
            logits = next(iter(output.values())) if isinstance(output, dict) else output[0]
            assert torch.equal(logits, quantize(logits, optimizer.formats()["centres"]))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_losses_that_are_clamped_are_named_in_the_first_step(form):
    model, x = OwnLoss(form, "none"), torch.randn(64, 8)
    with torch.no_grad():
        y = loss_in(OwnLoss(lambda _, z: (z,))(x, torch.zeros(64).long())).argmin(1)
    optimizer = marvin.MSGD(model.named_parameters())
    marvin.quantize_activations(model, optimizer)
    loss = loss_in(model(x, y)).mean()
    loss.backward()
    with pytest.warns(
        UserWarning, match=r"all gradients are 0, .* outputs of the model, which reach 8"
    ):
        optimizer.step(loss=loss)


def test_gradients_of_0_without_clamped_outputs_are_nobodys_fault():
    model, optimizer, _ = make(FixedPolicy(8, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1, lambda out, _: 0 * out.sum())


def test_logits_beyond_the_formats_are_named_with_the_bits_that_reach_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    with torch.no_grad():
        model[0].weight.mul_(10)
        model[2].weight.mul_(35)
    optimizer = marvin.MSGD(model.named_parameters(), lr=1e-3, max_wl=16)
    marvin.quantize_activations(model, optimizer)
    with torch.no_grad():
        clamped = (model(torch.randn(256, 8)).abs() > 7.9).float().mean()
    assert 0.5 < clamped < 0.9
    with pytest.warns(
        UserWarning, match=r"outputs of 2, which reach 8 .* write buffer_bits=8, which reaches 128"
    ):
        train(model, optimizer, 100)
    with pytest.warns(UserWarning, match=r"outputs of 0, which"):  # though few were until now
        train(model, optimizer, 100, start=100, scale=4)


@pytest.mark.parametrize("compact_state", [False, True])
def test_masters_that_run_away_are_named(compact_state):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = marvin.MSGD(model.named_parameters(), lr=1e4, compact_state=compact_state)
    with pytest.warns(
        UserWarning,
        match=r"0\.weight, 2\.weight, whose format reaches 8 and whose masters reach 1\d\d\d.*; "
        r"lower the learning rate, which is 10000",
    ):
        train(model, optimizer, 1)
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        train(model, optimizer, 120, start=1)


def test_masters_that_run_away_later_are_named():
    model, optimizer, _ = make(FixedPolicy(8, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 99)
    optimizer.param_groups[0]["lr"] = 1e6
    with pytest.warns(
        UserWarning, match=r"most weights are clamped: 0\.weight, 2\.weight, 4\.weight,"
    ):
        train(model, optimizer, 1, start=99)


def test_data_that_formats_do_not_reach_are_named():
    model, optimizer, _ = make(FixedPolicy(8, 4))
    with torch.no_grad():
        model[0].weight.mul_(1 / 64)
    optimizer.adopt_weights()
    with pytest.warns(UserWarning, match=r"inputs of 0"):
        train(model, optimizer, 100, scale=50.0)


def test_ranges_that_follow_the_data_are_not_named():
    model, optimizer, _ = make(LossBudgetPolicy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 100, scale=50.0)


def test_layers_that_train_in_eval_mode_are_named():
    model, optimizer, _ = make(LossBudgetPolicy(batch_size=32))
    model[0].eval()
    with pytest.warns(UserWarning, match=r"inputs of layers in eval mode .* float32: 0; call"):
        train(model, optimizer, 1)
    assert sorted(optimizer.input_formats()) == ["2.weight", "4.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2, start=1)


def scaled(model, optimizer, scaler, steps=3):
    for step in range(steps):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        scaler.scale(loss).backward()
        scaler.step(optimizer, loss=loss)
        scaler.update()


def test_a_scaler_that_multiplies_what_the_budget_measures_is_named():
    model, optimizer, _ = make(LossBudgetPolicy(window=4))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.warns(UserWarning, match="while a gradient scaler multiplies them") as found:
        scaled(model, optimizer, scaler, steps=10)
    assert len(found) == 1
    other = make(LossBudgetPolicy(window=4))[1]
    other.load_state_dict(optimizer.state_dict())
    assert other.shared.was_scaled


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (LossBudgetPolicy(), {"enabled": False}),
        (LossBudgetPolicy(), {"init_scale": 1.0}),
        (marvin.StaticPolicy(8, 8), {}),
    ],
    ids=["off", "one", "static"],
)
def test_a_scaler_that_falsifies_nothing_is_not_named(policy, options):
    model, optimizer, _ = make(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled(model, optimizer, torch.amp.GradScaler("cpu", **options))
