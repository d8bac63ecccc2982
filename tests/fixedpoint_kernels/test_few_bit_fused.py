"""Value and code from one pass: the GPU's kernel in Triton's interpreter, and the CPU's."""

from contextlib import nullcontext

import numba
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fixedpoint_kernels import few_bit
from fixedpoint_kernels.few_bit import cpu, formulas, fused, gpu, named, operators, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [*dict.fromkeys(map(named.resolve, named.NAMES))]
PARAMETERS = [
    ("celu", (2.0,)),
    ("elu", (0.3,)),
    ("hardshrink", (0.3,)),
    ("hardtanh", (-0.3, 0.7)),
    ("leaky_relu", (0.3,)),
    ("softshrink", (1.7,)),
    ("threshold", (-2.3, 9.0)),
]
CASES = [case for case in (*CASES, *PARAMETERS) if fused.fused_of(*case)]
ON_GPU = [case for case in CASES if fused.fused_of(*case)[0] in fused.FORMULAS]
ON_CPU = [case for case in CASES if fused.fused_of(*case)[0] in fused.ON_CPU]
EXPONENTIAL = [case for case in ON_CPU if case[0] in fused.WITH_EXPONENTIAL]
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 3e38, -3e38]
ORDER = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def inputs(dtype):
    """Return values of every magnitude, of both signs, and those around each step."""
    size = torch.logspace(-30, 2, 1000)
    steps = torch.tensor([0.3, 0.5, 0.7, 1.0, 1.7, 2.3, 3.0, 6.0])
    steps = torch.cat([steps, torch.nextafter(steps, steps + 1), torch.nextafter(steps, -steps)])
    x = torch.cat([size, torch.linspace(0, 100, 1000), steps])
    return torch.cat([x, -x, torch.tensor(SPECIAL)]).to(dtype)


def value_and_planes(x, function, table):
    y = torch.empty_like(x)
    planes = torch.empty(
        -(x.numel() // -1024) * 32 * table.bits, dtype=torch.int32, device=x.device
    )
    gpu.value_and_encode(x, y, planes, table, function)
    return y, planes


def steps_between(a, b):
    """Return how many numbers of their dtype lie between two tensors, element by element."""
    order = ORDER[a.dtype]
    a, b = (t.cpu().view(order).long() for t in (a, b))
    a, b = (torch.where(t < 0, torch.iinfo(order).min - t, t) for t in (a, b))
    return (a - b).abs()


def check(name, parameters, dtype):
    table = named.table_of(name, parameters, 3, "uniform")
    x = inputs(dtype).to(DEVICE)
    if name == "gelu":
        x = x[x.abs() < 1000]  # torch's own, on a CPU, makes infinity of 3e38
    y, planes = value_and_planes(x, fused.fused_of(name, parameters), table)
    codes = torch.empty_like(planes)
    reference.encode(x, codes, table)
    assert torch.equal(planes, codes)
    expected = named.function_of(name, parameters)(x)
    assert torch.equal(y.isnan(), expected.isnan())
    is_near = (steps_between(y, expected) <= 2) | (y.cpu() == expected.cpu()) | y.isnan().cpu()
    if name == "gelu":  # 1 + erf loses digits below 0, in torch's own too: 2 units of x / 2
        error = (y.double() - F.gelu(x.double())).abs()
        is_near = (error <= torch.finfo(dtype).eps * x.double().abs() / 2).cpu() | is_near
    assert is_near.all(), x.cpu()[~is_near]


@pytest.mark.parametrize(("name", "parameters"), ON_GPU)
def test_value_and_code(name, parameters):
    check(name, parameters, torch.float32)


@pytest.mark.parametrize("name", ["gelu", "hardsigmoid", "elu", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name, dtype):
    check(*named.resolve(name), dtype)


def bit_patterns(n):
    """Return float32 of all bits at random, and some of usual size."""
    bits = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits.int().view(torch.float32), 4 * torch.randn(n), inputs(torch.float32)])


@pytest.mark.parametrize(
    ("name", "parameters"), [case for case in ON_CPU if case not in EXPONENTIAL]
)
def test_a_cpu_gives_torchs_bits(name, parameters):
    """But for the bits of NaN and the sign of Softshrink's 0, of which torch's vectors and its rest make two."""
    x, table = bit_patterns(20_000), named.table_of(name, parameters, 3, "uniform")
    key, function = operators.register(table), fused.fused_of(name, parameters)
    y, planes = operators.value_and_encode(x, key, function)
    expected = named.function_of(name, parameters)(x)
    assert torch.equal(y.isnan(), expected.isnan())
    is_value = ~y.isnan()
    if name == "softshrink":
        assert torch.equal(y == 0, expected == 0)
        is_value &= y != 0
    assert torch.equal(y.view(torch.int32)[is_value], expected.view(torch.int32)[is_value])
    codes = torch.empty_like(planes)
    reference.encode(x, codes, table)
    assert torch.equal(planes, codes)


