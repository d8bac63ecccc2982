"""The model carries its formats: what people do with models, compared bit for bit."""

import copy
import io
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import marvin
from fixedpoint_kernels import FixedPoint
from marvin.channels import ChannelFormat
from marvin.export.graph.formats import carried_weights
from marvin.hooks import rounders_of
from marvin.rounder import BUFFER, formats_of

FAST = {"lr": 0.05, "lookback": (2, 5), "resolution": (10, 20)}
POLICIES = {
    "marvin": lambda: marvin.MarvinPolicy(lookback=(2, 5), resolution=(10, 20)),
    "budget": lambda: marvin.LossBudgetPolicy(window=3),
    "channels": lambda: marvin.LossBudgetPolicy(window=3, per_channel=True),
    "muppet": lambda: marvin.MuppetPolicy(levels=(6, 8, 32)),
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def make(policy="marvin", seed=0, **settings):
    model = net(seed)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    optimizer = marvin.Quantized(sgd, POLICIES[policy](), seed=seed, **settings)
    marvin.quantize_activations(model, optimizer)
    return model, optimizer


def images(seed, n=8):
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, steps, start=0):
    model.train()
    for i in range(start, start + steps):
        x = images(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), (x[:, 0].mean((1, 2)) > 0).long())
        loss.backward()
        optimizer.step(loss=loss)
    return model


