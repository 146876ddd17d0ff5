"""0-d CPU tensors in math on a GPU: accepted and refused as torch accepts and refuses them."""

import pytest
import torch

import subtensors as st
from subtensors.dispatch.fused.trace import trace
from subtensors.kernels.fused.program import Parameter, Shape


def traced(math, dtype=torch.float32):
    """The trace of math on a tensor of a device and a 0-d tensor of the host."""
    parameters = [
        Parameter("x0", torch.float32, Shape.PER_ELEMENT),
        Parameter("x1", dtype, Shape.PER_TENSOR, on_host=True),
    ]
    return trace(math, parameters, [], lambda tensors, numbers: (tuple(tensors), {}), torch.device("meta"))


REFUSED = {
    "mask": (lambda p, m: p.masked_fill(m, 1.0), torch.bool),
    "mask of a tensor": (lambda p, m: p.masked_fill_(m, p.sum()), torch.bool),
    "computed mask": (lambda p, m: p.masked_fill(m * 2 > 1, 1.0), torch.float32),
    "bounds": (lambda p, m: torch.clamp(p, min=m, max=m), torch.float32),
    "one bound": (lambda p, m: torch.clamp_min(p, m), torch.float32),
    "bound in place": (lambda p, m: p.clamp_(max=m), torch.float32),
    "clamped": (lambda p, m: m.clamp(min=p.sum()), torch.float32),
}
ACCEPTED = {
    "value": (lambda p, m: p.masked_fill(p > 0, m), torch.float32),
    "mask made of both": (lambda p, m: p.masked_fill(p > m, 1.0), torch.float32),
    "where": (lambda p, m: torch.where(m > 0, p, m), torch.float32),
    "lerp": (lambda p, m: p.lerp(p * 2, m), torch.float32),
    "sum": (lambda p, m: p + m * 2, torch.float32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_op_that_takes_one_device_refuses_a_cpu_tensor_beside_a_gpu_tensor(name):
    with pytest.raises(st.RuleError, match=r"takes tensors on one device(?s:.*)test_host_tensors"):
        traced(*REFUSED[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_op_that_takes_numbers_of_the_cpu_accepts_them(name):
    traced(*ACCEPTED[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*REFUSED, *ACCEPTED])
def test_torch_decides_the_same_way(name):
    math, dtype = (REFUSED | ACCEPTED)[name]
    p, m = torch.ones(3, device="cuda"), torch.ones((), dtype=dtype)
    if name in REFUSED:
        with pytest.raises(RuntimeError, match="device"):
            math(p, m)
    else:
        math(p, m)
