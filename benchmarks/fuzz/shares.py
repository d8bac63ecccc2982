"""How inputs are shared out over targets; nothing here imports torch."""

from collections.abc import Sequence

# of about 1,000; the quicker a target, the more
SHARES = {
    "quantize": 200,
    "quantize_outs": 30,
    "quantize_many": 100,
    "lazy": 30,
    "codes": 120,
    "pack": 120,
    "histogram": 70,
    "expected": 20,
    "push_down": 20,
    "few_bit": 60,
    "few_bit_codes": 60,
    "division": 40,
    "block": 50,
    "observe": 60,
    "products": 15,
    "gradients": 30,
    "integer": 15,
    "export": 3,
    "packed": 20,
    "hostile": 30,
    "operators": 60,
}
# those whose kernels the other executions have, whole
_KERNELS = "quantize codes pack histogram expected few_bit few_bit_codes division block observe products gradients"
_OF_EXECUTIONS = {
    "cpu": list(SHARES),
    "pytorch": _KERNELS.split(),
    "interpreter": [*_KERNELS.split(), "quantize_many"],
}


def counts_of(total: int, targets: Sequence[str] | None, execution: str) -> dict[str, int]:
    """Share out a number of inputs; each target gets one at least.

    Raises:
        ValueError: There is no such target in this execution.
    """
    names = _OF_EXECUTIONS[execution]
    if unknown := sorted(set(targets or ()) - set(names)):
        raise ValueError(f"targets must be of {', '.join(names)}, got {', '.join(unknown)}")
    chosen = [name for name in names if targets is None or name in targets]
    whole = sum(SHARES[name] for name in chosen)
    return {name: max(1, total * SHARES[name] // whole) for name in chosen}
