"""A module that rounds there and back, and an optimizer whose state has few bits."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import BlockFloat, FixedPoint, Minifloat, quantize, quantize_block

FIXED, BLOCK, FLOAT = FixedPoint(6, 3), BlockFloat(5), Minifloat(4, 3, "nan")


def nearest(x, fmt):
    round_one = quantize_block if isinstance(fmt, BlockFloat) else quantize
    return x if fmt is None else round_one(x.detach(), fmt, rounding="nearest")


@pytest.mark.parametrize("back", [None, FIXED, BLOCK, FLOAT], ids=str)
@pytest.mark.parametrize("there", [None, FIXED, BLOCK, FLOAT], ids=str)
def test_values_and_gradients_are_rounded(there, back):
    quantizer = marvin.Quantizer(
        there, back, forward_rounding="nearest", backward_rounding="nearest", ste="identity"
    )
    x, gradient = torch.randn(40, requires_grad=True), torch.randn(40)
    y = quantizer(x * 1.0)
    y.backward(gradient)
    torch.testing.assert_close(y.detach(), nearest(x, there), rtol=0, atol=0)
    torch.testing.assert_close(x.grad, nearest(gradient, back), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(quantizer(x), nearest(x, there), rtol=0, atol=0)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("ste", ["clip", "identity"])
@pytest.mark.parametrize("back", [FIXED, BLOCK, FLOAT], ids=str)
def test_a_gradient_that_is_not_finite_does_not_become_finite(back, ste, value):
    x, gradient = torch.zeros(4, 5, requires_grad=True), torch.full((4, 5), 0.3)
    gradient[1, 2] = float(value)
    marvin.Quantizer(FIXED, back, ste=ste)(x).backward(gradient)
    if back == BLOCK:  # the others would be multiples of 1
        assert x.grad.isnan().all()
    else:
        assert torch.equal(x.grad.isnan(), ~gradient.isfinite())


def test_the_gradient_of_nothing_is_rounded():
    x = torch.zeros(0, 5, requires_grad=True)
    marvin.Quantizer(None, BLOCK)(x).sum().backward()
    assert x.grad.shape == (0, 5)


@pytest.mark.parametrize(("fmt", "most"), [(FIXED, 3.875), (FLOAT, 448.0)], ids=str)
def test_no_gradient_comes_back_where_a_value_saturated(fmt, most):
    x = torch.tensor([most, 2 * most, -9 * most, 0.5], requires_grad=True)
    marvin.Quantizer(fmt)(x).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_noise_is_new_in_each_call_and_in_each_quantizer_and_there_and_back():
    one, other = marvin.Quantizer(FIXED, FIXED), marvin.Quantizer(FIXED, FIXED)
    x = torch.full((400,), 0.3, requires_grad=True)
    seen = []
    for quantizer in (one, one, other):
        y = quantizer(x)
        seen += [y.detach(), *torch.autograd.grad(y, x, torch.full((400,), 0.3))]
    assert len({tuple(y.tolist()) for y in seen}) == len(seen) == 6
    one.eval()
    torch.testing.assert_close(one(x), one(x), rtol=0, atol=0)


def test_processes_have_noise_of_their_own_in_training(monkeypatch):
    found, there_and_back = [], []
    for rank in (0, 1, 4095):
        monkeypatch.setattr("marvin.quantizer.rank", lambda rank=rank: rank)
        quantizer = marvin.Quantizer(FIXED, FIXED, number=3)
        x = torch.full((500,), 0.3, requires_grad=True)
        y = quantizer(x)
        y.backward(torch.full_like(y, 0.3))
        there_and_back += [y.detach(), x.grad]
        found.append(quantizer.eval()(x).detach())
    for a, b in itertools.combinations(there_and_back, 2):
        assert not torch.equal(a, b)
    assert torch.equal(found[0], found[1])


def test_copies_have_the_noise_of_the_first_until_they_get_a_number():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.activation = nn.Sequential(nn.ReLU(), marvin.Quantizer(FIXED, FIXED))
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    copies = [m for m in encoder.modules() if isinstance(m, marvin.Quantizer)]
    x = torch.full((500,), 0.3)
    assert torch.equal(copies[0](x), copies[1](x))
    for number, own in enumerate(copies):  # as docs/migration.md has it
        own.number = number
    first, second, third = (own(x) for own in copies)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_process_may_make_any_count_of_quantizers(monkeypatch):
    monkeypatch.setattr(marvin.quantizer, "_NUMBERS", itertools.count(2**18 - 1))
    assert [marvin.Quantizer().number for _ in range(3)] == [2**18 - 1, 0, 1]


def test_a_resumed_quantizer_has_the_same_bits():
    """Into one that was built with another seed and number, and was used since."""
    model = nn.Sequential(marvin.Quantizer(FIXED, seed=3))
    x = torch.rand(300)
    model(x)
    state = copy.deepcopy(model.state_dict())
    expected = [model(x), model(x)]
    other = nn.Sequential(marvin.Quantizer(FIXED, seed=8, number=4))
    other(x)
    other.load_state_dict(state)
    torch.testing.assert_close([other(x), other(x)], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        (((8, 4),), {}, TypeError, r"got \(8, 4\): write FixedPoint\(8, 4\)"),
        ((FIXED, "float"), {}, TypeError, "got 'float'"),
        ((FIXED,), {"forward_rounding": "up"}, ValueError, "rounding must be one of"),
        ((FIXED,), {"ste": "none"}, ValueError, "ste must be one of"),
        ((FIXED,), {"number": -1}, ValueError, "number must be a whole number, 0 to"),
    ],
)
def test_what_a_quantizer_does_not_take(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        marvin.Quantizer(*arguments, **keywords)


def test_a_quantizer_shows_its_formats():
    shown = repr(marvin.Quantizer(FLOAT, backward_rounding="nearest"))
    assert shown == "Quantizer(e4m3fn, stochastic; gradient float32, nearest)"


def trained(make, gradients, **formats):
    """Return optimizer and weight after steps whose gradients do not depend on the weight."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 4, bias=False)
    optimizer = marvin.Quantized(make(layer.named_parameters()), marvin.FixedPolicy(8, 4))
    if formats:
        marvin.round_state(optimizer, **formats)
    for gradient in gradients:
        layer.weight.grad = gradient.clone()
        optimizer.step(loss=1.0)
    return optimizer, layer.weight


