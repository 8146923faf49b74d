"""Turn what a user writes for a prompt into rows.

A prompt is a string, a list of them, ids (a flat list or tensor is one row, nested ones are
several), a tokenizer's encoding, a chat or a list of chats, a mapping with ``text`` and
``text_pair``, or keywords named like the model's arguments. All of them become the same thing:
one dictionary of tensors per row.

A tensor that is no known field (a cache, positions of a cache) says nothing about rows. A prompt
with one is handed over as it is, nothing added, and cannot be batched with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch

from nnsight_pp.engines.hf.fields import (
    EXAMPLE_FIELDS,
    FIELDS,
    INPUT_FIELDS,
    LABELS,
    SHARED_FIELDS,
    Row,
    width_of,
)
from nnsight_pp.errors import ConfigurationError, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOKENIZER_OPTIONS = frozenset(
    {
        "add_special_tokens",
        "is_split_into_words",
        "max_length",
        "pad_to_multiple_of",
        "padding",
        "padding_side",
        "return_attention_mask",
        "return_special_tokens_mask",
        "return_token_type_ids",
        "stride",
        "truncation",
    }
)
_CHAT_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "enable_thinking",
        "tools",
    }
)
# Keywords that hold a prompt: that of transformers' own `generate` for the first argument.
_PROMPT = "inputs"
# Fields that say what the tokens are, with the dimensions that a row of them has at least.
_PRIMARY = {"input_ids": 1, "inputs_embeds": 2}
# Objects, not tensors, that carry a run's past.
_STATES = ("past_key_values", "encoder_outputs", "cache_params")


@dataclass(slots=True)
class Prompt:
    """The input of one invoke.

    Attributes:
        rows: One dictionary of fields per example.
        raw: Arguments that follow no row. With any, the prompt is handed over as it is.
        options: Everything else of the call.
    """

    rows: list[Row]
    raw: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def has_prompt(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call has an input, or only options."""
    return bool(inputs) or any(
        name in FIELDS or name == _PROMPT or _is_raw(name, value) for name, value in kwargs.items()
    )


def _is_raw(name: str, value: Any) -> bool:
    return isinstance(value, (torch.Tensor, numpy.ndarray)) or (
        name in _STATES and value is not None
    )


def is_message(value: Any) -> bool:
    """Tell whether ``value`` is one message of a chat."""
    return isinstance(value, Mapping) and "role" in value and "content" in value


