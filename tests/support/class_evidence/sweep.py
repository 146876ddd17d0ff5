"""A sweep of torch's own op_db and foreach_db that records the calls of every overload."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from class_evidence.calls import Call
from class_evidence.evidence import Recorder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    # The samples of op_db try deprecated and ill-conditioned calls on purpose.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def differentiate(outputs: Any, inputs: Any) -> None:
    ends = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    starts = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if ends and starts:
        torch.autograd.grad([t.abs().sum() for t in ends], starts, allow_unused=True)


def attempt(run: Callable[[], Any]) -> bool:
    # Some samples need a GPU, a LAPACK build or an in-place variant that does not exist for their dtype.
    try:
        run()
    except Exception:
        return False
    return True


def sweep_op_db(recorder: Recorder, samples: int = 12) -> tuple[int, int]:
    """Run op_db under the recorder; return how many samples ran, and how many could not."""
    from torch.testing._internal.common_methods_invocations import op_db  # which takes seconds

    ran = [0, 0]
    for info in op_db:
        supported = info.supported_dtypes("cpu")
        wanted = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
        dtype = next((d for d in wanted if d in supported), None)
        if dtype is None:
            continue
        grad = info.supports_autograd and dtype.is_floating_point
        for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), samples):
            given = (sample.input, *sample.args)

            def forward_and_backward(info: Any = info, given: Any = given, sample: Any = sample) -> None:
                with recorder:
                    differentiate(info(*given, **sample.kwargs), (given, sample.kwargs))

            def without_decomposing(info: Any = info, given: Any = given, sample: Any = sample) -> None:
                with torch.inference_mode(), recorder:
                    info(*given, **sample.kwargs)

            def in_place(info: Any = info, sample: Any = sample) -> None:
                target = sample.input.detach().clone()
                with torch.no_grad(), recorder:
                    info.inplace_variant(target, *sample.args, **sample.kwargs)

            ran[0 if attempt(forward_and_backward) else 1] += 1
            attempt(without_decomposing)
            if info.inplace_variant is not None and isinstance(sample.input, torch.Tensor):
                attempt(in_place)
    return ran[0], ran[1]


def sweep_foreach_db(recorder: Recorder, samples: int = 8) -> None:
    from torch.testing._internal import common_methods_invocations as db

    for info in (
        db.foreach_unary_op_db
        + db.foreach_binary_op_db
        + db.foreach_pointwise_op_db
        + db.foreach_reduce_op_db
        + db.foreach_other_op_db
    ):
        options = {"noncontiguous": False, "same_size": True, "num_input_tensors": [3]}
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float64, **options), samples):
            for variant in (info.method_variant, info.inplace_variant):

                def on_copies(variant: Any = variant, sample: Any = sample) -> None:
                    with torch.no_grad(), recorder:
                        variant([t.clone() for t in sample.input], *sample.args, **sample.kwargs)

                if variant is not None:
                    attempt(on_copies)


def sweep_what_op_db_lacks(recorder: Recorder) -> None:
    # Its samples of these have other sizes than their input.
    x = torch.randn(4, 3, dtype=torch.float64)
    with recorder:
        x.new_zeros(4, 3)
        x.new_full((4, 5), 2.0)


@functools.cache
def recorded() -> tuple[dict[OpOverload, list[Call]], tuple[int, int]]:
    recorder = Recorder()
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sweep_what_op_db_lacks(recorder)
        counts = sweep_op_db(recorder)
        sweep_foreach_db(recorder)
    return recorder.calls, counts
