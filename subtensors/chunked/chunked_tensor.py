"""`ChunkedTensor`: a tensor whose ops run chunk by chunk, since their results would be too large in full."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from subtensors.arguments import flag, shown
from subtensors.chunked import custom_op
from subtensors.chunked.lazy_tensor import AliasRef, LazyTensor, alias_ref, graph_node, user_tensor
from subtensors.chunked.number import ChunkedNumber, result_of_rows
from subtensors.chunked.record_call import check_not_transformed, handle_torch_dispatch
from subtensors.chunked.torch_function import FAST_PATHS, handle_torch_function, is_metadata_query
from subtensors.chunked.traced_chunk import TracedChunk
from subtensors.counts import parse_bytes
from subtensors.dispatch.chunked.evaluation import evaluate, passes_for
from subtensors.dispatch.chunked.lazy_graph import LazyValue, computation, leaf_value
from subtensors.dispatch.chunked.lower_cross_entropy import describe_expected_loss
from subtensors.dispatch.chunked.row_layout import BoolArray, ChunkAxis, Policy
from subtensors.dispatch.chunked.sharded_head import full_tensor
from subtensors.dispatch.chunked.shared_pass import UNSETTLED, evaluate_rows, settle
from subtensors.dispatch.ops.errors import RuleError, SizeError
from subtensors.dispatch.ops.plain_types import LAZY_TYPES, MAPPED_TYPES, MASKED_TYPES, PLAIN_TYPES
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.padded_value import PaddedValue
from subtensors.dispatch.padded.true_sizes import valid_on_host
from subtensors.dispatch.torch_internals import dynamo, dynamo_rules
from subtensors.dispatch.torch_internals.autograd import convert_from_local, is_transforming
from subtensors.padded.autograd import with_storage
from subtensors.padded.padded_tensor import PaddedTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class ChunkedTensor(LazyTensor):
    """A tensor whose ops are recorded, and run chunk by chunk when a value without the chunked dim is needed.

    Sizes, dtype and device are those of the full tensor. A result without the chunked dim (a gradient of a weight) is a
    plain tensor at once; a number (a loss, an accuracy) is computed when it is read, together with others that share
    its pass; one with the dim stays chunked, and `realize()` makes it plain. Gradients reach the
    tensor that was chunked and every plain tensor that an op combined it with.

    Args:
        x: the tensor, of at least one dim.
        dim: the dim whose rows are chunked.
        chunks, rows, memory_limit, accumulate, compile: see `chunk`.

    Example:
        >>> import torch
        >>> h = ChunkedTensor(torch.ones(6, 2), chunks=3)
        >>> h @ torch.ones(2, 4)
        ChunkedTensor((6, 4), float32, cpu, rows in dim 0, 1 op recorded)
        >>> (h @ torch.ones(2, 4)).sum()
        tensor(48.)
    """

    @staticmethod
    def __new__(
        cls,
        x: Tensor,
        dim: int = 0,
        *,
        chunks: int | None = None,
        rows: int | None = None,
        memory_limit: int | str | None = None,
        accumulate: Literal["exact", "fast"] = "exact",
        compile: bool = False,
    ) -> ChunkedTensor:
        """Return the tensor, chunked."""
        return chunked(x, dim, cached_policy(chunks, rows, memory_limit, accumulate, compile))

    def __init__(self, x: Tensor, dim: int = 0, **kwargs: object) -> None:
        pass

    def realize(self) -> Tensor:
        """Materialize the value as a plain tensor, with its ops run chunk by chunk.

        The same pass computes other values of one number a row that the program holds of the same logits.

        Returns:
            a dense tensor; differentiable, with each chunk computed again in backward.

        Example:
            >>> import torch
            >>> ChunkedTensor(torch.ones(3), rows=2).mul(2).realize()
            tensor([2., 2., 2.])
        """
        value = alias_ref(self).value
        return evaluate(value) if value.layout is None else evaluate_rows(value)

    @classmethod
    def result_of(cls, value: LazyValue) -> Tensor:
        """Return a value without the rows to the user: a number waits, anything else is computed."""
        return result_of_rows(value)

    def explain(self) -> str:
        """Describe the pass that `realize()` would run (chunks, bytes, inputs, ops), and the plan of a loss."""
        value = self._ref.value
        passes = _description(lambda: "\n".join(plan.describe() for plan in passes_for(value)))
        loss = _description(lambda: describe_expected_loss(value))
        return "\n".join(filter(None, (passes, loss))) or repr(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        value = self._ref.value
        count = _op_count(value)
        dim = "" if value.layout is None else f", rows in dim {value.layout.dim}"
        dtype = str(value.dtype).removeprefix("torch.")
        recorded = f"{count} op{'' if count == 1 else 's'} recorded"
        return f"ChunkedTensor({tuple(value.shape)}, {dtype}, {value.device}{dim}, {recorded})"

    __str__ = __repr__
    __format__ = object.__format__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., PyTree], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if func not in FAST_PATHS and is_metadata_query(func):
            if func == _GRAD_FN:
                return graph_node(args[0])
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return handle_torch_function(cls, func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch._ops.OpOverload, types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        return handle_torch_dispatch(cls, func, args, kwargs or {})


class PlanTensor(ChunkedTensor):
    """A ChunkedTensor in a module of a plan for `parallelize_module`, in place of the DTensor that the plan makes.

    It stands for the values of all processes. Which of them has which is a matter of what reads them, so a plan may
    ask for any layout.
    """

    placements = None
    """Other than those of any plan, which then asks for its own."""
    requested: Sequence[Placement] = ()
    """The placements that the plan asked for last."""

    def redistribute(self, device_mesh: object = None, placements: Sequence[Placement] = (), **_: object) -> PlanTensor:
        """Return it with other placements."""
        out: PlanTensor = user_tensor(PlanTensor, alias_ref(self))  # type: ignore[assignment]
        out.requested = placements
        return out

    def to_local(self, **options: object) -> ChunkedTensor:
        """Return it as an output that is the same in each process.

        Raises:
            RuleError: the output of a process would be a part of it.
        """
        if not all(placement.is_replicate() for placement in self.requested):
            raise RuleError(
                f"a plan asks for a process's own part of a ChunkedTensor, {tuple(self.requested)}, which stands for "
                f"all of it: give the module use_local_output=False or output_layouts=Replicate(), or leave the module "
                f"out of the plan and make its weight a DTensor; no logits are gathered"
            )
        return user_tensor(ChunkedTensor, alias_ref(self))  # type: ignore[return-value]


def _from_local(
    make_distributed: Callable[..., DTensor],
    x: LazyTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: object,
) -> Tensor:
    """`DTensor.from_local` of chunked rows, which may be gathered, or of a number of theirs, which is computed."""
    if isinstance(x, ChunkedNumber):
        return make_distributed(x.realize(), device_mesh, placements, **options)
    if isinstance(x, PlanTensor):
        return x.redistribute(device_mesh, placements or ())
    ref = alias_ref(x)
    layout = ref.value.layout
    if layout is not None and any(not placement.is_replicate() for placement in placements or ()):
        full = make_distributed(x.realize(), device_mesh, placements, **options).full_tensor()
        ref = alias_ref(chunked_by(full, layout.dim, layout.axis.policy))
    return user_tensor(PlanTensor, ref)


@functools.cache
def _join_plans() -> None:
    convert_from_local(LazyTensor, _from_local)


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
    """Chunk `x` along a dim: ops on it run chunk by chunk, which bounds the memory of what follows.

    Args:
        x: a tensor of any dtype, with at least one dim. Of a PaddedTensor no padding is counted, and chunks of padding
            alone are not run where the host knows the true sizes.
        dim: the dim whose rows are chunked.
        chunks: how many chunks; at most one of `chunks`, `rows` and `memory_limit` is given. With none, chunks are as
            long as a budget of bytes and the free memory allow, or the cost model finds best, which may be one chunk.
        rows: rows in a chunk; the last may have fewer.
        memory_limit: bytes that may be taken at the peak beyond the inputs, gradients included: an int, or text such as
            "1GiB".
        accumulate: how gradients of weights add up over chunks: "exact", as in one sum of higher precision, or "fast",
            rounded to the gradient's dtype at each chunk.
        compile: run the math of a chunk through torch.compile.

    Returns:
        a ChunkedTensor of the sizes, dtype and device of `x`; for a PaddedTensor a PaddedTensor around one.

    Raises:
        SizeError: a count below one, or a tensor of no dims.
        TypeError: something other than a dense tensor, a count or dim that is no whole number.
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
    if torch.compiler.is_compiling():
        checked = policy(chunks, rows, memory_limit, accumulate, compile)
        return TracedChunk(x, dim, *checked)  # type: ignore[return-value]  # in place of a chunked tensor
    divided = cached_policy(chunks, rows, memory_limit, accumulate, compile)
    if UNSETTLED:
        settle()
    if isinstance(x, PaddedTensor):
        return chunked_padding(x, dim, divided)  # type: ignore[return-value]  # whose storage is a ChunkedTensor
    return chunked(x, dim, divided)


