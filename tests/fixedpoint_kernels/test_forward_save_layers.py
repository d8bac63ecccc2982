"""Each layer: torch's own values, and torch's own gradients where the map is kept whole."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import exact, maps

CONVOLUTIONS = [
    (lambda: nn.Conv2d(3, 5, 3, padding=1), (2, 3, 9, 7)),
    (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), groups=2), (2, 4, 11, 9)),
    (lambda: nn.Conv2d(3, 5, 4, padding="same", bias=False), (2, 3, 9, 7)),
    (lambda: nn.Conv2d(3, 5, (3, 2), padding="same", dilation=2), (2, 3, 9, 7)),
    (lambda: nn.Conv2d(3, 5, 3, padding="valid"), (2, 3, 9, 7)),
    (lambda: nn.Conv2d(3, 5, 3, padding=2, padding_mode="reflect"), (2, 3, 9, 7)),
    (lambda: nn.Conv2d(3, 5, 3, padding=(1, 2), padding_mode="circular"), (2, 3, 9, 7)),
    (lambda: nn.Conv2d(3, 5, 3), (3, 9, 7)),
    (lambda: nn.Conv1d(3, 5, 3, padding="same"), (2, 3, 19)),
    (lambda: nn.Conv1d(3, 5, 4, padding="same"), (3, 19)),
    (lambda: nn.Conv3d(2, 3, 3, padding=1), (2, 2, 5, 6, 7)),
    (lambda: nn.Conv3d(2, 3, 2, padding="same"), (2, 2, 5, 6, 7)),
    (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), (2, 3, 8)),
    (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 5, 6)),
    (lambda: nn.ConvTranspose2d(4, 6, 3, bias=False, dilation=2), (4, 5, 6)),
    (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (1, 2, 3, 4, 5)),
]
OTHERS = [
    (lambda: nn.Linear(7, 5), (4, 7)),
    (lambda: nn.Linear(7, 5, bias=False), (2, 3, 4, 7)),
    (lambda: nn.Linear(7, 5), (7,)),
    (lambda: nn.BatchNorm1d(6), (5, 6)),
    (lambda: nn.BatchNorm1d(6, momentum=None), (5, 6, 9)),
    (lambda: nn.BatchNorm2d(6, affine=False), (3, 6, 5, 4)),
    (lambda: nn.BatchNorm2d(6, track_running_stats=False), (3, 6, 5, 4)),
    (lambda: nn.BatchNorm3d(4, eps=1e-3), (2, 4, 3, 4, 5)),
    (lambda: nn.SyncBatchNorm(6), (3, 6, 5, 4)),  # of one process
    (lambda: nn.LayerNorm(16), (3, 5, 16)),
    (lambda: nn.LayerNorm((4, 6), bias=False), (3, 4, 6)),
    (lambda: nn.LayerNorm(16, elementwise_affine=False), (16,)),
    (lambda: nn.GroupNorm(2, 6), (3, 6, 5, 4)),
    (lambda: nn.GroupNorm(3, 6, affine=False), (3, 6)),
]
RMS = [
    (lambda: nn.RMSNorm(16), (3, 5, 16)),
    (lambda: nn.RMSNorm((4, 6), eps=1e-3), (3, 4, 6)),
    (lambda: nn.RMSNorm(16, elementwise_affine=False), (3, 5, 16)),
]
SMALL = [
    (lambda: nn.Dropout(0.3), (3, 5, 7)),
    (lambda: nn.Dropout(0.0), (3, 5, 7)),
    (lambda: nn.Dropout(1.0), (3, 5, 7)),
    (lambda: nn.MaxPool1d(3, 2, 1), (2, 3, 11)),
    (lambda: nn.MaxPool2d(2), (2, 3, 8, 7)),
    (lambda: nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), (2, 3, 8, 7)),
    (lambda: nn.MaxPool2d((3, 2), 1, dilation=(2, 3)), (3, 8, 7)),
    (lambda: nn.MaxPool3d(2, 1), (2, 3, 4, 5, 6)),
    (lambda: nn.AvgPool1d(3, 2, 1), (2, 3, 11)),
    (lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False, ceil_mode=True), (2, 3, 8, 7)),
    (lambda: nn.AvgPool2d(2, divisor_override=3), (3, 8, 7)),
    (lambda: nn.AvgPool3d(2), (2, 3, 4, 5, 6)),
    (lambda: nn.AdaptiveAvgPool1d(3), (2, 3, 11)),
    (lambda: nn.AdaptiveAvgPool2d((3, None)), (2, 3, 8, 7)),
    (lambda: nn.AdaptiveAvgPool3d(2), (2, 3, 4, 5, 6)),
    (lambda: nn.MaxPool2d(3, 1, padding=1), (2, 3, 5, 2)),  # windows are wider than the image
    (lambda: nn.MaxPool2d(3, 2, padding=1, dilation=2), (2, 3, 9, 3)),
    (lambda: nn.MaxPool3d((2, 3, 3), (1, 2, 1), (1, 1, 1)), (2, 3, 3, 4, 2)),
]


def in_both_orders(cases):
    """Add channels last to each layer, where there are four dimensions."""
    return [(*c, last) for c in cases for last in (False, True) if not last or len(c[1]) == 4]


def exact_bits(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def run(layer, x, autocast=False):
    """Return output, gradients and buffers of a layer on a copy of ``x``."""
    layer, x = copy.deepcopy(layer), x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", enabled=autocast):
        y = layer(x * 1)
    torch.manual_seed(4)
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], torch.randn_like(y))
    return y.detach(), list(gradients), dict(layer.named_buffers())


@pytest.fixture
def whole(monkeypatch):
    """Keep maps as they are, so that nothing but the layers' arithmetic is tested."""
    form = maps.Form((), (), torch.float32, 8, 2, 1, False)

    def packed(x, spatial, settings, noise, dtype):
        return maps.Packed(
            x, None, None, form._replace(shape=tuple(x.shape), dtype=dtype or x.dtype)
        )

    monkeypatch.setattr(maps, "_packed", packed)
    monkeypatch.setattr(
        maps, "unpack", lambda parts, form: parts[0].view(form.shape).to(form.dtype)
    )


