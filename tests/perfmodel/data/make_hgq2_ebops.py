"""Write ``hgq2_ebops.json``: what HGQ2 itself counts for one small network of given formats.

    python -m venv hgq && hgq/bin/pip install hgq2==0.2.0 torch
    KERAS_BACKEND=torch hgq/bin/python tests/perfmodel/data/make_hgq2_ebops.py

A convolution 3x3 without border on images of 8x8x3, one with a border, and a dense
layer, without biases, each with one format for its weight and one for its inputs.
"""

import json
from importlib.metadata import version
from pathlib import Path

import keras
import numpy as np
from hgq.config import LayerConfigScope, QuantizerConfig, QuantizerConfigScope
from hgq.layers import QConv2D, QDense

# name: bits of weights and inputs without signs, whether inputs have signs
FORMATS = {"first": (6, 7, True), "second": (4, 5, False), "dense": (3, 6, False)}


def quantizers(name):
    weight, inputs, signed = FORMATS[name]
    common = {"trainable": False, "homogeneous_axis": None, "heterogeneous_axis": ()}
    of_weight = QuantizerConfig("kbi", "weight", k0=True, b0=weight, i0=0, **common)
    of_inputs = QuantizerConfig("kif", "datalane", k0=signed, i0=2, f0=inputs - 2, **common)
    return {"kq_conf": of_weight, "iq_conf": of_inputs, "use_bias": False}


with QuantizerConfigScope(), LayerConfigScope(enable_ebops=True, beta0=0.0):
    layers = [
        QConv2D(4, 3, padding="valid", name="first", **quantizers("first")),
        QConv2D(6, 3, padding="same", name="second", **quantizers("second")),
        QDense(5, name="dense", **quantizers("dense")),
    ]
    model = keras.Sequential([layers[0], layers[1], keras.layers.Flatten(), layers[2]])
    model(np.zeros((1, 8, 8, 3), "float32"), training=True)

counted = {layer.name: float(layer.ebops) for layer in layers}
content = {
    "made_by": f"hgq2 {version('hgq2')}, keras {keras.__version__}, {keras.backend.backend()}",
    "formats": {
        name: {"weight_bits": w, "input_bits": x, "input_signed": s}
        for name, (w, x, s) in FORMATS.items()
    },
    "ebops": counted,
}
path = Path(__file__).with_name("hgq2_ebops.json")
path.write_text(json.dumps(content, indent=2) + "\n")
print(path.read_text())
