"""Putting things back where a change of them fails half-way."""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.tensors import version_of

__all__ = ["all_or_nothing", "tables_of"]

Table = MutableMapping[str, object]


def tables_of(thing: object) -> list[Table]:
    """Return an object's attributes, and those of them that are dictionaries themselves, such as hooks."""
    own = vars(thing)
    return [own, *(value for value in own.values() if isinstance(value, dict))]


@contextmanager
def all_or_nothing(
    things: Iterable[object], tables: Iterable[Table] = (), tensors: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Put all back as it was where what is done in this block raises, an interrupt included.

    Args:
        things: Modules and other objects, whose class and ``tables_of`` come back.
        tables: Dictionaries whose items come back; what the items hold is not looked into.
        tensors: Whose values come back. They are copied, for the time of the block.
    """
    classes = [(thing, type(thing)) for thing in things]
    found = [*(table for thing, _ in classes for table in tables_of(thing)), *tables]
    kept = [(table, dict(table)) for table in found]
    with torch.no_grad():
        values = [(x, version_of(x), x.detach().clone()) for x in tensors]
    try:
        yield
    except BaseException:
        for thing, own in classes:
            thing.__class__ = own
        for table, items in kept:
            table.clear()
            table.update(items)
        with torch.no_grad():
            for x, version, value in values:
                if version_of(x) != version:
                    x.copy_(value)
        raise
