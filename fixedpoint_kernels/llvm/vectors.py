"""Arithmetic on LLVM vectors, for Numba intrinsics that must not depend on the loop vectoriser.

A loop over single elements takes LLVM's choice of vectors as it comes: stochastic rounding took
1.6 times as long that way, and 5 times after changes that kept the loop from being vectorised.
Vectors longer than the machine's are split by LLVM into independent parts, which hides the latency
of long chains; any processor will do.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import extending
from numba.core import cgutils
from numba.core.registry import cpu_target

I8, I16, I32, I64 = map(ir.IntType, (8, 16, 32, 64))
F32 = ir.FloatType()
_INDEX = ir.IntType(32)


class _BFloat16(ir.Type):
    """LLVM's type of 16 bits, which llvmlite has not."""

    width = 16

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


class Vector:
    """A vector whose operators append instructions to ``builder``; integers are unsigned.

    Args:
        builder: llvmlite's, where code is being generated.
        value: llvmlite's, of a vector type.
    """

    def __init__(self, builder: Any, value: Any):
        self.builder, self.value = builder, value
        self.element, self.lanes = value.type.element, value.type.count

    @classmethod
    def splat(cls, builder: Any, scalar: Any, lanes: int) -> "Vector":
        """Return a vector with ``scalar`` in each lane."""
        empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        one = cls(builder, builder.insert_element(empty, scalar, _INDEX(0)))
        return one.shuffled(one, [0] * lanes)

    @classmethod
    def load(
        cls, builder: Any, pointer: Any, lanes: int, where: "Vector | None" = None
    ) -> "Vector":
        """Read ``lanes`` consecutive elements, aligned as one element is.

        ``where``: conditions; other lanes are 0, and are not read.
        """
        whole = ir.VectorType(pointer.type.pointee, lanes)
        address, size = builder.bitcast(pointer, whole.as_pointer()), _size_bytes(whole.element)
        if where is None:
            return cls(builder, builder.load(address, align=size))
        zeros = ir.Constant(whole, [0] * lanes)
        arguments = [address, I32(size), where.value, zeros]
        return cls(builder, _masked(builder, "load", whole, whole, arguments))

    def store(self, pointer: Any, where: "Vector | None" = None) -> None:
        """Write all lanes to consecutive elements, or those where a condition is true."""
        whole, size = self.value.type, _size_bytes(self.element)
        address = self.builder.bitcast(pointer, whole.as_pointer())
        if where is None:
            self.builder.store(self.value, address, align=size)
            return
        arguments = [self.value, address, I32(size), where.value]
        _masked(self.builder, "store", whole, ir.VoidType(), arguments)

    def constant(self, values: Any) -> "Vector":
        """Return a constant of this type, from one number or one a lane."""
        lanes = values if isinstance(values, Sequence) else [values] * self.lanes
        return Vector(self.builder, ir.Constant(self.value.type, list(lanes)))

    def shuffled(self, other: "Vector", order: Sequence[int]) -> "Vector":
        """Pick lanes by number; those of ``other`` are counted on from this vector's."""
        mask = ir.Constant(ir.VectorType(_INDEX, len(order)), list(order))
        return Vector(self.builder, self.builder.shuffle_vector(self.value, other.value, mask))

    def viewed(self, element: Any) -> "Vector":
        """Return the same bits as lanes of another type."""
        lanes = self.lanes * _size_bytes(self.element) // _size_bytes(element)
        whole = ir.VectorType(element, lanes)
        return Vector(self.builder, self.builder.bitcast(self.value, whole))

    def converted(self, element: Any) -> "Vector":
        """Convert between float32 and integers (here signed), or widen unsigned integers."""
        whole = ir.VectorType(element, self.lanes)
        if self.element == F32:
            return Vector(self.builder, self.builder.fptosi(self.value, whole))
        convert = self.builder.sitofp if element == F32 else self.builder.zext
        return Vector(self.builder, convert(self.value, whole))

    def truncated(self, element: Any) -> "Vector":
        """Keep the low bits of integers."""
        whole = ir.VectorType(element, self.lanes)
        return Vector(self.builder, self.builder.trunc(self.value, whole))

    def where(self, yes: "Vector", no: "Vector") -> "Vector":
        """Return ``yes`` in the lanes where this vector of conditions is true, else ``no``."""
        return Vector(self.builder, self.builder.select(self.value, yes.value, no.value))

    def floor(self) -> "Vector":
        """Round down to whole numbers."""
        return self._intrinsic(f"floor.v{self.lanes}f32", self)

    def rint(self) -> "Vector":
        """Round to the nearest whole number, ties to even."""
        return self._intrinsic(f"rint.v{self.lanes}f32", self)

    def root(self) -> "Vector":
        """Return the square root."""
        return self._intrinsic(f"sqrt.v{self.lanes}f32", self)

    def fused(self, factor: "Vector", addend: "Vector") -> "Vector":
        """Return the product with ``factor`` plus ``addend``, rounded once."""
        return self._intrinsic(f"fma.v{self.lanes}f32", self, factor, addend)

    def pushed(self, other: "Vector", places: int) -> "Vector":
        """Move all bits some places down, and the lowest of ``other`` to the free ones; int32."""
        return self._intrinsic(f"fshr.v{self.lanes}i32", other, self, self.constant(places))

    def entry(self, index: "Vector") -> "Vector":
        """Pick lanes by their number modulo 16; float32, AVX-512 only."""
        return self._intrinsic("x86.avx512.permvar.sf.512", self, index)

    def permuted(self, other: "Vector", index: "Vector") -> "Vector":
        """Pick lanes by their number modulo 32: this vector's 16, then ``other``'s; AVX-512 only."""
        kind = "ps" if self.element == F32 else "d"
        return self._intrinsic(f"x86.avx512.vpermi2var.{kind}.512", self, index, other)

    def scaled(self, power: "Vector") -> "Vector":
        """Return the product with 2 to a power, rounded down to a whole one; float32, AVX-512 only."""
        every, rounding = ir.IntType(16)(-1), I32(4)  # lanes, and as all operations round
        arguments = [self.value, power.value, self.value, every, rounding]
        signature = ir.FunctionType(self.value.type, [x.type for x in arguments])
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return Vector(self.builder, self.builder.call(function, arguments))

    def __add__(self, other: Any) -> "Vector":
        return self._apply(self.builder.add, self.builder.fadd, other)

    def __sub__(self, other: Any) -> "Vector":
        return self._apply(self.builder.sub, self.builder.fsub, other)

    def __mul__(self, other: Any) -> "Vector":
        return self._apply(self.builder.mul, self.builder.fmul, other)

    def __truediv__(self, other: Any) -> "Vector":
        return self._apply(self.builder.fdiv, self.builder.fdiv, other)

    def __neg__(self) -> "Vector":
        return Vector(self.builder, self.builder.fneg(self.value))

    def __and__(self, other: Any) -> "Vector":
        return self._bitwise(self.builder.and_, other)

    def __xor__(self, other: Any) -> "Vector":
        return self._bitwise(self.builder.xor, other)

    def __or__(self, other: Any) -> "Vector":
        return self._bitwise(self.builder.or_, other)

    def __invert__(self) -> "Vector":
        return Vector(self.builder, self.builder.not_(self.value))

    def __rshift__(self, other: Any) -> "Vector":
        return self._bitwise(self.builder.lshr, other)

    def __lshift__(self, other: Any) -> "Vector":
        return self._bitwise(self.builder.shl, other)

    def __lt__(self, other: Any) -> "Vector":
        return self._compare("<", other)

    def __le__(self, other: Any) -> "Vector":
        return self._compare("<=", other)

    def __ge__(self, other: Any) -> "Vector":
        return self._compare(">=", other)

    def __gt__(self, other: Any) -> "Vector":
        return self._compare(">", other)

    def is_zero(self) -> "Vector":
        """Return conditions: which lanes are 0, of either sign."""
        return self._compare("==", 0.0)

    def part(self, first: int, lanes: int) -> "Vector":
        """Return lanes side by side."""
        return self.shuffled(self, list(range(first, first + lanes)))

    def joined(self, other: "Vector") -> "Vector":
        """Return the lanes of both, of which there are as many."""
        return self.shuffled(other, list(range(2 * self.lanes)))

    def bfloat16(self) -> "Vector":
        """Return the bits of float32 as bfloat16, int16: nearest, ties to even; what is below 2**-126 becomes 0.

        So processors do that have an instruction for it.
        """
        if has_bfloat16() and self.lanes == 16:
            name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
            element = _BFloat16() if binding.llvm_version_info[0] >= 16 else I16
            kind = ir.FunctionType(ir.VectorType(element, 16), [self.value.type])
            function = cgutils.get_or_insert_function(self.builder.module, kind, name)
            return Vector(self.builder, self.builder.call(function, [self.value])).viewed(I16)
        bits = self.viewed(I32)
        nearest = self.is_nan().where(
            bits | 0x400000,
            bits + 0x7FFF + ((bits >> 16) & 1),  # NaN stays NaN
        )
        is_small = (bits & 0x7F800000) < 0x800000
        return (is_small.where(bits & 0x80000000, nearest) >> 16).truncated(I16)

    def is_nan(self) -> "Vector":
        """Return conditions: which lanes are NaN."""
        return Vector(self.builder, self.builder.fcmp_unordered("uno", self.value, self.value))

    def _apply(self, integer: Callable, floating: Callable, other: Any) -> "Vector":
        right = other if isinstance(other, Vector) else self.constant(other)
        operation = floating if self.element == F32 else integer
        return Vector(self.builder, operation(self.value, right.value))

    def _bitwise(self, operation: Callable, other: Any) -> "Vector":
        return self._apply(operation, operation, other)

    def _compare(self, sign: str, other: Any) -> "Vector":
        right = other if isinstance(other, Vector) else self.constant(other)
        is_float = self.element == F32
        compare = self.builder.fcmp_ordered if is_float else self.builder.icmp_unsigned
        return Vector(self.builder, compare(sign, self.value, right.value))

    def _intrinsic(self, name: str, *arguments: "Vector") -> "Vector":
        signature = ir.FunctionType(self.value.type, [x.value.type for x in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, signature, f"llvm.{name}")
        return Vector(self.builder, self.builder.call(function, [x.value for x in arguments]))


def columns_of(rows: Sequence[Vector]) -> list[Vector]:
    """Return rows of a square, whose side is a power of two, as its columns."""
    side, found = len(rows), list(rows)
    bit = 1
    while bit < side:  # blocks off the diagonal change places
        low = [j if not j & bit else side + j - bit for j in range(side)]
        high = [j + bit if not j & bit else side + j for j in range(side)]
        for i in (i for i in range(side) if not i & bit):
            a, b = found[i], found[i + bit]
            found[i], found[i + bit] = a.shuffled(b, low), a.shuffled(b, high)
        bit *= 2
    return found


def _masked(builder: Any, name: str, whole: Any, result: Any, arguments: Sequence[Any]) -> Any:
    """Call LLVM's load or store of some lanes; ``whole``: type of all."""
    kind = "f" if whole.element == F32 else "i"
    own = f"llvm.masked.{name}.v{whole.count}{kind}{8 * _size_bytes(whole.element)}.p0"
    signature = ir.FunctionType(result, [x.type for x in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, own), arguments)


def prefetch(builder: Any, pointer: Any, *, writes: bool = False) -> None:
    """Bring the cache line at a pointer near, to be read or written; any address will do."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    address = builder.bitcast(pointer, I8.as_pointer())
    builder.call(function, [address, I32(int(writes)), I32(3), I32(1)])


def intrinsic(typing: Callable[..., Any]) -> Callable[..., Any]:
    """Do as Numba's own: a call of it has no context, which types of Python cannot say."""
    return extending.intrinsic(typing)


@intrinsic
def multiply_add(_context, a, b, c):
    """Return ``a * b + c``, rounded once; all are float32."""

    def codegen(_context, builder, _signature, args):
        return builder.fma(*args)

    return a(a, b, c), codegen


def has_avx512() -> bool:
    """Say whether Numba compiles for a processor with AVX-512: with masks, and ``permuted``."""
    return "+avx512f" in _features()


def has_bfloat16() -> bool:
    """Say whether Numba compiles for a processor that rounds 16 float32 to bfloat16 by one instruction."""
    return {"+avx512f", "+avx512bf16"} <= _features()


def _features() -> set[str]:
    context: Any = cpu_target.target_context
    *_, features = context.codegen().magic_tuple()
    return set(features.split(","))


def _size_bytes(element: Any) -> int:
    return 4 if element == F32 else element.width // 8
