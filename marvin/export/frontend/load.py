"""A frozen model from a file, of which no code runs."""

import importlib
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from marvin.export.errors import ExportError
from marvin.freezing import frozen_formats, saved_classes
from marvin.integer.conversion import revert
from marvin.integer.formats import Options
from marvin.integer.fusion import Fused
from marvin.integer.layers import CLASSES, OTHERS, integer_class
from marvin.saved_file import check_calls, check_records

__all__ = ["load_frozen", "load_tensor"]

_WRITE = "write torch.save(marvin.freeze(model), path)"
_OURS = "marvin.", "fixedpoint_kernels."
_INTEGER = Fused, Options, *CLASSES.values()
_LAYERS = [getattr(nn, name) for name in nn.modules.__all__]
_NAMED = {
    f"marvin.integer.layers.{own}": path for path, own in OTHERS.items()
}  # who allows the second allows the first


def load_frozen(path: str | Path, allow: Sequence[str] = ()) -> nn.Module:
    """Return the frozen model that ``torch.save(marvin.freeze(model), path)`` wrote, in eval mode.

    Layers that multiply integers (``marvin.integer.convert``) become torch's own again, which
    compute the same. Nothing in the file is run. It can make objects of torch's layers and of what freezing adds to
    them, of what it says they have; no constructor of theirs is called. Of classes that the caller allows it may be.

    Args:
        path: Of the file.
        allow: Classes of one's own in the model, as ``"package.module:Class"``, and those of other packages, such as
            ``"transformers.pytorch_utils:Conv1D"``. They are imported.
            Classes of these names of the script or notebook that wrote the file are allowed too.

    Raises:
        ExportError: The file is damaged, or holds something else, or an object of a class that is
            not allowed; says which, and what to write.
        TypeError: ``path`` is no path, or ``allow`` no list of names.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be that of a file, got {type(path).__name__}: {_WRITE}")
    _check_names(allow)
    own = [_imported(name) for name in allow]
    kinds = (integer_class(kind) for kind in own if isinstance(kind, type))
    own += [kind for kind in kinds if kind is not None]
    _check_whole(path)
    scripts = [_of_script(found) for found in own]
    names = [*map(_full_name, own), *(name for _, name in scripts)]
    with safe_globals([*saved_classes(), *_LAYERS, *_INTEGER, *own, *scripts]):
        try:
            unknown = get_unsafe_globals_in_checkpoint(path)
            model: Any = None if unknown else _load(path, names)
        except Exception as error:  # torch raises six kinds for six ways of damage
            raise _damaged(path, error) from error
    if unknown:
        raise ExportError(_refusal(path, sorted(unknown)))
    if not isinstance(model, nn.Module):
        raise ExportError(f"{path} must hold a model, got {type(model).__name__}: {_WRITE}")
    try:
        frozen_formats(model)
    except Exception as error:  # what is in a foreign file may be of any type
        raise ExportError(f"{path} must hold a frozen model: {error}: {_WRITE}") from error
    revert(model)
    return model.eval()  # in train mode, comparing would move the averages of batch normalisation


def load_tensor(path: str | Path) -> Tensor:
    """Return a tensor from a file of ``numpy.save``, or of ``torch.save``; no code of it runs.

    Raises:
        ExportError: The file is damaged, or holds something else.
    """
    if Path(path).suffix == ".npz":
        raise ExportError(
            f"{path} must be one array of numpy.save or a tensor of torch.save, got a file of numpy.savez: write "
            "numpy.save('inputs.npy', array)"
        )
    is_numpy = Path(path).suffix == ".npy"
    _check_there(path)
    if not is_numpy:
        _check_whole(path, "numpy.save (.npy), or of torch.save")
    try:
        found: Any = _array(path) if is_numpy else _load(path)
    except OSError:
        raise
    except Exception as error:
        required = "numpy.save, an array of numbers" if is_numpy else "torch.save"
        raise _damaged(path, error, required) from error
    if not isinstance(found, Tensor):
        raise ExportError(f"{path} must hold a tensor, got {type(found).__name__}")
    return found.detach()


def _array(path: str | Path) -> Tensor:
    """Return an array of ``numpy.save``; torch takes no bytes in another order than this machine's."""
    array = np.load(path, allow_pickle=False)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def _load(path: str | Path, own: Collection[str] = ()) -> Any:
    with Path(path).open("rb") as file:
        check_calls(file, own)
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_names(allow: object) -> None:
    """Refuse what is no list of names: one name would be read letter by letter."""
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        kind, name = type(allow).__name__, allow if isinstance(allow, str) else "nets:Own"
        raise TypeError(f"allow must be a list of names, got {kind}: write allow=[{name!r}]")
    for found in allow:
        if not isinstance(found, str):
            is_class = isinstance(found, type)
            name = f"{found.__module__}:{found.__qualname__}" if is_class else "nets:Own"
            raise TypeError(
                f"allow must be a list of names, got {found!r:.80} in it: write allow=[{name!r}]"
            )


def _imported(name: str) -> Any:
    module, _, qualified = name.partition(":")
    if not module or not qualified:
        raise ExportError(f"a class to allow must be package.module:Class, got {name!r:.80}")
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ExportError(f"--allow {name} must be there to be imported: {error}") from error
    return found


def _of_script(found: Callable[..., object]) -> tuple[Callable[..., object], str]:
    """Return a class, and the name it has in a file that its own script wrote."""
    return found, f"__main__.{getattr(found, '__qualname__', '')}"


def _full_name(found: object) -> str:
    return f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"


def _refusal(path: str | Path, unknown: Sequence[str]) -> str:
    """Return what to write where a file has objects of classes that are not allowed."""
    unknown = sorted({_NAMED.get(name, name) for name in unknown})
    if any(name.startswith(_OURS) for name in unknown):
        return f"{path} must hold a frozen model, got one that is not: {_WRITE}"
    for name in unknown:
        if name.startswith("__main__."):
            own = name.removeprefix("__main__.")
            return (
                f"{path} has {own}, a class of the script or notebook that wrote it: have it in a file "
                f"that can be imported without training, such as nets.py, and add --allow nets:{own}"
            )
    flags = " ".join(f"--allow {':'.join(name.rsplit('.', 1))}" for name in unknown)
    named = ", ".join(unknown)
    return f"{path} has classes that are not torch's, {named}: if you trust them, add {flags}"


def _check_there(path: str | Path) -> None:
    if not Path(path).is_file():
        raise ExportError(f"{path} must be a file, found none")


def _check_whole(path: str | Path, required: str = "torch.save") -> None:
    """Compare each record of a file with its checksum, which ``torch.load`` does not."""
    _check_there(path)
    try:
        with Path(path).open("rb") as file:
            check_records(file)
    except Exception as error:
        raise _damaged(path, error, required) from error


def _damaged(path: str | Path, error: Exception, required: str = "torch.save") -> ExportError:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
    with suppress(OSError), Path(path).open("rb") as file:
        if file.read(9)[8:] == b"{":  # a length, then JSON
            reason = "one of safetensors: marvin.export.packed.load reads packed files"
    return ExportError(f"{path} must be a whole file of {required}, got {reason}")
