"""Write the pages of this folder as HTML: `python docs/build.py FOLDER`."""

from __future__ import annotations

import re
import shutil
import sys
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ max-width: 60em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 sans-serif }}
pre, code {{ background: #f4f4f4 }} pre {{ padding: 1em; overflow-x: auto }} img {{ max-width: 100% }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #ccc; padding: .3em .6em; text-align: left }}
</style></head><body>
{body}</body></html>
"""


def build(source: Path, target: Path) -> list[Path]:
    """Render each page of a folder, links between pages included, and copy its pictures.

    Args:
        source: folder with `*.md`, pictures in it or its folders.
        target: folder that the HTML goes to; it is made.

    Returns:
        the pages written.
    """
    markdown = MarkdownIt("commonmark").enable("table")
    written = []
    for page in sorted(source.rglob("*.md")):
        body = re.sub(r'href="([^":]+)\.md(#[^"]*)?"', r'href="\1.html\2"', markdown.render(page.read_text()))
        heading = re.search(r"^# (.*)", page.read_text(), re.MULTILINE)
        out = target / page.relative_to(source).with_suffix(".html")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(PAGE.format(title=escape(heading[1] if heading else page.stem), body=body))
        written.append(out)
    for picture in sorted(source.rglob("*.png")):
        copy = target / picture.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, copy)
    return written


if __name__ == "__main__":
    for path in build(Path(__file__).parent, Path(sys.argv[1])):
        print(path)
