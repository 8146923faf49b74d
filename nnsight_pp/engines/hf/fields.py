"""Join prompts of unequal length into the one batch that a model takes.

A prompt's row is one example: a tensor without the batch dimension for each argument of the model
(here: a field). The table says how a field follows the row: per token of the input, per token of
the decoder, or one value per example; what it is padded with, and on which side. What users write
for a row is `encode`'s business.

Letters: L tokens of a row, W tokens of the longest row, H hidden size, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.errors import ConfigurationError, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[str, torch.Tensor]

# What a loss leaves out.
IGNORED = -100
# Padded with the tokenizer's own pad token.
PAD_TOKEN = None

# Fields with one entry per token of the input, and what they are padded with.
INPUT_FIELDS: dict[str, int | None] = {
    "input_ids": PAD_TOKEN,
    "inputs_embeds": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "special_tokens_mask": 1,
    "global_attention_mask": 0,
}
# Fields with one entry per token of the decoder; always padded on the right.
DECODER_FIELDS: dict[str, int | None] = {
    "decoder_input_ids": PAD_TOKEN,
    "decoder_inputs_embeds": 0,
    "decoder_attention_mask": 0,
}
# Fields with one value per example.
EXAMPLE_FIELDS = (
    "start_positions",
    "end_positions",
    "next_sentence_label",
    "sentence_order_label",
)
# Per token, per target token, or per example: what it is shows only beside the ids.
LABELS = "labels"
FIELDS = frozenset({*INPUT_FIELDS, *DECODER_FIELDS, *EXAMPLE_FIELDS, LABELS})
# Where one row may stand for all.
SHARED_FIELDS = ("token_type_ids", "position_ids")


@dataclass(frozen=True, slots=True)
class Padding:
    """How this model pads.

    Attributes:
        side: ``left`` or ``right``, of the input's fields.
        token: The id that fills up, or None where the tokenizer has none.
        counts_positions: Whether positions are passed where padding would shift them.
        masks: Whether the model takes an attention mask.
        has_decoder: Whether labels belong to a decoder of its own.
    """

    side: str
    token: int | None
    counts_positions: bool
    masks: bool
    has_decoder: bool


def width_of(row: Row) -> int:
    """Return how many tokens ``row`` has."""
    if "input_ids" in row:
        return row["input_ids"].shape[-1]
    return row["inputs_embeds"].shape[0] if "inputs_embeds" in row else 0


def join_rows(rows: Sequence[Row], padding: Padding) -> dict[str, torch.Tensor]:
    """Return the fields of ``rows``, padded to the longest and stacked: ``[B, W, ...]``.

    Raises:
        ConfigurationError: A field without a default stands in some rows only, or padding is
            needed and there is no pad token.
    """
    rows = [dict(row) for row in rows]
    widest = max(width_of(row) for row in rows)
    if padding.masks:
        for row in rows:
            row.setdefault("attention_mask", _mask_of(row))
    if padding.counts_positions and any(_is_shifted(row, widest, padding) for row in rows):
        for row in rows:
            row.setdefault("position_ids", positions_of(row))
    labels_tokens = not padding.has_decoder and all(
        LABELS not in row or (row[LABELS].dim() and row[LABELS].shape[-1] == width_of(row))
        for row in rows
    )
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        _fill_in(name, rows, labels_tokens=labels_tokens)
    return {
        name: _stacked(name, [row[name] for row in rows], widest, padding, labels_tokens)
        for name in names
    }


def _mask_of(row: Row) -> torch.Tensor:
    if "input_ids" in row:
        return torch.ones_like(row["input_ids"], dtype=torch.long)
    return torch.ones(width_of(row), dtype=torch.long)


def positions_of(row: Row) -> torch.Tensor:
    """Return the positions ``[L]`` that the tokens of ``row`` have when it stands alone."""
    mask = row.get("attention_mask")
    if mask is not None and _is_padded_left(mask):
        return (mask.long().cumsum(-1) - 1).clamp(min=0)
    positions = torch.arange(width_of(row))
    return positions.expand_as(row["input_ids"]) if "input_ids" in row else positions


def _is_padded_left(mask: torch.Tensor) -> bool:
    """Tell whether ``mask`` is padding, then tokens up to the end, and nothing else."""
    if mask.dim() != 1 or mask.is_meta or not len(mask) or bool(mask[0]) or not bool(mask[-1]):
        return False
    return bool((mask.long().diff() >= 0).all())


def _is_shifted(row: Row, widest: int, padding: Padding) -> bool:
    if "position_ids" in row:
        return True
    if padding.side == "left" and width_of(row) < widest:
        return True
    return "attention_mask" in row and _is_padded_left(row["attention_mask"])


def _fill_in(name: str, rows: Sequence[Row], *, labels_tokens: bool) -> None:
    """Give the rows without field ``name`` its default."""
    without = [row for row in rows if name not in row]
    if not without:
        return
    for row in without:
        if name == "token_type_ids":
            row[name] = torch.zeros_like(_mask_of(row))
        elif name == "position_ids":
            row[name] = positions_of(row)
        elif name == "attention_mask":
            row[name] = _mask_of(row)
        elif name == LABELS and all(other[name].dim() for other in rows if name in other):
            row[name] = torch.full((width_of(row) if labels_tokens else 0,), IGNORED)
        else:
            raise ConfigurationError(
                explain(
                    f"{len(rows) - len(without)} of {len(rows)} rows have `{name}`.",
                    why="Nothing stands for it in the others.",
                    todo=f"Give `{name}` in every invoke, or in none.",
                )
            )


def _stacked(
    name: str, values: list[torch.Tensor], widest: int, padding: Padding, labels_tokens: bool
) -> torch.Tensor:
    if len({value.dtype for value in values}) > 1:
        common = values[0].dtype
        for value in values:
            common = torch.promote_types(common, value.dtype)
        values = [value.to(common) for value in values]
    if values[0].dim() == 0 or name in EXAMPLE_FIELDS:
        return _stack(name, values)
    dim = -2 if name.endswith("inputs_embeds") else -1
    follows_input = name in INPUT_FIELDS or (name == LABELS and labels_tokens)
    width = widest if follows_input else max(value.shape[dim] for value in values)
    if any(value.shape[dim] < width for value in values):
        fill = _fill_of(name, padding)
        side = padding.side if follows_input else "right"
        values = [_padded(value, width, dim, fill, side) for value in values]
    return _stack(name, values)


def _fill_of(name: str, padding: Padding) -> int:
    fill = IGNORED if name == LABELS else {**INPUT_FIELDS, **DECODER_FIELDS}[name]
    if fill is not None:
        return fill
    if padding.token is None:
        raise ConfigurationError(
            explain(
                "Prompts of unequal length cannot be batched without a pad token.",
                why="The shorter ones are filled up with it.",
                todo="Set `model.tokenizer.pad_token`, or give prompts of one length.",
            )
        )
    return padding.token


def _padded(value: torch.Tensor, width: int, dim: int, fill: int, side: str) -> torch.Tensor:
    shape = list(value.shape)
    shape[dim] = width - shape[dim]
    more = value.new_full(shape, fill)
    return torch.cat([more, value] if side == "left" else [value, more], dim)


def _stack(name: str, values: list[torch.Tensor]) -> torch.Tensor:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise ConfigurationError(
            explain(
                f"The rows of `{name}` have different shapes: {sorted(shapes)}.",
                why="One batch needs one shape.",
                todo="Give every row the same shape, or trace the prompts one by one.",
            )
        )
    first: Any = values[0]
    return torch.stack([value.to(first.device) for value in values])
