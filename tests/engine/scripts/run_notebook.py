"""Run a notebook of one trace in a real kernel, and print the last cell's output.

The kernel is shut down as a notebook server does it, with the model still open.

Usage: run_notebook.py MODEL_FOLDER
"""

import sys

import nbclient
import nbformat

CELLS = (
    f"""
from nnsight_pp import VLLM
model = VLLM(
    {sys.argv[1]!r}, pipeline_parallel_size=2, dtype="float32", enforce_eager=True, max_model_len=64
)
""",
    """
with model.trace("one two three", temperature=0.0, max_tokens=2) as tracer:
    early = model.model.layers[0].mlp.output.save()
    late = model.model.layers[3].mlp.output.save()
    logits = [].save()
    for step in tracer.iter[:2]:
        logits.append(model.logits)
""",
    "print(list(early.shape), list(late.shape), len(logits))",
)


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(one.get("text", "") for one in cell.outputs if one.get("name") == "stdout")


notebook = nbformat.v4.new_notebook(
    cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS]
)
# A kernel that dies answers nothing, hence a bound for each cell.
nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
print(text_of(notebook.cells[-1]).strip())
