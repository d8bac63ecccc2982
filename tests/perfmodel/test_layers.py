import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import marvin
import perfmodel
from fixedpoint_kernels import few_bit, forward_save
from perfmodel.__main__ import main
from perfmodel.cost import ebops
from perfmodel.layers import total_madds
from perfmodel.memory import saved_bytes
from perfmodel.model_report import _layers
from perfmodel.trace import Trace
from perfmodel.zoo import MODELS
from train.alexnet import alexnet
from train.resnet20 import resnet20

SMALL = [name for name in MODELS if not name.endswith(("101", "152", "161", "169", "201", "B7"))]


def zoo(name):
    entry = MODELS[name]
    with torch.device("meta"):
        return entry, entry.build(entry.activation)


def count(model, *shape, **options):
    return perfmodel.layers(model, shape, **options)


class Call(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize("name", SMALL)
def test_counts_are_those_of_torch(name):
    entry, model = zoo(name)
    dtype = torch.int64 if entry.is_tokens else torch.float32
    found = count(model, *entry.input_shape, dtype=dtype)
    counter = FlopCounterMode(display=False)
    with counter:
        model.eval()(torch.empty((1, *entry.input_shape), dtype=dtype, device="meta"))
    assert 2 * total_madds(found) == counter.get_total_flops()
    assert total_madds(found) > 10**8


@pytest.mark.parametrize(
    ("name", "madds", "parameters"),
    [  # as published with the architectures
        ("ResNet-18", 1.81e9, 11_689_512),
        ("ResNet-50", 4.09e9, 25_557_032),
        ("VGG-16", 15.47e9, 138_357_544),
        ("MobileNetV2", 0.30e9, 3_504_872),
        ("DenseNet-121", 2.83e9, 7_978_856),
        ("EfficientNet-B0", 0.386e9, 5_288_548),
    ],
)
def test_the_zoo_has_the_published_sizes(name, madds, parameters):
    entry, model = zoo(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert total_madds(count(model, *entry.input_shape)) == pytest.approx(madds, rel=0.01)


@pytest.mark.parametrize(
    ("build", "madds", "elements"),
    [(alexnet, 14_957_056, 2_471_104), (resnet20, 40_813_184, 270_896)],
)
def test_the_models_of_the_paper(build, madds, elements):
    found = count(build(), 3, 32, 32)
    assert total_madds(found) == madds
    assert sum(row.elements for row in found) == elements
    named = [name for name, p in build().named_parameters() if p.ndim >= 2]
    assert sorted(row.weight for row in found) == sorted(named)


@pytest.mark.parametrize(
    ("layer", "shape", "kind", "madds", "output"),
    [
        (nn.Linear(3, 4), (3,), "linear", 12, (4,)),
        (nn.Linear(3, 4, bias=False), (5, 3), "linear", 60, (5, 4)),
        (nn.Conv1d(4, 6, 3, groups=2), (4, 10), "conv1d", 6 * 8 * 2 * 3, (6, 8)),
        (nn.Conv2d(4, 4, 3, groups=4), (4, 6, 6), "conv2d", 4 * 16 * 9, (4, 4, 4)),
        (nn.Conv3d(2, 3, 2, stride=2), (2, 4, 4, 4), "conv3d", 3 * 8 * 2 * 8, (3, 2, 2, 2)),
        (nn.ConvTranspose1d(4, 6, 2, groups=2), (4, 5), "conv_transpose1d", 4 * 5 * 6, (6, 6)),
        (nn.ConvTranspose2d(4, 3, 2), (4, 5, 5), "conv_transpose2d", 4 * 25 * 12, (3, 6, 6)),
        (nn.ConvTranspose3d(2, 3, 2), (2, 2, 2, 2), "conv_transpose3d", 2 * 8 * 24, (3, 3, 3, 3)),
    ],
)
def test_layers(layer, shape, kind, madds, output):
    (row,) = count(nn.Sequential(layer), *shape)
    parameters = sum(p.numel() for p in layer.parameters())
    got = row.name, row.kind, row.madds, row.parameters, row.input_shape, row.output_shape
    assert got == ("0", kind, madds, parameters, shape, output)
    assert (row.weight, row.elements) == ("0.weight", layer.weight.numel())


class Tied(nn.Module):
    """A second layer with the first one's weight."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("first", "second", "shape", "parameters"),
    [
        (nn.Embedding(100, 8), nn.Linear(8, 100, bias=False), (6,), (800, 800)),
        (nn.Linear(8, 8), nn.Linear(8, 8), (8,), (72, 72)),
        (nn.Linear(8, 8, bias=False), nn.Linear(8, 8), (8,), (64, 72)),
        (nn.Linear(8, 8), nn.Linear(8, 8, bias=False), (8,), (72, 64)),
    ],
)
def test_tied_weights_are_counted_once_in_all_and_each_layer_has_its_own_bias(
    first, second, shape, parameters
):
    model = Tied(first, second)
    kind = torch.int64 if isinstance(first, nn.Embedding) else None
    found = count(model, *shape, dtype=kind)
    assert tuple(row.parameters for row in found) == parameters
    assert {row.weight for row in found} == {"first.weight"}
    assert f"  {sum(p.numel() for p in model.parameters()):,}" in _layers(found).splitlines()[-1]


def test_embedding_is_listed_as_zero():
    (row,) = count(nn.Embedding(10, 4), 7, dtype=torch.int64)
    assert (row.kind, row.madds, row.parameters) == ("embedding", 0, 40)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_multihead_attention(need_weights, mode):
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    getattr(attention, mode)()
    model = Wrapped(attention, need_weights)
    found = count(model, 5, 8)
    assert {row.kind: row.madds for row in found if row.kind == "attention"} == {
        "attention": 2 * 5 * 5 * 8
    }
    assert [row.madds for row in found if row.kind == "linear"] == [5 * 8 * 24, 5 * 8 * 8]


class Wrapped(nn.Module):
    def __init__(self, attention, need_weights):
        super().__init__()
        self.attention, self.need_weights = attention, need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


@pytest.mark.parametrize(
    ("function", "madds", "kind"),
    [
        (lambda x: x @ x.mT, 5 * 5 * 8, "matmul"),
        (lambda x: torch.bmm(x, x.mT), 5 * 5 * 8, "matmul"),
        (lambda x: torch.einsum("bik,bjk->bij", x, x), 5 * 5 * 8, "matmul"),
        (lambda x: F.linear(x, x[0]), 5 * 5 * 8, "matmul"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), 2 * 5 * 5 * 8, "attention"),
        (lambda x: F.conv1d(x, x), 5 * 8, "conv1d"),
        (lambda x: torch.baddbmm(x @ x.mT, x, x.mT), 2 * 5 * 5 * 8, "matmul"),
    ],
)
def test_functional_products(function, madds, kind):
    found = count(Call(function), 5, 8)
    assert total_madds(found) == madds
    assert {row.kind for row in found} == {kind}
    assert {row.weight for row in found} == {""}


def test_a_recurrent_layer_counts_every_step():
    found = count(nn.LSTM(3, 4, batch_first=True), 7, 3)
    assert {row.weight: row.madds for row in found} == {
        "weight_ih_l0": 7 * 3 * 16,
        "weight_hh_l0": 7 * 4 * 16,
    }


def test_tied_weights_have_one_name_and_count_twice():
    linear = nn.Linear(4, 4)
    found = count(nn.Sequential(linear, nn.ReLU(), nn.Sequential(linear)), 4)
    assert [(r.weight, r.madds) for r in found] == [("0.weight", 32)]


def test_weights_that_are_computed_keep_their_name():
    model = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    found = count(model, 3, 8, 8)
    assert [r.weight for r in found if r.madds] == ["parametrizations.weight.original1"]
    with torch.autocast("cpu", torch.bfloat16):
        (row,) = count(nn.Linear(3, 4), 3)
    assert (row.kind, row.weight) == ("linear", "weight")


class Masked(nn.Linear):
    """A layer whose weight is changed by tensors that do not depend on the input."""

    def __init__(self, change):
        super().__init__(4, 5)
        self.register_buffer("mask", torch.ones(5, 4))
        self.change = change

    def forward(self, x):
        return F.linear(x, self.change(self.weight, self.mask), self.bias)


def pruned():
    layer = nn.Linear(4, 5)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (pruned, "weight_orig"),
        (lambda: Masked(lambda weight, mask: weight * mask), "weight"),
        (lambda: Masked(lambda weight, _: weight * torch.tensor(2.0)), "weight"),
        (lambda: Masked(lambda weight, mask: weight.data.mul_(mask)), "weight"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 5)), "weight_orig"),
        (
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
            "parametrizations.weight.original",
        ),
    ],
    ids=["prune", "mask", "constant", "in place", "spectral", "parametrized"],
)
def test_a_weight_and_constants_are_that_weight(build, name, mode):
    (row,) = count(getattr(build(), mode)(), 4)
    assert (row.kind, row.weight, row.madds) == ("linear", name, 20)


def test_a_masked_weight_has_the_bits_of_its_format():
    found = count(Masked(lambda weight, mask: weight * mask), 4)
    trace = Trace([marvin.Switch(1, "weight", 4, input_wl=6)], 10, 32, searches=False)
    assert ebops(trace, found) == 20 * 3 * 5


def test_what_was_written_into_a_constant_is_an_activation():
    def gate(x):
        scale = torch.zeros(4, 4, device=x.device)
        scale.copy_(x.expand(4, 4))
        return F.linear(x, scale)

    assert [(row.kind, row.weight) for row in count(Call(gate), 4)] == [("matmul", "")]


def test_a_product_of_constants_with_a_weight_counts():
    class Table(nn.Linear):
        def forward(self, x):
            return x + super().forward(torch.ones(1, 4, device=x.device)).sum()

    (row,) = count(Table(4, 5), 4)
    assert (row.kind, row.weight, row.madds) == ("linear", "weight", 20)


class Queries(nn.Module):
    """Attention with learned queries."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 8))
        self.wq, self.wk, self.wv = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.wq(self.queries), self.wk(x), self.wv(x))


def test_learned_queries_behind_a_layer_are_activations():
    assert [(r.kind, r.weight, r.madds) for r in count(Queries(), 7, 8)] == [
        ("linear", "wq.weight", 3 * 64),
        ("linear", "wk.weight", 7 * 64),
        ("linear", "wv.weight", 7 * 64),
        ("attention", "", 2 * 3 * 7 * 8),
        ("elementwise", "queries", 0),
    ]


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_decoder_of_learned_queries(need_weights):
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Embedding(3, 8)
            self.norm = nn.LayerNorm(8)
            self.own, self.cross = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

        def forward(self, x):
            q = self.queries.weight[None]
            q = self.norm(q + self.own(q, q, q, need_weights=need_weights)[0])
            return self.cross(q, x, x, need_weights=need_weights)[0]

    found = count(Pool(), 7, 8)
    assert {(r.name, r.weight): r.madds for r in found if r.madds} == {
        ("own", "own.in_proj_weight"): 3 * 3 * 64,
        ("own", ""): 2 * 3 * 3 * 8,
        ("own", "own.out_proj.weight"): 3 * 64,
        ("cross", "cross.in_proj_weight"): (3 + 2 * 7) * 64,
        ("cross", ""): 2 * 3 * 7 * 8,
        ("cross", "cross.out_proj.weight"): 3 * 64,
    }
    assert {r.kind for r in found if not r.weight} == {"attention"}


def test_weights_that_multiply_nothing_are_listed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.added = nn.Parameter(torch.zeros(1, 4))
            self.idle = nn.Linear(2, 3)

        def forward(self, x):
            return x + self.added

    found = count(Odd(), 4)
    assert [(r.weight, r.kind, r.madds) for r in found] == [
        ("added", "elementwise", 0),
        ("idle.weight", "unused", 0),
    ]


def test_unknown_operations_are_listed_and_never_zero_in_silence():
    model = nn.Sequential(nn.Linear(8, 8), Call(lambda x: torch.cdist(x, x)))
    with pytest.raises(perfmodel.UnknownLayerError, match=r"got 1: aten\._cdist_forward") as caught:
        count(model, 5, 8)
    assert len(caught.value.found) == 1
    found = count(model, 5, 8, unknown="list")
    assert [row.kind for row in found] == ["linear", "unknown"]


MADE_OF = (), (8,), (2,), (2, 8), (8, 8, 3), ((6, 6), 2), ((2, 2),)
INPUTS = (8, 12, 12), (8, 12), (8, 6, 6, 6), (8,), (32,)


def runs(kind):
    """Return a module of a class and the shape of a sample it runs on; None where none was found."""
    for arguments, shape in itertools.product(MADE_OF, INPUTS):
        try:
            model = kind(*arguments).eval()
            model(torch.ones(1, *shape))
        except Exception:
            continue
        return model, shape
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_every_module_of_torch_is_known(mode):
    torch.manual_seed(0)
    kinds = [k for k in vars(nn).values() if isinstance(k, type) and issubclass(k, nn.Module)]
    found = {kind.__name__: made for kind in kinds if (made := runs(kind))}
    assert len(found) > 100
    assert {"Hardswish", "LogSigmoid", "PReLU"} <= set(found)
    for model, shape in found.values():
        count(model.train(mode), *shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.fold(x, (4, 6), (2, 2), stride=2),
        lambda x: F.interpolate(x, 4, mode="nearest-exact"),
        lambda x: F.interpolate(x[None], (4, 4), mode="nearest-exact"),
        lambda x: F.interpolate(x[None], (4, 4), mode="bilinear", antialias=True),
        lambda x: F.interpolate(x[None], (4, 4), mode="bicubic", antialias=True),
        F.gumbel_softmax,
        lambda x: x // 1,
        lambda x: torch.polar(x, x),
        lambda x: torch.cross(x[..., :3], x[..., :3], dim=-1),
        lambda x: torch.dist(x, x),
        lambda x: torch.trace(x[0]),
        lambda x: F.mse_loss(x, x),
        lambda x: F.smooth_l1_loss(x, x),
        lambda x: F.huber_loss(x, x),
        lambda x: F.binary_cross_entropy_with_logits(x, x),
        pytest.param(nn.DataParallel(nn.ReLU()), id="DataParallel"),
    ],
)
def test_functions_that_multiply_nothing(function):
    assert total_madds(count(Call(function), 8, 6)) == 0


