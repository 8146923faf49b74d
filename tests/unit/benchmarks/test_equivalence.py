"""What the comparison of benchmarks says of right results, of silent no-ops and of wrong values."""

import torch

from benchmarks.bench_equivalence import verdict_of
from benchmarks.equivalence import compare, effect_of_edit, effect_of_prompt
from benchmarks.workloads import WORKLOADS, task_for, untouched
from fakes.models import tiny_llama
from fakes.text_models import word_tokenizer
from nnsight_pp import LanguageModel


def logits(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


PLAIN = {("logits", 0, 0): logits(1.0, 2.0, 0.0)}
EDITED = {("logits", 0, 0): logits(3.0, 2.0, 0.0)}


def test_an_edit_that_gives_the_reference_is_equivalent():
    effect = effect_of_edit(EDITED, PLAIN)
    assert effect > 0.1
    assert compare(EDITED, EDITED, effect).word == "EQUIVALENT"


def test_an_edit_that_does_nothing_on_one_backend_is_different():
    verdict = compare(PLAIN, EDITED, effect_of_edit(PLAIN, PLAIN))
    assert (verdict.word, verdict.top1) == ("DIFFERENT", 0.0)
    assert verdict.effect == 0.0


def test_an_edit_that_does_nothing_anywhere_has_no_effect():
    assert compare(PLAIN, PLAIN, effect_of_edit(PLAIN, PLAIN)).word == "NO EFFECT"


def test_one_of_several_named_edits_that_does_nothing_has_no_effect():
    edited = {
        ("logits", 0, "head"): EDITED["logits", 0, 0],
        ("logits", 0, "layer"): PLAIN["logits", 0, 0],
    }
    assert effect_of_edit(edited, PLAIN) == 0.0


def test_an_edit_that_reaches_one_of_two_prompts_has_no_effect():
    plain = {**PLAIN, ("logits", 1, 0): logits(0.0, 1.0, 0.0)}
    assert effect_of_edit({**EDITED, ("logits", 1, 0): plain["logits", 1, 0]}, plain) == 0.0


def test_the_same_best_token_with_other_chances_is_different():
    near = {("logits", 0, 0): EDITED["logits", 0, 0] + logits(0.0, 1e-3, 0.0)}
    verdict = compare(near, EDITED, 1.0)
    assert (verdict.word, verdict.top1) == ("DIFFERENT", 1.0)
    assert verdict.variation > 1e-4


def test_a_wrong_value_beside_right_logits_is_different():
    right = {**EDITED, ("probe", 0, 0): logits(1.0, 2.0)}
    wrong = {**EDITED, ("probe", 0, 0): logits(1.0, 2.1)}
    assert compare(right, right, 1.0).word == "EQUIVALENT"
    verdict = compare(wrong, right, 1.0)
    assert verdict.word == "DIFFERENT"
    assert "probe" in verdict.why


def test_a_value_that_is_lacking_or_of_another_shape_or_not_finite_is_different():
    right = {**EDITED, ("probe", 0, 0): logits(1.0, 2.0)}
    assert compare(EDITED, right, 1.0).word == "DIFFERENT"
    for wrong in (logits(1.0, 2.0, 3.0), logits(1.0, float("nan"))):
        assert compare({**EDITED, ("probe", 0, 0): wrong}, right, 1.0).word == "DIFFERENT"


def test_values_that_are_alike_for_all_prompts_have_no_effect():
    constant = {("probe", 0, 0): logits(1.0, 2.0), ("probe", 1, 0): logits(1.0, 2.0)}
    assert effect_of_prompt(constant) == 0.0
    assert compare(constant, constant, effect_of_prompt(constant)).word == "NO EFFECT"
    assert effect_of_prompt({**constant, ("probe", 1, 0): logits(2.0, 1.0)}) > 0.1


def test_every_workload_moves_a_local_model_and_a_broken_one_is_named():
    model = LanguageModel(tiny_llama(num_hidden_layers=3), tokenizer=word_tokenizer())
    task = task_for(model, ("the cat sat on", "the dog ran far"), "a user and mat", strength=1.0)
    plain = untouched(model, task)
    for name, workload in WORKLOADS.items():
        got = workload.run(model, task)
        verdict = verdict_of(workload, {"untouched": plain, name: got}, name, got)
        assert verdict.word == "EQUIVALENT", (name, verdict)
        if workload.edits:
            broken = {key: plain.get(key, plain["logits", key[1], 0]) for key in got}
            verdict = verdict_of(workload, {"untouched": plain, name: broken}, name, got)
            assert verdict.word == "DIFFERENT", (name, verdict)
            verdict = verdict_of(workload, {"untouched": plain, name: broken}, name, broken)
            assert verdict.word == "NO EFFECT", (name, verdict)
