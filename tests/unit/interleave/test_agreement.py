"""Two ranks that split the layers: whole values, edits that land, and blocks that differ."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fakes.thread_ranks import (
    FUSED,
    LAST,
    SUMMED,
    TOKENS,
    UNKNOWN,
    WHOLE,
    call,
    read,
    run_split,
    split_rank_of,
    write,
)
from nnsight_pp.errors import NotSupportedError, OutOfOrderError, RankDivergenceError
from nnsight_pp.interleave.worker import current_worker

if TYPE_CHECKING:
    from nnsight_pp.core.location import Location

ROWS = torch.arange(float(TOKENS))[:, None]
PLAIN = ROWS + torch.arange(6.0)


def reads_last(rank: int, out: list[Any]) -> None:
    out.append(read(LAST))


def test_values_are_whole_and_alike_on_both_ranks():
    def block(rank: int, out: list[Any]) -> None:
        out.extend(read(location) for location in (FUSED, WHOLE, SUMMED, LAST))

    ranks, found = run_split({"r": block})
    assert [rank.workers["r"].error for rank in ranks] == [None, None]
    for values in (found[0]["r"], found[1]["r"]):
        assert torch.equal(values[0], 10 * ROWS + torch.arange(6.0))
        assert torch.equal(values[1], PLAIN)
        assert torch.equal(values[2], 3 * PLAIN)


def test_edits_are_split_back_and_a_sum_counts_once():
    def block(rank: int, out: list[Any]) -> None:
        fused = read(FUSED)
        fused[:, 1:5] = -1
        fused[0, 5] = 99
        write(SUMMED, read(SUMMED) + 1)

    ranks, _ = run_split({"plain": reads_last, "r": block})
    first, second = (rank.seen[FUSED] for rank in ranks)
    assert torch.equal(first[TOKENS:, 1:], torch.full((TOKENS, 2), -1.0))
    assert second[TOKENS, 2] == 99
    assert torch.equal(second[TOKENS:, :2], torch.full((TOKENS, 2), -1.0))
    assert torch.equal(first[:TOKENS], 10 * ROWS + torch.tensor([0, 1, 4]))
    total = ranks[0].seen[SUMMED] + ranks[1].seen[SUMMED]
    rows = torch.arange(2.0 * TOKENS)[:, None] + torch.arange(6.0)
    assert torch.equal(total[TOKENS:], 3 * rows[TOKENS:] + 1)
    # The neighbour's summands are the ones that the model has computed.
    assert torch.equal(ranks[1].seen[SUMMED][:TOKENS], 2 * rows[:TOKENS])


def test_untouched_locations_cost_no_collective():
    ranks, _ = run_split({"r": lambda rank, out: None}, num_steps=2)
    # Ten are the model's own. One for taking the request in, one for each step's start, one for
    # its end.
    assert ranks[0].group.num_collectives == 10 + 1 + 2 + 1


def test_a_value_is_joined_once_for_all_who_read_it():
    def counted(num_requests: int) -> int:
        def twice(rank: int, out: list[Any]) -> None:
            out.extend([read(FUSED), read(FUSED)])

        ranks, _ = run_split({f"r{index}": twice for index in range(num_requests)})
        assert [worker.error for worker in ranks[0].workers.values()] == [None] * num_requests
        return ranks[0].group.num_collectives

    # Of the model five, of a request three comparisons, one of all at the location, and the gather.
    assert [counted(one) for one in (1, 2, 3)] == [5 + n * 3 + 1 + 1 for n in (1, 2, 3)]


def test_a_value_that_no_rule_makes_whole_is_refused_at_its_line():
    def block(rank: int, out: list[Any]) -> None:
        try:
            read(UNKNOWN)
        except NotSupportedError as error:
            out.append(str(error))
        out.append(read(LAST))

    ranks, found = run_split({"r": block, "neighbour": reads_last})
    assert "model.unknown.output cannot be made whole" in found[0]["r"][0]
    assert found[0]["r"][0].splitlines()[0] == found[1]["r"][0].splitlines()[0]
    assert all(torch.equal(out["r"][1], PLAIN) for out in found)
    assert all(worker.error is None for rank in ranks for worker in rank.workers.values())


def asks_elsewhere(rank: int, out: list[Any]) -> None:
    read(FUSED)
    read(SUMMED if rank == 0 else LAST)


def asks_from_the_start(rank: int, out: list[Any]) -> None:
    read(FUSED if rank else WHOLE)


def asks_less(rank: int, out: list[Any]) -> None:
    read(WHOLE)
    if rank == 0:
        read(SUMMED)


def writes_its_rank(rank: int, out: list[Any]) -> None:
    read(WHOLE)[0, 0] = os.getpid() + rank


def clears_alone(rank: int, out: list[Any]) -> None:
    value = read(FUSED)
    if rank:
        value[:] = 0


def raises_alone(rank: int, out: list[Any]) -> None:
    read(FUSED)
    if rank == 1:
        raise KeyError("mine")
    read(SUMMED)


def calls_alone(rank: int, out: list[Any]) -> None:
    read(FUSED)
    if rank == 0:
        call("model.whole", PLAIN, lambda value: value + 1)
    read(LAST)


def calls_with_its_own(rank: int, out: list[Any]) -> None:
    read(FUSED)
    call("model.whole", PLAIN + rank, lambda value: value + 1)


def catches_everything(rank: int, out: list[Any]) -> None:
    read(FUSED)
    for location in (SUMMED, UNKNOWN, LAST) if rank else (LAST, LAST, LAST):
        try:
            read(location)
        except Exception as error:
            out.append(error)


def catches_in_a_call(rank: int, out: list[Any]) -> None:
    read(FUSED)
    try:
        if rank == 0:
            call("model.whole", PLAIN, lambda value: value + 1)
    except RankDivergenceError as error:
        out.append(error)
    read(LAST)


DIFFERING = [
    catches_in_a_call,
    asks_elsewhere,
    asks_from_the_start,
    asks_less,
    writes_its_rank,
    clears_alone,
    raises_alone,
    calls_alone,
    calls_with_its_own,
    catches_everything,
]


@pytest.mark.parametrize("block", DIFFERING)
def test_a_block_that_differs_between_ranks_ends_alone(block: Any):
    ranks, found = run_split({"before": reads_last, "r": block, "after": reads_last}, num_steps=2)
    errors = [rank.workers["r"].error for rank in ranks]
    assert isinstance(errors[0], RankDivergenceError)
    assert isinstance(errors[1], KeyError if block is raises_alone else RankDivergenceError)
    assert "tensor-parallel ranks went different ways" in str(errors[0])
    for rank in ranks:
        assert rank.workers["before"].error is None
        assert rank.workers["after"].error is None
        assert rank.turns.statistics() == {"requests": 0, "workers": 0, "parked": 0}
    assert torch.equal(found[0]["after"][0], found[1]["after"][0])


def does_much(rank: int, out: list[Any]) -> None:
    """Read, write and call at each location, as the other rank does."""
    out.append(read(FUSED).clone())
    out.append(call("model.whole", PLAIN, lambda value: value + 1))
    read(WHOLE)[0] += 1
    out.append(call("model.last", PLAIN, lambda value: value + 2))
    read(SUMMED)[1] = 7
    out.append(read(LAST).clone())


def calls_in_another_step(rank: int, out: list[Any]) -> None:
    """Call a module at a location on the one rank and at the next on the other."""
    read(FUSED)
    if rank == 0:
        call("model.whole", PLAIN, lambda value: value + 1)
    read(WHOLE)
    if rank == 1:
        call("model.whole", PLAIN, lambda value: value + 1)
    read(LAST)


@pytest.mark.parametrize("other", [does_much, *DIFFERING, calls_in_another_step])
@pytest.mark.parametrize("block", [*DIFFERING, calls_in_another_step])
def test_blocks_at_one_location_that_differ_end_alone(block: Any, other: Any):
    """Their turns are compared at once: with others, and with one that differs the other way."""

    def swapped(rank: int, out: list[Any]) -> None:
        other(1 - rank, out)

    blocks = {"one": does_much, "r": block, "two": does_much, "s": swapped, "three": does_much}
    ranks, found = run_split(blocks, num_steps=2)
    for name in ("r", "s") if other is not does_much else ("r",):
        errors = [rank.workers[name].error for rank in ranks]
        assert any(isinstance(error, RankDivergenceError) for error in errors)
        assert all(isinstance(error, (RankDivergenceError, KeyError)) for error in errors)
    alone, values = run_split({"one": does_much})
    assert alone[0].workers["one"].error is None
    for name in ("one", "two", "three"):
        assert [rank.workers[name].error for rank in ranks] == [None, None]
        assert len(found[0][name]) == 4
        assert all(map(torch.equal, found[0][name], found[1][name]))
    assert all(map(torch.equal, found[0]["one"], values[0]["one"]))
    for rank in ranks:
        assert rank.turns.statistics() == {"requests": 0, "workers": 0, "parked": 0}
        assert rank.turns.asks.agreement.beside == ()


def _program(drawn: random.Random) -> list[tuple[str, Location]]:
    """Return what a block does at which locations, in the order of the model."""
    doing = ("read", "edit", "write", "call", "fail", "catch")
    return [
        (what, location)
        for location in (FUSED, WHOLE, SUMMED, LAST)
        for what in drawn.choices(doing, (8, 3, 2, 5, 1, 2), k=drawn.randrange(3))
    ]


def _run(program: list[tuple[str, Location]], out: list[Any]) -> None:
    for what, location in program:
        if what == "read":
            out.append(read(location).clone())
        elif what == "edit":
            read(location)[0] += 2
        elif what == "write":
            write(location, read(location) * 3)
        elif what == "call":
            out.append(call(location.path, PLAIN, lambda value: value + 1))
        elif what == "catch":
            try:
                call(location.path, PLAIN, lambda value: value - 1)
            except RankDivergenceError:
                read(LAST)
        else:
            raise KeyError(location)


@pytest.mark.parametrize("seed", range(60))
def test_random_blocks_that_differ_disturb_nobody(seed: int):
    drawn = random.Random(seed)
    programs = {}
    for number in range(6):
        own = _program(drawn)
        programs[f"r{number}"] = (own, own if number % 2 == 0 else _program(drawn))
    blocks = {
        name: lambda rank, out, pair=pair: _run(pair[rank], out) for name, pair in programs.items()
    }
    ranks, found = run_split(blocks, num_steps=2)
    for name, (one, other) in programs.items():
        errors = [type(rank.workers[name].error) for rank in ranks]
        if one == other:
            assert errors[0] is errors[1]
            assert errors[0] in (type(None), KeyError)
            assert all(map(torch.equal, found[0][name], found[1][name]))
        else:
            # A call of the same that gives each rank another value is refused as such.
            assert RankDivergenceError in errors or errors[0] is errors[1] is not type(None)


def test_what_many_have_written_is_compared_in_few_messages():
    def edits(rank: int, out: list[Any]) -> None:
        read(WHOLE)[0] += 2

    def edits_apart(rank: int, out: list[Any]) -> None:
        read(WHOLE)[0] += 2 + 1e-3 * rank

    ranks, _ = run_split({f"r{number}": edits for number in range(40)})
    assert [one.error for one in ranks[0].workers.values()] == [None] * 40
    # Of the model five, of a request three, two for all edits, and one for the value.
    assert ranks[0].group.num_collectives == 5 + 40 * 3 + 2 + 1
    for differing in (0, 35):
        blocks = {
            f"r{number}": edits_apart if number == differing else edits for number in range(40)
        }
        ranks, _ = run_split(blocks)
        for rank in ranks:
            errors = [type(rank.workers[f"r{number}"].error) for number in range(40)]
            assert errors.pop(differing) is RankDivergenceError
            assert errors == [type(None)] * 39


def test_a_value_that_was_alike_is_compared_along_with_the_turns():
    blocks = {"r": reads_last, "s": reads_last, "t": reads_last}
    first, _ = run_split(blocks)
    ranks, found = run_split(blocks, 3, begin={"s": 1, "t": 2})
    assert all(worker.error is None for rank in ranks for worker in rank.workers.values())
    assert torch.equal(found[0]["t"][0], PLAIN + 6)
    # Of the model five a step, and of the three requests what they take beside the value; the value
    # is compared once by itself. Steps after a request's end cost it one each.
    assert first[0].group.num_collectives == 5 + 3 * 3 + 1 + 1
    assert ranks[0].group.num_collectives == 3 * 5 + 3 * 3 + 3 + 1 + (2 + 1)


@pytest.mark.parametrize("how", ["alone", "with others", "in a call", "writes"])
def test_a_value_that_is_no_longer_alike_ends_those_who_had_it(how: str):
    """And the next one is refused at its line, as it is where it never was alike."""

    def uses(rank: int, out: list[Any]) -> None:
        value = read(LAST)
        if how == "in a call":
            call("model.last", PLAIN, lambda given: given + 1)
        elif how == "writes":
            value[0] += 1

    def elsewhere(rank: int, out: list[Any]) -> None:
        out.append(read(WHOLE).clone())

    blocks = {"early": reads_last, "r": uses, "beside": elsewhere, "late": reads_last}
    begin = {"r": 1, "beside": 1, "late": 2}
    if how == "with others":
        blocks |= {"s": reads_last, "t": uses}
        begin |= {"s": 1, "t": 1}
    ranks, found = run_split(blocks, 3, begin=begin, odd=(LAST, 1))
    for rank in ranks:
        errors = {name: type(worker.error) for name, worker in rank.workers.items()}
        assert errors.pop("early") is errors.pop("beside") is type(None)
        assert errors.pop("late") is NotSupportedError
        assert set(errors.values()) == {RankDivergenceError}
        assert "handed" in str(rank.workers["r"].error)
    assert torch.equal(found[0]["beside"][0], found[1]["beside"][0])


def test_an_observer_of_one_rank_alone_goes_with_its_block():
    def block(rank: int, out: list[Any]) -> None:
        read(FUSED)
        if rank == 0:
            worker = current_worker(FUSED)
            worker.note("cache")
            split_rank_of(worker).turns.observers.add([(SUMMED, out.append)], worker)
        read(LAST)

    ranks, found = run_split({"r": block, "after": reads_last})
    assert all(isinstance(rank.workers["r"].error, RankDivergenceError) for rank in ranks)
    assert found[0]["r"] == []
    assert ranks[0].workers["after"].error is None


def test_an_error_that_both_ranks_see_is_raised_as_it_is():
    def block(rank: int, out: list[Any]) -> None:
        read(SUMMED)
        read(FUSED)

    ranks, _ = run_split({"r": block})
    assert all(isinstance(rank.workers["r"].error, OutOfOrderError) for rank in ranks)


def test_a_call_that_gives_each_rank_another_value_is_refused():
    def block(rank: int, out: list[Any]) -> None:
        read(FUSED)
        call("model.whole", PLAIN, lambda value: value * (1 + rank))

    ranks, _ = run_split({"r": block})
    for rank in ranks:
        assert isinstance(rank.workers["r"].error, NotSupportedError)
        assert "not the same on every tensor-parallel rank" in str(rank.workers["r"].error)
