import operator

import numpy as np
import pytest
from numba import njit
from numba.core import errors
from numba.core.types import functions

from fixedpoint_kernels.llvm import compiler

compiled = njit(pipeline_class=compiler.Compiler)
OWN = functions.BaseFunction.get_call_type


@pytest.fixture
def asked(monkeypatch):
    """Return what Numba itself was asked for, of operators."""
    found = []

    def get_call_type(self, context, args, kws):
        found.append((self.typing_key, tuple(args)))
        return OWN(self, context, args, kws)

    monkeypatch.setattr(compiler, "_types", {})
    monkeypatch.setattr(functions.BaseFunction, "get_call_type", get_call_type)
    return found


def inner(x, y):
    return x * y + x


def test_operators_are_typed_once(asked):
    first = compiled(lambda a, b: (a * b + a) * (b * a) + a[0] * b[0] - a[0] * b[0])
    second = compiled(lambda a, b: a[0] * b[0] + a[0])
    a, b = np.array([3.0, 5.0]), np.array([2.0, 7.0])
    assert first(a, b).tolist() == [54.0, 1400.0]
    assert second(a, b) == 9.0
    of_operators = [call for call in asked if call[0] in (operator.mul, operator.getitem)]
    assert of_operators
    assert len(of_operators) == len(set(of_operators))


def test_kernels_that_others_call_remember_the_same(asked):
    own = compiled(inner)
    outer = compiled(lambda x, y: own(x, y) * own(y, x) + x * y)
    assert outer(np.int16(3), np.int16(5)) == 18 * 20 + 15
    of_operators = [call for call in asked if call[0] is operator.mul]
    assert of_operators
    assert len(of_operators) == len(set(of_operators))


def test_numba_is_left_as_it_was():
    kernel = compiled(lambda x: x + "no number")
    with pytest.raises(errors.TypingError):
        kernel(1.0)
    assert compiled(lambda x: x + x)(2) == 4
    assert functions.BaseFunction.get_call_type is OWN
