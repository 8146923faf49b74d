"""`VLLM`: a model on a vLLM engine, as the user holds it.

The tree is on the meta device, so nothing is loaded until the first run. A trace sends each block
with its request, lets vLLM generate, takes in one report from each stage, merges them, and writes
the saved names into the user's frame.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.config import get_config

from nnsight_pp.core.surroundings import with_usual_device
from nnsight_pp.engines.vllm import compat, machine
from nnsight_pp.engines.vllm.batch import Batch, without_block
from nnsight_pp.engines.vllm.collect import collect
from nnsight_pp.engines.vllm.progress import shown
from nnsight_pp.engines.vllm.prompts import sampling_params
from nnsight_pp.engines.vllm.rank_weights import RankWeights
from nnsight_pp.engines.vllm.root import VLLMTree
from nnsight_pp.engines.vllm.session_values import SessionValues
from nnsight_pp.engines.vllm.stored_edits import StoredEdits
from nnsight_pp.engines.vllm.whole_prompts import ROOM
from nnsight_pp.envoys.edits import EditTracer
from nnsight_pp.errors import (
    ConfigurationError,
    EngineError,
    InternalError,
    NotSupportedError,
    explain,
)
from nnsight_pp.interleave import thread_state
from nnsight_pp.trace.session import Session
from nnsight_pp.trace.tracer import Invocation, Tracer

if TYPE_CHECKING:
    import torch

_WORKER = "nnsight_pp.engines.vllm.rank.RankWorker"
_SCHEDULER = "nnsight_pp.engines.vllm.schedule.TracingScheduler"
_FORCED = {
    # One round of a request at a time: a rank that opens round k knows that all have finished
    # the rounds before it.
    "async_scheduling": False,
    "worker_cls": _WORKER,
    # A block's prompt runs in one step, and a block that is over early ends its request.
    "scheduler_cls": _SCHEDULER,
}


class VLLM(VLLMTree):
    """A model on a vLLM engine, split over pipeline stages.

    Args:
        repo_or_path: A Hugging Face repository name, or a folder.
        pipeline_parallel_size: How many stages the layers are split over.
        tensor_parallel_size: How many ranks split each layer.
        dtype: Of the weights and activations.
        max_model_len: Tokens of the longest sequence. Default: the model's own, at most 4096.
        dispatch: Start the engine now. Default: at the first run.
        **engine_args: Any other argument of `vllm.LLM`.

    Raises:
        ConfigurationError: An engine argument that tracing cannot work with.
        MachineError: Too little memory for the ranks.
    """

    def __init__(
        self,
        repo_or_path: str,
        *,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        dispatch: bool = False,
        **engine_args: Any,
    ) -> None:
        _check_arguments(engine_args, tensor_parallel_size)
        self._num_ranks = pipeline_parallel_size * tensor_parallel_size
        self._arguments = {
            "model": str(repo_or_path),
            "pipeline_parallel_size": pipeline_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,  # the ranks' other words tear the bar
            **engine_args,
            **_FORCED,
        }
        self._llm: LLM | None = None
        self._lock = threading.RLock()  # vLLM's offline engine takes one run at a time
        self._stage_of: dict[str, Any] = {}
        self._stored = StoredEdits()
        self._session = SessionValues(self, self._call)
        self._close_at_exit: Any = None
        # The ranks forget these with their next step, which is not awaited.
        self._came_home: list[str] = []
        with _environment(self._num_ranks):
            length = _max_model_len(self._arguments, max_model_len)
            self._arguments["max_model_len"] = length
            _size_steps(self._arguments, length)
            config = EngineArgs(**self._arguments).create_engine_config()
            self._size_cache(config)
            self._is_compiling = compat.is_compiling(config)
            self._of_model = compat.precision_of(config), pipeline_parallel_size
            module = compat.meta_model(config)
        super().__init__(module, self._own_tokenizer)
        self._weights = RankWeights(lambda: self.dispatch()._llm, self._call, self._lock)
        if dispatch:
            self.dispatch()

    # -- the engine ----------------------------------------------------------------------------

    def _size_cache(self, config: Any) -> None:
        if not compat.IS_CPU:
            return
        machine.check_rotary_kernel(config)
        self._arguments |= machine.latent_attention(config)
        given = self._arguments.get("kv_cache_memory_bytes")
        size = given or machine.kv_cache_bytes(
            config.model_config.hf_text_config,
            self._arguments["pipeline_parallel_size"],
            self._arguments["tensor_parallel_size"],
            self._arguments["max_model_len"],
        )
        machine.check_machine(self._num_ranks, size, is_sized_by_user=given is not None)
        self._arguments["kv_cache_memory_bytes"] = size

    @property
    def dispatched(self) -> bool:
        """Whether the engine is up."""
        return self._llm is not None

    def dispatch(self) -> VLLM:
        """Start the engine, if it is not up yet.

        A model is compiled the first time that it starts so, and found compiled later:
        `docs/explain/compilation.md` has times. ``enforce_eager=True`` leaves compiling out.

        Raises:
            EngineError: It did not start; vLLM's own words are in its output.
        """
        if self._llm is not None:
            return self
        thread_state.load()  # built once here, found by every rank
        doing = "Starting the engine"
        if self._is_compiling:
            doing += " (the model is compiled, and kept for the next start)"
        with (
            _environment(self._num_ranks),
            machine.hidden_main(),
            machine.kept_randomness(),
            shown(doing),
        ):
            try:
                self._llm = LLM(**self._arguments)
            except Exception as error:
                raise EngineError(
                    explain(
                        f"The engine did not start: {error}",
                        why="vLLM's own output above says more; VLLM_LOGGING_LEVEL=INFO shows all.",
                        todo="Check the engine arguments, cores and memory.",
                    )
                ) from error
        # Runs when this object goes, or the process ends.
        self._close_at_exit = weakref.finalize(self, _shut_down, self._llm)
        for answer in self._call("nnsight_describe"):
            _, _, self._stage_of = pickle.loads(answer)
        return self

    def close(self) -> None:
        """End the engine and its processes. The next run would start a new one."""
        if self._llm is not None:
            self._llm = None
            self._close_at_exit()
            self._stage_of = {}

    def __enter__(self) -> VLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_tokenizer(self) -> Any:
        return get_tokenizer(
            self._arguments.get("tokenizer") or self._arguments["model"],
            trust_remote_code=bool(self._arguments.get("trust_remote_code")),
        )

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call ``method`` on every rank; return their answers by rank."""
        if self._llm is None:
            raise ConfigurationError("The engine is not up: run a trace, or call `dispatch()`.")
        answers = self._llm.collective_rpc(method, args=args)
        for rank, answer in enumerate(answers):
            if isinstance(answer, dict) and "error" in answer:
                raise InternalError(f"rank {rank} failed in {method}:\n{answer['error']}")
        return answers

    def statistics(self) -> list[dict[str, Any]]:
        """Return, for each rank, what is alive there and what crossed to it.

        ``tracked`` and ``requests``: requests still known; ``observed``: locations that caches
        look at; ``resumed``: how often a traced request was preempted and computed again, since
        the start; ``workers``: live workers; ``parked``: asks that wait; ``published``: kept
        answers; ``pending``: pulls on their way; ``parcels``: reports of 4 MB or more that were not
        fetched; ``traffic``: pulls and bytes by other stage, since the start.
        """
        with self._lock:
            collect(self._call, [(trace, None) for trace in self._came_home])
            self._came_home = []
            return [pickle.loads(answer) for answer in self._call("nnsight_statistics")]

    def request_counts(self) -> list[int]:
        """Return, for each rank, how many traced requests it still tracks."""
        return [one["tracked"] for one in self.statistics()]

    # -- runs ----------------------------------------------------------------------------------

    def trace(self, *inputs: Any, **options: Any) -> Tracer:
        """Run one prompt, or one for each `tracer.invoke(prompt)`, with blocks beside the model.

        Args:
            *inputs: One prompt: a string, token ids, a tokenizer's output, or a vLLM prompt.
            **options: vLLM's sampling parameters, such as ``temperature`` and ``max_tokens``; and
                ``edits``, the names of the stored edits that run first.

        After the run ``tracer.stats`` is a table of what crossed between stages, by line;
        ``tracer.statistics["pulls"]`` has it by location, a `PullRecord` for each puller, and
        ``tracer.statistics["ends"]`` says how many tokens each request got, and why it ended.
        """

        def run(tracer: Tracer, invocations: list[Invocation]) -> BaseException | None:
            session = self._session if tracer.is_nested and self._session.name else None
            own = {} if inputs else options
            batch = Batch(self, invocations, own, self._stored, session, of_model=self._of_model)
            with self._lock, with_usual_device():
                self.dispatch()
                error = batch.run(self._llm, self._call)
                self._came_home = batch.came_home
            tracer.statistics = {"pulls": batch.pulls, "ends": batch.ends}
            return error

        return Tracer(run, inputs, options, has_input=bool(inputs))

    def generate(self, prompts: Any, **options: Any) -> list[Any]:
        """Generate without a block: what vLLM returns, on the same engine.

        Args:
            prompts: One prompt or a list of them.
            **options: vLLM's sampling parameters, ``lora_request``, and ``edits``, the names of
                stored edits.

        What a stored edit has saved is in ``output.saves``.
        """
        chosen = self._stored.chosen(options.get("edits"))
        adapter = options.get("lora_request")
        own = {k: v for k, v in options.items() if k not in ("edits", "lora_request")}
        params = sampling_params(own, None)
        with self._lock, with_usual_device():
            self.dispatch()
            assert self._llm is not None
            if not chosen:
                return self._llm.generate(prompts, params, lora_request=adapter, use_tqdm=False)
            several = isinstance(prompts, list) and not all(type(one) is int for one in prompts)
            given = [without_block(one) for one in (prompts if several else [prompts])]
            batch = Batch(self, given, options, self._stored, of_model=self._of_model)
            error = batch.run(self._llm, self._call)
        if error is not None:
            raise error
        return batch.outputs

    def edit(self, name: str | None = None, *, inplace: bool | None = None) -> EditTracer:
        """Store the block of the `with`: it runs first in every later request of this model.

        Used as ``with model.edit() as (tracer, edit):``, where ``edit.clear()`` takes it away
        again, or as ``with model.edit(inplace=True) as tracer:``. With a ``name`` it runs only for
        the traces, invokes and generations that ask for it: ``edits=[name]``. What it saves is in
        ``output.saves`` of vLLM's output.

        Raises:
            NotSupportedError: ``inplace=False``.
        """
        if inplace is False:
            raise NotSupportedError(
                explain(
                    "`edit(inplace=False)` was called on an engine.",
                    why="An edited copy of the model would be an engine of its own.",
                    todo="Give the edit a name, and ask for it: `model.trace(..., edits=[name])`.",
                )
            )
        stored = self._stored.new(name)
        return EditTracer(stored.store, None if inplace else stored)

    def session(self) -> Session:
        """Run several traces as one: what one binds, the next can use; only what is saved stays.

        Tensors stay on the ranks meanwhile. A line between the traces that needs one brings it.
        """
        return Session(self._session)

    def clear_edits(self) -> None:
        """Forget the blocks stored by `edit`."""
        self._stored.clear()

    def _note_of(self, path: str) -> str:
        below = [span for name, span in self._stage_of.items() if name.startswith(f"{path}.")]
        span = self._stage_of.get(path)
        if span is None:
            return ""
        # A list of modules is never called, so only what it holds says where it is.
        first, last = (min(below)[0], max(one[1] for one in below)) if below else span
        return f"stage {first}" if first == last else f"stages {first}-{last}"