_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]  # a descriptor of the class


def policy(
    chunks: int | None, rows: int | None, memory_limit: int | str | None, accumulate: str, compile: bool
) -> Policy:
    """Check the arguments of `chunk`, and return the policy by which rows are divided."""
    given = {"chunks": chunks, "rows": rows, "memory_limit": memory_limit}
    counts = {name: value for name, value in given.items() if value is not None}
    if len(counts) > 1:
        raise ValueError(f"chunk takes one of chunks, rows and memory_limit; got {', '.join(counts)}")
    limit = parse_bytes("memory_limit", memory_limit) if isinstance(memory_limit, str) else memory_limit
    for name, count in {**counts, **({"memory_limit": limit} if limit is not None else {})}.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} is a whole number, got {shown(count)}")
        if count < 1:
            raise SizeError(f"{name} must be at least 1, got {count}")
    if not isinstance(accumulate, str) or accumulate not in ("exact", "fast"):
        raise ValueError(f'accumulate is "exact" or "fast", got {shown(accumulate)}')
    flag("compile", compile)
    return Policy(chunks, rows, limit, accumulate == "exact", compile)


_known_policy = functools.lru_cache(maxsize=64, typed=True)(policy)


def cached_policy(
    chunks: int | None, rows: int | None, memory_limit: int | str | None, accumulate: str, compile: bool
) -> Policy:
    """Return the policy of earlier arguments that were the same, or that of `policy`."""
    try:
        return _known_policy(chunks, rows, memory_limit, accumulate, compile)
    except TypeError:  # of an argument without a hash, which is none of those that it takes
        return policy(chunks, rows, memory_limit, accumulate, compile)


