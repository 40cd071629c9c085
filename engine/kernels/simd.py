"""Writing functions of vector instructions: a thin layer over llvmlite's IR builder, where expressions read as such.

A `Function` takes one pointer to 64-bit arguments, numbers or addresses, and gives nothing. What Python computes while
it writes is unrolled; `loop` and `when` are what runs later. A vector may be longer than the processor's own: LLVM cuts
it to size.

    f = Function(module, "scaled", ["x", "n"])
    with f.loop(0, f.args["n"], 16) as i:
        f.store(f.load(f.args["x"], i, F32, 16) * 2.0, f.args["x"], i)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()


class Value:
    """A number, or a vector of numbers, of the function that is written. Python's numbers are taken beside it."""

    __slots__ = ("_f", "ir")

    def __init__(self, f: Function, value: ir.Value) -> None:
        self._f = f
        self.ir = value

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    @property
    def element(self) -> ir.Type:
        return self.type.element if isinstance(self.type, ir.VectorType) else self.type

    @property
    def lanes(self) -> int:
        """0: no vector."""
        return self.type.count if isinstance(self.type, ir.VectorType) else 0

    @property
    def _is_float(self) -> bool:
        return not isinstance(self.element, ir.IntType)

    def _with(self, other: Value | float, floats: str, integers: str) -> Value:
        operation = getattr(self._f.builder, floats if self._is_float else integers)
        return Value(self._f, operation(self.ir, self._f.like(other, self).ir))

    def __add__(self, other: Value | float) -> Value:
        return self._with(other, "fadd", "add")

    def __sub__(self, other: Value | float) -> Value:
        return self._with(other, "fsub", "sub")

    def __mul__(self, other: Value | float) -> Value:
        return self._with(other, "fmul", "mul")

    def __truediv__(self, other: Value | float) -> Value:
        return self._with(other, "fdiv", "udiv")

    def __floordiv__(self, other: Value | int) -> Value:
        """Of integers that are not negative."""
        return self._with(other, "fdiv", "udiv")

    def __mod__(self, other: Value | int) -> Value:
        """Of integers that are not negative."""
        return self._with(other, "frem", "urem")

    def __and__(self, other: Value | int) -> Value:
        return Value(self._f, self._f.builder.and_(self.ir, self._f.like(other, self).ir))

    def __or__(self, other: Value | int) -> Value:
        return Value(self._f, self._f.builder.or_(self.ir, self._f.like(other, self).ir))

    def __lshift__(self, bits: int) -> Value:
        return Value(self._f, self._f.builder.shl(self.ir, self._f.like(bits, self).ir))

    def __rshift__(self, bits: int) -> Value:
        """Zeros come in from the left."""
        return Value(self._f, self._f.builder.lshr(self.ir, self._f.like(bits, self).ir))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def _compare(self, sign: str, other: Value | float) -> Value:
        compare = self._f.builder.fcmp_ordered if self._is_float else self._f.builder.icmp_signed
        return Value(self._f, compare(sign, self.ir, self._f.like(other, self).ir))

    def as_type(self, element: ir.Type) -> Value:
        """The same bits as another type of the same width."""
        return Value(self._f, self._f.builder.bitcast(self.ir, self._f.vector(element, self.lanes)))

    def bits(self, element: ir.Type, lanes: int) -> Value:
        """The same bits as so many lanes of another width."""
        return Value(self._f, self._f.builder.bitcast(self.ir, self._f.vector(element, lanes)))

    def to(self, element: ir.Type, *, signed: bool = True) -> Value:
        """The same number as another type; floats to integers: towards zero. signed: of the integers."""
        source, builder = self.element, self._f.builder
        if source == element:
            return self
        is_float, to_float = self._is_float, not isinstance(element, ir.IntType)
        if is_float and to_float:
            convert = builder.fpext if source == F16 else builder.fptrunc
        elif to_float:
            convert = builder.sitofp if signed else builder.uitofp
        elif is_float:
            convert = builder.fptosi
        elif source.width > element.width:
            convert = builder.trunc
        else:
            convert = builder.sext if signed else builder.zext
        return Value(self._f, convert(self.ir, self._f.vector(element, self.lanes)))

    def is_number(self) -> Value:
        return Value(self._f, self._f.builder.fcmp_ordered("ord", self.ir, self.ir))

    def equals(self, other: Value | int) -> Value:
        return Value(self._f, self._f.builder.icmp_signed("==", self.ir, self._f.like(other, self).ir))

    def with_lane(self, index: int, value: Value) -> Value:
        """This vector with another number in one lane."""
        return Value(self._f, self._f.builder.insert_element(self.ir, value.ir, ir.Constant(I32, index)))

    def lane(self, index: Value | int) -> Value:
        return Value(self._f, self._f.builder.extract_element(self.ir, self._f.integer(index, I32).ir))

    def splat(self, lanes: int) -> Value:
        """A vector of this number in each lane."""
        if lanes == 0:
            return self
        whole = ir.Constant(ir.VectorType(self.type, lanes), ir.Undefined)
        one = self._f.builder.insert_element(whole, self.ir, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return Value(self._f, self._f.builder.shuffle_vector(one, whole, zeros))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """The lanes of these numbers, of `self` and then `other`, in their order."""
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.ir
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self._f, self._f.builder.shuffle_vector(self.ir, second, order))

    def sum(self) -> Value:
        """Of the lanes, added in pairs."""
        return self._folded(lambda low, high: low + high)

    def greatest(self) -> Value:
        """Of the lanes, none of which may be not a number."""
        return self._folded(self._f.maximum)

    def _folded(self, join: Callable[[Value, Value], Value]) -> Value:
        """The low half joined with the high one, until one lane is left."""
        folded = self
        while folded.lanes > 1:
            half = folded.lanes // 2
            folded = join(folded.shuffle(range(half)), folded.shuffle(range(half, 2 * half)))
        return folded.lane(0)


