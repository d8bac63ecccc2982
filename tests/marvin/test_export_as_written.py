"""Models as people write them: exported to integers that equal the model, or refused by name."""

import contextlib
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
from marvin.export import ExportError, c, describe, integer, onnx, round_sums
from marvin.export.targets import write
from marvin.export.targets.c import compiler


class Net(nn.Module):
    """Calls one function with its layers."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def two(inputs=8, outputs=8):
    return {"a": nn.Linear(inputs, outputs), "b": nn.Linear(inputs, outputs)}


def convs():
    return {"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1)}


def frozen(function, layers, shape=(8,), samples=4):
    """Return a model in fixed point, and samples."""
    torch.manual_seed(0)
    model = Net(function, **layers)
    optimizer = marvin.MSGD(model.named_parameters(), lr=0.05)
    marvin.quantize_activations(model, optimizer)
    return marvin.freeze(model.eval()), torch.randn(samples, *shape) / 2


def assert_refused(match, function, layers, shape=(8,), samples=4):
    model, x = frozen(function, layers, shape, samples)
    with pytest.raises(ExportError, match=match):
        describe(model, x)


def assert_exact(function, layers, shape=(8,), samples=4):
    """Return the network, whose integers equal the model on other numbers of samples too."""
    model, x = frozen(function, layers, shape, samples)
    network = describe(model, x)
    for samples in (x, torch.randn(7, *shape)):
        with torch.no_grad():
            wanted = model(samples.clone())
        got = integer.run_heads(network, samples)
        wanted = wanted if isinstance(wanted, tuple | list) else (wanted,)
        for have, want in zip(got.values(), wanted, strict=True):
            torch.testing.assert_close(have, want.double(), rtol=0, atol=0)
    return network, x


def assert_c_equal(network, x, folder):
    """Compile the network and compare."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    source = c.write(network)
    c.save(network, folder / "network")
    compiler.compile_program("gcc", folder / "network.c", folder / "network", ("-O1",))
    found = compiler.run_program([str(folder / "network")], c.input_codes(network, x))
    got = c.output_codes(network, source, found)
    for label, want in integer.run_heads(network, x).items():
        torch.testing.assert_close(got[label], want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda m, x: {"box": {"x": m.a(x)}, "box.x": m.b(x)}, "box.x"),
        (lambda m, x: {0: m.a(x), "0": m.b(x)}, "0"),
        (lambda m, x: {"": m.a(x), "output": m.b(x)}, "output"),
    ],
)
def test_outputs_of_one_name_are_refused(function, name):
    assert_refused(f"names of their own, got two of the name {name}: rename", function, two())


@pytest.mark.parametrize(
    ("function", "outputs"),
    [
        (lambda m, x: m.a(x).squeeze(-1), 1),
        (lambda m, x: m.a(x)[:, 0], 3),
        (lambda m, x: m.a(x).view(-1), 1),
        (lambda m, x: m.a(x).squeeze(-1) * 2, 1),
        (lambda m, x: m.a(x).squeeze(-1) * -1, 1),
        (lambda m, x: m.a(x).squeeze(-1) + m.b(x).squeeze(-1), 1),
        (lambda m, x: m.a(x).squeeze(-1) * m.b(x).squeeze(-1), 1),
        (lambda m, x: torch.sigmoid(m.a(x).squeeze(-1)), 1),
        (lambda m, x: (m.a(x)[:, 0], m.a(x)[:, 1].relu()), 2),
        (lambda m, x: m.a(x).squeeze(-1) + torch.tensor(0.5), 1),
        (lambda m, x: m.a(x).relu()[:, 0][:, None], 2),
    ],
)
def test_values_of_no_dimension(function, outputs, tmp_path):
    model, x = frozen(function, two(8, outputs))
    network = describe(model, x)
    assert_c_equal(network, x, tmp_path)


