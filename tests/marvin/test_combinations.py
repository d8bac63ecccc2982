"""Every option and policy, through all that people do with a model and an optimizer in between.

The oracle is the training in which nobody did it: what follows has the same bits. A new option of
``Quantized``, a new policy or a new field of one must be added to ``SETTINGS``.
"""

import copy
import dataclasses
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marvin
from fixedpoint_kernels import forward_save
from marvin import Policy, Quantized
from tests.same import assert_same

STEPS, STOP = 11, 5
MADDS = (("0.weight", 432 * 16), ("3.weight", 2304 * 16), ("6.weight", 2560))
WRAPPED = {
    "sgd": lambda ps, lr: torch.optim.SGD(ps, lr, momentum=0.9, weight_decay=1e-4),
    "plain": lambda ps, lr: torch.optim.SGD(ps, lr),
    "adamw": lambda ps, lr: torch.optim.AdamW(ps, lr / 20),
    "rmsprop": lambda ps, lr: torch.optim.RMSprop(ps, lr / 20, momentum=0.9),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Args:
        policy: As it is built; another one loads its state.
        wrapped: Of ``WRAPPED``.
        options: Of ``Quantized``.
        ways: Of ``WAYS``.
        groups: How many parameter groups there are.
    """

    policy: Policy
    wrapped: str = "sgd"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    ways: tuple[str, ...] = ("activations",)
    groups: int = 1


@dataclasses.dataclass
class Run:
    """A training, and where it stands."""

    model: nn.Module
    optimizer: Quantized
    average: marvin.MasterAverage
    schedule: torch.optim.lr_scheduler.StepLR
    steps: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)


WAYS: dict[str, Callable[[nn.Module, Quantized], object]] = {
    "activations": marvin.quantize_activations,
    "identity": lambda m, o: marvin.quantize_activations(m, o, ste="identity"),
    "int8": lambda m, _: marvin.integer.convert(m),
    "float gradients": lambda m, _: marvin.integer.convert(m, gradient_bits=None),
    "division": lambda m, _: forward_save.convert(m, few_bit=3, division={"block": 2}),
    "codes": marvin.store_codes,
    "frozen": lambda m, _: m.get_submodule("0").requires_grad_(False),
}
SETTINGS = {
    "marvin": Setting(
        marvin.MarvinPolicy(
            init_wl=10,
            init_fl=5,
            max_wl=20,
            min_fl=3,
            buffer_bits=5,
            resolution=(10, 30),
            lookback=(2, 5),
            lookback_momentum=0.5,
            lookback_rounding="nearest",
            strategy="max",
            kl_eps="noise",
            kl_smoothing=0.25,
            kl_counts="sampled",
            kl_direction="qp",
            pushdown_range="full",
            symmetric=True,
        ),
        options={"quantize_gradients": True, "one_dim": "float", "seed": 3},
        groups=2,
    ),
    "adaptive": Setting(
        marvin.MarvinPolicy(
            lookback=(2, 4), strategy_loss="short", strategy_margin=0.1, pushup="marvin"
        ),
        options={"compact_state": True, "normalize_gradients": True},
        ways=("identity", "division"),
        groups=2,
    ),
    "budget": Setting(
        marvin.LossBudgetPolicy(
            kappa=0.03,
            max_noise=(0.1, 0.01),
            window=3,
            sat_tol=0.01,
            min_wl=3,
            max_wl=7,
            ends_wl=8,
            loss_floor=0.5,
            free_zeros=True,
            late=True,
            batch_size=8,
        ),
        ways=("activations", "int8"),
    ),
    "bits": Setting(
        marvin.LossBudgetPolicy(window=3, target_bits=5.0, per_channel=True),
        wrapped="adamw",
        options={"compact_state": True, "l1": 1e-3, "l1_params": "all"},
        ways=("activations", "float gradients"),
    ),
    "ebops": Setting(
        marvin.LossBudgetPolicy(window=3, target_ebops=1e6, madds=MADDS),
        wrapped="rmsprop",
        options={"compact_state": True, "nonfinite": "skip"},
        ways=("activations", "int8", "frozen"),
        groups=2,
    ),
    "static": Setting(
        marvin.StaticPolicy(5, 7, window=3, sat_tol=0.01, ends_wl=8, per_channel=True),
        wrapped="plain",
        options={"master_init": "quantized"},
        ways=("activations", "int8", "division"),
    ),
    "fixed": Setting(
        marvin.FixedPolicy(7, 5, symmetric=True),
        options={"compact_state": True},
        ways=("activations", "int8"),
        groups=2,
    ),
    "codes": Setting(marvin.FixedPolicy(7, 5), wrapped="adamw", ways=("activations", "codes")),
    "muppet": Setting(
        marvin.MuppetPolicy(
            levels=(6, 9, 32),
            patience=1,
            window=2,
            window_kind="block",
            threshold_epoch="since_switch",
            lr_factor=0.5,
            epochs_per_lr=1,
            lr_decays=1,
        ),
        options={"compact_state": True},
    ),
}
POLICIES = [
    own
    for name in marvin.__all__
    if isinstance(own := getattr(marvin, name), type) and issubclass(own, Policy)
]


def make(setting: Setting, *, other: bool = False) -> Run:
    """Return a training from its start; ``other``: built with other arguments, to load a state."""
    torch.manual_seed(9 if other else 1)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )
    if "frozen" in setting.ways:
        WAYS["frozen"](model, None)  # pyright: ignore[reportArgumentType]  it takes none
    named = [*model.named_parameters()]
    groups = [named] if setting.groups == 1 else [named[:3], named[3:]]
    wrapped = WRAPPED[setting.wrapped]([{"params": own} for own in groups], 0.5 if other else 0.02)
    if other:
        optimizer = Quantized(wrapped, type(setting.policy)(), seed=99)
    else:
        optimizer = Quantized(wrapped, setting.policy, **setting.options)
    for way in setting.ways:
        WAYS[way](model, optimizer)
    average = marvin.MasterAverage(model, optimizer, decay=0.9)
    return Run(model, optimizer, average, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(8, 3, 4, 4, generator=g), torch.randint(0, 10, (8,), generator=g)


def train(run: Run, steps: int, *, closure: bool = False, none: bool = True) -> None:
    """Train; ``closure``: in one; ``none``: ``zero_grad`` makes gradients None."""

    def evaluate() -> Tensor:
        run.optimizer.zero_grad(set_to_none=none)
        x, y = batch(run.steps)
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        return loss.detach()

    for _ in range(steps):
        run.losses.append(
            float(run.optimizer.step(evaluate))  # pyright: ignore[reportArgumentType]
            if closure
            else float(run.optimizer.step(loss=evaluate()))  # pyright: ignore[reportArgumentType]
        )
        run.average.update()
        run.schedule.step()
        run.steps += 1
        if run.steps % 3 == 0:
            run.optimizer.end_epoch()


def state(run: Run) -> dict[str, Any]:
    """Return all that decides the future, as it comes back from a file that runs no code."""
    file = io.BytesIO()
    values = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "average": run.average.state_dict(),
        "schedule": run.schedule.state_dict(),
        "noise": forward_save.state(run.model),
        "losses": run.losses,
    }
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(run: Run, values: dict[str, Any], first: str) -> None:
    parts = {"model": run.model, "optimizer": run.optimizer}
    for name in sorted(parts, key=lambda name: name != first):
        parts[name].load_state_dict(values[name])
    load_rest(run, values)


def load_rest(run: Run, values: dict[str, Any]) -> None:
    run.average.load_state_dict(values["average"])
    run.schedule.load_state_dict(values["schedule"])
    forward_save.load_state(run.model, values["noise"])
    run.losses, run.steps = values["losses"], len(values["losses"])


@functools.cache
def whole(name: str) -> dict[str, Any]:
    """Return the state at the end of the training in which nobody does anything."""
    run = make(SETTINGS[name])
    train(run, STEPS)
    return state(run)


ACTIONS: dict[str, Callable[[Run, Setting, Any], Run | None]] = {}


def action(function: Callable[[Run, Setting, Any], Run | None]) -> None:
    ACTIONS[function.__name__] = function


@action
def resumed_model_first(run: Run, setting: Setting, _: object) -> Run:
    other = make(setting, other=True)
    load(other, state(run), "model")
    return other


@action
def resumed_optimizer_first(run: Run, setting: Setting, _: object) -> Run:
    other = make(setting, other=True)
    load(other, state(run), "optimizer")
    return other


@action
def loaded_into_one_that_trained(run: Run, setting: Setting, _: object) -> Run:
    other = make(setting)
    train(other, 4)
    load(other, state(run), "model")
    return other


@action
def saved_sharded(run: Run, setting: Setting, folder: Any) -> Run:
    values = state(run)
    marvin.save_sharded(folder / "saved", run.model, run.optimizer)
    other = make(setting, other=True)
    marvin.load_sharded(folder / "saved", other.model, other.optimizer)
    load_rest(other, values)
    return other


@action
def copied(run: Run, setting: Setting, _: object) -> Run:
    if "codes" in setting.ways:
        pytest.skip("hooks of store_codes are tied to their model")
    found = copy.deepcopy(run)
    train(run, 3)  # which the copy must not notice
    return found


@action
def copied_and_left(run: Run, setting: Setting, _: object) -> None:
    if "codes" in setting.ways:
        pytest.skip("hooks of store_codes are tied to their model")
    train(copy.deepcopy(run), 3)


@action
def pickled(run: Run, setting: Setting, _: object) -> Run:
    if "codes" in setting.ways:
        pytest.skip("hooks of store_codes are tied to their model")
    return pickle.loads(pickle.dumps(run))


@action
def evaluated(run: Run, _: Setting, __: object) -> None:
    run.model.eval()
    x, y = batch(50)
    with torch.no_grad():
        run.model(x)
    F.cross_entropy(run.model(x), y).backward()
    run.model.train()


@action
def frozen_and_calibrated(run: Run, setting: Setting, _: object) -> None:
    x = batch(50)[0]
    if "codes" in setting.ways:
        pytest.skip("copies of the model need restore() first")
    with torch.no_grad():
        torch.testing.assert_close(marvin.freeze(run.model)(x), run.model.eval()(x), rtol=0, atol=0)
    run.model.train()
    if not isinstance(setting.policy, marvin.MuppetPolicy):
        marvin.calibrate(run.model, [x])(x)


@action
def averaged(run: Run, setting: Setting, _: object) -> None:
    model = run.average.averaged()
    model(batch(50)[0]).sum().backward()


@action
def statistics_estimated(run: Run, _: Setting, __: object) -> None:
    before = copy.deepcopy(dict(run.model.named_buffers()))
    assert marvin.reestimate_batch_norm(run.model, [batch(50)[0]]) == ("1",)
    for name, buffer in run.model.named_buffers():
        buffer.copy_(before[name])


@action
def reverted(run: Run, setting: Setting, _: object) -> None:
    marvin.integer.revert(run.model)
    if "division" in setting.ways:
        noise = forward_save.state(run.model)
        forward_save.revert(run.model)
    for way in setting.ways:
        if way in ("int8", "float gradients", "division"):
            WAYS[way](run.model, run.optimizer)
    if "division" in setting.ways:
        forward_save.load_state(run.model, noise)


@action
def asked(run: Run, _: Setting, __: object) -> None:
    repr(run.optimizer)
    marvin.integer.report(run.model)
    run.optimizer.state_bytes()
    run.optimizer.input_formats()


@action
def gradients_kept(run: Run, _: Setting, __: object) -> None:
    train(run, 3, none=False)


@action
def closures(run: Run, _: Setting, __: object) -> None:
    train(run, 3, closure=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", ACTIONS)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_follows_has_the_same_bits(name, what, tmp_path):
    run = make(SETTINGS[name])
    train(run, STOP)
    run = ACTIONS[what](run, SETTINGS[name], tmp_path) or run
    train(run, STEPS - run.steps)
    assert_same(state(run), whole(name))


def test_every_option_is_among_them():
    given = {name for setting in SETTINGS.values() for name in setting.options}
    assert given == {*inspect.signature(Quantized).parameters} - {"optimizer", "policy"}
    assert {way for setting in SETTINGS.values() for way in setting.ways} == {*WAYS}
    assert {setting.wrapped for setting in SETTINGS.values()} == {*WRAPPED}


@pytest.mark.parametrize("policy", [own for own in POLICIES if own is not Policy])
def test_every_field_of_a_policy_is_among_them(policy):
    own = [s.policy for s in SETTINGS.values() if type(s.policy) is policy]
    default = policy()
    for field in dataclasses.fields(policy):
        value = getattr(default, field.name)
        assert any(getattr(given, field.name) != value for given in own), field.name
