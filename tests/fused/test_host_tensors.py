"""0-d CPU tensors in math on a GPU: accepted and refused as torch accepts and refuses them."""

import itertools

import pytest
import torch

import subtensors as st
from subtensors.dispatch.fused.trace import trace
from subtensors.dispatch.ops.op_classes import OpClass, op_class
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
    "first factor": (lambda p, m: p.addcmul_(m, p), torch.float32),
    "dividend": (lambda p, m: p.addcdiv(m, p), torch.float32),
    "constant dividend": (lambda p, m: p.addcdiv(torch.tensor(2.0), p), torch.float32),
    "end": (lambda p, m: p.lerp(m, 0.5), torch.float32),
    "conjunction": (lambda p, m: torch.logical_and(m, p), torch.float32),
    "written number": (lambda p, m: m.add_(p.sum()), torch.float32),
}
ACCEPTED = {
    "value": (lambda p, m: p.masked_fill(p > 0, m), torch.float32),
    "mask made of both": (lambda p, m: p.masked_fill(p > m, 1.0), torch.float32),
    "where": (lambda p, m: torch.where(m > 0, p, m), torch.float32),
    "lerp": (lambda p, m: p.lerp(p * 2, m), torch.float32),
    "second factor": (lambda p, m: p.addcmul(p, m), torch.float32),
    "constant": (lambda p, m: torch.maximum(p, torch.tensor(2.0)), torch.float32),
    "written": (lambda p, m: m.add_(2 * m), torch.float32),
    "moved": (lambda p, m: m.copy_(p.sum()), torch.float32),
    "sum": (lambda p, m: p + m * 2, torch.float32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_op_that_takes_one_device_refuses_a_cpu_tensor_beside_a_gpu_tensor(name):
    with pytest.raises(st.RuleError, match=r"(on one device|to a CPU tensor)(?s:.*)test_host_tensors"):
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
        with pytest.raises(RuntimeError, match=r"device|CPU Scalar"):
            math(p, m)
    else:
        math(p, m)


def test_an_operation_on_many_numbers_of_the_host_is_traced_in_linear_time():
    def math(p, m):
        for _ in range(100):
            m = m + m
        return p * m

    traced(math)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_number_cannot_hold_a_number_per_element():
    # Torch 2.15 refuses it before the math is read.
    with pytest.raises(RuntimeError, match=r"can't hold a number per element|doesn't match the broadcast shape"):
        traced(lambda p, m: p.sum().copysign_(p))


def tensor_arguments(op):
    """The names of an op's arguments that are tensors."""
    return [a.name for a in op._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]


def pointwise_ops():
    """Every pointwise op of torch with several tensors, functional and in place."""
    for packet in (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)):
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            if (
                any(a.is_out for a in op._schema.arguments)
                or len(tensor_arguments(op)) < 2
                or op_class(op) is not OpClass.POINTWISE
            ):
                continue
            if op._opname not in NOT_COMPARED:
                yield op


NOT_COMPARED = {"_add_relu", "_masked_scale", "_add_relu_", "fill", "fill_", "rrelu_with_noise_backward"}
"""Ops that torch has on one of the devices only, or that don't compute on one of their tensors."""

NUMBERS = {"number": 2, "float": 0.5, "int": 1, "bool": True, "Optional[str]": None}


def applied(op, tensors):
    """The op on some tensors and on numbers."""
    left = iter(tensors)
    values = {
        a.name: next(left) if a.name in tensor_arguments(op) else NUMBERS.get(str(a.type), a.default_value)
        for a in op._schema.arguments
        if a.name in tensor_arguments(op) or not a.has_default_value()
    }
    positional = [values.pop(a.name) for a in op._schema.arguments if a.name in values and not a.kwarg_only]
    return op(*positional, **values)


def dtypes_of(op):
    """Dtypes of tensors that the op takes."""
    count = len(tensor_arguments(op))
    floats = [torch.float32] * count
    masks = [torch.bool if name in ("mask", "condition") else torch.float32 for name in tensor_arguments(op)]
    others = ([dtype] * count for dtype in (torch.float64, torch.int64, torch.bool))
    for dtypes in (floats, masks, *others):
        try:
            applied(op, [torch.ones((), dtype=dtype) for dtype in dtypes])
        except RuntimeError:
            continue
        return dtypes
    raise AssertionError(f"{op} takes none of the dtypes")


def is_refused(math, tensors):
    """Whether a call raises an error."""
    try:
        math(*tensors)
    except RuntimeError:
        return True
    return False


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_every_pointwise_op_takes_numbers_of_the_host_where_torch_does():
    wrong = []
    for op in pointwise_ops():
        dtypes = dtypes_of(op)
        for on_host, shape in itertools.product(itertools.product((False, True), repeat=len(dtypes)), [(3,), ()]):
            if len(set(on_host)) < 2:
                continue
            tensors = [
                torch.ones((), dtype=dtype) if host else torch.ones(shape, dtype=dtype, device="cuda")
                for dtype, host in zip(dtypes, on_host, strict=True)
            ]
            parameters = [
                Parameter(f"x{i}", t.dtype, Shape.PER_TENSOR if t.dim() == 0 else Shape.PER_ELEMENT, on_host=host)
                for i, (t, host) in enumerate(zip(tensors, on_host, strict=True))
            ]

            def math(*given, op=op):
                return applied(op, given)

            def ours(*tensors, math=math, parameters=parameters):
                found = trace(math, parameters, [], lambda given, _: (tuple(given), {}), torch.device("cuda"))
                if found.unlowered:  # such a call runs through torch
                    math(*tensors)

            if is_refused(math, tensors) != is_refused(ours, tensors):
                wrong.append((str(op), on_host, shape))
    assert not wrong, wrong
