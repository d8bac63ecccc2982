"""Weights of frozen models that stay laid out between calls: the same bits, and what changes is seen."""

import copy
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import marvin
from benchmarks.ops.int8_inference import frozen_model
from fixedpoint_kernels import FixedPoint, products, tokens
from fixedpoint_kernels.fused import Layer, Segment, Value, inference
from fixedpoint_kernels.fused.stamp import Stamp
from fixedpoint_kernels.products import paths
from fixedpoint_kernels.products.shapes import Window
from fixedpoint_kernels.tokens import execute, program
from marvin.integer import convert, prepack, revert
from marvin.model_formats import encode_formats
from marvin.rounder import channels_of, formats_of
from train.resnet20 import ResNet20

pytestmark = [
    pytest.mark.filterwarnings("ignore:weights must be numbers of their format"),
    pytest.mark.skipif(
        not products.path().is_own, reason="no own path of products on this processor"
    ),
    pytest.mark.usefixtures("full_memory"),
]


class Encoder(nn.Module):
    """Classes of sequences: a chain of linear layers and norms, and a layer of outputs that are no multiple of 16."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, "gelu", 1e-5, True, True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc(self.encoder(x).mean(1))


class Opaque(nn.Module):
    """Layers alone: code that cannot be traced; patches, features that are no multiple of 16."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, 24, 4, 4)
        self.fc = nn.Linear(24, 10)

    def forward(self, x):
        y = self.cut(x)
        if y.sum() > 1e30:
            return x
        return self.fc(y.mean((2, 3)))


def encoder():
    return marvin.spell_attention(Encoder())


NETWORKS = {
    "convolutions": (lambda: ResNet20(width=8), (3, 12, 12)),
    "transformer": (encoder, (6, 32)),
    "alone": (Opaque, (3, 12, 12)),
}


def batch(name, n=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *NETWORKS[name][1], generator=generator)


@pytest.fixture(params=NETWORKS)
def name(request):
    """Which network."""
    return request.param


@pytest.fixture
def pair(name):
    """A frozen model that lays out weights at each call, and a prepacked one."""
    torch.manual_seed(0)
    frozen = frozen_model(NETWORKS[name][0], batch(name))
    twin = copy.deepcopy(frozen)
    prepack(twin)
    return frozen, twin


@pytest.fixture
def packings(monkeypatch):
    """How often weights were laid out, of chains of convolutions and of others."""
    found = []
    pack, pack_tokens = inference.Program.pack, execute._pack
    monkeypatch.setattr(
        inference.Program, "pack", lambda *args: found.append(0) or pack(*args), raising=True
    )
    monkeypatch.setattr(execute, "_pack", lambda *args: found.append(1) or pack_tokens(*args))
    return found


def run(model, x):
    with torch.no_grad():
        return model(x)


def assert_same(pair, name, **kwargs):
    x = batch(name, **kwargs)
    torch.testing.assert_close(run(pair[1], x), run(pair[0], x), rtol=0, atol=0)


def weights(model):
    return [p for p in model.parameters() if p.dim() > 1]


def test_weights_are_laid_out_once(pair, name, packings):
    x = batch(name)
    ys = [run(pair[1], x)]
    first = len(packings)
    assert first
    ys += [run(pair[1], x) for _ in range(3)]
    assert len(packings) == first
    expected = run(pair[0], x)
    for y in ys:
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
    count = len(packings)
    run(pair[0], x)
    assert len(packings) > count  # whoever did not ask lays out at each call


def test_other_batches_and_numbers(pair, name):
    for seed in range(2):
        for n in (1, 2, 5, 8, 64, 3):
            assert_same(pair, name, n=n, seed=seed)


def written(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-0.5)


