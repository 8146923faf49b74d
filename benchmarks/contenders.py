"""Those that are timed side by side. Each does a `Load` and says what it took.

An answer has ``s``, the seconds; ``values``, how many numbers were kept and their mean size, by
which contenders are checked against each other; and on engines what crossed between stages. A
contender that cannot do a load raises `CannotError`.
"""

from __future__ import annotations

import pickle
import statistics
import time
from typing import Any

from benchmarks.loads import BLOCKS, Load, push_of


class CannotError(Exception):
    """This contender has no way to do the load; the text says why."""


def _size_of(values: list[Any]) -> tuple[int, float]:
    """Return how many numbers the tensors hold, and their mean size."""
    count = sum(value.numel() for value in values)
    total = sum(float(value.double().abs().sum()) for value in values)
    return count, total / count if count else 0.0


def _copy_s(tensor: Any) -> float:
    """Return the seconds that a copy of a tensor takes."""
    started = time.perf_counter()
    assert tensor.clone().numel() == tensor.numel()
    return time.perf_counter() - started


class Blocks:
    """This library, on an engine or in this process.

    Args:
        arguments: Of `VLLM`, or of `LanguageModel` where they have ``local``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        import nnsight_pp

        self._is_local = bool(arguments.pop("local", False))
        if self._is_local:
            path = arguments["repo_or_path"]
            self.model: Any = nnsight_pp.LanguageModel(path, dtype="float32", dispatch=True)
            self.model.generation_config = self.model._module.generation_config
        else:
            self.model = nnsight_pp.VLLM(**arguments)
            self.model.dispatch()

    def _options(self, tokens: int) -> dict[str, Any]:
        if not self._is_local:
            return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return {"fn": "generate", "do_sample": False, **length}

    def run(self, load: Load, number: int) -> dict[str, Any]:
        """Do ``load`` on the prompts of sample ``number``."""
        prompts = load.prompts(number)
        if load.kind == "untraced":
            return self._untraced(load, prompts)
        if load.kind == "cross" and self._is_local:
            raise CannotError("it has one stage")
        options = self._options(load.tokens)
        started = time.perf_counter()
        got = BLOCKS[load.kind](self.model, load, prompts, options)
        taken = time.perf_counter() - started
        pulls = [one for _, one in (got["tracer"].statistics or {}).get("pulls", ())]
        return {
            "s": taken,
            "values": _size_of(list(got["values"].values())),
            "link_bytes": sum(one.bytes_received for one in pulls),
            "waited_ms": 1000 * sum(one.waited_s for one in pulls),
        }

    def _untraced(self, load: Load, prompts: list[str]) -> dict[str, Any]:
        if self._is_local:
            raise CannotError("without a block it is the bare module")
        started = time.perf_counter()
        self.model.generate(prompts, **self._options(load.tokens))
        return {"s": time.perf_counter() - started}

    def traces(self, count: int) -> dict[str, Any]:
        """Run that many traces of one token."""
        load = Load("first")
        started = time.perf_counter()
        for number in range(count):
            self.run(load, number)
        return {"s": time.perf_counter() - started}

    def trace_adds(self, count: int) -> dict[str, Any]:
        """Take turns with a trace of one value and a run of one token: the seconds of each."""
        taken: dict[str, list[float]] = {"first": [], "untraced": []}
        for number in range(count):
            for kind in taken if number % 2 else reversed(taken):
                taken[kind].append(self.run(Load(kind, tokens=1), number)["s"])
        return taken

    def collect(self, megabytes: int) -> dict[str, Any]:
        """Save that much: how much longer it takes than saving nothing of it, and a copy of it."""
        model, options = self.model, self._options(1)
        times = (megabytes << 20) // (4 * model.config.hidden_size)
        taken, copied = [], 0.0
        for part in (slice(None), slice(0, 1)):
            started = time.perf_counter()
            kept = _saved(model, options, times, part)
            taken.append(time.perf_counter() - started)
            if part == slice(None):
                copied = statistics.median(_copy_s(kept) for _ in range(3))
        return {"s": taken[0] - taken[1], "copy_s": copied}

    def workload(self, name: str) -> dict[str, Any]:
        """Run a workload of `benchmarks.workloads` on one prompt."""
        from benchmarks.backends import CLEAN, OTHER
        from benchmarks.workloads import WORKLOADS, task_for
        from nnsight_pp import NotSupportedError

        task = task_for(self.model, (CLEAN,), OTHER, tokens=8)
        before = self._traffic()
        started = time.perf_counter()
        try:
            WORKLOADS[name].run(self.model, task)
        except NotSupportedError as error:
            raise CannotError(str(error).partition("\n")[0]) from error
        taken = time.perf_counter() - started
        return {"s": taken, "link_bytes": self._traffic() - before}

    def _traffic(self) -> int:
        if self._is_local:
            return 0
        ranks = self.model.statistics()
        traffic = [rank["traffic"] for rank in ranks if "traffic" in rank]
        return sum(one["bytes_received"] for peers in traffic for one in peers.values())

    def close(self) -> None:
        if not self._is_local:
            self.model.close()


def _saved(model: Any, options: dict[str, Any], times: int, part: slice) -> Any:
    """Save a part of a value. A function: names that a block reads bring what they stood for."""
    with model.trace("The", **options):
        whole = model.layers[0].residual[-1].repeat(times)
        kept = (whole if part == slice(None) else whole[part].clone()).save()
    return kept


class Plain:
    """vLLM itself with `plain_rank`: without hooks it is plain, with them it is the floor."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        from nnsight_pp.engines.vllm import compat, machine

        num_ranks = arguments["pipeline_parallel_size"] * arguments["tensor_parallel_size"]
        own = {"worker_cls": "benchmarks.plain_rank.PlainRank"}
        self._params, self._shut_down = SamplingParams, compat.shut_down
        with (
            machine.engine_environment(),
            machine.cpu_environment(num_ranks),
            machine.hidden_main(),
        ):
            self.llm = LLM(**arguments, **own)
        config = self.llm.llm_engine.vllm_config.model_config
        self._num_layers = config.hf_text_config.num_hidden_layers
        self._hidden = config.get_hidden_size()

    def run(self, load: Load, number: int) -> dict[str, Any]:
        """Do ``load`` on the prompts of sample ``number``."""
        prompts, layers = load.prompts(number), load.indices(self._num_layers)
        tokens = 1 if load.kind == "first" else load.tokens
        params = self._params(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        if load.kind == "cross":
            raise CannotError("no hook of one process sees another's values")
        started = time.perf_counter()
        if load.kind in ("read", "first"):
            self.llm.collective_rpc("bench_read", args=(layers, load.rows == "last"))
        elif load.kind == "steer":
            self.llm.collective_rpc(
                "bench_steer", args=(layers, pickle.dumps(push_of(self._hidden)))
            )
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        if load.kind == "untraced":
            return {"s": time.perf_counter() - started}
        answers = [pickle.loads(one) for one in self.llm.collective_rpc("bench_collect")]
        taken = time.perf_counter() - started
        return {"s": taken, "values": _size_of(self._kept(answers, outputs))}

    @staticmethod
    def _kept(answers: list[Any], outputs: list[Any]) -> list[Any]:
        """Return the tensors that the ranks have kept; each belongs to one of the outputs."""
        import torch

        known = {output.request_id for output in outputs}
        kept = []
        for answer in answers:
            for request, values in answer.items():
                assert request.rpartition("-")[0] in known, request
                kept += [torch.from_numpy(value) for _, value in values]
        return kept

    def close(self) -> None:
        self._shut_down(self.llm)


class Hooks:
    """The Hugging Face model with torch's own hooks."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = arguments["repo_or_path"]
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.eos_token

    def run(self, load: Load, number: int) -> dict[str, Any]:
        """Do ``load`` on the prompts of sample ``number``."""
        import torch

        if load.kind == "cross":
            raise CannotError("it has one stage")
        layers = load.indices(len(self.model.model.layers))
        push = push_of(self.model.config.hidden_size)
        kept: list[Any] = []

        def look(module: Any, args: Any, out: Any) -> None:
            if load.kind == "steer":
                out += push
            else:
                kept.append((out[:, -1:] if load.rows == "last" else out).clone())

        started = time.perf_counter()
        given = self.tokenizer(load.prompts(number), return_tensors="pt", padding=True)
        chosen = [] if load.kind == "untraced" else layers
        handles = [self.model.model.layers[at].register_forward_hook(look) for at in chosen]
        tokens = 1 if load.kind == "first" else load.tokens
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        with torch.no_grad():
            self.model.generate(**given, do_sample=False, pad_token_id=0, **length)
        for handle in handles:
            handle.remove()
        return {"s": time.perf_counter() - started, "values": _size_of(kept)}

    def close(self) -> None:
        pass


class NNsightPeer:
    """nnsight in this process, with its own surface."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import torch
        from nnsight import LanguageModel

        path = arguments["repo_or_path"]
        self.model: Any = LanguageModel(path, dtype=torch.float32, dispatch=True)

    def run(self, load: Load, number: int) -> dict[str, Any]:
        """Do ``load`` on the prompts of sample ``number``, as one batch."""
        import torch

        if load.kind not in ("read", "steer"):
            raise CannotError(f"nothing to compare for {load.kind}")
        model, tokens = self.model, load.tokens
        layers = [model.model.layers[at] for at in load.indices(len(model.model.layers))]
        push = push_of(model.config.hidden_size)
        is_read, is_last = load.kind == "read", load.rows == "last"
        started = time.perf_counter()
        kept: Any = []
        with (
            torch.no_grad(),
            model.generate(
                load.prompts(number), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            ) as tracer,
        ):
            kept = [].save()
            for _ in tracer.iter[:tokens]:
                for layer in layers:
                    if is_read:
                        kept.append(layer.output[:, -1:] if is_last else layer.output)
                    else:
                        layer.output[:] += push
        return {"s": time.perf_counter() - started, "values": _size_of(list(kept))}

    def close(self) -> None:
        pass


CONTENDERS = {"ours": Blocks, "plain": Plain, "hooks": Hooks, "nnsight": NNsightPeer}
