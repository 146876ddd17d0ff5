"""Rows about copies of values, and about other threads and processes."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import DataLoader

from composition.subjects import Subject, total
from composition.table import Column, Meaningless, row

GROUP = "copies, threads, processes"


def with_copies(subject: Subject, copied: Any) -> list[Tensor]:
    """Run the program on a copy of its value; a column without a value copies what runs it."""
    if subject.column is Column.BUCKETED:
        new = copied(subject.run)
        outs = [new(x.detach()) for x in subject.leaves for _ in range(subject.calls)]
        return list(outs)
    if subject.column is Column.OPTIM:
        subject.trained()
        state = copied(subject.optimizer.state_dict())
        subject.optimizer = subject.optimizer_of(subject.module)
        subject.optimizer.load_state_dict(state)
        return subject.trained()
    with torch.no_grad():
        value = subject.value()
    new = copied(value)
    return [x.detach() for x in subject.leave(subject.body(new))]


@row(GROUP, "`copy.deepcopy`")
def deepcopied(subject: Subject) -> list[Tensor]:
    """`copy.deepcopy` of the value, of the runner, of an optimizer's state."""
    return with_copies(subject, copy.deepcopy)


@row(GROUP, "pickle")
def pickled(subject: Subject) -> list[Tensor]:
    """A pickle of the value, of the runner, of an optimizer's state, and back."""
    return with_copies(subject, lambda x: pickle.loads(pickle.dumps(x)))


def loaded(x: Any) -> Any:
    """Save a value, and load it with `weights_only=True`."""
    memory = io.BytesIO()
    torch.save(x, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)


@row(GROUP, "`torch.load(weights_only=True)`", bucketed=Meaningless("a runner is code"))
def weights_only(subject: Subject) -> list[Tensor]:
    """`torch.save` of the value, and `torch.load`, which takes no code."""
    return with_copies(subject, loaded)


def in_threads(run: Any) -> list[Tensor]:
    """Run a function in two threads, several times."""
    with ThreadPoolExecutor(2) as pool:
        return [x for outs in pool.map(lambda _: run(), range(6)) for x in outs]


@row(GROUP, "threads")
def threads(subject: Subject) -> list[Tensor]:
    """The program and its backward in two threads at a time, with inputs of their own."""
    if subject.column is Column.OPTIM:
        return in_threads(lambda: type(subject)(subject.device, subject.dtype, subject.plain).trained())
    for p in subject.module.parameters():
        p.requires_grad_(False)

    def run() -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in subject.leaves]
        total(subject.leave(subject.body(subject.enter(leaves)))).backward()
        return [x.grad for x in leaves if x.grad is not None]

    return in_threads(run)


@row(GROUP, "`DataLoader` workers", on_gpu=False)
def data_loader(subject: Subject) -> list[Tensor]:
    """Values that a forked worker of a `DataLoader` makes and hands over."""
    made: DataLoader[Any] = DataLoader(Values(subject), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with torch.no_grad():
        return [out for value in made for out in subject.leave(subject.body(value))]


class Values(torch.utils.data.Dataset[Any]):
    """The wrapped value of a subject, twice."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        with torch.no_grad():
            return self.subject.enter([x.detach().clone() for x in self.subject.leaves])


@row(GROUP, "a forked process", on_gpu=False)
def forked(subject: Subject) -> list[Tensor]:
    """The program and its backward in a forked child."""
    context = mp.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        there.send([x.detach().numpy() for x in subject.trained()])

    child = context.Process(target=run)
    child.start()
    try:
        if not here.poll(20):
            raise TimeoutError("the child did not answer")
        return [torch.from_numpy(x) for x in here.recv()]
    finally:
        child.kill()
        child.join()


@row(GROUP, "a spawned process", spawned=True, slow=True)
def spawned(subject: Subject) -> list[Tensor]:
    """The program and its backward in a fresh process."""
    return subject.trained()
