"""A process that runs the package on a torch without one of its private parts; a fork for each part.

    python without_internals.py declared torch._C._dispatch_tls_local_include_set ...
    python without_internals.py dynamo "import TensorVariable" "method call_method" ...

prints a line of JSON for each: what was missing, and what became of every program. A part that a function declares
(`requires`) is hidden from where it looks for it, so that torch itself goes on working; what a rule of Dynamo's reads
is hidden from that file alone, for the same reason.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]


def hide_declared(path: str) -> None:
    """Have `requires` not find a part: its module is loaded before the package that imports it."""
    name = "subtensors.dispatch.torch_internals.requires"
    spec = importlib.util.spec_from_file_location(name, ROOT / "dispatch" / "torch_internals" / "requires.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module._found
    module._found = lambda asked, load: None if asked == path else found(asked, load)


def hide_from_rules(part: str) -> None:
    """Hide from the rules of Dynamo a name that they import, or a method that they replace."""
    kind, name = part.split()
    from subtensors.dispatch.torch_internals import dynamo

    if kind == "import":
        load = builtins.__import__

        def without(module: str, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(("globals", "locals", "fromlist", "level"), args, strict=False)) | kwargs
            asker, names = (given.get("globals") or {}).get("__name__"), given.get("fromlist") or ()
            if asker == dynamo.__name__ and name in names:
                raise ImportError(f"cannot import name {name!r} from {module!r}")
            return load(module, *args, **kwargs)

        builtins.__import__ = without
    else:
        replace = dynamo._replace

        def refuse(owner: Any, names: Any, wrap: Any) -> None:
            replace(owner, [known for known in names if known != name and name not in names], wrap)

        dynamo._replace = refuse


def padded() -> Any:
    import subtensors as st

    x = st.pad(torch.arange(6.0).reshape(2, 3), {1: st.Dim("n", max=8, buckets=4)})
    return (x * 2).unpad().tolist()


def listed() -> Any:
    import subtensors as st

    return [t.tolist() for t in (st.TensorList([torch.ones(2), torch.ones(3)]) + 1).tensors]


def chunked() -> Any:
    import subtensors as st

    h, w = torch.ones(4, 2, requires_grad=True), torch.ones(3, 2)
    loss = F.cross_entropy(F.linear(st.chunk(h, chunks=2), w), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    return round(loss.item(), 4), h.grad.abs().sum().item() < 1e-5


def static() -> Any:
    import subtensors as st

    arena = st.Arena("cpu")
    s, t = st.static(torch.ones(3)), arena.zeros(2)
    return s.mul_(2).tolist(), (t + 1).tolist()


def optimized() -> Any:
    import subtensors as st

    p = torch.nn.Parameter(torch.ones(2))
    opt = st.optim.SGD([p], lr=0.5)
    for _ in range(2):
        opt.zero_grad()
        p.sum().backward()
        opt.step()
    return p.tolist()


def bucketed() -> Any:
    import subtensors as st

    run = st.bucketed(lambda x: x.softmax(0) * 2, {"x": {0: st.Dim("n", max=8, buckets=4)}})
    return [round(v, 4) for v in run(torch.zeros(3)).tolist()]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager")


def listed_compiled() -> Any:
    import subtensors as st

    x = st.TensorList([torch.ones(2), torch.ones(3, dtype=torch.float64)])

    def asks(x: Any) -> Any:
        return x + 1, x.shape, x.numel(), torch.numel(x), len(x), x.dtype, [t.sum() for t in x.tensors]

    y, *others, sums = compiled(asks)(x)
    return [t.tolist() for t in y.tensors], str(others), [t.item() for t in sums]


def padded_compiled() -> Any:
    import subtensors as st

    x = st.pad(torch.arange(6.0).reshape(2, 3), {1: st.Dim("n", max=8, buckets=4)})
    y, count = compiled(lambda x: (x * 2, x.count(1)))(x)
    return y.unpad().tolist(), count.item()


def chunked_compiled() -> Any:
    import subtensors as st

    h, w, target = torch.arange(8.0).reshape(4, 2).requires_grad_(), torch.eye(3, 2), torch.tensor([0, 1, 2, 0])

    def loss(h: Any, w: Any) -> Any:
        h = st.chunk(h, chunks=2)
        return F.cross_entropy((w @ h.mT).mT, target)

    found = compiled(loss)(h, w)
    found.backward()
    return round(found.item(), 4), [round(v, 4) for v in h.grad.flatten().tolist()]


def static_compiled() -> Any:
    import subtensors as st

    s = st.static(torch.nn.Parameter(torch.ones(3)))
    s.grad = torch.ones(3)
    at = s.data_ptr()

    def move(s: Any) -> Any:
        y = s + s.grad
        s.data = torch.zeros(3)
        return y

    with suppress(st.AddressError):
        compiled(move)(s)
    return s.tolist(), s.data_ptr() == at, compiled(lambda s: s * 2 + s.grad)(s).tolist()


EAGER = (padded, listed, chunked, static, optimized, bucketed)
COMPILED = (listed_compiled, padded_compiled, chunked_compiled, static_compiled)


def outcomes(programs: tuple[Callable[[], Any], ...]) -> dict[str, str]:
    """For each program its result in words, or the error and the file where it was raised."""
    found = {}
    for program in programs:
        try:
            found[program.__name__] = repr(program())
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            found[program.__name__] = f"{type(error).__name__} in {at.filename}:{at.lineno}: {error}"
    return found


def main(kind: str, parts: list[str]) -> None:
    torch.set_num_threads(1)
    programs, hide = (EAGER, hide_declared) if kind == "declared" else (COMPILED, hide_from_rules)
    if kind == "dynamo":
        for module in ("torch._dynamo", "subtensors"):
            importlib.import_module(module)
    for part in ["", *parts]:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            if part:
                hide(part)
            print(json.dumps([part, outcomes(programs)]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
