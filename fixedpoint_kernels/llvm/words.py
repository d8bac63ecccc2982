"""Short words for LLVM vectors of float32 in memory, of which Numba intrinsics are made."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fixedpoint_kernels.llvm.vectors import (
    F32,
    I16,
    I32,
    I64,
    Vector,
    has_avx512,
    has_bfloat16,
    intrinsic,
)

__all__ = ["Words", "made_of"]


class Words:
    """What is said of ``lanes`` elements at a time; addresses are int64, 0 where there is nothing.

    Args:
        builder: llvmlite's, where code is being generated.
        lanes: Elements of a vector.
    """

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes

    def place(self, address: Any, element: Any) -> Any:
        """Return an address as a pointer."""
        return self.builder.inttoptr(address, element.as_pointer())

    def load(self, address: Any, element: Any = F32) -> Vector:
        """Read a vector."""
        return Vector.load(self.builder, self.place(address, element), self.lanes)

    def one(self, address: Any, kind: Any = F32) -> Any:
        """Read a number."""
        return self.builder.load(self.place(address, kind))

    def store(self, value: Vector, address: Any) -> None:
        """Write a vector."""
        value.store(self.place(address, value.element))

    def load_bfloat16(self, address: Any) -> Vector:
        """Read bfloat16 as float32."""
        return _widened(self.load(address, I16))

    def store_bfloat16(self, value: Vector, address: Any) -> Vector:
        """Write bfloat16, see ``Vector.bfloat16``; return what was written."""
        if not has_bfloat16() or self.lanes <= 16:
            short = value.bfloat16()
            self.store(short, address)
            return _widened(short)
        half = self.lanes // 2  # down to what the processor's instruction takes
        to, further = Words(self.builder, half), self.builder.add(address, I64(2 * half))
        low = to.store_bfloat16(value.part(0, half), address)
        return low.joined(to.store_bfloat16(value.part(half, half), further))

    def splat(self, scalar: Any) -> Vector:
        """Return a vector with ``scalar`` in each lane."""
        return Vector.splat(self.builder, scalar, self.lanes)

    def constant(self, number: float) -> Vector:
        """Return a vector of float32."""
        return Vector(
            self.builder, ir.Constant(ir.VectorType(F32, self.lanes), [number] * self.lanes)
        )

    @property
    def zero(self) -> Vector:
        """Return float32 of 0."""
        return self.constant(0.0)

    @property
    def ones(self) -> Vector:
        """Return conditions that are all true."""
        return Vector(self.builder, ir.Constant(self._conditions, [1] * self.lanes))

    @property
    def _conditions(self) -> Any:
        return ir.VectorType(ir.IntType(1), self.lanes)

    def flags(self, bits: Any) -> Vector:
        """Return the bits of an integer, one a lane, as conditions."""
        if has_avx512():
            return Vector(self.builder, self.builder.bitcast(bits, self._conditions))
        # LLVM would take the bits one by one
        count = -(self.lanes // -32)
        words = self.builder.bitcast(
            self.builder.zext(bits, ir.IntType(32 * count)), ir.VectorType(I32, count)
        )
        words = Vector(self.builder, words)
        words = words.shuffled(words, [i // 32 for i in range(self.lanes)])
        return (words & [1 << i % 32 for i in range(self.lanes)]) > 0

    def bits(self, conditions: Vector) -> Any:
        """Return conditions as the bits of an integer."""
        whole = ir.IntType(self.lanes)
        if has_avx512():
            return self.builder.bitcast(conditions.value, whole)
        wide = self.builder.sext(conditions.value, ir.VectorType(I32, self.lanes))
        wide, found = Vector(self.builder, wide), whole(0)
        for first in range(0, self.lanes, 8):
            part = wide.shuffled(wide, list(range(first, first + 8)))
            signs = self.builder.icmp_signed("<", part.value, part.constant(0).value)
            byte = self.builder.zext(self.builder.bitcast(signs, ir.IntType(8)), whole)
            found = self.builder.or_(found, self.builder.shl(byte, whole(first)))
        return found

    def variable(self, value: Vector) -> Any:
        """Return a place for vectors, which LLVM keeps in registers; it holds ``value``."""
        place = cgutils.alloca_once(self.builder, value.value.type)
        self.put(value, place)
        return place

    def get(self, variable: Any) -> Vector:
        """Return what a variable holds."""
        return Vector(self.builder, self.builder.load(variable))

    def put(self, value: Vector, variable: Any) -> None:
        """Let a variable hold ``value``."""
        self.builder.store(value.value, variable)

    def is_set(self, number: Any) -> Any:
        """Return a condition: an int64 is not 0."""
        return self.builder.icmp_signed("!=", number, I64(0))

    def there(self, number: Any) -> Any:
        """Begin what is done only where a number is not 0."""
        return self.builder.if_then(self.is_set(number))


def made_of(
    words: Callable[[Any], Words], names: str, body: Callable[..., Any], floats: int = 0
) -> Any:
    """Return an intrinsic that returns an int64.

    Args:
        words: Made of llvmlite's builder.
        names: Of what it takes: int64, and at last float32.
        body: Takes words and values; where it returns nothing, the intrinsic returns 0.
        floats: How many of the last are float32.
    """
    count = len(names.split())

    def codegen(_context, builder, _signature, arguments):
        found = body(words(builder), *arguments)
        return I64(0) if found is None else found

    signature = types.int64(*[types.int64] * (count - floats), *[types.float32] * floats)
    scope = {"made": (signature, codegen)}
    exec(f"def typing(_context, {', '.join(names.split())}): return made", scope)
    typing: Any = scope["typing"]
    return intrinsic(typing)


def _widened(short: Vector) -> Vector:
    """Return bfloat16 as float32."""
    bits = short.converted(I32)
    return Vector(short.builder, short.builder.shl(bits.value, bits.constant(16).value)).viewed(F32)
