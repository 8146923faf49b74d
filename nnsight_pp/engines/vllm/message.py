"""What the client sends of one block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nnsight_pp.core.meaning import all_codes
from nnsight_pp.errors import NotSupportedError, Where, explain
from nnsight_pp.wire.block_codec import BlockMessage

if TYPE_CHECKING:
    from nnsight_pp.core.block import Block
    from nnsight_pp.trace.tracer import Invocation

_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})


def message_of(trace: str, invocation: Invocation, session: str, *, depends: bool) -> BlockMessage:
    """Return the message of the block of ``invocation``.

    Args:
        trace: The client's name for its request.
        invocation: The block with its names.
        session: The client's name for its session, or an empty text.
        depends: Whether it shares names with blocks beside it.

    Raises:
        NotSupportedError: The block looks at environment variables.
    """
    block = invocation.block
    _check_environment(block)
    around = invocation.names.beyond_siblings() if depends else invocation.names
    names = around.look_up(block.needs())
    return BlockMessage(
        trace,
        block,
        names,
        saved=tuple(name for name, value in names.items() if value in invocation.saves),
        grad_enabled=torch.is_grad_enabled(),
        # Drawn here, so that the user's `torch.manual_seed` decides what the block draws.
        seed=int(torch.randint(1 << 62, ()).item()),
        frame=invocation.frame,
        session=session,
        dtype=torch.get_default_dtype(),
    )


def _check_environment(block: Block) -> None:
    for code in all_codes(block.code()):
        for name in code.co_names:
            if name in _ENVIRONMENT:
                line = block.line_naming(name)
                raise NotSupportedError(
                    explain(
                        f"The block uses `{name}`.",
                        where=None if line is None else Where(block.filename, line),
                        why="It runs in the engine's processes, whose environment variables are "
                        "those of the moment when the engine started.",
                        todo="Read the variable before the `with`, and use its value.",
                    )
                )
