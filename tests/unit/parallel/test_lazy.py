import copy
import io
import operator
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from fakes.sources import lazy
from nnsight_pp.core.location import Location
from nnsight_pp.core.protocols import RemoteValue
from nnsight_pp.core.saved import SavedSet, active_saves
from nnsight_pp.errors import NotSupportedError
from nnsight_pp.parallel.class_check import BUILTINS, is_same
from nnsight_pp.parallel.lazy import LazyRemoteTensor, first_input, with_first_input
from nnsight_pp.parallel.pulled import OwnConstant
from nnsight_pp.parallel.tensor_of import taking_lazy


def grid() -> torch.Tensor:
    return torch.arange(12, dtype=torch.float64).reshape(4, 3)


def is_lazy(value: Any) -> bool:
    return issubclass(type(value), LazyRemoteTensor)


# ------------------------------------------------------------- what moves nothing


def test_indexing_cloning_editing_passing_and_saving_move_nothing():
    x, source = lazy((grid(), grid()))
    row = x[0][-1]
    part = x[1][1:, ..., 0]
    kept = x[0].clone()
    x[0][-1] += 1
    x[0][:] = 3.0
    row.add_(2).mul_(3)
    x[1][0] = part[0]
    held = {"a": [x, row, kept]}
    copy.copy(x)
    copy.deepcopy(held)
    token = active_saves.set(SavedSet())
    x.save()
    active_saves.reset(token)
    assert source.pulls == []
    assert all(is_lazy(value) for value in (row, part, kept))


def test_a_part_is_pulled_alone_and_once():
    x, source = lazy((grid(), grid()))
    assert x[0][-1].tolist() == [9.0, 10.0, 11.0]
    assert float(x[0][-1].sum()) == 30.0
    assert x[0].clone()[-1].tolist() == [9.0, 10.0, 11.0]
    assert source.pulls == [(0, -1)]


def test_the_whole_is_pulled_once_for_all_that_stems_from_it():
    x, source = lazy(grid())
    frozen = x.clone()
    x[0] = 1.0
    assert (x + 1)[0].tolist() == [2.0, 2.0, 2.0]
    assert frozen.sum().item() == 66.0
    assert len(x) == 4
    assert x[1].tolist() == [3.0, 4.0, 5.0]
    assert source.pulls == [()]


def test_reading_a_part_then_editing_pulls_nothing_more_until_it_is_used():
    x, source = lazy(grid())
    before = x[-1] * 1
    x[:] = 0.0
    assert source.pulls == [(-1,)]
    assert x[-1].tolist() == [0.0, 0.0, 0.0]
    assert before.tolist() == [9.0, 10.0, 11.0]
    assert source.pulls == [(-1,), ()]


def test_a_pull_from_inside_torch_says_so():
    x, source = lazy(grid())
    torch.relu(x)
    y, other = lazy(grid())
    y + 1
    assert (source.in_torch, other.in_torch) == ([True], [False])


# ------------------------------------------------------------------------- edits


def test_edits_are_replayed_in_order_with_what_they_used_then():
    value = grid()
    x, _ = lazy(grid())
    other = torch.ones(3, dtype=torch.float64)
    for target in (value, x):
        row = target[0].clone()
        target[1] += other
        other += 1
        target[2] = row
        target[0] *= 10
        target += 1
        target.clamp_(max=50)
        other.fill_(1)
    assert torch.equal(x, value)


def test_a_clone_stays_as_it_was():
    x, _ = lazy(grid())
    x[0] = 5.0
    before = x.clone()
    x[0] = 6.0
    assert before[0].tolist() == [5.0] * 3
    x[0] = 7.0
    assert before[0].tolist() == [5.0] * 3
    after = x.clone()
    x[0] = 8.0
    assert after[0].tolist() == [7.0] * 3


