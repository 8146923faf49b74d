"""Read a value on one pipeline stage, and change another stage with it.

Run it with `make demo`. It starts a vLLM engine whose layers are split over two stages, asks it
for an answer, and asks again with a block beside the model.
"""

import time

from loading import prepared_model

import nnsight_pp

PROMPT = "The Eiffel Tower is located in the city of"
TOWER = 3  # the place of " Tower" in the prompt
started = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)


say("preparing SmolLM2-135M-Instruct (15 s the first time) ...")
path = prepared_model()

say("loading vLLM ...")
# Eager engines start sooner. Leave enforce_eager out where speed counts: steps without a block then
# run compiled.
model = nnsight_pp.VLLM(
    path, pipeline_parallel_size=2, dtype="float32", enforce_eager=True, max_model_len=512
)

say("starting the engine, two ranks of one stage each (20 to 60 s) ...")
model.dispatch()

say("asking without a block ...")
untouched = model.generate(PROMPT, temperature=0.0, max_tokens=3)[0].outputs[0].text

say("asking with a block ...")
before = model.statistics()
with model.trace(PROMPT, temperature=0.0, max_tokens=3) as tracer:
    # Stage 0: one row of the embedding, and the neurons of a layer.
    tower = model.model.embed_tokens.output[TOWER].save()
    neurons = model.model.layers[5].mlp.act_fn.output.save()
    # Stage 1: SmolLM2's head reads tokens back with the embedding's own weights, so what is added
    # here makes the answer begin with " Tower".
    model.model.norm.output[0][-1] += 3 * tower
    # One logits row for each generated token.
    logits = [].save()
    for _ in tracer.iter[:3]:
        logits.append(model.logits)
    answer = tracer.result.save()
after = model.statistics()

print()
print(f"prompt             {PROMPT!r}")
print(f"untouched answer   {untouched!r}")
print(f"changed answer     {answer.outputs[0].text!r}")

print("\nread by the block")
print(f"  embedding of ' Tower'   {list(tower.shape)}")
print(f"  neurons of layer 5      {list(neurons.shape)}")
print(f"  logits of three steps   {[list(row.shape) for row in logits]}")
print(f"  their best tokens       {[model.tokenizer.decode(row.argmax()) for row in logits]}")

# `print(model)` shows the whole tree like this.
print("\nwhich stage owned what")
for module in (model.model.embed_tokens, model.model.layers[5].mlp.act_fn, model.model.norm):
    print(f"  {module.path:32} {str(module).rpartition('# ')[2]}")

print("\nwhat crossed between the stages for this block")
for old, new in zip(before, after, strict=True):
    for other, now in new["traffic"].items():
        then = old["traffic"][other]
        pulls = now["pulls"] - then["pulls"]
        received = now["bytes_received"] - then["bytes_received"]
        print(f"  stage {new['stage']} pulled {pulls} value(s) and received {received} bytes")
print(f"  one row is {tower.numel() * tower.element_size()} bytes, the rest are the stages' words")

say("closing the engine ...")
model.close()
say("done")