def outputs(model):
    return model.eval()(images(99)).detach()


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def rounded(x, wl, fl):
    """Round to nearest, ties to even, with numbers of twice the length."""
    codes = torch.round(x.double() * 2.0**fl).clamp(-(2 ** (wl - 1)), 2 ** (wl - 1) - 1)
    return (codes / 2.0**fl).to(x.dtype)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_keeps_its_formats_and_is_tied_to_nothing(policy):
    model, optimizer = make(policy)
    train(model, optimizer, 4)
    best, wanted = copy.deepcopy(model), outputs(model)
    twin, twin_optimizer = make(policy)
    train(twin, twin_optimizer, 4)
    best.train()(images(5)).sum().backward()  # must not use up noise of the original
    best.load_state_dict(model.state_dict())
    train(model, optimizer, 6, 4)
    train(twin, twin_optimizer, 6, 4)
    same(dict(model.state_dict()), dict(twin.state_dict()))
    same(outputs(best), wanted)
    assert not torch.equal(outputs(model), wanted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wrap", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_pair_goes_on_alike(policy, wrap):
    model, optimizer = make(policy)
    train(model, optimizer, 5)
    pair = wrap((model, optimizer))
    train(model, optimizer, 5, 5)
    train(*pair, 5, 5)
    same(dict(model.state_dict()), dict(pair[0].state_dict()))
    same(outputs(model), outputs(pair[0]))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_loads_into_a_prepared_model_and_not_into_a_float_one(policy):
    model, optimizer = make(policy)
    train(model, optimizer, 7)
    state, wanted = model.state_dict(), outputs(model)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.fixed_point"):
        net(1).load_state_dict(state)
    prepared = net(1)
    handle = marvin.prepare(prepared)
    same(outputs(prepared), outputs(net(1)))
    prepared.load_state_dict(state)
    same(outputs(prepared), wanted)
    prepared.load_state_dict(load(save(state)))  # as safetensors have it
    same(outputs(prepared), wanted)
    assigned = net(1)
    marvin.prepare(assigned)
    outputs(assigned)  # reads the formats there are
    assigned.load_state_dict(load(save(state)), assign=True)
    same(outputs(assigned), wanted)
    float_state = net(2).state_dict()
    handle.remove()
    prepared.load_state_dict(float_state)
    same(outputs(prepared), outputs(net(2)))


class Own(nn.Linear):
    """Says itself what is in its state, as torch_geometric's ``Linear`` does."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()
        destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()


@pytest.mark.parametrize("change", [lambda own: own, copy.deepcopy, marvin.freeze])
def test_a_layer_that_says_what_is_in_its_state_saves_its_formats_too(change):
    def own_net(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), Own(108, 16), nn.ReLU(), nn.Linear(16, 4))

    model, prepared = own_net(0), own_net(1)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(weights=6, activations=5))
    handle = marvin.quantize_activations(model, optimizer)
    train(model, optimizer, 2)
    marvin.prepare(prepared)
    prepared.load_state_dict(change(model).state_dict())
    same(outputs(prepared), outputs(model))
    marvin.prepare(prepared)
    assert list(prepared.state_dict()) == list(model.state_dict())
    handle.remove()
    assert not [name for name in model.state_dict() if BUFFER in name]


def test_a_float_state_loads_and_formats_stay():
    model, _ = make()
    model.load_state_dict(net(3).state_dict())
    first = rounded(images(99), 8, 4)
    seen = []
    model.eval()[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images(99))
    same(seen[0], first)


@pytest.mark.parametrize("policy", ["budget", "channels"])
def test_a_state_without_its_head_loads_into_a_model_with_another_head(policy):
    first, optimizer = make(policy)
    train(first, optimizer, 5)
    state = {k: v for k, v in first.state_dict().items() if k not in ("6.weight", "6.bias")}
    model = net(1)
    model[6] = nn.Linear(8, 9)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    marvin.quantize_activations(model, marvin.Quantized(sgd, POLICIES[policy]()))
    before = model.state_dict()["6." + BUFFER].clone()
    assert state["6." + BUFFER].shape != before.shape
    found = model.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["6.weight", "6.bias"], [])
    same(model.state_dict()["6." + BUFFER], before)
    same(model.state_dict()["3." + BUFFER], first.state_dict()["3." + BUFFER])
    with pytest.raises(RuntimeError, match=r"size mismatch for 6\.fixed_point"):
        model.load_state_dict(first.state_dict(), strict=False)


def test_a_whole_model_is_saved_and_loaded_in_another_process(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 5)
    torch.save(model, tmp_path / "model.pt")
    torch.save(outputs(model), tmp_path / "wanted.pt")
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[2]);"
        "m = torch.load(sys.argv[1] + '/model.pt', weights_only=False).eval();"
        "x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(99));"
        "assert torch.equal(m(x), torch.load(sys.argv[1] + '/wanted.pt'))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), sys.path[0]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]


def test_an_average_of_models_has_the_formats_of_the_last():
    model, optimizer = make()
    average = AveragedModel(model)
    train(model, optimizer, 9)
    average.update_parameters(model)  # the first takes the weights as they are
    assert optimizer.formats()["0.weight"] != FixedPoint(8, 4)
    same(outputs(average), outputs(model))
    train(model, optimizer, 5, 9)
    average.update_parameters(model)
    same(average.module[0].fixed_point, model[0].fixed_point)


def test_numbers_that_are_no_formats_are_refused():
    model, optimizer = make()
    train(model, optimizer, 4)
    new, own = make()[0][0].fixed_point, model[0].fixed_point
    assert not torch.equal(own, new)
    with torch.no_grad():
        own.copy_((own.long() + new.long()) // 2)  # an average of two
    with pytest.raises(ValueError, match=r"0\.fixed_point must hold formats .*do not average"):
        model(images(0))
    state = make("marvin")[0].state_dict()
    state["3.fixed_point"] = state["3.fixed_point"][:5]
    with pytest.raises(RuntimeError, match=r"3\.fixed_point must hold formats"):
        make()[0].load_state_dict(state)


def test_a_model_without_values_says_so():
    model, optimizer = make()
    train(model, optimizer, 2)
    state = copy.deepcopy(model.state_dict())
    y = model.eval()(images(0))
    model.to("meta")
    with pytest.raises(ValueError, match=r"0\.fixed_point must hold .*meta device.* load a state"):
        model[0](images(0).to("meta"))
    model.to_empty(device="cpu")
    model[0].fixed_point.fill_(7)  # whatever was there
    with pytest.raises(ValueError, match=r"0\.fixed_point must hold .*as after to_empty"):
        model[0](images(0))
    model.load_state_dict(state)
    torch.testing.assert_close(model(images(0)), y, rtol=0, atol=0)


class Map(dict):
    """As accelerate's, of one module."""

    weights_map = property(lambda self: self)


def put_away(module, wrap=lambda hook: hook):
    """Let a module have tensors while it runs, and keep them elsewhere in between, as accelerate does it."""
    kept = {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}
    own, module._hf_hook = module.forward, wrap(Map(kept))

    def give(tensors):
        for name, value in tensors.items():
            where = module._parameters if name in module._parameters else module._buffers
            where[name] = nn.Parameter(value, False) if where is module._parameters else value

    def forward(*args):
        give(kept)
        try:
            return own(*args)
        finally:
            give({name: value.to("meta") for name, value in kept.items()})

    give({name: value.to("meta") for name, value in kept.items()})
    module.forward = forward


@pytest.mark.parametrize("wrap", [lambda hook: hook, lambda hook: SimpleNamespace(hooks=[hook])])
def test_formats_that_are_kept_elsewhere_between_calls_are_found(wrap):
    model, optimizer = make("budget")
    train(model, optimizer, 4)
    y = outputs(model)
    formats = formats_of(model)
    assert formats["3"].inputs is not None
    for layer in (model[0], model[1], model[3]):
        put_away(layer, wrap)
    with torch.no_grad():
        for _ in range(2):
            same(model(images(99)), y)
    assert model[3].fixed_point.is_meta
    assert formats_of(model) == formats


def test_modules_that_got_no_formats_beside_others_are_named():
    model, optimizer = make()
    train(model, optimizer, 4)
    other = net(1)
    marvin.prepare(other)
    other.eval()(images(0))  # nothing has been loaded yet
    for name, value in model.state_dict().items():  # past load_state_dict
        if not name.startswith(("0.", "3.")):
            parent, _, own = name.rpartition(".")
            tensors = vars(other.get_submodule(parent))
            table = tensors["_buffers" if own in tensors["_buffers"] else "_parameters"]
            table[own] = nn.Parameter(value) if table is tensors["_parameters"] else value.clone()
    clone = copy.deepcopy(other)
    other.train()(images(0))
    for call in (other, copy.deepcopy(other)):
        with pytest.warns(
            UserWarning, match=r"got no formats, .* that have some: 0, 3; .*offload_buffers=True"
        ):
            call.eval()(images(0))
        call(images(0))  # once
    clone.load_state_dict(model.state_dict())
    same(outputs(clone), outputs(model))


def test_what_a_state_leaves_out_is_awaited_no_more():
    model, optimizer = make()
    train(model, optimizer, 4)
    state = model.state_dict()
    del state["3.fixed_point"]
    other = net(1)
    marvin.prepare(other)
    assert all(formats.is_awaited for formats in formats_of(other).values())
    other.load_state_dict(state)
    assert not any(formats.is_awaited for formats in formats_of(other).values())
    assert not torch.equal(outputs(other), outputs(model))  # 3 computes in float32
    assert not any(f.is_awaited for f in formats_of(marvin.calibrate(net(), [images(0)])).values())


def test_a_second_call_takes_the_place_of_the_first():
    model, optimizer = make()
    count = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    marvin.quantize_activations(model, optimizer)
    assert count == sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    once, other = make()
    train(model, optimizer, 5)
    train(once, other, 5)
    same(dict(model.state_dict()), dict(once.state_dict()))


def test_a_model_that_was_freed_gets_no_formats_again():
    model, optimizer = make()
    handle = marvin.quantize_activations(model, optimizer)
    train(model, optimizer, 1)
    handle.remove()
    train(model, optimizer, 6, 1)  # formats change
    assert optimizer.formats()["0.weight"] != FixedPoint(8, 4)
    assert not any(BUFFER in name for name in model.state_dict())


@pytest.mark.filterwarnings("ignore:weights that .* has rounded")
def test_another_optimizer_takes_over():
    model, first = make()
    train(model, first, 3)
    second = marvin.MSGD(model.named_parameters(), **FAST)
    marvin.quantize_activations(model, second)
    train(model, second, 3)
    with pytest.raises(RuntimeError, match=r"one optimizer, got another Quantized .* 0\.weight"):
        train(model, first, 1)


def test_formats_that_others_wrote_are_written_again():
    model, optimizer = make()
    train(model, optimizer, 3)
    own, state = formats_of(model), copy.deepcopy(optimizer.state_dict())
    other, further = make(seed=1)
    train(other, further, 9)
    model.load_state_dict(other.state_dict())
    assert formats_of(model) != own
    optimizer.load_state_dict(state)
    assert formats_of(model) == own


def test_include_exclude_and_the_report():
    model = net()
    optimizer = marvin.MSGD(model.named_parameters())
    handle = marvin.quantize_activations(model, optimizer, exclude=[nn.BatchNorm2d, "6"])
    assert handle.layers() == ["0", "3", "4"]
    assert handle.report.left["1"] == handle.report.left["6"] == "excluded"
    assert "not 1, 6: excluded" in str(handle.report)
    handle = marvin.quantize_activations(model, optimizer, include=nn.Conv2d)
    assert handle.layers() == ["0", "3"]
    with pytest.raises(ValueError, match="include must choose modules that the model has"):
        marvin.quantize_activations(model, optimizer, include="conv*")
    for exclude in (model[3], [model[3]]):
        handle = marvin.quantize_activations(model, optimizer, exclude=exclude)
        assert handle.report.left["3"] == "excluded"
        assert {"0", "4", "6"} <= {*handle.layers()}
    with pytest.raises(ValueError, match=r"must choose modules that the model has, got Conv2d"):
        marvin.quantize_activations(model, optimizer, exclude=nn.Conv2d(1, 1, 1))
    with pytest.raises(
        TypeError, match=r"exclude must have names, classes or modules, got 3: write"
    ):
        marvin.quantize_activations(model, optimizer, exclude=[3])
    with pytest.raises(
        TypeError, match=r"include must have names, classes or modules, got 3: write"
    ):
        marvin.quantize_activations(model, optimizer, include=3)
    with pytest.raises(TypeError, match=r"marvin\.MSGD.*got SGD"):
        marvin.quantize_activations(model, torch.optim.SGD(model.parameters()))


def test_the_report_names_the_model_itself():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.fc = nn.Parameter(torch.ones(1)), nn.Linear(4, 2)

    model = Scaled()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy())
    assert "not the model itself: " in str(marvin.quantize_activations(model, optimizer))


