"""A module that runs for several requests at once, and is skipped by one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fakes.nets import WIDTH, Net
from nnsight_pp import NotSupportedError, OutOfOrderError, RowsError
from nnsight_pp.core.location import Location
from nnsight_pp.core.rows import Rows, TokenCut
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.serve_point import install_serve_points, module_paths
from nnsight_pp.interleave import thread_state
from nnsight_pp.interleave.clock import StepClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.worker import Worker, current_worker
from nnsight_pp.parallel.owners import StageMap

X = torch.arange(5.0 * WIDTH).reshape(5, WIDTH) / 10


def read(path: str, kind: str = "output") -> Any:
    worker = current_worker(path)
    assert worker.turns is not None
    return worker.turns.read(worker, Location(path, kind))


class Rank:
    """One rank with two requests: rows 0 and 1, and rows 2 to 4."""

    def __init__(self, *blocks: Callable[[Rank], None], order: bool = True) -> None:
        self.net = Net()
        self.gate = Gate(runs_skipped=True)
        modules = module_paths(self.net)
        install_serve_points(modules, self.gate)
        served: list[Location] = []
        self.gate.serve = lambda location, value: (served.append(location), value)[1]
        self.net(X)
        paths = list(modules)
        owners = StageMap([paths], [paths], paths, order=[served] if order else ())
        switch = thread_state.load()
        self.turns = Interleaver(StepClock(), switch, owners=owners)
        self.workers = []
        for number, (block, rows) in enumerate(
            zip(blocks, (Rows(0, 2, 5), Rows(2, 3, 5)), strict=False)
        ):
            worker = Worker(str(number), lambda b=block: b(self), __file__, switch.new_slot(False))
            worker.cut = TokenCut(rows)
            self.workers.append(worker)
            self.turns.add(worker)

    def skip(self, path: str, value: Any) -> None:
        self.gate.is_skipping = True
        worker = current_worker(path)
        assert worker.turns is not None
        worker.turns.write(worker, Location(path, "skip"), value)

    def run(self) -> torch.Tensor:
        self.gate.serve = self._serve
        for worker in self.workers:
            self.turns.open_step(worker.request, 0)
        with torch.inference_mode():
            out = self.net(X.clone())
        self.gate.close()
        for worker in self.workers:
            self.turns.close_step(worker.request, 0)
            self.turns.drop(worker.request)
        assert self.turns.statistics() == {"requests": 0, "workers": 0, "parked": 0}
        assert not self.turns.skips
        return out

    def _serve(self, location: Location, value: Any) -> Any:
        if location.kind == "skip":
            self.turns.skips.hold(location)
            return value
        return self.turns.serve(location, value)

    @property
    def errors(self) -> list[BaseException | None]:
        return [worker.error for worker in self.workers]


def test_only_the_rows_of_who_skips_are_replaced():
    seen: dict[str, torch.Tensor] = {}

    def skips(rank: Rank) -> None:
        rank.skip("model.layers.1", torch.full((2, WIDTH), 7.0))
        seen["own"] = read("model.layers.1")

    def reads(rank: Rank) -> None:
        seen["other"] = read("model.layers.1")

    rank = Rank(skips, reads)
    out = rank.run()
    assert rank.errors == [None, None]
    net = rank.net
    plain = net.layers[1](net.layers[0](X))
    assert torch.equal(seen["own"], torch.full((2, WIDTH), 7.0))
    assert torch.equal(seen["other"], plain[2:])
    wanted = plain.clone()
    wanted[:2] = 7.0
    assert torch.equal(out, net.head(net.layers[2](wanted)))


def test_both_may_skip_it_each_with_its_own_input():
    def skips(rank: Rank) -> None:
        (value,), _ = read("model.layers.1", "input")
        rank.skip("model.layers.1", value)

    rank = Rank(skips, skips)
    out = rank.run()
    assert rank.errors == [None, None]
    net = rank.net
    assert torch.equal(out, net.head(net.layers[2](net.layers[0](X))))


def test_a_value_that_does_not_fit_is_refused_and_harms_nobody():
    def skips(rank: Rank) -> None:
        rank.skip("model.layers.1", torch.ones(3, WIDTH))

    rank = Rank(skips)
    out = rank.run()
    assert isinstance(rank.errors[0], RowsError)
    assert torch.equal(out, rank.net(X))


@pytest.mark.parametrize("order", [True, False], ids=["known order", "unknown order"])
def test_who_skips_a_module_that_runs_already_comes_too_late(order: bool):
    def skips(rank: Rank) -> None:
        read("model.layers.1")
        rank.skip("model", torch.ones(2, WIDTH))

    rank = Rank(skips, order=order)
    out = rank.run()
    wanted = OutOfOrderError if order else NotSupportedError
    assert isinstance(rank.errors[0], wanted)
    assert torch.equal(out, rank.net(X))


def test_what_is_inside_is_not_served_to_who_skips():
    seen = []

    def skips(rank: Rank) -> None:
        rank.skip("model", torch.ones(2, 2))
        seen.append(read("model.layers.1"))

    def reads(rank: Rank) -> None:
        seen.append(read("model.layers.1").shape[0])

    rank = Rank(skips, reads)
    rank.run()
    assert seen == [3]
    assert isinstance(rank.errors[0], OutOfOrderError)
