# A block under test binds names, and stands inside another `with`.
import copy
import gc
import pickle
import weakref

import pytest
import torch

from fakes.nets import Net, batch
from nnsight_pp import NNsight, NotSupportedError, OutsideTraceError
from nnsight_pp.core.location import Location
from nnsight_pp.core.report import Report
from nnsight_pp.core.rows import WholeCut
from nnsight_pp.envoys.cache_view import Cache, CacheView
from nnsight_pp.wire.merge import merge_reports
from nnsight_pp.wire.value_codec import from_bytes, to_bytes

X = batch(2)


@pytest.fixture
def model():
    return NNsight(Net(), rename={"layers": "blocks"})


def test_every_output_is_kept_as_it_is_after_the_edits(model):
    with model.trace(X) as tracer:
        cache = tracer.cache()
        model.layers[0].output = torch.zeros(2, 4)
        out = model.output.save()
    assert not cache["model.layers.0"].output.any()
    assert torch.equal(cache.output, out)
    assert cache.keys()[:3] == ["model.layers.0.fc", "model.layers.0.act", "model.layers.0"]
    assert cache.keys()[-1] == "model"
    assert cache["model.layers.0"].inputs is None


def test_a_place_is_found_by_path_by_attribute_and_by_further_name(model):
    with model.trace(X) as tracer:
        cache = tracer.cache()
    wanted = cache["model.layers.1.fc"].output
    for found in (
        cache.layers[1].fc,
        cache.model.layers[1].fc,
        cache.blocks[1]["fc"],
        cache["model.blocks.1.fc"],
    ):
        assert found.output is wanted
    assert "model.layers.1" in cache
    assert "model.layers.9" not in cache


def test_a_kept_value_is_no_part_of_the_graph_or_the_model(model):
    with model.trace(X) as tracer:
        cache = tracer.cache([model.head], dtype=torch.float64)
        live = model.head.output.save()
    assert cache.keys() == ["model.head"]
    assert not cache.head.output.requires_grad
    assert cache.head.output.dtype == torch.float64
    live.data.zero_()
    assert cache.head.output.any()


def test_inputs_are_kept_where_they_are_wanted(model):
    with model.trace(X, scale=2.0) as tracer:
        cache = tracer.cache(["model.layers.0"], include_inputs=True, include_output=False)
    assert cache.layers[0].output is None
    assert cache.layers[0].inputs[1] == {"scale": 2.0}
    assert torch.equal(cache.layers[0].input, X)


def test_each_visit_is_an_entry(model):
    with model.trace(X, fn=model._module.rollout) as tracer:
        cache = tracer.cache([model.layers[0], "model.nowhere"], include_inputs=True)
    place = cache.layers[0]
    assert len(place) == len(place.output) == len(place.inputs) == 3
    assert torch.equal(place.output[2], model._module.layers[0](place.input[2]))


def test_each_invoke_keeps_its_own_rows(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            one = tracer.cache([model.head])
        with tracer.invoke(X * 2):
            two = tracer.cache([model.head])
    assert torch.allclose(one.head.output, model._module(X))
    assert torch.allclose(two.head.output, model._module(X * 2))


def test_what_was_not_kept_is_a_key_error(model):
    with model.trace(X) as tracer:
        cache = tracer.cache([model.head])
    with pytest.raises(KeyError, match="not in the cache"):
        cache["model.layers.0"]
    with pytest.raises(KeyError, match="not in the cache"):
        cache.output
    with pytest.raises(AttributeError):
        cache.layers


def test_a_cache_travels_without_the_model(model):
    with model.trace(X) as tracer:
        cache = tracer.cache()
    back = pickle.loads(pickle.dumps(cache))
    assert torch.equal(back["model.head"].output, cache.head.output)
    assert copy.copy(back).layers[0].fc.output.shape == (2, 4)


def test_a_cache_that_comes_late_is_refused(model):
    with pytest.raises(ValueError, match="before reading or modifying"):
        with model.trace(X) as tracer:
            model.head.output
            tracer.cache()


def test_a_cache_outside_of_a_block_is_refused(model):
    tracer = model.trace(X)
    with pytest.raises(OutsideTraceError, match="outside of interleaving"):
        tracer.cache()


def test_a_skipped_module_is_kept_with_its_replacement(model):
    with model.trace(X) as tracer:
        cache = tracer.cache()
        model.layers[1].skip(torch.ones(2, 4))
    assert (cache.layers[1].output == 1).all()
    assert "model.layers.1.fc" not in cache


def test_a_dropped_cache_and_model_are_freed_without_the_collector():
    def run():
        model = NNsight(Net())
        with model.trace(X) as tracer:
            tracer.cache()
            kept = model.output.save()
        return weakref.ref(model._module), weakref.ref(kept)

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in run()] == [None, None]
    finally:
        gc.enable()


