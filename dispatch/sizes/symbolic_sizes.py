"""Torch's symbolic sizes, which are private: a program that runs on them records its branches on sizes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from unittest import mock

import sympy
import torch

from subtensors.dispatch.torch_internals.requires import requires


class ConcreteSizes:
    """Sizes that are plain numbers, for tensors without values.

    Args:
        sizes: a value for each name.
    """

    @requires("torch._dispatch.python.enable_python_dispatcher", "torch._subclasses.fake_tensor.FakeTensorMode")
    def __init__(self, sizes: Mapping[str, int]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.numbers: dict[str, torch.SymInt | int] = dict(sizes)
        """The sizes to make tensors with, by name."""

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """Make every tensor one without values."""
        from torch._dispatch.python import enable_python_dispatcher

        # Without it C++ would unfold composite functions, where some take no symbols and others settle on one size.
        with self._mode, enable_python_dispatcher():
            yield

    @staticmethod
    @requires("torch._dispatch.python.no_python_dispatcher", "torch._subclasses.fake_tensor.unset_fake_temporarily")
    @contextlib.contextmanager
    def real() -> Iterator[None]:
        """Within the mode, a context in which tensors are real ones."""
        from torch._dispatch.python import no_python_dispatcher
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with no_python_dispatcher(), unset_fake_temporarily():
            yield

    @staticmethod
    @requires("torch.fx.experimental.sym_node.SymNode.expr")
    def expression(number: object) -> sympy.Basic:
        """Return the expression of a number; its symbols are those of `SymbolicSizes.symbols`."""
        found: sympy.Basic = number.node.expr if isinstance(number, torch.SymInt | torch.SymFloat) else number
        return sympy.sympify(found)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without values, of the same fixed sizes."""
        return self._mode.from_tensor(tensor, static_shapes=True)


class SymbolicSizes(ConcreteSizes):
    """Sizes that a program sees as numbers, while every branch on them is recorded.

    Tensors made of them within `mode` are fake, without values; zero and one are sizes like any other.
    Checked on 2.13.
    """

    @requires(
        "torch._dynamo.source.ConstantSource",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
    )
    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__({})
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self.symbols: dict[sympy.Symbol, str] = {}
        """The names of the sizes, by their symbols in `guards`."""
        self.texts: list[tuple[CodeType, int]] = []
        """The instructions of the program that took a size as text, which records no condition."""
        for name, size in sizes.items():
            source = ConstantSource(name)
            symbol = self._env.create_symbol(
                size, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
            )
            self.symbols[symbol] = name
            self.numbers[name] = self._env.create_symintnode(symbol, hint=size, source=source)

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """Make every tensor one without values, and note where the text of a size is taken."""
        with contextlib.ExitStack() as stack:
            for name in ("__str__", "__repr__"):
                stack.enter_context(mock.patch.object(torch.SymInt, name, self._noted(getattr(torch.SymInt, name))))
            stack.enter_context(super().mode())
            yield

    def _noted(self, text: Callable[[torch.SymInt], str]) -> Callable[[torch.SymInt], str]:
        def text_of(number: torch.SymInt) -> str:
            frame = sys._getframe(1)
            module = str(frame.f_globals.get("__name__"))
            if module != __name__ and module.partition(".")[0] not in ("torch", "sympy"):
                self.texts.append((frame.f_code, frame.f_lasti))
            return text(number)

        return text_of

    @property
    def guards(self) -> list[sympy.Basic]:
        """The branches so far, each as the condition that held."""
        return [guard.expr for guard in self._env.guards]

    @property
    def waits_for_values(self) -> bool:
        """Return whether a check was put off, since it depends on a tensor's values."""
        return any(self._env.deferred_runtime_asserts.values())

    @staticmethod
    @requires("torch.utils._sympy.functions")
    def plain(condition: sympy.Basic) -> sympy.Basic:
        """Return the condition with sympy's functions of integers in place of torch's own.

        Torch's functions of floats stay: they round as Python does, and sympy's don't round.
        """
        from torch.utils._sympy import functions

        def floor_div(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
            return sympy.floor(a / b)

        def step(name: str, rounded: Callable[[sympy.Expr], sympy.Expr]) -> Callable[..., sympy.Basic]:
            # A quotient of two ints below 2 ** 52 never rounds to an integer that it is not.
            def rewrite(a: sympy.Expr) -> sympy.Basic:
                is_quotient = isinstance(a, functions.IntTrueDiv)
                return rounded(a.args[0] / a.args[1]) if is_quotient else getattr(functions, name)(a)

            return rewrite

        rules: dict[str, Callable[..., sympy.Basic]] = {
            "FloorDiv": floor_div,
            "CleanDiv": floor_div,
            "Mod": sympy.Mod,
            "PythonMod": sympy.Mod,
            "ModularIndexing": lambda a, b, c: sympy.Mod(floor_div(a, b), c),
            "Min": sympy.Min,
            "Max": sympy.Max,
            "Identity": lambda a: a,
            "FloorToInt": step("FloorToInt", sympy.floor),
            "CeilToInt": step("CeilToInt", sympy.ceiling),
        }

        for name, rule in rules.items():
            if kind := getattr(functions, name, None):
                condition = condition.replace(kind, rule, simultaneous=False)
        return condition


@requires(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
)
def is_undecided_without_values(error: BaseException) -> bool:
    """Return whether a program ended since its tensors have no values, rather than by its own refusal."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
        GuardOnDataDependentSymNode,
    )
    return isinstance(error, kinds)
