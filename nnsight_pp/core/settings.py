"""`CONFIG`: the few switches of this package.

Each starts from an environment variable, and can be set at any time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field


def _is_on(name: str, *, default: bool) -> bool:
    text = os.environ.get(name)
    return default if text is None else text.strip().lower() not in ("", "0", "false", "no", "off")


@dataclass(slots=True)
class AppSettings:
    """How blocks are shown and written.

    Attributes:
        DEBUG: Tracebacks keep this package's own frames (NNSIGHT_PP_DEBUG).
        PYMOUNT: Values have a `.save()` (NNSIGHT_PP_PYMOUNT). Read when the package is imported;
            without it write `nnsight_pp.save(value)`.
    """

    DEBUG: bool = field(default_factory=lambda: _is_on("NNSIGHT_PP_DEBUG", default=False))
    PYMOUNT: bool = field(default_factory=lambda: _is_on("NNSIGHT_PP_PYMOUNT", default=True))


@dataclass(slots=True)
class Settings:
    """All switches, by what they are about."""

    APP: AppSettings = field(default_factory=AppSettings)


CONFIG = Settings()
