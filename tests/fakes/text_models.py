"""Tiny Hugging Face models and a tokenizer of whole words, made here, nothing read from a hub."""

import functools

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ("[PAD]", "[UNK]", "[MASK]", "[END]")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "user", "bot", ":")
VOCABULARY = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}bot :{% endif %}"
)


@functools.cache
def _words() -> Tokenizer:
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return words


def word_tokenizer(**settings) -> transformers.PreTrainedTokenizerBase:
    """Return a tokenizer in which a word is a token; without a pad token of its own."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_words(),
        unk_token="[UNK]",
        eos_token="[END]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
        **settings,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def causal_config() -> transformers.GPT2Config:
    end = VOCABULARY["[END]"]
    return transformers.GPT2Config(
        vocab_size=len(VOCABULARY),
        n_positions=32,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=end,
        eos_token_id=end,
    )


def causal_model() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(causal_config()).eval()


def masked_model() -> transformers.DistilBertForMaskedLM:
    torch.manual_seed(3)
    config = transformers.DistilBertConfig(
        vocab_size=len(VOCABULARY),
        dim=8,
        n_layers=1,
        n_heads=2,
        hidden_dim=16,
        max_position_embeddings=32,
    )
    return transformers.DistilBertForMaskedLM(config).eval()


def translation_model() -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=len(VOCABULARY),
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=VOCABULARY["[END]"],
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def mixture_model() -> transformers.MixtralForCausalLM:
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=32,
    )
    return transformers.MixtralForCausalLM(config).eval()


# What each family of decoders has beside the shape that all of them share.
DECODERS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", {}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 4,
            "query_pre_attn_scalar": 8,
            "sliding_window": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
# Looks like Llama, and scales what its layers add.
SCALING = ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 4.0})


def decoder_model(family: str, attention: str = "sdpa") -> transformers.PreTrainedModel:
    """Return a random model of one of `DECODERS`, with three layers and 4 heads."""
    torch.manual_seed(3)
    name, own = {**DECODERS, "granite": SCALING}[family]
    shape = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{name}Config")(**{**shape, **own})
    config._attn_implementation = attention
    suffix = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    model = getattr(transformers, name + suffix)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            # Large enough that every part of a layer matters.
            weight.add_(0.3 * torch.randn_like(weight))
    return model