@pytest.mark.parametrize(("name", "parameters"), EXPONENTIAL)
def test_a_cpu_gives_exponentials_to_the_last_bit(name, parameters):
    check_exponential(name, parameters)


@pytest.mark.parametrize(("name", "parameters"), EXPONENTIAL)
def test_exponentials_are_as_near_without_avx512(monkeypatch, name, parameters):
    monkeypatch.setattr(formulas, "has_avx512", lambda: False)
    monkeypatch.setattr(cpu, "_encode_serial", numba.njit(cpu._encode))  # kept nowhere
    monkeypatch.setattr(cpu, "is_parallel", lambda n: False)
    check_exponential(name, parameters)


def check_exponential(name, parameters):
    x, table = bit_patterns(20_000), named.table_of(name, parameters, 3, "uniform")
    near = torch.linspace(-110, 110, 100_000)
    x = torch.cat([x, near, -torch.logspace(-44, 2, 10_000)])
    y, planes = operators.value_and_encode(
        x, operators.register(table), fused.fused_of(name, parameters)
    )
    exact = named.function_of(name, parameters)(x.double()).float()
    assert torch.equal(y.isnan(), exact.isnan())
    is_tanh = name == "tanh"  # torch's own is one unit from exact, too
    is_near = (steps_between(y, exact) <= (1 if is_tanh else 3)) | y.isnan()
    is_near |= (x < -85) & ((y - exact).abs() < 1e-34)  # where e**-x overflows, torch's value is 0
    assert is_near.all(), x[~is_near]
    theirs = named.function_of(name, parameters)(x)
    is_near = (steps_between(y, theirs) <= (2 if is_tanh else 1)) | (y == theirs) | y.isnan()
    assert is_near.all(), x[~is_near]
    codes = torch.empty_like(planes)
    reference.encode(x, codes, table)
    assert torch.equal(planes, codes)


def test_the_cpus_threads_give_the_same():
    x, key = torch.randn(60_001), operators.register(named.table_of("hardswish", (), 3, "uniform"))
    function = fused.fused_of("hardswish", ())
    y, planes = operators.value_and_encode(x, key, function)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again, others = operators.value_and_encode(x, key, function)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, again)
    assert torch.equal(planes, others)


def test_one_pass_is_refused_where_there_is_none():
    key = operators.register(named.table_of("relu", (), 1, "uniform"))
    with pytest.raises(
        TypeError, match=r"one pass on cpu needs one of .*float32.*, got torch\.bfl"
    ):
        operators.value_and_encode(torch.ones(3).bfloat16(), key, ("hardtanh", 0.0, 1.0, 0.0))
    with pytest.raises(ValueError, match=r"one pass on cpu needs one of .*, got 'gelu'"):
        operators.value_and_encode(torch.ones(3), key, ("gelu", 0.0, 0.0, 0.0))


def test_two_units_are_seen():
    x = inputs(torch.float32)
    y = F.silu(x)[:1000]
    for n in (1, 2, 3):
        y = torch.nextafter(y, y + 1)
        assert (steps_between(y, F.silu(x)[:1000]) == n).all()


def test_which_are_left_to_torch():
    on_gpu, on_cpu = (
        {name for name in named.NAMES if named.resolve(name) not in cases}
        for cases in (ON_GPU, ON_CPU)
    )
    with_logarithm = {"gelu_tanh", "logsigmoid", "mish", "softplus", "tanhshrink"}
    assert on_gpu == {*with_logarithm, "tanh"}
    assert on_cpu == {*with_logarithm, "celu", "elu", "gelu", "selu"}
    x = torch.ones(2)
    assert not operators.is_fused(x, fused.fused_of("elu", (1.0,)))  # values on a CPU are torch's
    assert operators.is_fused(x, fused.fused_of("hardswish", ()))
    assert not operators.is_fused(x.double(), fused.fused_of("hardswish", ()))


def test_the_kernels_alone_say_what_they_do_in_one_pass(monkeypatch):
    x, hardswish, elu = (
        torch.ones(2),
        fused.fused_of("hardswish", ()),
        fused.fused_of("elu", (1.0,)),
    )
    monkeypatch.setattr(operators, "kernels_of", lambda x: gpu)
    assert operators.is_fused(x, elu)
    monkeypatch.setattr(operators, "kernels_of", lambda x: reference)  # which has none
    assert not operators.is_fused(x, hardswish)


