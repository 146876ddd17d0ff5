"""Additions to Triton's interpreter: an error where a kernel uses an address outside of its operands.

Before version 3.9 also numpy 2.4, bfloat16 constants, and NaNs in fmin and fmax.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from optree import tree_leaves
from triton.runtime import interpreter


def mend_interpreter() -> None:
    """Make the interpreter do what a GPU does, where this version of Triton does not."""
    check_addresses()
    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "get_bf16"):  # 3.9, the first to have all of them
        return
    builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), interpreter.tl.bfloat16)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.get_all_ones_value = _all_ones
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # A number is an array of one element, of which numpy makes no int if it has a dimension.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def _all_ones(builder: Any, kind: Any) -> Any:
    """Return a value with all bits set; numpy refuses -1 for an unsigned one."""
    dtype = interpreter._get_np_dtype(kind)
    value = True if dtype == np.bool_ else np.array(-1).astype(dtype).item()
    return interpreter.TensorHandle(np.full(1, value, dtype=dtype), kind.scalar)


def check_addresses() -> None:
    """Make the interpreter raise where a kernel reads or writes memory that is not in the storage of an operand.

    On a GPU most such addresses belong to another tensor; the others are an illegal access. A kernel that makes an
    address of a number, which it read from a table, may use any.
    """
    executor, builder, memory = interpreter.GridExecutor, interpreter.InterpreterBuilder, interpreter._interpreter
    copied, to_pointer = executor._init_args_hst, builder.create_int_to_ptr
    operands: list[tuple[int, int]] = []

    def copied_and_noted(self: Any, args: Any, kwargs: Any) -> Any:
        copies = copied(self, args, kwargs)
        tensors = [getattr(x, "base", x) for x in tree_leaves(copies) if hasattr(x, "data_ptr")]
        spans = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors]
        operands[:] = [(begin, begin + size) for begin, size in spans]
        return copies

    def to_any_pointer(self: Any, number: Any, kind: Any) -> Any:
        operands.append((0, 1 << 64))
        return to_pointer(self, number, kind)

    def check(pointers: Any, mask: Any, itemsize: int) -> None:
        used = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        if used.size:
            first, end = int(used.min()), int(used.max()) + itemsize
            if not any(begin <= first and end <= stop for begin, stop in operands):
                raise IndexError(f"addresses {first:#x} to {end:#x} are in none of the operands")

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        check(pointers, mask, np.dtype(dtype).itemsize)
        return memory.load(pointers, mask, other, dtype)

    def store(pointers: Any, values: Any, mask: Any) -> Any:
        check(pointers, mask, values.dtype.itemsize)
        return memory.store(pointers, values, mask)

    def atomic_rmw(op: Any, pointers: Any, values: Any, mask: Any, order: Any) -> Any:
        check(pointers, mask, values.dtype.itemsize)
        return memory.atomic_rmw(op, pointers, values, mask, order)

    executor._init_args_hst, builder.create_int_to_ptr = copied_and_noted, to_any_pointer
    interpreter._interpreter = SimpleNamespace(
        **{**vars(memory), "load": load, "store": store, "atomic_rmw": atomic_rmw}
    )