def sgd(params):
    return torch.optim.SGD(params, lr=0.25, momentum=0.75)


def test_masters_and_momenta_are_rounded_after_each_step():
    """By hand: move, round the master, round the momentum."""
    gradients, fmt = torch.randn(6, 4, 5), Minifloat(5, 2, "ieee")
    optimizer, weight = trained(sgd, gradients, momentum=fmt, master=FIXED, rounding="nearest")
    torch.manual_seed(0)
    master, momentum = nn.Linear(5, 4, bias=False).weight.detach(), None
    for gradient in gradients:
        momentum = gradient if momentum is None else 0.75 * momentum + gradient
        master = nearest(master - 0.25 * momentum, FIXED)
        momentum = nearest(momentum, fmt)
    own = optimizer.state[weight]["master"]
    torch.testing.assert_close(own, master, rtol=0, atol=0)
    (state,) = optimizer.optimizer.state.values()
    torch.testing.assert_close(state["momentum_buffer"], momentum, rtol=0, atol=0)


@pytest.mark.parametrize("make", [sgd, torch.optim.Adam], ids=["sgd", "adam"])
def test_stochastic_state_stays_in_its_format_and_repeats(make):
    gradients = torch.randn(5, 4, 5)
    runs = [trained(make, gradients, momentum=FLOAT, master=FIXED) for _ in range(2)]
    for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        pairs = [next(iter(o.optimizer.state.values())).get(name) for o, _ in runs]
        if pairs[0] is not None:
            torch.testing.assert_close(pairs[0], nearest(pairs[0], FLOAT), rtol=0, atol=0)
            torch.testing.assert_close(*pairs, rtol=0, atol=0)
    masters = [o.state[w]["master"] for o, w in runs]
    torch.testing.assert_close(masters[0], nearest(masters[0], FIXED), rtol=0, atol=0)
    torch.testing.assert_close(*masters, rtol=0, atol=0)
    free, weight = trained(make, gradients)
    assert not torch.equal(free.state[weight]["master"], masters[0])


def test_rounding_of_state_ends_and_is_refused():
    layer = nn.Linear(3, 2)
    optimizer = marvin.MSGD(layer.named_parameters())
    with pytest.raises(TypeError, match="got SGD"):
        marvin.round_state(torch.optim.SGD(layer.parameters(), lr=0.1), momentum=FIXED)
    with pytest.raises(TypeError, match=r"got \(8, 4\)"):
        marvin.round_state(optimizer, momentum=(8, 4))
    with pytest.raises(ValueError, match="write momentum= or master="):
        marvin.round_state(optimizer)
    compact = marvin.MSGD(nn.Linear(3, 2).named_parameters(), compact_state=True)
    with pytest.raises(ValueError, match="leave one of them out"):
        marvin.round_state(compact, master=FIXED)
    marvin.round_state(optimizer, master=FIXED).remove()
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step(loss=1.0)
    master = optimizer.state[layer.weight]["master"]
    assert not torch.equal(master, nearest(master, FIXED))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", ["trace", "export"])
@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("fmt", [FIXED, BLOCK, FLOAT], ids=str)
def test_traces_and_exports_round_as_the_model_does_in_eval_mode(fmt, has_gradient, way):
    model = nn.Sequential(nn.Linear(8, 4), marvin.Quantizer(fmt, fmt)).eval()
    model.requires_grad_(has_gradient)
    x, samples = torch.randn(16, 8), (torch.randn(16, 8),)
    if way == "trace":
        followed = torch.jit.trace(model, samples)
    else:
        followed = torch.export.export(model, samples).module()
    torch.testing.assert_close(followed(x), model(x), rtol=0, atol=0, check_stride=False)
    model.train()
    with pytest.raises(
        RuntimeError, match=r"must be in eval mode, .* write model\.eval\(\) before"
    ):
        torch.jit.trace(model, samples)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_of_onnx_rounds_as_the_model_does():
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    quantizer = marvin.Quantizer(FIXED, forward_rounding="nearest")
    model, file = nn.Sequential(nn.ReLU(), quantizer).eval(), io.BytesIO()
    torch.onnx.export(model, (torch.randn(16, 8),), file, dynamo=False)
    session, x = onnxruntime.InferenceSession(file.getvalue()), torch.randn(16, 8)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x), rtol=0, atol=0)


def test_a_fake_rounding_is_exported_for_inference():
    model, x = nn.ReLU(), torch.randn(5)
    model.forward = lambda x: marvin.fake_quantize(x, FIXED)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(3 * x), model(3 * x), rtol=0, atol=0)


@pytest.mark.parametrize("x", [[1.0], torch.ones(2, dtype=torch.float64)])
def test_a_fake_rounding_names_itself(x):
    with pytest.raises(TypeError, match=r"^fake_quantize needs a float32, .*: write "):
        marvin.fake_quantize(x, FIXED)