def test_parameters_that_come_later_bring_their_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2), nn.Linear(2, 2))
    own = [(name, p) for name, p in model.named_parameters() if name.startswith("2.")]
    adam = torch.optim.Adam(own, lr=0.01)
    optimizer = marvin.Quantized(adam, marvin.LossBudgetPolicy())
    handle = marvin.quantize_activations(model, optimizer, exclude="3")
    assert handle.layers() == ["2"]
    for later in ("0.", "3."):
        named = [(name, p) for name, p in model.named_parameters() if name.startswith(later)]
        optimizer.add_param_group({"params": named})
    assert handle.layers() == ["0", "2"]
    assert handle.report.left == {"3": "excluded"}
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        assert optimizer.forward_state.samples == 8
        optimizer.step(loss=loss)
    carried = formats_of(model)
    assert carried["0"].inputs == optimizer.input_formats()["0.weight"]
    assert carried["0"].weights[0] == optimizer.formats()["0.weight"]


@pytest.mark.parametrize(
    ("wrap", "how"),
    [
        (nn.utils.parametrizations.weight_norm, "a parametrisation"),
        (nn.utils.weight_norm, "a hook"),
        (nn.utils.spectral_norm, "a hook"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "a hook"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_computed_weight_is_named(wrap, how):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    wrap(model[2])
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy())
    handle = marvin.quantize_activations(model, optimizer)
    marvin.integer.convert(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    assert list(handle.report.left) == ["2"]
    assert handle.report.left["2"].startswith(f"{how} computes its weight from rounded parameters")
    rows = {row.name: row.reason for row in marvin.integer.report(model).rows}
    if how == "a hook":
        assert rows["2"] == "its weight is computed from other parameters"
    x = torch.randn(8, 6)
    frozen = marvin.freeze(model)(x)  # though a weight has a graph now
    assert torch.equal(frozen, model.eval()(x))


class Mixed(nn.Module):
    """Takes a keyword and gives a dictionary; its inner module takes a tuple."""

    def __init__(self):
        super().__init__()
        self.pair, self.out = Pair(), nn.Linear(4, 4)

    def forward(self, *, x, mask=None):
        a, b = self.pair((x, x * 3), mask=mask)
        return {"y": self.out(input=(a + b) / 3), "n": 3}


class Pair(nn.Module):
    """Owns a weight, takes a tuple and gives one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) / 2)
        self.seen = []

    def forward(self, xs, mask=None):
        self.seen.append((*xs, mask))
        return xs[0] @ self.weight, xs[1] @ self.weight


def test_keywords_tuples_and_dictionaries_are_rounded_and_masks_stay():
    torch.manual_seed(0)
    model = Mixed()
    optimizer = marvin.MSGD(model.named_parameters())  # <8, 4>
    marvin.quantize_activations(model, optimizer)
    x, mask = torch.randn(2, 4), torch.tensor([0.0, -torch.inf, 0.0, 0.0])
    seen = []
    model.out.register_forward_pre_hook(lambda _, a, k: seen.append(k["input"]), with_kwargs=True)
    y = model.eval()(x=x, mask=mask)
    same(model.pair.seen[0], (rounded(x, 8, 4), rounded(x * 3, 8, 4), mask))
    same(seen[0], rounded(seen[0], 8, 4))
    same(y["y"], rounded(y["y"], 8, 4))
    assert y["n"] == 3


class Named(nn.Module):
    """Owns a weight, takes a dictionary and gives one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) / 2)

    def forward(self, xs):
        return {name: x @ self.weight for name, x in xs.items()}


def test_dictionaries_are_rounded_on_both_sides():
    torch.manual_seed(0)
    model = Named()
    optimizer = marvin.MSGD(model.named_parameters())  # <8, 4>
    marvin.quantize_activations(model, optimizer)
    xs = {"x": torch.randn(2, 4), "mask": torch.full((4,), 0.01)}
    given = dict(xs)
    ys = model.eval()(xs)
    assert all(xs[name] is x for name, x in given.items())  # the user's own stays
    same(ys["x"], rounded(rounded(xs["x"], 8, 4) / 2, 8, 4))
    same(ys["mask"], xs["mask"] / 2)


def test_a_weight_that_is_used_without_its_module_is_named():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    handle, told = marvin.quantize_activations(model, optimizer), []
    for _ in range(2):  # says so once
        model(torch.randn(2, 3, 8)).sum().backward()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step(loss=1.0)
        told.append([str(w.message) for w in found])
    assert "without calling its module: self_attn.out_proj" in told[0][0]
    assert told[1] == []
    assert handle.report.left == {}
    assert "self_attn.out_proj" in handle.layers()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_autocast_rounds(dtype, training):
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    sgd = torch.optim.SGD(model.named_parameters())
    optimizer = marvin.Quantized(sgd, marvin.FixedPolicy(6, 3))
    marvin.quantize_activations(model, optimizer)
    model.train(training)
    seen = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0], y)}))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        y = model(torch.randn(4, 6) * 3)
    assert y.dtype is dtype
    for name in ("0", "2"):
        for x in seen[name]:
            same(x, rounded(x, 6, 3))
            assert not torch.equal(x, rounded(x, 6, 2))


