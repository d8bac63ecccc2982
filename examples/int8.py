"""Train on digits for integer hardware, export to ONNX int8, run that in ONNX Runtime.

python examples/int8.py
"""

import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torch.nn.functional as F

import marvin
from marvin.export import Network, describe, integer, onnx, round_sums
from train.augment import batch
from train.data import load
from train.resnet20 import resnet20

DIGITS = load("digits", Path("data"))
IMAGES, LABELS = batch(DIGITS.train, torch.arange(len(DIGITS.train)), DIGITS)
TEST, TEST_LABELS = batch(DIGITS.test, torch.arange(len(DIGITS.test)), DIGITS)


def train(steps: int, width: int) -> Network:
    """Return a trained network: 4 to 8 bits a layer, as many as its share of the loss needs."""
    torch.manual_seed(0)
    model = resnet20(10, DIGITS.channels, width)
    marvin.tnvs_(model)
    sgd = torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    optimizer = marvin.Quantized(sgd, marvin.LossBudgetPolicy())
    marvin.quantize_activations(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(IMAGES), (64,))
        loss = F.cross_entropy(model(IMAGES[chosen]), LABELS[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
        schedule.step()
    print(f"trained: {accuracy(model.eval()(TEST)):.2%}, {optimizer.mean_word_length():.1f} bits")
    network = describe(model, IMAGES[:512], optimizer.formats())
    return round_sums(network, IMAGES[:512])  # integer hardware adds bytes


def accuracy(logits: torch.Tensor) -> float:
    """Return the share of right answers on the test images."""
    return float((logits.argmax(1) == TEST_LABELS).double().mean())


def session(model: Any) -> onnxruntime.InferenceSession:
    """Return a model as ONNX Runtime runs it, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def seconds(run: onnxruntime.InferenceSession, name: str) -> float:
    """Return the shortest of some runs over the test images."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        run.run(None, {name: TEST.numpy()})
        times.append(time.perf_counter() - start)
    return min(times)


def main(steps: int = 400, width: int = 16, path: Path = Path("digits-int8.onnx")) -> None:
    """Train, export, run, compare."""
    network = train(steps, width)
    size, name = onnx.save(network, path, "int8"), network.input.name
    exported = session(str(path))
    (logits,) = exported.run(None, {name: TEST.numpy()})
    is_equal = torch.equal(torch.from_numpy(logits).double(), integer.run(network, TEST))
    print(f"{path}: {size:,} bytes, {accuracy(torch.from_numpy(logits)):.2%}")
    print("equal to the integer reference" if is_equal else "NOT equal to the integer reference")
    floats = session(onnx.original(network).SerializeToString())
    print(f"{seconds(floats, name) / seconds(exported, name):.2f} times as fast as float32")


if __name__ == "__main__":
    main()
