"""Triton's interpreter, made to work with numpy 2.5 and later.

To the interpreter each number of a kernel is a numpy array with one element. Triton 3.6 turns it into an int, as
`range(start, end)` in a kernel needs, by `int(array)`, which numpy 2.5 refuses for an array that has a dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def accept_numpy() -> None:
    """Have the interpreter take the one element of such an array, as later versions of Triton do."""
    if np.lib.NumpyVersion(np.__version__) < "2.5.0":
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
