"""``python -m train.demo``: ResNet20 on the embedded digits, fixed point beside float32."""

from perfmodel.arguments import Parser, message_of

PARSER = Parser(
    "python -m train.demo",
    """Train ResNet20 on the embedded digits, in float32 and in fixed point, and compare.

Takes some minutes on a CPU, and has no options: python -m train.resnet20 --help lists those of a
run. What an earlier call began in runs/demo-sgd and runs/demo-msgd is finished.""",
)

if __name__ == "__main__":  # --help and slips are answered before torch loads
    PARSER.parse_args()

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfmodel.files import CONFIG
from perfmodel.run import read_run
from perfmodel.summary import totals
from train import resnet20
from train.config import Config
from train.main import ERRORS, own_process, run
from train.records import RunFolder

__all__ = ["main"]

RUNS = Path("runs")
DEMO = replace(resnet20.DEFAULTS, dataset="digits", epochs=40, batch_size=64, plateau_patience=4)


def main(argv: Sequence[str] | None = None) -> None:
    """Train both, or finish what an earlier call began, and print the comparison."""
    PARSER.parse_args(argv)
    results = {}
    for optimizer, meaning in (("sgd", "float32"), ("msgd", "fixed point")):
        folder = RUNS / f"demo-{optimizer}"
        config = replace(DEMO, optimizer=optimizer, run=str(folder))
        print(f"ResNet20 on handwritten digits, {meaning}", flush=True)
        try:
            results[optimizer] = train(replace(config, resume=(folder / CONFIG).exists()))
        except ERRORS as error:
            sys.exit(f"python -m train.demo: error: {message_of(error)}")
        except KeyboardInterrupt:
            sys.exit("\nstopped; the same command continues from the last checkpoint")
    print(comparison(results, modelled()))


def train(config: Config) -> dict[str, Any]:
    """Train as configured; return the stored result."""
    own_process(config)
    run(config, resnet20.resnet20, resnet20.MIN_SIDE)
    return RunFolder(Path(config.run)).read_result()


def modelled() -> dict[str, float]:
    """Return SU, MEM and SZ of the run in fixed point."""
    return {t.name: t.value for t in totals(read_run(RUNS / "demo-msgd"))}


def comparison(results: dict[str, dict[str, Any]], model: dict[str, float]) -> str:
    """Return what a reader wants to see of both runs."""
    sgd, msgd = results["sgd"], results["msgd"]
    rows = [
        ("speedup SU, modelled", "SU"),
        ("  without the search", "SU, no search"),
        ("  of inference", "SU, inference"),
        ("word lengths MEM", "MEM"),
        ("model size SZ", "SZ"),
    ]
    return "\n".join(
        [
            "",
            f"{'':24}{'float32 SGD':>14}{'MSGD':>14}",
            f"{'test accuracy':24}{sgd['test_accuracy']:>14.2%}{msgd['test_accuracy']:>14.2%}",
            f"{'mean word length, bits':24}{32:>14}{msgd['mean_word_length']:>14.1f}",
            *(f"{label:24}{1:>14}{model[name]:>14.2f}" for label, name in rows),
            f"({msgd['test_images']} test images, {msgd['epochs']} epochs, one seed)",
            "",
            "word lengths  runs/demo-msgd/word_lengths.png",
            "by layer      .venv/bin/python -m perfmodel runs/demo-msgd",
            "TensorBoard   .venv/bin/tensorboard --logdir runs",
        ]
    )


if __name__ == "__main__":
    main()
