"""Older and longer names for what this package has under its own.

Nothing in the package uses them. They are here so that code written for other versions of the
same surface finds what it imports.
"""

from __future__ import annotations

from nnsight_pp.envoys.edits import EditTracer as EditingTracer
from nnsight_pp.trace.session import Session as Tracer
from nnsight_pp.trace.step_block import StepLoop as Iterations
from nnsight_pp.trace.tracer import Tracer as InterleavingTracer

__all__ = ["EditingTracer", "InterleavingTracer", "Iterations", "Tracer"]
