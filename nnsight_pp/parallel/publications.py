"""What this rank has answered, and which other stages wait for what it has not answered yet.

The forward thread publishes, closes and fails; the link's threads look up. A look-up has one of
five answers: the value; *closed* (the step is over here and the value was not served in it);
*deferred* (the step is over here, and a call of it has not run yet); *error* (the worker raised,
or the request is gone); or none yet, and then the reply is kept and given when one of the others
comes. An answer is dropped when every other stage has let it go, or the request is over: a long
generation keeps no more than a short one. Nothing here ever waits. A constant (a weight) is
answered whatever the worker does.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from nnsight_pp.parallel import lane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nnsight_pp.core.ask import AskKey
    from nnsight_pp.core.location import Location
    from nnsight_pp.core.standing import Standing
    from nnsight_pp.parallel.lane import PlainTensors

log = logging.getLogger(__name__)

# How many ended requests are remembered, so that a late question gets an answer.
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Question:
    """One pull, as it arrives at the owner."""

    key: AskKey
    location: str
    step: int
    picks: Sequence[Any] = ()
    # What is asked for: see `core.protocols.Link.pull`.
    kind: str = "value"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the owner says: "value", "closed", "deferred", "error" or "diverged"."""

    kind: str
    value: Any = None  # any served value, or a text


@dataclass(slots=True)
class _Shelf:
    """One request's answers on this rank."""

    values: dict[int, tuple[str, Any]] = field(default_factory=dict)
    # By ask number: who waits for an answer.
    waiting: dict[int, list[tuple[Question, Callable[[Answer], None]]]] = field(
        default_factory=dict
    )
    closed: int = -1
    failure: str | None = None
    # Whether another stage has said so of its own worker.
    has_failed_elsewhere: bool = False
    is_over: bool = False
    released: set[int] = field(default_factory=set)
    # By ask number: its step (None for a call), and the stages that will not ask for it any more.
    let_go: dict[int, tuple[int | None, set[int]]] = field(default_factory=dict)


