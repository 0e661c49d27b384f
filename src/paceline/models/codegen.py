# SPDX-License-Identifier: Apache-2.0
"""Pieces of machine code that Numba's own compiler would not find: written in LLVM's terms, used by the kernels.

All of them take arrays and flat offsets (in elements), and check nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic

LANES = 16
"""Numbers in a vector; LLVM splits it where the machine's are shorter."""

PANEL = 2 * LANES
"""Outputs (columns) of a product that are computed together, and lie together in a packed weight."""

INT8, BFLOAT16 = 0, 1
"""How a 32-bit word of a product's operands is read: four bytes, or two bfloat16."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_FAST = ("reassoc", "contract", "nsz")


def _features() -> set[str]:
    """What the processor that Numba compiles for can do."""
    chosen = getattr(config, "CPU_FEATURES", None)
    if chosen is not None:
        return {name[1:] for name in chosen.split(",") if name.startswith("+")}
    return {name for name, there in binding.get_host_cpu_features().items() if there}


FEATURES = _features()

TILE_ROWS = 11 if "avx512f" in FEATURES else 3
"""Rows of a product computed together: as many as leave room in the vector and address registers."""

AHEAD, FETCHING_ROWS = 384, 6
"""Vectors of a packed int8 weight by which a product fetches it before its use, and rows of a tile from which on.

The machine's own prefetching begins anew at each page and each panel, of which a second tile reads nothing new; 24 KiB
reach into the next panel while that tile is computed. In lower tiles fetching costs more than it saves. bfloat16
products do not fetch: most are attention's, whose operands were made just before.
"""

_SOURCES = ("codegen", "decoder", "kernels", "paged", "products", "static_kernels", "team")
_STAMP = sha256(b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _SOURCES)).hexdigest()


_PREFIX = "kernel:"
"""Of the names of kernels' libraries. Numba keeps names in its cache, but not the class."""


class _Library(JITCodeLibrary):
    """A kernel's code, with exact copies of the kernels that it calls.

    Numba would optimise the copy in each caller again, and so give it another order of additions, and would keep all
    copies under one name, of which a process uses the one that it loaded first. So copies are added only after the
    caller is optimised, and are private to it: a kernel's result is the same whoever calls it, and in a process that
    compiles it as in one that finds it in the cache.
    """

    def finalize(self) -> None:
        libraries = dict.fromkeys(self._linking_libraries)
        self._callees = [library for library in libraries if library.name.startswith(_PREFIX)]
        self._linking_libraries = [library for library in libraries if not library.name.startswith(_PREFIX)]
        for library in self._linking_libraries:
            if any(callee.name.startswith(_PREFIX) for callee in library._linking_libraries):
                raise TypeError(f"{library.name} calls a kernel and is not inlined: make it a kernel, too")
        super().finalize()

    def _finalize_final_module(self) -> None:
        module = self._final_module
        for library in self._callees:
            module.link_in(library._get_module_for_linking(), preserve=True)
        # What callers will link with is to be as it is now: generating code changes it.
        self._finalized = True
        self._get_module_for_linking()
        for function in module.functions:
            if function.linkage == binding.Linkage.linkonce_odr:
                function.linkage = "private"
        super()._finalize_final_module()


