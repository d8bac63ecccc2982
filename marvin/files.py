"""Files and folders that are either whole or not there, and the lock on a folder."""

import contextlib
import datetime
import errno
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = [
    "GONE",
    "LOCK",
    "Locked",
    "gone_folder",
    "lock_folder",
    "new_folder",
    "remove_leftovers",
    "write_atomic",
]

LOCK = ".lock"
GONE = "was moved or removed while this process wrote it"
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}
_NO_FILE = "{0} must be a file of its own, got {1}: nothing is kept in it, so delete {0}"
_HELD: dict[Path, int] = {}
"""Folders that this process locks, with the open files of their locks."""
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no link, no waiting


class Locked(RuntimeError):
    """A folder that cannot be locked; says who holds it, or what is wrong with its lock."""


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[str]:
    """Be the only process that locks ``folder``, which is made if need be.

    The system's lock on the file ``.lock`` ends with the block, or with the process, however that
    ends. The file stays; what is in it only tells others who holds the lock. Where the folder is moved
    or removed meanwhile, ``write_atomic`` writes nothing there: another run may have its place.

    Yields:
        ``""``, or a sentence for the user where the file system has no locks.

    Raises:
        Locked: Another process holds the lock, or ``.lock`` is no file of the folder's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle, place = _open_lock(folder / LOCK), folder.absolute()
    try:
        is_ours = _lock(handle)
        if is_ours is False:
            raise Locked(f"{folder} is being written by {_read(handle)}: wait until that has ended")
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        _write(handle, f"process {os.getpid()} on {platform.node()}, since {since}")
        _HELD[place] = handle
        yield "" if is_ours else f"no locks here: let no other process write to {folder}"
        _write(handle, "")
    finally:
        if _HELD.get(place) == handle:
            del _HELD[place]
        os.close(handle)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace ``path`` by ``content`` at once.

    Whoever reads ``path``, even after a kill or a power cut in the middle of the writing, finds
    the old content or the new one, never a mixture. Folders that ``path`` lacks are made.

    Raises:
        OSError: The disk is full, or takes it no more for another reason; ``path`` is named. Or a folder
            around it, which this process locks, was moved or removed.
    """
    if (gone := gone_folder(path)) is not None:
        raise OSError(errno.ENOENT, f"it {GONE}", str(gone))
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = _new_file(path)
    try:
        with os.fdopen(handle, "wb", closefd=fcntl is None) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _open_to_others(temporary, 0o666)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        # what is open already has no name
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        if fcntl is not None:  # the lock has told others that this is no leftover
            os.close(handle)
    _sync_folder(path.parent)


def gone_folder(path: Path) -> Path | None:
    """Return the folder around ``path`` that this process locks, if it was moved or removed since."""
    for folder in path.absolute().parents:
        if (handle := _HELD.get(folder)) is None:
            continue
        try:
            is_there = os.path.samestat(os.stat(folder / LOCK), os.fstat(handle))
        except (FileNotFoundError, NotADirectoryError):  # a file may have its name by now
            is_there = False
        if not is_there:
            return folder
    return None


def remove_leftovers(folder: Path) -> None:
    """Delete what ``write_atomic`` had not finished in ``folder`` when its process was killed.

    Files that a process is writing stay, and so does what is no file, or cannot be deleted.
    """
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode):
                _remove_unless_held(path)
            elif path.is_symlink():
                path.unlink()


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to write to, which takes the place of ``path`` once the block has ended well.

    An exception leaves ``path`` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        yield temporary
        _open_to_others(temporary, 0o777)
        if path.exists():
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
            os.replace(path, old / path.name)
            try:
                os.replace(temporary, path)
            except OSError:
                os.replace(old / path.name, path)
                old.rmdir()
                raise
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _new_file(path: Path) -> tuple[int, str]:
    """Return a new file beside ``path``, locked so that nobody takes it for a leftover."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        if _lock(handle) is not False and os.path.exists(name):
            return handle, name
        os.close(handle)  # taken for a leftover before it was locked


def _remove_unless_held(path: Path) -> None:
    if fcntl is None:  # Windows deletes no file that is open
        path.unlink()
        return
    handle = os.open(path, os.O_RDWR | _AS_IT_IS)
    try:
        if _lock(handle):
            path.unlink()
    finally:
        os.close(handle)


def _open_lock(path: Path) -> int:
    """Open the file of a lock, which must not be another file by a second name."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _AS_IT_IS, 0o666)
    except OSError:
        if path.is_symlink() or path.is_dir():
            raise Locked(_NO_FILE.format(path, "a link or a folder")) from None
        raise
    found = os.fstat(handle)
    is_file = stat.S_ISREG(found.st_mode)
    if not is_file or found.st_nlink > 1:
        os.close(handle)
        got = "no file" if not is_file else f"one with {found.st_nlink} names (hard links)"
        raise Locked(_NO_FILE.format(path, got))
    return handle


def _lock(handle: int) -> bool | None:
    """Lock an open file: True; False where another holds it; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _read(handle: int) -> str:
    """Return what the holder of a lock wrote, in one line."""
    with contextlib.suppress(OSError):
        text = os.read(handle, 300).decode(errors="replace")
        words = "".join(c if c.isprintable() else " " for c in text).split()
        return " ".join(words) or "another process"
    return "another process"


def _write(handle: int, text: str) -> None:
    """Replace what an open file holds, if there is room: it is only a word to others."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, text.encode())


def _open_to_others(path: Path | str, mode: int) -> None:
    """Give what tempfile made private the mode of other new files, where the system lets it.

    A drive may say that all its files are another user's, who alone may set modes.
    """
    with contextlib.suppress(OSError):
        os.chmod(path, mode & ~_umask())


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
