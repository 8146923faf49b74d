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
