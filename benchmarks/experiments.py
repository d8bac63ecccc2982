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
    """

    question: str
    common: tuple[str, ...]
    variants: dict[str, tuple[str, ...]]
    has_word_lengths: bool = False


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


EXPERIMENTS = {
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
