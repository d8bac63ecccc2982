"""Parameter groups that somebody puts in the place of an optimizer's."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import marvin
from tests.same import assert_same

MAKERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
}


def setup(name="Adam", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    groups: list[dict[str, object]] = [{"params": model[0].named_parameters(prefix="0")}]
    groups.append({"params": model[2].named_parameters(prefix="2"), "weight_decay": 0.1})
    optimizer = marvin.Quantized(MAKERS[name](groups), marvin.FixedPolicy(12, 8), **options)
    return model, optimizer


def train(model, optimizer, steps, first=0):
    for i in range(first, first + steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        loss.backward()
        optimizer.step(loss=loss)


def masters(optimizer):
    return [own["master"].clone() for own in optimizer.state.values()]


@pytest.mark.parametrize("of_wrapped", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_groups_of_the_same_parameters_are_followed(name, of_wrapped):
    model, optimizer = setup(name)
    train(model, optimizer, 2)
    its = optimizer.optimizer if of_wrapped else optimizer
    its.param_groups = [{**group, "lr": 0.0} for group in its.param_groups]
    before = masters(optimizer)
    train(model, optimizer, 2)
    assert_same(masters(optimizer), before)
    saved = optimizer.state_dict()
    assert [group["lr"] for group in saved["param_groups"]] == [0.0, 0.0]
    assert [group["lr"] for group in saved["optimizer"]["param_groups"]] == [0.0, 0.0]
    optimizer.param_groups[1]["lr"] = 0.1  # both have the same groups again
    assert optimizer.optimizer.param_groups[1]["lr"] == 0.1


def test_copies_of_the_groups_change_no_bit():
    model, optimizer = setup()
    train(model, optimizer, 5)
    other, its = setup()
    train(other, its, 2)
    its.param_groups = [{**group} for group in its.param_groups]
    train(other, its, 3, first=2)
    assert_same(its.state_dict(), optimizer.state_dict())
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_groups_may_be_parted_and_joined():
    model, optimizer = setup()
    train(model, optimizer, 2)
    (first, last), rest = optimizer.param_groups, {"lr": 0.0, "weight_decay": 0.0}
    params = [*first["params"], *last["params"]]
    names = [*first["param_names"], *last["param_names"]]
    optimizer.param_groups = [{**first, "params": params[:1], "param_names": names[:1]}]
    optimizer.param_groups.append({**first, **rest, "params": params[1:], "param_names": names[1:]})
    before = masters(optimizer)
    train(model, optimizer, 1)
    assert [torch.equal(a, b) for a, b in zip(masters(optimizer), before, strict=True)] == [
        False,
        *[True] * 3,
    ]
    assert [*optimizer.formats()] == names


def test_groups_behind_the_others_are_added():
    model, optimizer = setup()
    train(model, optimizer, 2)
    new = nn.Linear(2, 2)
    model.append(new)
    more = {"params": [*new.parameters()], "param_names": ["3.weight", "3.bias"], "lr": 0.05}
    optimizer.param_groups = [*({**group} for group in optimizer.param_groups), more]
    before = new.weight.clone()
    train(model, optimizer, 2)
    assert optimizer.layers() == ["0.weight", "2.weight", "3.weight"]
    assert not torch.equal(new.weight, before)
    assert len(optimizer.optimizer.param_groups) == 3


def delete(model, groups):
    del groups[1]


def reverse(model, groups):
    groups.reverse()


def replace(model, groups):
    groups[0]["params"][0] = model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def append(model, groups):
    groups[1]["params"].append(nn.Parameter(torch.zeros(3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (delete, r"groups without 2.weight, 2.bias: write p.requires_grad_\(False\)"),
        (replace, r"groups without 0.weight: .*under torch.no_grad\(\) \(p.copy_\(values\)\)"),
        (reverse, "keep the order .* in the place of 0.weight, 0.bias, 2.weight and 1 more"),
        (append, r"got 1 in or before a group that was there: write optimizer.add_param_group"),
    ],
)
def test_groups_of_other_parameters_are_refused(change, message):
    model, optimizer = setup()
    train(model, optimizer, 2)
    before = masters(optimizer)
    change(model, optimizer.param_groups)
    for call in (lambda: train(model, optimizer, 1), optimizer.state_dict, optimizer.end_epoch):
        with pytest.raises(ValueError, match=message):
            call()
    assert_same(masters(optimizer), before)


def test_settings_out_of_range_are_refused_until_they_are_right():
    model, optimizer = setup()
    optimizer.param_groups = [{**group, "l1": -1.0} for group in optimizer.param_groups]
    for _ in range(2):
        with pytest.raises(ValueError, match="l1 must be 0 or more, got l1=-1"):
            train(model, optimizer, 1)
    for group in optimizer.param_groups:
        group["l1"] = 0.0
    train(model, optimizer, 1)


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (marvin.MarvinPolicy, {"strategy": "Min"}, "strategy must be one of"),
        (marvin.MarvinPolicy, {"lookback": (5, 2)}, "lookback must be two step counts"),
        (
            marvin.LossBudgetPolicy,
            {"kappa": -1.0},
            "kappa must be above 0 and finite, got kappa=-1.0",
        ),
        (
            marvin.LossBudgetPolicy,
            {"max_noise": 0.1},
            "max_noise must be two finite numbers above 0",
        ),
        (
            marvin.StaticPolicy,
            {"weights": 20},
            "weights must be an int, 2 to 16 bits, got weights=20",
        ),
        (marvin.FixedPolicy, {"wl": 1}, "word length must be 2 to 32 bits, got wl=1"),
        (marvin.FixedPolicy, {"nonfinite": "bogus"}, "nonfinite must be one of"),
    ],
)
def test_settings_that_change_in_training_are_checked(policy, changes, message):
    model = nn.Linear(8, 2)
    optimizer = marvin.Quantized(torch.optim.SGD(model.named_parameters(), lr=0.1), policy())
    marvin.quantize_activations(model, optimizer)
    train(model, optimizer, 2)
    (group,), before = optimizer.param_groups, model.weight.detach().clone()
    right = {name: group[name] for name in changes}
    group.update(changes)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            train(model, optimizer, 1)
    assert torch.equal(model.weight, before)
    group.update(right)
    train(model, optimizer, 1)


def test_settings_are_checked_where_they_change_alone(monkeypatch):
    model, optimizer = setup()
    train(model, optimizer, 1)
    calls = []
    check = marvin.FixedPolicy.check
    monkeypatch.setattr(marvin.FixedPolicy, "check", lambda *a: (calls.append(a), check(*a)))
    for group in optimizer.param_groups:
        group["lr"] = 0.05  # of the wrapped optimizer, which reads it
    train(model, optimizer, 2)
    assert not calls
    optimizer.param_groups[1]["fl"] = 6
    train(model, optimizer, 2)
    assert len(calls) == 2


def change_in_place(settings):
    settings["lookback"][0] = 50


@pytest.mark.parametrize(
    ("before", "change", "message"),
    [
        ({"lookback": [5, 9]}, change_in_place, r"lookback must be two step counts, .*\[50, 9\]"),
        ({"l1": torch.tensor(0.1)}, lambda g: g["l1"].fill_(-1), "l1 must be 0 or more, got l1=-1"),
        ({}, lambda g: g.update(l1=np.ones(2)), "l1 must be a number, got l1=array"),
        ({}, lambda g: g.update(lookback=np.array([5, 9])), "lookback must be two step counts"),
        ({}, lambda g: g.update(resolution=torch.tensor([5, 9])), "resolution must be two bin"),
        (
            {},
            lambda g: g.pop("max_wl"),
            "must have all settings of Quantized, got one without 'max_wl'",
        ),
        (
            {},
            lambda g: g.update(seed=5),
            "the seed must stay 0, whose noise the weights have, got seed=5",
        ),
    ],
)
def test_settings_that_change_in_place_go_or_are_arrays_are_refused(before, change, message):
    model = nn.Linear(8, 2)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.MarvinPolicy())
    (group,) = optimizer.param_groups
    group.update(before)
    train(model, optimizer, 2)
    right = {**group}
    change(group)
    for call in (lambda: train(model, optimizer, 1), optimizer.state_dict) * 2:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    group.update(right, lookback=(5, 9), l1=0.0)
    train(model, optimizer, 1)


def test_a_seed_of_the_first_group_is_that_of_activations_also_where_a_state_is_loaded():
    def built():
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        groups = [{"params": model.named_parameters(), "seed": 5}]
        optimizer = marvin.Quantized(torch.optim.SGD(groups, lr=0.1), marvin.FixedPolicy(6, 3))
        marvin.quantize_activations(model, optimizer)
        return model, optimizer

    model, optimizer = built()
    train(model, optimizer, 2)
    later, loaded = built()
    loaded.load_state_dict(optimizer.state_dict())
    for own in ((model, optimizer), (later, loaded)):
        train(*own, 2, first=2)
    assert_same(masters(optimizer), masters(loaded))


def test_numbers_of_numpy_are_numbers():
    model = nn.Linear(8, 2)
    optimizer = marvin.MSGD(model.named_parameters(), lr=np.float32(0.1))
    train(model, optimizer, 1)
    (group,) = optimizer.param_groups
    group |= {"lr": np.float32(0.05), "l1": np.float32(1e-5), "kl_eps": np.float32(1e-8)}
    train(model, optimizer, 1)


def test_what_is_read_from_the_first_group_may_not_change_in_others():
    model, optimizer = setup()
    train(model, optimizer, 1)
    optimizer.param_groups[1]["nonfinite"] = "skip"
    with pytest.raises(ValueError, match="nonfinite is read from the first parameter group"):
        train(model, optimizer, 1)
    optimizer.param_groups[0]["nonfinite"] = "skip"
    train(model, optimizer, 1)


NAMES_OF_OTHERS = [
    "name",
    "lr_scale",
    "initial_lr",
    "max_lr",
    "min_lr",
    "init_lr",
    "lr_mult",
    "base_momentum",
    "max_momentum",
    "layer_id",
    "layer_names",
    "decay_mult",
    "no_decay",
    "weight_sum",
    "scheduled_lr",
    "use_muon",
    "rank",
    "update_proj_gap",
    "scale",
    "k",
    "proj_type",
    "state_bits",
    "optim_bits",
    "block_size",
    "num_layers",
    "warmup_steps",
    "step",
    "d",
    "d0",
    "rho",
    "adaptive",
]


@pytest.mark.parametrize(
    ("make", "slips"),
    [
        (lambda groups: marvin.MSGD(groups), {"max_wls": "max_wl", "lookbak": "lookback"}),
        (
            lambda groups: marvin.Quantized(MAKERS["SGD"](groups), marvin.LossBudgetPolicy()),
            {"min_bits": "min_wl", "target_bit": "target_bits", "compact_sate": "compact_state"},
        ),
        (
            lambda groups: marvin.Quantized(MAKERS["Adam"](groups), marvin.StaticPolicy()),
            {"per_chanel": "per_channel", "seeds": "seed"},
        ),
    ],
    ids=["MSGD", "LossBudgetPolicy", "StaticPolicy"],
)
def test_a_misspelt_setting_is_named_once(make, slips):
    """Not what schedulers and other libraries give to groups: warnings are errors here."""
    first, second, third = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
    others = dict.fromkeys(NAMES_OF_OTHERS, 1.0)
    wrong = {"params": [first], "weight_decay": 0.1, "l1": 0.1, **others, **dict.fromkeys(slips, 5)}
    with pytest.warns(UserWarning, match="must have settings of") as told:
        optimizer = make([wrong, {"params": [second], **dict.fromkeys(slips, 5)}])
    (message,) = map(str, (own.message for own in told))
    assert all(f"{name} (is {near} meant?)" in message for name, near in slips.items())
    assert message.count("meant?") == len(slips)
    optimizer.add_param_group({"params": [third], **others, **dict.fromkeys(slips, 5)})


@pytest.mark.parametrize(
    ("policy", "name", "remark"),
    [
        (marvin.LossBudgetPolicy(), "bits", "is min_wl or max_wl meant?"),
        (marvin.LossBudgetPolicy(), "max_bits", "is max_wl meant?"),
        (marvin.LossBudgetPolicy(), "weights", "of StaticPolicy"),
        (marvin.LossBudgetPolicy(), "lookback", "of MarvinPolicy"),
        (marvin.LossBudgetPolicy(), "fl", "of FixedPolicy"),
        (marvin.StaticPolicy(), "wl", "is weights or activations meant?"),
        (marvin.StaticPolicy(), "lr_factor", "of MuppetPolicy"),
        (marvin.MarvinPolicy(), "bits", "is init_wl or max_wl meant?"),
        (marvin.MarvinPolicy(), "buffer_wl", "is buffer_bits meant?"),
        (marvin.MarvinPolicy(), "fl", "is init_fl or min_fl meant?"),
        (marvin.MarvinPolicy(), "min_wl", "of LossBudgetPolicy"),
        (marvin.FixedPolicy(), "max_wl", "of LossBudgetPolicy and MarvinPolicy"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_setting_that_the_policy_has_not_is_named(policy, name, remark):
    """Who changes the policy and leaves the groups lost their settings without a word."""
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], name: 8}]
    with pytest.warns(
        UserWarning, match=rf"got {name} \({re.escape(remark)}\), which nothing reads"
    ):
        marvin.Quantized(MAKERS["Adam"](groups), policy)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_resumes_with_a_backbone_that_was_unfrozen(tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Net(lightning.LightningModule):
        def __init__(self, is_fixed):
            super().__init__()
            torch.manual_seed(0)
            self.is_fixed, self.head = is_fixed, nn.Linear(16, 2)
            self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU())

        def configure_optimizers(self):
            adam = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
            return marvin.Quantized(adam, marvin.FixedPolicy(12, 8)) if self.is_fixed else adam

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def fit(is_fixed, epochs, path=None):
        own = lightning.Trainer(
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            callbacks=[BackboneFinetuning(1)],
        )
        own.fit(Net(is_fixed), batches, ckpt_path=path)
        return own

    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    batches = torch.utils.data.DataLoader(data, batch_size=16)
    seen = {}
    for is_fixed in (False, True):
        half = fit(is_fixed, 3)
        half.save_checkpoint(tmp_path / "half.ckpt")
        resumed = fit(is_fixed, 5, tmp_path / "half.ckpt")
        pairs = zip(half.model.named_parameters(), resumed.model.parameters(), strict=True)
        moved = [name for (name, a), b in pairs if not torch.equal(a, b)]
        groups = resumed.optimizers[0].param_groups
        seen[is_fixed] = moved, [(len(group["params"]), group["lr"]) for group in groups]
    assert seen[True] == seen[False]
    assert len(seen[True][1]) == 2


def test_a_parameter_that_is_given_twice_is_named():
    first = nn.Linear(2, 2)
    given = [*first.parameters(), *first.parameters()]
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match="a parameter must be given once, got 2, 3 again: write"),
    ):
        marvin.MSGD(given, lr=0.1)
