"""Names of values in a model.

A *location* is what a block reads or writes: the output of a module, its inputs, the logits of a
step. A *visit* is the n-th time that a request reaches a location. Both print in a form that
parses back, because both appear in error messages and logs.

Who computes a location, and when, is not known here: see `parallel.owners` and `interleave`.
"""

from __future__ import annotations

from typing import NamedTuple

ROOT = "model"


class Location(NamedTuple):
    """The name of a value: the path of a module, and which of its values.

    >>> str(Location("model.layers.5", "output"))
    'model.layers.5.output'
    >>> Location.parse("model.layers.5.output") == Location("model.layers.5", "output")
    True
    >>> Location.parse("result")
    Location(path='', kind='result')
    """

    path: str
    kind: str

    def __str__(self) -> str:
        return f"{self.path}.{self.kind}" if self.path else self.kind

    @classmethod
    def parse(cls, text: str) -> Location:
        """Return the location that prints as ``text``."""
        path, _, kind = text.rpartition(".")
        return cls(path, kind)


class Visit(NamedTuple):
    """The n-th time a request reaches a location, counted from 0.

    >>> str(Visit(Location("model.layers.3", "output"), 2))
    'model.layers.3.output#2'
    >>> Visit.parse("model.layers.3.output#2").number
    2
    """

    location: Location
    number: int

    def __str__(self) -> str:
        return f"{self.location}#{self.number}"

    @classmethod
    def parse(cls, text: str) -> Visit:
        """Return the visit that prints as ``text``."""
        location, _, number = text.rpartition("#")
        return cls(Location.parse(location), int(number))


LOGITS = Location(ROOT, "logits")
SAMPLES = Location(ROOT, "samples")
RESULT = Location("", "result")
