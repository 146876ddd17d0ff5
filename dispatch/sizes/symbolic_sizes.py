"""Torch's symbolic sizes, which are private: a program that runs on them records its branches on sizes."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch

from subtensors.dispatch.torch_internals.requires import requires


class SymbolicSizes:
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
    def __init__(self, sizes: dict[str, int]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self.symbols: dict[sympy.Symbol, str] = {}
        """The names of the sizes, by their symbols in `guards`."""
        self.numbers: dict[str, torch.SymInt] = {}
        """The sizes to make tensors with, by name."""
        for name, size in sizes.items():
            source = ConstantSource(name)
            symbol = self._env.create_symbol(
                size, source, DimDynamic.DYNAMIC, None, positive=None, do_not_specialize_zero_one=True
            )
            number = self._env.create_symintnode(symbol, hint=size, source=source)
            assert isinstance(number, torch.SymInt)
            self.symbols[symbol], self.numbers[name] = name, number

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without values, of the same fixed sizes."""
        return self.mode.from_tensor(tensor, static_shapes=True)

    @property
    def guards(self) -> list[sympy.Basic]:
        """The branches so far, each as the condition that held."""
        return [guard.expr for guard in self._env.guards]

    @staticmethod
    @requires("torch.utils._sympy.functions")
    def plain(condition: sympy.Basic) -> sympy.Basic:
        """Return the condition with sympy's functions in place of torch's own."""
        from torch.utils._sympy import functions

        def floor_div(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
            return sympy.floor(a / b)

        rules: dict[str, Callable[..., sympy.Basic]] = {
            "FloorDiv": floor_div,
            "CleanDiv": lambda a, b: a / b,
            "CeilDiv": lambda a, b: sympy.ceiling(a / b),
            "Mod": sympy.Mod,
            "PythonMod": sympy.Mod,
            "ModularIndexing": lambda a, b, c: sympy.Mod(floor_div(a, b), c),
            "Min": sympy.Min,
            "Max": sympy.Max,
            "PowByNatural": sympy.Pow,
            "IntTrueDiv": lambda a, b: a / b,
            "FloatTrueDiv": lambda a, b: a / b,
            "ToFloat": lambda a: a,
            "Identity": lambda a: a,
            "TruncToInt": sympy.floor,
            "FloorToInt": sympy.floor,
            "CeilToInt": sympy.ceiling,
        }

        def rewritten(node: sympy.Basic) -> sympy.Basic:
            if not node.args:
                return node
            arguments = [rewritten(a) for a in node.args]
            rule = rules.get(type(node).__name__) if type(node).__module__ == functions.__name__ else None
            return rule(*arguments) if rule else node.func(*arguments)

        return rewritten(condition)
