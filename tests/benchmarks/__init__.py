"""Benchmarks beside the peers: `PYTHONPATH=tests python -m benchmarks`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))  # the demo has a model and clocks