def test_a_traced_model_counts_as_the_one_it_was():
    model, x = convolutions(), torch.ones(2, 3, 8, 8)
    traced = fx.symbolic_trace(model)
    assert total_madds(count(traced, 3, 8, 8)) == total_madds(count(model, 3, 8, 8))
    assert saved_bytes(traced, x).total_bytes == saved_bytes(model, x).total_bytes


def test_a_kernel_of_somebody_else_is_unknown():
    @torch.library.custom_op("perfmodel_tests::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    square.register_fake(lambda x: torch.empty_like(x))
    with pytest.raises(perfmodel.UnknownLayerError, match="perfmodel_tests"):
        count(Call(lambda x: square(x[0])), 5, 5)


def test_a_model_that_needs_values_names_its_module():
    model = nn.Sequential(nn.Linear(4, 4), Call(lambda x: x[x > 0]))
    with pytest.raises(ValueError, match=r"shapes alone \(the meta device\), got .* in 1: "):
        count(model, 4)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(5), nn.LazyBatchNorm1d(affine=False)])
def test_a_model_without_shapes_names_its_module(lazy):
    model, x = nn.Sequential(nn.Linear(4, 4), lazy), torch.ones(2, 4)
    message = rf"must have a shape, got none yet in 1 \({type(lazy).__name__}\): run the model once"
    with pytest.raises(ValueError, match=message):
        count(model, 4)
    for measure in (False, True):
        with pytest.raises(ValueError, match=message):
            saved_bytes(model, x, measure=measure)
    model(x)
    assert total_madds(count(model, 4)) == 16 + 20 * isinstance(lazy, nn.Linear)


