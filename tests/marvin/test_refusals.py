"""Mistakes at the door: what to write instead is said, and nothing has changed."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import fx, nn

import fixedpoint_kernels
import marvin
from tests.same import assert_same

FIXED = fixedpoint_kernels.FixedPoint(8, 4)


def model():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.parametrize("loss", [0.5, torch.tensor(0.5), torch.tensor(0.5, requires_grad=True)])
def test_a_loss_goes_by_its_name(loss):
    net = model()
    optimizers = [
        marvin.MSGD(net.parameters()),
        marvin.Quantized(torch.optim.Adam(model().parameters()), marvin.FixedPolicy()),
    ]
    for optimizer in optimizers:
        with pytest.raises(
            TypeError, match=r"step takes a closure, got .*: write step\(loss=loss\)"
        ):
            optimizer.step(loss)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (marvin.FixedPolicy, r"got the class FixedPolicy: write FixedPolicy\(\)"),
        (None, r"must be one such as marvin.LossBudgetPolicy\(\), got NoneType"),
        ("marvin", r"must be one such as marvin.LossBudgetPolicy\(\), got str"),
        (
            torch.optim.Adam(nn.Linear(2, 2).parameters()),
            r"the optimizer must come first, got Adam as the policy: write Quantized\(optimizer, policy",
        ),
    ],
)
def test_a_policy_is_an_object(policy, message):
    net = model()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(TypeError, match=message):
        marvin.Quantized(torch.optim.SGD(net.parameters(), lr=0.1), policy)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("compact_state", [False, True])
def test_a_model_made_float64_is_refused_before_anything_moves(compact_state):
    net = model()
    optimizer = marvin.MSGD(net.named_parameters(), lr=0.1, compact_state=compact_state)
    saved = copy.deepcopy(optimizer.state_dict())

    def step():
        x = torch.ones(2, 4, dtype=net[0].weight.dtype)
        net(x).sum().backward()
        optimizer.step(loss=1.0)

    net.double()
    message = r"^MSGD needs float32, .* parameters, got torch.float64: write model.float\(\)$"
    with pytest.raises(TypeError, match=message):
        step()
    with pytest.raises(TypeError, match=message):
        optimizer.load_state_dict(saved)
    for now, before in zip(
        optimizer.state_dict()["state"].values(), saved["state"].values(), strict=True
    ):
        torch.testing.assert_close(now["master"], before["master"], rtol=0, atol=0)
    optimizer.zero_grad()
    net.float()  # what the message says
    step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_made_short_later_has_its_masters_rounded(dtype):
    net = model()
    optimizer = marvin.MSGD(net.named_parameters(), lr=0.1)
    net.to(dtype)
    for _ in range(2):
        net(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step(loss=1.0)
    for name, p in net.named_parameters():
        fmt, master = optimizer.formats()[name], optimizer.state[p]["master"]
        assert (p.dtype, master.dtype) == (dtype, torch.float32)
        assert ((p.float() - master).abs() < fmt.lsb).all()  # a neighbour: rounding is stochastic
        assert torch.equal(p.float() / fmt.lsb, (p.float() / fmt.lsb).round())


@pytest.mark.parametrize("wrong", [torch.optim.SGD, list(model().parameters()), None])
def test_quantized_wants_an_optimizer(wrong):
    with pytest.raises(TypeError, match=r"such as torch.optim.SGD\(model.named_parameters\(\)"):
        marvin.Quantized(wrong, marvin.FixedPolicy())


def test_the_wrapped_optimizers_own_step_is_refused():
    """Who forgets to change one name in a loop trains in float32."""
    net = model()
    adam = torch.optim.Adam(net.named_parameters())
    optimizer = marvin.Quantized(adam, marvin.FixedPolicy())
    pairs = [(optimizer, adam)]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        pairs.append((other, other.optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    for own, wrapped in pairs:
        for group in own.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        before = [p.clone() for p in own.param_groups[0]["params"]]
        with pytest.raises(RuntimeError, match=r"got the Adam's own: write optimizer\.step\(loss="):
            wrapped.step()
        torch.testing.assert_close(own.param_groups[0]["params"], before, rtol=0, atol=0)
        own.step(loss=1.0)
        assert all(moments["step"] == 1 for moments in wrapped.state.values())
        with pytest.raises(RuntimeError, match="got the Adam's own"):
            wrapped.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_the_wrapped_optimizers_own_state_is_refused(steps):
    """It would save no formats, and load moments of parameters, which no step reads."""
    net = model()
    adam = torch.optim.Adam(net.named_parameters())
    alone = adam.state_dict()
    optimizer = marvin.Quantized(adam, marvin.FixedPolicy())
    for _ in range(steps):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step(loss=1.0)
    pairs = [(optimizer, adam)]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        pairs.append((other, other.optimizer))
    for own, wrapped in pairs:
        before = own.state_dict()
        own.load_state_dict(before)
        message = r"^state_dict must be .*got the Adam's own: write optimizer\.state_dict\(\), "
        with pytest.raises(RuntimeError, match=message):
            wrapped.state_dict()
        message = r"got the Adam's own: write optimizer\.load_.*; load a state of Adam alone before"
        with pytest.raises(RuntimeError, match=message):
            wrapped.load_state_dict(alone)
        with pytest.raises(ValueError, match=r", as a float optimizer has: load it into that one"):
            own.load_state_dict(alone)
        assert_same(own.state_dict(), before)


def test_a_float_state_is_loaded_before_the_wrap_and_gone_on_with():
    """Moments and steps are those of the state, as the messages promise."""
    net = model()
    adam = torch.optim.Adam(net.named_parameters(), lr=0.1)
    for _ in range(3):
        net(torch.ones(2, 4)).sum().backward()
        adam.step()
    later = torch.optim.Adam(net.named_parameters())
    later.load_state_dict(adam.state_dict())
    optimizer = marvin.Quantized(later, marvin.FixedPolicy())
    optimizer.step(loss=1.0)
    steps = [row["step"] for row in optimizer.state_dict()["optimizer"]["state"].values()]
    assert steps == [4.0] * len([*net.parameters()])
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_groups_of_the_wrapped_optimizer_are_refused_until_both_have_them(kind):
    net, late = model(), [torch.nn.Linear(4, 4) for _ in range(3)]
    wrapped = kind(net.parameters(), lr=0.1)
    optimizer = marvin.Quantized(wrapped, marvin.FixedPolicy())
    state = optimizer.state_dict()
    for layer in late[:2]:
        wrapped.add_param_group({"params": layer.parameters(), "lr": 0.2})
    params = [*net.parameters(), *late[0].parameters(), *late[1].parameters()]
    for p in params:
        p.grad = torch.ones_like(p)
    before = [p.clone() for p in params]
    calls = (
        lambda: optimizer.step(loss=1.0),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(state),
        lambda: optimizer.add_param_group({"params": late[2].parameters()}),
        lambda: optimizer.add_param_group(wrapped.param_groups[2]),
    )
    message = (
        rf"added to the Quantized optimizer: got 2 more in its {kind.__name__}, .*groups\[1\]\)"
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=message):
            call()
    torch.testing.assert_close(params, before, rtol=0, atol=0)
    for _ in range(2):
        optimizer.add_param_group(wrapped.param_groups[len(optimizer.param_groups)])
    optimizer.step(loss=1.0)
    assert optimizer.state_dict()["marvin"]["step"] == 1
    assert all((p != old).any() for p, old in zip(params, before, strict=True))
    optimizer.add_param_group({"params": late[2].parameters()})
    assert [group["lr"] for group in wrapped.param_groups] == [0.1, 0.2, 0.2, 0.1]


def test_an_optimizer_is_wrapped_once():
    """Its groups hold the settings of the first policy, which would hide those of the second."""
    adam = torch.optim.Adam(model().parameters())
    first = marvin.Quantized(adam, marvin.LossBudgetPolicy(kappa=0.1))
    with pytest.raises(
        ValueError, match="got the Adam that another Quantized has: make a new Adam"
    ):
        marvin.Quantized(adam, marvin.LossBudgetPolicy(kappa=0.01))
    assert first.param_groups[0]["kappa"] == 0.1
    assert adam.param_groups[0] is first.param_groups[0]


def test_a_loss_budget_says_what_it_lacks():
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy())
    marvin.quantize_activations(net, optimizer)
    net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"needs the loss, got none: write optimizer\.step\(loss="):
        optimizer.step()
    optimizer.step(loss=1.0)
    net.eval()(torch.ones(2, 4)).sum().backward()
    refused = pytest.raises(ValueError, match=r"got no samples.*model\.train\(\).*batch_size=")
    with pytest.warns(UserWarning, match="layers in eval mode are not observed"), refused:
        optimizer.step(loss=1.0)


def test_activations_want_an_optimizer_with_formats():
    net = model()
    with pytest.raises(TypeError, match=r"marvin.MSGD\(.*\) or marvin.Quantized\(.*\), got SGD"):
        marvin.quantize_activations(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.tensor(math.nan, requires_grad=True)])
def test_a_loss_that_is_not_finite_is_one_without_gradients_too(loss):
    optimizer = marvin.MSGD(model().parameters())
    with pytest.raises(FloatingPointError, match=r"got loss (nan|inf) after 0 steps"):
        optimizer.step(loss=loss)
    with pytest.raises(FloatingPointError, match=r"got loss (nan|inf) after 0 steps"):
        optimizer.step(lambda: loss)
    skipping = marvin.MSGD(model().parameters(), nonfinite="skip")
    skipping.step(loss=loss)
    assert skipping.skipped_steps == 1
    for finite in (0.5, torch.tensor(0.5, requires_grad=True), None):
        assert optimizer.step(loss=finite) is finite


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        ("0.5", TypeError, r"got str: write step\(loss=loss\)"),
        (torch.ones(3), ValueError, r"shape \(3,\): write step\(loss=loss.mean\(\)\)"),
    ],
)
def test_a_loss_is_one_number(loss, kind, message):
    net = model()
    optimizer = marvin.MSGD(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    before = copy.deepcopy(net.state_dict())
    for how in ({"loss": loss}, {"closure": lambda: loss}):
        with pytest.raises(kind, match=message):
            optimizer.step(**how)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    for number in (np.float32(0.5), np.float64(0.5), 1, torch.tensor([0.5])):
        assert optimizer.step(loss=number) is number


def test_a_rate_is_a_number():
    with pytest.raises(TypeError, match=r"lr must be a number, got lr='0.1'"):
        marvin.MSGD(model().parameters(), lr="0.1")


@pytest.mark.parametrize(
    ("wrong", "came"),
    [(model(), "the model"), (model().state_dict(), "a mapping"), (None, "NoneType")],
)
def test_msgd_takes_parameters_and_not_the_model(wrong, came):
    with pytest.raises(TypeError, match=rf"got {came}.*: write MSGD\(model.named_parameters\("):
        marvin.MSGD(wrong)


def test_parameters_must_have_a_shape():
    net = nn.Sequential(nn.LazyLinear(3))
    for make in (
        lambda: marvin.MSGD(net.named_parameters()),
        lambda: marvin.Quantized(torch.optim.Adam(net.parameters()), marvin.FixedPolicy()),
    ):
        with pytest.raises(TypeError, match=r"got an UninitializedParameter: run the model once"):
            make()
    net(torch.ones(2, 4))  # what the message says
    marvin.MSGD(net.named_parameters())


@pytest.mark.parametrize(
    "call",
    [
        lambda net, optimizer: marvin.quantize_activations(net, optimizer),
        lambda net, _: marvin.prepare(net),
        lambda net, _: marvin.calibrate(net, [torch.ones(2, 4)]),
        lambda net, _: marvin.export.describe(net, torch.ones(2, 4)),
    ],
    ids=["quantize_activations", "prepare", "calibrate", "describe"],
)
def test_a_compiled_model_is_named(call):
    net = model()
    optimizer = marvin.MSGD(net.named_parameters())
    with pytest.raises(TypeError, match=r"before torch.compile: write \w+\(model"):
        call(torch.compile(net), optimizer)
    with pytest.raises(TypeError, match=r"before torch.jit: write \w+\(model"):
        call(torch.jit.script(net), optimizer)


def test_one_batch_does_not_pass_for_many():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    for call in (marvin.calibrate, marvin.export.calibrate, marvin.reestimate_batch_norm):
        with pytest.raises(TypeError, match=r"got one tensor of shape \(2, 4\): write .*, \[x\]\)"):
            call(net, torch.ones(2, 4))
        with pytest.raises(TypeError, match=r"a list of batches, got NoneType: write .*, \[x\]\)"):
            call(net, None)
    with pytest.raises(TypeError, match=r"got dict: .* \(batch\[key\] for batch in loader\)"):
        marvin.calibrate(net, [{"x": torch.ones(2, 4)}])
    with pytest.raises(TypeError, match=r"got ndarray: write \(torch.as_tensor\(batch\)"):
        marvin.calibrate(net, [torch.ones(2, 4).numpy()])
    with pytest.raises(TypeError, match=r"begins with one, got int$"):
        marvin.calibrate(net, [1, 2])


def test_a_data_set_has_no_batches():
    net, samples = nn.Linear(4, 3), torch.utils.data.TensorDataset(torch.ones(8, 4))
    for call in (marvin.calibrate, marvin.export.calibrate, marvin.reestimate_batch_norm):
        with pytest.raises(TypeError, match=r"got TensorDataset, .*DataLoader\(dataset, batch"):
            call(net, samples)
    marvin.calibrate(net, torch.utils.data.DataLoader(samples, batch_size=2))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield torch.ones(2, 4)

    marvin.calibrate(net, Stream())


def test_a_frozen_model_is_not_frozen_again():
    net = model()
    marvin.quantize_activations(net, marvin.MSGD(net.named_parameters()))
    with pytest.raises(ValueError, match="got one that is frozen already"):
        marvin.freeze(marvin.freeze(net))


def test_a_float_model_to_freeze_is_told_of_calibration():
    message = r"first call marvin\.quantize_activations.*; a float model is .* marvin\.calibrate\(model, b"
    with pytest.raises(ValueError, match=message):
        marvin.freeze(model())


def test_stored_codes_want_an_optimizer_with_formats():
    with pytest.raises(TypeError, match=r"marvin.Quantized\(optimizer, policy\), got NoneType"):
        marvin.store_codes(model(), None)


def test_a_report_counts_and_names():
    net = nn.Linear(4, 3)
    handle = marvin.quantize_activations(net, marvin.MSGD(net.named_parameters()))
    assert str(handle.report) == "1 module rounds activations: the model itself"


@pytest.mark.parametrize(
    "call",
    [
        lambda other: marvin.quantize_activations(other, model()),
        marvin.prepare,
        marvin.freeze,
        marvin.tnvs_,
        marvin.integer.convert,
        lambda other: marvin.calibrate(other, []),
        lambda other: marvin.store_codes(other, model()),
        lambda other: marvin.export.describe(other, torch.ones(2, 4)),
        lambda other: fixedpoint_kernels.forward_save.convert(other, few_bit=3),
    ],
)
def test_a_model_comes_first(call):
    """What came in its place is named; the optimizer, most often."""
    with pytest.raises(TypeError, match=r"a model \(torch.nn.Module\).* got MSGD"):
        call(marvin.MSGD(model().parameters()))


def test_a_fixed_policy_takes_bits():
    with pytest.raises(TypeError, match=r"got <6, 3>: write FixedPolicy\(6, 3\)"):
        marvin.FixedPolicy(fixedpoint_kernels.FixedPoint(6, 3))


@pytest.mark.parametrize(
    "fmt", [fixedpoint_kernels.Minifloat(4, 3), fixedpoint_kernels.BlockFloat(8)]
)
def test_a_fixed_policy_names_where_other_formats_go(fmt):
    with pytest.raises(TypeError, match=r"policies choose fixed point; marvin.Quantizer rounds"):
        marvin.FixedPolicy(fmt)


@pytest.mark.parametrize(
    ("policy", "arguments", "message"),
    [
        (
            marvin.LossBudgetPolicy,
            (8,),
            r"^LossBudgetPolicy takes hyper-parameters by name, got 8: "
            r"write LossBudgetPolicy\(kappa=...\); there are kappa, max_noise, .*max_wl",
        ),
        (marvin.MarvinPolicy, (8, 4), r"got 8, 4: write MarvinPolicy\("),
        (marvin.MuppetPolicy, ((8, 12),), r"got \(8, 12\): write MuppetPolicy\("),
        (marvin.StaticPolicy, (4, 8, 25), r"takes weights, activations first, and hyper-para"),
    ],
    ids=["loss budget", "marvin", "muppet", "static"],
)
def test_a_policy_takes_hyper_parameters_by_name(policy, arguments, message):
    """8 was taken as the share of the loss that rounding may cost, without a word."""
    with pytest.raises(TypeError, match=message):
        policy(*arguments)
    for copied in (copy.deepcopy(policy()), pickle.loads(pickle.dumps(policy()))):
        assert copied == policy()


@pytest.mark.parametrize(
    ("policy", "name", "hint"),
    [
        (marvin.LossBudgetPolicy, "bits", r" \(is min_wl or max_wl meant\?\)"),
        (marvin.LossBudgetPolicy, "per_chanel", r" \(is per_channel meant\?\)"),
        (marvin.StaticPolicy, "wl", r" \(is weights or activations meant\?\)"),
        (marvin.FixedPolicy, "bits", r" \(is wl meant\?\)"),
        (marvin.MuppetPolicy, "bits", r" \(is levels meant\?\)"),
        (marvin.MarvinPolicy, "colour", ""),
    ],
)
def test_hyper_parameters_that_a_policy_has_not_are_named(policy, name, hint):
    message = rf"^{policy.__name__} has no hyper-parameter {name}{hint}; there are [a-z]"
    with pytest.raises(TypeError, match=message):
        policy(**{name: 8})


def test_a_policy_may_have_a_constructor_of_its_own():
    class Named(marvin.FixedPolicy):
        def __init__(self, bits):
            super().__init__(bits, 4)

    class Free(marvin.FixedPolicy):
        def __init__(self, **options):
            super().__init__(options["bits"], 4)

    assert [policy(bits=6).wl for policy in (Named, Free)] == [6, 6]


def test_policies_that_are_short_take_their_words_in_order():
    assert marvin.StaticPolicy(4, 8).activations == 8
    assert marvin.FixedPolicy(8, 4, True).symmetric


@pytest.mark.parametrize(
    ("fmt", "message"),
    [
        ((8, 4), r"such as FixedPoint\(8, 4\), got \(8, 4\)"),
        (8, r"such as FixedPoint\(8, 4\), got 8"),
        (fixedpoint_kernels.BlockFloat(8), r"write quantize_block\(x, fmt\)"),
    ],
)
def test_a_format_is_named(fmt, message):
    with pytest.raises(TypeError, match=message):
        fixedpoint_kernels.quantize(torch.ones(2), fmt)


def test_tensors_of_other_types_are_told_what_to_write():
    fmt = fixedpoint_kernels.FixedPoint(8, 4)
    with pytest.raises(TypeError, match=r"got torch.float64: write x.float\(\)"):
        fixedpoint_kernels.quantize(torch.ones(2).double(), fmt)


@pytest.mark.parametrize("name", ["symmetric", "signed"])
def test_what_a_format_has_or_not_is_a_truth_value(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {name}='no'"):
        fixedpoint_kernels.FixedPoint(8, 4, **{name: "no"})
    fmt = fixedpoint_kernels.FixedPoint(8, 4, **{name: np.bool_(name == "symmetric")})
    assert type(fmt.min_code) is int


@pytest.mark.parametrize("kind", [fixedpoint_kernels.FixedPoint, fixedpoint_kernels.Minifloat])
def test_formats_of_qtorch_are_formats_of_qtorch(kind):
    with pytest.raises(TypeError, match=rf"got 8: write {kind.__name__}\("):
        kind.from_qtorch(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, o: marvin.FixedPolicy(symmetric="no"), "symmetric must be True or False"),
        (
            lambda m, o: marvin.calibrate(m, [torch.ones(2, 3)], per_channel="no"),
            "per_channel must be True or False, got 'no'",
        ),
        (lambda m, o: marvin.round_state(o, master=FIXED, rounding="x"), "rounding must be one of"),
        (lambda m, o: marvin.Quantizer(FIXED, seed="a"), "seed must be a whole number, 0 to"),
        (lambda m, o: marvin.Quantizer(FIXED, seed=-1), "seed must be a whole number, .* got -1"),
        (lambda m, o: marvin.Quantizer(FIXED, number="a"), "number must be a whole number, 0 to"),
        (
            lambda m, o: marvin.quantize_activations(copy.deepcopy(m), o),
            r"make the optimizer of this model's, marvin.Quantized\(",
        ),
        (
            lambda m, o: marvin.quantize_activations(m, o, exclude=nn.Conv2d),
            r"got <class .*Conv2d'>, of which it has none: print\(model\)",
        ),
        (
            lambda m, o: marvin.Quantized(torch.optim.SparseAdam(m.parameters()), o.policy),
            r"got SparseAdam: write torch.optim.Adam, and nn.Embedding without sparse=True",
        ),
    ],
)
def test_what_is_wrong_is_refused_at_once(call, message):
    net = model()
    optimizer = marvin.MSGD(net.named_parameters())
    with pytest.raises(ValueError, match=message):
        call(net, optimizer)


def test_a_loop_over_another_model_is_named_once():
    net, other = model(), model()
    adam = torch.optim.Adam(net.named_parameters())
    optimizer = marvin.Quantized(adam, marvin.FixedPolicy())

    def steps(trained, count):
        for _ in range(count):
            optimizer.zero_grad()
            trained(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    steps(other, 9)  # some step before they train
    with pytest.warns(UserWarning, match="no parameter of this optimizer has had a grad") as seen:
        steps(other, 4)
    assert len(seen) == 1
    steps(net, 1)
    steps(other, 4)  # others take a pause


def test_momenta_that_no_optimizer_has_are_named_once():
    net = model()
    sgd = torch.optim.SGD(net.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.FixedPolicy())
    marvin.round_state(optimizer, momentum=FIXED)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match="SGD has none: nothing is rounded to momentum"):
        optimizer.step()
    optimizer.step()


def test_curves_need_a_writer_and_an_optimizer():
    optimizer = marvin.MSGD(model().named_parameters())
    for arguments in (("runs", optimizer, 1), (optimizer, None, 1)):
        with pytest.raises(TypeError, match=r"write log_formats\(SummaryWriter\(folder\)"):
            marvin.tensorboard.log_formats(*arguments)


def test_curves_by_name_need_an_optimizer_and_layouts_a_writer():
    with pytest.raises(TypeError, match=r"got Sequential: write scalars_of\(optimizer\), where"):
        marvin.tensorboard.scalars_of(model())
    with pytest.raises(TypeError, match=r"got NoneType: write add_layout\(SummaryWriter"):
        marvin.tensorboard.add_layout(None)


@pytest.mark.parametrize("call", [marvin.integer.report, marvin.integer.revert])
def test_a_model_to_report_on_comes_first(call):
    with pytest.raises(TypeError, match=r"must come first, got NoneType: write integer\.re"):
        call(None)


def test_a_quantizer_and_an_input_to_encode_are_tensors():
    fmt = fixedpoint_kernels.FixedPoint(8, 4)
    with pytest.raises(TypeError, match=r"got ndarray: write torch\.as_tensor\(x\)"):
        marvin.Quantizer(fmt)(np.ones(3))
    with pytest.raises(TypeError, match="encode_input needs a tensor and its format, got int"):
        marvin.export.integer.encode_input(torch.ones(3), 8)


def test_parameters_must_have_values():
    with torch.device("meta"):
        net = model()
    for make in (
        marvin.MSGD,
        lambda ps: marvin.Quantized(torch.optim.SGD(ps), marvin.StaticPolicy()),
    ):
        with pytest.raises(TypeError, match=r"got one on the meta device: call model\.to_empty"):
            make(net.parameters())


def test_traces_of_models_that_train_are_refused():
    net = model()
    marvin.quantize_activations(net, marvin.MSGD(net.named_parameters()))
    x = torch.randn(2, 4)
    with pytest.raises(
        RuntimeError, match=r"write torch\.jit\.trace\(marvin\.freeze\(model\), sample"
    ):
        torch.jit.trace(net.eval(), x, check_trace=False)
    frozen = marvin.freeze(net)
    with pytest.raises(
        RuntimeError, match=r"write torch\.export\.export\(marvin\.freeze\(model\), \(sample"
    ):
        torch.export.export(net, (x,))
    assert torch.equal(torch.export.export(frozen, (x,)).module()(x), net(x))
    traced = torch.jit.trace(frozen, x)
    other = torch.randn(2, 4)
    assert torch.equal(traced(other), net(other))
    for own in (net, frozen):
        with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot compile models that"):
            torch.jit.script(own)
    chain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    marvin.quantize_activations(chain, marvin.MSGD(chain.named_parameters()))
    for own in (converted(chain), marvin.freeze(chain)):
        with pytest.raises(AttributeError, match=r"write torch\.jit\.trace\(frozen, sample\)"):
            torch.jit.script(own)


def converted(net):
    marvin.integer.convert(net)
    return net


def test_fx_traces_layers_without_integer_products():
    net = model()
    marvin.quantize_activations(net, marvin.MSGD(net.named_parameters()))
    frozen, x = marvin.freeze(converted(net)), torch.randn(2, 4)
    wanted = frozen(x)
    with pytest.raises(fx.proxy.TraceError, match=r"call marvin\.integer\.revert\(model\) first"):
        fx.symbolic_trace(frozen)
    marvin.integer.revert(frozen)
    traced = converted(fx.symbolic_trace(frozen))
    assert torch.equal(traced(x), wanted)
    assert all(row.is_integer for row in marvin.integer.report(traced).rows)


@pytest.mark.parametrize(
    "call",
    [
        marvin.prepare,
        marvin.integer.convert,
        marvin.freeze,
        lambda net: marvin.calibrate(net, [torch.ones(2, 4)]),
        lambda net: marvin.quantize_activations(net, marvin.MSGD(model().parameters(), lr=0.1)),
    ],
    ids=["prepare", "convert", "freeze", "calibrate", "quantize_activations"],
)
def test_models_without_shapes_are_named(call):
    net = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(
        TypeError, match=r"UninitializedParameter at '0.weight': run the model once"
    ):
        call(net)


@pytest.mark.parametrize("at", ["group", "record"])
def test_an_optimizer_that_is_refused_takes_no_parameters(at):
    class Records(marvin.FixedPolicy):
        def init(self, settings, shared):
            return None

        def check(self, settings):
            pass

    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = marvin.MSGD(model.named_parameters())
    first, second = ([*own.parameters()] for own in model)

    def make():
        if at == "group":
            return marvin.MSGD([{"params": first}, {"params": second, "max_wl": 99}])
        return marvin.Quantized(torch.optim.SGD([*first, *second]), Records())

    with pytest.raises((TypeError, ValueError)) as refused:
        make()
    loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    optimizer.step(loss=loss)  # though the error, and so what was half made, is there still
    assert refused.tb is not None


@pytest.mark.parametrize("call", ["step", "state_dict", "adopt_weights", "end_epoch"])
def test_a_parameter_of_another_shape_is_named(call):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = marvin.MSGD(model.named_parameters())
    loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    model[1].weight.data = torch.randn(3, 4)
    with pytest.raises(
        ValueError, match=r"shape \(2, 4\), got \(3, 4\) of 1\.weight: .*add_param_group"
    ):
        getattr(optimizer, call)()
