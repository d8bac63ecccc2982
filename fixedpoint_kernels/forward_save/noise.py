"""The noise of a conversion: a seed, and a count of the tensors packed so far."""

import operator
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fixedpoint_kernels.forward_save.swap import check_model
from fixedpoint_kernels.philox import Key

__all__ = ["load_state", "new_noise", "state"]


def new_noise(seed: int) -> Tensor:
    """Return int64 ``(seed, 0)``.

    Raises:
        ValueError: ``seed`` is outside 0 to 2**63 - 1.
    """
    with torch.inference_mode(False):  # it is written to later, where that is off
        return torch.tensor(Key.checked(seed, 0)[:2], dtype=torch.int64, device="cpu")


def state(model: nn.Module) -> dict[str, int]:
    """Return what decides the noise to come: ``seed`` and ``count``; empty where there is none.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: Parts of ``model`` were converted one by one.
    """
    check_model(model, "state")
    found = _noise(model)
    if found is None:
        return {}
    seed, count = found.tolist()
    return {"seed": seed, "count": count}


def load_state(model: nn.Module, state: Mapping[str, int]) -> None:
    """Continue the noise from what ``state`` returned.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``state`` is of another kind of conversion, or parts of ``model`` were converted
            one by one.
    """
    check_model(model, "load_state")
    found = _noise(model)
    wanted = set() if found is None else {"seed", "count"}
    if set(state) != wanted:
        raise ValueError(f"the state must have {sorted(wanted)}, got {sorted(state)}")
    if found is not None:
        key = Key.checked(operator.index(state["seed"]), operator.index(state["count"]))
        found.copy_(torch.tensor(key[:2], device="cpu"))


def _noise(model: nn.Module) -> Tensor | None:
    """Return the one noise that the layers of ``model`` share, if any has one."""
    found = {name: vars(m)["_noise"] for name, m in model.named_modules() if "_noise" in vars(m)}
    first = next(iter(found), None)
    for name, noise in found.items():
        if noise is not found[first]:
            raise ValueError(
                f"the model must be of one conversion, got layers {first!r} and {name!r} of two: "
                "take the state of each converted part"
            )
    return None if first is None else found[first]