class Variable:
    """A place for a value that changes: LLVM keeps it in a register."""

    def __init__(self, f: Function, start: Value) -> None:
        self._f = f
        with f.builder.goto_entry_block():
            self._place = f.builder.alloca(start.type)
        self.set(start)

    def get(self) -> Value:
        place = self._place
        return Value(self._f, self._f.builder.load(place, typ=place.allocated_type))

    def set(self, value: Value) -> None:
        self._f.builder.store(value.ir, self._place)


class Function:
    """One function of a module, while it is written; `end` ends it. args: its arguments by name, integers."""

    def __init__(self, module: ir.Module, name: str, args: Sequence[str]) -> None:
        self._module = module
        self._names = count()
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self._start = Value(self, self.builder.ptrtoint(function.args[0], I64))
        self._places = {name: index for index, name in enumerate(args)}
        self.args = {name: self.load(self._start, index, I64) for name, index in self._places.items()}

    def end(self) -> None:
        self.builder.ret_void()

    def integer(self, value: Value | int, kind: ir.IntType = I64) -> Value:
        return value if isinstance(value, Value) else Value(self, ir.Constant(kind, value))

    def number(self, value: float) -> Value:
        """A float32."""
        return Value(self, ir.Constant(F32, value))

    def like(self, value: Value | float, other: Value) -> Value:
        """`value` in the type of `other`: constants, and numbers beside vectors."""
        if isinstance(value, Value):
            return value if value.lanes == other.lanes else value.splat(other.lanes)
        return Value(self, ir.Constant(other.element, value)).splat(other.lanes)

    @staticmethod
    def vector(element: ir.Type, lanes: int) -> ir.Type:
        return ir.VectorType(element, lanes) if lanes else element

    def zeros(self, element: ir.Type, lanes: int) -> Value:
        return Value(self, ir.Constant(self.vector(element, lanes), None))

    def variable(self, start: Value) -> Variable:
        return Variable(self, start)

    def scratch(self, element: ir.Type, size: int) -> Value:
        """The address of room for so many elements, on the stack."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(element, size))
            place.align = 64
        return Value(self, self.builder.ptrtoint(place, I64))

    def load(self, address: Value, index: Value | int, element: ir.Type, lanes: int = 0) -> Value:
        """`lanes` elements (0: a number) from `address[index]` on, which need not be aligned."""
        kind = self.vector(element, lanes)
        pointer = self._pointer(address, index, element)
        return Value(self, self.builder.load(pointer, typ=kind, align=_bytes(element)))

    def store(self, value: Value, address: Value, index: Value | int) -> None:
        pointer = self._pointer(address, index, value.element)
        self.builder.store(value.ir, pointer, align=_bytes(value.element))

    def call(self, name: str, result: ir.Type, *values: Value) -> Value:
        """Of an intrinsic of LLVM, or a symbol that is linked."""
        kind = ir.FunctionType(result, [value.type for value in values])
        function = self._module.globals.get(name) or ir.Function(self._module, kind, name)
        return Value(self, self.builder.call(function, [value.ir for value in values]))

    def call_address(self, address: Value, argument: Value) -> None:
        """Calls a function like this one, which lies at an address."""
        kind = ir.FunctionType(ir.VoidType(), [POINTER]).as_pointer()
        function = self.builder.inttoptr(address.ir, kind)
        self.builder.call(function, [self.builder.inttoptr(argument.ir, POINTER)])

    def fma(self, a: Value, b: Value | float, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self._intrinsic("llvm.fma", a, self.like(b, a), self.like(c, a))

    def add_pairs(self, total: Value, a: Value, b: Value) -> Value:
        """total, [16] float32, + the two products of the bfloat16 in each of 16 lanes of int32 (AVX512-BF16)."""
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, a, b)

    def maximum(self, a: Value, b: Value | float) -> Value:
        """b where a is not a number."""
        other = self.like(b, a)
        return self.select(a > other, a, other)

    def minimum(self, a: Value, b: Value | float) -> Value:
        """b where a is not a number."""
        other = self.like(b, a)
        return self.select(a < other, a, other)

    def absolute(self, a: Value) -> Value:
        return self._intrinsic("llvm.fabs", a)

    def square_root(self, a: Value) -> Value:
        return self._intrinsic("llvm.sqrt", a)

    def nearest(self, a: Value) -> Value:
        """To the nearest integer, halves to the even one; still floats."""
        return self._intrinsic("llvm.rint", a)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return Value(self, self.builder.select(condition.ir, a.ir, b.ir))

    def exp(self, x: Value) -> Value:
        """e ** x of float32, up to a few units in the last place; 0 for x below -87, e ** 88 for x above 88. What is
        not a number stays so.

        x = n * ln 2 + r with |r| <= ln 2 / 2; e ** r by its Taylor polynomial.
        """
        counts = x >= -87.0
        limited = self.minimum(self.maximum(x, -87.0), 88.0)
        n = self.nearest(limited * 1.4426950408889634)
        r = self.fma(n, -0.693145751953125, limited)
        r = self.fma(n, -1.428606765330187e-06, r)
        power = self.like(1 / 5040, x)
        for term in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            power = self.fma(power, r, self.like(term, x))
        exponent = (n.to(I32) + 127) << 23
        return self.select(counts, power * exponent.as_type(F32), x * 0.0)

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Runs what is written within for start, start + step, ... below stop."""
        builder, name = self.builder, f"loop{next(self._names)}"
        first, last = self.integer(start), self.integer(stop)
        head, body, tail = (builder.append_basic_block(f"{name}.{part}") for part in ("head", "body", "tail"))
        before = builder.block
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        index.add_incoming(first.ir, before)
        builder.cbranch(builder.icmp_signed("<", index, last.ir), body, tail)
        builder.position_at_end(body)
        yield Value(self, index)
        following = builder.add(index, ir.Constant(I64, step))
        index.add_incoming(following, builder.block)
        builder.branch(head)
        builder.position_at_end(tail)

    def float_argument(self, name: str) -> Value:
        """An argument whose low half is a float32."""
        return self.args[name].to(I32).as_type(F32)

    def iota(self, lanes: int) -> Value:
        """0, 1, 2, ... as int64."""
        return Value(self, ir.Constant(ir.VectorType(I64, lanes), list(range(lanes))))

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.ir):
            yield

    def repeat_while(self, condition: Callable[[], Value], body: Callable[[], None]) -> None:
        builder, name = self.builder, f"while{next(self._names)}"
        head, inside, tail = (builder.append_basic_block(f"{name}.{part}") for part in ("head", "body", "tail"))
        builder.branch(head)
        builder.position_at_end(head)
        builder.cbranch(condition().ir, inside, tail)
        builder.position_at_end(inside)
        body()
        builder.branch(head)
        builder.position_at_end(tail)

    def take_argument(self, name: str) -> Value:
        """The argument as it now is, which is raised by one: no two threads get the same number."""
        pointer = self._pointer(self._start, self._places[name], I64)
        return Value(self, self.builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic"))

    def _intrinsic(self, name: str, *values: Value) -> Value:
        kind = f"v{values[0].lanes}f32" if values[0].lanes else "f32"
        return self.call(f"{name}.{kind}", values[0].type, *values)

    def _pointer(self, address: Value, index: Value | int, element: ir.Type) -> ir.Value:
        start = self.builder.inttoptr(address.ir, POINTER)
        return self.builder.gep(start, [self.integer(index).ir], source_etype=element)


def _bytes(element: ir.Type) -> int:
    return {F32: 4, F16: 2}[element] if not isinstance(element, ir.IntType) else max(1, element.width // 8)
