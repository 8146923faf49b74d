"""The vLLM engine: the only folder that imports vllm.

Importing this folder quiets what vllm says while it is imported, unless the user wants its log
(``VLLM_LOGGING_LEVEL``).
"""

import logging
import os

if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR") == "ERROR":
    logging.getLogger("vllm").setLevel(logging.ERROR)
