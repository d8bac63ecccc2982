"""Formats from data, for models that were trained without."""

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import marvin
from fixedpoint_kernels import FixedPoint, quantize
from marvin.calibration import _Values
from marvin.channels import ChannelFormat
from marvin.estimators import best_format
from marvin.export import describe, integer
from marvin.hooks import detach, rounders_of
from marvin.rounder import formats_of


def build():
    torch.manual_seed(0)
    first = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(6, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3))


def batches(count=3, size=16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 2, 8, 8, generator=generator) for _ in range(count)]


def inputs_of(model, name, data):
    """Return all that a layer takes."""
    found = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_pre_hook(lambda _m, x: found.append(x[0]), prepend=True)
    with torch.no_grad():
        for x in data:
            model(x)
    handle.remove()
    return torch.cat(found).reshape(-1)


@pytest.mark.parametrize("estimator", ["noise", "max", "percentile"])
@pytest.mark.parametrize("bits", [3, 8])
def test_each_estimator_does_what_it_says(estimator, bits):
    model, data = build().eval(), batches()
    fixed = marvin.calibrate(model, data, bits=bits, estimator=estimator)
    found = formats_of(fixed)
    for name in ("0", "3", "6"):
        x, fmt = inputs_of(model, name, data), found[name].inputs
        assert isinstance(fmt, FixedPoint)
        assert fmt.wl == bits
        assert fmt.signed == bool((x < 0).any())
        candidates = [FixedPoint(bits, fl, signed=fmt.signed) for fl in range(-9, 20)]
        kept = [
            bool(((x >= f.min - f.lsb / 2) & (x <= f.max + f.lsb / 2)).all()) for f in candidates
        ]
        widest = max(f.fl for f, is_kept in zip(candidates, kept, strict=True) if is_kept)
        if estimator == "max":
            assert fmt.fl == widest
        elif estimator == "percentile":
            outside = ((x > fmt.max + fmt.lsb) | (x < fmt.min - fmt.lsb)).double().mean()
            assert fmt.fl >= widest
            assert outside <= 1.01e-4
        else:
            noise = {
                f.fl: (quantize(x, f, rounding="nearest") - x).square().sum() for f in candidates
            }
            assert fmt.fl == min(noise, key=noise.__getitem__)


@pytest.mark.parametrize(("count", "clamped"), [(10, 0), (9_999, 0), (10_000, 1), (25_000, 2)])
def test_of_the_percentile_one_value_in_10_000_saturates(count, clamped):
    x = torch.full((count,), 0.4)
    x[:3] = torch.tensor([1.9, 7.0, 60.0])
    found = best_format(x, 8, "percentile")
    most = x.sort().values[-1 - clamped]
    assert found == best_format(most[None], 8, "max")


@pytest.mark.parametrize("parts", [1, 4])
def test_extremes_count_once(parts):
    torch.manual_seed(0)
    x = torch.randn(120, 100)
    x[0, 0] = 1000.0  # the one value in 10,000
    fixed = marvin.calibrate(nn.Linear(100, 4), x.chunk(parts), estimator="percentile")
    assert formats_of(fixed)[""].inputs == best_format(x.reshape(-1), 8, "percentile")
    torch.manual_seed(206)
    x = torch.randn(16, 4)
    fmt = formats_of(marvin.calibrate(nn.Linear(4, 2), x.chunk(parts), bits=3))[""].inputs
    noise = {
        fl: (quantize(x, FixedPoint(3, fl), rounding="nearest") - x).square().sum()
        for fl in range(-4, 8)
    }
    assert fmt == FixedPoint(3, min(noise, key=noise.__getitem__))


def test_what_saturates_sets_no_range():
    x = torch.full((10_000,), 0.5)
    x[:2] = torch.tensor([1000.0, -2.0])
    assert best_format(x, 8, "percentile") == FixedPoint(8, 6)  # from -2 to 127/64


