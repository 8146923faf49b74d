# The short way of an ask and of a visit gives what the long one gives, error texts included.
import pytest
import torch
from torch import nn

from fakes.nets import Net, batch
from nnsight_pp import NNsight
from nnsight_pp.envoys.serve_point import ServePoint
from nnsight_pp.interleave import nearby
from nnsight_pp.interleave.asks import Asks
from nnsight_pp.interleave.interleaver import Interleaver

X = batch(2)


def read_all(model):
    with model.trace(X):
        kept = [layer.output for layer in model.layers].save()
    return kept


def read_twice(model):
    with model.trace(X):
        same = (model.layers[0].output is model.layers[0].output).save()
        late = model.layers[2].input.save()
    return same, late


def edit_and_replace(model):
    with model.trace(X) as tracer:
        model.layers[0].output[:, 0] += 3
        model.layers[1].fc.output = model.layers[1].fc.output * 2
        model.layers[2].input = torch.ones(2, 4)
        out = tracer.result.save()
    return out


def name_the_scale(model):
    with model.trace(X, scale=0.5):
        kept = model.layers[1].inputs.save()
    return kept


def loop_over_steps(model):
    with model.trace(X, fn="rollout", steps=4) as tracer:
        kept = [].save()
        for step in tracer.iter[1:]:
            model.layers[1].output[:] *= 1 + step
            kept.append((step, model.layers[2].fc.output.clone()))
        after = (1).save()
    return kept


def loop_that_outruns(model):
    with model.trace(X, fn="rollout", steps=2) as tracer:
        kept = [].save()
        for step in tracer.iter[:5]:
            kept.append(model.layers[0].output)
    return kept


def two_prompts(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            first = model.layers[0].output.save()
            model.layers[1].output = model.layers[1].output * 0
        with tracer.invoke(batch(1, seed=5)):
            second = model.layers[0].output.save()
            model.layers[1].output[:] += 1
        with tracer.invoke():
            whole = model.head.output.save()
    return first, second, whole


def barrier(model):
    with model.trace() as tracer:
        meet = tracer.barrier(2)
        with tracer.invoke(X):
            early = model.layers[0].output
            meet()
            late = model.layers[2].output.save()
        with tracer.invoke(X):
            meet()
            model.layers[1].output = early * 2
            got = model.layers[2].output.save()
    return late, got


def stop_early(model):
    with model.trace(X) as tracer:
        kept = model.layers[0].output.save()
        tracer.stop()
    return kept


def cached(model):
    with model.trace(X) as tracer:
        kept = tracer.cache(include_inputs=True)
        model.layers[1].output[:] = 0
    return [(key, kept[key].output, kept[key].inputs) for key in kept]


def skipped(model):
    with model.trace(X) as tracer:
        model.layers[1].skip(model.layers[1].input * 2)
        out = tracer.result.save()
    return out


def inside_a_forward(model):
    with model.trace(X):
        kept = model.layers[1].source.self_act_0.output.save()
    return kept


def called_from_the_block(model):
    with model.trace(X):
        lens = model.head(model.layers[0].output).save()
        late = model.layers[1].output.save()
    return lens, late


def too_late(model):
    with model.trace(X):
        late = model.layers[2].output
        model.layers[0].output.save()


def never_computed(model):
    with model.trace(X, fn="rollout"):
        model.head.output.save()


def caught_and_gone_on(model):
    with model.trace(X):
        late = model.layers[1].output
        try:
            model.layers[0].output
        except Exception as error:
            kept = type(error).__name__.save()
        more = model.layers[2].output.save()
    return kept, more


def fails(model):
    with model.trace(X):
        model.layers[1].output.save()
        raise ValueError("from the block")


def wrong_rows(model):
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.layers[0].output = torch.zeros(3, 4)
        with tracer.invoke(X):
            model.layers[0].output.save()


def value_after_the_result(model):
    with model.trace(X) as tracer:
        result = tracer.result.save()
        model.head.output


PROGRAMS = [
    read_all, read_twice, edit_and_replace, name_the_scale, loop_over_steps, loop_that_outruns,
    two_prompts, barrier, stop_early, cached, skipped, inside_a_forward, called_from_the_block,
    too_late, never_computed, caught_and_gone_on, fails, wrong_rows, value_after_the_result,
]  # fmt: skip


def take_the_long_way(monkeypatch):
    monkeypatch.setattr(ServePoint, "__call__", ServePoint.call)
    monkeypatch.setattr(nearby, "state", lambda counts, parked: None)


def outcome_of(program):
    """Return what ``program`` gives on a new model and on a shared one, or what it raises."""
    given = []
    shared = Net()
    shared.again = shared.layers[1]
    for module in (Net(), shared):
        try:
            given.append(program(NNsight(module)))
        except Exception as error:
            given.append(f"{type(error).__name__}: {error}")
    return given


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    else:
        assert one == other


@pytest.mark.filterwarnings("ignore:A loop asked for")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_short_way_gives_what_the_long_way_gives(program, monkeypatch):
    short = outcome_of(program)
    take_the_long_way(monkeypatch)
    assert_same(short, outcome_of(program))


def test_programs_take_the_short_way(monkeypatch):
    monkeypatch.setattr(Asks, "read", None)
    monkeypatch.setattr(Asks, "write", None)
    monkeypatch.setattr(Interleaver, "serve", None)
    monkeypatch.setattr(Interleaver, "serve_all", None)
    model = NNsight(Net())
    read_all(model)
    with model.trace() as tracer:
        for _ in range(3):
            with tracer.invoke(X):
                for layer in model.layers:
                    layer.output
    with model.trace(X):
        model.layers[1].output = model.layers[1].output * 2
    with model.trace(X, fn="rollout", steps=3) as tracer:
        for _ in tracer.iter[1:3]:
            model.layers[1].output
    assert type(ServePoint.__call__).__name__ == "method_descriptor"


def test_visit_of_a_module_with_many_arguments_reaches_it_whole():
    class Wide(nn.Module):
        def forward(self, *args, **kwargs):
            return sum(args), dict(kwargs)

    inner = Wide()
    outer = nn.Sequential()
    outer.inner = inner
    outer.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    model = NNsight(outer)
    named = {f"name_{at}": at for at in range(20)}
    assert inner(*range(30), **named) == (sum(range(30)), named)
    with model.trace(X, fn=lambda x: inner(*range(30), **named)) as tracer:
        total = tracer.result.save()
    assert total == (sum(range(30)), named)


def test_error_of_a_module_that_nobody_reads_is_the_modules_own(monkeypatch):
    module = Net()
    module.layers[1].act.forward = lambda x: 1 / 0
    model = NNsight(module)
    with pytest.raises(ZeroDivisionError):
        module(X)
    with pytest.raises(ZeroDivisionError), model.trace(X):
        model.layers[0].output.save()


def test_points_serve_nobody_after_the_run_is_over():
    module = Net()
    model = NNsight(module)
    read_all(model)
    before = module(X)
    assert torch.equal(before, Net()(X))
    assert model.interleaver.gate.parked is None


def test_two_trees_over_one_module_both_see_it():
    module = Net()
    first, second = NNsight(module), NNsight(module)
    with first.trace(X):
        with second.trace(X):
            inner = second.layers[1].output.save()
        outer = first.layers[1].output.save()
    assert torch.equal(inner, outer)
