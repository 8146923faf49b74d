"""Make one call out of the invokes of a trace: padded inputs, options, and each invoke's rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import transformers

from nnsight_pp.core.rows import BatchCut, Rows, WholeCut
from nnsight_pp.engines.hf.beam_cut import BeamCut
from nnsight_pp.engines.hf.encode import Encoder, Prompt, has_prompt, is_chat
from nnsight_pp.engines.hf.fields import Padding, join_rows
from nnsight_pp.errors import ConfigurationError, NotSupportedError, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.core.protocols import Cut

# What one forward understands of what `generate` takes.
_OF_ONE_FORWARD = ("use_cache", "output_attentions", "output_hidden_states", "output_scores")


class HasInput(Protocol):
    """What is read of an invoke."""

    @property
    def inputs(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> dict[str, Any]: ...


class Given(NamedTuple):
    """The input of a call without a block."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """The one call of a run.

    Attributes:
        args: Its positional arguments.
        kwargs: Its named arguments.
        cuts: How each invocation sees the call's values.
        warnings: Texts for the user.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cuts: list[Cut]
    warnings: tuple[str, ...] = ()


def call_of(
    invocations: Sequence[HasInput],
    options: dict[str, Any],
    encoder: Encoder,
    padding: Padding,
    config: Any = None,
) -> Call:
    """Join the prompts of ``invocations`` into one call of a model.

    Args:
        invocations: The invokes of the trace.
        options: What was given to the trace itself, for all of them.
        encoder: Reads the prompts.
        padding: How the model pads.
        config: Its settings for a generation, where the call is one.

    Raises:
        ConfigurationError: No invoke has an input, or their inputs do not fit together.
        NotSupportedError: An input that cannot be batched stands beside another.
    """
    given, shared = _sorted(invocations, options)
    prompts = [encoder.encode(one.inputs, {**shared, **one.kwargs}) for one in given]
    raw = next((prompt.raw for prompt in prompts if prompt.raw), {})
    if raw and len(prompts) > 1:
        raise NotSupportedError(
            explain(
                f"`{next(iter(raw))}` does not support batching multiple invokes.",
                why="It is not known which of its entries belong to which row.",
                todo="Trace this prompt alone.",
            )
        )
    if raw:
        padding = Padding(padding.side, padding.token, False, False, padding.has_decoder)
    fields = join_rows([row for prompt in prompts for row in prompt.rows], padding)
    kwargs = {**fields, **raw, **_same_options(prompts)}
    sizes = [len(prompt.rows) for prompt in prompts]
    return Call((), kwargs, _cuts(invocations, given, sizes, _multiples(kwargs, config)))


def pipeline_call_of(invocations: Sequence[HasInput], options: dict[str, Any], config: Any) -> Call:
    """Join the prompts of ``invocations`` into one call of a pipeline, which encodes them itself.

    Raises:
        ConfigurationError: No invoke has an input, or their options differ.
    """
    given, shared = _sorted(invocations, options)
    prompts = [Prompt([], {}, {**shared, **one.kwargs}) for one in given]
    if any(len(one.inputs) != 1 for one in given):
        raise ConfigurationError(
            explain(
                "A pipeline takes its prompt as the one argument without a name.",
                why="It encodes text itself, and takes no ids.",
                todo="Give it a string, a list of strings, or a chat; or use `generate`.",
            )
        )
    values = [one.inputs[0] for one in given]
    lists = [_as_list(value) for value in values]
    sizes = [len(one) for one in lists]
    data = values[0] if len(values) == 1 else [value for one in lists for value in one]
    # All rows in one forward, as a trace has them.
    kwargs = {"batch_size": sum(sizes), **_same_options(prompts)}
    return Call((data,), kwargs, _cuts(invocations, given, sizes, _multiples(kwargs, config)))


def _multiples(kwargs: dict[str, Any], config: Any) -> set[int]:
    """Return how many rows a generation may compute or return for each row of the batch.

    Source: transformers 5.19 generation/utils.py: `generate` expands its input to the larger one.
    """
    given = kwargs.get("generation_config", config)
    names = ("num_beams", "num_return_sequences")
    counts = {kwargs.get(name, getattr(given, name, None)) or 1 for name in names}
    return {1, max(counts), *counts}


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) and not is_chat(value) else [value]


def _sorted(
    invocations: Sequence[HasInput], options: dict[str, Any]
) -> tuple[list[HasInput], dict[str, Any]]:
    """Return the invokes that have a prompt, and the options for all of them."""
    given = [one for one in invocations if has_prompt(one.inputs, one.kwargs)]
    if not given:
        raise ConfigurationError(
            explain(
                "The trace needs an input, and none of its invokes has one.",
                why="An invoke without an input sees the batch of the others.",
                todo="Give at least one `tracer.invoke(...)` an input.",
            )
        )
    shared = dict(options)
    for one in invocations:
        if not has_prompt(one.inputs, one.kwargs):
            shared.update(one.kwargs)
    return given, shared


def _same_options(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the options of ``prompts``, which must be the same for all: there is one call."""
    first = prompts[0].options
    for prompt in prompts[1:]:
        for name in sorted(first.keys() | prompt.options.keys()):
            one, other = first.get(name), prompt.options.get(name)
            if one is not other and one != other:
                raise ConfigurationError(
                    explain(
                        f"The invokes give `{name}` as {one!r} and as {other!r}.",
                        why="The invokes of a trace are one call of the model.",
                        todo="Give the option to the trace itself, for all of them.",
                    )
                )
    return dict(first)


def _cuts(
    invocations: Sequence[HasInput],
    given: Sequence[HasInput],
    sizes: Sequence[int],
    multiples: set[int],
) -> list[Cut]:
    """Return what each invoke sees: its rows, or everything where it is alone or has no input."""
    if len(given) == 1:
        return [WholeCut() for _ in invocations]
    cuts: list[Cut] = []
    start, total = 0, sum(sizes)
    left = iter(sizes)
    for one in invocations:
        if has_prompt(one.inputs, one.kwargs):
            size = next(left)
            rows = Rows(start, size, total)
            cuts.append(BatchCut(rows) if multiples == {1} else BeamCut(rows, multiples))
            start += size
        else:
            cuts.append(WholeCut())
    return cuts


@functools.cache
def _of_generation() -> frozenset[str]:
    """Return the names of what only a generation understands."""
    settings = {*vars(transformers.GenerationConfig()), "generation_config", "streamer"}
    return frozenset(settings.difference(_OF_ONE_FORWARD))


def for_one_forward(call: Call, takes: frozenset[str]) -> Call:
    """Return ``call`` without what only a generation would understand, and with word of it."""
    unused = [name for name in call.kwargs if name in _of_generation() and name not in takes]
    if not unused:
        return call
    kwargs = {name: value for name, value in call.kwargs.items() if name not in unused}
    text = f"`trace` runs one forward, so {', '.join(unused)} had no effect: use `generate`."
    return Call(call.args, kwargs, call.cuts, (text,))
