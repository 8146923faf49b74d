import pickle
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from nnsight_pp.wire.value_codec import decode, encode, from_bytes, to_bytes

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip


@dataclass
class Point:
    x: object
    y: object


def same(first, second):
    return (
        torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        if first.dtype == torch.float8_e4m3fn
        else torch.equal(first, second)
    ) and (first.dtype, first.shape) == (second.dtype, second.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_every_dtype_and_shape_comes_back(dtype, shape):
    tensor = (torch.randn(shape) * 2).to(dtype)
    back = from_bytes(to_bytes(tensor))
    assert same(back, tensor)
    assert back.is_contiguous()


VIEWS = {
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(12.0)[1::3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
    "inference": torch.inference_mode()(lambda: torch.ones(3) * 2)(),
}


@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS)
def test_view_comes_back_with_its_elements(tensor):
    assert same(from_bytes(to_bytes(tensor)), tensor.clone())


def test_nested_value_of_mixed_kinds_comes_back():
    value = {
        "tuple": (torch.ones(2), [torch.zeros(1, dtype=torch.int8), None, 3, "text"]),
        "point": Point(torch.ones(3, dtype=torch.bool), 2.5),
        "ordered": OrderedDict(b=1, a=torch.tensor(1, dtype=torch.bfloat16)),
        "size": torch.Size([1, 2]),
        "named": torch.max(torch.ones(2, 2), dim=0),
        "set": {1, 2},
    }
    back = from_bytes(to_bytes(value))
    assert torch.equal(back["tuple"][0], torch.ones(2))
    assert back["tuple"][1][1:] == [None, 3, "text"]
    assert type(back["point"]) is Point
    assert list(back["ordered"]) == ["b", "a"]
    assert back["size"] == torch.Size([1, 2])
    assert torch.equal(back["named"].values, torch.ones(2))
    assert back["set"] == {1, 2}


@pytest.mark.parametrize("value", [None, 1, "text", (), {}, [None]], ids=repr)
def test_value_without_tensors_comes_back(value):
    assert from_bytes(to_bytes(value)) == value


def test_tensor_that_occurs_twice_is_sent_once_and_is_one_object():
    tensor = torch.ones(1000)
    _, pieces = encode([tensor, tensor])
    assert sum(len(piece) for piece in pieces) == 4000
    first, second = from_bytes(to_bytes([tensor, tensor]))
    assert first is second


def test_edit_of_one_tensor_leaves_the_others():
    first, second = from_bytes(to_bytes((torch.ones(3), torch.ones(3))))
    first.zero_()
    assert torch.equal(second, torch.ones(3))


def test_tensor_that_requires_grad_crosses_without_its_graph():
    tensor = torch.ones(3, requires_grad=True) * 2
    back = from_bytes(to_bytes(tensor))
    assert torch.equal(back, tensor)
    assert not back.requires_grad
    back.add_(1)


def test_module_comes_back_with_its_parameters():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    back = from_bytes(to_bytes(module))
    assert isinstance(back.weight, nn.Parameter)
    assert (back.weight.requires_grad, back.bias.requires_grad) == (True, False)
    assert torch.equal(back(torch.ones(2)), module(torch.ones(2)))


def test_sparse_tensor_crosses_in_torchs_own_way():
    tensor = torch.eye(3).to_sparse()
    assert torch.equal(from_bytes(to_bytes(tensor)).to_dense(), torch.eye(3))


def test_tensor_without_elements_of_its_own_is_refused():
    with pytest.raises(pickle.PicklingError, match="meta device"):
        to_bytes(torch.ones(3, device="meta"))


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises(Exception, match=r"(?i)pickle"):
        to_bytes((torch.ones(1), (number for number in ())))


def test_payload_may_come_in_one_buffer_of_its_own():
    value = (torch.arange(5, dtype=torch.int16), torch.arange(3.0))
    header, pieces = encode(value)
    back = decode(header, torch.cat(pieces))
    assert all(same(own, other) for own, other in zip(back, value, strict=True))


def test_many_tensors_of_several_kinds_come_back_in_their_places():
    kinds = [
        lambda at: torch.full((1, 6), float(at)),
        lambda at: torch.full((2, 3), at, dtype=torch.int8),
        lambda at: torch.tensor(at % 2 == 0),
        lambda at: torch.empty(0, at % 3),
        lambda at: nn.Parameter(torch.full((1, 6), -float(at)), requires_grad=at % 2 == 0),
        lambda at: torch.full((1, 6), float(at)).expand(40_000, 6),
    ]
    value = {(at, kind): kinds[kind](at) for at in range(7) for kind in range(len(kinds))}
    back = from_bytes(to_bytes(value))
    assert list(back) == list(value)
    for place, one in back.items():
        assert same(one, value[place])
        assert (type(one), one.requires_grad) == (type(value[place]), value[place].requires_grad)


LARGE = 1 << 18


@pytest.mark.parametrize("numbers", [(5, 5, 5), (5, 7), (LARGE, 5), (LARGE, LARGE)], ids=str)
def test_each_tensor_has_memory_of_its_own(numbers):
    value = [torch.full((number,), float(at)) for at, number in enumerate(numbers)]
    back = from_bytes(to_bytes(value))
    versions = [one._version for one in back]
    for at, one in enumerate(back):
        # So keeping it, or writing it to a file, keeps and writes nothing of the others.
        assert one.untyped_storage().nbytes() == 4 * numbers[at]
        one.fill_(-1.0 - at)
    assert [one.unique().tolist() for one in back] == [[-1.0 - at] for at in range(len(back))]
    assert [one._version for one in back] == [number + 1 for number in versions]


def test_views_of_one_tensor_come_back_as_views_of_one():
    whole = torch.arange(6.0).reshape(2, 3)
    back, row, again, turned = from_bytes(to_bytes((whole, whole[0], whole, whole.T)))
    assert again is back
    assert same(turned, whole.T)
    back[0, 1] = 9
    assert row.tolist() == [0.0, 9.0, 2.0]
    assert turned[1].tolist() == [9.0, 4.0]


def test_parts_share_memory_also_where_the_whole_stays():
    whole = torch.arange(12.0).reshape(3, 4)
    row, column, other, far = from_bytes(
        to_bytes([whole[0], whole[:, 0], whole.view(torch.int32)[0, 1:], torch.ones(3)])
    )
    row[0] = 7
    assert column[0] == 7
    assert other.tolist() == torch.tensor([1.0, 2.0, 3.0]).view(torch.int32).tolist()
    assert far.tolist() == [1.0] * 3


def test_columns_far_apart_take_along_nothing_between_them():
    whole = torch.arange(8000.0).reshape(1000, 8)
    value = [whole[:, 0], whole[:, 2]]
    _, pieces = encode(value)
    assert sum(len(piece) for piece in pieces) == 8000
    assert all(same(a, b) for a, b in zip(from_bytes(to_bytes(value)), value, strict=True))


def test_an_array_and_a_tensor_of_one_memory_come_back_as_that():
    array = np.arange(6.0).reshape(2, 3)
    back, part, tensor = from_bytes(to_bytes((array, array[1, ::2], torch.from_numpy(array).T)))
    assert np.array_equal(back, array)
    tensor[2, 1] = 9
    assert back[1, 2] == part[1] == 9
    part[0] = 8
    assert tensor[0, 1] == 8


ARRAYS = [
    np.arange(6, dtype=np.uint16).reshape(2, 3).T, np.array(["a", "bc"]), np.array(3.5),
    np.zeros(0),
    np.arange(3.0)[::-1], np.array([None, 1]), np.zeros(2, dtype=">f4"), np.zeros(2, dtype="M8[s]"),
    np.ones(3, dtype=bool), np.arange(2, dtype=np.longdouble), np.broadcast_to(np.ones(1), (3,)),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=lambda one: f"{one.dtype}{one.shape}")
def test_every_kind_of_array_comes_back(array):
    back = from_bytes(to_bytes([array, array.copy()]))[0]
    assert np.array_equal(back, array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.flags.f_contiguous == array.flags.f_contiguous or array.strides[0] < 1


def test_memory_of_odd_addresses_is_aligned_there():
    memory = torch.arange(40, dtype=torch.uint8)
    value = (memory[4:36].view(torch.float32), memory[7:20])
    assert all(same(a, b) for a, b in zip(from_bytes(to_bytes(value)), value, strict=True))


def test_header_alone_is_no_value():
    body, _, _ = pickle.loads(encode([torch.ones(2)])[0])
    with pytest.raises(pickle.UnpicklingError, match="without its payload"):
        pickle.loads(body)
