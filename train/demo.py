"""``python -m train.demo``: ResNet20 on the embedded digits, fixed point beside float32."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from train import resnet20
from train.config import Config
from train.files import UserError
from train.main import own_process, run

__all__ = ["main"]

DEMO = replace(resnet20.DEFAULTS, dataset="digits", epochs=40, batch_size=64, plateau_patience=4)


def main() -> None:
    """Train both, or finish what an earlier call began, and print the comparison."""
    results = {}
    for optimizer, meaning in (("sgd", "float32"), ("msgd", "fixed point")):
        folder = Path("runs") / f"demo-{optimizer}"
        config = replace(DEMO, optimizer=optimizer, run=str(folder))
        print(f"ResNet20 on handwritten digits, {meaning}", flush=True)
        try:
            results[optimizer] = train(replace(config, resume=folder.exists()))
        except UserError as error:
            sys.exit(f"python -m train.demo: error: {error}")
    print(comparison(results))


def train(config: Config) -> dict[str, Any]:
    """Train as configured; return the stored result."""
    own_process(config)
    run(config, resnet20.resnet20, resnet20.MIN_SIDE)
    return json.loads((Path(config.run) / "result.json").read_text())


def comparison(results: dict[str, dict[str, Any]]) -> str:
    """Return what a reader wants to see of both runs."""
    sgd, msgd = results["sgd"], results["msgd"]
    return "\n".join(
        [
            "",
            f"{'':24}{'float32 SGD':>14}{'MSGD':>14}",
            f"{'test accuracy':24}{sgd['test_accuracy']:>14.2%}{msgd['test_accuracy']:>14.2%}",
            f"{'mean word length, bits':24}{32:>14}{msgd['mean_word_length']:>14.1f}",
            f"({msgd['test_images']} test images, {msgd['epochs']} epochs, one seed)",
            "",
            "word lengths  runs/demo-msgd/word_lengths.png",
            "TensorBoard   .venv/bin/tensorboard --logdir runs",
        ]
    )


if __name__ == "__main__":
    main()
