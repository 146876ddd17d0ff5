"""`st.chunk`: makes a ChunkedTensor, or the proxy of one while a compiler traces."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from subtensors.chunked import custom_op as _op  # noqa: F401  (registers the op of compiled programs)
from subtensors.chunked.chunk_policy import known_policy, policy
from subtensors.chunked.chunked_tensor import ChunkedTensor, chunked
from subtensors.chunked.torch_function import is_unchunkable_type
from subtensors.dispatch.torch_internals import dynamo


def chunk(
    x: Tensor,
    dim: int = 0,
    *,
    chunks: int | None = None,
    rows: int | None = None,
    memory_limit: int | str | None = None,
    accumulate: Literal["exact", "fast"] = "exact",
    compile: bool = False,
) -> ChunkedTensor:
    """Chunk `x` along a dim: ops on it run chunk by chunk, so that no intermediate is ever materialized in full.

    Args:
        x: a tensor of any dtype, with at least one dim. A PaddedTensor is returned as it is, with a warning: its rules
            run whole.
        dim: the dim whose rows are chunked.
        chunks: how many chunks; at most one of `chunks`, `rows` and `memory_limit` is given. With none, chunks are as
            long as the region's values and the free memory allow.
        rows: rows in a chunk; the last may have fewer.
        memory_limit: bytes that a chunk's values and their gradients may take, beside the gradients that are asked for:
            an int, or text such as "1GiB".
        accumulate: how gradients of weights add up over chunks: "exact", as in one sum of higher precision, or "fast",
            rounded to the gradient's dtype at each chunk.
        compile: run the math of a chunk through torch.compile.

    Returns:
        a ChunkedTensor of the sizes, dtype and device of `x`.

    Raises:
        SizeError: a count below one, or a tensor of no dims.
        RuleError: a tensor under a transform of torch.func.
        ValueError: more than one of the counts, or an unknown word.
        IndexError: no such dim.

    Example:
        >>> import subtensors as st
        >>> hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
        >>> h = st.chunk(hidden, chunks=4)
        >>> loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(h, weight), torch.arange(8))
        >>> loss.backward()
        >>> weight.grad.shape
        torch.Size([50, 4])
    """
    if is_unchunkable_type(x):
        return x  # type: ignore[return-value]  # which stands for a chunked one
    if torch.compiler.is_compiling():
        from subtensors.chunked.dynamo_proxy import traced_chunk  # which loads the compiler

        traced: ChunkedTensor = traced_chunk(x, dim, policy(chunks, rows, memory_limit, accumulate, compile))
        return traced
    return chunked(x, dim, known_policy(chunks, rows, memory_limit, accumulate, compile))


# Where compiled code breaks its graph at a call, the call is one of eager mode.
dynamo.compile_only_inlined(chunk)