def test_no_channel_of_few_weights_saturates():
    layer = nn.Conv2d(4, 4, 3, groups=4, bias=False)
    layer.weight.data.uniform_(-0.4, 0.4)[:, 0, 1, 1] = 1.9
    for per_channel in (False, True):
        fixed = marvin.calibrate(
            nn.Sequential(layer), [torch.randn(2, 4, 5, 5)], estimator="percentile", per_channel=per_channel
        )  # fmt: skip
        assert (fixed[0].weight[:, 0, 1, 1] > 1.89).all()


def test_word_lengths_may_be_integers_of_numpy():
    x = torch.randn(4, 3)
    fixed = marvin.calibrate(nn.Linear(3, 2), [x], bits=np.int64(6), weight_bits=np.int32(5))
    found = formats_of(fixed)[""]
    assert (type(found.inputs.wl), found.inputs.wl, found.weights[0].wl) == (int, 6, 5)
    again = marvin.calibrate(fixed, [x], bits=np.int64(7))
    assert type(formats_of(again)[""].inputs.wl) is int


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_copy_rounds_and_the_model_stays_as_it_is(per_channel):
    model, data = build(), batches()
    before = copy.deepcopy(model.state_dict())
    options = {"bits": 8, "weight_bits": 6, "per_channel": per_channel}
    fixed = marvin.calibrate(model, [(x, None) for x in data], **options)
    assert model.training
    assert not fixed.training
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)
    fmt = formats_of(fixed)["3"].weights[0]
    assert isinstance(fmt, ChannelFormat if per_channel else FixedPoint)
    assert fmt.wl == 6
    with torch.no_grad():
        want, got = model.eval()(data[0]), fixed(data[0])
        assert not torch.equal(got, want)
        torch.testing.assert_close(got, want, rtol=0, atol=0.25 * float(want.abs().max()))
        for other in (
            copy.deepcopy(fixed),
            pickle.loads(pickle.dumps(fixed)),
            marvin.freeze(fixed),
        ):
            torch.testing.assert_close(other(data[0]), got, rtol=0, atol=0)


def test_channels_have_the_format_that_fits_each():
    model, data = build(), batches()
    sizes = 2.0 ** -torch.tensor([0.0, 3, 1, 2])
    with torch.no_grad():
        model[3].weight.copy_(torch.sign(model[3].weight) * sizes.view(-1, 1, 1, 1))
        model[3].weight[2] = 0
    fixed = marvin.calibrate(model, data, bits=4, per_channel=True, estimator="max")
    fmt = formats_of(fixed)["3"].weights[0]
    shifts = {i: fmt.channel(i).fl for i in (0, 1, 3)}
    assert shifts == {0: 2, 1: 5, 3: 4}
    torch.testing.assert_close(fixed[3].weight, model[3].weight, rtol=0, atol=0)


def test_a_calibrated_model_is_exported_as_it_computes():
    model, data = build(), batches()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model(data[0])
    fixed = marvin.calibrate(model, data, bits=8)
    network = describe(fixed, data[0])
    assert network.origin == "trained"  # it carries its formats
    with torch.no_grad():
        want = fixed(data[1])
    gap = (integer.run(network, data[1]) - want).abs().max()
    # batch normalisation is rounded, and what SiLU takes, to 8 bits
    assert gap <= 0.05 * want.abs().max()


def trained(data, policy=None):
    """Return a model that was trained in fixed point on batches, and its optimizer."""
    model = build()
    if policy is None:
        optimizer = marvin.MSGD(model.named_parameters(), lr=0.01)
    else:
        sgd = torch.optim.SGD(model.named_parameters(), lr=0.0)
        optimizer = marvin.Quantized(sgd, policy, one_dim="float")
    marvin.quantize_activations(model, optimizer)
    for x in data:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(loss=loss)
    return model


