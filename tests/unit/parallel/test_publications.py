import torch

from nnsight_pp.core.ask import AskKey
from nnsight_pp.core.location import Location
from nnsight_pp.parallel.lane import DTYPES, Lane, table_key
from nnsight_pp.parallel.lazy import pick
from nnsight_pp.parallel.publications import Answer, Publications, Question

PLACE = Location("model.a", "output")


def question(number: int, step: int = 0, place: Location = PLACE) -> Question:
    return Question(AskKey("r", number), str(place), step)


def test_a_question_waits_for_its_answer_alone():
    table = Publications([1], pick)
    answers: list[Answer] = []
    table.ask(question(1), answers.append)
    table.publish(AskKey("r", 0), PLACE, "other")
    assert answers == []
    table.publish(AskKey("r", 1), PLACE, "value")
    assert answers == [Answer("value", "value")]


def test_a_published_value_wins_over_a_closed_step_and_a_failure():
    table = Publications([1], pick)
    answers: list[Answer] = []
    table.publish(AskKey("r", 0), PLACE, 1)
    table.close("r", 5)
    table.fail("r", "first")
    table.fail("r", "second")
    for number in (0, 1):
        table.ask(question(number), answers.append)
    assert answers == [Answer("value", 1), Answer("error", "first")]


def test_nothing_comes_back_to_life_after_the_last_release():
    table = Publications([1, 2], pick)
    table.publish(AskKey("r", 0), PLACE, 1)
    table.released("r", 2)
    table.end("r")
    assert table.statistics()["shelves"] == 1
    table.released("r", 1)
    for late in (
        lambda: table.end("r"),
        lambda: table.close("r", 3),
        lambda: table.fail("r", "x"),
        lambda: table.publish(AskKey("r", 1), PLACE, 2),
        lambda: table.released("r", 1),
    ):
        late()
    answers: list[Answer] = []
    table.ask(question(0), answers.append)
    assert answers[0].kind == "error"
    assert table.statistics() == {"published": 0, "shelves": 0, "waiting": 0}


def test_a_peer_that_is_gone_needs_not_release():
    table = Publications([1, 2], pick)
    table.end("r")
    table.released("r", 1)
    table.gone(2)
    table.end("s")
    table.released("s", 1)
    assert table.statistics()["shelves"] == 0


def call(number: int, kind: str = "call", step: int = 0) -> Question:
    return Question(AskKey("r", number), "model.a.call", step, (), kind)


def test_a_call_that_has_not_run_when_its_step_is_closed_is_deferred():
    table = Publications([1], pick)
    answers: list[Answer] = []
    table.ask(call(0), answers.append)
    assert answers == []
    table.close("r", 0)
    table.ask(call(0), answers.append)
    table.publish(AskKey("r", 0), Location("model.a", "call"), "result")
    table.ask(call(0), answers.append)
    assert answers == [Answer("deferred"), Answer("deferred"), Answer("value", "result")]


def test_the_last_question_for_a_call_waits_until_it_has_run_or_never_will():
    table = Publications([1], pick)
    answers: list[Answer] = []
    table.close("r", 0)
    table.ask(call(0, "last call"), answers.append)
    table.ask(call(1, "last call"), answers.append)
    table.close("r", 1)
    assert answers == []
    table.publish(AskKey("r", 0), Location("model.a", "call"), "result")
    assert answers == [Answer("value", "result")]
    table.end("r")
    assert answers[1].kind == "error"
    assert table.statistics()["waiting"] == 0


def test_a_constant_is_answered_whatever_became_of_the_worker():
    table = Publications([1], pick, {"model.a.weight": [7, 8]}.__getitem__)
    table.fail("r", "failed")
    answers: list[Answer] = []
    for location in ("model.a.weight", "model.b.weight"):
        table.ask(Question(AskKey("r", 3), location, 9, (1,), "constant"), answers.append)
    assert [answer.kind for answer in answers] == ["value", "error"]
    assert answers[0].value == 8
    assert table.statistics()["shelves"] == 1


