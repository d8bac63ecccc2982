"""The papers' experiments: what is compared, as flags of the training scripts."""

from dataclasses import dataclass

__all__ = ["EXPERIMENTS", "Experiment"]


@dataclass(frozen=True)
class Experiment:
    """One comparison.

    Args:
        question: What it answers, one line.
        common: Flags that all its runs have.
        variants: The flags of each, by the name it has in the table; the first is what the
            others are compared with.
        has_word_lengths: Whether the table shows word lengths and modelled costs.
        note: What a reader of the table must know.
    """

    question: str
    common: tuple[str, ...]
    variants: dict[str, tuple[str, ...]]
    has_word_lengths: bool = False
    note: str = ""


def _few_bit(bits: int) -> tuple[str, ...]:
    return "--forward-save", "few-bit", "--bits", str(bits)


def _division(bits: int, method: str = "division") -> tuple[str, ...]:
    return (
        "--forward-save",
        "division",
        "--division-bits",
        str(bits),
        "--division-method",
        method,
    )


PLAIN = "--no-normalize-gradients"
HELD_OUT = (
    "The last tenth of the training images is held out: it drives the learning rate and is what "
    "hyper-parameters such as kappa are chosen by. The test images are looked at once, at the end "
    "of each run. Bits are means over the layers when a run ends, in parentheses weighted by "
    "number of elements; MuPPET rounds layers' outputs in place of inputs. Budget alone is the "
    "loss budget 0.01 without a limit of noise. Clamped is the share of activations in the last "
    "epoch, if the run was not stopped within it."
)


def _static(bits: int) -> tuple[str, ...]:
    return "--policy", "static", "--policy-bits", str(bits), str(bits)


def _loss_budget(kappa: str) -> tuple[str, ...]:
    return "--policy", "loss-budget", "--kappa", kappa


POLICIES = {
    "float32": ("--policy", "none"),  # gradients normalised, as MSGD's are
    "float32, plain": ("--policy", "none", PLAIN),
    "MARViN": ("--policy", "marvin"),
    "MuPPET": ("--policy", "muppet", PLAIN),  # made for plain gradients
    "fixed:8,4": ("--policy", "fixed:8,4"),
    **{f"static {bits}": _static(bits) for bits in (8, 6, 5, 4)},
    **{f"loss budget {kappa}": _loss_budget(kappa) for kappa in ("0.003", "0.01", "0.03")},
    "budget alone": (*_loss_budget("0.01"), "--max-noise", "1000", "1000"),
}


INTEGERS = "--execution", "int8"
TARGETS = {
    "target 5 bits": ("--policy", "loss-budget", "--target-bits", "5", *INTEGERS),
    "target 4 bits": (
        *("--policy", "loss-budget", "--target-bits", "4", "--policy-bits", "3", "8", *INTEGERS),
    ),
}
FULL_SIZE = {
    "float32": ("--policy", "none"),
    "loss budget": ("--policy", "loss-budget", *INTEGERS),
    **TARGETS,
    **{f"{name}, late": (*flags, "--late") for name, flags in TARGETS.items()},
    **{f"static {bits}": (*_static(bits), "--ends-bits", "8", *INTEGERS) for bits in (5, 4)},
}
RECIPE = (  # the field's: plain gradients, a cosine to 0, all training images
    *(
        "--validation-share",
        "0",
        "--batch-size",
        "128",
        "--schedule",
        "cosine",
        "--lr",
        "0.1",
        PLAIN,
    ),
)

EXPERIMENTS = {
    "full-size": Experiment(
        "how many bits does a network of full width need for the accuracy of float32?",
        RECIPE,
        FULL_SIZE,
        has_word_lengths=True,
        note="All training images are trained on; the test images are looked at once, at the end of "
        "each run. All but float32 train on integer units (--execution int8). Bits are means over the "
        "layers when a run ends, in parentheses weighted by number of elements. Static: the first and "
        "the last layer have 8 bits, as is usual. Late: 8 bits until the rate has fallen to half.",
    ),
    "states": Experiment(
        "what do optimizer states in few bytes cost in accuracy?",
        RECIPE,
        {
            "float32 states": FULL_SIZE["loss budget"],
            "compact states": (*FULL_SIZE["loss budget"], "--compact-state"),
        },
        has_word_lengths=True,
        note="All images that are named are trained on; the test images are looked at once, at the end of "
        "each run. Both train on integer units (--execution int8). Bits are means over the layers "
        "when a run ends, in parentheses weighted by number of elements.",
    ),
    "policies": Experiment(
        "which policy reaches the accuracy of float32 at how many bits?",
        (),
        POLICIES,
        has_word_lengths=True,
        note=HELD_OUT,
    ),
    "muppet": Experiment(
        "how do MARViN, MuPPET and fixed word lengths compare?",
        (),
        {name: POLICIES[name] for name in ("float32", "MARViN", "MuPPET", "fixed:8,4")},
        has_word_lengths=True,
        note=HELD_OUT,
    ),
    "marvin": Experiment(
        "does training in fixed point reach the accuracy of float32?",
        (),
        {"float32": ("--optimizer", "sgd"), "MARViN": ("--optimizer", "msgd")},
        has_word_lengths=True,
    ),
    "few-bit": Experiment(
        "what do few-bit gradients of GELU cost?",
        ("--optimizer", "sgd", "--activation", "gelu"),
        {
            "exact": (),
            **{f"{bits} bits" if bits > 1 else "1 bit": _few_bit(bits) for bits in (1, 2, 3, 4)},
        },
    ),
    "division": Experiment(
        "what does it cost to keep activation maps at dual precision, and what the alternatives?",
        ("--optimizer", "sgd"),
        {
            "exact": (),
            "DIVISION, 8 bits": _division(8),
            "DIVISION, 2 bits": _division(2),
            "low frequencies alone": _division(2, "low"),
            "high frequencies alone, 2 bits": _division(2, "high"),
            "2 bits, a range a plane": _division(2, "fixed"),
            "2 bits, a range for 256 (ActNN)": _division(2, "per_group"),
        },
    ),
}
