"""An extension of Griffe that reads `Example:` in a docstring as its section of examples."""

from __future__ import annotations

import re

import griffe


class DocstringExamples(griffe.Extension):
    """Give sections of examples the plural heading that the reader of docstrings looks for."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the heading where an object has a docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