def test_an_answer_that_all_peers_let_go_is_dropped():
    table = Publications([1, 2], pick)
    for number in range(3):
        table.publish(AskKey("r", number), PLACE, number)
    table.let_go(1, "r", [(0, 0), (1, 0)])
    assert table.statistics()["published"] == 3
    table.let_go(2, "r", [(1, 0)])
    assert table.statistics()["published"] == 2
    answers: list[Answer] = []
    table.ask(question(0), answers.append)
    assert answers == [Answer("value", 0)]


def test_an_answer_that_all_peers_let_go_before_it_came_is_not_kept():
    table = Publications([1], pick)
    table.close("r", 0)
    table.let_go(1, "r", [(4, 1), (5, 1), (6, None)])
    table.publish(AskKey("r", 4), PLACE, 1)
    table.close("r", 1)  # 5 was never served, 6 is a call that may still run
    table.publish(AskKey("r", 6), PLACE, 1)
    assert table.statistics()["published"] == 0
    table.publish(AskKey("r", 7), PLACE, 1)
    assert table.statistics()["published"] == 1


def test_letting_go_brings_no_ended_request_back():
    table = Publications([1], pick)
    table.let_go(1, "r", [(0, 0)])
    assert table.statistics()["shelves"] == 0


def test_a_failure_of_another_stage_is_known_until_the_request_is_over():
    table = Publications([1], pick)
    assert not table.has_failed_elsewhere("r")
    table.failed_elsewhere("r")
    assert table.has_failed_elsewhere("r")
    table.end("r")
    table.released("r", 1)
    table.failed_elsewhere("r")
    assert not table.has_failed_elsewhere("r")
    assert table.statistics()["shelves"] == 0


class _Table:
    """What `PlainTensors` is told."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def put(self, key: str, place: int, address: int, dtype: int) -> None:
        assert address
        assert place in (-2, -1, 0)
        assert DTYPES[dtype] is torch.float32
        self.keys.add(key)

    def drop(self, key: str) -> None:
        self.keys.discard(key)

    def lane(
        self, group: str, rank: int, frame: int, ask: int, answer: int, most_bytes: int
    ) -> Lane:
        raise AssertionError("nobody is there")

    def count(self) -> int:
        return len(self.keys)


def test_the_extension_is_told_of_what_is_kept_and_of_nothing_else():
    plain = _Table()
    table = Publications([1, 2], pick, plain=plain)
    value = torch.ones(2)
    for number in range(4):
        table.publish(AskKey("r", number), PLACE, value)
    table.publish(AskKey("r", 3), PLACE, {"a": value})
    table.publish(AskKey("s", 0), PLACE, value)
    kept = {table_key(name, number, str(PLACE)) for name, number in [("r", 2), ("s", 0)]}
    kept |= {table_key("r", number, str(PLACE)) for number in (0, 1)}
    assert plain.keys == kept
    for number, several in enumerate(
        [(value, None), [value], ((value, 1), {}), ((), {"x": value})]
    ):
        table.publish(AskKey("s", 1 + number), PLACE, several)
        kept.add(table_key("s", 1 + number, str(PLACE)))
    for number, other in enumerate([((), {}), ((1,), {}), [None], [value] * 9, (), "text"]):
        table.publish(AskKey("s", 9 + number), PLACE, other)
    assert plain.keys == kept
    for peer in (1, 2):
        table.let_go(peer, "r", [(0, 0), (7, 1)])
    table.publish(AskKey("r", 7), PLACE, value)
    kept.discard(table_key("r", 0, str(PLACE)))
    assert plain.keys == kept
    for peer in (1, 2):
        table.released("r", peer)
    assert plain.keys == kept
    table.end("r")
    assert plain.keys == {key for key in kept if key.startswith("s")}
    table.publish(AskKey("r", 8), PLACE, value)
    table.end("s")
    table.gone(1)
    table.gone(2)
    table.released("s", 2)
    assert plain.keys == set()
