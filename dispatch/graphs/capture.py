"""Private torch APIs of CUDA graph captures and their pools: one function each, with the versions checked."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import torch
import torch.fx

from subtensors.dispatch.graphs.restore_writes import RestoreWrites
from subtensors.dispatch.ops.plain_views import PlainViews
from subtensors.dispatch.torch_internals.requires import requires

_log = logging.getLogger(__name__)
_ATTEMPTS = 4
_growing = Lock()


class NotFunctional(Exception):
    """A function has effects beside its results; the message says which."""


def new_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph to capture on this device. Checked on 2.11.

    It asks for the current stream when it is made, for which torch makes a context on the current device.
    """
    with torch.cuda.device(device):
        return torch.cuda.CUDAGraph()


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> Iterator[None]:
    """Capture what this thread does on the current stream; other threads may go on using the device.

    Whatever fails, torch is left as it was: no capture is on, the pool has no more owners, random numbers can be drawn.

    Args:
        graph: a new one, which becomes what is captured.
        device: the current one.
        pool: where it takes its memory from.
    """
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:  # it tells more than what it did to the capture
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:  # raised again, once torch is in order
        _forget_capture(graph, device, pool)
        raise


def _forget_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Close a capture that failed, which torch leaves half open where CUDA invalidated it. Checked on 2.11.

    Its allocators, the one of pinned memory too, go on serving the capture, and the random generator believes that it
    is being captured. All of them learn of an end from the graph alone, so it is given one: of a capture of nothing,
    on the same stream.
    """
    nothing = torch.empty(1, device=device)
    if not _has_ended(graph):
        try:
            _begin_capture(torch.cuda.current_stream(device))
            nothing.zero_()
            graph.capture_end()
        except RuntimeError as error:  # it had not begun
            _log.debug("a failed capture is closed piece by piece: %s", error)
            _close_piece_by_piece(device, pool)
            return
    graph.reset()


def _begin_capture(stream: torch.cuda.Stream) -> None:
    """Begin a CUDA capture that torch does not know of."""
    thread_local = 1
    status = ctypes.CDLL("libcuda.so.1").cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), thread_local)
    if status:
        raise RuntimeError(f"cuStreamBeginCapture: {status}")


@requires("torch._C._cuda_endAllocateToPool", "torch._C._cuda_releasePool")
def _close_piece_by_piece(device: torch.device, pool: Any) -> None:
    with suppress(RuntimeError):  # it may not serve the capture
        torch._C._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined]
        torch._C._cuda_releasePool(device.index, pool)  # type: ignore[attr-defined]
    nothing = torch.empty(1, device=device)
    # The first thing that is asked of CUDA may be told of an error that is past.
    for _ in range(_ATTEMPTS):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            try:
                empty = torch.cuda.CUDAGraph()
                empty.capture_begin(capture_error_mode="thread_local")
                nothing.zero_()
                empty.capture_end()
            except RuntimeError as error:
                _log.debug("after a failed capture: %s", error)
                continue
        empty.reset()
        return


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextmanager
def growing_segments() -> Iterator[None]:
    """A context in which allocations come from segments that grow in place. Checked on 2.11.

    A segment that can't grow is of no use to a graph that needs a larger one. The setting is global to the process, and
    the allocator supports changing it: it keeps the segments it has, and never mixes the two kinds. One thread at a
    time sets it; another that captures at the same time shares that setting, or gets segments of the usual kind.
    Allocators other than torch's own have no such setting.
    """
    before = allocator_settings() if torch.cuda.get_allocator_backend() == "native" else None
    if before is None or "expandable_segments:true" in before.lower() or not _growing.acquire(blocking=False):
        yield
        return
    try:
        _set_allocator(with_expandable_segments(before, True))
        yield
    finally:
        _set_allocator(with_expandable_segments(before, False))
        _growing.release()


def allocator_settings() -> str:
    """The settings that the allocator of CUDA memory has, in the words of `PYTORCH_ALLOC_CONF`. Checked on 2.11."""
    get: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get is not None:
        return get()
    snapshot = torch._C._cuda_memorySnapshot((0, 0, False))
    settings: str = snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]  # type: ignore[index]
    return settings


def with_expandable_segments(settings: str, wanted: bool) -> str:
    """These settings of the allocator, with segments that grow or without.

    >>> with_expandable_segments("max_split_size_mb:64,expandable_segments:False", True)
    'max_split_size_mb:64,expandable_segments:True'
    """
    others = re.sub(r"(^|,)\s*expandable_segments:\w+", "", settings).lstrip(",")
    return ",".join(filter(None, [others, f"expandable_segments:{wanted}"]))


@requires("torch._C._accelerator_setAllocatorSettings")
def _set_allocator(settings: str) -> None:
    """Settings that are left out go back to what torch has them to be."""
    torch._C._accelerator_setAllocatorSettings(settings)


def pool_bytes(pool: tuple[int, int]) -> int:
    """The bytes of device memory in the segments of a private pool. Checked on 2.11."""
    return sum(end - begin for begin, end in pool_segments(pool))


def pool_segments(pool: tuple[int, int]) -> list[tuple[int, int]]:
    """The begin and end addresses of the segments of a private pool. Checked on 2.11."""
    return [(s["address"], s["address"] + s["total_size"]) for s in _segments(pool)]


def held_bytes(pool: tuple[int, int]) -> int:
    """The bytes of a private pool that tensors hold. Checked on 2.11."""
    return sum(s["active_size"] for s in _segments(pool))


def _segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool, include_traces=False)
    return found


@requires("torch.compiler._is_compiling_flag", "torch.fx.experimental.proxy_tensor.make_fx")
def traced(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], simplified: bool = False
) -> torch.fx.GraphModule:
    """The aten ops that a function of tensors makes, without running them. Checked on 2.11, 2.13.

    Tensors that are not among the inputs are attributes of the module, themselves and not copies.

    Args:
        function: what to trace.
        inputs: of the sizes to trace it at.
        simplified: in the ops that the compiler would write them in, of which none writes to what another made.

    Raises:
        NotFunctional: it writes to a tensor that is not among the inputs, and is to be simplified.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # Programs ask whether they are compiled before they look at values, which a trace has none of.
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        # Outside of the trace, so that it sees what is run after all.
        with RestoreWrites(), torch.no_grad(), PlainViews():
            table = _simpler_ops() if simplified else None
            module: torch.fx.GraphModule = make_fx(function, table, tracing_mode="fake", _allow_non_fake_inputs=True)(
                *inputs
            )
            if simplified and any(map(writes, module.graph.nodes)):
                again = torch.func.functionalize(module, remove="mutations")
                made = make_fx(again, table, tracing_mode="fake", _allow_non_fake_inputs=True)
                try:
                    module = made(*[t.detach() for t in inputs])
                except RuntimeError as error:  # torch calls it an internal assertion
                    if "non-functional tensor" not in str(error):
                        raise
                    raise NotFunctional("it writes to a tensor that is not among its inputs") from error
    finally:
        torch.compiler._is_compiling_flag = before
    return module


