"""Compute with packed transformers: ``read_packed.py``, which lies beside this, and five operations more.

    python read_packed_transformers.py network.safetensors < sample.json

The sample is a list of numbers, or of indices where the network begins with an embedding.
"""

import json
import sys
from math import isqrt, prod

import read_packed
from read_packed import round_to


def rows_of(x):
    """Return the codes of each row: of the last dimension."""
    n = x.shape[-1]
    return [x.codes[i : i + n] for i in range(0, len(x.codes), n)]


def shorten(code, shift):
    """Return the nearest multiple of ``2**shift``, as a multiple; the larger of two as near."""
    return code + (1 << shift >> 1) >> shift


def embedding(op, x, tensors):
    """The rows of a table that the sample's indices choose."""
    weight, (count, width), _ = tensors[op["weight"]]
    assert all(i == int(i) and 0 <= i < count for i in x.codes), "indices must be rows"
    return [code for i in x.codes for code in weight[int(i) * width : (int(i) + 1) * width]]


def matmul(op, x, y):
    """Products of matrices, one behind the other."""
    (m, k), n, found = x.shape[-2:], y.shape[-1], []
    for matrix in range(prod(x.shape[:-2])):
        left, right = x.codes[matrix * m * k :], y.codes[matrix * k * n :]
        for i in range(m):
            row = left[i * k : (i + 1) * k]
            found += [sum(a * right[t * n + j] for t, a in enumerate(row)) for j in range(n)]
    return found


def norm(op, x, tensors):
    """Layer normalisation, or RMS normalisation, of each row."""
    gain, _, (gain_fl, *_) = tensors[op["gain"]]
    bias = tensors[op["bias"]][0] if op["bias"] else [0] * len(gain)
    n, k, found = len(gain), op["precision"], []
    for row in rows_of(x):
        row = [shorten(code, op["shift"]) for code in row]
        total = sum(row) if op["is_centered"] else 0
        variance = n * sum(code * code for code in row) - total * total + op["epsilon"]
        root = max(1, isqrt(variance << 2 * k))
        for code, g, b in zip(row, gain, bias, strict=True):
            top = ((n * code - total) * g << k) + b * root
            found.append(round_to(top, gain_fl, op["fmt"], root))
    return found


def softmax(op, x, *more):
    """Softmax of each row, by a table of exponentials; of columns that a mask or the sample hides, nothing."""
    *columns, tensors = more
    table, found, (height, width) = tensors[op["codes"]][0], [], ([1, *x.shape])[-2:]
    mask = tensors[op["mask"]][0] if op["mask"] else [1] * (height * width)
    known = columns[0].codes if columns else [1] * width
    for i, row in enumerate(rows_of(x)):
        first = i % height * width
        seen = [a and b for a, b in zip(mask[first : first + width], known, strict=True)]
        top = max((code for code, is_seen in zip(row, seen, strict=True) if is_seen), default=0)
        parts = [0] * width
        for j, code in enumerate(row):
            if seen[j]:
                parts[j] = table[min(shorten(top - code, op["shift"]), len(table) - 1)]
        found += [round_to(part, 0, op["fmt"], max(1, sum(parts))) for part in parts]
    return found


read_packed.KINDS |= {
    "Constant": lambda op, tensors: tensors[op["codes"]][0],
    "Embedding": embedding,
    "MatMul": matmul,
    "Norm": norm,
    "Softmax": softmax,
}
KINDS, load, run = read_packed.KINDS, read_packed.load, read_packed.run

if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)
    outputs = run(*load(path), json.load(sys.stdin))
    print(json.dumps({label: [c * 2.0**-x.fl for c in x.codes] for label, x in outputs.items()}))