@contextlib.contextmanager
def _environment(num_ranks: int) -> Any:
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine.engine_environment())
        if compat.IS_CPU:
            stack.enter_context(machine.cpu_environment(num_ranks))
        yield


def _shut_down(llm: LLM) -> None:
    """End the processes of ``llm``. Runs at exit too, when vLLM may have done so already."""
    with contextlib.suppress(Exception):
        compat.shut_down(llm)


def _max_model_len(arguments: dict[str, Any], given: int | None) -> int:
    if given is not None:
        return given
    config = get_config(
        arguments["model"], trust_remote_code=bool(arguments.get("trust_remote_code"))
    )
    text = config.get_text_config()
    return min(getattr(text, "max_position_embeddings", 4096), 4096)


def _size_steps(arguments: dict[str, Any], length: int) -> None:
    """Say how many tokens a step schedules, and how many fit into it with a block's whole prompt.

    A user's own `max_num_batched_tokens` is the former; with `max_num_scheduled_tokens` too, both
    are as they are given.
    """
    budget = arguments.setdefault("max_num_batched_tokens", max(2048, length))
    if "max_num_scheduled_tokens" in arguments:
        return
    arguments["max_num_scheduled_tokens"] = budget
    arguments["max_num_batched_tokens"] = max(budget, length + min(budget, ROOM))