def test_means_of_all(tmp_path):
    model, x = frozen(lambda m, x: m.a(x).mean((1, 2, 3)), convs(), (4, 4, 4))
    assert_c_equal(describe(model, x), x, tmp_path)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (
            lambda m, x: m.a(x) * (1 / x.shape[0]),
            "mul must take .* got truediv: 0.25 of 4, 0.5 of 2",
        ),
        (lambda m, x: m.a(x) / x.shape[0], "truediv must take .* got getitem: 4 of 4, 2 of 2"),
        (lambda m, x: m.a(x).clamp(max=x.size(0) / 4), "clamp must take .* got truediv: 1.0 of 4"),
        (lambda m, x: m.a(x)[:4], "must leave the batch alone"),
        (lambda m, x: m.a(x)[:100], "must leave the batch alone"),
        (lambda m, x: m.a(x).view(4, -1), r"view must give shape \(2, 8\) .* got \(4, 4\)"),
        (lambda m, x: m.a(x)[:, : x.size(0)], r"getitem must give shape \(2, 4\)"),
        (lambda m, x: m.a(x)[:, : 8 * x.size(0)], "getitem must take .* got mul: 32 of 4, 16 of 2"),
        (lambda m, x: m.a(x).view(4, 2, 4), "must take samples of shape .*; it took 4 samples"),
        (lambda m, x: m.a(x) + torch.full((8,), 1 / x.size(0)), "add must take .* got full"),
        (lambda m, x: m.a(x).chunk(x.size(0) // 2, 1)[0], r"must give shape \(2, 4\)"),
    ],
)
def test_numbers_made_of_the_number_of_samples_are_refused(function, match):
    assert_refused(match, function, two())


@pytest.mark.parametrize("samples", [2, 3, 8])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x).view(x.size(0), -1),
        lambda m, x: m.a(x).reshape(len(x) if isinstance(x, list) else x.shape[0], 2, 4),
        lambda m, x: m.a(x)[: x.size(0)],
        lambda m, x: m.a(x)[: x.size(0), 2:],
        lambda m, x: m.a(x)[0:, : x.size(1) // 2],
        lambda m, x: m.a(x) + torch.full((1, 8), x.size(1) / 8.0).expand(x.size(0), 8),
        lambda m, x: m.a(x) * (1 / x.shape[1]),
        lambda m, x: torch.cat(
            [torch.full((1, 8), x.size(1) / 8.0).expand(x.size(0), -1), m.a(x)], 1
        ),
    ],
)
def test_shapes_may_name_the_number_of_samples(function, samples):
    assert_exact(function, two(), samples=samples)


def test_one_sample_is_compared_with_two():
    assert_exact(lambda m, x: m.a(x).view(x.size(0), -1), two(), samples=1)
    match = r"view must give shape \(2, 8\) of 2 samples, as it gives \(1, 8\) of 1, got \(1, 16\)"
    assert_refused(match, lambda m, x: m.a(x).view(1, -1), two(), samples=1)


POOLED = {
    "before": lambda: [nn.MaxPool2d(2), nn.Conv2d(3, 3, 3)],
    "between": lambda: [nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 4, 3)],
    "twice": lambda: [nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2), nn.Conv2d(3, 4, 1)],
}


@pytest.mark.parametrize("bits", [4, 7, 8, 10])
@pytest.mark.parametrize("name", POOLED)
def test_onnx_runtime_loads_max_pooling_of_rounded_values(name, bits):
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x = torch.randn(8, 3, 12, 12)
    model = marvin.calibrate(nn.Sequential(*POOLED[name]()), [x], bits=bits)
    network = describe(marvin.freeze(model), x)
    content = onnx.to_model(network, "qdq").SerializeToString()
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    got = torch.from_numpy(session.run(None, {network.input.name: x.numpy()})[0])
    torch.testing.assert_close(got.double(), integer.run(network, x), rtol=0, atol=0)