class _Compiler(Compiler):
    """Numba's, with such a library."""

    def define_pipelines(self) -> Any:
        state = self.state
        if state.library is None:
            state.library = _Library(state.targetctx.codegen(), _PREFIX + state.func_id.func_qualname)
            state.library.enable_object_caching()
        return super().define_pipelines()


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function so that it gives up the interpreter's lock, and keep the code in Numba's cache.

    Numba takes kept code for valid as long as the function's own file is the same. A kernel contains those that it
    calls, so here it is valid as long as all files of kernels are.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = njit(cache=True, nogil=True, error_model="numpy", pipeline_class=_Compiler, **options)(function)
        dispatcher._cache._cache_file._source_stamp = _STAMP
        return dispatcher

    return compiled


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Address of the element ``offset`` of an array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _load(builder: Any, pointer: Any, kind: Any, offset: int = 0) -> Any:
    """A vector of ``kind`` from ``offset`` vectors behind ``pointer``; nothing is assumed of alignment."""
    source = builder.bitcast(pointer, kind.as_pointer())
    if offset:
        source = builder.gep(source, [ir.Constant(_I64, offset)])
    return builder.load(source, align=kind.element.width // 8 if isinstance(kind.element, ir.IntType) else 4)


def _store(builder: Any, value: Any, pointer: Any, offset: int = 0) -> None:
    target = builder.bitcast(pointer, value.type.as_pointer())
    if offset:
        target = builder.gep(target, [ir.Constant(_I64, offset)])
    builder.store(value, target, align=4)


def _splat(builder: Any, value: Any) -> Any:
    """A vector of equal entries."""
    kind = ir.VectorType(value.type, LANES)
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def _constant(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def _call(builder: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def _prefetch(builder: Any, pointer: Any, offset: int) -> None:
    """Fetch the cache line ``offset`` vectors behind ``pointer`` into the second level; any address will do."""
    line = builder.gep(pointer, [ir.Constant(_I64, offset * LANES)])
    line = builder.bitcast(line, ir.IntType(8).as_pointer())
    read, second_level, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), (line, read, second_level, data))


def _dot(builder: Any, kind: int, total: Any, x: Any, w: Any) -> Any:
    """``total`` + the products of what words hold: unsigned bytes of ``x`` by signed ones of ``w``, or bfloat16."""
    if kind == INT8:
        if "avx512vnni" in FEATURES:
            return _call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, (total, x, w))
        for shift in (0, 8, 16, 24):
            left = builder.and_(builder.lshr(x, _constant(shift)), _constant(255))
            right = builder.ashr(builder.shl(w, _constant(24 - shift)), _constant(24))
            total = builder.add(total, builder.mul(left, right))
        return total
    if "avx512bf16" in FEATURES:
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, (total, x, w))
    low, high = _constant(16), _constant(-65536)
    for part in (lambda v: builder.shl(v, low), lambda v: builder.and_(v, high)):
        factors = (builder.bitcast(part(v), _FLOATS) for v in (x, w))
        total = builder.fadd(total, builder.fmul(*factors, flags=_FAST), flags=_FAST)
    return total


