"""What `import subtensors` loads and registers: a program that only wants the types waits for nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

LATER = [
    "matplotlib",
    "mpmath",
    "rich",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.export",
    "torch.fx.experimental.symbolic_shapes",
    "triton",
]
"""Packages that are imported when what needs them is first called."""

OPS = """
blockwise_absmax chunked_program chunked_program_gradients dequantize_blockwise fused grouped_linear
masked_norm masked_norm_backward masked_reduction masked_reduction_backward masked_softmax masked_softmax_backward
materialize numel pad_list pad_to quantize_blockwise stochastic_round
""".split()

PROGRAM = """
import json, sys
import torch

before = set(sys.modules)
import subtensors

ops = [name.removeprefix("subtensors::") for name in torch._C._dispatch_get_all_op_names() if "subtensors::" in name]
print(json.dumps({"loaded": sorted(set(sys.modules) - before), "ops": sorted(ops)}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """The modules that the import adds to those of torch, and the custom ops after it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_import_loads_no_package_that_only_some_calls_need(imported: dict[str, Any]) -> None:
    assert [name for name in imported["loaded"] if any(f"{name}.".startswith(f"{later}.") for later in LATER)] == []


def test_the_import_registers_every_custom_op(imported: dict[str, Any]) -> None:
    assert imported["ops"] == OPS
