"""What a file of ``torch.save`` says, looked at before anything of it is loaded.

``torch.load`` with ``weights_only`` runs no code of a file, but calls what it knows with the file's arguments: layers
and ``bytearray`` take as much memory as these say. What ``torch.save`` writes calls a few functions alone.
"""

import io
import pickle
import pickletools
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Collection
from typing import BinaryIO

from fixedpoint_kernels._torch_private.files import record_of

__all__ = ["check_calls", "check_memo", "check_records"]

_BEGIN = b"PK\3\4"  # by which torch knows its files from those of before, which have no records
_NO_CALL = "it calls {}, which no file of torch.save does"


def check_records(file: BinaryIO) -> None:
    """Compare each record of a file of ``torch.save`` with its checksum, which ``torch.load`` does not.

    Nothing is taken into memory that is larger than the file, either, whatever the file says.

    Args:
        file: Open, at any place.

    Raises:
        zipfile.BadZipFile: A checksum is wrong, records are said to be larger than the file, or it
            is no such file. Damage can raise other exceptions, too.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(len(_BEGIN)) != _BEGIN:
        raise zipfile.BadZipFile("it does not begin as a zip file")
    with zipfile.ZipFile(file) as records:
        told = sum(record.file_size for record in records.infolist())
        if told > size:
            raise zipfile.BadZipFile(f"its {size} bytes are said to be {told}")
        if (damaged := records.testzip()) is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def check_calls(file: BinaryIO, own: Collection[str] = ()) -> None:
    """Refuse a file that calls what no file of ``torch.save`` does, or tells of more than it has.

    This first reading imports and calls nothing of what the file names.

    Args:
        file: Open, at any place, as ``check_records`` takes it.
        own: Full names of the classes and functions that the user allows: they may be called.

    Raises:
        pickle.UnpicklingError: It does. Damage can raise other exceptions, too.
    """
    content = record_of(file, "data.pkl")
    check_memo(content)
    _Calls(content, own).load()


def check_memo(content: bytes) -> None:
    """Refuse a pickle that says it remembers more values than it has bytes: Python makes a list of that length.

    Raises:
        pickle.UnpicklingError: It says so. Damage raises ``ValueError``.
    """
    for code, value, _ in pickletools.genops(content):
        if code.name.endswith("PUT") and isinstance(value, int) and value > len(content):
            raise pickle.UnpicklingError(f"its {len(content)} bytes tell of {value} values")


class _Calls(pickle.Unpickler):
    """Reads a pickle with stand-ins for all that it names."""

    def __init__(self, content: bytes, own: Collection[str]) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.own, self.size = own, len(content)

    def find_class(self, module: str, name: str) -> object:
        """Return the stand-in of a name, which is spelled as Python 2 did, as torch writes it."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        if full in self.own:
            return _Own
        if full in _CALLED:
            return _CALLED[full]
        if full.startswith("torch.nn."):
            return type(full, (_Layer,), {"size": self.size})
        is_ours = full.startswith(("marvin.", "fixedpoint_kernels."))
        return type(full, (_Class,), {}) if is_ours else _Value(full)

    def persistent_load(self, pid: object) -> "_Made":  # of a storage, which is a record
        return _Made()


class _Made:
    """Stands for a tensor, and what else is made; pickles change none."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it changes a tensor, which no file of torch.save does")


class _Table(dict[object, object]):
    """Stands for a dictionary of another class."""

    def __setstate__(self, state: object) -> None: ...


class _Value:
    """Stands for a dtype, a storage's class and what else is named and not called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object) -> None:
        raise pickle.UnpicklingError(_NO_CALL.format(self.name))


class _Own:
    """Stands for what the user allows."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class _Class:
    """Stands for a class whose objects are made empty, and filled."""

    def __init__(self, *_: object) -> None:
        raise pickle.UnpicklingError(_NO_CALL.format(type(self).__name__))

    def __setstate__(self, state: object) -> None: ...


class _Layer(_Class):
    """Stands for a class of torch's layers."""

    size: int

    def __setstate__(self, state: object) -> None:
        """Refuse more layers of a recurrent network than there can be: old ones are named anew, by their number."""
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"it fills a layer from a {type(state).__name__}")
        layers = state.get("num_layers")
        if isinstance(layers, _Made) or (isinstance(layers, int) and layers > self.size):
            raise pickle.UnpicklingError(f"its {self.size} bytes tell of {layers} layers")


def _encoded(text: str, encoding: str) -> bytes:
    """Return bytes as pickles of Python 2 have them; other encodings would make them longer at each call."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes as {encoding}")
    return text.encode(encoding)


def _rebuilt(
    function: "type[_Made]", _kind: object, args: tuple[object, ...], _state: object
) -> object:
    return function(*args)


_CALLED = {
    "_codecs.encode": _encoded,
    "builtins.complex": complex,
    "builtins.set": set,
    "collections.Counter": _Table,
    "collections.OrderedDict": _Table,
    "torch.Size": tuple,
    "torch.device": _Made,
    "torch.serialization._get_layout": _Made,
    "torch._tensor._rebuild_from_type_v2": _rebuilt,
    "torch._utils._rebuild_meta_tensor_no_storage": _Made,  # without values, whatever its size
    "torch._utils._rebuild_parameter": _Made,
    "torch._utils._rebuild_parameter_with_state": _Made,
    "torch._utils._rebuild_tensor_v2": _Made,
    "torch._utils._rebuild_tensor_v3": _Made,
}
