import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marvin
import perfmodel
from fixedpoint_kernels import FixedPoint, forward_save
from perfmodel import memory
from perfmodel.forward_save import Division, few_bit_bytes
from perfmodel.memory import (
    Saved,
    SavedStorage,
    Saver,
    division,
    few_bit,
    kind_of,
    largest_batch,
    saved_bytes,
)
from train.resnet20 import resnet20


def kept_by(model, *shape, measure=False):
    return saved_bytes(model, torch.zeros(shape), measure=measure)


def rows(saved):
    return {(row.layer, row.kind): (row.size_bytes, row.alone_bytes) for row in saved.by_layer()}


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_a_linear_layer_keeps_its_input_and_no_parameter():
    saved = kept_by(nn.Linear(3, 4), 5, 3)
    assert (saved.total_bytes, saved.source) == (5 * 3 * 4, "modelled, kernels of cpu")
    assert rows(saved) == {("", "linear"): (60, 60)}


def test_what_two_layers_keep_counts_once_and_alone_for_neither():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    saved = kept_by(model, 5, 3)
    shared = 5 * 4 * 4
    assert rows(saved) == {
        ("0", "linear"): (60, 60),
        ("1", "activation"): (shared, 0),
        ("2", "linear"): (0, 0),
    }
    by_kind = {row.kind: (row.size_bytes, row.alone_bytes) for row in saved.by_kind()}
    assert by_kind == {"activation": (shared, 0), "linear": (60, 60)}
    assert saved.total_bytes == 60 + shared
    assert saved.of_modules(["Linear"]) == 60 + shared


def test_gelu_keeps_its_input_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    assert rows(kept_by(model, 5, 3))["1", "activation"] == (80, 80)


def test_views_count_their_storage_once():
    saved = kept_by(Call(lambda x: (x.requires_grad_() * x.t()).sum()), 6, 6)
    assert saved.total_bytes == 6 * 6 * 4
    expanded = kept_by(Call(lambda x: x.requires_grad_().expand(9, 4).exp().mul(2)), 1, 4)
    assert expanded.total_bytes == 9 * 4 * 4  # the result of exp
    (part,) = kept_by(Call(lambda x: x.requires_grad_()[:2].sin()), 10, 4).kept
    assert (part.size_bytes, part.shape) == (160, (2, 4))


def test_frozen_layers_keep_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_(False)
    assert kept_by(model, 5, 3).total_bytes == 0


MODELS = {
    "resnet20": (lambda: resnet20(width=4), (2, 3, 16, 16)),
    "pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.MaxPool2d(2), nn.AvgPool2d(2)),
        (2, 3, 12, 12),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        (2, 5, 8),
    ),
    "fused attention": (
        lambda: nn.Sequential(
            nn.Linear(8, 8), Call(lambda x: F.scaled_dot_product_attention(x, x, x))
        ),
        (2, 5, 8),
    ),
    "functional": (
        lambda: nn.Sequential(nn.Linear(8, 8), Call(lambda x: F.layer_norm(x.relu() @ x.mT, (5,)))),
        (2, 5, 8),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_predicted_is_measured(name):
    build, shape = MODELS[name]
    model = build()
    predicted, measured = kept_by(model, *shape), kept_by(model, *shape, measure=True)
    assert predicted.kept == measured.kept
    assert measured.source.startswith("measured on cpu")
    assert predicted.total_bytes > 0


def test_onednn_keeps_a_workspace_of_its_own():
    model = nn.LSTM(3, 4, batch_first=True)
    predicted, measured = kept_by(model, 2, 5, 3), kept_by(model, 2, 5, 3, measure=True)
    without = [k for k in measured.kept if k.shape != (k.size_bytes,)]  # bytes: the workspace
    assert [k for k in predicted.kept if k.size_bytes] == without
    said = "modelled, kernels of cpu, without oneDNN's workspace of LSTMs: measure=True tells it"
    assert predicted.source == said
    assert kept_by(nn.GRU(3, 4, batch_first=True), 2, 5, 3).source == "modelled, kernels of cpu"


def test_the_model_and_random_numbers_are_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    called = []
    model[0].register_forward_hook(lambda *_: called.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    for measure in (False, True):
        kept_by(model, 2, 3, 8, 8, measure=measure)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not called
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_values_is_predicted():
    with torch.device("meta"):
        model, inputs = nn.Linear(2**16, 2**16), torch.empty(2**14, 2**16)
    assert saved_bytes(model, inputs).total_bytes == 2**32


def test_a_failure_names_the_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"fake tensors\), got .* in 1: "):
        kept_by(model, 2, 4)
    with pytest.raises(ValueError, match="run on its inputs, got RuntimeError in 1: "):
        kept_by(model, 2, 4, measure=True)


def test_a_custom_function_has_its_module_as_kind():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    class Squared(nn.Module):
        def forward(self, x):
            return Square.apply(x)

    saved = kept_by(nn.Sequential(nn.Linear(3, 3), Squared()), 5, 3)
    assert rows(saved)["1", "Squared"] == (60, 60)


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("conv2d", "convolution"),
        ("conv_transpose1d", "convolution"),
        ("gelu", "activation"),
        ("max_pool2d", "pooling"),
        ("multi_head_attention_forward", "attention"),
        ("batch_norm", "normalization"),
        ("__matmul__", "matmul"),
        ("log_softmax", "softmax"),
        ("mul", "mul"),
    ],
)
def test_kinds(op, kind):
    assert kind_of(op) == kind