# ------------------------------------------------------------------------------ kept by two stages


class Cuts:
    """What a cache asks of its worker."""

    def __init__(self):
        self.asked = 0
        self.cut = None


def kept_on_two_stages(model, options=None):
    """Return what two stages keep of one run: the first has layer 0, and the input of the root."""
    of_first = {"model.layers.0.output", "model.layers.0.input", "model.input"}
    given = {"device": "cpu", "dtype": None, "detach": True, "non_blocking": False}
    given |= {"include_output": True, "include_inputs": True} | (options or {})
    views = []
    for stage in (0, 1):
        worker = Cuts()
        cache = Cache(
            model,
            worker,
            ["model.layers.0", "model.layers.2", "model"],
            given,
            lambda location, stage=stage: (str(location) in of_first) == (stage == 0),
        )
        observers = dict(cache.observers())
        worker.cut = WholeCut()
        for number in range(2):
            root = Location("model", "input"), Location("model", "output")
            values = [(root[0], ((number,), {})), (root[1], X + number)]
            for index, path in enumerate(("model.layers.0", "model.layers.2")):
                values[1 + 2 * index : 1 + 2 * index] = [
                    (Location(path, "input"), ((X * number,), {})),
                    (Location(path, "output"), X - index),
                ]
            for location, value in values:
                if location in observers:
                    observers[location](value)
        views.append(CacheView(cache, ""))
    return views


def test_the_parts_of_two_stages_are_joined(model):
    first, last = kept_on_two_stages(model)
    reports = [
        Report("r", stage, saved={"cache": view}, trail=(0, 0))
        for stage, view in enumerate((first, last))
    ]
    sent = from_bytes(to_bytes(reports))
    cache = merge_reports(sent).saved["cache"]
    assert cache.keys() == ["model.layers.0", "model.layers.2", "model"]
    assert [inputs[0] for inputs in cache.inputs] == [(0,), (1,)]
    assert torch.equal(cache.output[1], X + 1)
    assert torch.equal(cache["model.layers.2"].output[0], X - 1)
    cache.belongs_to(model)
    assert torch.equal(cache.blocks[0].output[1], X)


@pytest.mark.parametrize("option", ["include_output", "include_inputs"])
def test_what_was_not_wanted_is_none_in_every_part(model, option):
    first, last = kept_on_two_stages(model, {option: False})
    cache = merge_reports(
        from_bytes(
            to_bytes([Report("r", 0, saved={"c": first}), Report("r", 1, saved={"c": last})])
        )
    ).saved["c"]
    wanted = "output" if option == "include_inputs" else "inputs"
    other = "inputs" if option == "include_inputs" else "output"
    for path in ("model.layers.0", "model.layers.2", "model"):
        assert getattr(cache[path], other) == [None, None]
        assert None not in getattr(cache[path], wanted)


def test_one_part_cannot_be_read(model):
    first, _ = kept_on_two_stages(model)
    for use in (len, list, lambda view: view.output, lambda view: view["model"]):
        with pytest.raises(NotSupportedError, match="read in its block"):
            use(first)
    assert repr(first) == "CacheView(of one rank)"
