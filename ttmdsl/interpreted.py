"""Triton's interpreter with numbers as a GPU computes them: products of bfloat16 and tf32, rounding to the nearest.

Usage: `with rounded(): ...` around calls of kernels under TRITON_INTERPRET. The interpreter by itself (3.6 to 3.9)
multiplies the bits of bfloat16 tiles as integers, cuts off what it converts, and takes float32 where a GPU is asked for
tf32, the 10 leading bits of a float32's fraction: a module's kernels take float32 in place of bfloat16 then. With this,
errors are those that a GPU shows. Knows no kernel, and changes nothing where kernels are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def interpreted() -> bool:
    """Whether Triton interprets kernels in this process."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@contextlib.contextmanager
def rounded() -> Iterator[None]:
    """Mends the interpreter's bfloat16 and tf32 while it lasts."""
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, trunc = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc

    def wide(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def short(value: Any) -> Any:
        if value.dtype.scalar != tl.float32:
            return value
        bits = np.ascontiguousarray(value.data).view(np.uint32) & np.uint32(0xFFFFE000)
        return TensorHandle(bits.view(np.float32), tl.float32)

    def product(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        a, b = wide(a), wide(b)
        if precision == ir.INPUT_PRECISION.TF32:
            a, b = short(a), short(b)
        return dot(self, a, b, d, precision, *rest)

    def narrow(self: Any, value: Any, dtype: Any) -> Any:
        if (value.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return trunc(self, value, dtype)
        bits = np.ascontiguousarray(value.data, np.float32).view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return TensorHandle(np.where(np.isnan(value.data), 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)

    product.mended = True  # type: ignore[attr-defined]  # modules have kernels take float32 otherwise
    InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc = product, narrow
    try:
        yield
    finally:
        InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc = dot, trunc


def lighten() -> None:
    """From now on in this process the interpreter finds out once what is the same for every operation: types of blocks,
    what tensors say of these and how they are spread over each other; and its own operations take the place of Triton's
    once for a kernel, not again for each function that a kernel calls. Nor does it compute for every sum of integers
    whether that overflows, which it would report to nobody. All in all it takes less than half the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    if hasattr(interpreter, "interpreter_semantic"):  # since Triton 3.4
        _know_types(tl, interpreter)
        _spread_alike(tl, interpreter)

    patch = interpreter._patch_lang
    kept = SimpleNamespace(restore=lambda: None)

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [module for module in fn.__globals__.values() if module is tl or module is tl.core]

    def once(fn: Any) -> Any:
        return patch(fn) if any(tl.core.is_builtin(module.load) for module in languages(fn)) else kept

    interpreter._patch_lang = once


def _know_types(tl: Any, interpreter: Any) -> None:
    """A type of blocks is made once, and what tensors say of their type is found once."""
    semantic = type(interpreter.interpreter_semantic)
    tl.block_type.__hash__ = tl.pointer_type.__hash__ = tl.dtype.__hash__
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    semantic.computation_type_impl = functools.cache(semantic.computation_type_impl)

    made: dict[Any, Any] = {}
    said: dict[Any, dict[str, Any]] = {}  # not by the type itself, which is sent from process to process
    begin_block, begin_tensor = tl.block_type.__init__, tl.tensor.__init__

    def block(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = cls, element_ty, *(getattr(size, "value", size) for size in shape)
        return made.get(key) or made.setdefault(key, object.__new__(cls))

    def begin_once(self: Any, element_ty: Any, shape: Any) -> None:
        if not vars(self):
            begin_block(self, element_ty, shape)

    def begin_alike(self: Any, handle: Any, type: Any) -> None:
        if (known := said.get(type)) is None:
            begin_tensor(self, handle, type)
            known = said[type] = {name: value for name, value in vars(self).items() if name != "handle"}
        self.handle = handle
        vars(self).update(known)

    tl.block_type.__new__, tl.block_type.__init__, tl.tensor.__init__ = block, begin_once, begin_alike


def _spread_alike(tl: Any, interpreter: Any) -> None:
    """Operands of two types are spread over each other as the first of these were."""
    semantic = type(interpreter.interpreter_semantic)
    spread = semantic.broadcast_impl_value
    ends: dict[Any, Any] = {}

    def to(x: Any, type: Any) -> Any:
        if x.type is type or not type.is_block():
            return x
        data = np.broadcast_to(x.handle.data, type.shape.values)
        return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype), type)

    def alike(self: Any, a: Any, b: Any) -> Any:
        types = a.type, b.type
        if types in ends:
            return tuple(map(to, (a, b), ends[types]))
        both = spread(self, a, b)
        ends[types] = [x.type for x in both]
        return both

    semantic.broadcast_impl_value = alike


def fill_what_is_empty() -> None:
    """What torch makes without a value is NaN in this process from now on, so that a kernel that takes what none wrote
    is always found out, not only where the memory happened to hold a NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
