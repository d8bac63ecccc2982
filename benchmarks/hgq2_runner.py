"""Train a dense network with HGQ2 and write what each epoch has; for the environment that has HGQ2.

    .venv-hgq/bin/python benchmarks/hgq2_runner.py DATA.npz OUT.json '{"sizes": [64, 32, 10], "epochs": 100, ...}'
    .venv-hgq/bin/python benchmarks/hgq2_runner.py count OUT.json '{"layers": [...]}'

DATA has ``x``, ``y``, ``x_held``, ``y_held``, ``x_test``, ``y_test``. Settings: ``sizes``, ``epochs``,
``batch``, ``lr``, ``seed``, ``beta`` (first and last factor of EBOPs in the loss, raised evenly in its
logarithm; none: float32 layers). ``count`` builds one layer for each entry with fixed formats and writes
HGQ2's own EBOPs of it, without biases.
"""

import json
import math
import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import hgq  # pyright: ignore[reportMissingImports]
import keras  # pyright: ignore[reportMissingImports]
import numpy as np
from hgq.config import (  # pyright: ignore[reportMissingImports]
    LayerConfigScope,
    QuantizerConfig,
    QuantizerConfigScope,
)
from hgq.layers import QConv2D, QDense  # pyright: ignore[reportMissingImports]


class Epochs(keras.callbacks.Callback):
    """Raises beta epoch by epoch; writes down time, EBOPs and accuracies."""

    def __init__(self, data, settings, quantised):
        super().__init__()
        self.data, self.settings, self.quantised, self.rows = data, settings, quantised, []

    def on_epoch_begin(self, epoch, logs=None):
        if self.quantised:
            first, last = self.settings["beta"]
            share = epoch / max(1, self.settings["epochs"] - 1)
            beta = math.exp(math.log(first) * (1 - share) + math.log(last) * share)
            for layer in self.quantised:
                layer._beta.assign(keras.ops.full((), beta))  # as HGQ2's own callbacks do
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.perf_counter() - self.began
        row = {"epoch": epoch + 1, "seconds": seconds, "ebops": sum(map(ebops_of, self.quantised))}
        for part in ("held", "test"):
            found = self.model.predict(self.data[f"x_{part}"], batch_size=4096, verbose=0)
            row[part] = float((found.argmax(1) == self.data[f"y_{part}"]).mean())
        self.rows.append(row)


def ebops_of(layer):
    """Return what HGQ2 counted in the last step."""
    return int(keras.ops.convert_to_numpy(layer.ebops))


def train(data, settings):
    """Return a row for each epoch."""
    keras.utils.set_random_seed(settings["seed"])
    sizes = settings["sizes"]
    acts = ["relu"] * (len(sizes) - 2) + [None]
    if settings.get("beta"):
        with (
            QuantizerConfigScope(place="all", default_q_type="kbi", overflow_mode="SAT_SYM"),
            QuantizerConfigScope(place="datalane", default_q_type="kif", overflow_mode="WRAP"),
            LayerConfigScope(enable_ebops=True, beta0=settings["beta"][0]),
        ):
            layers = [QDense(n, activation=a) for n, a in zip(sizes[1:], acts, strict=True)]
    else:
        layers = [keras.layers.Dense(n, activation=a) for n, a in zip(sizes[1:], acts, strict=True)]
    model = keras.Sequential([keras.layers.Input((sizes[0],)), *layers])
    steps = settings["epochs"] * (len(data["x"]) // settings["batch"])
    rate = keras.optimizers.schedules.CosineDecay(settings["lr"], steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss)
    watch = Epochs(data, settings, layers if settings.get("beta") else [])
    whole = len(data["x"]) // settings["batch"] * settings["batch"]
    x, y = data["x"][:whole], data["y"][:whole]
    model.fit(
        x, y, batch_size=settings["batch"], epochs=settings["epochs"], verbose=0, callbacks=[watch]
    )
    return watch.rows


def count(layer):
    """Return HGQ2's EBOPs of a layer whose weights and inputs have the given bits, without signs."""
    weights = QuantizerConfig(
        "kbi", "weight", k0=True, b0=layer["weight"], i0=0, trainable=False, bc=None, br=None
    )
    inputs = QuantizerConfig(
        "kif", "datalane", k0=False, i0=0, f0=layer["input"], trainable=False, ic=None, fc=None
    )
    if layer["kind"] == "linear":
        built = QDense(layer["out"], use_bias=False, kq_conf=weights, iq_conf=inputs)
    else:
        built = QConv2D(
            layer["out"], layer["kernel"], layer["stride"], padding=layer["padding"],
            use_bias=False, kq_conf=weights, iq_conf=inputs,
        )  # fmt: skip
    x = np.random.default_rng(0).uniform(0, 1, (1, *layer["shape"])).astype("float32")
    built(x, training=True)
    return ebops_of(built)


def main():
    """Train, or count."""
    source, out, given = sys.argv[1:]
    settings = json.loads(given)
    if source == "count":
        found = [count(layer) for layer in settings["layers"]]
    else:
        with np.load(source) as file:
            found = train(dict(file), settings)
    versions = {"hgq2": hgq.__version__, "keras": keras.__version__}
    versions["backend"] = keras.backend.backend()
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"rows": found, "versions": versions}, file)


if __name__ == "__main__":
    main()
