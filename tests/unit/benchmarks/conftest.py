"""Lets the tests import `benchmarks`, which no installation has."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # last, so that the installed package stays the one that is tested
