"""What a block on an engine may do beside reading and writing values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, final

from nnsight_pp.envoys.envoy import unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nnsight_pp.interleave.worker import Worker


@final
class RankSurface:
    """One rank's part of it."""

    def cache(
        self, worker: Worker, modules: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> NoReturn:
        """Refuse."""
        raise unsupported(
            "`tracer.cache` was called.", worker.where(), "keeps no cache", "Save each value"
        )
