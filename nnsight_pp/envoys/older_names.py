"""Names of a node that have moved to the tracer. They work, and say where they went."""

from __future__ import annotations

import warnings

from nnsight_pp.errors import NNsightDeprecationWarning
from nnsight_pp.trace.step_block import StepChoice, StepLoop


class OlderNames:
    """What a node still answers for the tracer."""

    @property
    def iter(self) -> StepChoice:
        """Steps to loop over. Deprecated: use `tracer.iter`."""
        _warn("model.iter", "tracer.iter")
        return StepChoice()

    def all(self) -> StepLoop:
        """Loop over every step of the run. Deprecated: use `tracer.all()`."""
        _warn("model.all()", "tracer.all()")
        return StepChoice()[:]


def _warn(name: str, better: str) -> None:
    warnings.warn(f"{name} is deprecated: use {better}.", NNsightDeprecationWarning, stacklevel=3)
