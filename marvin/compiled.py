"""Whether a compiler or an export follows what is computed, and what it cannot follow."""

import torch
from torch import nn

from fixedpoint_kernels._torch_private.compiling import uncompiled
from fixedpoint_kernels.memory import is_exported

__all__ = ["check_not_exported", "check_uncompiled", "check_untraced", "is_exported", "is_traced"]


def check_uncompiled(model: nn.Module, call: str) -> None:
    """Refuse what ``torch.compile`` or ``torch.jit`` returned where the model that it was given is meant.

    Raises:
        TypeError: It is that.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"the model must come as it was before torch.jit: write {call} with that model"
        )
    if uncompiled(model) is not model:
        raise TypeError(
            f"the model must come as it was before torch.compile: write {call} with that model, and "
            "compile it afterwards"
        )


def is_traced() -> bool:
    """Say whether ``torch.compile`` or ``torch.jit`` follows what is computed."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def check_untraced() -> None:
    """Refuse rounding in a trace of ``torch.jit``, which would keep the values of its sample.

    Raises:
        RuntimeError: There is such a trace.
    """
    if torch.jit.is_tracing():
        instead = "torch.jit.trace(marvin.freeze(model), sample), and torch.onnx.export or add_graph alike"
        raise _for_inference("trace", instead)


def check_not_exported() -> None:
    """Refuse to read formats in ``torch.export``, which has no values of them.

    Raises:
        RuntimeError: There is such an export.
    """
    if torch.compiler.is_exporting():
        raise _for_inference("export", "torch.export.export(marvin.freeze(model), (sample,))")


def _for_inference(verb: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"a model to {verb} must be one for inference, got one that an optimizer may change still: "
        f"write {instead}"
    )
