"""What someone meets in the first hour: names that complete, reprs, errors of near misses, and `st.explain`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import subtensors as st

SEQ = st.Dim("seq", max=64, buckets=16)


def padded() -> st.PaddedTensor:
    return st.pad(torch.ones(5), {0: SEQ})


def optimizer() -> st.optim.AdamW:
    return st.optim.AdamW(torch.nn.Linear(4, 4).parameters())


def fused_function() -> Callable[..., object]:
    return st.fused(lambda p, g: p.sub_(g))


def runner() -> Callable[..., torch.Tensor]:
    run = st.bucketed(torch.exp, {0: {0: SEQ}})
    run(torch.ones(3))
    return run


OBJECTS: dict[str, Callable[[], object]] = {
    "TensorList": lambda: st.TensorList([torch.ones(2)]),
    "packed TensorList": lambda: st.TensorList([torch.ones(2)]).pack(),
    "PaddedTensor": padded,
    "ragged PaddedTensor": lambda: st.pad([torch.ones(5), torch.ones(3)], {0: SEQ}),
    "ChunkedTensor": lambda: st.chunk(torch.ones(8, 4)).exp(),
    "StaticAddressTensor": lambda: st.static(torch.ones(2)),
    "Arena": lambda: st.Arena("cpu"),
    "optimizer": optimizer,
    "captured step": lambda: optimizer().capture(),
    "runner": runner,
    "statistics": lambda: st.bucketed(torch.exp, {0: {0: SEQ}}).stats(),
    "fused function": fused_function,
    "Dim": lambda: SEQ,
    "policy": lambda: st.Geometric(),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_each_name_that_dir_lists_can_be_read_where_that_of_a_plain_tensor_can(name: str) -> None:
    subject, plain = OBJECTS[name](), torch.ones(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of `T` and of `grad`
        unreadable = {x for x in dir(plain) if not is_readable(plain, x)}
        unreadable |= {"H", "mH", "mT"}  # of matrices alone
        assert [x for x in dir(subject) if not is_readable(subject, x) and x not in unreadable] == []
    assert not {"volatile", "__cuda_array_interface__"} & {*dir(subject)}  # torch leaves these out, too


def is_readable(subject: object, name: str) -> bool:
    try:
        getattr(subject, name)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("module", [st, st.optim, st.integrations])
def test_dir_of_a_module_lists_its_public_names_alone(module: ModuleType) -> None:
    assert {name for name in dir(module) if not name.startswith("__")} == {*module.__all__} - {"__version__"}


def test_dir_lists_the_flats_of_a_packed_list_alone() -> None:
    tl = st.TensorList([torch.ones(2)])
    assert "flats" not in dir(tl)
    assert "flats" in dir(tl.pack())
    assert {"tensors", "pack", "exp"} <= {*dir(tl)}


@pytest.mark.parametrize("name", OBJECTS)
def test_explain_takes_each_kind_of_object(name: str) -> None:
    assert st.explain(OBJECTS[name]()).strip()  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [st, st.optim, st.integrations])
def test_explain_says_what_a_module_is_for(module: ModuleType) -> None:
    assert st.explain(module).startswith(f"{module.__name__}: ")


@pytest.mark.parametrize("name", st.optim.__all__)
def test_explain_takes_each_name_of_optim(name: str) -> None:
    assert name in st.explain(getattr(st.optim, name))


def test_explain_of_a_fused_function_says_what_more_it_can_tell() -> None:
    @st.fused
    def decay(p: torch.Tensor, *, rate: float) -> None:
        p.mul_(1 - rate)

    text = st.explain(decay)
    assert text.startswith("<st.fused decay(p: ")
    assert "st.explain(decay, *arguments)" in text


def test_explain_of_a_call_of_plain_tensors_says_that_it_is_plain_torch() -> None:
    assert st.explain(torch.add, torch.ones(2), 1) == "plain torch: no argument is of a type of subtensors"
    assert "st.explain(add, *arguments)" in st.explain(torch.add)
    model = torch.nn.Linear(2, 2)
    assert "st.explain(Linear, *arguments)" in st.explain(model)


def test_a_notebook_shows_a_runner_with_the_table_of_its_buckets() -> None:
    run = runner()
    html = run._repr_html_()  # type: ignore[attr-defined]
    assert html.startswith("<p>&lt;st.bucketed exp on Dim(&#x27;seq&#x27;")
    assert html.count("<tr>") == 2
    assert "<td>seq=16</td>" in html


def test_a_captured_optimizer_shows_that_it_is_and_that_a_cpu_has_no_graph() -> None:
    opt = optimizer()
    plain = repr(opt)
    capture = opt.capture()
    assert "captured: no graph on a CPU, 0 eager steps" in repr(capture)
    assert repr(opt) == f"{plain[:-1]}captured: no graph on a CPU, 0 eager steps\n)"
    opt.step()
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    opt.step()
    assert capture._repr_html_().startswith(
        "<p>&lt;Capture: captured: no graph on a CPU, 2 eager steps&gt;</p><ul><li>"
    )


MISSES: dict[str, tuple[Callable[[], object], str]] = {
    "a Dim alone": (lambda: st.pad(torch.ones(5), SEQ), r"such as st.pad\(x, \{0: seq\}\); got the Dim alone"),  # type: ignore[arg-type]
    "a dim and a Dim": (lambda: st.pad(torch.ones(5), 1, SEQ), r"such as st.pad\(x, \{1: seq\}\); got 1"),  # type: ignore[arg-type]
    "a Dim as key": (
        lambda: st.pad(torch.ones(5), {SEQ: 0}),
        r"a dim is given by its number, such as st.pad\(x, \{1: seq\}\)",
    ),  # type: ignore[dict-item]
    "a name as key": (
        lambda: st.pad(torch.ones(5), {"seq": SEQ}),
        r"cannot pad dim 'seq' .*a dim is given by its number",
    ),  # type: ignore[dict-item]
    "an int for rows": (lambda: st.chunk(torch.ones(8, 4), 16), r"dim must be in \[-2, 1\], got 16; .*rows=16"),
    "bytes for rows": (lambda: st.chunk(torch.ones(8, 4), "1GiB"), r"memory_limit='1GiB'"),  # type: ignore[arg-type]
    "a model": (lambda: st.optim.AdamW(torch.nn.Linear(2, 2)), r"got a Linear: give its model.parameters\(\)"),  # type: ignore[arg-type]
    "a method of a model": (
        lambda: st.optim.AdamW(torch.nn.Linear(2, 2).parameters),  # type: ignore[arg-type]
        r"got the method parameters of a Linear: call it, model.parameters\(\)",
    ),
    "the folder for its function": (lambda: st.chunked(torch.ones(3)), r"call st.chunk\(x\)"),  # type: ignore[operator]
    "the adjective for the verb": (lambda: st.padded(torch.ones(3), {0: SEQ}), r"call st.pad\(x, \{1: seq\}\)"),  # type: ignore[operator]
    "another case": (lambda: st.optim.adamw, r"'subtensors.optim' has no attribute 'adamw'; did you mean 'AdamW'\?"),  # type: ignore[attr-defined]
    "an optimizer of torch alone": (lambda: st.optim.LBFGS, r"several times a step, .*: torch.optim.LBFGS$"),  # type: ignore[attr-defined]
    "schedulers": (lambda: st.optim.lr_scheduler, r"torch.optim.lr_scheduler takes these optimizers$"),  # type: ignore[attr-defined]
    "another option": (
        lambda: st.optim.AdamW([torch.ones(2)], learning_rate=1e-3),  # type: ignore[call-arg]
        r"AdamW has no option 'learning_rate'; did you mean 'lr'\?",
    ),
    "a misspelt option": (
        lambda: st.optim.AdamW([torch.ones(2)], masterweights=True),  # type: ignore[call-arg]
        r"AdamW has no option 'masterweights'; did you mean 'master_weights'\?",
    ),
    "an unknown option": (
        lambda: st.optim.AdamW([torch.ones(2)], zzz=True),  # type: ignore[call-arg]
        r"AdamW has no option 'zzz'; it takes lr, betas, .*accumulate",
    ),
    "a list for a TensorList": (
        lambda: st.fused(lambda p: p.mul_(2))([torch.ones(2)]),
        r"'list' object has no attribute 'mul_'\nmany tensors are one argument as st.TensorList\(\[\.\.\.\]\)",
    ),
    "a generator for a TensorList": (
        lambda: st.fused(lambda p: p.mul_(2))(iter([torch.ones(2)])),
        r"got list_iterator; .*st.TensorList",
    ),
    "a result for a program": (
        lambda: st.bucketed(torch.ones(5), {0: {0: SEQ}}),  # type: ignore[arg-type]
        r"takes a function or a module, got a Tensor of shape \(5,\)$",
    ),
    "a number for initial state": (
        lambda: type("NumberState", (st.optim.Optimizer,), {"state": {"m": 0.0}, "update": lambda self, p, g, m: None}),
        r"NumberState.state gives for each entry a function of its parameter, .* got 0.0 for 'm'",
    ),
    "a file for lengths": (
        lambda: st.fit_buckets("lengths.txt"),  # type: ignore[arg-type]
        r"got 'lengths.txt'; of a file, \[int\(n\) for n in Path\(path\)",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_near_miss_gets_the_sentence_that_helps(name: str) -> None:
    call, sentence = MISSES[name]
    with pytest.raises((TypeError, ValueError, IndexError, AttributeError), match=sentence):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_arena_without_a_gpu_names_the_one_for_a_cpu() -> None:
    with pytest.raises(RuntimeError, match=r'torch finds no GPU here; st.Arena\("cpu"\)'):
        st.Arena()


def test_every_public_function_and_class_has_an_example() -> None:
    lacking = []
    for name in st.__all__:
        subject = getattr(st, name)
        if (inspect.isclass(subject) or inspect.isfunction(subject)) and not issubclass_of_exception(subject):
            text = (subject.__doc__ or "") + "".join(getattr(x, "__doc__", "") or "" for x in vars(subject).values())
            if ">>>" not in text:
                lacking.append(name)
    assert lacking == []


def issubclass_of_exception(subject: object) -> bool:
    return inspect.isclass(subject) and issubclass(subject, Exception)