@pytest.mark.parametrize("is_here", [False, True])
def test_what_shares_memory_shares_it_in_a_deep_copy(is_here: bool):
    x, source = lazy(grid())
    view = x.T if is_here else x
    both = copy.deepcopy({"whole": x, "row": x[-1], "view": view})
    both["row"][0] = 7.0
    both["whole"][0] = 5.0
    x[:] = 0.0
    assert bool(source.pulls) is is_here
    assert both["whole"][:, 0].tolist() == [5.0, 3.0, 6.0, 7.0]
    assert (both["view"].T if is_here else both["view"])[-1].tolist() == [7.0, 10.0, 11.0]


def test_a_child_sees_edits_of_its_parent_and_the_other_way():
    x, _ = lazy(grid())
    row = x[1]
    x[:] = 2.0
    row += 1
    assert x.sum().item() == 9 * 2 + 3 * 3
    assert row.tolist() == [3.0] * 3
    x[1, 0] = 9.0
    assert row.tolist() == [9.0, 3.0, 3.0]


def test_an_edit_through_a_view_that_torch_gave_reaches_the_value():
    for view in (
        lambda x: x[1].view(3, 1),
        lambda x: torch.unsqueeze(x[1], 0),
        lambda x: x[1].detach(),
        lambda x: x[1:2].T,
        lambda x: torch.from_numpy(x[1].numpy()),
        lambda x: torch.from_numpy(np.asarray(x[1])),
        lambda x: torch.nn.functional.relu(x[1], inplace=True),
        lambda x: torch.relu_(x[1]),
        lambda x: next(iter(x[1].split(3))),
    ):
        x, _ = lazy(grid())
        view(x).fill_(0.0)
        assert x[1].tolist() == [0.0] * 3


def test_out_and_augmented_assignment_with_a_real_left_side():
    x, source = lazy(grid())
    real = torch.zeros(3, dtype=torch.float64)
    real += x[-1]
    real[:] = x[-1] * 2
    real[0] = x[-1, 0]
    assert source.pulls == [(-1,), ((-1, 0),)]
    torch.add(x, 1, out=x)
    assert x[0].tolist() == [1.0, 2.0, 3.0]
    assert real.tolist() == [9.0, 20.0, 22.0]


def test_an_operand_of_an_edit_may_be_another_lazy_value():
    x, _ = lazy(grid())
    y, _ = lazy(grid() * 2)
    x[0] = y[-1]
    y[-1] = 0.0
    x.add_(y[-1])
    assert x[0].tolist() == [18.0, 20.0, 22.0]


