"""A user's script: no function, no `__main__` guard. Prints one JSON line.

Usage: plain_script.py MODEL_FOLDER
"""

import json
import sys

import psutil

from nnsight_pp import VLLM


def engine_processes():
    """Return the processes below this one that run; one that has ended may wait to be noticed."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child.pid)
        except psutil.NoSuchProcess:  # so is a zombie
            continue
    return found


said = {"processes before": len(engine_processes())}
model = VLLM(
    sys.argv[1], pipeline_parallel_size=2, dtype="float32", enforce_eager=True, max_model_len=64
)

with model.trace("one two three", temperature=0.0, max_tokens=2) as tracer:
    early = model.model.layers[0].mlp.output
    model.model.layers[3].mlp.output[-1] += early[-1]
    late = model.model.layers[3].mlp.output.save()
    logits = [].save()
    for _ in tracer.iter[:2]:
        logits.append(model.logits)
    text = tracer.result.outputs[0].text.save()

said["late"] = list(late.shape)
said["logits"] = len(logits)
said["text"] = text

said["refused"] = {}
for what, prompts, options in (
    ("an unknown option", ["one"], {"heat": 0.0}),
    ("an empty prompt", [""], {}),
    ("a list of prompts", [["one", "two"]], {}),
    ("two prompts", ["one", "two"], {}),
):
    try:
        with model.trace(*prompts, **options) as tracer:
            late = model.model.layers[3].mlp.output.save()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        said["refused"][what] = {"kinds": kinds, "text": str(error)}

said["left on ranks"] = model.request_counts()
said["processes"] = len(engine_processes())
model.close()
said["processes after close"] = len(engine_processes())
print(json.dumps(said))
