"""Run its namesake with plain switches: the warning handler is an address in a moved stack."""

from __future__ import annotations

import os
import resource
import runpy
from pathlib import Path

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.environ["NNSIGHT_PP_TLS_SWAP"] = "0"
runpy.run_path(str(Path(__file__).with_name("park_in_torch_call_then_warn.py")))
