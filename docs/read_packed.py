"""Compute with a packed network: Python's integers, json and struct, nothing else.

    python read_packed.py network.safetensors < sample.json

The sample is a list of numbers, as long as one input, channel by channel, row by row. Written to be read.
"""

import json
import struct
import sys
from itertools import product
from math import prod


def load(path):
    """Return the network of a file, and its tensors: flat codes, shape, and fl by channel."""
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    fields = json.loads(header["__metadata__"]["marvin"])
    assert fields["version"] == 3, "versions before 3 have weights alone"
    tensors = {}
    for name, entry in fields["fixed_point"].items():
        begin, end = header[name]["data_offsets"]
        data = content[8 + length + begin : 8 + length + end]
        tensors[name] = unpack(data, entry), entry["shape"], fl_of(entry)
    return fields["network"], tensors


def unpack(data, entry):
    """Return codes of ``wl`` bits each, least significant bit first, in two's complement."""
    wl, places = entry["wl"], range(0, entry["wl"] * prod(entry["shape"]), entry["wl"])
    words = (int.from_bytes(data[i // 8 : i // 8 + 5], "little") >> i % 8 for i in places)
    codes = [word & (1 << wl) - 1 for word in words]
    return [c - (1 << wl) if entry["signed"] and c >> wl - 1 else c for c in codes]


def fl_of(entry):
    """Return the fractional length of each index of the first dimension."""
    return [entry["fl"] + s for s in entry.get("shifts") or [0] * (entry["shape"] or [1])[0]]


def round_to(code, fl, fmt, divisor=1):
    """Return ``code / divisor`` at another fl: nearest, ties to even, saturated."""
    wl, to_fl, is_symmetric, is_signed = fmt
    shift = fl - to_fl
    top, bottom = code << max(0, -shift), divisor << max(0, shift)
    quotient, rest = divmod(top, bottom)
    quotient += 2 * rest > bottom or (2 * rest == bottom and quotient % 2)
    low = is_symmetric - (1 << wl - 1) if is_signed else 0
    return min(max(quotient, low), (1 << wl - is_signed) - 1)


class Value:
    """Codes of one sample, each worth ``2**-fl``; images are channels, rows, columns."""

    def __init__(self, codes, shape, fl):
        self.codes, self.shape, self.fl = codes, shape, fl


def pair(numbers, first):
    """Return two numbers: a sequence is an image of one row."""
    return [first, *numbers][-2:]


def window(op, x, place, size, fill):
    """Yield what lies in a window, ``fill`` around it; None leaves that out."""
    (height, width), (row, column) = pair(x.shape[1:], 1), pair(place[1:], 0)
    (stride, across), (top, left) = pair(op["stride"], 1), pair(op["padding"], 0)
    down, right = pair(op.get("dilation", [1, 1])[: len(op["stride"])], 1)
    for i, j in product(*map(range, pair(size, 1))):
        y, z = row * stride - top + i * down, column * across - left + j * right
        if 0 <= y < height and 0 <= z < width:
            yield x.codes[(place[0] * height + y) * width + z]
        elif fill is not None:
            yield fill


def weighted(op, x, tensors):
    """Convolution and linear layer: sums of products, and a bias."""
    weight, shape, fls = tensors[op["weight"]]
    biases, _, bias_fl = tensors[op["bias"]] if op["bias"] else ([0] * shape[0], None, [op["fl"]])
    each, found = prod(shape[1:]), []
    for index in range(prod(op["shape"])):
        out, place = divmod(index, prod(op["shape"][1:]))
        if op["kind"] == "Linear":
            inputs = x.codes
        else:
            row, column = divmod(place, op["shape"][-1])
            first = out // (shape[0] // op["groups"]) * shape[1]
            inputs = [
                code
                for channel in range(first, first + shape[1])
                for code in window(op, x, (channel, row, column), shape[2:], 0)
            ]
        total = sum(code * weight[out * each + i] for i, code in enumerate(inputs))
        total <<= op["fl"] - x.fl - fls[out]
        found.append(total + (biases[out] << op["fl"] - bias_fl[0]))
    return found


def affine(op, x, tensors):
    """Batch normalisation: a scale and an offset in each channel."""
    scale, _, (scale_fl, *_) = tensors[op["scale"]]
    offset, _, (offset_fl, *_) = tensors[op["offset"]]
    left, right = op["fl"] - x.fl - scale_fl, op["fl"] - offset_fl
    parts = [i // prod(x.shape[1:]) for i in range(len(x.codes))]
    pairs = zip(parts, x.codes, strict=True)
    return [(c * scale[i] << left) + (offset[i] << right) for i, c in pairs]


def pooled(op, x, fill):
    """Yield the windows of every channel."""
    for place in product(*map(range, op["shape"])):
        yield list(window(op, x, place, op["kernel"], fill))


def average_pool(op, x, _tensors):
    """The mean of each window, zeros around the image included, rounded once."""
    return [round_to(sum(p), x.fl, op["fmt"], prod(op["kernel"])) for p in pooled(op, x, 0)]


def at(x, place):
    """Return the code at a place; sides of 1 are repeated."""
    steps = [prod(x.shape[i + 1 :]) for i in range(len(x.shape))]
    return x.codes[sum(i % n * step for i, n, step in zip(place, x.shape, steps, strict=True))]


def add(op, x, y):
    """Sum at the larger fl."""
    pairs = zip(x.codes, y.codes, strict=True)
    return [(a << op["fl"] - x.fl) + (b << op["fl"] - y.fl) for a, b in pairs]


def concat(op, *parts):
    """Values one behind the other along a dimension, at the largest fl."""
    axis, found = op["axis"], []
    for outer in range(prod(op["shape"][:axis])):
        for x in parts:
            size = prod(x.shape[axis:])
            codes = x.codes[outer * size : (outer + 1) * size]
            found += [code << op["fl"] - x.fl for code in codes]
    return found


def picked(op, x, _tensors):
    """Transpose, slice and zeros around: each code of the result is one of the source, or 0."""
    found = []
    for place in product(*map(range, op["shape"])):
        where = list(place)
        if op["kind"] == "Slice":
            where[op["axis"]] = op["start"] + where[op["axis"]] * op["step"]
        for i, dimension in enumerate(op.get("order", [])):
            where[dimension] = place[i]
        where = [i - n for i, n in zip(where, op.get("before", [0] * len(where)), strict=True)]
        is_inside = all(0 <= i < n for i, n in zip(where, x.shape, strict=True))
        found.append(at(x, where) if is_inside else 0)
    return found


KINDS = {
    "Add": add,
    "Mul": lambda op, x, y: [at(x, p) * at(y, p) for p in product(*map(range, op["shape"]))],
    "Concat": concat,
    "Clip": lambda op, x, _: [min(max(code, op["low"]), op["high"]) for code in x.codes],
    **dict.fromkeys(["Flatten", "Reshape"], lambda _op, x, _: x.codes),
    **dict.fromkeys(["Pad", "Slice", "Transpose"], picked),
    "Table": lambda op, x, tensors: [tensors[op["codes"]][0][c - op["low"]] for c in x.codes],
    "Round": lambda op, x, _: [round_to(code, x.fl, op["fmt"]) for code in x.codes],
    **dict.fromkeys(["Conv", "Linear"], weighted),
    "Affine": affine,
    "Relu": lambda _op, x, _: [max(code, 0) for code in x.codes],
    "MaxPool": lambda op, x, _: [max(codes) for codes in pooled(op, x, None)],
    "AveragePool": average_pool,
}


def run(network, tensors, sample):
    """Return the value of each output by its label, of one sample of floats."""
    first, *operations = network["operations"]
    assert len(sample) == (n := prod(first["shape"])), f"a sample is one flat list of {n} numbers"
    values = {first["name"]: Value(sample, first["shape"], 0)}
    for op in operations:
        taken = [values[name] for name in op["inputs"]]
        assert op["kind"] in KINDS, f"{op['kind']}: read_packed_transformers.py knows more kinds"
        if op["kind"] == "Round" and op["inputs"] == [first["name"]]:
            exact = [float(x).as_integer_ratio() for x in sample]
            codes = [round_to(n, 0, op["fmt"], d) for n, d in exact]
        else:
            codes = KINDS[op["kind"]](op, *taken, *[tensors][: "codes" in op or len(taken) < 2])
        values[op["name"]] = Value(codes, op["shape"], op["fl"])
    heads = network.get("heads") or [["output", operations[-1]["name"]]]
    return {label: values[name] for label, name in heads}


if __name__ == "__main__":  # of transformers: read_packed_transformers.py
    path = sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)
    outputs = run(*load(path), json.load(sys.stdin))
    print(json.dumps({label: [c * 2.0**-x.fl for c in x.codes] for label, x in outputs.items()}))