def is_chat(value: Any) -> bool:
    """Tell whether ``value`` is one conversation."""
    return isinstance(value, (list, tuple)) and bool(value) and is_message(value[0])


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes rows for one model.

    Attributes:
        tokenizer: The model's tokenizer, or None.
        takes: The names of the arguments of the model's forward.
        has_decoder: Whether the model has a decoder of its own.
        is_generating: Whether ``max_length`` bounds the generation, not the prompt.
        needs_mask_token: Whether a text must hold the tokenizer's mask token.
    """

    tokenizer: Any
    takes: frozenset[str]
    has_decoder: bool
    is_generating: bool
    needs_mask_token: bool

    def encode(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Prompt:
        """Return the prompt that a call with ``inputs`` and ``kwargs`` gives.

        Raises:
            ConfigurationError: It is not readable as a prompt, or its fields do not fit together.
        """
        data, fields, options = self._sorted(inputs, kwargs)
        own = {name: options.pop(name) for name in self._tokenizer_names() & options.keys()}
        chat = {name: options.pop(name) for name in _CHAT_OPTIONS & options.keys()}
        raw = {name: options.pop(name) for name in list(options) if _is_raw(name, options[name])}
        rows: list[Row] = []
        if _is_text(data):
            rows = self._text_rows(data, own)
        elif isinstance(data, Mapping):
            rows = self._pair_rows(data, own)
        elif is_chat(data):
            rows = [self._chat_row(data, chat)]
        elif isinstance(data, (list, tuple)) and data and all(is_chat(one) for one in data):
            rows = [self._chat_row(one, chat) for one in data]
        _check_one_source(data, fields)
        is_flat = isinstance(data, str)
        if not rows:
            rows, is_flat = _primary_rows(fields if data is None else {"input_ids": data})
        primary = next(iter(rows[0]))
        for name, value in fields.items():
            if name != primary:
                self._spread(name, value, rows, raw, is_flat=is_flat)
        _check_not_empty(rows)
        return Prompt(rows, raw, options)

    def _tokenizer_names(self) -> frozenset[str]:
        return _TOKENIZER_OPTIONS - {"max_length"} if self.is_generating else _TOKENIZER_OPTIONS

    def _sorted(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Return the prompt, the fields and the options of a call."""
        options = dict(kwargs)
        given = [*inputs, *([options.pop(_PROMPT)] if _PROMPT in options else [])]
        if len(given) > 1:
            raise ConfigurationError(
                explain(
                    f"{len(given)} prompts were given as separate arguments.",
                    todo="Give them as one list, or each to its own `tracer.invoke(...)`.",
                )
            )
        data = given[0] if given else None
        if isinstance(data, Mapping) and "text" not in data:
            options = {**data, **options}
            data = None
        fields = {
            name: value
            for name in list(options)
            if name in FIELDS and (value := options.pop(name)) is not None
        }
        return data, fields, options

    # -- text ----------------------------------------------------------------------------------

    def _known_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigurationError(
                explain(
                    "The model has no tokenizer, so it cannot read text.",
                    why="None came with it.",
                    todo="Wrap it with `tokenizer=...`, or give ids.",
                )
            )
        return self.tokenizer

    def _text_rows(self, data: str | Sequence[str], options: dict[str, Any]) -> list[Row]:
        texts = [data] if isinstance(data, str) else list(data)
        return self._tokenized(self._known_tokenizer(), (texts,), options)

    def _pair_rows(self, data: Mapping[str, Any], options: dict[str, Any]) -> list[Row]:
        texts = [
            [data[name]] if isinstance(data[name], str) else list(data[name])
            for name in ("text", "text_pair")
            if data.get(name) is not None
        ]
        return self._tokenized(self._known_tokenizer(), tuple(texts), options)

    def _tokenized(
        self, tokenizer: Any, texts: tuple[list[str], ...], options: dict[str, Any]
    ) -> list[Row]:
        for text in texts[0] if self.needs_mask_token else ():
            if tokenizer.mask_token is not None and tokenizer.mask_token not in text:
                raise ConfigurationError(
                    explain(
                        f"No mask token ({tokenizer.mask_token}) stands in the prompt {text!r}.",
                        why="A model of the task `fill-mask` says what belongs there.",
                        todo="Put it into the text, or give ids.",
                    )
                )
        return self._rows_of(tokenizer(*texts, **options), len(texts[0]))

    def _chat_row(self, chat: Sequence[Any], options: dict[str, Any]) -> Row:
        goes_on = chat[-1].get("role") == "assistant"
        given = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on, **options}
        if given["add_generation_prompt"]:
            given["continue_final_message"] = False
        encoding = self._known_tokenizer().apply_chat_template(
            list(chat), tokenize=True, return_dict=True, **given
        )
        return self._rows_of({name: [value] for name, value in encoding.items()}, 1)[0]

    def _rows_of(self, encoding: Any, num_rows: int) -> list[Row]:
        """Return what the tokenizer made, as far as the model takes it."""
        names = [name for name in encoding if name in FIELDS and name in self.takes]
        names = [name for name in names if name != "input_ids"]
        return [
            {name: torch.tensor(encoding[name][index]) for name in ("input_ids", *names)}
            for index in range(num_rows)
        ]

    # -- fields --------------------------------------------------------------------------------

    def _spread(
        self, name: str, value: Any, rows: list[Row], raw: dict[str, Any], *, is_flat: bool
    ) -> None:
        """Give each row its share of field ``name``; a value of another shape goes to ``raw``."""
        if name == LABELS or name in EXAMPLE_FIELDS:
            values = self._example_values(name, value, rows, is_flat=is_flat)
        else:
            values, _ = _split(value, 2 if name.endswith("inputs_embeds") else 1)
            if name in INPUT_FIELDS and values[0].dim() != _dims_of(name, rows[0]):
                raw[name] = torch.as_tensor(value)
                return
            if len(values) == 1 and name in SHARED_FIELDS:
                values = values * len(rows)
        _check_count(name, len(values), rows)
        for row, one in zip(rows, values, strict=True):
            width = one.shape[-2 if name.endswith("inputs_embeds") else -1] if one.dim() else 0
            if name in INPUT_FIELDS and width != width_of(row) and not raw:
                raise ConfigurationError(
                    explain(
                        f"`{name}` has {width} positions for a row of {width_of(row)}.",
                        todo="Give one entry per token.",
                    )
                )
            row[name] = one

    def _example_values(
        self, name: str, value: Any, rows: list[Row], *, is_flat: bool
    ) -> list[torch.Tensor]:
        """Return what each row has of a field that may be one value per example."""
        try:
            whole = torch.as_tensor(value)
        except (TypeError, ValueError):  # rows of unequal length
            return _split(value, 1)[0]
        if whole.dim() == 0:
            return [whole]
        if len(rows) == 1 and whole.dim() == 1 and name == LABELS:
            length = whole.shape[0]
            is_row = length == width_of(rows[0]) and (is_flat or length > 1)
            if is_row or (is_flat and (self.has_decoder or length > 1)):
                return [whole]
        return list(whole.unbind(0))


