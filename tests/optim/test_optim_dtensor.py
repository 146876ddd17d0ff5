"""Parameters that FSDP2 shards over processes, or DDP replicates, train as in one process, over gloo and NCCL."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from data_parallel_training import a_repeated_model_trains_as_one_does_on_all_data
from kernels_on_cpu import kernels_on_cpu
from optimizers import SHARDED, SHARDED_MATRIX
from own_optimizer import own_optimizer
from process_end import end_of_process
from python_calls import python_calls
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import subtensors as st
from subtensors.dispatch.fused.bound_call import interprets_kernels
from subtensors.kernels.fused.launch import Grid

STEPS = 4
# Another one in a process that has a GPU to itself.
device = torch.device("cpu")


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    # Sizes that two processes can't share evenly.
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(device)


def loss_of(net: torch.nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(number)).to(device)
    loss: torch.Tensor = (net(x) - x[:, :3]).square().mean()
    return loss


def go_on(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, max_norm: float | None = None) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss_of(net, number).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()


def whole(tensors: Any) -> list[torch.Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in (t.detach() for t in tensors)]


def sharded() -> torch.nn.Module:
    net = model()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # the CPU's also where there are GPUs
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def a_sharded_model_trains_as_the_whole_one() -> None:
    for name, kwargs in SHARDED:
        for max_norm in (None, 0.05):
            net, plain = sharded(), model()
            optimizer = getattr(st.optim, name)(net.parameters(), lr=0.05, max_norm=max_norm, **kwargs)
            go_on(net, optimizer, range(STEPS))
            go_on(plain, getattr(torch.optim, name)(plain.parameters(), lr=0.05, **kwargs), range(STEPS), max_norm)
            torch.testing.assert_close(whole(net.parameters()), whole(plain.parameters()))
            (batch,) = optimizer._updater.groups[0].batches
            assert batch.sees_shards
            assert not any(isinstance(t, DTensor) for column in batch.columns() for t in column)
            for p in net.parameters():
                assert all(isinstance(t, DTensor) for n, t in optimizer.state[p].items() if n != "step")


def a_live_optimizer_is_converted() -> None:
    net, plain = sharded(), model()
    optimizer, other = (torch.optim.AdamW(n.parameters(), lr=0.05) for n in (net, plain))
    go_on(net, optimizer, range(STEPS))
    go_on(net, st.optim.convert(optimizer), range(STEPS, 2 * STEPS))
    go_on(plain, other, range(2 * STEPS))
    torch.testing.assert_close(whole(net.parameters()), whole(plain.parameters()))


def a_class_of_ones_own_needs_nothing_more() -> None:
    cls = own_optimizer()
    net, plain = sharded(), model()
    optimizer = cls(net.parameters(), lr=0.05, max_norm=0.05, ema=0.9)
    whole_one = cls(plain.parameters(), lr=0.05, max_norm=0.05, ema=0.9)
    go_on(net, optimizer, range(STEPS))
    go_on(plain, whole_one, range(STEPS))
    torch.testing.assert_close(whole(net.parameters()), whole(plain.parameters()))
    assert optimizer._updater.groups[0].batches[0].sees_shards
    with optimizer.averaged_weights(), whole_one.averaged_weights():
        torch.testing.assert_close(whole(net.parameters()), whole(plain.parameters()))


def has_kernels() -> bool:
    """On a CPU only where Triton interprets them, which it does where there is no GPU."""
    with kernels_on_cpu():
        return device.type == "cuda" or interprets_kernels()


class Extreme(st.optim.Optimizer):
    """Steps by the least and the largest number of a tensor, and of how many are positive."""

    def update(self, p: Any, g: Any, *, lr: Any) -> None:
        """The math."""
        p.sub_(lr * g * (g.amax() - g.amin()) * (1 + (p > 0).sum()))


def sums_over_a_tensor_are_those_of_all_its_shards() -> None:
    # Rows for one process alone, for each, and more for one than for the other.
    shapes = [(1, 5), (7, 3), (4,), (33, 20)]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    plainly, by_kernels = [nullcontext], [kernels_on_cpu] if has_kernels() else []
    for make, ways in (
        (lambda p: st.optim.LAMB(p, lr=0.05), plainly + by_kernels),
        (lambda p: st.optim.LAMB(p, lr=0.05, max_norm=0.5, ema=0.5), plainly + by_kernels),
        (lambda p: Extreme(p, {"lr": 0.01}), by_kernels),  # DTensors know no extreme of a shard without elements
    ):
        for way in ways:
            ours = [torch.nn.Parameter(distribute_tensor(v.clone(), mesh, [Shard(0)])) for v in values]
            theirs = [torch.nn.Parameter(v.clone()) for v in values]
            optimizer, other = make(ours), make(theirs)
            with way():
                stepped(ours, optimizer, range(STEPS))
                stepped(theirs, other, range(STEPS))
            torch.testing.assert_close(whole(ours), whole(theirs))
            # Without kernels DTensors take the step, op by op.
            (batch,) = optimizer._updater.groups[0].batches
            assert batch.sees_shards == batch.reduces_shards == (way in by_kernels or device.type == "cuda")


def a_norm_is_that_of_shards_and_of_what_every_process_has() -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    values = [
        torch.randn(s, generator=torch.Generator().manual_seed(i)).to(device) for i, s in enumerate([(7, 3), (5,)])
    ]
    for places in (Shard(0), Replicate()):
        ours = [
            torch.nn.Parameter(distribute_tensor(values[0].clone(), mesh, [places])),
            torch.nn.Parameter(values[1].clone()),
        ]
        theirs = [torch.nn.Parameter(v.clone()) for v in values]
        for params in (ours, theirs):
            stepped(params, st.optim.AdamW(params, lr=0.05, max_norm=0.1), range(STEPS))
        torch.testing.assert_close(whole(ours), whole(theirs))


def gradients_may_be_placed_otherwise_than_their_parameters() -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    values = [torch.randn(s, generator=torch.Generator().manual_seed(sum(s))).to(device) for s in [(7, 3), (4, 6)]]
    weight = (dist.get_rank() + 1) / sum(range(dist.get_world_size() + 1))
    for make in (st.optim.AdamW, st.optim.LAMB, st.optim.Muon):
        for places in (Replicate(), Shard(1)):
            ours = [torch.nn.Parameter(distribute_tensor(v.clone(), mesh, [places])) for v in values]
            theirs = [torch.nn.Parameter(v.clone()) for v in values]
            optimizer, other = (make(params, lr=0.05, max_norm=0.1) for params in (ours, theirs))
            for number in range(STEPS):
                for i, p in enumerate(theirs):
                    g = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i))
                    p.grad = g.to(device)
                # Part of a sum, as where activations are divided, and divided by rows.
                ours[0].grad = DTensor.from_local(weight * theirs[0].grad, mesh, [Partial()])
                ours[1].grad = distribute_tensor(theirs[1].grad, mesh, [Shard(0)])
                optimizer.step()
                other.step()
            atol = 0.005 if make is st.optim.Muon else 1e-6  # its iterations are in bfloat16
            torch.testing.assert_close(whole(ours), whole(theirs), rtol=0, atol=atol)


def masters_and_averages_are_sharded_too() -> None:
    net, plain = sharded(), model()
    net.bfloat16()
    plain.bfloat16()
    options: Any = {"master_weights": True, "ema": 0.5, "max_norm": 0.1}

    def train(trained: torch.nn.Module) -> st.optim.AdamW:
        optimizer = st.optim.AdamW(trained.parameters(), lr=0.05, **options)
        for number in range(STEPS):
            for i, p in enumerate(trained.parameters()):
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i)).to(
                    device, torch.bfloat16
                )
                p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g
            optimizer.step()
        return optimizer

    ours, theirs = train(net), train(plain)
    for entry in ("master_param", "ema", "exp_avg"):
        pairs = [
            (ours.state[p][entry], theirs.state[q][entry])
            for p, q in zip(net.parameters(), plain.parameters(), strict=True)
        ]
        torch.testing.assert_close(whole(a for a, _ in pairs), whole(b for _, b in pairs))
    with ours.averaged_weights(), theirs.averaged_weights():
        torch.testing.assert_close(whole(net.parameters()), whole(plain.parameters()))


def weights_that_an_evaluation_gathered_are_gathered_anew() -> None:
    """FSDP2 keeps the root's weights after a forward, where no backward frees them."""

    def averaged(optimizer: Any) -> Any:
        return optimizer.averaged_weights()

    @contextmanager
    def switched(optimizer: Any) -> Iterator[None]:
        optimizer.eval()
        yield
        optimizer.train()

    for name, options, within in (("SGD", {"ema": 0.5}, averaged), ("AdamWScheduleFree", {}, switched)):
        losses = []
        for net in (sharded(), model()):
            optimizer = getattr(st.optim, name)(net.parameters(), lr=0.5, **options)
            go_on(net, optimizer, range(STEPS))
            found = []
            with torch.no_grad():
                found.append(loss_of(net, 0))
                with within(optimizer):
                    found.append(loss_of(net, 0))
            found.append(loss_of(net, 0).detach())
            losses.append(found)
        torch.testing.assert_close(*losses)
        assert losses[0][0] != losses[0][1]