def test_the_command_names_a_module_without_shapes():
    with pytest.raises(SystemExit, match=r"^python -m perfmodel: error: .* in the model itself \("):
        main(["model", "torch.nn:LazyLinear(out_features=5)", "--input", "3"])


@pytest.mark.parametrize("shape", [(0,), (-1, 3), (2.5,)])
def test_bad_shapes(shape):
    with pytest.raises(ValueError, match="sizes of at least 1, got"):
        count(nn.Linear(3, 3), *shape)


def test_a_shape_is_that_of_a_sample():
    with pytest.raises(TypeError, match=r"such as \(3, 32, 32\), got 8"):
        perfmodel.layers(nn.Linear(8, 3), 8)


def test_batch_norm_over_one_pixel():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert total_madds(count(model, 3, 3, 3)) == 4 * 27
    assert model[1].training


def test_several_inputs():
    found = perfmodel.layers(Call(lambda a, b: a @ b), ((2, 3), (3, 4)))
    assert total_madds(found) == 24


def test_the_model_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    called = []
    model[0].register_forward_hook(lambda *_: called.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [set(vars(m)) for m in model.modules()]
    state = torch.get_rng_state()
    count(model, 3, 8, 8)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert not called
    assert len(model[1]._forward_hooks) == 0
    assert all(m.training for m in model.modules())


def convolutions():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(128, 10))


