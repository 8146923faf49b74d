import functools
import importlib
import pickle
import subprocess
import sys
import textwrap
import threading
import types

import cloudpickle
import numpy as np
import pytest
import torch

from nnsight_pp.core.block import Block
from nnsight_pp.core.surroundings import Surroundings
from nnsight_pp.wire.block_codec import BlockMessage, decode_block, encode_block, is_users

BLOCK = Block("user.py", 3, "    x = helper(model)\n", "run")


class Model:
    """Stands for what exists on both sides."""

    def __init__(self):
        self.layers = ["first"]


NO_MODEL = Model()


def shipped(names, model=NO_MODEL, **options):
    message = BlockMessage("t", BLOCK, names, **options)
    data = encode_block(message, lambda obj: "the model" if obj is model else None)
    assert b"Model" not in data
    return decode_block(data, lambda name: f"here: {name}")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nnsight_pp_user_code.py").write_text(
        textwrap.dedent(
            """
            FACTOR = 3

            class OwnError(ValueError):
                def __init__(self, text, code=7):
                    super().__init__(text)
                    self.code = code

            class Scaler:
                by = 2
                def __call__(self, x):
                    return x * self.by * FACTOR

            def scaled(x):
                return Scaler()(x)

            WIDTH, HEIGHT = 5, 2

            def made_inside():
                class Made:
                    width: int = WIDTH
                    class Inner:
                        height = HEIGHT
                return Made.width * Made.Inner.height
            """
        )
    )
    module = importlib.import_module("nnsight_pp_user_code")
    yield module
    sys.modules.pop("nnsight_pp_user_code", None)


def test_block_and_options_come_back():
    back = shipped({"n": 1}, saved=("n",), surroundings=Surroundings.now())
    assert back == BlockMessage("t", BLOCK, {"n": 1}, ("n",), surroundings=Surroundings.now())
    assert back.block.code().co_name == "run"


def test_model_travels_as_its_name_also_inside_containers_and_closures():
    model = Model()

    def use():
        return model

    back = shipped({"model": model, "many": [model, (model,)], "use": use}, model)
    assert back.names["model"] == "here: the model"
    assert back.names["many"] == ["here: the model", ("here: the model",)]
    assert back.names["use"]() == "here: the model"


def test_tensors_lambdas_and_closures_come_back():
    factor = torch.arange(3.0)
    back = shipped({"vector": factor, "scale": lambda x: x * factor})
    assert torch.equal(back.names["vector"], factor)
    assert torch.equal(back.names["scale"](torch.ones(3)), factor)


def test_code_of_a_users_module_travels_by_value(user_module):
    data = encode_block(BlockMessage("t", BLOCK, {"scaled": user_module.scaled}), lambda obj: None)
    sys.modules.pop("nnsight_pp_user_code")
    sys.path_importer_cache.clear()
    user_module.Scaler = None
    back = decode_block(data, lambda name: None)
    assert back.names["scaled"](1) == 6
    assert "nnsight_pp_user_code" not in cloudpickle.list_registry_pickle_by_value()


def test_library_code_travels_by_name():
    assert not is_users(torch)
    assert not is_users(textwrap)
    assert not is_users(pytest)
    assert not is_users(sys)
    assert not is_users(sys.modules["nnsight_pp"])
    data = encode_block(BlockMessage("t", BLOCK, {"f": textwrap.dedent}), lambda obj: None)
    assert len(data) < 1000


def test_threads_encode_the_same_module_at_once(user_module):
    failed = []

    def work():
        for _ in range(10):
            data = encode_block(
                BlockMessage("t", BLOCK, {"scaled": user_module.scaled}), lambda obj: None
            )
            if b"FACTOR" not in data:
                failed.append(data)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_what_cannot_travel_is_an_error_here():
    with pytest.raises(Exception, match=r"(?i)pickle"):
        shipped({"lock": threading.Lock()})


RANK = """
import pickle, sys
from nnsight_pp.wire.block_codec import decode_block
from nnsight_pp.wire.report_codec import failure_of
assert "nnsight_pp_user_code" not in sys.modules
message = decode_block(sys.stdin.buffer.read(), lambda name: None)
try:
    raise message.names["OwnError"]("from the rank", 9)
except Exception as error:
    sys.stdout.buffer.write(pickle.dumps(failure_of(error, "user.py", 1, 4)))
"""


@pytest.mark.slow
def test_exception_class_of_a_users_module_comes_back_as_the_same_class(user_module):
    from nnsight_pp.trace.raised import exception_of

    data = encode_block(
        BlockMessage("t", BLOCK, {"OwnError": user_module.OwnError}), lambda obj: None
    )
    done = subprocess.run([sys.executable, "-c", RANK], input=data, capture_output=True, check=True)
    error = exception_of(pickle.loads(done.stdout))
    assert type(error) is user_module.OwnError
    assert (str(error), error.code) == ("from the rank", 9)


def test_tensors_that_share_memory_share_it_there():
    whole = torch.zeros(2, 3)
    back = shipped({"row": whole[1], "whole": whole, "turned": [whole.T.view(torch.int32)]})
    back.names["row"][2] = 5.0
    assert back.names["whole"].tolist() == [[0.0] * 3, [0.0, 0.0, 5.0]]
    assert back.names["turned"][0][2, 1] == torch.tensor(5.0).view(torch.int32)
    assert not whole.any()


