"""What the client sends of one block, and what it refuses before it does."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.surroundings import Surroundings, check_modes
from nnsight_pp.engines.vllm.imports import own_name_of, with_modules
from nnsight_pp.engines.vllm.reached import Code, code_of, reached_by
from nnsight_pp.errors import NotSupportedError, Where, explain
from nnsight_pp.wire.block_codec import BlockMessage, encode_block, encode_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FunctionType

    from nnsight_pp.core.block import Block
    from nnsight_pp.trace.tracer import Invocation


def message_of(
    trace: str, invocation: Invocation, session: str, beside: Sequence[Invocation] = ()
) -> BlockMessage:
    """Return the message of the block of ``invocation``.

    Args:
        trace: The client's name for its request.
        invocation: The block with its names.
        session: The client's name for its session, or an empty text.
        beside: Those with which it shares names, in order, itself among them.

    Raises:
        NotSupportedError: It stands inside autocast, or a mode of torch.
    """
    block = invocation.block
    seed, surroundings = of_this_moment(block)
    around = invocation.names.beyond_siblings() if beside else invocation.names
    names = around.look_up(block.needs())
    return BlockMessage(
        trace,
        block,
        names,
        saved=tuple(name for name, value in names.items() if value in invocation.saves),
        seed=seed,
        frame=invocation.frame,
        around=_around(invocation, beside),
        session=session,
        surroundings=surroundings,
    )


def of_this_moment(block: Block) -> tuple[int, Surroundings]:
    """Return the seed and the settings with which ``block`` runs.

    Raises:
        NotSupportedError: It stands inside autocast, or a mode of torch.
    """
    check_modes(block)
    # Drawn here, so that the user's `torch.manual_seed` decides what the block draws.
    return int(torch.randint(1 << 62, (), device="cpu").item()), Surroundings.now()


def _around(invocation: Invocation, beside: Sequence[Invocation]) -> dict[str, int]:
    """Return `SiblingNames.around` as it is among those ``beside``."""
    found = [one.names.siblings for one in beside]
    positions = [one.position for one in found if one is not None]
    own = invocation.names.siblings
    known = {} if own is None or len(positions) < len(beside) else own.around
    return {name: bisect_left(positions, at) for name, at in known.items()}


def encoded(value: BlockMessage | list[BlockMessage], name_of: Callable[[Any], Any]) -> bytes:
    """Return one message, or several that travel together, as bytes.

    The modules that the blocks import come into their names.

    Args:
        value: The messages.
        name_of: Returns what stands for an object that exists on both sides, or None.

    Raises:
        NotSupportedError: A block, or a function that it reaches, looks at environment variables,
            sets something on a library, or imports a module of the user's that is not here.
    """
    messages = value if isinstance(value, list) else [value]
    found: dict[str, Any] = {}
    for one in messages:
        code = code_of(one)
        _check(code, [one], name_of)
        found.update(with_modules(code.modules()))
    while True:
        for one in messages:
            one.names.update(found)
        functions: dict[int, FunctionType] = {}
        if isinstance(value, list):
            data = encode_blocks(value, name_of, functions)
        else:
            data = encode_block(value, name_of, functions)
        reached = reached_by(messages, functions.values())
        found = {}
        for code in reached:
            found.update(with_modules(code.modules()))
        if found.keys() <= messages[0].names.keys():
            for code in reached:
                _check(code, messages, name_of)
            return data


def _check(code: Code, messages: Sequence[BlockMessage], name_of: Callable[[Any], Any]) -> None:
    """Refuse what a rank would do otherwise than this process."""
    for word in code.told.environment:
        raise NotSupportedError(
            explain(
                _said_of(code, f"uses `{word}`"),
                where=_where(code, word, messages, name_of),
                why="It runs in the engine's processes, whose environment variables are those of "
                "the moment when the engine started.",
                todo="Read the variable before the `with`, and use its value.",
            )
        )
    done = code.sets()
    if done is not None:
        word, line = done
        raise NotSupportedError(
            explain(
                _said_of(code, f"sets `{word}`" if line else f"calls `{word}`", line),
                where=_where(code, word, messages, name_of, line),
                why="It runs in the engine's processes: yours would not see it, and the requests "
                "of others would.",
                todo="Do it before or after the `with`.",
            )
        )
    replaced = code.replaced()
    if replaced is not None:
        word, own = replaced
        raise NotSupportedError(
            explain(
                _said_of(code, f"uses `{word}`, which is your own {own.__qualname__}"),
                where=_where(code, word, messages, name_of),
                why="It runs in the engine's processes, where the library has what it came with.",
                todo="Use your function under a name of its own.",
            )
        )
    missing = code.missing()
    if missing is not None:
        is_main = missing == "__main__"
        raise NotSupportedError(
            explain(
                _said_of(code, f"imports `{missing}`"),
                where=_where(code, missing, messages, name_of),
                why="The engine's processes do not have your main module."
                if is_main
                else "It has not been imported here, and each of the engine's processes would "
                "import it for itself.",
                todo="Use its names as they are." if is_main else "Import it before the `with`.",
            )
        )


def _said_of(code: Code, done: str, line: int | None = None) -> str:
    if code.function is None:
        return f"The block {done}."
    own = code.function.__code__
    at = f"{own.co_filename}:{line or own.co_firstlineno}"
    return f"{code.function.__qualname__} ({at}), which the block reaches, {done}."


def _where(
    code: Code,
    word: str,
    messages: Sequence[BlockMessage],
    name_of: Callable[[Any], Any],
    line: int | None = None,
) -> Where:
    """Return the line of the block that does it, or that names what leads to the function."""
    block, name = messages[0].block, word
    if code.function is not None:
        block, name, line = *_lead_to(code.function, messages, name_of), None
    last = name.rpartition(".")[2]  # as `from . import last` has it
    line = line or block.line_naming(name) or block.line_naming(last)
    return Where(block.filename, line or block.first_line)


def _lead_to(
    function: FunctionType, messages: Sequence[BlockMessage], name_of: Callable[[Any], Any]
) -> tuple[Block, str]:
    """Return the block that reaches ``function``, and the name by which it does."""
    for message in messages:
        for name, one in message.names.items():
            found: dict[int, FunctionType] = {}
            encode_block(replace(message, names={name: one}), name_of, found)
            if id(function) in found:
                return message.block, own_name_of(name)
    return messages[0].block, ""