def writes(node: torch.fx.Node) -> bool:
    """Return whether a node calls an op that writes to its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


@requires("torch._inductor.decomposition.select_decomp_table")
def _simpler_ops() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Callable[..., Any]] = select_decomp_table()
    return table


@requires("torch._functorch.partitioners.min_cut_rematerialization_partition")
def saved_values(graph: torch.fx.Graph, owner: torch.nn.Module, results: int, gradients: int) -> list[torch.fx.Node]:
    """The nodes of a joint graph that the compiler would save in forward for backward. Checked on 2.11, 2.13.

    Args:
        graph: returns results, gradients, and the tensors that stand for the gradients of results; its nodes have the
            values that they had when it was traced.
        owner: has the graph's constants.
        results, gradients: how many of each.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    outs: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    tangents = outs[results + gradients :]
    copy = torch.fx.Graph()
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for i, node in enumerate([*graph.find_nodes(op="placeholder"), *tangents]):
        made[node] = copy.placeholder(f"tangents_{i}" if node in tangents else f"primals_{i}")
        made[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node not in made and node.op != "output":
            made[node] = copy.node_copy(node, made.__getitem__)
    copy.output([made[node] for node in outs[: results + gradients]])
    joint = torch.fx.GraphModule(owner, copy)
    forward, _ = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=results)
    names = {twin.name: node for node, twin in made.items()}
    saved: list[Any] = list(forward.graph.output_node().args[0])[results:]  # type: ignore[arg-type]
    return [names[node.name] for node in saved]


def random_place(device: torch.device) -> torch.Tensor:
    """The state of a device's random generator, which the host knows. Checked on 2.11, 2.13."""
    return _generator(device).get_state()


def go_to_random_place(device: torch.device, place: torch.Tensor) -> None:
    """Set the random generator of a device to a state that `random_place` returned."""
    _generator(device).set_state(place)


def seed_random_numbers(device: torch.device, seed: int) -> None:
    """Seed the random generator of this device alone; `torch.manual_seed` seeds those of all devices."""
    _generator(device).manual_seed(seed)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
