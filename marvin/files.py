"""Files and folders that are either whole or not there."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["new_folder", "remove_leftovers", "write_atomic"]


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace ``path`` by ``content`` at once.

    Whoever reads ``path``, even after a kill or a power cut in the middle of the writing, finds
    the old content or the new one, never a mixture. Folders that ``path`` lacks are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files private
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Delete what ``write_atomic`` had not finished in ``folder`` when its process was killed."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to write to, which takes the place of ``path`` once the block has ended well.

    An exception in the block leaves ``path`` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        if path.exists():
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
            os.replace(path, old / path.name)
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable, where the system can."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