def test_inference_mode_and_tensors_made_in_it():
    model, optimizer = make()
    train(model, optimizer, 5)
    wanted = outputs(model)
    with torch.inference_mode():
        same(model(images(99)).clone(), wanted)
    with torch.inference_mode():
        other = net()
        marvin.prepare(other)
        other.load_state_dict(model.state_dict())
        same(outputs(other), wanted)
    train(model, optimizer, 1)


def test_formats_that_were_given_in_inference_mode_may_change():
    def formats(is_inference):
        model = net()
        optimizer = marvin.Quantized(
            torch.optim.SGD(model.named_parameters(), lr=0.05), POLICIES["marvin"]()
        )
        with torch.inference_mode(is_inference):
            marvin.quantize_activations(model, optimizer)
        train(model, optimizer, 5)
        return formats_of(model)

    assert formats(True) == formats(False)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_model_gives_the_same_bits(policy):
    model, optimizer = make(policy)
    train(model, optimizer, 5)
    frozen, wanted = marvin.freeze(model), outputs(model)
    x = images(99)
    assert not any(p.requires_grad for p in frozen.parameters())
    same(frozen(x), wanted)
    spread = x * 2.0 ** torch.arange(-4, 4).view(-1, 1, 1, 1)  # samples of different sizes
    same(frozen(spread), model(spread).detach())
    with torch.inference_mode():
        same(frozen(x).clone(), wanted)
    same(torch.jit.trace(frozen, x)(x), wanted)
    exported = torch.export.export(frozen, (x,))
    same(exported.module()(x), wanted)
    assert not [n for n in exported.graph.nodes if "fixedpoint" in str(n.target)]
    file = io.BytesIO()
    torch.save(frozen, file)
    file.seek(0)
    same(torch.load(file, weights_only=False)(x), wanted)
    train(model, optimizer, 5, 5)
    same(frozen(x), wanted)
    frozen.load_state_dict(model.state_dict())
    same(frozen(x), outputs(model))


