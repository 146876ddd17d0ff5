"""The README as a package index shows it: links and pictures that lead to files of the repository are left out."""

import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"\((?!https?://|#)[^)]+\)"
"""The target of a link to a file of the repository."""

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
readme = re.sub(rf"!\[[^\]]*\]{RELATIVE}\n+", "", readme)
readme = re.sub(rf"\[([^\]]+)\]{RELATIVE}", r"\1", readme)

setup(long_description=readme, long_description_content_type="text/markdown")
