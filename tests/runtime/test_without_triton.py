"""Without Triton, as on systems that it is not built for, every type works on a CPU through torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *rest: None if name == "triton" else find(name, *rest))

import torch, torch.nn.functional as F
import subtensors as st
from subtensors.kernels.runtime.tile_math_kernel import div

assert "triton" not in sys.modules
seq = st.Dim("seq", max=8, buckets=4)

p = torch.nn.Parameter(torch.ones(600))
p.grad = torch.ones(600)
for optimizer in (st.optim.SGD([p], lr=0.5, max_norm=1e9), st.optim.AdamW([p], state_dtype="int8")):
    optimizer.step()
assert (p < 0.5).all()

@st.fused
def halve(p):
    p.mul_(0.5)
    return p.sum()

assert halve(st.TensorList([torch.ones(4)]).pack())[0] == 2

h, w = torch.randn(8, 4, requires_grad=True), torch.randn(5, 4)
F.cross_entropy(F.linear(st.chunk(h, rows=3), w), torch.zeros(8, dtype=torch.long)).backward()
expected = torch.autograd.grad(F.cross_entropy(F.linear(h, w), torch.zeros(8, dtype=torch.long)), h)[0]
torch.testing.assert_close(h.grad, expected)

x = torch.randn(2, 3)
torch.testing.assert_close(st.pad(x, {1: seq}).softmax(1).unpad(), x.softmax(1))
layer = torch.nn.Linear(3, 3)
torch.testing.assert_close(st.bucketed(layer, {"input": {0: seq}})(x), layer(x))

arena = st.Arena("cpu")
kept = arena.zeros(3)
arena.release(keep="cpu")
arena.restore()
assert kept.sum() == 0

try:
    div[(1,)](x)
except ModuleNotFoundError as error:
    print(error)
"""


def test_every_type_works_without_triton_and_a_kernel_names_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "a kernel needs Triton, which is not installed"