def test_an_edit_that_fails_late_is_an_echo():
    x, source = lazy(grid())
    x[0] = torch.zeros(7, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        x.sum()
    assert len(source.echoes) == 1


@pytest.mark.parametrize("value", [[grid()], {"h": grid()}])
def test_replacing_what_a_container_holds_is_refused(value: Any):
    x, _ = lazy(value)
    x[next(iter(value)) if isinstance(value, dict) else 0] = torch.zeros(3)
    with pytest.raises(NotSupportedError):
        len(x)


def test_a_number_that_is_here_is_rebound_by_an_operator():
    x, _ = lazy((1, 2.5))
    len(x)
    count = x[0]
    count += 2
    assert count == 3
    assert x[0] == 1


# ------------------------------------------------------------------ what needs data


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: 2**x,
        lambda x: torch.ones(3, dtype=torch.float64) / (x + 1),
        lambda x: torch.ones(4, 4, dtype=torch.float64) @ x,
        lambda x: x @ x.T,
        lambda x: -x,
        lambda x: abs(x),
        lambda x: x == 3,
        lambda x: torch.zeros(4, 3) != x,
        lambda x: x > 2,
        lambda x: 2 > x,  # noqa: SIM300
        lambda x: torch.stack([x[0], torch.ones(3, dtype=torch.float64), x[1]]),
        lambda x: torch.cat((torch.ones(1, 3), x)),
        lambda x: torch.where(x > 2, x, -x),
        lambda x: torch.zeros_like(x),
        lambda x: torch.nn.functional.layer_norm(x, (3,)),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: x[x > 3],
        lambda x: x[[0, 2]],
        lambda x: x[torch.tensor([2])],
        lambda x: grid()[x[0, 1].long()],
        lambda x: grid()[x[0, 1:].long()],
        lambda x: grid()[: x[1, 0].long()],
        lambda x: [0, 1, 2, 3][x[0, 2].long()],
        lambda x: x.shape,
        lambda x: x[0].shape,
        lambda x: (x.dtype, x.device, x.ndim, x.dim(), x.size(0), x.numel()),
        lambda x: x.mean(dim=0, keepdim=True),
        lambda x: x.topk(2),
        lambda x: x.to(torch.float32).tolist(),
        lambda x: x.sum().item(),
        lambda x: float(x[1, 1]),
        lambda x: int(x[1, 1]),
        lambda x: complex(x[1, 1]),
        lambda x: range(int(x[1, 0]))[-1],
        lambda x: operator.index(x[1, 0].long()),
        lambda x: bool(x[0, 0]),
        lambda x: bool((x > 3).any()),
        lambda x: len(x),
        lambda x: [row.sum().item() for row in x],
        lambda x: [*x[0]][1].item(),
        lambda x: 4.0 in x,
        lambda x: f"{x[0, 1]:.2f} {x[0]} {x[0]!r}",
        lambda x: str(x),
        lambda x: repr(x),
        lambda x: isinstance(x, torch.Tensor),
        lambda x: isinstance(x, tuple),
        lambda x: torch.is_tensor(x),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: copy.deepcopy(x) + 1,
        lambda x: copy.copy(x) + 1,
        lambda x: np.asarray(x),
        lambda x: np.array([1.0]).dot(np.asarray(x[0, :1])),
        lambda x: x.numpy(),
        lambda x: round(x[0, 1].item(), 1),
        lambda x: sum(x),
        lambda x: max(x[1]),
        lambda x: sorted(x[1], reverse=True)[0],
        lambda x: x[1].flip(0)[0],
        lambda x: torch.tensor([float(v) for v in x[0]]),
        lambda x: x.new_zeros(2),
        lambda x: x.type(),
        lambda x: torch.allclose(x, x * 1.0),
        lambda x: torch.equal(x, grid()),
        lambda x: (lambda a, b, c, d: b)(*x),
        lambda x: x.flatten().unfold(0, 3, 3),
        lambda x: torch.linalg.norm(x),
        lambda x: x.masked_fill(x > 3, 0),
        lambda x: divmod(x, 2)[0] if hasattr(torch.Tensor, "__divmod__") else x // 2,
    ],
)
def test_a_use_gives_what_the_real_value_gives(use: Any):
    x, source = lazy(grid())
    same(use(x), use(grid()))
    assert source.pulls
    assert source.echoes == []


def same(found: Any, wanted: Any) -> None:
    if is_lazy(found):
        found = found._real_value()
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert np.array_equal(found, wanted)
    elif isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[9].sum(),
        lambda x: x.no_such_thing,
        lambda x: bool(x),
        lambda x: float(x),
        lambda x: len(x[0, 0]),
        lambda x: iter(x[0, 0]),
        lambda x: x + torch.ones(7),
    ],
)
def test_a_use_fails_as_on_the_real_value(use: Any):
    x, _ = lazy(grid())
    with pytest.raises(Exception) as wanted:  # noqa: PT011 - whichever it is
        use(grid())
    with pytest.raises(wanted.type):
        use(x)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, f: f([x[0, 0], x[1, 1]]),
        lambda x, f: f([row.norm() for row in x]),
        lambda x, f: f([[row.sum(), 1.0] for row in x]),
        lambda x, f: f([1.0, x[0].max().item()], dtype=torch.float64),
    ],
)
@pytest.mark.parametrize("function", [torch.tensor, torch.as_tensor])
def test_numbers_of_several_values_make_a_tensor(use: Any, function: Any):
    x, _ = lazy(grid())
    same(use(x, taking_lazy(function)), use(grid(), function))
    with pytest.raises(TypeError, match="integer"):
        taking_lazy(function)([1, [2]])