def kept(*ops, shape=(2, 3, 8, 8), itemsize=4):
    savers = tuple(Saver(str(i), kind_of(op), op, "") for i, op in enumerate(ops))
    return SavedStorage(torch.Size(shape).numel() * itemsize, shape, itemsize, savers)


def test_few_bit_saves_what_the_activation_alone_keeps():
    alone, shared = kept("gelu"), kept("relu", "conv2d")
    code = few_bit_bytes(384, 3)
    assert few_bit(3)(alone) == code == 384
    assert few_bit(3)(shared) == shared.size_bytes + few_bit_bytes(384, 1)
    assert few_bit(3)(kept("conv2d")) == 1536
    assert few_bit(4)(kept("relu6")) == few_bit_bytes(384, 1)
    assert few_bit_bytes(1025, 2) == 2 * 128 * 2


def test_division_compresses_once_and_keeps_masks():
    one = Division().size_bytes((2, 3, 8, 8))
    assert one == 6 * (2 + 64 // 4 + 4)
    option = division()
    assert option(kept("batch_norm")) == one
    assert option(kept("relu", "conv2d", "conv2d")) == one + 384 // 8
    assert option(kept("dropout")) == 384 // 8
    assert option(kept("max_pool2d", itemsize=8)) == 384
    assert option(kept("avg_pool2d")) == 0
    assert option(kept("conv2d", "mul")) == option(kept("gelu")) == 1536
    assert option(kept("batch_norm", shape=(3,))) == 12


def test_division_of_norms_without_pixels():
    """Batch norm packs channels, not rows; of how many groups nothing is known here."""
    columns = 8 * (3 * 2 + 5 + 4)
    assert division()(kept("batch_norm", shape=(20, 8))) == columns
    assert division()(kept("batch_norm", shape=(20, 8, 1, 1))) == columns
    both = columns + 20 * (2 + 2 + 4)
    assert division()(kept("batch_norm", "linear", shape=(20, 8))) == both
    assert division()(kept("group_norm", shape=(20, 8))) == 4 * 20 * 8
    model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(8))
    exact = saved_bytes(model, torch.randn(20, 8, requires_grad=True))
    forward_save.convert(model, division=True)
    found = saved_bytes(model, torch.randn(20, 8, requires_grad=True), measure=True)
    assert exact.with_option(division()) == found.total_bytes