def test_no_kernels_are_loaded_while_torch_compiles(monkeypatch):
    def kernels_of(x):
        raise AssertionError("kernels were asked for")

    monkeypatch.setattr(operators, "kernels_of", kernels_of)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.ones(2)
    assert operators.is_fused(x, fused.fused_of("hardswish", ()))
    assert not operators.is_fused(x, fused.fused_of("elu", (1.0,)))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Take the way of a CUDA tensor, with the interpreter where there is none."""
    monkeypatch.setattr(operators, "kernels_of", lambda x: gpu)
    monkeypatch.setitem(fused.ONE_PASS, DEVICE, gpu.ONE_PASS)  # what the compiler goes by


def gradient(function, x, grad):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(x)
    y.backward(grad)
    return y.detach(), x.grad


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_way_of_a_gpu():
    x, grad = torch.randn(2, 3, 5, 7, device=DEVICE), torch.randn(2, 3, 5, 7, device=DEVICE)
    table = named.table_of("silu", (), 3, "uniform")
    slope = torch.from_numpy(table(x.cpu().numpy())).to(DEVICE)
    for form in (torch.contiguous_format, torch.channels_last):
        y, found = gradient(few_bit.silu, x.to(memory_format=form), grad)
        torch.testing.assert_close(y, F.silu(x), rtol=3e-7, atol=0)  # 2 units
        assert torch.equal(found, grad * slope)
        assert y.is_contiguous(memory_format=form)
        assert found.is_contiguous(memory_format=form)
    y, found = gradient(
        few_bit.silu, x.permute(1, 0, 2, 3)[:, :, ::2], grad[:, :, ::2].transpose(0, 1)
    )
    assert torch.equal(found, (grad * slope)[:, :, ::2].transpose(0, 1))
    few_bit.gelu(torch.empty(0, 3, device=DEVICE, requires_grad=True)).sum().backward()
    ones = torch.ones(2, 2, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert few_bit.gelu(ones.clone().requires_grad_() @ ones).dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_way_of_a_gpu_compiles_and_maps():
    x, grad = torch.randn(2, 50, device=DEVICE), torch.randn(2, 50, device=DEVICE)
    module = few_bit.SiLU(bits=1)
    expected = gradient(module, x, grad)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradient(compiled, x, grad), expected, strict=True):
        assert torch.equal(a, b)

    def loss(x, grad):
        return (module(x) * grad).sum()

    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(x, grad), expected[1])
    images = torch.randn(2, 3, 4, 5, 6, device=DEVICE)
    images = images.to(memory_format=torch.channels_last_3d)
    slope = gradient(module, images, torch.ones_like(images))[1]
    found = torch.func.vmap(torch.func.grad(lambda x: module(x).sum()))(images)
    torch.testing.assert_close(found, slope, rtol=0, atol=0)


def changed_in_place(x):
    y = few_bit.silu(x)
    y += 1.0
    return y


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
@pytest.mark.parametrize("way", ["eager", "watched", "compiled"])
def test_a_value_that_lies_in_another_order_may_be_changed_in_place(way):
    """It is a view of nothing: autograd refuses such changes of views that functions return."""
    x, grad = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    expected = gradient(changed_in_place, x, grad)
    torch._dynamo.reset()
    run = torch.compile(changed_in_place, backend="aot_eager", fullgraph=True)
    with FlopCounterMode(display=False) if way == "watched" else nullcontext():
        for last in (x.to(memory_format=torch.channels_last), x.permute(1, 0, 2, 3)):
            own = grad if last.shape == grad.shape else grad.permute(1, 0, 2, 3)
            y, found = gradient(run if way == "compiled" else changed_in_place, last, own)
            back = [y, found] if own is grad else [y.transpose(0, 1), found.transpose(0, 1)]
            torch.testing.assert_close(back, [*expected], rtol=0, atol=0)
            assert y.stride() == last.stride()


def test_the_operator():
    operator = torch.ops.fixedpoint_kernels.few_bit_value_and_encode.default
    key = operators.register(named.table_of("silu", (), 1, "uniform"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "kernels_of", lambda x: gpu)
        x = torch.randn(3, 40, device=DEVICE)
        torch.library.opcheck(operator, (x, key, "silu", 0.0, 0.0, 0.0))
        y, planes = operator(x[:0, :2], key, "silu", 0.0, 0.0, 0.0)
    assert (y.shape, planes.shape) == ((0, 2), (0,))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in named.NAMES if named.resolve(n) in ON_GPU])
def test_a_gpu_runs_it(name):
    x = inputs(torch.float32).nan_to_num().cuda()
    own, parameters = named.resolve(name)
    function = named.function_of(own, parameters)
    numbers = parameters if own == "threshold" else ()  # which has no defaults
    y, slope = gradient(lambda x: getattr(few_bit, own)(x, *numbers), x, torch.ones_like(x))
    torch.testing.assert_close(y, function(x), rtol=3e-7, atol=3e-7 if name == "gelu" else 1e-37)
    assert slope.isfinite().all()