def test_a_length_that_torch_asks_for_says_what_to_do():
    x, _ = lazy(grid())
    with pytest.raises(TypeError, match="0-d tensor") as caught:
        torch.FloatTensor([x[0, 0], x[0, 1]])
    assert "value.detach()" in caught.value.__notes__[0]


def test_a_saved_file_holds_a_tensor():
    x, _ = lazy(grid())
    file = io.BytesIO()
    torch.save({"rows": x[:2]}, file)
    file.seek(0)
    same(torch.load(file, weights_only=True)["rows"], grid()[:2])


def test_a_function_over_a_batch_takes_it_from_outside():
    x, _ = lazy(grid())
    same(torch.func.vmap(lambda row: row * x[0])(grid()), grid() * grid()[0])


def test_an_item_of_a_tuple_cannot_be_assigned_where_that_is_handled():
    def handled(value: Any) -> bool:
        try:
            value[0] += 1
        except TypeError:
            return True
        return False

    for value in ((grid(), 1), lazy((grid(), 1))[0]):
        assert handled(value)
        assert value[0][0].tolist() == [1.0, 2.0, 3.0]
    for value in ([grid(), 1], lazy([grid(), 1])[0], grid(), lazy(grid())[0]):
        assert not handled(value)


def test_tuples_unpack_and_are_tuples():
    x, _ = lazy((grid(), None, 3))
    hidden, nothing, count = x
    assert isinstance(x, tuple)
    assert hidden.shape == (4, 3)
    assert nothing is None
    assert count + 1 == 4
    assert 4 - count == 1
    assert list(range(count)) == [0, 1, 2]
    hidden[0] = 0.0
    assert x[0][0].tolist() == [0.0] * 3


def test_a_dictionary_is_read_by_name():
    x, _ = lazy({"h": grid(), "n": 2})
    assert x["h"][-1].tolist() == [9.0, 10.0, 11.0]
    assert list(x) == ["h", "n"]
    assert "h" in x
    assert {key: type(value) for key, value in x.items()} == {"h": torch.Tensor, "n": int}
    x.get("h")[0] = 5.0
    assert x["h"][0].tolist() == [5.0] * 3


@dataclass
class Answer:
    hidden: torch.Tensor
    more: tuple[Any, ...] = ()


def test_a_dataclass_gives_its_fields():
    x, _ = lazy((Answer(grid(), (1,)), 0))
    assert x[0].more == (1,)
    x[0].hidden[0] = 4.0
    assert x[0].hidden[0].tolist() == [4.0] * 3
    assert isinstance(x[0], Answer)


def test_a_module_that_returns_nothing_is_pulled_once():
    x, source = lazy(None)
    assert x._real_value() is None
    assert not x
    assert isinstance(x, type(None))
    assert source.pulls == [()]


def test_outside_of_its_block_it_shows_what_it_is_and_refuses_the_rest():
    x, source = lazy(grid())
    source.is_over = True
    assert repr(x[0][1:]) == "<LazyRemoteTensor model.layers.5.output#2[0][slice(1, None, None)]>"
    with pytest.raises(ValueError, match="over"):
        x + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, with this numpy