def seen_unrounded(model, data, name):
    """Return all that a layer takes, and all it gives, where nothing is rounded."""
    free, found = copy.deepcopy(model).eval(), []
    for module in free.modules():
        detach(module)
    layer = free.get_submodule(name)
    layer.register_forward_hook(lambda _m, x, y: found.append((x[0].flatten(), y.flatten())))
    with torch.no_grad():
        for x in data:
            free(x)
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def widest(x, wl):
    """Return the fractional length of ``wl`` bits at which nothing saturates, and whether there is a sign."""
    signed = bool((x < 0).any())
    formats = [FixedPoint(wl, fl, signed=signed) for fl in range(-9, 31)]
    fits = [f.fl for f in formats if ((x >= f.min - f.lsb / 2) & (x <= f.max + f.lsb / 2)).all()]
    return max(fits), signed


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_trained_model_gets_new_ranges_and_keeps_its_weights(is_frozen):
    data = [16 * x for x in batches()]
    first = trained([x / 16 for x in data[:2]], marvin.StaticPolicy(5, 7))
    model = marvin.freeze(first) if is_frozen else first
    old, state = formats_of(model), copy.deepcopy(model.state_dict())
    before = model.eval()(data[0])
    fixed = marvin.calibrate(model, data, estimator="max")
    new = formats_of(fixed)
    for name in ("0", "3", "6"):
        assert new[name].weights == old[name].weights
        assert new[name].inputs.wl == old[name].inputs.wl
        weight = f"{name}.weight"
        torch.testing.assert_close(fixed.state_dict()[weight], state[weight], rtol=0, atol=0)
    assert new["0"].inputs.fl < old["0"].inputs.fl  # 16 times as large
    for name in ("3", "6"):  # though what is before them saturated
        fmt, (x, _) = new[name].inputs, seen_unrounded(first, data, name)
        assert (fmt.fl, fmt.signed) == widest(x, fmt.wl)
    assert formats_of(model) == old
    assert new["1"] == old["1"]
    torch.testing.assert_close(model(data[0]), before, rtol=0, atol=0)
    got = fixed(data[0])
    assert not torch.equal(got, before)
    torch.testing.assert_close(marvin.freeze(fixed)(data[0]), got, rtol=0, atol=0)
    assert torch.equal(
        integer.run(describe(fixed, data[0]), data[1]),
        integer.run(describe(marvin.freeze(fixed), data[0]), data[1]),
    )


def test_what_modules_give_is_taken_again_too_as_it_is_without_rounding():
    data = batches()
    model = trained([x / 16 for x in data]).eval()
    old = formats_of(model)
    new = formats_of(marvin.calibrate(model, data, estimator="max"))
    for name in ("0", "1", "3", "6"):
        seen = seen_unrounded(model, data, name)
        for x, fmt in zip(seen, (new[name].inputs, new[name].outputs), strict=True):
            assert (fmt.fl, fmt.signed) == widest(x, fmt.wl)
        assert new[name].weights == old[name].weights
        assert new[name].outputs.wl == old[name].outputs.wl


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (marvin.MuppetPolicy(), "must carry fixed-point formats to be calibrated"),
        (None, "must round activations to be calibrated, got formats of weights alone"),
    ],
)
def test_formats_that_have_no_range_to_take_again_are_named(policy, message):
    model = trained(batches(1), policy)
    if policy is None:
        for module in model.modules():
            for rounder in rounders_of(module):
                formats = rounder.formats(module)
                rounder.write(module, replace(formats, inputs=None, outputs=None))
    with pytest.raises(ValueError, match=message):
        marvin.calibrate(model, batches(1))


def test_long_words_are_for_what_layers_give_too():
    model, data = build().eval(), batches(1)
    short, long = (formats_of(marvin.calibrate(model, data, bits=bits)) for bits in (8, 9))
    assert {f.outputs for f in short.values()} == {None}
    assert {long[name].outputs.wl for name in ("0", "3", "6")} == {9}
    network = describe(marvin.calibrate(model, data, bits=20), data[0])
    assert max(value.bits for value in network.values.values()) <= 53


