import pytest

from nnsight_pp.core.ask import Join, Pull, Read, Step, Write
from nnsight_pp.core.location import LOGITS, RESULT, SAMPLES, Location, Visit


@pytest.mark.parametrize("text", ["model.layers.3.output", "model.input", "result"])
def test_location_prints_as_it_parses(text):
    assert str(Location.parse(text)) == text


@pytest.mark.parametrize("text", ["model.layers.3.output#2", "result#0"])
def test_visit_prints_as_it_parses(text):
    assert str(Visit.parse(text)) == text


def test_values_of_no_module_have_names():
    assert [str(one) for one in (LOGITS, SAMPLES, RESULT)] == [
        "model.logits",
        "model.samples",
        "result",
    ]


def test_asks_say_what_is_asked():
    location = Location("model.head", "output")
    pull = Pull(location, 1, None, lambda is_last: None)
    asks = [Read(0, location, 2), Write(1, location, 0, None), Step(3), pull, Join("here")]
    assert [str(ask) for ask in asks] == [
        "Read model.head.output#2",
        "Write model.head.output#0",
        "Step 3",
        "Pull model.head.output#1",
        "Join here",
    ]