def scaled(_module, args):
    return (args[0] * 0.7,)


def scaled_keywords(_module, args, kwargs):
    return (args[0] * 1.3,), kwargs


def scaled_outputs(_module, _args, y):
    return y * 0.9


def test_hooks_of_a_frozen_model_are_called_in_the_order_of_the_model():
    """Of one's own: some before rounding, some behind it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(16, 8)
    own = "scaled", "scaled_keywords", "scaled_outputs"

    def add(layer):
        layer.register_forward_pre_hook(scaled)
        layer.register_forward_pre_hook(scaled_keywords, with_kwargs=True)
        layer.register_forward_hook(scaled_outputs)

    def order(hooks):
        names = (getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks.values())
        return [name if name in own else "rounding" for name in names]

    add(model[0])
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.01)
    optimizer = marvin.Quantized(sgd, marvin.StaticPolicy(4, 4))
    marvin.quantize_activations(model, optimizer)
    add(model[2])
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    wanted = model.eval()(x).detach()
    frozen = marvin.freeze(model)
    same(frozen(x), wanted)
    pair = model, frozen
    for fixed in (pair, [marvin.freeze(marvin.calibrate(m, [x])) for m in pair]):
        for layer, before, after in (
            (0, ["scaled", "scaled_keywords", "rounding"], ["scaled_outputs", "rounding"]),
            (2, ["rounding", "scaled", "scaled_keywords"], ["rounding", "scaled_outputs"]),
        ):
            for m in fixed:
                assert order(m[layer]._forward_pre_hooks) == before
                assert order(m[layer]._forward_hooks) == after
                assert len(m[layer]._forward_pre_hooks_with_kwargs) == 2
    first, second = (marvin.calibrate(m, [x]) for m in pair)
    same(second(x), first(x).detach())


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_frozen_model_rounds_ties_and_saturates_as_the_model_does(is_traced):
    model = nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.named_parameters())
    marvin.quantize_activations(model, marvin.Quantized(sgd, marvin.FixedPolicy(6, 3)))
    x = torch.arange(-160, 160).unsqueeze(1) / 32  # a quarter of a step apart, past both ends
    wanted = rounded(x, 6, 3)
    same(outputs_of(model, x), wanted)
    frozen = marvin.freeze(model)
    same(outputs_of(torch.jit.trace(frozen, x) if is_traced else frozen, x), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_model_rounds_in_one_pass_as_its_operators_do(dtype):
    frozen = marvin.freeze(_of_one_number(dtype))
    x = torch.randn(3, 5, 7, 9, dtype=dtype).to(memory_format=torch.channels_last)
    x[0, 0, 0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, -0.01, 1e30])
    with torch.profiler.profile(acc_events=True) as fast:
        y = frozen(x)
    with (
        torch.profiler.profile(acc_events=True) as slow,
        pytest.warns(UserWarning, match="gradient of rounding"),
    ):
        wanted = frozen(x.clone().requires_grad_())
    assert wanted.requires_grad  # in operators that can be differentiated
    same(_bits(y), _bits(wanted))
    assert [sum("round" in own.key for own in p.key_averages()) for p in (fast, slow)] == [0, 1]
    with torch.no_grad():
        same(_bits(frozen(x.clone().requires_grad_())), _bits(wanted))


def _of_one_number(dtype):
    """Return a layer that gives its rounded input back."""
    model = nn.Sequential(nn.Conv2d(5, 5, 1, groups=5, bias=False)).to(dtype)
    torch.nn.init.ones_(model[0].weight)
    sgd = torch.optim.SGD(model.named_parameters())
    marvin.quantize_activations(model, marvin.Quantized(sgd, marvin.FixedPolicy(6, 3)))
    return model


def _bits(x):
    return x.detach().view(torch.int32 if x.dtype is torch.float32 else torch.int16)


def outputs_of(model, x):
    return model.eval()(x).detach()


@pytest.mark.slow
def test_a_frozen_model_compiles():
    model, optimizer = make()
    train(model, optimizer, 5)
    compiled = torch.compile(marvin.freeze(model), backend="aot_eager", fullgraph=True)
    same(compiled(images(99)), outputs(model))


def linear_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def quantise(model):
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.FixedPolicy(4, 2))
    return marvin.quantize_activations(model, optimizer)


def freeze_one(_):
    return marvin.calibrate(linear_net(), [torch.randn(32, 8)], bits=4)


def load_frozen(_):
    file = io.BytesIO()
    torch.save(freeze_one(None), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def load_into(model):
    source = linear_net()
    quantise(source)
    marvin.prepare(model)
    model.load_state_dict(source.state_dict())
    return model


def quantise_itself(model):
    quantise(model)
    return model


def quantise_a_copy(model):
    return copy.deepcopy(quantise_itself(model))


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:a frozen model rounds")
@pytest.mark.parametrize(
    "make_one", [freeze_one, load_frozen, load_into, quantise_itself, quantise_a_copy]
)
@pytest.mark.parametrize(("is_made_before", "grad"), [(True, True), (False, False)])
def test_what_was_compiled_in_float_is_not_taken_for_a_model_that_rounds(
    make_one, is_made_before, grad, request
):
    """Dynamo does not look whether modules have hooks."""
    torch.compiler.reset()
    request.addfinalizer(torch.compiler.reset)
    baseline, x = linear_net(), torch.randn(5, 8)
    given = linear_net() if is_made_before else baseline
    model = make_one(given) if is_made_before else None
    with torch.set_grad_enabled(grad):
        floats = torch.compile(baseline, backend="eager")
        wanted = floats(x).clone()
        if model is None:
            model = make_one(given)
        got = torch.compile(model, backend="eager")(x)
    same(got, model(x))
    assert not torch.equal(got, wanted)
    with torch.set_grad_enabled(grad):
        same(floats(x), baseline(x))  # which may round now


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_what_was_compiled_after_remove_is_not_taken_once_it_rounds_again(request):
    torch.compiler.reset()
    request.addfinalizer(torch.compiler.reset)
    model, x = linear_net(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="eager")
    quantise(model).remove()
    same(compiled(x), floats := model(x))
    quantise(model)
    same(compiled(x), model(x))
    assert not torch.equal(compiled(x), floats)


def test_compiled_code_without_guards_is_named_where_a_model_does_not_round(request):
    torch.compiler.reset()
    request.addfinalizer(torch.compiler.reset)
    model, x = linear_net(), torch.randn(5, 8)
    options = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    compiled = torch.compile(model, backend="eager", options=options)
    compiled(x)
    optimizer = marvin.MSGD(model.named_parameters(), **FAST)
    marvin.quantize_activations(model, optimizer)
    compiled(x).sum().backward()
    with pytest.warns(UserWarning, match=r"module: 0, 2; .* call torch.compiler.reset\(\)"):
        optimizer.step(loss=1.0)


def test_a_table_of_somebody_elses_type_stays():
    class Own(dict):
        pass

    model = linear_net()
    own = vars(model[0])["_parameters"] = Own(model[0]._parameters)
    quantise(model).remove()
    assert model[0]._parameters is own
    assert type(model[2]._parameters) is dict


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_torch_ao_replaces_modules_of_frozen_models():
    """It registers hooks anew, without keywords."""
    model, optimizer = make("budget")
    train(model, optimizer, 5)
    wanted = outputs(model)
    frozen = marvin.freeze(model)
    fused = torch.ao.quantization.fuse_modules(frozen, [["0", "1", "2"]])
    torch.testing.assert_close(fused(images(99)), wanted, rtol=0, atol=0.05)  # a code at most
    dynamic = torch.ao.quantization.quantize_dynamic(frozen, {nn.Linear})
    seen = []
    dynamic[6].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    frozen[6].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    torch.testing.assert_close(dynamic(images(99)), wanted, rtol=0, atol=0.05)  # 8 bits
    frozen(images(99))
    same(*seen)
    dynamic = torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear})
    with pytest.raises(RuntimeError, match=r"give it marvin.freeze\(model\)"):
        dynamic(images(99))


def test_a_model_without_formats_is_not_frozen():
    with pytest.raises(ValueError, match=r"must carry formats, .*prepare"):
        marvin.freeze(net())
    model, optimizer = make()
    marvin.quantize_activations(model, optimizer, eval_rounding="stochastic")
    with pytest.raises(ValueError, match="must round to nearest in eval mode"):
        marvin.freeze(model)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_carries_the_formats_of_its_weights(policy):
    model, optimizer = make(policy)
    train(model, optimizer, 5)
    formats, carried = optimizer.formats(), formats_of(model)
    for name in ("0", "3", "6"):
        weight, bias = formats[f"{name}.weight"], formats.get(f"{name}.bias")
        assert carried[name].weights == (weight, bias)
        assert carried[name].inputs == optimizer.input_formats().get(f"{name}.weight")
    assert isinstance(formats["0.weight"], ChannelFormat) == (policy == "channels")
    assert formats["0.weight"] != FixedPoint(8, 4)


def pruned(model):
    """Register a weight again, behind its bias, as pruning does."""
    prune.l1_unstructured(model[6], "weight", 0.4)
    prune.remove(model[6], "weight")
    assert [name for name, _ in model[6].named_parameters()] == ["bias", "weight"]
    return model


@pytest.mark.parametrize("policy", ["channels", "muppet"])
@pytest.mark.filterwarnings("ignore:parameters that left the model")
def test_formats_stay_with_weights_that_are_registered_again(policy):
    model, optimizer = make(policy)
    train(model, optimizer, 5)
    before = carried_weights(model)
    assert "6.weight" in before
    for own in (model, marvin.freeze(model)):
        assert carried_weights(pruned(own)) == before


@pytest.mark.parametrize(("first", "then"), [(pruned, list), (list, pruned)])
def test_states_of_models_with_parameters_in_another_order_bring_each_its_format(first, then):
    model, other = net(), net(1)
    first(model)
    then(other)
    fixed = marvin.calibrate(model, [images(0)], bits=8)
    marvin.prepare(other)
    other.load_state_dict(fixed.state_dict())
    assert carried_weights(other) == carried_weights(fixed)
    assert "6.weight" in carried_weights(other)
    report = marvin.integer.convert(marvin.freeze(other))
    assert not [row.name for row in report.rows if "weights are float32" in row.reason]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_optimizers_state_brings_the_formats_too(policy):
    model, optimizer = make(policy)
    train(model, optimizer, 5)
    other, resumed = make(policy, 1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert formats_of(other) == formats_of(model)


def test_buffers_have_the_names_that_the_pages_tell():
    model, _ = make()
    assert [k for k in model.state_dict() if k.endswith(BUFFER)] == [
        "fixed_point", "0.fixed_point", "1.fixed_point", "3.fixed_point", "4.fixed_point",
        "6.fixed_point",
    ]  # fmt: skip


class ForgetsBuffers(fx.GraphModule):
    """Copies without buffers of its own, as torchvision's feature extractors make them."""

    def __deepcopy__(self, memo):
        new = super().__deepcopy__(memo)
        new._buffers.clear()
        return new


