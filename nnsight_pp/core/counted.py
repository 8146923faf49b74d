"""Tensors that count their edits: an engine runs its model in inference mode, whose do not."""

from __future__ import annotations

from typing import Any, final

import torch


@final
class EditsCounted:
    """Leaves inference mode in a `with`, where it is on; builds no graph there.

    `torch.inference_mode(False)` and `torch.no_grad()` do the same in four times the time, and a
    read of an engine's value enters it.
    """

    __slots__ = ("_guard",)

    def __init__(self) -> None:
        self._guard: Any = None

    def __enter__(self) -> None:
        if torch.is_inference_mode_enabled():
            self._guard = torch._C._InferenceMode(False)
            self._guard.__enter__()
            torch._C._set_grad_enabled(False)  # leaving the mode has put it on

    def __exit__(self, *error: object) -> None:
        if self._guard is not None:
            self._guard.__exit__(*error)  # puts grad mode back, too