def converted(layer):
    twin = copy.deepcopy(layer)
    report = forward_save.convert(twin, division={"block": 4, "bits": 2})
    assert len(report.replaced) == 1
    return twin


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("build", "shape", "is_last"), in_both_orders(CONVOLUTIONS + OTHERS))
def test_values_and_gradients_are_torchs(whole, build, shape, is_last):
    layer, x = build(), torch.randn(shape)
    if is_last:
        layer, x = (t.to(memory_format=torch.channels_last) for t in (layer, x))
    exact_bits(run(converted(layer), x), run(layer, x))


@pytest.mark.parametrize(("build", "shape"), RMS)
def test_rms_norm(whole, build, shape):
    layer, x = build(), torch.randn(shape)
    (got, gradients, _), (want, expected, _) = run(converted(layer), x), run(layer, x)
    exact_bits(got, want)
    # the same formula in another order of float32 sums of at most 24 terms
    torch.testing.assert_close(gradients, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("build", "shape", "is_last"), in_both_orders(SMALL))
def test_small_ones_are_exact(build, shape, is_last):
    layer, x = build(), torch.randn(shape).relu()  # zeros, of which the mask must know too
    if is_last:
        x = x.to(memory_format=torch.channels_last)
    exact_bits(run(converted(layer), x), run(layer, x))


@pytest.mark.parametrize(("build", "shape"), CONVOLUTIONS + OTHERS + RMS + SMALL)
def test_eval_mode_and_no_grad_are_torchs(build, shape):
    layer, x = build(), torch.randn(shape)
    twin = converted(layer)
    with torch.no_grad():
        torch.manual_seed(1)
        want = layer(x)
        torch.manual_seed(1)
        exact_bits(twin(x), want)
    layer.eval()
    twin.eval()
    exact_bits(run(twin, x), run(layer, x))
    assert forward_save.state(twin).get("count", 0) == 0


@pytest.mark.parametrize(("build", "shape"), CONVOLUTIONS + OTHERS + RMS)
def test_autocast_gives_torchs_types_and_values(whole, build, shape):
    layer, x = build(), torch.randn(shape)
    (y, got, _), (want, expected, _) = (run(m, x, autocast=True) for m in (converted(layer), layer))
    exact_bits(y, want)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)  # bfloat16 has 8 bits