def test_division_at_the_edge():
    assert Division().size_bytes((1, 1, 14, 14)) == 4 * 2 + 14 * 14 // 4 + 4
    assert Division(is_cut=False).size_bytes((1, 1, 14, 14)) == 2 + 49 + 4
    assert Division().size_bytes((2, 5, 1, 1)) == 2 * 5 * 2
    assert Division().size_bytes((2, 5, 0, 3)) == 0
    assert Division().size_bytes((2, 3, 4, 9, 5)) == 6 * (2 * 2 + 45 + 4)
    assert Division(16, 2).size_bytes((3, 64)) == 3 * (4 * 2 + 16 + 4)
    assert Division().size_bytes((2, 7, 16)) == 14 * (2 * 2 + 4 + 4)


def test_options_agree_with_the_whole():
    saved = kept_by(resnet20(), 2, 3, 32, 32)
    assert saved.with_option(lambda k: k.size_bytes) == saved.total_bytes
    assert saved.with_option(few_bit(1)) > saved.total_bytes  # ReLU alone keeps next to nothing
    assert 10 < saved.total_bytes / saved.with_option(division()) < 12


def test_largest_batch():
    assert largest_batch(100, 10, 30) == 3
    assert largest_batch(100, 110, 30) == 0
    for given in ((math.inf, 0, 1), (math.nan, 0, 1)):
        with pytest.raises(ValueError, match="fixed_bytes and sample_bytes must be finite, got"):
            largest_batch(*given)
    with pytest.raises(ValueError, match="sample_bytes must be above 0, got 0"):
        largest_batch(100, 10, 0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: few_bit("3"), TypeError, "bits must be a whole number, got '3'"),
        (lambda: few_bit(99), ValueError, "bits must be 1 to 8, got 99"),
        (lambda: few_bit_bytes(-1, 3), ValueError, "elements must be at least 0, got -1"),
        (lambda: Division(block=0), ValueError, "block must be at least 1, got 0"),
        (lambda: Division(bits=99), ValueError, "bits must be 0 to 8, got 99"),
        (lambda: Division(rows="a"), TypeError, "rows must be a number above 0"),
        (lambda: Division(rows=2), ValueError, "rows must be above 0, at most 1, got 2"),
        (lambda: division(8), TypeError, r"a Division, such as Division\(block=8\), got 8"),
        (
            lambda: Saved((), "").with_option("few-bit"),
            TypeError,
            r"memory\.few_bit\(3\) or .*got 'f",
        ),
    ],
)
def test_options_out_of_range(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.ones((4, 8), np.float32), r"got a NumPy array: write .*torch\.from_numpy\(x\)"),
        ((4, 8), r"got the shape \(4, 8\): write saved_bytes\(model, torch\.zeros\(4, 8\)\)"),
        (None, "must be a tensor, or a tuple of tensors, got NoneType"),
        ((), "must be a tensor, or a tuple of tensors, got nothing"),
    ],
)
@pytest.mark.parametrize("measure", [False, True])
def test_inputs_are_tensors(inputs, message, measure):
    with pytest.raises(TypeError, match=message):
        saved_bytes(nn.Linear(8, 2), inputs, measure=measure)


@pytest.mark.parametrize("model", [None, nn.ReLU])
def test_a_model_comes_first(model):
    for call in (
        lambda: saved_bytes(model, torch.ones(2)),
        lambda: perfmodel.layers(model, (8,)),
    ):
        with pytest.raises(TypeError, match=r"must come first, got .*: write \w+\.\w+\(model, "):
            call()


def test_a_wrong_shape_prints_no_traceback(caplog):
    with pytest.raises(ValueError, match="got RuntimeError in the model itself"):
        saved_bytes(nn.Linear(8, 2), torch.ones(4, 9))
    assert not caplog.records


def test_the_earlier_name_works_and_warns():
    message = r"^perfmodel\.memory\.Kept is now perfmodel\.memory\.SavedStorage$"
    with pytest.warns(DeprecationWarning, match=message):
        assert memory.Kept is SavedStorage


def test_a_model_that_needs_values_is_measured():
    number = FixedPoint(8, 4)
    model, x = nn.Sequential(nn.Linear(4, 5), marvin.Quantizer(number, number)), torch.randn(8, 4)
    with pytest.raises(ValueError, match=r"in 1: .*; measure=True runs it on values$"):
        saved_bytes(model, x)
    assert saved_bytes(model, x, measure=True).total_bytes >= 8 * 4 * 4