def _loop(builder: Any, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Repeat ``body(index, values) -> values`` ``count`` times, at least once; ``carried`` are the first values."""
    before = builder.block
    block, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(block)
    builder.position_at_end(block)
    index = builder.phi(_I64)
    phis = [builder.phi(value.type) for value in carried]
    values = body(index, phis)
    following = builder.add(index, ir.Constant(_I64, 1))
    index.add_incoming(ir.Constant(_I64, 0), before)
    index.add_incoming(following, builder.block)
    for phi, first, value in zip(phis, carried, values, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), block, after)
    builder.position_at_end(after)
    return values


def _tile_code(builder: Any, kind: int, rows: int, p: dict[str, Any]) -> None:
    """A tile of ``rows`` rows and a panel: see `tile`."""
    integer = kind == INT8
    vector = _WORDS if integer else _FLOATS
    start = [_load(builder, p["start"], vector, half) for half in (0, 1)]
    at = [builder.gep(p["x"], [builder.mul(p["x_stride"], ir.Constant(_I64, r))]) for r in range(rows)]

    def body(index: Any, totals: list[Any]) -> list[Any]:
        where = builder.gep(p["w"], [builder.mul(index, ir.Constant(_I64, PANEL))])
        weights = [_load(builder, where, _WORDS, half) for half in (0, 1)]
        for half in (0, 1) if integer and rows >= FETCHING_ROWS else ():
            _prefetch(builder, where, AHEAD + half)
        words = [_splat(builder, builder.load(builder.gep(row, [index]), align=4)) for row in at]
        return [
            _dot(builder, kind, totals[2 * r + half], words[r], weights[half]) for r in range(rows) for half in (0, 1)
        ]

    totals = _loop(builder, p["groups"], start * rows, body)
    scales = [_load(builder, p["w_scale"], _FLOATS, half) for half in (0, 1)]
    for r in range(rows):
        row = ir.Constant(_I64, r)
        factor = _splat(builder, builder.load(builder.gep(p["x_scale"], [row]), align=4))
        target = builder.gep(p["out"], [builder.mul(p["out_stride"], row)])
        for half in (0, 1):
            value = totals[2 * r + half]
            value = builder.sitofp(value, _FLOATS) if integer else value
            _store(builder, builder.fmul(builder.fmul(value, scales[half]), factor), target, half)


def _tile(
    typing_context: Any,
    kind: Any,
    rows: Any,
    x: Any,
    x_at: Any,
    x_stride: Any,
    w: Any,
    w_at: Any,
    groups: Any,
    start: Any,
    start_at: Any,
    w_scale: Any,
    x_scale: Any,
    x_scale_at: Any,
    out: Any,
    out_at: Any,
    out_stride: Any,
) -> Any:
    """out[r, c] = (start[c] + sum over g of dot(x[r, g], w[g, c])) * w_scale[c] * x_scale[r].

    For r < ``rows`` <= TILE_ROWS, c < PANEL and g < ``groups`` (at least 1). ``kind`` says what a word of ``x`` and
    ``w`` holds, and whether ``start`` is read as int32 or float32. ``start_at`` is the offset of start and w_scale.
    The order of additions does not depend on ``rows``.
    """
    names = ("x", "w", "start", "w_scale", "x_scale", "out")
    kinds = (x, w, start, w_scale, x_scale, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (v_kind, v_rows, v_x, v_x_at, x_stride, v_w, v_w_at, groups) = args[:8]
        (v_start, v_start_at, v_w_scale, v_x_scale, v_x_scale_at, v_out, v_out_at, out_stride) = args[8:]
        arrays = (v_x, v_w, v_start, v_w_scale, v_x_scale, v_out)
        offsets = (v_x_at, v_w_at, v_start_at, v_start_at, v_x_scale_at, v_out_at)
        p = {
            name: _pointer(context, builder, kind, array, offset)
            for name, kind, array, offset in zip(names, kinds, arrays, offsets, strict=True)
        }
        p |= {"x_stride": x_stride, "groups": groups, "out_stride": out_stride}
        done = builder.append_basic_block("done")
        case = builder.add(builder.mul(v_kind, ir.Constant(_I64, 16)), v_rows)
        switch = builder.switch(case, done)
        for kind in (INT8, BFLOAT16):
            for count in range(1, TILE_ROWS + 1):
                block = builder.append_basic_block(f"rows{count}")
                switch.add_case(ir.Constant(_I64, 16 * kind + count), block)
                builder.position_at_end(block)
                _tile_code(builder, kind, count, p)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    i = types.int64
    signature = types.void(i, i, x, i, i, w, i, i, start, i, w_scale, x_scale, i, out, i, i)
    return signature, generate


def _transpose(typing_context: Any, source: Any, at: Any, stride: Any, out: Any, out_at: Any, out_stride: Any) -> Any:
    """out[j, i] = source[i, j] for 16 by 16 words; strides are distances of rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = _pointer(context, builder, source, args[0], args[1])
        target = _pointer(context, builder, out, args[3], args[4])
        rows = [
            _load(builder, builder.gep(first, [builder.mul(args[2], ir.Constant(_I64, i))]), _WORDS)
            for i in range(LANES)
        ]
        # Four rounds; each swaps the off-diagonal quarters of squares of twice the size.
        for size in (1, 2, 4, 8):
            low = [i + LANES - size if i & size else i for i in range(LANES)]
            high = [i + LANES if i & size else i + size for i in range(LANES)]
            for i in range(LANES):
                if not i & size:
                    a, b = rows[i], rows[i + size]
                    rows[i] = builder.shuffle_vector(a, b, ir.Constant(_WORDS, low))
                    rows[i + size] = builder.shuffle_vector(a, b, ir.Constant(_WORDS, high))
        for i in range(LANES):
            _store(builder, rows[i], builder.gep(target, [builder.mul(args[5], ir.Constant(_I64, i))]))
        return context.get_dummy_value()

    i = types.int64
    return types.void(source, i, i, out, i, i), generate


def _interleave(typing_context: Any, halves: Any, a_at: Any, b_at: Any, out: Any, at: Any) -> Any:
    """out[at + i] = halves[a_at + i], and halves[b_at + i] in the upper half, for a PANEL of words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(16), PANEL)
        a, b = (_load(builder, _pointer(context, builder, halves, args[0], args[k]), kind) for k in (1, 2))
        target = _pointer(context, builder, out, args[3], args[4])
        for half in (0, 1):
            order = [half * LANES + i // 2 + PANEL * (i % 2) for i in range(PANEL)]
            mask = ir.Constant(ir.VectorType(_I32, PANEL), order)
            _store(builder, builder.bitcast(builder.shuffle_vector(a, b, mask), _WORDS), target, half)
        return context.get_dummy_value()

    i = types.int64
    return types.void(halves, i, i, out, i), generate


def _hadamard(typing_context: Any, row: Any, at: Any, stride: Any) -> Any:
    """The Walsh-Hadamard transform, unnormalised and in place, of 64 floats: 16 from ``at`` on, and from three places
    ``stride`` apart behind it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = _pointer(context, builder, row, args[0], args[1])
        places = [builder.gep(first, [builder.mul(args[2], ir.Constant(_I64, k))]) for k in range(4)]
        v = [_load(builder, place, _FLOATS) for place in places]
        for size in (1, 2, 4, 8):
            partner = ir.Constant(_WORDS, [i ^ size for i in range(LANES)])
            signs = ir.Constant(_FLOATS, [-1.0 if i & size else 1.0 for i in range(LANES)])
            for k in range(4):
                swapped = builder.shuffle_vector(v[k], v[k], partner)
                v[k] = builder.fadd(builder.fmul(v[k], signs, flags=_FAST), swapped, flags=_FAST)
        for size in (1, 2):
            for k in (k for k in range(4) if not k & size):
                a, b = v[k], v[k + size]
                v[k], v[k + size] = builder.fadd(a, b), builder.fsub(a, b)
        for value, place in zip(v, places, strict=True):
            _store(builder, value, place)
        return context.get_dummy_value()

    return types.void(row, types.int64, types.int64), generate


def _fetch_add(typing_context: Any, counters: Any, at: Any) -> Any:
    """Add 1 to ``counters[at]`` (int64), as one operation that no other thread can divide; the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, counters, *args)
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "seq_cst")

    return types.int64(counters, types.int64), generate


def _fetch(typing_context: Any, counters: Any, at: Any) -> Any:
    """``counters[at]`` as other threads left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, counters, *args), "acquire", 8)

    return types.int64(counters, types.int64), generate


def _pause(typing_context: Any) -> Any:
    """Tell the processor that this thread waits in a loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "sse2" in FEATURES:
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType(), ())
        return context.get_dummy_value()

    return types.void(), generate


# Inside compiled code the typing context is not passed.
tile: Any = intrinsic(_tile)
transpose: Any = intrinsic(_transpose)
interleave: Any = intrinsic(_interleave)
hadamard: Any = intrinsic(_hadamard)
fetch_add: Any = intrinsic(_fetch_add)
fetch: Any = intrinsic(_fetch)
pause: Any = intrinsic(_pause)
give_way: Any = types.ExternalFunction("sched_yield", types.int32())
"""Let other processes have this core, if any wants it."""
