"""What Triton's interpreter lacks before version 3.9: numpy 2.4, bfloat16 constants, and NaNs in fmin and fmax.

Later versions of Triton do the same as the functions here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def mend_interpreter() -> None:
    """Have the interpreter do what a GPU does, where this version of Triton does not."""
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