def test_values_are_those_that_came_though_they_are_changed_in_place():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            x = x + 0
            y = self.first(input=x)  # by name
            x.mul_(0)
            return self.second(y)

    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    fixed = marvin.calibrate(InPlace(), [x], bits=4)
    noise = {
        fl: (quantize(x, FixedPoint(4, fl), rounding="nearest") - x).square().sum()
        for fl in range(8)
    }
    assert formats_of(fixed)["first"].inputs.fl == min(noise, key=noise.__getitem__)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 1}, "bits must be a whole number, 2 to 32, got 1"),
        ({"bits": "8"}, "bits must be a whole number, 2 to 32, got '8'"),
        ({"weight_bits": 40}, "weight_bits must be a whole number, 2 to 32, got 40"),
        (
            {"batches": [torch.full((1, 2, 8, 8), 1e30)]},
            r"what comes to 0: .* 1e\+30, none does: scale",
        ),
        ({"estimator": "mean"}, "estimator must be one of .*got 'mean'"),
        ({"batches": []}, "must see a batch that goes through a layer"),
        ({"batches": [torch.full((1, 2, 8, 8), torch.nan)]}, "0 must see finite values"),
    ],
)
def test_what_cannot_be_calibrated_is_named(change, message):
    given = {"batches": batches(1), **change}
    with pytest.raises(ValueError, match=message):
        marvin.calibrate(build(), **given)
    with pytest.raises(TypeError, match=r"a model .* must come first"):
        marvin.calibrate(nn.Conv2d, batches(1))


@pytest.mark.parametrize(("value", "message"), [(1e30, "none does: scale"), (torch.nan, "finite")])
def test_a_weight_that_no_format_holds_is_named(value, message):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight.data[0, 0] = value
    with pytest.raises(ValueError, match=rf"1\.weight: .*{message}"):
        marvin.calibrate(net, [torch.eye(2)], bits=8)


def test_a_model_of_two_inputs_or_of_other_floats_is_named():
    class Two(nn.Module):
        def forward(self, image, facts, scale=1.0):
            return image + facts * scale

    with pytest.raises(ValueError, match=r"got forward\(image, facts\): .* image\[:, :4\]"):
        marvin.calibrate(Two(), [(torch.ones(1), torch.ones(1))])
    with pytest.raises(ValueError, match=r"0 must see float32.*got torch.float64.*model.float\(\)"):
        marvin.calibrate(build().double(), [x.double() for x in batches(1)])


def test_images_of_bytes_are_named():
    with pytest.raises(ValueError, match=r"0 must see float32.*got torch.uint8.*x.float\(\)"):
        marvin.calibrate(build(), [(x * 9).to(torch.uint8) for x in batches(1)])
    with pytest.raises(ValueError, match=r"the model must see float32.*got torch.uint8"):
        marvin.calibrate(nn.Linear(2, 2), [torch.ones(3, 2, dtype=torch.uint8)])

    class Scaling(nn.Sequential):
        def forward(self, x):
            return super().forward(x / 255)

    marvin.calibrate(Scaling(*build()), [(x * 9).to(torch.uint8) for x in batches(1)])


