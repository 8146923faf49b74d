import pytest

from nnsight_pp.core.location import LOGITS, RESULT, SAMPLES, Location
from nnsight_pp.errors import NotServedError, UnknownLocationError
from nnsight_pp.parallel.owners import Span, StageMap


def out(path: str) -> Location:
    return Location(path, "output")


def stages() -> StageMap:
    return StageMap(
        real=[
            ["model", "model.embed", "model.layers.0"],
            ["model", "model.embed", "model.layers.1", "model.head", "model.processor"],
        ],
        ran=[["model", "model.embed", "model.layers.0"], ["model", "model.layers.1"]],
        known=["model.layers.1.attention.q", "model.layers", "model.nothing"],
        silent={"model.head": "read `model.logits`"},
        order=[
            [out("model.layers.0")],
            [Location("model.layers.1", "input"), out("model.layers.1")],
        ],
    )


def test_who_owns_what():
    owners = stages()
    assert owners.owner_of(out("model.layers.0")) == 0
    assert owners.owner_of(out("model.layers.1.attention.q")) == 1
    assert owners.owner_of(out("model.embed")) == 0  # real on both, ran on the first
    assert owners.owner_of(out("model.processor")) == 1
    assert owners.span_of("model") == Span(0, 1)
    assert owners.owner_of(Location("model", "input")) == 0
    assert owners.owner_of(out("model")) == 1
    assert owners.owner_of(LOGITS) == owners.owner_of(SAMPLES) == 1
    assert owners.owner_of(RESULT) is None


def test_places_follow_the_order_of_a_forward():
    owners = stages()
    places = [
        owners.position_of(place)
        for place in (Location("model.layers.1", "input"), out("model.layers.1"), LOGITS, SAMPLES)
    ]
    assert places == sorted(places)
    assert len(set(places)) == 4
    assert owners.position_of(out("model.embed")) is None


def test_what_is_not_served_is_refused_with_a_way_out():
    with pytest.raises(NotServedError, match=r"model\.logits"):
        stages().owner_of(out("model.head"))
    with pytest.raises(UnknownLocationError, match=r"Near matches: model\.layers\.1"):
        stages().owner_of(out("model.layer.1"))