def chunked_padding(x: PaddedTensor, dim: int, policy: Policy) -> PaddedTensor:
    """Return a padded tensor, chunked: its rules record ops on a storage that is chunked.

    Raises:
        TypeError, RuleError, SizeError, IndexError: see `chunk`.
    """
    if is_transforming():
        raise RuleError(
            "chunk of a PaddedTensor has no rule inside a transform of torch.func or forward-mode differentiation: "
            "unpad before it"
        )
    is_dim = type(dim) is int and -x.ndim <= dim < x.ndim

    def storage(value: PaddedValue) -> ChunkedTensor:
        return chunked(value.dense, dim, policy, valid_on_host(value.dims, dim, value.sizes) if is_dim else None)

    return with_storage(x, storage)


def chunked(x: Tensor, dim: int, policy: Policy, is_valid: BoolArray | None = None) -> ChunkedTensor:
    """Return a tensor, chunked along a dim by a policy; `is_valid` tells rows from padding, see `ChunkAxis`.

    Raises:
        TypeError, RuleError, SizeError, IndexError: see `chunk`.
    """
    if "torch.distributed.tensor" in sys.modules:
        _join_plans()
    if type(x) not in PLAIN_TYPES:
        x = x.realize() if isinstance(x, ChunkedTensor) else full_tensor(x)
    if not isinstance(x, Tensor):
        raise TypeError(f"chunk takes a tensor, got {type(x).__name__}")
    if type(x) in MASKED_TYPES:
        raise TypeError(f"a ChunkedTensor is made of a plain tensor, and a {type(x).__name__} has rules of its own")
    if is_transforming():
        check_not_transformed(x)
    if type(x) in MAPPED_TYPES:
        raise TypeError("chunk takes one tensor, and a TensorList holds several: chunk each, [st.chunk(t) for t in x]")
    dims = x.ndim
    if x.layout is not torch.strided or x.is_quantized is True or x.is_nested is True:
        kinds = "nested" * (x.is_nested is True), "quantized" * (x.is_quantized is True)
        kind = next(filter(None, kinds), str(x.layout).removeprefix("torch."))
        raise TypeError(f"chunk takes a dense tensor, got one that is {kind}; make it dense first")
    if dims == 0:
        raise SizeError("a tensor of no dims has no rows to chunk")
    if type(dim) is not int:
        advice = f"; a limit has a name: st.chunk(x, memory_limit={dim!r})" if isinstance(dim, str) else ""
        raise TypeError(f"dim is a whole number, got {shown(dim)}{advice}")
    if not -dims <= dim < dims:
        advice = f"; for chunks of {dim} rows: st.chunk(x, rows={dim})" if dim > 0 else ""
        raise IndexError(f"dim must be in [{-dims}, {dims - 1}], got {dim}{advice}")
    return chunked_by(x, dim % dims, policy, is_valid)


def chunked_by(x: Tensor, dim: int, policy: Policy, is_valid: BoolArray | None = None) -> ChunkedTensor:
    """Return a plain tensor, chunked along a dim, counted from the front, by a policy; see `chunked`."""
    x = x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x
    ref = AliasRef(leaf_value(x, dim, ChunkAxis(x.shape[dim], policy, x.numel(), is_valid)))
    return user_tensor(ChunkedTensor, ref)  # type: ignore[return-value]


def _description(describe: Callable[[], str | None]) -> str | None:
    """Return a description, or the reason for which a memory limit refuses what it would describe."""
    try:
        return describe()
    except ValueError as error:
        return str(error)


def _op_count(value: LazyValue) -> int:
    """Return the number of recorded ops that a value is to be computed by."""
    return len({found.node for found in computation([value])} - {None})


def _chunk_in_program(x: Tensor, dim: int, *division: int | bool | None) -> ChunkedTensor:
    return chunked_by(x, dim, Policy(*division))  # type: ignore[arg-type]  # the fields of a policy, in order


custom_op.PROGRAM_SCOPE["chunk"] = _chunk_in_program
_KINDS = (LazyTensor, ChunkedTensor, PlanTensor, ChunkedNumber)
LAZY_TYPES.update(_KINDS)
for _kind in (*_KINDS, TracedChunk):
    dynamo_rules.declare(_kind)
dynamo.call_eagerly(
    ChunkedTensor.__torch_function__.__func__,  # type: ignore[attr-defined]  # of a classmethod
    "a ChunkedTensor is made by st.chunk within compiled code, which takes plain tensors",
)
# Where compiled code breaks its graph at a call of `chunk`, the call runs eagerly.
dynamo.compile_only_inlined(chunk)