def converted(*, has_formats=True):
    model = convolutions()
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy())
    if has_formats:
        marvin.quantize_activations(model, optimizer)
    marvin.integer.convert(model)
    return model


def stepped():
    model = converted()
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    return model


@pytest.mark.parametrize(
    "build",
    [
        converted,
        stepped,
        lambda: converted().eval(),
        lambda: converted(has_formats=False),
        lambda: marvin.freeze(converted().eval()),
    ],
    ids=["train", "after a step", "eval", "no formats", "frozen"],
)
def test_integer_layers_count_as_those_they_were(build):
    model, x = build(), torch.ones(2, 3, 8, 8)
    kinds = [type(m) for m in model.modules()]
    assert count(model, 3, 8, 8) == count(convolutions(), 3, 8, 8)
    plain = convolutions().train(model.training)
    plain.requires_grad_(next(model.parameters()).requires_grad)
    for measure in (False, True):
        kept = saved_bytes(model, x, measure=measure)
        assert kept == saved_bytes(plain, x, measure=measure)
    assert [type(m) for m in model.modules()] == kinds  # a copy was reverted, not the model
    assert type(model[0]) is marvin.integer.IntegerConv2d


def test_layers_that_keep_less_multiply_as_before():
    model, x = convolutions(), torch.ones(2, 3, 8, 8)
    forward_save.convert(model, few_bit=3, division={"block": 8, "bits": 2})
    before = saved_bytes(model, x).total_bytes
    assert count(model, 3, 8, 8) == count(convolutions(), 3, 8, 8)
    assert saved_bytes(model, x).total_bytes == before < saved_bytes(convolutions(), x).total_bytes


@pytest.mark.parametrize("bits", [2, 3])
def test_few_bit_modules_multiply_nothing(bits):
    model = nn.Sequential(nn.Linear(4, 5), few_bit.modules.SiLU(bits=bits), nn.Linear(5, 2))
    assert [(r.weight, r.madds) for r in count(model, 4)] == [("0.weight", 20), ("2.weight", 10)]


def test_size_costs_no_memory():
    with torch.device("meta"):
        huge = nn.Sequential(*(nn.Linear(2**17, 2**17, bias=False) for _ in range(100)))
    assert total_madds(count(huge, 2**17)) == 100 * 2**34


def test_import_loads_no_torch():
    code = (
        "import sys, perfmodel, perfmodel.cost, perfmodel.memory, perfmodel.report, perfmodel.run"
    )
    code += "; print(*{'torch', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout.split() == []
