"""Values that no public function expects, and some that it may: each made anew, so that a call can change it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

import subtensors as st

N = st.Dim("n", max=16, buckets=8)


def _released() -> Tensor:
    arena = st.Arena("cpu", reserve="64MiB")
    tensor = arena.zeros(3)
    tensor.arena = arena
    arena.release()
    return tensor


def _circle() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


VALUES: dict[str, Callable[[], object]] = {
    # Python's own.
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "7": lambda: 7,
    "2**63": lambda: 2**63,
    "-2**70": lambda: -(2**70),
    "1.5": lambda: 1.5,
    "-0.5": lambda: -0.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "1j": lambda: 1j,
    "''": lambda: "",
    "'x'": lambda: "x",
    "'-1GiB'": lambda: "-1GiB",
    "b'x'": lambda: b"x",
    "()": lambda: (),
    "[]": list,
    "{}": dict,
    "set": lambda: {1, 2},
    "[None]": lambda: [None],
    "[1, 2]": lambda: [1, 2],
    "[1.5]": lambda: [1.5],
    "['x']": lambda: ["x"],
    "{'x': 1}": lambda: {"x": 1},
    "{0: None}": lambda: {0: None},
    "{None: 1}": lambda: {None: 1},
    "circle": _circle,
    "object": object,
    "type": lambda: int,
    "function": lambda: lambda *args, **kwargs: None,
    "iterator": lambda: iter([1]),
    "range": lambda: range(3),
    "slice": lambda: slice(1),
    "numpy int": lambda: np.int64(3),
    "numpy float": lambda: np.float32(3),
    "numpy array": lambda: np.ones(3),
    # Torch's.
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([2]),
    "module": lambda: nn.Linear(2, 2),
    "0-d": lambda: torch.tensor(2.0),
    "0-d int": lambda: torch.tensor(2),
    "no elements": lambda: torch.zeros(0),
    "no rows": lambda: torch.zeros(2, 0, 3),
    "vector": lambda: torch.ones(3),
    "matrix": lambda: torch.ones(3, 4),
    "ints": lambda: torch.arange(3),
    "bools": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "float16": lambda: torch.ones(3, dtype=torch.float16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "with grad": lambda: torch.ones(3, requires_grad=True),
    "no leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "transposed": lambda: torch.ones(3, 4).t(),
    "expanded": lambda: torch.ones(1).expand(3),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "strided nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, device="meta"),
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "[tensor]": lambda: [torch.ones(3)],
    "[tensor, None]": lambda: [torch.ones(3), None],
    "[tensors that differ]": lambda: [torch.ones(3), torch.ones(2, 2)],
    "{'x': tensor}": lambda: {"x": torch.ones(3)},
    # The library's.
    "Dim": lambda: N,
    "Linear": lambda: st.Linear(4),
    "{0: Dim}": lambda: {0: N},
    "{9: Dim}": lambda: {9: N},
    "padded": lambda: st.pad(torch.ones(3), {0: N}),
    "padded of 2 dims": lambda: st.pad(torch.ones(3, 2), {0: N}),
    "ragged": lambda: st.pad([torch.ones(3), torch.ones(5)], {0: N}),
    "list": lambda: st.TensorList([torch.ones(3), torch.ones(2, 2)]),
    "empty list": lambda: st.TensorList([]),
    "packed list": lambda: st.TensorList([torch.ones(3), torch.ones(2, 2)]).pack(),
    "[list]": lambda: [st.TensorList([torch.ones(3)])],
    "sizes of a list": lambda: st.TensorList([torch.ones(3), torch.ones(2, 2)]).shape,
    "chunked": lambda: st.chunk(torch.ones(3, 2), rows=1),
    "static": lambda: st.static(torch.ones(3)),
    "arena": lambda: st.Arena("cpu", reserve="64MiB"),
    "released": _released,
    "bucketed": lambda: st.bucketed(torch.exp, {0: {0: N}}),
    "fused": lambda: st.fused(lambda p: p.mul_(2)),
    "optimizer": lambda: st.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1),
}
"""By name, how to make each."""