def _check_arguments(engine_args: dict[str, Any], tp_size: int) -> None:
    """Refuse what tracing cannot work with, and what would only end the engine's processes.

    Source: vllm 0.32.0 csrc/cpu/cpu_fused_moe.cpp looks up every expert among the rank's own.
    """
    for name in ("speculative_config", "spec_method", "spec_model"):
        if engine_args.get(name):
            raise ConfigurationError(f"{name} is not supported: a step must sample one token.")
    for name, value in _FORCED.items():
        if name in engine_args and engine_args[name] != value:
            raise ConfigurationError(
                explain(
                    f"{name}={engine_args[name]!r} cannot be used with tracing.",
                    why=f"nnsight_pp needs {name}={value!r}.",
                    todo="Leave the argument out.",
                )
            )
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        raise ConfigurationError(
            explain(
                "VLLM_USE_V2_MODEL_RUNNER asks for vLLM's second model runner.",
                why="Tracing is written for the first one.",
                todo="Unset it, or set it to 0.",
            )
        )
    if engine_args.get("data_parallel_size", 1) != 1:
        raise ConfigurationError("data_parallel_size is not supported.")
    if compat.IS_CPU and tp_size > 1 and engine_args.get("enable_expert_parallel"):
        raise ConfigurationError(
            explain(
                "enable_expert_parallel=True cannot be used on vLLM's CPU backend.",
                why="Its kernel looks for every expert on every rank, and ends the process.",
                todo="Leave it out: tensor_parallel_size then splits each expert.",
            )
        )
