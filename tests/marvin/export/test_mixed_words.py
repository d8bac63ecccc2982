"""Networks in which some words have more than 8 bits: integer kernels where there can be, layer by layer."""

import pytest
import torch
from torch import nn

from marvin.export import (
    calibrate,
    describe,
    formats_of_weights,
    integer,
    nearest_weights,
    onnx,
    round_sums,
)

runtime = pytest.importorskip("onnxruntime")


class Net(nn.Module):
    """Batch normalisation, channels one by one, a short-cut, pools, a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.down, self.shortcut = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 1, 2)
        self.pool, self.fc = nn.AvgPool2d(2), nn.Linear(8, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.bn(self.conv(x))), 2)
        x = torch.relu(self.bn1(self.depthwise(x)))
        return self.fc(self.pool(torch.relu(self.down(x) + self.shortcut(x))).flatten(1))


def mixed(long, wl, sums=True, what="both"):
    """Return a network whose layers ``long`` have weights, or inputs, of ``wl`` bits, others 8; and samples."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 2, 8, 8)
    model.bn.momentum = model.bn1.momentum = None
    with torch.no_grad():
        model(x)  # statistics
    model.eval()
    short, other = formats_of_weights(model, 8), formats_of_weights(model, wl)
    is_long = {name: name.rsplit(".", 1)[0] in long and what != "inputs" for name in short}
    formats = {name: other[name] if is_long[name] else fmt for name, fmt in short.items()}
    model = nearest_weights(model, formats, None)
    eight, more = calibrate(model, [x], 8), calibrate(model, [x], wl)
    own = {n: more[n] if n in long and what != "weights" else f for n, f in eight.items()}
    network = describe(model, x, formats, own)
    return (round_sums(network, x) if sums else network), x


def assert_equal(network, x):
    content = onnx.to_model(network).SerializeToString()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    for level in runtime.GraphOptimizationLevel.__members__.values():
        options.graph_optimization_level = level
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        for scale in (0.5, 3):
            (got,) = session.run(None, {network.input.name: (scale * x).numpy()})
            want = integer.run(network, scale * x)
            torch.testing.assert_close(torch.from_numpy(got).double(), want, rtol=0, atol=0)


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("what", ["weights", "inputs", "both"])
@pytest.mark.parametrize(
    "long", [("conv",), ("fc",), ("depthwise", "down"), ("shortcut", "fc")], ids=str
)
@pytest.mark.parametrize("wl", [10, 14, 20])
def test_long_words_keep_no_other_layer_from_integer_kernels(long, wl, what, sums):
    network, x = mixed(long, wl, sums, what)
    assert max(fmt.wl for fmt in network.words().values()) == wl
    assert onnx.container_of(network) == "int8"
    in_floats = onnx.in_floats(network)
    assert len(in_floats) < 5
    layers = {name for name in long if isinstance(Net().get_submodule(name), nn.Conv2d | nn.Linear)}
    if what != "inputs":
        assert layers <= in_floats.keys()
    assert_equal(network, x)


def test_where_no_layer_is_short_nothing_is_int8():
    names = [name for name, _ in Net().named_modules() if name]
    network, x = mixed(names, 10)
    assert onnx.container_of(network) in ("int16", "float64")
    assert len(onnx.in_floats(network)) == 5
    assert_equal(network, x)