def loaded(model):
    state = {k: v * -0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    state = {k: v.abs() if "var" in k else v for k, v in state.items()}
    model.load_state_dict(state)


def assigned(model):
    state = {k: v * -0.5 for k, v in model.state_dict().items() if v.is_floating_point()}
    state = {k: v.abs() if "var" in k else v for k, v in state.items()}
    model.load_state_dict(state, assign=True, strict=False)


def put_in_place(model):
    for p in model.parameters():
        p.data = p.data * -0.5


def put_in_place_twice(model):
    """The second memory may have the first one's address, if nobody holds that."""
    for p in model.parameters():
        other = p.data.clone()
        p.data = torch.zeros(1)
        p.data = other * -0.5


def turned(model):
    for p in weights(model):
        if p.dim() == 2 and p.shape[0] == p.shape[1]:
            p.data = p.data.mT


def replaced(model):
    for module in model.modules():
        if getattr(module, "weight", None) is not None:
            module.weight = nn.Parameter(module.weight * -0.5, requires_grad=False)


def shifted(model):
    """Biases and batch norm's statistics alone."""
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if key.endswith(("bias", "running_mean", "running_var")):
                value.add_(0.25)


CHANGES = [
    written,
    loaded,
    assigned,
    put_in_place,
    put_in_place_twice,
    turned,
    replaced,
    shifted,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_changes_is_seen(change, pair, name):
    x = batch(name)
    before = run(pair[1], x)
    for model in pair:
        change(model)
    assert_same(pair, name)
    if change is not turned:
        assert not torch.equal(run(pair[1], x), before)


def test_inference_mode_writes_are_seen(pair, name):
    assert_same(pair, name)
    with torch.inference_mode():
        for model in pair:
            written(model)
    assert_same(pair, name)


def test_tensors_of_inference_mode_are_laid_out_at_each_call(pair, name):
    for model in pair:
        with torch.inference_mode():
            state = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
    for _ in range(2):
        with torch.inference_mode():
            x = batch(name)
            torch.testing.assert_close(pair[1](x), pair[0](x), rtol=0, atol=0)
            for model in pair:
                written(model)


def test_uncounted_writes_are_seen_when_prepacked_again(pair, name):
    assert_same(pair, name)
    for model in pair:
        for p in model.parameters():
            p.data.mul_(-0.5)
    x = batch(name)
    assert not torch.equal(run(pair[1], x), run(pair[0], x))
    prepack(pair[1])
    assert_same(pair, name)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, saved, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_prepacked_and_apart(twin_of, pair, name, packings):
    assert_same(pair, name)
    other = twin_of(pair[1])
    assert other.state_dict().keys() == pair[0].state_dict().keys()
    written(other)
    assert_same(pair, name)
    written(pair[0])
    for _ in range(2):
        assert_same((pair[0], other), name)
    count = len(packings)
    run(other, batch(name))
    assert len(packings) == count


def test_convert_and_revert_undo_it(pair, name, packings):
    for undo in (convert, revert):
        prepack(pair[1])
        assert_same(pair, name)
        undo(pair[1])
        assert not any("integer_prepacked" in vars(module) for module in pair[1].modules())
        count = len(packings)
        run(pair[1], batch(name))
        assert (len(packings) > count) is (undo is convert)


def test_layers_one_by_one_stay_so(name):
    torch.manual_seed(0)
    frozen = frozen_model(NETWORKS[name][0], batch(name))
    convert(frozen, fused=False)
    twin = copy.deepcopy(frozen)
    prepack(twin)
    assert not any("forward" in vars(module) for module in twin.modules())
    for seed in range(2):
        assert_same((frozen, twin), name, seed=seed)


def test_other_instructions_and_threads(pair, name):
    threads = torch.get_num_threads()
    own = [path for path in paths.OWN if path not in paths.unavailable()]
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for path in (*own, "float", *own):
                with products.force(path):
                    assert_same(pair, name)
    finally:
        torch.set_num_threads(threads)


def test_threads_at_once(pair, name):
    batches = [batch(name, n, seed) for seed in range(6) for n in (2, 8)]
    expected = [run(pair[0], x) for x in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = list(pool.map(lambda x: run(pair[1], x), batches))
            for y, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(y, wanted, rtol=0, atol=0)
            for model in pair:
                written(model)
            expected = [run(pair[0], x) for x in batches]


def test_exports_and_compilation(pair, name):
    x = batch(name)
    run(pair[1], x)
    program = torch.export.export(pair[1], (x,)) if name != "alone" else None
    if program is not None:
        expected = run(torch.export.export(pair[0], (x,)).module(), x)
        torch.testing.assert_close(run(program.module(), x), expected, rtol=0, atol=0)
    compiled = torch.compile(pair[1], backend="eager"), torch.compile(pair[0], backend="eager")
    torch.testing.assert_close(run(compiled[0], x), run(compiled[1], x), rtol=0, atol=0)


def test_hooks_and_formats_are_seen(pair, name):
    """What is looked at once for a frozen model is looked at again where it has changed."""
    assert_same(pair, name)
    layer = next(m for m in pair[1].modules() if isinstance(m, nn.Linear | nn.Conv2d))
    seen = []
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    assert_same(pair, name)
    assert seen == [1]
    handle.remove()
    assert_same(pair, name)
    assert seen == [1]
    before = run(pair[1], batch(name))
    for model in pair:
        for key, formats in formats_of(model).items():
            if (own := formats.inputs) is not None:
                module = model.get_submodule(key)
                coarse = replace(formats, inputs=FixedPoint(own.wl, own.fl - 3))
                numbers = encode_formats(coarse, channels_of(module))
                module.fixed_point.numpy()[:] = numbers.numpy()  # which torch does not count
    assert_same(pair, name)
    assert_same((copy.deepcopy(pair[0]), pair[1]), name)  # a copy has looked at nothing
    assert not torch.equal(run(pair[1], batch(name)), before)


def test_refusals():
    with pytest.raises(TypeError, match="prepack"):
        prepack(nn.ReLU)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got none: call marvin\.integer\.convert"):
        prepack(nn.Linear(16, 16))
    model = nn.Sequential(nn.Linear(16, 16))
    marvin.prepare(model)
    convert(model)
    with pytest.raises(ValueError, match=r"must be frozen, for training .* got layer '0'"):
        prepack(model)


def test_an_address_is_given_to_nobody_else():
    """Memory that a parameter left may be given to its next values: not while a stamp knows it."""
    array = np.zeros(16, np.float32)
    memory, parameter = weakref.ref(array), nn.Parameter(torch.from_numpy(array), False)
    del array
    stamp = Stamp([parameter])
    parameter.data = torch.zeros(16)
    assert memory() is not None
    assert not stamp.is_of([parameter])
    del stamp
    assert memory() is None


def test_another_tensor_of_one_memory_is_seen():
    """Each counts its own writes."""
    first = nn.Parameter(torch.randn(16), requires_grad=False)
    second = nn.Parameter(first.data, requires_grad=False)
    assert (first.data_ptr(), first._version) == (second.data_ptr(), second._version)
    assert Stamp([first]).is_of([first])
    assert not Stamp([first]).is_of([second])


def test_statistics_alone_are_seen():
    torch.manual_seed(0)
    frozen = frozen_model(NETWORKS["convolutions"][0], batch("convolutions"))
    twin = copy.deepcopy(frozen)
    prepack(twin)
    for statistic in ("running_mean", "running_var"):
        assert_same((frozen, twin), "convolutions")
        for model in (frozen, twin):
            getattr(model.bn, statistic).add_(0.5)
        assert_same((frozen, twin), "convolutions")


def test_a_program_that_others_ran_lays_out_again():
    """A stamp is true of what was laid out last, also where that had none, or did not come to an end."""
    layer = Layer(-1, *[FixedPoint(8, 4)] * 2, (16, 3, 3, 3), Window(), None)
    segment = Segment((layer,), (Value(0, is_output=True),))
    program = inference.Program(segment, 1, (8, 8), products.path().name, 1, 1)
    x = torch.randn(1, 3, 8, 8)
    weight = [torch.randn(16, 3, 3, 3) for _ in range(2)]
    infinite = torch.full((16,), torch.inf)
    stamp = Stamp(weight[:1])
    (expected,) = inference.run(program, x, weight[:1], [None], [()], stamp)
    for bias in (None, infinite):
        inference.run(program, x, weight[1:], [bias], [()])
        (found,) = inference.run(program, x, weight[:1], [None], [()], stamp)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Shifted(nn.Module):
    """A bias that is moved."""

    def __init__(self, by):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by), requires_grad=False)

    def forward(self, bias):
        return bias + self.by


def test_computed_biases_are_laid_out_at_each_call():
    torch.manual_seed(0)
    frozen = frozen_model(NETWORKS["convolutions"][0], batch("convolutions"))
    twin = copy.deepcopy(frozen)
    for model in (frozen, twin):
        nn.utils.parametrize.register_parametrization(model.bn, "bias", Shifted(0.25))
    prepack(twin)
    for _ in range(2):
        assert_same((frozen, twin), "convolutions")
        for model in (frozen, twin):
            model.bn.parametrizations.bias[0].by.add_(0.5)


def test_inference_lays_out_weights_one_way():
    layers = [tokens.Linear(i, *[FixedPoint(8, 4)] * 2, (32, 32)) for i in range(2)]
    segment = tokens.Segment((32,), tuple(layers), (2,))
    made = [
        program.Program(segment, 2, 1, products.path().name, 1, *needs)
        for needs in (((), ()), ((False,), (True, True)))
    ]
    assert [len(own.pack.tasks) for own in made] == [2, 2]
    assert [len(own.pack_turned.tasks) for own in made] == [0, 1]
    xs, own = [torch.randn(2, 32)], [tokens.Parameters(torch.randn(32, 32), None, (0, 0))] * 2
    (ys, _), (expected, _) = (execute.forward(each, xs, own) for each in made)
    torch.testing.assert_close(ys, expected, rtol=0, atol=0)


def test_the_report_says_what_is_prepacked(pair, name):
    frozen, twin = pair
    rows = marvin.integer.report(twin).rows
    assert any(row.is_integer for row in rows)
    assert all(row.is_prepacked is row.is_integer for row in rows)
    assert "prepacked)" in str(marvin.integer.report(twin))
    assert "prepacked" not in str(marvin.integer.report(frozen))
    assert "prepacked" not in str(convert(twin))