@pytest.mark.parametrize(("build", "shape"), CONVOLUTIONS[:1] + OTHERS[:4] + RMS[:1])
def test_frozen_parameters(whole, build, shape):
    layer, x = build(), torch.randn(shape)
    for i, p in enumerate(layer.parameters()):
        p.requires_grad_(i > 0)
    twin = converted(layer)
    for m in (layer, twin):
        m(x.clone().requires_grad_()).sum().backward()
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None
        else:
            torch.testing.assert_close(q.grad, p.grad, rtol=2e-6, atol=2e-6)  # order of sums


def test_a_transposed_convolution_takes_an_output_size(whole):
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2)
    x = torch.randn(1, 2, 4, 4)
    twin = converted(layer)
    exact_bits(twin(x, output_size=[10, 10]), layer(x, output_size=[10, 10]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_is_torchs_at_any_rate(dtype, device):
    for p in (0.04, 0.052, 0.1, 0.15, 0.3):  # 1 / (1 - p) is rounded in several ways
        layer, x = nn.Dropout(p), torch.randn(16, 64, device=device, dtype=dtype)
        exact_bits(run(converted(layer), x), run(layer, x))


def test_dropout_of_one_kernel_is_torchs(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(exact, "_is_fused", lambda x: True)
    x, grad = torch.randn(16, 64).bfloat16().requires_grad_(), torch.randn(16, 64).bfloat16()
    found = []
    for call in (lambda: torch.native_dropout(x, 0.15, True)[0], lambda: exact.dropout(x, 0.15)):
        torch.manual_seed(0)
        y = call()
        found.append([y, *torch.autograd.grad(y, x, grad)])
    exact_bits(*found)


def test_in_place_dropout(whole):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, inplace=True))
    twin = copy.deepcopy(layer)
    forward_save.convert(twin, division=True)
    x = torch.randn(3, 4)
    exact_bits(run(twin, x), run(layer, x))


@pytest.mark.parametrize(("build", "shape"), CONVOLUTIONS + OTHERS + RMS + SMALL)
def test_the_output_may_be_written_to(whole, build, shape):
    layer, x = build(), torch.randn(shape)
    twin = converted(layer)
    values, gradients = [], []
    for m in (layer, twin):
        y = x.clone().requires_grad_()
        torch.manual_seed(1)
        values.append(m(y * 1).mul_(2).add_(1))
        gradients.append(torch.autograd.grad(values[-1].square().sum(), y)[0])
    exact_bits(values[1], values[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)  # RMSNorm's sums


@pytest.mark.parametrize(("build", "shape"), CONVOLUTIONS[:1] + OTHERS[:1] + SMALL[4:5])
def test_no_samples(build, shape):
    layer, x = build(), torch.randn((0, *shape[1:]))
    twin = converted(layer)
    for m in (layer, twin):
        m(x.clone().requires_grad_()).sum().backward()
    exact_bits([p.grad for p in twin.parameters()], [p.grad for p in layer.parameters()])


@pytest.mark.parametrize("wrap", [spectral_norm, weight_norm])
def test_a_parametrised_weight(whole, wrap):
    layer, x = wrap(nn.Linear(6, 4)), torch.randn(5, 6)
    twin = converted(layer)
    exact_bits(run(twin, x), run(layer, x))
    forward_save.revert(twin)
    assert type(twin).__bases__ == (nn.Linear,)
    remove_parametrizations(twin, "weight")
    assert type(twin) is nn.Linear


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_batch_norm_of_other_channels_is_refused_as_by_torch(name, count, training):
    """Torch's operator itself would write behind running statistics."""
    room = torch.ones(64)
    norm = nn.BatchNorm2d(8)
    forward_save.convert(model := nn.Sequential(norm), division=True)
    norm = model[0].train(training)
    own = room[:count]
    setattr(norm, name, nn.Parameter(own) if name in ("weight", "bias") else own)
    x = torch.randn(4, 8, 3, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{name} should contain 8 elements not {count}"):
        model(x)
    assert (room == 1).all()
