"""What goes wrong on one stage of an engine: said in words, never waited for without a bound.

One engine of two stages, with a short bound on waits and a low limit on answers. After each test
but the last it has nothing left of the request, and serves the next one.
"""

from __future__ import annotations

import builtins
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.backends import GAUGES
from nnsight_pp import (
    VLLM,
    EngineDiedError,
    EngineError,
    OutOfOrderError,
    PullTimeoutError,
    RankDivergenceError,
    RowsError,
    ValueUnavailableError,
)
from nnsight_pp.engines.vllm.schedule import STOP_REASON

PROMPT = "one two three"
# Above the answer of a short prompt, below that of a long one.
MOST_BYTES = 8192
BOUND_S = 2.0


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path) -> Iterator[VLLM]:
    model = VLLM(
        str(tiny_llama_path),
        pipeline_parallel_size=2,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=64 << 20,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNSIGHT_PP_PULL_TIMEOUT_S", str(BOUND_S))
        patch.setenv("NNSIGHT_PP_MOST_PULL_BYTES", str(MOST_BYTES))
        try:
            yield model.dispatch()
        finally:
            model.close()


@pytest.fixture
def pids(model: VLLM) -> list[int]:
    """The processes of the ranks, by stage."""
    return [pickle.loads(answer)[1] for answer in model._call("nnsight_describe")]


def values_of(model: VLLM) -> list[Any]:
    """Return an early and a late value that a late one is made of."""
    layers = list(model.model.layers)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        early = layers[0].mlp.output
        layers[3].mlp.output[-1] += early[-1]
        found = [early[-1].clone(), layers[3].mlp.output[-1].clone()].save()
    return found


def at_line(error: BaseException) -> str:
    """Return the line of the block at which ``error`` was raised."""
    found = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == __file__]
    return found[-1].line or ""


@pytest.fixture(autouse=True)
def it_serves_the_next(model: VLLM) -> Iterator[None]:
    before = values_of(model)
    yield
    if not model.dispatched:
        return
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        go_on_again()
    for rank in model.statistics():
        assert {name: rank[name] for name in GAUGES if rank.get(name)} == {}
    after = values_of(model)
    assert all(one.equal(two) for one, two in zip(before, after, strict=True))


# ---- a link that stalls ------------------------------------------------------------------------


def of_class(name: str) -> Any:
    """Return the one object of a class of this process, whatever module it is in."""
    gc.unfreeze()  # what a rank holds since its start is on no list else
    # A block's own `type` looks at the value that a lazy one stands for; some are over.
    (found,) = [one for one in gc.get_objects() if builtins.type(one).__name__ == name]
    gc.freeze()
    return found


def stall(questions_only: bool) -> None:
    """Answer no pull of this process any more; with all, let its reader stand still as well."""
    table, go_on = of_class("Publications"), threading.Event()
    ask = table.ask

    def lose(question: Any, reply: Any) -> None:
        if question.kind == "standing" and questions_only:
            ask(question, reply)
        elif not questions_only:
            go_on.wait(60)
            ask(question, reply)

    table.ask = lose
    table.stalled = go_on


def go_on_again() -> None:
    table = of_class("Publications")
    if "ask" in vars(table):
        del table.ask
        table.stalled.set()


@pytest.mark.parametrize(
    ("questions_only", "said"), [(True, "closed, parked on Step 3"), (False, "no answer")]
)
def test_a_link_that_stalls_is_an_error_with_a_table(
    model: VLLM, pids: list[int], questions_only: bool, said: str
) -> None:
    layers = list(model.model.layers)
    started = time.monotonic()
    with pytest.raises(PullTimeoutError) as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
            for step in tracer.iter[:4]:
                early = layers[0].mlp.output
                if step == 2 and os.getpid() == pids[0]:
                    stall(questions_only)
                late = layers[2].mlp.output
                late[-1] += early[-1]
    assert time.monotonic() - started < 30
    text = str(caught.value)
    place = "model.model.layers.0.mlp.output#2"
    assert text.startswith(f"Stage 0 did not answer for {place} within 2 s")
    (row,) = [line for line in text.splitlines() if line.startswith("  step 2")]
    _, owner, waiting = [cell.strip() for cell in row.split("|")]
    assert owner == said
    assert waiting.startswith(f"open, waits for {place} of stage 0")
    assert waiting.endswith("<-- waiting here")
    assert at_line(caught.value) == "late[-1] += early[-1]"


# ---- answers that cannot be given --------------------------------------------------------------


def test_an_answer_above_the_limit_is_refused_and_a_part_of_it_is_not(model: VLLM) -> None:
    layers = list(model.model.layers)
    prompt = "a long prompt of many words " * 6
    with pytest.raises(ValueUnavailableError, match=r"above the limit of 8192") as caught:
        with model.trace(prompt, temperature=0.0, max_tokens=1):
            early = layers[0].mlp.output
            layers[3].mlp.output[:] += early
    assert at_line(caught.value) == "layers[3].mlp.output[:] += early"
    with model.trace(prompt, temperature=0.0, max_tokens=1):
        early = layers[0].mlp.output
        layers[3].mlp.output[-1] += early[-1]
        part = early[-1].save()
    assert part.shape == (128,)


