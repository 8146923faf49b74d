from nnsight_pp.core.ask import AskKey
from nnsight_pp.core.location import Location
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
