"""Run its namesake with plain switches: pybind11 finds its list of frames broken and aborts."""

from __future__ import annotations

import os
import resource
import runpy
from pathlib import Path

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.environ["NNSIGHT_PP_TLS_SWAP"] = "0"
runpy.run_path(str(Path(__file__).with_name("park_in_torch_ops_in_turns.py")))
