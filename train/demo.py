"""``python -m train.demo``: ResNet20 on the embedded digits, fixed point and integers beside float32."""

from perfmodel.arguments import (
    Parser,
    give_up_output,
    message_of,
    reader_may_leave,
    stop,
    stop_at_interrupt,
)

PARSER = Parser(
    "python -m train.demo",
    """Train ResNet20 on the embedded digits, in float32 and in fixed point, and compare.

In fixed point twice: simulated by MSGD, and on the integer units of the CPU by the loss budget, where
it has them. Takes some minutes, and has no options: python -m train.resnet20 --help lists those of a
run. What an earlier call began in runs/demo-sgd, demo-msgd and demo-int8 is finished.""",
)

if __name__ == "__main__":  # --help and slips are answered before torch loads
    stop_at_interrupt()
    PARSER.parse_args()

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from fixedpoint_kernels import products
from perfmodel.files import CONFIG, TIMING
from perfmodel.run import read_run
from perfmodel.summary import totals
from train import resnet20
from train.config import Config
from train.main import ERRORS, own_process, run
from train.records import TIMES, RunFolder, read_csv

__all__ = ["main"]

RUNS = Path("runs")
DEMO = replace(resnet20.DEFAULTS, dataset="digits", epochs=40, batch_size=64, plateau_patience=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "msgd": {},
    "int8": {"policy": "loss-budget", "execution": "int8"},
}
NAMES = {
    "sgd": "float32",
    "msgd": "fixed point, simulated",
    "int8": "fixed point, on integer units",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train all, or finish what an earlier call began, and print the comparison."""
    PARSER.parse_args(argv)
    with reader_may_leave():
        _compare()


def _compare() -> None:
    results = {}
    for name, settings in SETTINGS.items():
        if name == "int8" and not (path := products.path()).is_own:
            print(f"No run on integer units: {path.name}, {path.reason}")
            continue
        folder = RUNS / f"demo-{name}"
        config = replace(DEMO, run=str(folder), resume=(folder / CONFIG).exists(), **settings)
        print(f"ResNet20 on handwritten digits, {NAMES[name]}", flush=True)
        try:
            results[name] = train(config)
        except BrokenPipeError:
            give_up_output()
            sys.exit("stopped; the same command continues from the last checkpoint")
        except ERRORS as error:
            sys.exit(f"python -m train.demo: error: {message_of(error)}")
        except KeyboardInterrupt:
            stop("stopped; the same command continues from the last checkpoint")
    print(comparison(results))


def train(config: Config) -> dict[str, Any]:
    """Train as configured; return the stored result, the speed, and the modelled costs."""
    own_process(config)
    run(config, resnet20.resnet20, resnet20.MIN_SIDE)
    folder = RunFolder(Path(config.run))
    speeds = [float(row["images_per_s"]) for row in read_csv(folder.path / TIMING, TIMES)]
    return folder.read_result() | {"images_per_s": median(speeds)} | modelled(config)


def modelled(config: Config) -> dict[str, float]:
    """Return SU, MEM and SZ of a run; none of one in float32."""
    if config.method == "sgd":
        return {}
    return {t.name: t.value for t in totals(read_run(Path(config.run)))}


def comparison(results: dict[str, dict[str, Any]]) -> str:
    """Return what a reader wants to see of the runs, a column each."""
    heads = {"sgd": "float32 SGD", "msgd": "MSGD", "int8": "int8"}
    rows = [
        ("test accuracy", "test_accuracy", ".2%", ""),
        ("weights, mean bits", "mean_word_length", ".1f", "32"),
        ("inputs, mean bits", "mean_input_word_length", ".1f", "32"),
        ("images a second", "images_per_s", ",.0f", ""),
        ("speedup SU, modelled", "SU", ".2f", "1"),
        ("  without the search", "SU, no search", ".2f", "1"),
        ("  of inference", "SU, inference", ".2f", "1"),
        ("word lengths MEM", "MEM", ".2f", "1"),
        ("model size SZ", "SZ", ".2f", "1"),
    ]
    table = [f"{'':24}" + "".join(f"{heads[name]:>14}" for name in results)]
    for label, key, form, of_float in rows:
        cells = (
            format(own[key], form) if own.get(key) is not None else (of_float or "-")
            for own in results.values()
        )
        table.append(f"{label:24}" + "".join(f"{cell:>14}" for cell in cells))
    msgd = results["msgd"]
    return "\n".join(
        [
            "",
            *table,
            f"({msgd['test_images']} test images, {msgd['epochs']} epochs, one seed; images a second: "
            "median of the epochs, on this machine)",
            "",
            "word lengths  runs/demo-msgd/word_lengths.png",
            "by layer      .venv/bin/python -m perfmodel runs/demo-msgd",
            "TensorBoard   .venv/bin/tensorboard --logdir runs",
        ]
    )


if __name__ == "__main__":
    main()
