"""The serve points of an engine's modules are there while something is served, and gone after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.engines.vllm.points import Points
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.envoys.serve_point import ServePoint, module_paths

if TYPE_CHECKING:
    from nnsight_pp.core.location import Location


class Doubled(torch.nn.Module):
    """A net whose second module has a forward of its own instance."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Identity()
        self.second = torch.nn.Identity()
        self.second.forward = lambda value: 2 * value
        self.again = self.first

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.again(self.second(self.first(value)))


def forwards(net: torch.nn.Module) -> list[Any]:
    return [module.__dict__.get("forward") for module in net.modules()]


def test_points_serve_while_open_and_leave_no_forward_behind() -> None:
    net, gate = Doubled(), Gate()
    before = forwards(net)
    points = Points(module_paths(net), gate)
    assert forwards(net) == before

    served: list[Location] = []

    def note(location: Location, value: Any) -> Any:
        served.append(location)
        return value

    one = torch.ones(2)
    for _ in range(2):
        points.open(note)
        assert all(isinstance(point, ServePoint) for point in forwards(net))
        assert net(one).tolist() == [2, 2]
        points.shut()
        assert forwards(net) == before
        assert gate.serve is None
    seen = [location for location in served if location.kind == "output"]
    assert [location.path for location in seen[: len(seen) // 2]] == [
        "model.first",
        "model.second",
        "model.first",
        "model",
    ]
    served.clear()
    assert net(one).tolist() == [2, 2]
    assert not served


def test_shutting_twice_and_opening_twice_change_nothing_more() -> None:
    net = Doubled()
    before = forwards(net)
    points = Points(module_paths(net), Gate())
    points.shut()
    assert forwards(net) == before
    points.open(lambda _, value: value)
    points.open(lambda _, value: value)
    points.shut()
    assert forwards(net) == before


class Inner(torch.nn.Module):
    """Calls what it was handed."""

    def __init__(self, extra: torch.nn.Module) -> None:
        super().__init__()
        self._layer = extra

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self._layer(value)


class Outer(torch.nn.Module):
    """Holds a module that only the one inside calls, which itself holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Sequential(torch.nn.Identity())
        self.inner = Inner(self.extra)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value)


class Twice(torch.nn.Module):
    """Calls a module itself, and lets another call it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.Identity()
        self.inner = Inner(self.own)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(self.own(value))


def outputs_served(points: Points, net: torch.nn.Module) -> list[str]:
    served: list[Location] = []

    def note(location: Location, value: Any) -> Any:
        served.append(location)
        return value

    points.open(note)
    net(torch.ones(2))
    points.shut()
    return [location.path for location in served if location.kind == "output"]


def test_a_module_handed_down_is_served_under_its_holders_name() -> None:
    net = torch.nn.Sequential(Outer(), Outer())
    points = Points(module_paths(net), Gate())
    ran = outputs_served(points, net)
    assert "model.0.inner._layer" in ran
    assert points.settle(ran) == {
        f"model.{index}.inner._layer{end}": f"model.{index}.extra{end}"
        for index in range(2)
        for end in ("", ".0")
    }
    one = ["extra.0", "extra", "inner"]
    assert outputs_served(points, net) == [
        *(f"model.0.{name}" for name in one), "model.0",
        *(f"model.1.{name}" for name in one), "model.1",
        "model",
    ]  # fmt: skip


def test_a_module_that_two_call_keeps_both_names() -> None:
    net = torch.nn.Sequential(Twice())
    points = Points(module_paths(net), Gate())
    ran = outputs_served(points, net)
    assert points.settle(ran) == {}
    assert outputs_served(points, net) == ran
    assert {"model.0.own", "model.0.inner._layer"} <= set(ran)