def test_arrays_that_share_memory_share_it_there():
    whole = np.zeros((2, 3))
    back = shipped({"row": whole[1, ::-1], "whole": whole, "column": [whole[:, 0:1].T]})
    back.names["row"][:] = [1, 2, 3]
    assert back.names["whole"].tolist() == [[0.0] * 3, [3.0, 2.0, 1.0]]
    assert back.names["column"][0].tolist() == [[0.0, 3.0]]


def test_parts_of_an_array_that_stays_at_home_share_memory_too():
    whole = np.zeros((3, 100))
    back = shipped({"one": whole[1], "other": whole[1:2, :50]})
    back.names["one"][7] = 5
    assert back.names["other"][0, 7] == 5


def test_an_array_alone_takes_along_no_more_than_itself():
    data = encode_block(
        BlockMessage("t", BLOCK, {"row": np.zeros((1000, 1000))[3]}), lambda obj: None
    )
    assert len(data) < 20_000


def test_an_array_and_a_tensor_of_one_memory_share_it_there():
    array, tensor = np.zeros((3, 2)), torch.zeros(3)
    names = {
        "array": array[1:], "tensor": [torch.from_numpy(array)[:2, 1]],
        "other": tensor, "shown": tensor.numpy()[1:], "again": torch.from_numpy(array[2]),
    }  # fmt: skip
    back = shipped(names).names
    back["array"][0, 1] = 5
    back["shown"][0] = 7
    back["again"][0] = 3
    assert back["tensor"][0].tolist() == [0.0, 5.0]
    assert back["other"].tolist() == [0.0, 7.0, 0.0]
    assert back["array"][1, 0] == 3
    assert not array.any()


def test_a_buffer_and_what_looks_into_it_share_memory_there():
    buffer = bytearray(range(8))
    names = {
        "buffer": buffer, "array": np.frombuffer(buffer, dtype=np.uint16)[::-1],
        "tensor": torch.frombuffer(buffer, dtype=torch.uint8, offset=2),
        "view": memoryview(buffer)[2:6].cast("H"),
    }  # fmt: skip
    back = shipped(names).names
    back["buffer"][2] = 200
    back["view"][1] = 0
    assert back["tensor"].tolist() == [200, 3, 0, 0, 6, 7]
    assert back["array"].tolist() == [7 << 8 | 6, 0, 3 << 8 | 200, 1 << 8]
    assert buffer == bytearray(range(8))


def test_a_buffer_that_nobody_looks_into_can_grow_there():
    back = shipped({"buffer": bytearray(b"ab"), "array": np.zeros(2)}).names
    back["buffer"].append(99)
    assert back["buffer"] == b"abc"


def test_an_array_that_cannot_be_written_stays_so():
    array = np.zeros(3)
    shown = array[1:]
    shown.flags.writeable = False
    back = shipped({"array": array, "shown": shown}).names
    back["array"][1] = 4
    assert back["shown"].tolist() == [4.0, 0.0]
    with pytest.raises(ValueError, match="read-only"):
        back["shown"][0] = 1


def test_a_view_with_steps_cannot_travel():
    with pytest.raises(pickle.PicklingError, match="with steps"):
        shipped({"view": memoryview(bytearray(8))[::2]})


def test_a_users_module_comes_as_it_stands_now(user_module):
    user_module.FACTOR = 5
    user_module.model = threading.Lock()
    block = Block("user.py", 3, "    x = module.FACTOR * module.scaled(1)\n", "run")
    data = encode_block(
        BlockMessage("t", block, {"module": user_module, "scaled": user_module.scaled}),
        lambda obj: None,
    )
    sys.modules.pop("nnsight_pp_user_code")
    sys.path_importer_cache.clear()
    back = decode_block(data, lambda name: None).names
    assert (back["module"].FACTOR, back["module"].scaled(1)) == (5, 10)
    assert back["scaled"] is back["module"].scaled
    back["module"].FACTOR = 7
    assert back["scaled"](1) == 14
    assert not hasattr(back["module"], "OwnError")


def test_what_the_body_of_a_class_in_a_function_reads_comes_with_it(user_module):
    there = shipped({"made": user_module.made_inside}).names["made"]
    assert there is not user_module.made_inside
    assert there() == 10


def test_what_a_module_mentions_comes_through_other_functions(user_module):
    def reach():
        return user_module.Scaler.by

    back = shipped({"reach": reach, "library": textwrap})
    assert back.names["reach"]() == 2
    assert back.names["library"] is textwrap


def test_a_view_of_a_dict_looks_at_it_there():
    inner = {"a": 1}
    names = {"inner": inner, "keys": inner.keys(), "values": inner.values(), "items": inner.items()}
    back = shipped({**names, "shown": types.MappingProxyType(inner)}).names
    back["inner"]["b"] = 2
    assert [*back["keys"]] == [*back["shown"]] == ["a", "b"]
    assert [*back["values"]] == [1, 2]
    assert [*back["items"]][1] == ("b", 2)


class WithCached:
    @functools.cached_property
    def once(self):
        return [1]


@functools.lru_cache(maxsize=3)
def doubled(x):
    return 2 * x


def test_a_function_with_a_cache_and_a_cached_property_travel(monkeypatch):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        data = encode_block(
            BlockMessage("t", BLOCK, {"one": WithCached(), "doubled": doubled}), lambda obj: None
        )
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    back = decode_block(data, lambda name: None).names
    assert back["one"].once is back["one"].once
    assert (back["doubled"](4), back["doubled"](4)) == (8, 8)
    assert back["doubled"].cache_info().hits == 1
    assert back["doubled"] is not doubled