def test_layers_that_saw_nothing_but_zeros_are_named():
    """Their formats hold nothing: whatever comes later is clamped."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(
        UserWarning, match="saw nothing but zeros at 0: whatever else comes there"
    ) as said:
        marvin.calibrate(model, [torch.zeros(4, 3)])
    assert said[0].filename == __file__  # the line of who calibrates
    with pytest.warns(UserWarning, match="saw nothing but zeros at 0: whatever else comes there"):
        marvin.calibrate(model, [torch.randn(4, 3) * 1e-12])
    marvin.calibrate(model, [torch.zeros(4, 3), torch.randn(4, 3)])


def test_what_is_made_in_inference_mode_trains_and_loads():
    x = torch.randn(4, 3)
    with torch.inference_mode():
        fixed = marvin.calibrate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), [x])
        frozen = marvin.freeze(fixed)
    for model in (fixed, frozen):
        model.load_state_dict(fixed.state_dict())
    fixed(x).sum().backward()


def digits(count):
    """Return images whose strokes are large, with a border of small values: two columns at each side."""
    images = torch.full((count, 1, 32, 32), -0.42)
    strokes = torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(2)) < 0.2
    images[:, :, 2:30, 2:30] += 3.2 * strokes.float()
    return images


@pytest.mark.parametrize("size", [1024, 512, 64, 37])
def test_no_column_stands_for_all_whatever_the_size_of_batches(size):
    """Sizes that are powers of two: a step through the memory could meet the border alone."""
    model, images = nn.Conv2d(1, 2, 3), digits(1024)
    found = formats_of(marvin.calibrate(model, images.split(size), bits=8))[""].inputs
    fl, _ = widest(images, 8)
    formats = [FixedPoint(8, fl + finer) for finer in range(9)]
    noise = {
        f.fl: (quantize(images, f, rounding="nearest") - images).square().sum() for f in formats
    }
    assert found.fl == min(noise, key=noise.__getitem__)


@pytest.mark.parametrize(
    "shape", [(64, 4, 16, 16), (128, 1, 30, 11), (32, 1024, 256), (3, 9, 5000), (1, 1, 224, 224)]
)
def test_each_row_column_and_channel_is_looked_at_alike(shape):
    numbers = torch.arange(math.prod(shape), dtype=torch.float32)
    values = _Values("layer")
    values.add(numbers.reshape(shape))
    (kept,) = values.kept
    assert len(kept) == 2**15
    places = kept.long()
    for size in reversed(shape):
        seen = torch.bincount(places % size, minlength=size)
        places = places // size
        mean = len(kept) / size
        # a sum of independent choices, of variance no larger than its mean; none of thousands is beyond 6
        assert (seen - mean).abs().max() <= 6 * math.sqrt(mean)
    again = _Values("layer")
    again.add(numbers)
    torch.testing.assert_close(again.kept, values.kept, rtol=0, atol=0)


@pytest.mark.parametrize("size", [2**17, 2**12, 5000])
def test_each_batch_counts_alike(size):
    values, count = _Values("layer"), 2**21 // min(size, 2**15)
    for number in range(count):
        values.add(torch.full((size // 8, 8), float(number)) + torch.arange(8) / 8)
    kept = torch.cat(values.kept)
    assert 2**18 <= len(kept) <= 2**19
    seen = torch.bincount(kept.long(), minlength=count)
    assert seen.min() >= seen.max() - 1
    columns = torch.bincount((kept % 1 * 8).long(), minlength=8) / len(kept)
    assert (columns - 1 / 8).abs().max() < 0.03


class ConvNorm(nn.Conv2d):
    """A layer with its norm inside, as some packages have it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.norm = nn.BatchNorm2d(self.out_channels)

    def forward(self, x):
        return torch.relu(self.norm(super().forward(x)))


def test_layers_with_something_inside_are_calibrated():
    x = torch.randn(64, 3, 8, 8)
    model = nn.Sequential(ConvNorm(3, 8, 3), nn.Flatten(), nn.Linear(288, 4)).eval()
    fixed = marvin.calibrate(model, [x], bits=3)
    found = formats_of(fixed)
    assert found["0"].inputs.wl == found["2"].inputs.wl == 3
    assert len(fixed[0].weight.unique()) <= 8
    torch.testing.assert_close(fixed[0].bias, model[0].bias, rtol=0, atol=0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), model[0].norm, nn.ReLU(), *model[1:])
    plain[0].load_state_dict(model[0].state_dict(), strict=False)
    want = marvin.calibrate(plain, [x], bits=3)
    torch.testing.assert_close(fixed(x), want(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            parametrizations.weight_norm,
            r"a parametrisation of weight: .*remove_parametrizations\(module, 'weight'\)",
        ),
        (torch.nn.utils.spectral_norm, r"a hook that computes weight: .*prune.remove, remove_"),
    ],
    ids=["parametrisation", "hook"],
)
def test_weights_that_each_call_computes_are_named(change, message):
    model = build()
    change(model[3])
    with pytest.raises(
        ValueError, match=f"3 must have plain weights to be calibrated, got {message}"
    ):
        marvin.calibrate(model, batches(1))
    vector = nn.Sequential(nn.Linear(2, 2))
    parametrizations.weight_norm(vector[0], "bias", dim=None)
    assert formats_of(marvin.calibrate(vector, [torch.randn(4, 2)]))["0"].weights[-1]