def test_a_qdq_file_that_does_not_load_is_named(tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")

    def refuse(*_args, **_options):
        raise RuntimeError("unexpected type")

    monkeypatch.setattr(runtime, "InferenceSession", refuse)
    with pytest.raises(ExportError, match=r"must load network\.onnx, got unexpected type: write"):
        write._check_loads(tmp_path / "network.onnx")


def test_a_file_that_does_not_run_is_named(tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")

    class Session:
        def __init__(self, *_args, **_options):
            pass

        def run(self, *_args):
            raise RuntimeError("while running QLinearAdd node. Name:'1_token_0'\nmore")

    x = torch.randn(4, 3)
    network = describe(marvin.calibrate(nn.Linear(3, 2), [x]), x)
    monkeypatch.setattr(runtime, "InferenceSession", Session)
    message = r"must run network\.onnx, got while .* Name:'1_token_0': take .* --to c or packed"
    with pytest.raises(ExportError, match=message):
        write._in_onnx_runtime(network, tmp_path / "network.onnx", x)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.flatten(input=m.a(x), start_dim=1),
        lambda m, x: m.b(torch.mean(input=m.a(x), dim=(2, 3), keepdim=True)),
        lambda m, x: torch.permute(input=m.a(x), dims=(0, 2, 3, 1)),
        lambda m, x: torch.transpose(input=m.a(x), dim0=1, dim1=2),
        lambda m, x: torch.clone(input=m.a(x)),
        lambda m, x: torch.chunk(input=m.a(x), chunks=2, dim=1)[0],
        lambda m, x: torch.add(input=m.a(x), other=m.b(x)),
        lambda m, x: torch.add(m.a(x), other=m.b(x)),
        lambda m, x: torch.mul(input=m.a(x), other=0.5),
        lambda m, x: torch.div(input=m.a(x), other=4),
        lambda m, x: m.b(torch.matmul(other=m.a(x), input=m.b(x))),
        lambda m, x: m.a(x).add(other=m.b(x)),
        lambda m, x: torch.clamp(input=m.a(x), min=0),
        lambda m, x: torch.cat(tensors=[m.a(x), m.b(x)], dim=1),
    ],
)
def test_functions_are_called_by_keyword(function):
    assert_exact(function, convs(), (4, 4, 4))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda m, x: F.max_pool1d(m.a(x), 2), "pooling must take samples of 2 dimensions, got 1"),
        (lambda m, x: F.avg_pool1d(m.a(x), 2), "pooling must take samples of 2 dimensions, got 1"),
        (
            lambda m, x: F.adaptive_max_pool1d(m.a(x), 2),
            "pooling must take samples of 2 dimensions, got 1",
        ),
        (
            lambda m, x: F.scaled_dot_product_attention(m.a(x), m.b(x), m.a(x)),
            "attention must take samples of 2 dimensions or more, got 1",
        ),
    ],
)
def test_samples_of_too_few_dimensions_are_refused(function, what):
    assert_refused(f"{what}: the first dimension of what describe takes", function, two())


def test_pooling_of_images_takes_no_rows():
    match = "pooling must take samples of 3 dimensions, got 2"
    assert_refused(match, lambda m, x: F.max_pool2d(m.a(x), 2), two(), (4, 8))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x) if isinstance(x, torch.Tensor) else m.b(x),
        lambda m, x: m.a(x) if torch.is_tensor(x) else m.b(x),
    ],
)
def test_a_forward_that_asks_for_the_class_of_a_value_goes_its_way(function):
    model, x = frozen(function, two())
    network = describe(model, x)
    assert [op.name for op in network.operations if op.name in ("a", "b")] == ["a"]


def test_a_forward_that_goes_another_way_in_a_trace_is_refused():
    match = "goes another when it is traced: b is never called"
    assert_refused(match, lambda m, x: m.b(x) if torch.is_grad_enabled() else m.a(x), two())


@pytest.mark.parametrize("factor", [1e-9, 1e-10, 3e-8])
def test_small_factors_that_lose_their_bits_are_refused(factor):
    match = f"mul: the largest scale must keep 8 of 16 bits, got {factor:.3g}, .*: scale the data"
    assert_refused(match, lambda m, x: m.a(x) * factor, two())


@pytest.mark.parametrize("factor", [1e-6, 2.0**-31, 2.0**-20, 0.0])
def test_small_factors_that_keep_their_bits_are_exported(factor):
    model, x = frozen(lambda m, x: m.a(x) * factor, two())
    with torch.no_grad():
        want = model(x).double()
    got = integer.run(describe(model, x), x)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("size", "is_refused"), [(1e9, True), (1e4, False)])
def test_batch_normalisation_of_large_values_is_refused(size, is_refused):
    torch.manual_seed(0)
    x = torch.randn(64, 8) * size
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    model(x)
    model = marvin.freeze(marvin.calibrate(model.eval(), [x]))
    if is_refused:
        with pytest.raises(ExportError, match="1: the largest scale must keep 8 of 16 bits"):
            describe(model, x)
    else:
        describe(model, x)


def halves_of_halves(y):
    return torch.cat([b for a in y.chunk(2, 1) for b in a.chunk(2, 2)], 1)


