import re
import shutil

import pytest
import torch
from torch import nn

import marvin
from marvin.export import ExportError, describe, hls4ml, integer, round_sums
from train.resnet20 import resnet20

pytest.importorskip("hls4ml")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def images() -> nn.Module:
    """Flattens images of several pixels, rounds twice, and adds what is rounded differently."""
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 5),
        nn.BatchNorm1d(5),
    )


def assert_exact(network, x, backend, folder):
    project = hls4ml.write(network, folder, backend)
    script = folder / "build_lib.sh"
    script.write_text(script.read_text().replace("-O3", "-O0"))  # four times as fast to compile
    got = project.predict(x)
    torch.testing.assert_close(got, integer.run(network, x), rtol=0, atol=0)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("wl", "fl", "backend"), [(8, 5, "Vitis"), (16, 12, "Vivado")])
def test_emulation_equals_the_integers_on_digits(digits, wl, fl, backend, tmp_path):
    _, network, x = digits(wl, fl)
    assert_exact(network, 2 * x, backend, tmp_path)


@needs_compiler
@pytest.mark.slow
def test_emulation_equals_the_integers_on_other_layers(make, tmp_path):
    _, network, x = make(images, (2, 9, 8), 7, 4)
    assert_exact(network, 2 * x, "Vitis", tmp_path)


def even() -> nn.Module:
    """Puts more zeros behind an image than before it."""
    conv = nn.Conv2d(2, 3, (2, 4), padding="same")
    return nn.Sequential(conv, nn.ReLU(), nn.ZeroPad2d((1, 0, 2, 3)), nn.Conv2d(3, 2, 3))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["Vitis", "Vivado"])
def test_emulation_equals_the_integers_with_zeros_around_images(make, backend, tmp_path):
    _, network, x = make(even, (2, 5, 6), 7, 4)
    assert_exact(network, 2 * x, backend, tmp_path)


def test_streams_of_images_with_zeros_around_are_refused(make, tmp_path):
    _, network, _ = make(even, (2, 5, 6), 7, 4)
    with pytest.raises(ExportError, match=r"0\.padded, 0, 2: io_stream does not pad"):
        hls4ml.write(network, tmp_path, hardware=hls4ml.Hardware(io="io_stream"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["Vitis", "Vivado"])
def test_emulation_equals_the_integers_on_a_small_resnet(backend, tmp_path):
    torch.manual_seed(0)
    model = resnet20(10, 1, 2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.3, 2)
    groups = []  # neighbours have different formats: rounding twice is not rounding once
    for i, (name, p) in enumerate(model.named_parameters()):
        more = 0 if name.startswith("fc") else 1 + i % 3  # the last layer's format is the coarsest
        groups.append({"params": [(name, p)], "init_wl": 9 + more, "init_fl": 5 + more})
    optimizer = marvin.MSGD(groups)
    marvin.quantize_activations(model.eval(), optimizer)
    x = torch.randn(3, 1, 8, 8)
    assert_exact(describe(model, x, optimizer.formats()), x, backend, tmp_path)


@needs_compiler
@pytest.mark.slow
def test_emulation_equals_the_integers_with_unsigned_words(ranged, tmp_path):
    _, network, x = ranged(lambda: resnet20(10, 2, 2), (5, 6))
    network = round_sums(network, x)
    assert not network.formats()["blocks.1.conv1.in"].signed
    assert_exact(network, 2 * x[:3], "Vitis", tmp_path)


@needs_compiler
@pytest.mark.slow
def test_emulation_equals_the_integers_with_formats_by_channel(channelled, tmp_path):
    def build():
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4),
            nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip

    model, formats, x = channelled(build, spread=6)
    assert_exact(describe(model, x, formats), 2 * x[:4], "Vitis", tmp_path)