class Own(nn.Module):
    """Two layers, and a weight beside them."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.aside = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.own_weight = nn.Parameter(torch.randn(4, 4))
        self.position, self.kernel = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.eye(4))
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x):
        x = self.first(x + self.position) @ self.own_weight @ self.w.T
        return self.second(torch.einsum("ij,jk->ik", x, self.kernel))


HOOKS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # is deprecated
@pytest.mark.parametrize("change", HOOKS.values(), ids=HOOKS)
def test_weights_that_hooks_have_computed_are_named_before_a_copy_is_made(change):
    """They are no leaves, and torch copies none of them."""
    model = build()
    change(model[3])
    model.train()(batches(1)[0])
    with pytest.raises(
        ValueError, match=r"3 must have plain weights .* a hook that computes weight"
    ):
        marvin.calibrate(model, batches(1))


def test_weights_that_stay_in_floats_are_named():
    with (
        pytest.warns(
            UserWarning, match=r"in floats own_weight, w, kernel: a module of one's own has it"
        ),
        pytest.warns(UserWarning, match=r"leaves in floats aside: no floats came there"),
    ):
        fixed = marvin.calibrate(Own(), [torch.randn(8, 4)], bits=3)
    assert len(fixed.second.weight.unique()) <= 8


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_weight_without_elements_has_no_format(per_channel):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.some, self.none = nn.Linear(4, 3), nn.Linear(4, 3)
            self.none.weight = nn.Parameter(torch.zeros(0, 4))
            self.none.bias = nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return torch.cat([self.some(x), self.none(x)], 1)

    model = Heads()
    fixed = marvin.calibrate(model, [torch.randn(8, 4)], per_channel=per_channel)
    assert formats_of(fixed)["none"].weights == (None, None)
    assert formats_of(fixed)["some"].weights[0] is not None


def test_bags_of_embeddings_round_their_weights():
    model = nn.Sequential(nn.EmbeddingBag(20, 8, mode="sum"), nn.Linear(8, 2))
    fixed = marvin.calibrate(model, [torch.randint(20, (6, 3))], bits=3)
    assert len(fixed[0].weight.unique()) <= 8


def test_channels_of_transposed_convolutions_are_those_of_their_input():
    """Formats go by the first dimension of weights, as the docstring says."""
    model = nn.ConvTranspose2d(3, 5, 2)
    with torch.no_grad():
        model.weight[:] = 2.0 ** -torch.tensor([0.0, 3, 1]).view(3, 1, 1, 1)
    fixed = marvin.calibrate(
        model, [torch.randn(4, 3, 6, 6)], bits=4, per_channel=True, estimator="max"
    )
    (fmt, _) = formats_of(fixed)[""].weights
    assert fmt.shifts == (0, 3, 1)
    torch.testing.assert_close(fixed.weight, model.weight, rtol=0, atol=0)


def test_ranges_are_of_what_is_rounded_between_hooks_of_others():
    """One is called before rounding, one behind."""
    model, data = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), [torch.rand(64, 8)]
    model[1].register_forward_pre_hook(lambda _, x: (x[0] * 64,))
    usual = marvin.calibrate(nn.Sequential(copy.deepcopy(model[0]), nn.Linear(8, 3)), data)
    before, after = (formats_of(m[1])[""].inputs for m in (usual, marvin.calibrate(model, data)))
    assert after.fl == before.fl - 6
    fixed = marvin.calibrate(model, data)
    fixed[1].register_forward_pre_hook(lambda _, x: (x[0] * 64,))
    again = marvin.calibrate(fixed, data)
    assert formats_of(again[1])[""].inputs == after


def test_outputs_are_seen_where_they_are_rounded():
    model, data = build(), batches()
    found = formats_of(marvin.calibrate(model, data, bits=12)[3])[""]
    scaled = copy.deepcopy(model)
    scaled[3].register_forward_hook(lambda _m, _x, y: y * 64)
    fixed = marvin.calibrate(scaled, data, bits=12)
    other = formats_of(fixed[3])[""]
    assert other.outputs.fl == found.outputs.fl - 6
    assert other.inputs == found.inputs
    fixed[3].register_forward_hook(lambda _m, _x, y: y * 64)  # behind
    assert formats_of(marvin.calibrate(fixed, data)[3])[""] == other
