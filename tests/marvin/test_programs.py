"""How many programs a chain keeps."""

from dataclasses import dataclass

import pytest

from marvin.integer.programs import Programs


@dataclass
class Sized:
    held_bytes: int


def asked(programs, keys, size):
    """Return for which keys a program was made."""
    made = []

    def make(key):
        made.append(key)
        return Sized(size)

    for key in keys:
        programs.get(key, lambda _, key=key: make(key))
    return made


@pytest.mark.parametrize(("size", "kept"), [(2**10, 64), (2**23, 8), (2**26, 4), (2**30, 4)])
def test_as_many_are_kept_as_fit_and_a_few_of_any_size(size, kept):
    programs = Programs()
    assert asked(programs, range(100), size) == list(range(100))
    assert asked(programs, range(100 - kept, 100), size) == []
    assert asked(programs, [100 - kept - 1], size) == [100 - kept - 1]


def test_the_one_not_used_longest_goes():
    programs = Programs()
    asked(programs, range(4), 2**30)
    asked(programs, [0], 2**30)
    assert asked(programs, [4], 2**30) == [4]
    assert asked(programs, [0, 2, 3, 4], 2**30) == []
    assert asked(programs, [1], 2**30) == [1]


def test_large_ones_that_are_gone_do_not_count():
    programs = Programs()
    asked(programs, range(4), 2**30)
    asked(programs, range(4, 8), 2**10)  # the large ones go
    assert asked(programs, range(8, 60), 2**10) == list(range(8, 60))
    assert asked(programs, range(4, 60), 2**10) == []