class Added(nn.Module):
    """Adds what linear layers give to flattened images: first, second, and behind other layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 1), nn.BatchNorm1d(8)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        flat = self.conv(x).flatten(1)
        y = flat + self.norm(self.a(flat)).relu()
        return self.c(self.b(y) + y) + y


@needs_compiler
def test_linear_layers_give_the_order_of_images_that_they_are_added_to(make, tmp_path):
    _, network, x = make(Added, (1, 2, 2))
    assert_exact(network, x, "Vitis", tmp_path)


def test_a_sum_of_two_orders_is_refused(make, tmp_path):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 4, 2, stride=2), nn.Conv2d(1, 2, (2, 1), stride=(2, 1))

        def forward(self, x):
            return self.a(x).flatten(1) + self.b(x).flatten(1)

    _, network, _ = make(Pooled, (1, 4, 2))
    with pytest.raises(ExportError, match="add: hls4ml has flattened images of other shapes"):
        hls4ml.write(network, tmp_path)


@needs_compiler
def test_padding_of_unsigned_images_is_no_value_of_theirs(tmp_path):
    torch.manual_seed(0)
    x = torch.rand(4, 1, 4, 4) ** 3  # most are below half of the range
    model = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Conv2d(1, 2, 1)).eval()
    network = describe(marvin.calibrate(model, [x]), x)
    assert not network.operations[1].fmt.signed
    assert_exact(network, x, "Vitis", tmp_path)


def test_every_type_is_written_out(digits, tmp_path):
    _, network, _ = digits(8, 5)
    hls4ml.write(network, tmp_path)
    text = (tmp_path / "firmware/defines.h").read_text()
    types = {name: fmt for fmt, name in re.findall(r"typedef ap_fixed<(.*)> (\w+);", text)}
    assert types["input_t"] == types["result_t"] == "8,3,AP_RND_CONV,AP_SAT,0"
    value = network.values["4.conv"]
    bits = value.magnitude.bit_length() + 1
    assert types["layer_4_conv_accum_t"] == f"{bits},{bits - 10}"
    assert types["layer_4_conv_weight_t"] == "8,3"
    assert hls4ml.FORGOTTEN not in {f"ap_fixed<{fmt}>" for fmt in types.values()}
    layers = (tmp_path / "firmware/network.cpp").read_text()
    assert layers.count("nnet::normalize<") == 2  # batch normalisation of its own


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv2d(4, 4, 1, groups=2), r"1: hls4ml has convolutions of one group .* groups=2"),
        (nn.Conv2d(4, 4, 3, dilation=2), r"dilation=\(2, 2\)"),
        (nn.MaxPool2d(2, dilation=2), "pooling of dilation 1"),
        (nn.AvgPool2d(3), "hls4ml truncates a mean of 9 values"),
    ],
)
def test_what_has_no_exact_counterpart_is_named(make, layer, message, tmp_path):
    build = lambda: nn.Sequential(nn.Conv2d(1, 4, 1), layer)  # noqa: E731
    _, network, _ = make(build, (1, 6, 6))
    with pytest.raises(ExportError, match=message):
        hls4ml.write(network, tmp_path / "project")
    with pytest.raises(ExportError, match="the backend must be Vitis or Vivado, got 'Quartus'"):
        hls4ml.write(network, tmp_path / "project", "Quartus")
    assert not (tmp_path / "project").exists()


def test_without_the_package_one_line_says_what_to_install(digits, monkeypatch, tmp_path):
    _, network, _ = digits()
    monkeypatch.setitem(__import__("sys").modules, "hls4ml", None)
    with pytest.raises(ExportError, match=r'pip install "marvin-fixedpoint\[hls4ml\]"'):
        hls4ml.write(network, tmp_path)


@needs_compiler
def test_part_clock_and_strategy_are_in_the_project(make, tmp_path):
    build = lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))  # noqa: E731
    _, network, x = make(build, (1, 4, 4), 6, 3)
    hardware = hls4ml.Hardware("xc7z020clg400-1", 8.0, "io_stream", "Resource", 2)
    project = hls4ml.write(network, tmp_path / "made", "Vitis", hardware)
    text = (tmp_path / "made" / "hls4ml_config.yml").read_text()
    found = dict(line.strip().split(": ", 1) for line in text.splitlines() if ": " in line)
    assert found["Part"] == "xc7z020clg400-1"
    assert float(found["ClockPeriod"]) == 8
    assert (found["IOType"], found["Strategy"], found["ReuseFactor"]) == (
        "io_stream",
        "Resource",
        "2",
    )
    assert found["OutputDir"] == "."  # wherever the folder is
    torch.testing.assert_close(project.predict(x), integer.run(network, x), rtol=0, atol=0)


def test_names_of_layers_are_names_of_cplusplus(digits):
    writer = hls4ml._Writer(digits()[1])
    for name in ("0.conv", "\u00e9t\u00e9", "", 'a"; system("b")', "_"):
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", writer._identifier(name))
