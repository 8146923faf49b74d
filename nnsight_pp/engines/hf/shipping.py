"""`remote="local"`: run here what could as well run in another process.

Each block travels to bytes and back before the run, as it does on its way to an engine's ranks, so
that a name it cannot take along shows now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnsight_pp.core.location import ROOT
from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.errors import ConfigurationError, NotSupportedError, explain
from nnsight_pp.trace.tracer import BlockTracer
from nnsight_pp.wire.block_codec import BlockMessage, decode_block, encode_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nnsight_pp.trace.tracer import Invocation

LOCAL = "local"


def check_remote(remote: Any) -> bool:
    """Tell whether blocks are to be shipped before they run.

    Raises:
        NotSupportedError: A remote service was asked for.
    """
    if not remote:
        return False
    if remote == LOCAL:
        return True
    raise NotSupportedError(
        explain(
            f"remote={remote!r} was asked for.",
            why="This package has no remote service.",
            todo=f"Leave it out, or use remote={LOCAL!r} to check that the block could travel.",
        )
    )


def check_ships(root: Envoy, known: Sequence[Any], invocations: Sequence[Invocation]) -> None:
    """Send every block to bytes and back.

    Args:
        root: The model that they run beside.
        known: Objects that exist on both sides, beside the model's own.
        invocations: The blocks.

    Raises:
        ConfigurationError: A name of a block holds something that cannot travel.
    """
    modules = {id(node._module): node.path for node in root.nodes()}

    def name_of(obj: Any) -> Any:
        if isinstance(obj, Envoy) and obj.root is root:
            return "node", obj.path
        if isinstance(obj, BlockTracer):
            return "tracer", ""
        if id(obj) in modules:
            return "module", modules[id(obj)]
        return next((("known", str(n)) for n, one in enumerate(known) if one is obj), None)

    for one in invocations:
        names = one.names.look_up(one.block.needs())
        try:
            data = encode_block(BlockMessage(LOCAL, one.block, names), name_of)
            # What is made of the root again needs the root; nothing else is looked at.
            decode_block(data, lambda name: root if name == ("node", ROOT) else name)
        except Exception as error:
            raise ConfigurationError(
                explain(
                    f"The block cannot travel: {type(error).__name__}: {error}",
                    why=f"It takes along {', '.join(sorted(names))}.",
                    todo="Make the object inside the block.",
                )
            ) from error
