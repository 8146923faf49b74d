import sys
from collections import deque

import numpy as np
import pytest
import torch

from nnsight_pp.core.block import Block, Scope
from nnsight_pp.trace.deliver import deliver, local_names
from nnsight_pp.trace.mount import mount_save, savable
from nnsight_pp.trace.names import Names, names_of
from nnsight_pp.wire.block_codec import BlockMessage, encode_block

module_name = "of the module"


def here():
    return sys._getframe(1)


def test_names_of_a_function_are_its_own_then_those_it_closes_over_then_the_modules():
    outer = 1

    def inner(own):
        assert outer
        return names_of(here())

    names = inner(2)
    assert names.look_up(["own", "outer", "module_name", "missing"]) == {
        "own": 2,
        "outer": 1,
        "module_name": "of the module",
    }
    assert not names.is_block


def test_builtins_are_left_out_unless_they_are_hidden():
    len = "mine"
    names = names_of(here())
    assert names.look_up(["len", "print"]) == {"len": "mine"}
    assert len


def test_shared_name_wins_over_the_frames():
    name = "frame"
    assert names_of(here(), {"name": "sibling"}).look_up(["name"]) == {"name": "sibling"}
    assert name


def test_frame_of_a_block_is_known_and_its_names_are_those_of_now():
    scope = Scope({"outer": 1, "here": here, "names_of": names_of})
    exec("a = outer\nfound = names_of(here())\na = 2", scope)
    names = scope["found"]
    assert names.is_block
    assert names.look_up(["a", "outer"]) == {"a": 1, "outer": 1}


def test_class_body_sees_the_function_around_it():
    outer = 1

    class Body:
        own = 2
        nested = outer
        names = names_of(here()).look_up(["own", "outer"])

    assert Body.names == {"own": 2, "outer": 1}


def test_names_are_bound_in_locals_cells_and_globals():
    local = cell = None

    def use():
        return cell

    deliver(here(), {"local": 1, "cell": 2, "_delivered": 3})
    assert (local, use(), globals().pop("_delivered")) == (1, 2, 3)


def test_names_are_bound_in_a_class_body():
    class Body:
        deliver(here(), {"found": 1})

    assert Body.found == 1


def test_name_without_a_value_yet_is_bound():
    deliver(here(), {"later": 1})
    found = later  # noqa: F821
    if found is None:
        later = 2
    assert found == 1


def test_copy_of_the_names_is_let_go_and_the_names_stay():
    value = [1]
    frame = here()
    seen = frame.f_locals
    assert local_names(frame)["value"] is value
    assert "value" not in seen or sys.version_info >= (3, 13)
    deliver(frame, {"value": [2]})
    assert "value" not in seen or sys.version_info >= (3, 13)
    assert value == [2]


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.5, "a", b"a", (), [], {}, set(), None, True, range(2), bytearray(b"a"), deque()),
        *(torch.ones(1), np.ones(2), np.float32(1)),
    ],
)
def test_values_of_blocks_can_be_saved(value):
    mount_save()
    assert callable(value.save)


def test_served_value_of_any_type_can_be_saved():
    class Output:
        pass

    class Own:
        def save(self):
            return "its own"

    assert callable(savable(Output()).save)
    assert savable(Own()).save() == "its own"
    assert not hasattr(object(), "save")


def test_a_cell_that_is_run_again_takes_along_nothing_of_its_last_run():
    text = "    found = []\n    rows = [found, bias]\n    for row in rows:\n        last = row\n"
    block = Block("cell.py", 2, text, "<module>")
    bias, large = torch.ones(3), torch.ones(1_000_000)
    around = {"found": [large], "rows": [large], "row": large, "last": large, "bias": bias}

    def num_bytes(names):
        message = BlockMessage("t", block, Names((around,)).look_up(names))
        return len(encode_block(message, lambda obj: None))

    assert num_bytes(block.reads()) > 4_000_000
    assert num_bytes(block.needs()) < 2_000
