"""Every exception that this package raises, and the one builder of their messages.

    NNsightError
    ├── BlockError                  your block
    │   ├── OutOfOrderError             a value was asked for after the model had passed it
    │   ├── OutsideTraceError           a served value was touched with no run (also a ValueError)
    │   ├── SaveOutsideTraceError       `save` with no trace (also a ValueError)
    │   ├── UnknownLocationError        no such module or value (also an AttributeError)
    │   ├── NotServedError              the engine never computes this as a module call
    │   ├── BarrierError                a barrier that not every block reached (also a ValueError)
    │   ├── CacheError                  a cache that was asked for too late (also a ValueError)
    │   ├── RowsError                   a written value does not fit its rows (also a ValueError)
    │   ├── ParkRefusedError            a park inside a torch call with the thread-state swap off
    │   ├── ValueUnavailableError       another stage cannot send this value
    │   ├── RankDivergenceError         two ranks took different branches, or have other values
    │   ├── BlockShapeError             a body that cannot be captured (also a ValueError)
    │   ├── SourceNotAvailable          a function whose operations cannot be looked at
    │   ├── WithBlockNotFoundError      no readable `with` statement at the call site
    │   └── NotSupportedError           a thing of the surface that this engine refuses
    ├── EngineError                 your configuration, your machine or your vLLM version
    │   ├── ConfigurationError          a setting that cannot work (also a ValueError)
    │   ├── MachineError                not enough cores or memory, or no compiler
    │   │   └── ExtensionBuildError         the compiler refused our extension
    │   ├── EngineDiedError             the engine stopped answering
    │   └── PullTimeoutError            a bound on a wait between stages ran out
    ├── InternalError               a bug in nnsight_pp
    └── EarlyStopException          leaves a block early; never reaches the user

`explain` lays a message out: what happened, where in the block, why, what to do, where it ran.
"""

from __future__ import annotations

import linecache
import textwrap
from typing import NamedTuple


class NNsightError(Exception):
    """Root of every exception of this package."""


class BlockError(NNsightError):
    """Something in the user's block cannot be served."""


class EngineError(NNsightError):
    """The configuration, the machine, or the installed vLLM does not allow this."""


class InternalError(NNsightError):
    """A bug in nnsight_pp. Paste the message into an issue."""


class OutOfOrderError(BlockError):
    """A value was asked for after the model had passed it, or is never computed."""


class OutsideTraceError(BlockError, ValueError):
    """A served value was read or written while no run was on."""


class SaveOutsideTraceError(BlockError, ValueError):
    """`save` was called while no trace was active."""


class UnknownLocationError(BlockError, AttributeError):
    """The model has no module or value of this name."""


class NotServedError(BlockError):
    """The location exists, but the engine never computes it as a module call."""


class BarrierError(BlockError, ValueError):
    """A barrier waited for more blocks than came to it."""


class CacheError(BlockError, ValueError):
    """A cache was asked for where it would miss what the block has already seen."""


class RowsError(BlockError, ValueError):
    """A written value does not fit the rows that belong to the request."""


class ParkRefusedError(BlockError):
    """A worker would have to park inside a torch call, and the thread-state swap is off."""


class ValueUnavailableError(BlockError):
    """The stage that owns a value cannot send it."""


class RankDivergenceError(BlockError):
    """Two ranks took different ways through one block, or have saved different values."""


class BlockShapeError(BlockError, ValueError):
    """The body of the `with` cannot be captured as it is written."""


class WithBlockNotFoundError(BlockError):
    """No readable `with` statement stands at the call site."""


class SourceNotAvailable(BlockError):  # noqa: N818 - the name that blocks catch
    """The operations inside this call or module cannot be looked at."""


class NotSupportedError(BlockError, NotImplementedError):
    """A part of the surface that this engine refuses."""


class ConfigurationError(EngineError, ValueError):
    """A setting that cannot work."""


class MachineError(EngineError):
    """The machine lacks cores, memory or a tool."""


class ExtensionBuildError(MachineError):
    """The extension (csrc/) could not be compiled."""


class EngineDiedError(EngineError):
    """The engine stopped answering."""


class PullTimeoutError(EngineError):
    """A bounded wait for another stage ran out."""


class EarlyStopException(NNsightError):  # noqa: N818 - the name that users know
    """Leave a block early (`tracer.stop()`). Swallowed by the run."""


class NNsightDeprecationWarning(FutureWarning):
    """A name that still works and has a better one. Shown by default, unlike Python's own."""


# A note on what torch says of a lazy value that its C++ code was given.
STAND_IN = (
    "Where this line hands a value of another stage to torch: there a LazyRemoteTensor stands for "
    "it, which not all of torch's C++ takes. `value.detach()` brings the tensor itself."
)


class Where(NamedTuple):
    """A line of the user's block."""

    filename: str
    line: int
    name: str = ""

    def frame(self) -> tuple[str, int, str]:
        """Return it as an entry of `core.report.Failure.frames`."""
        return (self.filename, self.line, self.name)

    def text(self) -> str:
        """Return the source line, stripped, or an empty string when it is not readable."""
        return linecache.getline(self.filename, self.line).strip()


def explain(
    what: str,
    *,
    where: Where | None = None,
    grid: str = "",
    why: str = "",
    todo: str = "",
    ran: str = "",
) -> str:
    """Lay out the message of an error in the order that every message of the package has.

    Args:
        what: What happened, with the values. Complete on its own, one sentence.
        where: The user's line, when it is known.
        grid: A table that is printed as it is.
        why: The rule that was broken.
        todo: A change that the user can make now.
        ran: Where it ran: request, step, stage, tp rank.
    """
    parts = [what]
    if where is not None:
        parts.append(f"  {where.filename}:{where.line}  {where.text()}  <- here")
    if grid:
        parts.append(textwrap.indent(grid, "  "))
    advice = " ".join(text for text in (why, todo) if text)
    if advice:
        parts.append(textwrap.fill(advice, 100, break_long_words=False, break_on_hyphens=False))
    if ran:
        parts.append(f"[{ran}]")
    return "\n".join(parts) if len(parts) > 1 else what