def a_distributed_checkpoint_goes_on(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    def with_dampening(params: Any) -> st.optim.Optimizer:
        return st.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5, ema=0.5)

    for make, is_flat in product((st.optim.AdamW, with_dampening), (False, True)):
        path, options = f"{folder}/{make.__name__}{is_flat}", StateDictOptions(flatten_optimizer_state_dict=is_flat)
        net = sharded()
        optimizer = make(net.parameters())
        go_on(net, optimizer, range(STEPS))
        weights, state = get_state_dict(net, optimizer, options=options)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
        go_on(net, optimizer, range(STEPS, 2 * STEPS))

        again = sharded()
        other = make(again.parameters())
        weights, state = get_state_dict(again, other, options=options)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state, options=options)
        go_on(again, other, range(STEPS, 2 * STEPS))
        torch.testing.assert_close(whole(again.parameters()), whole(net.parameters()), rtol=0, atol=0)


def a_state_of_one_process_is_loaded_into_shards() -> None:
    net, plain = sharded(), model()
    optimizer, other = (st.optim.AdamW(n.parameters(), lr=0.05, accumulate=2) for n in (net, plain))
    go_on(plain, other, range(3))  # the gradient of the last pass is part of the state
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    for p, value in zip(net.parameters(), plain.parameters(), strict=True):
        p.data.copy_(distribute_tensor(value.detach(), p.device_mesh, p.placements))
        assert isinstance(p.grad, DTensor)
    go_on(net, optimizer, range(3, 6))
    go_on(plain, other, range(3, 6))
    torch.testing.assert_close(whole(net.parameters()), whole(plain.parameters()))


