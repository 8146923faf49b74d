"""Which reports come along with the last step of their requests, and which wait."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from nnsight_pp.core.report import Failure, Report
from nnsight_pp.engines.vllm.activations import take_bytes, with_bytes
from nnsight_pp.engines.vllm.collect import came_home
from nnsight_pp.engines.vllm.early_reports import EarlyReports
from nnsight_pp.engines.vllm.schedule import send_home, with_ended
from nnsight_pp.errors import EarlyStopException
from nnsight_pp.parallel.place import Place

STEP = 3


class Activations:
    """What a stage sends on."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


def a_request(name: str = "one", **changes: Any) -> Any:
    worker = SimpleNamespace(has_ended=True, error=None)
    traced = SimpleNamespace(request=name, trace=name, error=None, worker=worker, last_step=STEP)
    for key, value in changes.items():
        setattr(worker if hasattr(worker, key) and key != "error" else traced, key, value)
    return traced


class Reporting:
    """Stands for the ledger of a stage: every request has saved this."""

    def __init__(self, stage: int, saved: Any = None, failure: Failure | None = None) -> None:
        self.stage, self.saved, self.failure = stage, saved, failure

    def report(self, traced: Any) -> Report:
        saved = {"x": torch.ones(2) if self.saved is None else self.saved}
        return Report(traced.request, self.stage, traced.trace, saved, failure=self.failure)


def stages(num: int, **options: Any) -> list[EarlyReports]:
    return [
        EarlyReports(Reporting(stage, **options), Place(stage, num, 0, 1))  # type: ignore[arg-type]
        for stage in range(num)
    ]


def run(
    ranks: list[EarlyReports], *requests: list[Any], step: int = STEP
) -> dict[str, list[bytes]]:
    """Let each stage see its requests in a step; return what the last one tells."""
    sent = None
    for rank, seen in zip(ranks, requests, strict=True):
        rank.begin(sent)
        rank.add([(one, step) for one in seen])
        if rank is not ranks[-1]:
            sent = rank.on_board(Activations({"hidden_states": torch.ones(1)}))
    assert sent is None or list(sent.tensors) == ["hidden_states"]  # vLLM meets nothing of ours
    return ranks[-1].take()


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_reports_of_all_stages_come_with_the_last_step(num: int) -> None:
    found = run(stages(num), *[[a_request("one"), a_request("two")]] * num)
    assert {name: len(of) for name, of in found.items()} == {"one": num, "two": num}
    output = SimpleNamespace(kv_transfer_params={"nnsight_pp reports": found["two"]})
    reports = came_home([output, SimpleNamespace(kv_transfer_params=None)])
    assert [one.stage for one in reports["two"]] == list(range(num))
    assert output.kv_transfer_params is None


def test_a_step_that_does_not_end_the_request_tells_nothing() -> None:
    assert run(stages(2), [a_request()], [a_request()], step=STEP - 1) == {}


def test_a_stop_ends_the_request_in_any_step() -> None:
    stopped = a_request()
    stopped.worker.error = EarlyStopException()
    assert list(run(stages(2), [stopped], [stopped], step=0)) == ["one"]


def nothing_asked() -> Any:
    return a_request(last_step=None)


def raised() -> Any:
    one = a_request()
    one.worker.error = ValueError()
    return one


def parked() -> Any:
    return a_request(has_ended=False)


def failed_outside() -> Any:
    return a_request(error=ValueError())


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("other", [nothing_asked, raised, parked, failed_outside])
def test_one_stage_that_has_more_to_say_lets_all_wait(stage: int, other: Any) -> None:
    seen = [[a_request("one"), a_request("two")] for _ in range(3)]
    seen[stage][0] = other()
    assert list(run(stages(3), *seen)) == ["two"]


def test_a_stopped_block_whose_client_asks_waits() -> None:
    stopped = nothing_asked()
    stopped.worker.error = EarlyStopException()
    assert run(stages(1), [stopped]) == {}


@pytest.mark.parametrize(
    "saved",
    [torch.ones(20_000), [torch.ones(1)] * 100, "x" * 200_000, (one for one in ())],
    ids=["large", "many", "long", "cannot be sent"],
)
def test_what_would_hold_up_the_step_waits(saved: Any) -> None:
    assert run(stages(1, saved=saved), [a_request()]) == {}


def test_a_failure_waits() -> None:
    failure = Failure("ValueError", "", None, (), 0, 0)
    assert run(stages(1, failure=failure), [a_request()]) == {}


def test_ranks_that_split_a_layer_are_asked() -> None:
    rank = EarlyReports(Reporting(0), Place(0, 1, 0, 2))  # type: ignore[arg-type]
    rank.begin(None)
    rank.add([(a_request(), STEP)])
    assert rank.take() == {}


def test_nothing_is_left_for_the_next_step() -> None:
    (rank,) = stages(1)
    rank.begin(None)
    rank.add([(a_request(), STEP)])
    rank.begin(None)
    assert rank.take() == {}


def test_bytes_travel_beside_a_few_activations() -> None:
    few, many = ({str(number): torch.ones(1) for number in range(count)} for count in (2, 4))
    sent = with_bytes(Activations(few), b"ours", most_tensors=4)
    assert take_bytes(sent) == b"ours"
    assert sent.tensors == few
    assert take_bytes(sent) is None
    assert take_bytes(with_bytes(Activations(many), b"ours", most_tensors=4)) is None
    assert take_bytes(None) is None


def test_only_what_ends_goes_home() -> None:
    outputs = {
        name: SimpleNamespace(request_id=name, finish_reason=reason, kv_transfer_params=params)
        for name, reason, params in (
            ("ends", "stop", None), ("goes on", None, None), ("another's", "stop", {}),
        )
    }  # fmt: skip
    batch = {0: SimpleNamespace(outputs=list(outputs.values()))}
    sent = send_home(batch, {name: [b"it"] for name in (*outputs, "gone")})
    assert sent == ("ends",)
    assert {name for name, one in outputs.items() if one.kv_transfer_params} == {"ends"}


def test_another_engines_output_is_left_alone() -> None:
    assert with_ended("theirs", ("one",), {"one": [b""]}) == "theirs"