def _check_one_source(data: Any, fields: dict[str, Any]) -> None:
    named = [name for name in _PRIMARY if name in fields]
    if len(named) + (data is not None) > 1:
        raise ConfigurationError(
            explain(
                f"{' and '.join(f'`{name}`' for name in named)} came beside another prompt.",
                why="Each of them says what the tokens are.",
                todo="Give one of them.",
            )
        )


def _is_text(data: Any) -> bool:
    return isinstance(data, str) or (
        isinstance(data, (list, tuple)) and bool(data) and all(isinstance(one, str) for one in data)
    )


def _dims_of(name: str, row: Row) -> int:
    """Return how many dimensions field ``name`` has in ``row``, next to the row's tokens."""
    if name == "inputs_embeds":
        return 2
    return row["input_ids"].dim() if "input_ids" in row else 1


def _primary_rows(fields: dict[str, Any]) -> tuple[list[Row], bool]:
    """Return the rows that the ids or embeddings of ``fields`` make, and whether it was flat."""
    for name, dims in _PRIMARY.items():
        if name in fields:
            values, is_flat = _split(fields[name], dims)
            return [{name: value} for value in values], is_flat
    raise ConfigurationError(
        explain(
            "The prompt has neither text, nor ids, nor embeddings.",
            why=f"Found: {', '.join(sorted(fields)) or 'nothing'}.",
            todo="Give a string, ids, or an encoding of the tokenizer.",
        )
    )


def _split(value: Any, row_dims: int) -> tuple[list[torch.Tensor], bool]:
    """Return the rows in ``value``, and whether it was a single row without a batch dimension.

    Args:
        value: A tensor, an array, or lists of these or of numbers.
        row_dims: How many dimensions a row has at least.
    """
    if isinstance(value, numpy.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        if value.dim() < row_dims:
            raise _unreadable(value)
        return ([value], True) if value.dim() == row_dims else (list(value.unbind(0)), False)
    if not isinstance(value, (list, tuple)) or not value:
        raise _unreadable(value)
    if all(_is_number(one) for one in value):
        return [torch.tensor([one.item() if _has_item(one) else one for one in value])], True
    return [row for one in value for row in _split(one, row_dims)[0]], False


def _has_item(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, numpy.generic))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, numpy.generic)) or (
        isinstance(value, torch.Tensor) and value.dim() == 0
    )


def _unreadable(value: Any) -> ConfigurationError:
    return ConfigurationError(
        explain(
            f"{value!r} ({type(value).__name__}) cannot be read as a prompt.",
            todo="Give a string, a list of strings, ids, a tensor of ids, an encoding of the "
            "tokenizer, or a list of chat messages.",
        )
    )


def _check_count(name: str, count: int, rows: list[Row]) -> None:
    if count != len(rows):
        primary = "input_ids" if "input_ids" in rows[0] else "inputs_embeds"
        raise ConfigurationError(
            explain(
                f"`{name}` has {count} rows, but `{primary}` has {len(rows)}.",
                todo="Give one entry per row.",
            )
        )


def _check_not_empty(rows: list[Row]) -> None:
    if any(width_of(row) == 0 for row in rows):
        raise ConfigurationError(
            explain(
                "A prompt is empty.",
                why="The model computes nothing for a row without tokens.",
                todo="Give at least one token, such as the tokenizer's `bos_token`.",
            )
        )