@pytest.mark.parametrize("use", [np.sin, lambda x: np.array(x, dtype=np.float32), np.multiply])
def test_numpy_treats_it_as_it_treats_a_tensor(use: Any):
    x, _ = lazy(grid())
    if use is np.multiply:
        same(use(2.0, x), use(2.0, grid()))
    else:
        same(use(x), use(grid()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "use",
    [
        torch.tensor,
        torch.as_tensor,
        torch.asarray,
        lambda x: torch.tensor([x[0, 0], x[1, 1]]),
        lambda x: torch.Tensor(x),
        lambda x: grid().new_tensor(x),
        lambda x: torch.arange(x[1, 0].long()),
        lambda x: torch.ones(x[1, 0].long()),
        lambda x: torch.full((2,), x[0, 1]),
        lambda x: torch.add(grid(), 1, alpha=x[0, 1]),
        lambda x: grid()[[x[0, 0].long(), x[0, 1].long()]],
        lambda x: grid().sum(dim=x[0, 1].long()),
        lambda x: Twice.apply(x),
        lambda x: torch.Size([x[0, 1].long()]),
        lambda x: torch.nn.Parameter(x),
    ],
)
def test_what_torch_takes_without_asking_is_right_or_refused_and_never_a_crash(use: Any):
    x, _ = lazy(grid())
    wanted = use(grid())
    try:
        found = use(x)
    except (TypeError, RuntimeError, ValueError):
        return
    same(found, wanted)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2


def helper(x: Any) -> Any:
    return x[0] if isinstance(x, tuple) else x


def test_its_class_is_asked_in_every_way_of_python():
    x, _ = lazy((grid(),))
    y = helper(x)
    assert isinstance(y, (list, torch.Tensor))
    assert isinstance(
        y if len(x) else None,
        torch.Tensor,
    )
    assert y.__class__ is torch.Tensor
    assert not isinstance(y, torch.nn.Parameter)
    assert isinstance(x, Sequence)
    assert all(isinstance(value, torch.Tensor) for value in x)
    match y:
        case torch.Tensor() as inner:
            assert inner.sum().item() == 66.0
        case _:
            pytest.fail("no match")


def test_what_is_the_same_object_is_told_as_of_the_value():
    values = (grid(), None, True, [grid()], {"h": grid()})
    x, _ = lazy(values)
    other, _ = lazy(values)
    for one in (x, values):
        assert is_same(one[1], None)
        assert is_same(None, one[1])
        assert is_same(one[2], True)
        assert not is_same(one[0], None)
        assert is_same(one[0], one[0])
        assert is_same(one[3][0], one[3][0])
        assert is_same(one[4]["h"], one[4]["h"])
        assert not is_same(one[0][0], one[0][0])
        assert not is_same(one[0], one[3])
        assert not is_same(one[0], one[0].clone())
        assert is_same(one, one)
        assert is_same(copy.copy(one), one)
        assert is_same(one[1], other[1])
        assert not is_same(one[0], other[0])
        _, nothing, *_ = one
        assert nothing is None


def matched(x: Any) -> Any:
    match x:
        case []:
            return "empty"
        case [one]:
            return "one", one
        case (torch.Tensor() as here, [first, *rest]):
            return "nested", here, first, len(rest)
        case (here, None):
            return "none", here
        case [first, second]:
            return "two", first, second
        case [first, *_, last]:
            return "more", first, last
        case int() | float():
            return "number", x
        case torch.Tensor():
            return "tensor", x
        case _:
            return "else"


@pytest.mark.parametrize(
    "value",
    [
        (), (grid(),), (grid(), (1, 2, 3)), (grid(), None), (grid(), grid()), [grid(), grid() + 1],
        (1, 2, 3, 4), [grid()], grid(), grid()[:2], grid()[:1], torch.tensor(1.0), 3, 2.5, "ab", {},
        {"h": grid()}, None, torch.Size((2, 3)), (grid(), "ab"), ((grid(), 1), [grid()]),
    ],
)  # fmt: skip
def test_a_pattern_takes_it_as_it_takes_the_value(value: Any):
    x, _ = lazy(value)
    found = matched(x)
    assert repr(forced(found)) == repr(matched(value))
    assert isinstance(x, Sequence) == isinstance(value, Sequence)


def forced(found: Any) -> Any:
    parts = found if isinstance(found, tuple) else ()
    return tuple(one._force() if is_lazy(one) else one for one in parts) or found


def test_an_edit_of_what_a_pattern_has_bound_is_one_of_the_value():
    x, _ = lazy((grid(), grid()))
    match x:
        case (first, _):
            first[0] = 5
    assert x[0][0].tolist() == [5.0, 5.0, 5.0]


def kinds(x: Any) -> Any:
    class Meta(type):
        def __new__(mcs, *given):
            return super().__new__(mcs, *given)

    class Made(metaclass=Meta):
        kind: type = int

    rows: dict[type, type[int]] = {type(x[0]): int}
    return (
        type(x), type(x[0]) is torch.Tensor, type(x[1]), type(x).__name__, type(None), [*rows],
        isinstance(int, type), issubclass(Meta, type), isinstance(Made, Meta), type(Made).__name__,
        isinstance(3, (type, str)), type("New", (), {"a": 1}).a, type(Made()).kind, type[int],
    )  # fmt: skip


def test_its_type_is_that_of_the_value_in_what_comes_with_a_block(monkeypatch: Any):
    monkeypatch.setattr(cloudpickle.cloudpickle, "__builtins__", BUILTINS)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        there = cloudpickle.loads(cloudpickle.dumps(kinds))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert there.__builtins__ is BUILTINS
    x, _ = lazy((grid(), 1))
    assert there(x) == kinds((grid(), 1))
    assert there((grid(), 1)) == kinds((grid(), 1))
    scope = {"__builtins__": BUILTINS, "x": x}
    exec("found = 1 if type(x) is tuple else 2\nclass A: ...\nnamed = type(A()).__name__", scope)
    assert (scope["found"], scope["named"]) == (1, "A")


def test_its_class_is_told_also_where_the_interpreter_has_specialised_the_call():
    x, _ = lazy(grid())
    y, _ = lazy((grid(),))
    for value, kind in [(1, int), (x, torch.Tensor), (y, tuple), (x[0], torch.Tensor)] * 50:
        assert isinstance(value, kind)
        assert helper(x) is x
    for _ in range(50):
        with pytest.raises((TypeError, RuntimeError)):
            torch.Tensor(x)


def test_it_is_a_remote_value_by_type_without_being_asked():
    x, source = lazy(grid())
    assert issubclass(type(x), RemoteValue)
    assert len({x, x}) == 1
    assert source.pulls == []


# ------------------------------------------------------------------- first inputs


@pytest.mark.parametrize("inputs", [((grid(), 1), {"a": 2}), ((), {"h": grid(), "b": 1})])
def test_the_first_input_is_read_and_replaced_without_moving(inputs: Any):
    x, source = lazy(inputs)
    hidden = first_input(x)
    hidden[0] = 7.0
    replaced = with_first_input(x, hidden.clone())
    assert source.pulls == []
    assert first_input(replaced)[0].tolist() == [7.0] * 3
    same(replaced, with_first_input(inputs, first_input(replaced)._real_value()))


def test_what_was_assigned_as_first_input_is_the_same_object_when_read():
    x, _ = lazy(((grid(),), {}))
    mine = torch.zeros(3)
    assigned = with_first_input(x, mine)
    assert first_input(assigned) is mine
    assigned[0][0][1] = 5.0  # at once, as `mine` is the block's own tensor
    assert mine.tolist() == [0.0, 5.0, 0.0]


def test_an_edit_in_place_is_told_from_a_use():
    def lazy():
        return LazyRemoteTensor(OwnConstant(Location("model.a", "weight"), torch.ones(3, 2)))

    for use in (
        lambda x: x.sum(),
        lambda x: x[0] + 1,
        lambda x: x.clone().zero_(),
        lambda x: x.view(-1)[0].item(),
    ):
        value = lazy()
        use(value)
        assert not value._is_edited()
    for edit in (
        lambda x: x.zero_(),
        lambda x: x.__setitem__(0, 3),
        lambda x: x.view(-1).zero_(),
        lambda x: torch.add(x, 1, out=x),
    ):
        value = lazy()
        edit(value)
        assert value._is_edited()
