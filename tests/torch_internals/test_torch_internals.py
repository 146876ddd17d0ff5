"""Torch is left as it was by importing the package, and the package goes on where torch lacks a private part."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from subtensors.dispatch.torch_internals import dynamo
from subtensors.dispatch.torch_internals.requires import REQUIRED

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}

NEWER = """
import torch
torch.__version__ = "2.99.0.dev20300101+cu140"
import subtensors, logging
"""

SNAPSHOT = """
import importlib, sys

PLACES = '''torch._dynamo.variables.tensor:TensorVariable
torch._dynamo.variables.torch_function:TensorWithTFOverrideVariable
torch._dynamo.variables.builtin:BuiltinVariable torch._dynamo.variables.builtin:SetAttrBuiltinVariable
torch._dynamo.variables.torch:TorchInGraphFunctionVariable torch._dynamo.variables.builtin:
torch._functorch._aot_autograd.runtime_wrappers: torch._dynamo.trace_rules:'''

def snapshot():
    found = {}
    for place in PLACES.split():
        module, _, name = place.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, name, None) if name else owner
        for key, value in vars(owner).items() if owner is not None else ():
            found[place, key] = id(value), len(value) if isinstance(value, (dict, list, set, tuple)) else 0
    handlers = importlib.import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable._get_handlers()
    found.update({("handlers", str(key)): id(value) for key, value in handlers.items()})
    return found
"""


def run(program: str, *arguments: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_does_not_load_the_compiler() -> None:
    assert run("import sys, subtensors; print('torch._dynamo' in sys.modules)").strip() == "False"


def test_eager_use_of_each_type_leaves_the_compiler_unchanged() -> None:
    program = f"""{SNAPSHOT}
sys.path.insert(0, "tests/support")
import without_internals
before = snapshot()
import subtensors
after_import = snapshot()
results = without_internals.outcomes(without_internals.EAGER)
assert not [x for x in results.values() if "Error" in x], results
after_use = snapshot()
without_internals.outcomes(without_internals.COMPILED)
changed = lambda now: sorted({{key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}})
print(changed(after_import), changed(after_use), len(changed(snapshot())) > 5)
"""
    assert run(program).strip() == "[] [] True"


def test_a_torch_that_is_newer_than_those_tested_is_noted_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEWER], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, check=True
    )
    assert done.stderr.count("is newer than") == 1


def test_importing_the_package_leaves_the_lists_of_torchs_optimizers_unchanged() -> None:
    program = """
from torch.optim import optimizer
from torch.utils import _foreach_utils
lists = optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types
before = [list(x) for x in lists]
import subtensors
print([list(x) for x in lists] == before)
"""
    assert run(program).strip() == "True"


IMPORTED = re.findall(r"^ +from torch\S* import (\w+)", Path(dynamo.__file__).read_text(), re.MULTILINE)

RULE_PARTS = [
    *[f"import {name}" for name in IMPORTED if f".{name}" not in " ".join(REQUIRED)],
    *[f"method {name}" for name in ("tp_getattro_impl", "call_method", "sq_length", "_call_setattr")],
]
"""What the rules of Dynamo import or replace."""


def outcomes(kind: str, parts: list[str]) -> dict[str, dict[str, str]]:
    program = str(ROOT / "tests" / "support" / "without_internals.py")
    done = subprocess.run(
        [sys.executable, program, kind, *parts],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [part for part, _ in lines] == ["", *parts], done.stderr
    return dict(lines)


def check_rules(parts: list[str]) -> None:
    found = outcomes("dynamo", parts)
    expected = found.pop("")
    assert not [x for x in expected.values() if "Error" in x], expected
    for part, results in found.items():
        assert results == expected, part


def check_declared(paths: list[str]) -> None:
    found = outcomes("declared", paths)
    expected = found.pop("")
    assert not [x for x in expected.values() if "Error" in x], expected
    for path, results in found.items():
        for program, result in results.items():
            assert result == expected[program] or (result.startswith("MissingInternal") and path in result), path


def test_compiled_programs_are_right_where_a_rule_of_dynamo_lacks_a_part() -> None:
    check_rules(["import TensorVariable", "method call_method"])


@pytest.mark.slow
def test_compiled_programs_are_right_where_any_part_that_a_rule_uses_is_missing() -> None:
    check_rules(sorted(set(RULE_PARTS)))


def test_a_missing_private_part_of_torch_has_a_fallback_or_is_named() -> None:
    check_declared(["torch._C._dispatch_tls_local_include_set", "torch._guards.TracingContext.try_get"])


@pytest.mark.slow
def test_any_missing_private_part_of_torch_has_a_fallback_or_is_named() -> None:
    check_declared(sorted(REQUIRED))


PROTOCOL = """
torch.Tensor._make_subclass torch.Tensor._make_wrapper_subclass torch._C._disabled_torch_function_impl
torch._C.DisableTorchFunctionSubclass torch._ops.OpOverload torch._ops.OpOverloadPacket torch.utils._pytree
torch.utils._python_dispatch
""".split()
"""What torch documents for subclasses, or hands to each of them: without it there is no subclass."""


ALLOWED = """
torch._foreach_ torch._dynamo.graph_break torch._dynamo.mark_static_address torch._C._nn torch.utils._foreach_utils
torch._C._cuda_memorySnapshot
""".split()
"""Documented, although its name begins so; or asked for where it may be missing."""


def private_parts(path: Path) -> Iterator[str]:
    """The dotted paths of private parts of torch that a file names."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            first, *rest = name.split(".")
            if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest):
                yield name


def test_every_private_part_of_torch_that_the_package_names_is_declared() -> None:
    files = [path for top in ("subtensors", "dispatch", "kernels") for path in (ROOT / top).rglob("*.py")]
    for path in files:
        if "\n    @requires(" in (text := path.read_text()) or "\n@requires(" in text:
            importlib.import_module(".".join(["subtensors", *path.relative_to(ROOT).with_suffix("").parts]))
    known = [*PROTOCOL, *REQUIRED]
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if path.name != Path(dynamo.__file__).name and not {"__pycache__"} & {*path.parts}
        for name in private_parts(path)
        if not any(f"{name}.".startswith(f"{part}.") or f"{part}.".startswith(f"{name}.") for part in known)
        if not name.startswith(tuple(ALLOWED))
    }
    assert undeclared == set()
