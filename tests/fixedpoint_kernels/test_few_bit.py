"""Activations with few-bit gradients: values, gradients, what is saved, and where they work."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fixedpoint_kernels import few_bit
from fixedpoint_kernels.few_bit import functional, fused, modules, named, operators
from fixedpoint_kernels.few_bit.activations import ENTRIES, Entry
from fixedpoint_kernels.few_bit.table import Table
from fixedpoint_kernels.forward_save import activations
from perfmodel import memory

FUNCTIONS = [name for name in named.NAMES if hasattr(functional, name)]
STEPWISE = sorted(name for name, entry in ENTRIES.items() if entry.exact)
CONTINUOUS = sorted(name for name, entry in ENTRIES.items() if not entry.exact)
MODULES = {cls.__name__.lower(): cls for cls in modules.MODULES.values()}
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NEEDED = {"threshold": (0.25, 20.0)}


def torchs(name):
    return getattr(F, name) if hasattr(F, name) else getattr(torch, name)


def ours_and_theirs(name, **options):
    arguments = NEEDED.get(name, ())
    cls = MODULES[name.replace("_", "")]
    return cls(*arguments, **options), getattr(nn, cls.__name__)(*arguments)


def gradient(function, x, grad=None):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(x)
    y.backward(torch.ones_like(y) if grad is None else grad)
    return y, x.grad


def saved_bytes(function, x):
    """Return bytes saved for backward of tensors other than ``x``, and how often ``x`` was."""
    storages, inputs = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() == x.untyped_storage().data_ptr():
            inputs.append(tensor)
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(x)
    assert y.requires_grad
    return sum(storages.values()), len(inputs)


def test_every_reader_knows_the_table():
    kinds = {entry.kind.__name__ for entry in ENTRIES.values()}
    assert len(ENTRIES) == len(kinds) == 21
    assert set(FUNCTIONS) == set(ENTRIES) == set(named.NAMES) - {"gelu_tanh", "swish"}
    assert {name for name in kinds if getattr(modules, name) in MODULES.values()} == kinds
    assert set(few_bit.__all__) - {"NAMES", "Activation", "Table", "solve"} == {*ENTRIES, *kinds}
    assert {kind.__name__ for kind in (*activations.SMOOTH, *activations.STEPWISE)} == kinds
    assert set(ENTRIES) <= activations.CALLS
    for name, kind in ((name, entry.kind) for name, entry in ENTRIES.items()):
        assert memory.kind_of(name) == memory.kind_of(name + "_") == "activation"
        saver = memory.Saver("", "activation", name, kind.__name__)
        codes = memory.few_bit(4)(memory.SavedStorage(4096, (1024,), 4, (saver,)))
        assert codes == (128 if name in STEPWISE else 512)
        assert isinstance(getattr(few_bit, kind.__name__)(*NEEDED.get(name, ())), kind)


class Wave(nn.Module):
    """A made-up activation."""

    def __init__(self, size: float = 1.0):
        super().__init__()
        self.size = size


@pytest.fixture
def wave(monkeypatch):
    entry = Entry("wave", Wave, lambda x, size: size * torch.sin(x))
    monkeypatch.setitem(ENTRIES, "wave", entry)
    return entry


def test_one_entry_makes_an_activation(wave):
    function, module = functional.make(wave), modules.make(wave)
    assert str(inspect.signature(module)).startswith("(size: float = 1.0, *, bits: int = 3, ")
    assert isinstance(module(2.0), Wave)
    assert few_bit.solve("wave", 2).bits == 2
    x = torch.randn(1000)
    for ours in (module(2.0, bits=8), lambda x: function(x, 2.0, bits=8)):
        y, slope = gradient(ours, x)
        torch.testing.assert_close(y.detach(), 2 * torch.sin(x), rtol=0, atol=0)
        torch.testing.assert_close(slope, 2 * torch.cos(x), rtol=0, atol=0.02)  # 256 levels, 4 wide


@pytest.mark.parametrize(
    "call",
    [
        lambda: few_bit.elu(torch.ones(2), 1.0, False, 3),
        lambda: few_bit.elu(torch.ones(2), 1.0, alpha=1.0),
        lambda: few_bit.elu(torch.ones(2), beta=1.0),
        lambda: few_bit.relu(torch.ones(2), slope=1.0),
        lambda: few_bit.threshold(torch.ones(2)),
        lambda: few_bit.threshold(torch.ones(2), 1.0),
        lambda: few_bit.Threshold(1.0),
        lambda: few_bit.GELU("none", 3),
    ],
)
def test_arguments_that_torch_does_not_take(call):
    with pytest.raises(TypeError):
        call()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_torchs(name, dtype):
    ours, theirs = ours_and_theirs(name)
    x = (4 * torch.randn(3, 500)).to(dtype)
    for needs_gradient in (False, True):
        y = ours(x.clone().requires_grad_(needs_gradient))
        assert y.requires_grad == needs_gradient
        # torch rounds the last elements of each thread in another way: one unit, of tanh two
        is_near = needs_gradient and name in fused.WITH_EXPONENTIAL and dtype is torch.float32
        rtol = 2 ** (-22 if name == "tanh" else -23) if is_near else 0
        torch.testing.assert_close(y.detach(), theirs(x), rtol=rtol, atol=0)


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_gradients_are_the_tables(name, bits):
    x, grad = 4 * torch.randn(1500), torch.randn(1500)
    ours, theirs = ours_and_theirs(name, bits=bits)
    table = named.table_of(name, named.resolve(name)[1], bits, "uniform")
    expected = grad * torch.from_numpy(table(x.numpy()))
    found = gradient(ours, x, grad)[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    exact = gradient(theirs, x, grad)[1]
    error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < {1: 0.6, 3: 0.12, 8: 0.005}[bits]  # of N(0, 4**2); halves with each bit


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", STEPWISE)
def test_stepwise_gradients_are_torchs(name, dtype):
    edges = torch.tensor([0.0, 0.25, 0.5, 1.0, 3.0, 6.0])
    edges = torch.cat([edges, -edges]).to(dtype)
    beside = [edges, torch.nextafter(edges, edges + 1), torch.nextafter(edges, edges - 1)]
    x = torch.cat([*beside, (4 * torch.randn(1000)).to(dtype)])
    if dtype is torch.float64:
        x = x[x == x.float()]  # borders are float32
    grad = torch.randn(len(x)).to(dtype)
    ours, theirs = ours_and_theirs(name)
    found, exact = (gradient(f, x, grad)[1] for f in (ours, theirs))
    # LeakyReLU and Hardsigmoid multiply in another precision: half a unit of the dtype
    tolerance = {"rtol": torch.finfo(torch.float32).eps, "atol": 0}
    if dtype in (torch.bfloat16, torch.float16):
        tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-7}
    torch.testing.assert_close(found, exact, **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lambd", [0.1, 0.3, 0.7, 1.2, 2.3, 1e-6, 1e-40, 0.0])
@pytest.mark.parametrize("name", ["hardshrink", "softshrink"])
def test_shrinking_compares_in_the_dtype(name, lambd, dtype):
    edge = torch.tensor(lambd).to(dtype)
    beside = [edge, torch.nextafter(edge, edge + 1), torch.nextafter(edge, edge - 1)]
    x = torch.cat([torch.stack(beside), -torch.stack(beside), torch.randn(1500).to(dtype)])
    functions = getattr(few_bit, name), getattr(F, name)
    ours, theirs = (gradient(lambda x, f=f: f(x, lambd), x) for f in functions)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (few_bit.LeakyReLU(0.3), nn.LeakyReLU(0.3)),
        (few_bit.Hardtanh(-0.3, 0.7), nn.Hardtanh(-0.3, 0.7)),
        (few_bit.Hardshrink(0.3), nn.Hardshrink(0.3)),
        (few_bit.Softshrink(1.7), nn.Softshrink(1.7)),
        (few_bit.Threshold(-2.3, 9.0), nn.Threshold(-2.3, 9.0)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_parameters_of_stepwise_activations(ours, theirs):
    x, grad = 4 * torch.randn(1500), torch.randn(1500)
    for a, b in zip(gradient(ours, x, grad), gradient(theirs, x, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (few_bit.GELU("tanh", bits=6), nn.GELU("tanh")),
        (few_bit.ELU(0.4, bits=6), nn.ELU(0.4)),
        (few_bit.CELU(2.0, bits=6), nn.CELU(2.0)),
        (few_bit.Softplus(2.0, 10.0, bits=6), nn.Softplus(2.0, 10.0)),
        (few_bit.Activation(torch.sin, 6), torch.sin),
    ],
    ids=["gelu", "elu", "celu", "softplus", "any"],
)
def test_parameters_of_continuous_activations(ours, theirs):
    x = 2 * torch.randn(1500)
    (y, found), (value, exact) = gradient(ours, x), gradient(theirs, x)
    assert torch.equal(y, value)
    torch.testing.assert_close(found, exact, rtol=0, atol=0.06)  # 64 levels over a range of 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_torchs(name):
    for ours, theirs in (
        (getattr(few_bit, name), torchs(name)),
        (MODULES[name.replace("_", "")], getattr(nn, MODULES[name.replace("_", "")].__name__)),
    ):
        try:
            expected = list(inspect.signature(theirs).parameters.values())
        except ValueError:
            continue  # built in: nothing to compare with
        found = list(inspect.signature(ours).parameters.values())
        expected = [p for p in expected if p.name not in ("args", "kwargs")]
        expected = [p for p in expected if p.name not in ("min_value", "max_value")]  # deprecated
        assert [p.name for p in found[: len(expected)]] == [p.name for p in expected]
        assert [p.default for p in found[: len(expected)]] == [p.default for p in expected]
        assert [p.name for p in found[len(expected) :]] == ["bits", "weight"]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_what_is_saved(name, bits):
    for n in (1, 1024, 5000):
        x = torch.randn(n, requires_grad=True)
        size, inputs = saved_bytes(ours_and_theirs(name, bits=bits)[0], x)
        assert inputs == 0
        assert 0 < size <= -(-n // 1024) * 128 * bits
        if name in STEPWISE:
            assert size == -(-n // 1024) * 128


def test_nothing_is_saved_without_gradients():
    x = torch.randn(100)
    assert few_bit.gelu(x).grad_fn is None
    with torch.no_grad():
        assert few_bit.gelu(x.requires_grad_()).grad_fn is None


def test_strides_and_empty_tensors():
    x = torch.randn(2, 3, 5, 7)
    grad = torch.randn(2, 3, 5, 7)
    expected = gradient(few_bit.silu, x, grad)[1]
    for strided in (x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2)):
        order = (
            [strided.shape.index(s) for s in x.shape] if strided.shape != x.shape else [*range(4)]
        )
        given = strided.detach().requires_grad_()
        few_bit.silu(given).permute(order).backward(grad)
        assert torch.equal(given.grad.permute(order), expected)
        assert given.grad.stride() == strided.stride()
    wide = torch.randn(4, 10)
    sliced = wide[:, ::2].detach().requires_grad_()
    few_bit.gelu(sliced).sum().backward()  # a gradient of stride 0
    assert torch.equal(sliced.grad, gradient(few_bit.gelu, wide[:, ::2].contiguous())[1])
    expanded = torch.randn(3, 1).expand(3, 4).detach().requires_grad_()
    few_bit.gelu(expanded).sum().backward()
    empty = torch.empty(0, 3, requires_grad=True)
    few_bit.gelu(empty).sum().backward()
    assert empty.grad.shape == (0, 3)
    scalar = torch.tensor(1.0, requires_grad=True)
    few_bit.relu(scalar).backward()
    assert scalar.grad == 1


def test_nan_and_infinities():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")])
    y, grad = gradient(few_bit.gelu, x)
    assert y[0].isnan()
    table = named.table_of("gelu", ("none",), 3, "uniform")
    assert grad.tolist() == table(x.numpy()).tolist()
    assert grad[0] == table(np.float32(-20))  # documented: the code of the first piece


def test_autocast():
    layer, x = nn.Linear(6, 6), torch.randn(4, 6)
    gradients = []
    for gelu in (few_bit.gelu, F.gelu):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            z = layer(x)
            z.retain_grad()
            y = gelu(z)
        assert y.dtype is torch.bfloat16
        assert torch.equal(y, F.gelu(z))
        y.sum().backward()
        assert layer.weight.grad.dtype is torch.float32
        gradients.append(z.grad)
    leaf = z.detach().requires_grad_()
    few_bit.gelu(leaf).sum().backward()  # of a table: few values, and not torch's
    assert torch.equal(gradients[0], leaf.grad)
    assert not torch.equal(*gradients)
    assert len(gradients[0].unique()) <= 8


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    model = nn.Sequential(nn.Linear(5, 5), few_bit.GELU(), nn.Linear(5, 5), few_bit.ReLU())
    x = torch.randn(7, 5, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
@pytest.mark.parametrize("name", ["gelu", "relu", "softplus", "hardtanh", "softshrink"])
def test_compile_has_no_graph_breaks(name):
    module, x = ours_and_theirs(name)[0], torch.randn(40, 50)
    if name == "softshrink":
        x = x.bfloat16()
    expected = gradient(module, x)
    torch._dynamo.reset()
    for function in (module, getattr(few_bit, name)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for a, b in zip(gradient(compiled, x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    # which makes symbols of parameters
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for a, b in zip(gradient(compiled, images), gradient(module, images), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
def test_compiled_activations_have_the_parameters_of_now():
    x = torch.randn(40, 50)
    torch._dynamo.reset()
    module = few_bit.LeakyReLU(0.3)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for module.negative_slope in (0.3, 0.2, 0.1):
        for a, b in zip(gradient(compiled, x), gradient(module, x), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    def function(x, slope, bits, weight):
        return few_bit.elu(x, slope, bits=bits, weight=weight)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for given in ((1.0, 2, "uniform"), (0.5, 3, "uniform"), (0.25, 3, "normal")):
        got = gradient(lambda x, given=given: compiled(x, *given), x)
        want = gradient(lambda x, given=given: function(x, *given), x)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_func_transforms():
    x = torch.randn(4, 30)

    def loss(x):
        return few_bit.gelu(x).square().sum()

    expected = gradient(lambda x: few_bit.gelu(x).square(), x)[1]
    assert torch.equal(torch.func.grad(loss)(x), expected)
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(x), expected)
    assert torch.equal(torch.func.vmap(few_bit.gelu, in_dims=1, out_dims=1)(x), F.gelu(x))
    value, slope = torch.func.jvp(few_bit.gelu, (x,), (torch.ones_like(x),))
    assert torch.equal(value, F.gelu(x))
    torch.testing.assert_close(slope, gradient(F.gelu, x)[1])  # forward mode keeps nothing: exact
    with forward_ad.dual_level():  # of parameters' dependents, too
        dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
        assert torch.equal(forward_ad.unpack_dual(few_bit.gelu(dual)).tangent, slope)


def test_second_derivatives():
    x = torch.randn(20, requires_grad=True)
    (grad,) = torch.autograd.grad(few_bit.gelu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(few_bit.gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        (x.sum() + grad.sum()).backward()  # nobody may take it for 0
    (grad,) = torch.autograd.grad(few_bit.relu(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, 2.0 * (x > 0))


def test_second_derivatives_by_what_the_input_was_made_of():
    """Nobody asks by the input itself: torch would leave out its way, and give 0."""
    x, hessian = torch.ones(3, requires_grad=True), torch.autograd.functional.hessian
    (grad,) = torch.autograd.grad(few_bit.gelu(3 * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(grad.sum(), x, allow_unused=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        hessian(lambda x: few_bit.gelu(x).sum(), torch.ones(3))
    exact = hessian(lambda x: few_bit.relu(x).square().sum(), torch.ones(3))
    assert torch.equal(exact, 2 * torch.eye(3))


@pytest.mark.parametrize("outer", [torch.func.grad, torch.func.jacrev])
@pytest.mark.parametrize("inner", [torch.func.grad, torch.func.jacrev])
def test_second_derivatives_of_torch_func(outer, inner):
    x = torch.randn(4)

    def twice(activation, y):
        return outer(lambda x: inner(lambda x: activation(x).square().sum())(x).sum())(y)

    with pytest.raises(RuntimeError, match="has no second derivative"):
        outer(lambda x: inner(lambda x: few_bit.gelu(x).sum())(x).sum())(x)  # not 0
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.func.vmap(lambda y: twice(few_bit.gelu, y))(x[None])
    assert torch.equal(twice(few_bit.relu, x), 2.0 * (x > 0))
    other = torch.randn(4)  # by which nothing is differentiated twice

    def once(z):
        return inner(lambda x: few_bit.gelu(x).sum())(other).sum() + z.sum()

    assert torch.equal(outer(once)(x), torch.ones(4))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("name", ["relu", "hardtanh", "leaky_relu"])
def test_forward_mode_over_reverse_mode(name, is_last):
    x = torch.randn(2, 3, 2, 2)
    if is_last:
        x = x.to(memory_format=torch.channels_last)
    found = []
    for activation in (getattr(few_bit, name), getattr(F, name)):
        gradient = torch.func.grad(lambda x, activation=activation: activation(x).pow(3).sum())
        product = torch.func.jvp(gradient, (x,), (torch.ones_like(x),))[1]
        third = torch.func.jvp(torch.func.grad(lambda x, g=gradient: g(x).sum()), (x,), (x,))[1]
        found.append([product, third, torch.func.jacfwd(gradient)(x)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.func.hessian(lambda x: few_bit.gelu(x).sum())(x)
    _, pull = torch.func.vjp(few_bit.gelu, x)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.func.jvp(pull, (x,), (x,))


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_gradients_of_many_at_once(name):
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    y, many = getattr(few_bit, name)(x), torch.randn(3, 2, 3, 4, 5)
    want = [torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in many]
    (got,) = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    assert torch.equal(got, torch.stack(want))
    with pytest.raises(RuntimeError, match=r"create_graph=True.*: ask for one gradient after the"):
        torch.autograd.grad(
            y, x, many, is_grads_batched=True, create_graph=True
        )  # it would be lost
    hessian = torch.autograd.functional.hessian
    exact = hessian(lambda x: few_bit.relu(x).square().sum(), torch.ones(3), vectorize=True)
    assert torch.equal(exact, 2 * torch.eye(3))


def test_modules_are_torchs_and_survive_copies():
    module = few_bit.GELU("tanh", bits=2, weight="normal")
    assert isinstance(module, nn.GELU)
    assert "approximate='tanh', bits=2, weight='normal'" in repr(module)
    assert module.state_dict() == {}
    x = torch.randn(100)
    for original in (module, few_bit.Activation(torch.sin, 2)):
        for again in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
            assert torch.equal(gradient(again, x)[1], gradient(original, x)[1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: few_bit.GELU(bits=9), ValueError, "bits must be 1 to 8, got bits=9"),
        (lambda: few_bit.GELU(3), ValueError, "approximate must be .* got 3: .* bits=3"),
        (lambda: few_bit.gelu(torch.ones(2), bits=True), TypeError, "an integer, got True"),
        (lambda: few_bit.gelu(torch.arange(3)), TypeError, "floating tensor, got torch.int64"),
        (lambda: few_bit.gelu(torch.ones(2).numpy()), TypeError, "a tensor, got ndarray: write"),
        (lambda: few_bit.Activation("gelu"), TypeError, "one of a tensor, .* got 'gelu'"),
        (lambda: few_bit.ReLU(True), ValueError, "out of place, got inplace=True"),
        (lambda: few_bit.silu(torch.ones(2), inplace=True), ValueError, "out of place"),
        (lambda: few_bit.Activation(nn.PReLU()), ValueError, "no parameters.*got PReLU"),
        (
            lambda: few_bit.sigmoid(torch.ones(2, dtype=torch.complex64, requires_grad=True)),
            TypeError,
            r"floating tensor, got torch\.complex64",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_true_is_no_number_of_bits():
    few_bit.gelu(torch.ones(2), bits=1)  # which equals it, and is remembered
    with pytest.raises(TypeError, match="an integer, got True"):
        few_bit.gelu(torch.ones(2), bits=True)


@pytest.mark.parametrize(
    "change",
    [
        {"borders": np.zeros(3)},
        {"borders": np.zeros(4, np.float32)},
        {"codes": np.array([0, 1, 2, 4], np.uint8)},
        {"codes": np.array([0, 1, 2, 3])},
        {"levels": np.zeros(3, np.float32)},
        {"levels": np.zeros((2, 2), np.float32)},
        {"levels": np.zeros(1, np.float32)},
        {"levels": np.zeros(512, np.float32)},
    ],
)
def test_tables_whose_arrays_do_not_fit_together_are_refused(change):
    """Kernels read levels by code, and borders by position."""
    borders, codes = np.array([-1, 0, 1], np.float32), np.array([0, 1, 2, 3], np.uint8)
    own = {"borders": borders, "codes": codes, "levels": np.arange(4, dtype=np.float32)}
    operators.register(Table(**own, loss=0.5))
    with pytest.raises(ValueError, match="a table must have float32 borders"):
        operators.register(Table(**(own | change), loss=0.5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["GELU", "Tanh", "ReLU"])
def test_a_trace_in_training_mode_has_the_function_itself(name):
    model = nn.Sequential(nn.Linear(8, 4), getattr(few_bit, name)())
    x = torch.randn(6, 8)
    traced = torch.jit.trace(model, torch.randn(6, 8))
    torch.testing.assert_close(traced(x), getattr(nn, name)()(model[0](x)), rtol=0, atol=0)
