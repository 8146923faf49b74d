"""Every example is run on both engines, and what it prints is held against a hand computation."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
from loading import opened

from examples.by_hand import changed, numbers, outputs, words, zero

NAMES = (
    "logit_lens",
    "steering",
    "ablation",
    "activation_patching",
    "attribution",
    "per_head",
    "generation_loop",
    "caching",
    "editing",
)
EIFFEL = "The Eiffel Tower is located in the city of"
COLOSSEUM = "The Colosseum is located in the city of"
DOCS = Path(__file__).parents[2] / "docs"
# Half of the last printed digit, and what two engines differ by in float32.
NEAR = 0.012


def ids_of(model, prompt):
    return model.tokenizer(prompt, return_tensors="pt")["input_ids"]


def id_of(model, word):
    (token,) = model.tokenizer(word)["input_ids"]
    return token


def rows(text, pattern):
    """The groups of each line of ``text`` that ``pattern`` matches from its beginning."""
    found = [match.groups() for line in text.splitlines() if (match := re.match(pattern, line))]
    assert found, text
    return found


@pytest.mark.parametrize("name", NAMES)
def test_two_stages_print_what_the_local_engine_prints(name, printed):
    here, there = printed(name, "local"), printed(name, "two_stages")
    if name == "attribution":  # gradients are the local engine's alone
        here = here.partition("patching ")[0]
        there, _, refused = there.partition("no gradients here: ")
        assert "backward" in refused
    assert words(there) == words(here)
    assert numbers(there) == pytest.approx(numbers(here), abs=NEAR)
    assert len(numbers(here)) >= 5


def test_an_example_that_is_run_by_itself_has_an_engine_of_two_stages(smollm2_path):
    """The tests share one that takes the same, and longer ones are not wanted here."""
    with opened("vllm", str(smollm2_path)) as model:
        assert len(model.model.layers) == 30
        assert not model.dispatched  # it starts with the first block


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_lines_that_are_printed(name, printed):
    page = (DOCS / "how-to" / f"{name}.md").read_text()
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    told = iter(printed(name, "local").splitlines())
    for line in shown.splitlines():
        assert any(
            words(one) == words(line) and numbers(one) == pytest.approx(numbers(line), abs=NEAR)
            for one in told
        ), f"not printed, or not in this order: {line}"


def test_the_lens_is_the_norm_and_head_behind_each_layer(local, hf, printed):
    streams, logits = outputs(hf, list(hf.model.layers), ids_of(local, EIFFEL))
    paris = id_of(local, " Paris")
    found = rows(printed("logit_lens", "local"), r" +(\d+)  (['\"].*['\"]) +(\S+) +(\S+)$")
    assert [int(row[0]) for row in found] == list(range(30))
    for (_, token, best, answer), stream in zip(found, streams, strict=True):
        chances = hf.lm_head(hf.model.norm(stream[-1])).softmax(-1)
        assert token == repr(local.tokenizer.decode(chances.argmax()))
        assert float(best) == pytest.approx(float(chances.max()), abs=1e-3)
        assert float(answer) == pytest.approx(float(chances[paris]), abs=1e-3)
    assert logits.argmax() == paris
    assert found[-1][1] == "' Paris'"


def test_steering_adds_the_direction_at_every_step(local, hf, printed):
    import steering

    layer = hf.model.layers[steering.LAYER]

    def mean_end(prompts):
        ends = [outputs(hf, [layer], ids_of(local, one))[0][0][-1] for one in prompts]
        return torch.stack(ends).mean(0)

    push = mean_end(steering.HAPPY) - mean_end(steering.SAD)
    good, bad = id_of(local, " good"), id_of(local, " bad")
    ids = ids_of(local, steering.PROMPT)
    found = rows(printed("steering", "local"), r" *([+-]\d) +(\S+)  (.*)$")
    liking = [float(row[1]) for row in found]
    assert liking == sorted(liking)
    assert liking[0] < 0 < liking[-1]
    for strength, difference, text in found:
        with changed((layer, lambda stream, by=int(strength): stream + by * push)):
            logits = hf(ids).logits[0, -1]
            told = text
            if int(strength) in (-2, 2):
                made = hf.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=steering.TOKENS,
                )
                told = repr(local.tokenizer.decode(made[0, ids.shape[1] :]))
        assert float(difference) == pytest.approx(float(logits[good] - logits[bad]), abs=NEAR)
        assert text == told


def test_ablation_ranks_the_parts_by_what_the_answer_loses(local, hf, printed):
    ids, paris = ids_of(local, EIFFEL), id_of(local, " Paris")
    # One batch: the first row is untouched, each other one is without one part.
    parts = [
        (layer, name) for layer in range(len(hf.model.layers)) for name in ("self_attn", "mlp")
    ]
    with contextlib.ExitStack() as stack:
        for row, (layer, name) in enumerate(parts, start=1):

            def without(tensor, row=row):
                tensor[row] = 0

            stack.enter_context(changed((getattr(hf.model.layers[layer], name), without)))
        chances = hf(ids.repeat(len(parts) + 1, 1)).logits[:, -1].log_softmax(-1)[:, paris]
    lost = {
        (layer, "mlp" if name == "mlp" else "attn"): float(chances[0] - chances[row])
        for row, (layer, name) in enumerate(parts, start=1)
    }
    found = rows(printed("ablation", "local"), r" *(attn|mlp) of +(\d+) +(\S+) +(\S+)  (.*)$")
    order = sorted(lost, key=lost.__getitem__, reverse=True)
    assert [(int(layer), part) for part, layer, *_ in found] == order[: len(found)]
    for part, layer, _, nats, _ in found:
        assert float(nats) == pytest.approx(lost[int(layer), part], abs=NEAR)


def test_patching_moves_the_answer_with_the_cell(local, hf, printed):
    right, wrong = id_of(local, " Paris"), id_of(local, " Rome")
    layers = list(hf.model.layers)
    clean, clean_logits = outputs(hf, layers, ids_of(local, EIFFEL))
    corrupted_logits = outputs(hf, layers, ids_of(local, COLOSSEUM))[1]

    def difference(logits):
        return float(logits[right] - logits[wrong])

    text = printed("activation_patching", "local")
    table = {int(n[0]): n[1:] for n in map(numbers, text.splitlines()) if len(n) == 11}
    assert sorted(table) == list(range(0, 30, 4))
    for layer, position in [(0, 1), (4, 2), (12, 3), (20, 2), (24, 9), (28, 6), (28, 0)]:

        def patch(stream, layer=layer, position=position):
            stream = stream.clone()
            stream[0, position] = clean[layer][position]
            return stream

        with changed((layers[layer], patch)):
            logits = hf(ids_of(local, COLOSSEUM)).logits[0, -1]
        whole = difference(clean_logits) - difference(corrupted_logits)
        effect = (difference(logits) - difference(corrupted_logits)) / whole
        assert table[layer][position] == pytest.approx(effect, abs=NEAR)
    # The subject's tokens hold it first, the last token holds it in the end.
    assert max(table[4]) == table[4][2] > 0.8
    assert max(table[28]) == table[28][9] > 0.8
    assert "noise floor is below" in text


def test_attributions_add_up_to_the_difference_of_the_logits(local, hf, printed):
    right, wrong = id_of(local, " Paris"), id_of(local, " Rome")
    layers = list(hf.model.layers)
    (attn, stream), logits = outputs(
        hf, [layers[23].self_attn.o_proj, layers[29]], ids_of(local, EIFFEL)
    )
    text = printed("attribution", "local")
    lines = text.splitlines()
    assert numbers(lines[0])[0] == pytest.approx(float(logits[right] - logits[wrong]), abs=2e-3)
    assert numbers(lines[1])[:2] == [61, numbers(lines[0])[0]]
    words_of_head = hf.lm_head.weight
    seen = (words_of_head[right] - words_of_head[wrong]) * hf.model.norm.weight
    size = (stream[-1].pow(2).mean() + hf.config.rms_norm_eps).sqrt()
    told = {name: float(size) for name, size in rows(text, r"  (\w+ of \d+) +(\S+)$")}
    assert told["attn of 23"] == pytest.approx(float(attn[-1] @ seen / size), abs=2e-3)
    assert max(told, key=lambda name: abs(told[name])) == "attn of 23"


@pytest.mark.parametrize(("layer", "position"), [(2, 3), (11, 2), (20, 9), (29, 9)])
def test_the_gradient_is_the_slope_towards_the_clean_stream(layer, position, local, hf, printed):
    right, wrong = id_of(local, " Paris"), id_of(local, " Rome")
    module = hf.model.layers[layer]
    (clean,), _ = outputs(hf, [module], ids_of(local, EIFFEL))
    (here,), _ = outputs(hf, [module], ids_of(local, COLOSSEUM))
    step = 0.01 * (clean[position] - here[position])

    def moved(by):
        def add(stream):
            stream = stream.clone()
            stream[0, position] += by * step
            return stream

        with changed((module, add)):
            logits = hf(ids_of(local, COLOSSEUM)).logits[0, -1]
        return float(logits[right] - logits[wrong])

    slope = (moved(1) - moved(-1)) / 0.02
    part = printed("attribution", "local").partition("estimated by gradient")[2]
    table = {int(n[0]): n[1:] for n in map(numbers, part.splitlines()) if len(n) == 11}
    assert table[layer][position] == pytest.approx(slope, abs=0.05, rel=0.01)


def test_a_silenced_head_is_a_slice_of_what_the_projection_gets(local, hf, printed):
    import per_head

    right, wrong = id_of(local, " Mary"), id_of(local, " John")
    ids = ids_of(local, per_head.PROMPT)
    text = printed("per_head", "local")
    untouched = float(hf(ids).logits[0, -1, right] - hf(ids).logits[0, -1, wrong])
    assert numbers(text)[0] == pytest.approx(untouched, abs=NEAR)
    size = hf.config.head_dim
    for layer, head, change in rows(text, r"  layer +(\d+) head (\d+) +(\S+)$"):

        def silence(module, args, head=int(head)):
            args[0][0, -1, head * size : (head + 1) * size] = 0

        projection = hf.model.layers[int(layer)].self_attn.o_proj
        hook = projection.register_forward_pre_hook(silence)
        logits = hf(ids).logits[0, -1]
        hook.remove()
        expected = float(logits[right] - logits[wrong]) - untouched
        assert float(change) == pytest.approx(expected, abs=2 * NEAR)


def test_the_head_that_matters_most_looks_where_transformers_says(local, hf, printed):
    import per_head

    ids = ids_of(local, per_head.PROMPT)
    before = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    try:
        patterns = hf(ids, output_attentions=True).attentions
    finally:
        hf.set_attn_implementation(before)
    text = printed("per_head", "local")
    ((head, layer),) = rows(text, r"head (\d+) of layer (\d+) looks at$")
    found = rows(text, r"  (\S+)  token +(\d+)  (.*)$")
    pattern = patterns[int(layer)][0, int(head), -1]
    share, place = pattern.topk(len(found))
    assert [int(row[1]) for row in found] == place.tolist()
    assert [float(row[0]) for row in found] == pytest.approx(share.tolist(), abs=2e-3)
    assert found[0][1:] == ("9", "' John'")  # the second time that he is named


def test_the_loop_tells_every_step_and_turns_once(local, hf, printed):
    import generation_loop

    parts = printed("generation_loop", "local").split("turning at")[1:]
    for part, turn_at in zip(parts, (99.0, 3.0), strict=True):
        ids = ids_of(local, generation_loop.PROMPT)
        turned = 0
        for _, doubt, chance, token in rows(part, r" +(\d+)  doubt +(\S+)  p +(\S+)  (.*)$"):
            chances = hf(ids).logits[0, -1].softmax(-1)
            entropy = float(-(chances * chances.log()).sum())
            turns = not turned and entropy > turn_at
            turned += turns
            best = chances.topk(2)
            assert float(doubt) == pytest.approx(entropy, abs=NEAR)
            assert float(chance) == pytest.approx(float(best.values[int(turns)]), abs=2e-3)
            assert token == repr(local.tokenizer.decode(best.indices[int(turns)]))
            ids = torch.cat([ids, best.indices[int(turns)].view(1, 1)], dim=1)
        assert turned == (turn_at < 99)


def test_the_cache_holds_what_the_modules_gave(local, hf, printed):
    layers = list(hf.model.layers)
    streams, _ = outputs(hf, layers, ids_of(local, EIFFEL))
    added, _ = outputs(hf, [layer.mlp for layer in layers], ids_of(local, EIFFEL))
    text = printed("caching", "local")
    assert text.startswith("30 modules")
    table = [n for n in map(numbers, text.splitlines()) if len(n) == 4]
    assert [int(row[0]) for row in table] == list(range(30))
    for (_, size, more, share), stream, mlp in zip(table, streams, added, strict=True):
        assert size == pytest.approx(float(stream[-1].norm()), abs=0.1)
        assert more == pytest.approx(float(mlp[-1].norm()), abs=0.1)
        assert share == pytest.approx(float(mlp[-1].norm() / stream[-1].norm()), abs=NEAR)


def test_an_edit_stays_until_it_is_taken_away(local, hf, printed):
    import editing

    found = rows(printed("editing", "local"), r"(\w[\w ]*?)  +('.*?')  ('.*?') (\S+)$")
    assert [row[0] for row in found] == ["untouched"] * 2 + ["edited"] * 2 + ["untouched again"] * 2
    silent = [(hf.model.layers[layer].self_attn.o_proj, zero) for layer in editing.LAYERS]
    for name, prompt, token, chance in found:
        with changed(*(silent if name == "edited" else ())):
            chances = hf(ids_of(local, prompt[1:-1])).logits[0, -1].softmax(-1)
        assert token == repr(local.tokenizer.decode(chances.argmax()))
        assert float(chance) == pytest.approx(float(chances.max()), abs=2e-3)
    tokens = [row[2] for row in found]
    assert tokens[:2] == tokens[4:] == ["' Paris'", "' Rome'"]
    assert not {"' Paris'", "' Rome'"} & set(tokens[2:4])


def test_the_tutorial_runs_from_top_to_bottom(local, two_stages, tmp_path):
    text = (DOCS / "tutorial.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    # The engines are there, and others go on with them.
    code, number = re.subn(
        r"^(?:\w+ = (?:VLLM|LanguageModel)\(.*\)|model\.close\(\))$", "", code, flags=re.MULTILINE
    )
    assert number == 3
    file = tmp_path / "tutorial.py"
    file.write_text(code)
    names = {"__name__": "tutorial", "model": two_stages, "local": local}
    torch.manual_seed(0)
    exec(compile(code, str(file), "exec"), names)
    assert names["neurons"].shape == (10, 1536)
    assert torch.allclose(names["stream_here"], names["stream"], atol=1e-2)
    assert names["tower_out"].outputs[0].text == " Tower de la"
    told = local.tokenizer.decode(names["ids"][0, 10:])
    assert told == names["changed"].outputs[0].text
    for name, prompt in (("paris", names["prompt"]), ("four", "Two plus two is")):
        expected = local._module(ids_of(local, prompt)).logits[0, -1]
        assert torch.allclose(names[name][0], expected, atol=1e-2)
    assert len(names["logits"]) == 5
