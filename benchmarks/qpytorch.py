"""QPyTorch, which compiles C++ when it is first imported."""

import os
import shutil
from pathlib import Path
from types import ModuleType

__all__ = ["load"]


def load() -> ModuleType | None:
    """Return ``qtorch.quant``; None where it, ninja or g++ is missing."""
    if not (shutil.which("ninja") and shutil.which("g++")):
        return None
    folder = Path("build/torch_extensions").absolute()  # away from locks of other builds
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder))
    try:
        import qtorch.quant
    except ImportError:
        return None
    return qtorch.quant