@pytest.mark.parametrize(
    ("function", "outputs"),
    [
        (lambda y: torch.cat(y.chunk(2, 1), 1), 1),
        (lambda y: torch.cat(y.split(2, 1)[::-1], 1), 1),
        (lambda y: torch.cat(torch.unbind(y, 1), 1), 1),
        (lambda y: torch.cat([F.relu(part) for part in y.chunk(4, 1)], 1), 1),
        (lambda y: torch.cat(list(map(F.relu, y.split([1, 3], 1))), 1), 1),
        (lambda y: (lambda a, b: a * b)(*y.chunk(2, -1)), 1),
        (lambda y: y * len(y.chunk(2, 1)), 1),
        (lambda y: y if isinstance(y.chunk(2, 1), tuple) else y.mean((2, 3)), 1),
        (lambda y: y.tensor_split(5, 1)[-2], 1),
        (lambda y: y.permute(1, 0, 2, 3).unbind(0)[1:], 3),
        (lambda y: y.split(y.shape[1] // 2, 1), 2),
        (lambda y: list(y.tensor_split((1, 3), dim=-1)), 3),
        (halves_of_halves, 1),
    ],
)
def test_parts_are_a_tuple(function, outputs):
    network, _ = assert_exact(lambda m, x: function(m.b(m.a(x))), convs(), (4, 6, 6))
    assert len(network.outputs) == outputs


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda y: torch.cat(y.chunk(2, 0), 1), "chunk, 0.* must leave the batch alone"),
        (lambda y: torch.cat(y.unbind(0), 1), "unbind: unbind.* must leave the batch alone"),
        (lambda y: sum(part.relu() for part in y.unbind(0)), "it loops over a value.* how many"),
        (lambda y: torch.cat(y.sort(), 1), "sort: sort.* compute it behind the network"),
        (lambda y: y.split(y.argmax().item() + 9, 1), "number of a value|argmax"),
    ],
)
def test_parts_of_samples_and_of_values_are_refused(function, match):
    assert_refused(match, lambda m, x: function(m.b(m.a(x))), convs(), (4, 6, 6))


def test_parts_without_values_are_refused():
    match = r"a part must have values, got shape \(0,\) of \(8,\): leave it out"
    assert_refused(match, lambda m, x: torch.cat([m.a(x), m.b(x)[:, 8:]], 1), two())


def test_a_constant_that_changes_in_place_is_refused():
    def added(m, x):
        return torch.full((1, 8), x.size(1) / 8.0).repeat(x.size(0), 1).add_(m.a(x))

    assert_refused(r"a constant must stay as it is: write h \+ constant", added, two())


@pytest.mark.parametrize("wl", [1, 33, 8.0])
def test_sums_are_rounded_to_words_of_2_to_32_bits(wl):
    model, x = frozen(lambda m, x: m.a(x) + m.b(x), two())
    with pytest.raises(ExportError, match=f"must be 2 to 32 bits, got {wl}: write round_sums"):
        round_sums(describe(model, x), x, wl)


def emptied(m, x):
    for p in m.parameters():
        p.clamp_(min=0)
    return m.a(x)


def emptied_and_caught(m, x):
    with contextlib.suppress(Exception):
        m.a.get_parameter("weight").data.zero_()
    return m.a(x)


def emptied_by_attribute(m, x):
    m.a.weight.clamp_(min=0)
    return m.a(x)


def followed(m, x):
    """As a momentum encoder does."""
    for own, other in zip(m.a.parameters(), m.b.parameters(), strict=True):
        own.data = own.data * 0.5 + other.data * 0.5
    return m.a(x)


def unfrozen(m, x):
    m.requires_grad_(True)
    return m.a(x)


def grown(m, x):
    m.head = nn.Linear(8, 8)
    return m.a(x)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (emptied, "changes parameters"),
        (emptied_and_caught, "changes parameters"),
        (emptied_by_attribute, "changes parameters"),
        (followed, "changes parameters"),
        (unfrozen, "changes parameters"),
        (grown, "adds, replaces or removes modules"),
    ],
)
@torch.no_grad()
def test_a_forward_that_changes_the_model_is_refused_before_it_does(function, reason):
    model, x = frozen(function, two())
    before = {name: (id(p), p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    with pytest.raises(ExportError, match=f"{reason}.*below if self.training"):
        describe(model, x)
    assert before.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        same, values, needs = before[name]
        assert (id(p), p.requires_grad) == (same, needs)
        torch.testing.assert_close(p, values, rtol=0, atol=0)


def test_what_changes_the_model_in_training_alone_is_exported():
    assert_exact(lambda m, x: emptied(m, x) if m.training else m.a(x), two())


def test_code_may_read_values_and_count_its_calls():
    def counting(m, x):
        m.calls = getattr(m, "calls", 0) + 1
        m.drawn = float(torch.rand(()))
        return m.a(x) if m.norm.running_mean.sum().item() == 0 else m.b(x)

    assert_exact(counting, {**two(), "norm": nn.BatchNorm1d(8)})