def test_what_cannot_be_pickled_is_refused_by_name(model: VLLM) -> None:
    layers = list(model.model.layers)
    with pytest.raises(ValueUnavailableError, match=r"'held'.*cannot leave the engine.*pickle"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            held = [layers[3].mlp.output, threading.Lock()].save()
    lock = threading.Lock()
    with pytest.raises(Exception, match=r"lock"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            with lock:
                held = layers[3].mlp.output.save()


# ---- errors of one stage alone -----------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1])
def test_a_block_that_raises_on_one_stage_after_another_has_pulled_from_it(
    model: VLLM, pids: list[int], failing: int
) -> None:
    layers = list(model.model.layers)
    seen = []
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
            for step in tracer.iter[:6]:
                early, late = layers[0].mlp.output, layers[3].mlp.output
                seen.append(float(early.sum()) + float(late.sum()))
                step / (os.getpid() != pids[failing] or step < 2)
    assert at_line(caught.value) == "step / (os.getpid() != pids[failing] or step < 2)"


def test_an_error_that_only_an_earlier_stage_sees_ends_its_request(
    model: VLLM, pids: list[int]
) -> None:
    layers = list(model.model.layers)
    with pytest.raises(ZeroDivisionError):
        with model.trace(PROMPT, temperature=0.0, max_tokens=100, ignore_eos=True) as tracer:
            for step in tracer.iter[:100]:
                late = layers[3].mlp.output
                step / (os.getpid() == pids[1] or step < 2)
    (end,) = tracer.statistics["ends"]
    assert (end.finish_reason, end.stop_reason) == ("stop", STOP_REASON)
    assert 3 <= end.num_tokens < 100


def test_a_write_that_does_not_fit_on_its_stage_is_the_error(model: VLLM) -> None:
    layers = list(model.model.layers)
    with pytest.raises(RowsError) as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            for _ in tracer.iter[:3]:
                late = layers[2].mlp.output
                total = float(late.sum())
                layers[3].mlp.output = late[:0] * total
    assert at_line(caught.value) == "layers[3].mlp.output = late[:0] * total"


def test_an_edit_behind_a_wait_for_a_call_is_refused_at_the_line_that_waited(
    model: VLLM,
) -> None:
    layers = list(model.model.layers)
    with pytest.raises(OutOfOrderError, match=r"edited after the block had\swaited") as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            early = layers[0].mlp.output
            total = float(model.model.norm(early).sum())
            early[:] = total
    assert at_line(caught.value) == "total = float(model.model.norm(early).sum())"
    assert "<- here" in str(caught.value)


# ---- ranks that go different ways --------------------------------------------------------------


def test_ranks_that_ask_for_different_values_are_told_at_the_pull(
    model: VLLM, pids: list[int]
) -> None:
    layers = list(model.model.layers)
    with pytest.raises(
        RankDivergenceError, match=r"self_attn\.output where.*mlp\.output"
    ) as caught:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            part = layers[0].mlp if os.getpid() == pids[1] else layers[0].self_attn
            early = part.output
            layers[3].mlp.output[-1] += early[-1]
    assert at_line(caught.value) == "layers[3].mlp.output[-1] += early[-1]"


def test_ranks_that_ask_different_numbers_of_times_are_told_at_the_end(
    model: VLLM, pids: list[int]
) -> None:
    layers = list(model.model.layers)
    with pytest.raises(RankDivergenceError, match="process ids"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            early = layers[0].mlp.output.save()
            if os.getpid() == pids[1]:
                layers[1].mlp.output


def test_the_wall_clock_and_the_order_of_a_set_in_a_block_are_found_out(model: VLLM) -> None:
    layers = list(model.model.layers)
    with pytest.raises(RankDivergenceError, match="time, process ids, and set order"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            row = layers[0].mlp.output[-1]
            for digit in str(time.perf_counter_ns())[-7:]:
                model.model.norm(row) if int(digit) % 2 else layers[0].mlp(row)
            found = row.save()
    with pytest.raises(RankDivergenceError, match="time, process ids, and set order"):
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            row = layers[0].mlp.output[-1]
            for name in {str(number) for number in range(12)}:
                model.model.norm(row) if int(name) % 2 else layers[0].mlp(row)
            found = row.save()


def saves_a_process_id(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        found = os.getpid().save()


def saves_the_wall_clock(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        found = time.time().save()


def saves_what_a_line_took(model: VLLM) -> None:
    layers = list(model.model.layers)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        begun = time.perf_counter()
        total = layers[0].mlp.output.sum()
        found = {"total": total, "took": [time.perf_counter() - begun]}.save()


def saves_a_value_with_a_process_id_in_it(model: VLLM) -> None:
    layers = list(model.model.layers)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        early = layers[0].mlp.output.clone()
        found = (early * os.getpid()).save()


def saves_the_order_of_a_set(model: VLLM) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        found = list({str(number) for number in range(40)}).save()


def saves_in_a_list_from_around_it(model: VLLM) -> None:
    found = []
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        found.append(os.getpid())


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (saves_a_process_id, "found = os.getpid().save()"),
        (saves_the_wall_clock, "found = time.time().save()"),
        (saves_what_a_line_took, 'found = {"total": total, "took"'),
        (saves_a_value_with_a_process_id_in_it, "found = (early * os.getpid()).save()"),
        (saves_the_order_of_a_set, "found = list({str(number)"),
        (saves_in_a_list_from_around_it, "found.append(os.getpid())"),
    ],
)
def test_a_save_that_differs_between_stages_is_not_the_first_stages(
    model: VLLM, run: Callable[[VLLM], None], said: str
) -> None:
    with pytest.raises(RankDivergenceError, match="the saved value 'found'") as caught:
        run(model)
    assert "stage 0 has" in str(caught.value)
    assert "stage 1 has" in str(caught.value)
    assert at_line(caught.value).startswith(said)


def test_what_stages_hold_in_forms_of_their_own_is_saved(model: VLLM) -> None:
    layers = list(model.model.layers)
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):

        class Held:
            def __init__(self, value: Any) -> None:
                self.value = value

        number = float("nan")
        names = {str(one) for one in range(40)}.save()
        early, late = layers[0].mlp.output, layers[3].mlp.output
        found = [number, 1 << 200, frozenset(names), late[0] / 0, {"a": number}].save()
        held = [Held([early.sum().item(), (early / early.norm()).tolist()])].save()
    assert names == {str(one) for one in range(40)}
    assert found[1:3] == [1 << 200, frozenset(names)]
    assert len(held[0].value) == 2


# ---- another vLLM ------------------------------------------------------------------------------


def rename(name: str, flag: Path) -> None:
    """Let this process read vLLM as if it had renamed a field, as long as ``flag`` is there."""
    compat = sys.modules["nnsight_pp.engines.vllm.compat"]
    read = getattr(compat, name)

    def look(*args: Any) -> Any:
        if flag.exists():
            raise AttributeError(f"no attribute {name!r}")
        return read(*args)

    setattr(compat, name, look)


@pytest.fixture
def flag(tmp_path: Path) -> Iterator[Path]:
    flag = tmp_path / "flag"
    yield flag
    flag.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["request_ids", "new_requests", "scheduled", "batch_rows"])
@pytest.mark.parametrize("begins", [0, 2])
def test_a_vllm_that_reads_differently_ends_blocks_and_nothing_else(
    model: VLLM, pids: list[int], flag: Path, name: str, begins: int
) -> None:
    layers = list(model.model.layers)
    options = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    wanted = model.generate("a small river", **options)[0].outputs[0].token_ids
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        rename(name, flag)
    if begins == 0:
        flag.touch()
    said = rf"vLLM 0\.32\.\S+ is not as nnsight_pp knows it.*AttributeError: no attribute '{name}'"
    with pytest.raises(EngineError, match=said):
        with model.trace(**options) as tracer:
            with tracer.invoke("a small river"):
                pass
            with tracer.invoke(PROMPT):
                for step in tracer.iter[:6]:
                    early = layers[0].mlp.output
                    layers[3].mlp.output[-1] += early[-1]
                    if step == begins - 1 and os.getpid() == pids[1]:
                        flag.touch()  # here both stages have begun this step, and not the next
    assert flag.exists()
    (plain,) = model.generate(["a small river"], **options)
    assert plain.outputs[0].token_ids == wanted
    assert model.request_counts() == [0, 0]


# ---- from outside ------------------------------------------------------------------------------


def test_noise_on_the_ports_of_a_rank_changes_nothing(model: VLLM, pids: list[int]) -> None:
    ports = {
        (one.laddr.ip, one.laddr.port)
        for pid in pids
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert ports, "gloo listens"
    for place in ports:
        for noise in (b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(range(256)) * 64, b"\xff" * 5):
            with socket.create_connection(place, timeout=5) as line:
                line.sendall(noise)


def test_a_killed_rank_is_an_error_and_not_a_hang(
    model: VLLM, pids: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed in a step, by a block; then, on a new engine, between two steps. The last test."""
    layers = list(model.model.layers)
    before = values_of(model)
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match="died"):
        with model.trace(temperature=0.0, max_tokens=8, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPT):
                for step in tracer.iter[:8]:
                    late = layers[2].mlp.output
                    if step == 3 and os.getpid() == pids[1]:
                        os.kill(os.getpid(), signal.SIGKILL)
            with tracer.invoke("a small river"):
                for _ in tracer.iter[:8]:
                    total = float(layers[3].mlp.output.sum())
    assert time.monotonic() - started < 60
    with pytest.raises(EngineDiedError, match="died"):
        values_of(model)
    model.close()
    after = values_of(model)
    assert all(one.equal(two) for one, two in zip(before, after, strict=True))
    pid = model.statistics()[0]["pid"]
    os.kill(pid, signal.SIGUSR1)  # prints where it stands, and goes on
    values_of(model)
    printed = capfd.readouterr().err
    assert "most recent call first" in printed
    assert "nnsight_pp workers on stage 0 of 2" in printed
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDiedError, match="died"):
        values_of(model)
    assert time.monotonic() - started < 60
    model.close()