class Adds(nn.Module):
    """With a parameter of its own, by which the model itself rounds."""

    def __init__(self):
        super().__init__()
        self.bias, self.conv = nn.Parameter(torch.randn(3, 6, 6)), nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x + self.bias)


@pytest.mark.parametrize("kind", [fx.GraphModule, ForgetsBuffers])
@pytest.mark.parametrize("copied", [copy.deepcopy, marvin.freeze, lambda m: copy.deepcopy([m])[0]])
def test_copies_of_traced_modules_round_and_load(copied, kind):
    torch.manual_seed(0)
    traced = fx.symbolic_trace(Adds())
    model = kind(traced, traced.graph)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05)
    marvin.quantize_activations(model, marvin.Quantized(sgd, marvin.StaticPolicy(8, 8)))
    (rounder,) = rounders_of(model)
    coarse = replace(rounder.formats(model), inputs=FixedPoint(3, 1))
    rounder.write(model, coarse)
    x, state = images(0), model.state_dict()
    y = model.eval()(x)
    rounder.write(model, replace(coarse, inputs=None))
    assert not torch.equal(model(x), y)
    rounder.write(model, coarse)
    for own in (copied(model), copy.deepcopy(copied(model))):
        assert torch.equal(own.eval()(x), y)
        own.load_state_dict(state)
        assert torch.equal(own(x), y)
        assert formats_of(own)[""].inputs == FixedPoint(3, 1)


