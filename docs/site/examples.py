"""A hook of MkDocs that marks examples with prompts as Python sessions, so that prompts and output are told apart."""

from __future__ import annotations

import re

SESSION = re.compile(r"^```python\n(?=>>> )", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Name the language of examples with prompts `pycon`; GitHub and editors know `python` alone."""
    return SESSION.sub("```pycon\n", markdown)