@final
class Publications:
    """One rank's answers, by request and ask number.

    Args:
        peers: The other stages. A request's answers are dropped when it is over here and each of
            them has released it.
        pick: Applies a question's index steps to a value.
        constant_of: Returns the weight of a printed location. Default: there is none.
        standing_of: Returns how far this rank is with a request, on any thread. Default: nobody
            knows.
        plain: Holds, of the values kept here, those that the extension can answer with: no others,
            and none longer. Default: it answers nothing.
    """

    def __init__(
        self,
        peers: Sequence[int],
        pick: Callable[[Any, Sequence[Any]], Any],
        constant_of: Callable[[str], Any] | None = None,
        standing_of: Callable[[str], Standing] | None = None,
        plain: PlainTensors | None = None,
    ) -> None:
        self.plain = plain
        self._constant_of = constant_of
        self._standing_of = standing_of
        self._peers = frozenset(peers)
        self._pick = pick
        self._lock = threading.Lock()
        self._shelves: dict[str, _Shelf] = {}
        # Invariant: a request in here has no shelf, and gets none any more.
        self._ended: OrderedDict[str, None] = OrderedDict()

    def publish(self, key: AskKey, location: Location, value: Any) -> None:
        """Answer ``key``, and everybody who waits for it."""
        name = str(location)
        with self._lock:
            if key.request in self._ended:
                return
            shelf = self._shelf(key.request)
            if self._is_let_go(shelf, key.number):
                del shelf.let_go[key.number]
                return
            self._put_away(key.request, key.number, shelf)
            shelf.values[key.number] = (name, value)
            if self.plain is not None:
                lane.put(self.plain, lane.table_key(*key, name), value)
            waiting = shelf.waiting.pop(key.number, ())
        for question, reply in waiting:
            reply(self._answer(question, name, value))

    def close(self, request: str, step: int) -> None:
        """Answer "closed" to everybody who waits for a value of a step up to ``step``."""
        with self._lock:
            if request in self._ended:
                return
            shelf = self._shelf(request)
            shelf.closed = max(shelf.closed, step)
            for number in list(shelf.let_go):
                self._forget(request, shelf, number)
            late = self._take(
                shelf, lambda question: question.step <= step and question.kind != "last call"
            )
        for question, reply in late:
            reply(Answer("deferred" if question.kind == "call" else "closed"))

    def fail(self, request: str, text: str) -> None:
        """Answer an error to everybody who waits, and to later questions without a value."""
        with self._lock:
            if request in self._ended:
                return
            shelf = self._shelf(request)
            shelf.failure = shelf.failure or text
            late = self._take(shelf, lambda _: True)
        for _, reply in late:
            reply(Answer("error", text))

    def ask(self, question: Question, reply: Callable[[Answer], None]) -> None:
        """Give ``reply`` the answer, now or when there is one. ``reply`` must not block."""
        if question.kind == "constant":
            reply(self._constant(question))
            return
        if question.kind == "standing":
            found = self.standing(question.key.request)
            reply(Answer("error") if found is None else Answer("value", found))
            return
        request, number = question.key
        held = ("", None)
        with self._lock:
            if request in self._ended:
                answer: Answer | None = Answer("error", "the request is over on the owning stage")
            else:
                shelf = self._shelf(request)
                answer = self._known(shelf, question)
                if answer is None and number not in shelf.values:
                    shelf.waiting.setdefault(number, []).append((question, reply))
                    return
                held = shelf.values.get(number, held)
        reply(self._answer(question, *held) if answer is None else answer)

    def standing(self, request: str) -> Standing | None:
        """Return how far this rank is with ``request``, or None where it cannot say."""
        try:
            return None if self._standing_of is None else self._standing_of(request)
        except Exception:
            log.exception("how far this rank is with a request could not be told")
            return None

    def _known(self, shelf: _Shelf, question: Question) -> Answer | None:
        if question.key.number in shelf.values:
            return None
        if shelf.failure is not None:
            return Answer("error", shelf.failure)
        is_closed = question.step <= shelf.closed
        if is_closed and question.kind == "value":
            return Answer("closed")
        if shelf.is_over:
            return Answer("error", "the request is over on the owning stage")
        return Answer("deferred") if is_closed and question.kind == "call" else None

    def _constant(self, question: Question) -> Answer:
        try:
            if self._constant_of is None:
                raise KeyError(question.location)
            return Answer("value", self._pick(self._constant_of(question.location), question.picks))
        except Exception as error:
            return Answer("error", f"{type(error).__name__}: {error}")

    def _answer(self, question: Question, location: str, value: Any) -> Answer:
        if location != question.location:
            return Answer("diverged", location)
        try:
            return Answer("value", self._pick(value, question.picks))
        except Exception as error:
            return Answer("error", f"{type(error).__name__}: {error}")

    def end(self, request: str) -> None:
        """Say that the request is over here: what was not answered yet never will be."""
        with self._lock:
            if request in self._ended:
                return
            shelf = self._shelf(request)
            shelf.is_over = True
            late = self._take(shelf, lambda _: True)
            self._drop_if_done(request, shelf)
        for _, reply in late:
            reply(Answer("error", "the request is over on the owning stage"))

    def released(self, request: str, peer: int) -> None:
        """Note that stage ``peer`` needs nothing more of ``request``."""
        with self._lock:
            if request not in self._ended:
                shelf = self._shelf(request)
                shelf.released.add(peer)
                self._drop_if_done(request, shelf)

    def failed_elsewhere(self, request: str) -> None:
        """Note that the worker of ``request`` has raised on another stage."""
        with self._lock:
            if request not in self._ended:
                self._shelf(request).has_failed_elsewhere = True

    def has_failed_elsewhere(self, request: str) -> bool:
        """Whether another stage has said so by now: it depends on timing."""
        with self._lock:
            shelf = self._shelves.get(request)
            return shelf is not None and shelf.has_failed_elsewhere

    def let_go(self, peer: int, request: str, asks: Sequence[tuple[int, int | None]]) -> None:
        """Note that stage ``peer`` will not ask for these numbers, each with its step, any more."""
        with self._lock:
            shelf = self._shelves.get(request)
            if shelf is None:
                return  # it is over, or has not begun here: then the answers stay until it is over
            for number, step in asks:
                shelf.let_go.setdefault(number, (step, set()))[1].add(peer)
                self._forget(request, shelf, number)

    def _is_let_go(self, shelf: _Shelf, number: int) -> bool:
        known = shelf.let_go.get(number)
        return known is not None and known[1] >= self._peers

    def _forget(self, request: str, shelf: _Shelf, number: int) -> None:
        """Drop an answer that nobody will ask for, or the note that it will not be kept."""
        if not self._is_let_go(shelf, number):
            return
        step = shelf.let_go[number][0]
        is_past = step is not None and step <= shelf.closed  # it was answered by now, or never is
        if self._put_away(request, number, shelf) or is_past:
            del shelf.let_go[number]

    def _put_away(self, request: str, number: int, shelf: _Shelf) -> bool:
        """Drop an answer, if there is one; return whether there was."""
        held = shelf.values.pop(number, None)
        if held is not None and self.plain is not None:
            self.plain.drop(lane.table_key(request, number, held[0]))
        return held is not None

    def gone(self, peer: int) -> None:
        """Note that stage ``peer`` will ask for nothing any more, of any request."""
        with self._lock:
            self._peers -= {peer}
            for request, shelf in list(self._shelves.items()):
                self._drop_if_done(request, shelf)

    def statistics(self) -> dict[str, int]:
        """Return how many answers are kept and how many questions wait."""
        with self._lock:
            shelves = list(self._shelves.values())
            return {
                "published": sum(len(shelf.values) for shelf in shelves),
                "shelves": len(shelves),
                "waiting": sum(len(asks) for shelf in shelves for asks in shelf.waiting.values()),
            }

    def _shelf(self, request: str) -> _Shelf:
        shelf = self._shelves.get(request)
        if shelf is None:
            shelf = self._shelves[request] = _Shelf()
        return shelf

    def _drop_if_done(self, request: str, shelf: _Shelf) -> None:
        if shelf.is_over and shelf.released >= self._peers:
            for number in list(shelf.values) if self.plain is not None else ():
                self._put_away(request, number, shelf)
            del self._shelves[request]
            self._ended[request] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    @staticmethod
    def _take(
        shelf: _Shelf, is_late: Callable[[Question], bool]
    ) -> list[tuple[Question, Callable[[Answer], None]]]:
        late = []
        for number in list(shelf.waiting):
            kept = []
            for waiting in shelf.waiting[number]:
                (late if is_late(waiting[0]) else kept).append(waiting)
            if kept:
                shelf.waiting[number] = kept
            else:
                del shelf.waiting[number]
        return late