def wide(mesh: Any = None) -> torch.nn.Sequential:
    """Layers whose shards are whole blocks of codes, so that a block is the same numbers as on one process."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Tanh(), torch.nn.Linear(64, 256)).to(device)
    if mesh is not None:
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def stepped(params: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with the same gradients, to the bit, whether parameters are spread or not; autograd is told of them."""
    versions = [p._version for p in params]
    for number in steps:
        for i, p in enumerate(params):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + i)).to(device, p.dtype)
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g
        optimizer.step()
    assert all(p._version > version for p, version in zip(params, versions, strict=True))


def state_in_few_bits_is_that_of_each_shard(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for name in ("AdamW", "Lion"):
        net, plain = wide(mesh), wide()
        cls = getattr(st.optim, name)
        ours, theirs = (cls(n.parameters(), lr=0.01, state_dtype="int8") for n in (net, plain))
        stepped([*net.parameters()], ours, range(STEPS))
        stepped([*plain.parameters()], theirs, range(STEPS))
        torch.testing.assert_close(whole(net.parameters()), whole(plain.parameters()), rtol=0, atol=0)
        p, q = next(net.parameters()), next(plain.parameters())
        assert ours.state[p]["exp_avg"].to_local().dtype == torch.int8
        assert ours._updater.groups[0].batches[0].sees_shards
        torch.testing.assert_close(whole([ours.state[p]["exp_avg"]]), [theirs.state[q]["exp_avg"]], rtol=0, atol=0)

        # A checkpoint holds float32; loaded, it is given the same codes.
        weights, state = get_state_dict(net, ours)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{name}")
        again = wide(mesh)
        other = cls(again.parameters(), lr=0.01, state_dtype="int8")
        weights, state = get_state_dict(again, other)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
        stepped([*again.parameters()], other, range(STEPS, 2 * STEPS))
        stepped([*plain.parameters()], theirs, range(STEPS, 2 * STEPS))
        torch.testing.assert_close(whole(again.parameters()), whole(plain.parameters()), rtol=0, atol=0)

    net, plain, start = wide(mesh), wide(), whole(wide().parameters())
    rounded = st.optim.AdamW(net.parameters(), lr=0.01, state_dtype=torch.bfloat16)
    stepped([*net.parameters()], rounded, range(STEPS))
    stepped([*plain.parameters()], st.optim.AdamW(plain.parameters(), lr=0.01), range(STEPS))
    assert rounded.state[next(net.parameters())]["exp_avg"].to_local().dtype == torch.bfloat16
    for ended, exact, began in zip(whole(net.parameters()), whole(plain.parameters()), start, strict=True):
        # Eight bits of a number of the state, and some for those that the quotient makes more of.
        assert (ended - exact).norm() <= 2**-6 * (exact - began).norm()


def processes_that_repeat_a_shard_agree() -> None:
    count = dist.get_world_size()
    mesh = init_device_mesh(device.type, (count, 1), mesh_dim_names=("repeat", "shard"))
    net = wide(mesh)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    st.optim.AdamW(net.parameters(), state_dtype="int8").step()
    rounded = st.optim.AdamW(net.parameters(), state_dtype=torch.bfloat16)
    if count > 1:
        with pytest.raises(st.RuleError, match="processes that hold the same shard"):
            rounded.step()


def matrices_are_gathered_for_a_step_and_only_for_it() -> None:
    for name, kwargs in SHARDED_MATRIX:
        net, plain = sharded(), model()
        ours, theirs = ([p for p in n.parameters() if name != "Muon" or p.dim() == 2] for n in (net, plain))
        optimizer, other = (getattr(st.optim, name)(params, **kwargs) for params in (ours, theirs))
        stepped(ours, optimizer, range(STEPS))
        stepped(theirs, other, range(STEPS))
        torch.testing.assert_close(whole(ours), whole(theirs))
        states = [
            [t for p in params for t in o.state[p].values()] for params, o in ((ours, optimizer), (theirs, other))
        ]
        torch.testing.assert_close(whole(states[0]), whole(states[1]))
        if name == "Muon":
            assert all(isinstance(t, DTensor) for t in states[0])
    # Of one row, whose means every process has: these are gathered by being there.
    row = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    narrow, alone = torch.nn.Parameter(distribute_tensor(row, mesh, [Shard(1)])), torch.nn.Parameter(row.clone())
    for p in (narrow, alone):
        stepped([p], st.optim.Adafactor([p]), range(STEPS))
    torch.testing.assert_close(whole([narrow]), whole([alone]))


class Shortened(st.optim.Optimizer):
    """Steps of one size: each needs the mean of a whole tensor of the state, which may be kept in few bits."""

    low_bit: ClassVar[Mapping[str, bool]] = {"total": True}
    state: ClassVar[Any] = {"total": torch.zeros_like}

    def update(self, p: Any, g: Any, total: Any, *, lr: Any) -> None:
        """The math."""
        total.add_(g)
        p.sub_(lr * total / total.square().mean().sqrt())


def a_step_runs_as_much_python_for_many_parameters_as_for_few() -> None:
    if not has_kernels():
        return  # torch takes the step, tensor by tensor
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def calls(layers: int) -> int:
        net = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(layers)]).to(device)
        fully_shard(net, mesh=mesh)
        optimizer = st.optim.AdamW(net.parameters())
        net(torch.ones(2, 3, device=device)).sum().backward()
        return [python_calls(optimizer.step) for _ in range(4)][-1]

    launch, Grid.launch = Grid.launch, lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        with kernels_on_cpu():
            assert 0 < calls(40) == calls(5)
    finally:
        Grid.launch = launch  # type: ignore[method-assign]


