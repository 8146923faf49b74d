"""The standard names on local models of five families, against hand-written torch hooks."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fakes.text_models import DECODERS, decoder_model, word_tokenizer
from nnsight_pp import (
    LanguageModel,
    NotSupportedError,
    OutOfOrderError,
    OutsideTraceError,
    RowsError,
    UnknownLocationError,
    attention_pattern,
)

PROMPT = "the cat sat on a mat"
OTHER = "a dog ran"
NUM_HEADS, NUM_KV_HEADS = 4, 2


def layers_of(module):
    return module.transformer.h if hasattr(module, "transformer") else module.model.layers


def first(value):
    return value[0] if isinstance(value, tuple) else value


def attention(layer):
    return layer.attn if hasattr(layer, "attn") else layer.self_attn


def projection_back(layer):
    return layer.attn.c_proj if hasattr(layer, "attn") else layer.self_attn.o_proj


def adds(layer, part):
    """Return the module whose output the layer adds to the stream, as Hugging Face writes it."""
    if hasattr(layer, "post_feedforward_layernorm"):
        return {
            "attn": layer.post_attention_layernorm,
            "mlp": layer.post_feedforward_layernorm,
        }[part]
    return attention(layer) if part == "attn" else layer.mlp


def norm_of(module):
    return module.transformer.ln_f if hasattr(module, "transformer") else module.model.norm


def by_hooks(module, ids):
    """Return what the hooks of one forward on one unpadded prompt have seen."""
    seen = {}

    def note(name):
        return lambda _, args, out: seen.__setitem__(name, first(out)[0].detach().clone())

    def note_input(name):
        def hook(_, args, kwargs):
            value = args[0] if args else kwargs["hidden_states"]
            seen[name] = value[0].detach().clone()

        return hook

    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(layers_of(module)):
            hooks = [
                layer.register_forward_hook(note(f"residual{index}")),
                layer.register_forward_pre_hook(note_input(f"in{index}"), with_kwargs=True),
                adds(layer, "attn").register_forward_hook(note(f"attn{index}")),
                adds(layer, "mlp").register_forward_hook(note(f"mlp{index}")),
                attention(layer).register_forward_pre_hook(
                    note_input(f"attn_in{index}"), with_kwargs=True
                ),
                layer.mlp.register_forward_pre_hook(note_input(f"mlp_in{index}"), with_kwargs=True),
                projection_back(layer).register_forward_pre_hook(
                    note_input(f"z{index}"), with_kwargs=True
                ),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
        stack.callback(norm_of(module).register_forward_hook(note("norm")).remove)
        with torch.no_grad():
            seen["logits"] = module(input_ids=ids).logits[0, -1:]
    return seen


def ids_of(model, prompt):
    return model.tokenizer(prompt, return_tensors="pt").input_ids


@pytest.fixture(params=DECODERS, scope="module")
def model(request):
    return LanguageModel(decoder_model(request.param), tokenizer=word_tokenizer())


def test_each_value_is_what_hooks_see(model):
    wanted = by_hooks(model._module, ids_of(model, PROMPT))
    found = {}
    with model.trace(PROMPT):
        found["embeddings"] = model.embeddings.save()
        for index, layer in enumerate(model.layers):
            found[f"in{index}"] = layer.residual_in.save()
            found[f"attn_in{index}"] = layer.attn.input.save()
            found[f"z{index}"] = layer.attn.z.flatten(1).save()
            found[f"attn{index}"] = layer.attn.output.save()
            found[f"mlp_in{index}"] = layer.mlp.input.save()
            found[f"mlp{index}"] = layer.mlp.output.save()
            found[f"residual{index}"] = layer.residual.save()
        found["norm"] = model.final_norm.save()
        found["logits"] = model.logits.save()
    wanted["embeddings"] = wanted["in0"]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_prompt_in_a_padded_batch_has_its_own_tokens_alone(model):
    for side in ("left", "right"):
        model.tokenizer.padding_side = side
        with model.trace() as tracer:
            with tracer.invoke(OTHER):
                stream = model.layers[1].residual.save()
                short = model.logits.save()
            with tracer.invoke(PROMPT):
                whole = model.layers[1].residual.save()
                long = model.logits.save()
        for prompt, found, logits in ((OTHER, stream, short), (PROMPT, whole, long)):
            wanted = by_hooks(model._module, ids_of(model, prompt))
            assert torch.allclose(found, wanted["residual1"], atol=1e-5)
            assert torch.allclose(logits, wanted["logits"], atol=1e-5)


def test_edits_and_assignments_reach_the_model(model):
    layer = layers_of(model._module)[1]

    def changed(module, args, out):
        new = first(out).clone()
        new[0, -1] += 2.0
        return (new, *out[1:]) if isinstance(out, tuple) else new

    with layer.register_forward_hook(changed), torch.no_grad():
        wanted = model._module(input_ids=ids_of(model, PROMPT)).logits[0, -1:]
    with model.trace(PROMPT):
        model.layers[1].residual[-1] += 2.0
        edited = model.logits.save()
    with model.trace(PROMPT):
        model.layers[1].residual = model.layers[1].residual + 2.0 * (torch.arange(6) == 5)[:, None]
        behind = model.layers[2].residual_in.save()
        assigned = model.logits.save()
    with model.trace() as tracer:  # the longer prompt makes the batch padded
        with tracer.invoke(f"{PROMPT} and {OTHER}"):
            untouched = model.logits.save()
        with tracer.invoke(PROMPT):
            model.layers[1].residual[-1] += 2.0
            in_batch = model.logits.save()
    assert torch.equal(edited, wanted)
    assert torch.equal(assigned, wanted)
    assert torch.allclose(in_batch, wanted, atol=1e-5)
    alone = by_hooks(model._module, ids_of(model, f"{PROMPT} and {OTHER}"))["logits"]
    assert torch.allclose(untouched, alone, atol=1e-5)
    assert behind.shape == (6, 16)


def test_every_part_can_be_assigned(model):
    zeros = torch.zeros(6, 16)
    with model.trace(PROMPT):
        model.embeddings = zeros + 1
        model.layers[0].attn.output = zeros + 2
        model.layers[0].mlp_out = zeros + 3
        first_stream = model.layers[0].residual_stream.save()
        model.layers[1].attn_out[:] = 0
        model.layers[1].mlp.output[:] = 0
        same = model.layers[1].residual.save()
        model.final_norm = zeros
        model.logits = torch.arange(17.0)[None]
        result = model.output.logits[0].save()
    assert torch.equal(first_stream, zeros + 6)
    assert torch.equal(same, zeros + 6)
    assert torch.equal(result[-1], torch.arange(17.0))
    head = model._module.get_output_embeddings().bias
    assert torch.equal(result[:-1], zeros[:-1, :1].expand(5, 17) if head is None else result[:-1])


def test_one_head_is_silenced_as_by_a_hook(model):
    layer = layers_of(model._module)[1]
    size = projection_back(layer).weight.numel() // 16 // NUM_HEADS

    def silence(module, args):
        new = args[0].clone()
        new[..., 3 * size : 4 * size] = 0
        return (new,)

    with projection_back(layer).register_forward_pre_hook(silence), torch.no_grad():
        wanted = model._module(input_ids=ids_of(model, PROMPT)).logits[0, -1:]
    with model.trace(PROMPT):
        z = model.layers[1].attn.z.save()
        z[:, 3] = 0
        logits = model.logits.save()
    assert z.shape == (6, NUM_HEADS, size)
    assert torch.equal(logits, wanted)


def test_heads_of_queries_keys_and_values_are_read_and_written(model):
    layer = layers_of(model._module)[2]
    ids = ids_of(model, PROMPT)
    seen = {}
    attn = attention(layer)
    with contextlib.ExitStack() as stack:
        for name in ("c_attn", "q_proj", "k_proj", "v_proj"):
            if hasattr(attn, name):
                hook = getattr(attn, name).register_forward_hook(
                    lambda _, args, out, name=name: seen.__setitem__(name, out[0].clone())
                )
                stack.callback(hook.remove)
        with torch.no_grad():
            model._module(input_ids=ids)
    if "c_attn" in seen:
        wanted = dict(zip("qkv", seen["c_attn"].split(16, dim=-1), strict=True))
    else:
        wanted = {name: seen[f"{name}_proj"] for name in "qkv"}
    num = {"q": NUM_HEADS, "k": NUM_HEADS if "c_attn" in seen else NUM_KV_HEADS}
    with model.trace(PROMPT):
        heads = model.layers[2].attn
        q = heads.q.save()
        k = heads.k.save()
        v = heads.v.save()
    for found, name in ((q, "q"), (k, "k"), (v, "v")):
        assert found.shape[1] == num.get(name, num["k"])
        assert torch.equal(found.flatten(1), wanted[name])
    with model.trace(PROMPT):  # a head whose values are zero gives nothing to its queries
        heads = model.layers[2].attn
        heads.v[:, 0] = 0
        z = heads.z.save()
    group = NUM_HEADS // num["k"]
    assert z[:, :group].abs().max() == 0
    assert z[:, group:].abs().min() > 0


@pytest.mark.parametrize("family", DECODERS)
def test_attention_patterns_are_those_of_eager_attention(family):
    model = LanguageModel(decoder_model(family, "eager"), tokenizer=word_tokenizer())
    with torch.no_grad():
        wanted = model._module(input_ids=ids_of(model, PROMPT), output_attentions=True).attentions
    with model.trace() as tracer:
        with tracer.invoke(f"{PROMPT} and {OTHER}"):
            model.logits.save()
        with tracer.invoke(PROMPT):  # padded
            whole = attention_pattern(model.layers[0]).save()
            last = attention_pattern(model.layers[2], rows=[-1, 2]).save()
            behind = model.layers[2].residual.save()
    assert whole.shape == (NUM_HEADS, 6, 6)
    assert torch.allclose(whole, wanted[0][0], atol=1e-4)
    assert torch.allclose(last, wanted[2][0][:, [-1, 2]], atol=1e-4)
    assert behind.shape == (6, 16)


def test_attention_that_leaves_out_a_cap_is_refused():
    model = LanguageModel(decoder_model("gemma2", "sdpa"), tokenizer=word_tokenizer())
    with pytest.raises(NotSupportedError, match="soft cap"):
        with model.trace(PROMPT):
            attention_pattern(model.layers[1]).save()


def test_a_pattern_in_a_later_step_is_refused():
    model = LanguageModel(decoder_model("llama"), tokenizer=word_tokenizer())
    with pytest.raises(NotSupportedError, match=r"model\.layers\.1\.attn\.pattern .*step 1"):
        with model.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
            for step in tracer.iter[:2]:
                attention_pattern(model.layers[1])


def test_steps_of_a_generation_have_one_row(model):
    ids = ids_of(model, PROMPT)
    with model.generate(PROMPT, max_new_tokens=3, do_sample=False) as tracer:
        shapes, logits = [].save(), [].save()
        for step in tracer.iter[:3]:
            shapes.append(tuple(model.layers[1].residual.shape))
            model.layers[2].residual[-1] *= 1.0
            logits.append(model.logits)
        result = tracer.result.save()
    assert shapes == [(6, 16), (1, 16), (1, 16)]
    assert [int(one.argmax()) for one in logits] == result[0, 6:].tolist()
    assert torch.equal(result[0, :6], ids[0])


def test_logits_written_decide_the_next_token(model):
    with model.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
        for step in tracer.iter[:2]:
            model.logits[:, 5 + step] = 1e4
        result = tracer.result.save()
    assert result[0, 6:].tolist() == [5, 6]


def test_gradients_flow_through_standard_values(model):
    module = model._module
    kept = []

    def keep(_, args, out):
        first(out).retain_grad()
        kept.append(first(out))

    with layers_of(module)[1].register_forward_hook(keep):
        module(input_ids=ids_of(model, PROMPT)).logits[0, -1, 7].backward()
    with model.trace(PROMPT):
        stream = model.layers[1].residual
        loss = model.logits[0, 7]
        with loss.backward():
            gradient = stream.grad.save()
    assert torch.allclose(gradient, kept[0].grad[0], atol=1e-6)


def test_several_values_of_one_place_are_served_in_any_order(model):
    with model.trace(PROMPT):
        module = model.layers[0]._node
        physical = first(module.output)[0].clone().save()
        model.layers[0].residual[:] += 1
        after = first(module.output)[0].clone().save()
        again = model.layers[0].residual.save()
    assert torch.allclose(after, physical + 1)
    assert torch.equal(again, after)


def test_a_value_that_has_passed_is_refused_at_its_line(model):
    with pytest.raises(OutOfOrderError, match=r"model\.layers\.0\.attn\.output#0"):
        with model.trace(PROMPT):
            model.layers[0].residual.save()
            model.layers[0].attn.output.save()


def test_the_views_index_like_a_list_and_fall_through_to_the_modules(model):
    layers = model.layers
    assert len(layers) == 3
    assert [one.path for one in layers] == [one.path for one in layers[:]]
    assert layers[-1].path == layers[2].path
    assert [one.path for one in layers[1:]] == [layers[1].path, layers[2].path]
    assert layers[1].mlp._module is layers_of(model._module)[1].mlp
    assert layers[1].attn._module is attention(layers_of(model._module)[1])
    with pytest.raises(UnknownLocationError):
        layers[3]
    with pytest.raises(OutsideTraceError, match=r"model\.layers\.1\.residual"):
        _ = layers[1].residual
    with model.trace(PROMPT):
        whole = model.layers[1].output.save()
    assert first(whole).shape == (1, 6, 16)


def test_views_travel_and_name_modules_to_a_cache(model):
    layer, attn = model.layers[1], model.layers[2].attn
    with model.trace(PROMPT, remote="local") as tracer:
        cache = tracer.cache(modules=[layer])
        stream = layer.residual.save()
        z = attn.z.save()
    assert torch.equal(first(cache[layer.path].output)[0], stream)
    assert z.shape[:2] == (6, NUM_HEADS)


def test_several_prompts_in_one_invoke_are_refused(model):
    with pytest.raises(RowsError, match=r"one prompt per `tracer\.invoke"):
        with model.trace([PROMPT, OTHER]):
            model.layers[1].residual.save()


def test_a_value_of_another_shape_is_refused(model):
    with pytest.raises(RowsError, match=r"\[5, 16\] was assigned, and this request has \[6, 16\]"):
        with model.trace(PROMPT):
            model.layers[1].residual = torch.zeros(5, 16)


def test_shapes_alone_can_be_scanned(model):
    with model.scan(PROMPT):
        stream = model.layers[1].residual.save()
    assert stream.shape == (6, 16)


def test_the_check_draws_no_numbers_and_is_made_once():
    model = LanguageModel(decoder_model("llama"), tokenizer=word_tokenizer())
    calls = []
    model._module.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    for _ in range(2):
        with model.trace(PROMPT):
            model.layers[1].residual.save()
    assert torch.equal(torch.rand(3), wanted)
    assert len(calls) == 3


def test_a_model_that_only_looks_alike_is_refused_by_name_where_it_is_used():
    module = decoder_model("llama")
    own = type(module.model.layers[1]).forward

    def doubled(self, hidden_states, **kwargs):
        return hidden_states + 2 * (own(self, hidden_states, **kwargs) - hidden_states)

    class Doubling(type(module.model.layers[1])):
        forward = doubled

    module.model.layers[1].__class__ = Doubling
    model = LanguageModel(module, tokenizer=word_tokenizer())
    with model.trace(PROMPT):
        model.layers[0].attn.output.save()
        model.layers[1].residual.save()
        model.final_norm.save()
    with pytest.raises(NotSupportedError, match=r"model\.layers\.1\.mlp\.output does not mean"):
        with model.trace(PROMPT):
            model.layers[1].mlp.output.save()


def test_what_the_layers_of_granite_scale_is_refused_and_its_stream_is_not():
    model = LanguageModel(decoder_model("granite"), tokenizer=word_tokenizer())
    wanted = by_hooks(model._module, ids_of(model, PROMPT))
    with model.trace(PROMPT):
        stream = model.layers[1].residual.save()
        normed = model.final_norm.save()
        logits = model.logits.save()
    assert torch.equal(stream, wanted["residual1"])
    assert torch.equal(normed, wanted["norm"])
    assert torch.equal(logits, wanted["logits"])
    with pytest.raises(NotSupportedError, match=r"attn\.output does not mean what it says"):
        with model.trace(PROMPT):
            model.layers[1].attn.output.save()


def test_a_stream_that_is_not_what_layers_hand_on_is_refused():
    module = decoder_model("llama")

    norm = module.model.norm.forward
    module.model.norm.forward = lambda x: norm(x if x.dim() < 3 else x.flip(-1))
    model = LanguageModel(module, tokenizer=word_tokenizer())
    with pytest.raises(NotSupportedError, match=r"model\.layers\.1\.residual does not mean"):
        with model.trace(PROMPT):
            model.layers[1].residual.save()


def test_a_scaled_norm_behind_the_last_layer_is_found_out():
    module = decoder_model("llama")
    head = module.lm_head

    class Reversing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = head.weight

        def forward(self, x):
            return head(-x)

    module.lm_head = Reversing()
    module.get_output_embeddings = lambda: head
    model = LanguageModel(module, tokenizer=word_tokenizer())
    with pytest.raises(NotSupportedError, match=r"model\.final_norm does not mean"):
        with model.trace(PROMPT):
            model.final_norm.save()


def test_an_architecture_that_is_not_known_keeps_its_own_names():
    from fakes.text_models import masked_model

    model = LanguageModel(masked_model(), tokenizer=word_tokenizer())
    assert not hasattr(model, "layers")
    with pytest.raises(UnknownLocationError, match="not known for the architecture DistilBert"):
        _ = model.layers
    with model.trace("the [MASK] sat"):
        out = model.distilbert.transformer.layer[0].output.save()
    assert first(out).shape[-1] == 8


def test_a_child_of_a_root_wins_over_a_standard_name():
    model = LanguageModel(decoder_model("llama").model, tokenizer=word_tokenizer())
    assert model.layers._module is model._module.layers
    with model.trace(PROMPT):
        out = model.layers[0].output.save()
    assert out.shape == (1, 6, 16)


def test_a_tree_that_stays_as_it_is_finds_each_name_once():
    root = LanguageModel(decoder_model("llama"), tokenizer=word_tokenizer())
    plain = repr(root.layers[1]), root.layers[-1].standard_path, len(root.layers)
    assert root.layers is not root.layers
    root.fix_names()
    assert root.layers is root.layers
    assert root.layers[1] is root.layers[1]
    assert (repr(root.layers[1]), root.layers[-1].standard_path, len(root.layers)) == plain
    assert [one.standard_path for one in root.layers[1:]] == [
        f"layers.{at}" for at in range(1, len(root.layers))
    ]
    with pytest.raises(UnknownLocationError, match="99"):
        root.layers[99]


def _zero(view):
    view[:] = 0


def _zero_data(view):
    view.data[:] = 0


@pytest.mark.slow
def test_what_a_function_writes_into_heads_past_the_version_lands():
    model = LanguageModel(decoder_model("llama"), tokenizer=word_tokenizer())
    found = []
    with torch.no_grad():
        for edit in (_zero, _zero_data, len):
            with model.trace(PROMPT):
                edit(model.layers[1].attn.q)
                logits = model.logits.save()
            found.append(logits)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