class LowRank(nn.Module):
    """A parametrisation that has parameters."""

    def __init__(self, layer):
        super().__init__()
        self.a = nn.Parameter(torch.randn(layer.out_features, 2) * 0.1)
        self.b = nn.Parameter(torch.randn(2, layer.in_features) * 0.1)

    def forward(self, weight):
        return weight + self.a @ self.b


PARAMETRISATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "low rank": lambda layer: parametrize.register_parametrization(layer, "weight", LowRank(layer)),
}


@pytest.mark.parametrize("parametrised", PARAMETRISATIONS.values(), ids=PARAMETRISATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_layers_with_a_parametrisation_round_their_inputs(parametrised, bias):
    torch.manual_seed(0)
    layers = nn.Linear(8, 32, bias=bias), nn.Linear(32, 4, bias=bias)
    model = nn.Sequential(parametrised(layers[0]), nn.ReLU(), parametrised(layers[1]))
    optimizer = marvin.Quantized(
        torch.optim.SGD(model.named_parameters(), lr=0.01), marvin.StaticPolicy(4, 4)
    )
    handle = marvin.quantize_activations(model, optimizer)
    assert handle.layers() == ["0", "2"]
    assert handle.left.keys() == {"0", "2"}
    model(torch.randn(64, 8)).square().mean().backward()
    optimizer.step()
    seen, linear = [], F.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda x, *rest: (seen.append(x), linear(x, *rest))[1])
        model(torch.randn(64, 8))
    for name, x in zip(("0", "2"), seen, strict=True):
        codes = x * formats_of(model)[name].inputs.scale
        assert torch.equal(codes, codes.round())
        assert codes.abs().max() < 16
    assert [row.name for row in marvin.integer.report(model).rows] == ["0", "2"]


def test_a_layer_with_a_parametrisation_may_be_left_out():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 32)), nn.Linear(32, 4))
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05)
    handle = marvin.quantize_activations(model, optimizer, exclude=["0"])
    assert handle.layers() == ["1"]
    assert handle.left["0"] == "excluded"
    handle = marvin.quantize_activations(model, optimizer, include=["0"])
    assert handle.layers() == ["0"]
