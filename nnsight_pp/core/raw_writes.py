"""Writes into a tensor that torch does not count: through `.data`, `.numpy()` and the like.

What a block has edited is told by versions (`core.rows`), and such writes leave them alone. So the
values of a block whose text mentions one of `WORDS` are compared with what they were when it was
given them, and those that differ get a new version.
"""

from __future__ import annotations

from typing import Any, final

import torch

from nnsight_pp.core.tree import leaves

WORDS = frozenset(
    [
        *("data", "numpy", "np", "__array__", "asarray", "memoryview", "data_ptr", "set_"),
        *("storage", "untyped_storage", "from_dlpack", "to_dlpack", "__dlpack__"),
    ]
)


@final
class RawWrites:
    """The values of one visit as they were when the block was given them."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def note(self, value: Any) -> None:
        """Take in ``value`` as it is now.

        Cost: a copy of it.
        """
        self._known += [
            (leaf, leaf._version, _bytes_of(leaf).clone())
            for leaf in leaves(value)
            if issubclass(type(leaf), torch.Tensor)
            and not leaf.is_inference()
            and leaf.layout is torch.strided
            and not leaf.is_meta
        ]

    def count(self) -> None:
        """Give each tensor that was written past its version a new one."""
        known, self._known = self._known, []
        for leaf, version, before in known:
            if leaf._version == version and torch.equal(_bytes_of(leaf), before):
                self._known.append((leaf, version, before))
                continue
            if leaf._version == version:
                torch.autograd.graph.increment_version(leaf)
            self.note(leaf)


def _bytes_of(leaf: torch.Tensor) -> torch.Tensor:
    whole = leaf.detach().resolve_conj().resolve_neg().contiguous()
    return whole.view(-1).view(torch.uint8)