def what_cannot_be_done_to_shards_is_refused() -> None:
    net = sharded()
    loss_of(net, 0).backward()
    with pytest.raises(st.RuleError, match="state_dtype: this step needs full tensors"):
        Shortened(net.parameters(), {"lr": 0.1}, state_dtype=torch.bfloat16).step()
    with pytest.raises(st.RuleError, match=r"leave out capture\(\) and graph=True"):
        st.optim.AdamW(net.parameters()).capture()


def _process(rank: int, backend: str, count: int, folder: str) -> None:
    global device
    torch.set_num_threads(1)
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    a_sharded_model_trains_as_the_whole_one()
    a_live_optimizer_is_converted()
    a_class_of_ones_own_needs_nothing_more()
    sums_over_a_tensor_are_those_of_all_its_shards()
    a_norm_is_that_of_shards_and_of_what_every_process_has()
    gradients_may_be_placed_otherwise_than_their_parameters()
    masters_and_averages_are_sharded_too()
    weights_that_an_evaluation_gathered_are_gathered_anew()
    a_distributed_checkpoint_goes_on(f"{folder}/checkpoint")
    a_state_of_one_process_is_loaded_into_shards()
    state_in_few_bits_is_that_of_each_shard(f"{folder}/few-bits")
    processes_that_repeat_a_shard_agree()
    matrices_are_gathered_for_a_step_and_only_for_it()
    a_step_runs_as_much_python_for_many_parameters_as_for_few()
    what_cannot_be_done_to_shards_is_refused()
    a_repeated_model_trains_as_one_does_on_all_data(model, device)
    end_of_process()


# One set of processes for all of it: to start them takes longer than what they do.
def test_two_processes_train_a_sharded_model_as_one_process_trains_it(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_process, args=("gloo", 2, str(tmp_path)), nprocs=2)


GPUS = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.skipif(GPUS > 1, reason="there are GPUs for two processes")),
        pytest.param(2, marks=pytest.mark.skipif(GPUS < 2, reason="there is one GPU at most")),
    ],
)
def test_processes_with_a_gpu_each_train_a_sharded_model_as_one_process_trains_it(count: int, tmp_path: Path) -> None:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    mp.spawn(_process, args=("nccl", count, str(tmp_path)), nprocs=count)
