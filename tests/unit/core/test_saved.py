import pytest

from nnsight_pp.core.saved import SavedSet, active_saves, save


def test_set_holds_objects_by_identity():
    saves, value = SavedSet(), [1]
    saves.mark(value)
    assert value in saves
    assert [1] not in saves
    assert len(saves) == 1


def test_save_returns_its_argument_and_marks_it_in_the_active_set():
    saves = SavedSet()
    token = active_saves.set(saves)
    try:
        value = save([1])
    finally:
        active_saves.reset(token)
    assert value in saves


def test_save_outside_a_trace():
    with pytest.raises(ValueError, match="outside a trace"):
        save(1)
