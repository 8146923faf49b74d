"""The process that holds one rank's part of the model.

vLLM builds it from the name in `worker_cls` (vLLM calls these processes workers; here they are
ranks). It is vLLM's own class for the platform, with tracing set up when the model is loaded and
warm, and with the remote calls that the client makes. Remote calls never raise: they answer with a
text under ``error``.

Source: vllm 0.32.0 v1/worker/worker_base.py; v1/executor/multiproc_executor.py:get_response.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.tokenizers import get_tokenizer

from nnsight_pp.core.tree import on_device
from nnsight_pp.engines.vllm import compat
from nnsight_pp.engines.vllm.adapters import leave_other_rows_alone
from nnsight_pp.engines.vllm.forward import add_tracing, end_of_rank
from nnsight_pp.engines.vllm.layers import Noted, num_ids_of, repacked, rules_of, weight_rule
from nnsight_pp.engines.vllm.ledger import Ledger
from nnsight_pp.engines.vllm.names_trial import NamesTrial
from nnsight_pp.engines.vllm.past_edits import PastEdits, behind_caches
from nnsight_pp.engines.vllm.points import Points
from nnsight_pp.engines.vllm.residents import PREFIX, Residents
from nnsight_pp.engines.vllm.root import VLLMTree, object_of
from nnsight_pp.engines.vllm.sent_values import constant_of, host_copy
from nnsight_pp.engines.vllm.shards import Shards
from nnsight_pp.engines.vllm.side import RankSide
from nnsight_pp.engines.vllm.surface import RankSurface
from nnsight_pp.engines.vllm.tensor_group import TensorGroup
from nnsight_pp.envoys.gate import Gate
from nnsight_pp.interleave import extension, thread_state
from nnsight_pp.interleave.clock import StepClock
from nnsight_pp.interleave.interleaver import Interleaver
from nnsight_pp.interleave.serve_order import ShuffledRequests
from nnsight_pp.interleave.stacks import print_on_signal, standing_of
from nnsight_pp.parallel.class_check import give_type_to_functions
from nnsight_pp.parallel.gloo_link import GlooLink, new_group
from nnsight_pp.parallel.joined import Parts
from nnsight_pp.parallel.lazy import LazyRemoteTensor, pick
from nnsight_pp.parallel.owners import StageMap
from nnsight_pp.parallel.publications import Publications
from nnsight_pp.parallel.tensor_of import teach_tensor
from nnsight_pp.trace.gradients import install_backward
from nnsight_pp.trace.mount import mount_save
from nnsight_pp.wire.value_codec import decode, encode, from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.standing import Standing
    from nnsight_pp.envoys.envoy import Envoy
    from nnsight_pp.parallel.parts import Columns
    from nnsight_pp.parallel.place import Place

log = logging.getLogger(__name__)
_NEVER_CALLED = (
    "vLLM uses this module's weights without calling it. `model.logits` holds the logits of a "
    "step, and a module's parent or neighbours hold its inputs and outputs."
)


def _answers(call: Callable[..., Any]) -> Callable[..., Any]:
    """Turn what ``call`` raises into an answer: see the module's text."""

    def answering(*args: Any) -> Any:
        try:
            return call(*args)
        except Exception:
            log.exception("nnsight_pp: a remote call failed")
            return {"error": traceback.format_exc()}

    answering.__name__ = call.__name__
    answering.__doc__ = call.__doc__
    return answering


class _Facts(NamedTuple):
    """What one rank tells the others at load."""

    stage: int
    tp_rank: int
    real: list[str]
    served: list[Location]
    handed_down: dict[str, str]


class _Rank(compat.worker_base()):  # type: ignore[misc]
    """One rank of an engine that traces."""

    nnsight_side: RankSide | None = None
    _stages: StageMap
    _shards: Shards

    def load_model(self, **options: Any) -> Any:
        """Load the model as vLLM does."""
        if compat.IS_CPU and self.vllm_config.lora_config is not None:
            leave_other_rows_alone()
        return super().load_model(**options)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then set up tracing. A collective of all ranks."""
        times = super().compile_or_warm_up_model()
        try:
            self._set_up_tracing()
        except Exception as error:
            if self.vllm_config.parallel_config.world_size > 1:
                end_of_rank("tracing could not be set up on this rank", error)
            raise
        if self.vllm_config.parallel_config.world_size > 1:
            gc.freeze()  # walking over what stays takes 0.4 s; vLLM freezes its own process
        return times

    def _set_up_tracing(self) -> None:
        mount_save()
        install_backward()  # a block's `with loss.backward():` is then refused as it is elsewhere
        switch = thread_state.load()
        place = compat.place_of_this_rank()
        runner = self.model_runner
        model = runner.get_model()
        real = compat.real_modules(model)
        gate = Gate(runs_skipped=True)
        points = Points(real, gate)
        meta = compat.meta_model(self.vllm_config)
        root = VLLMTree(meta, self._load_tokenizer)
        root.gate = gate
        names, noted, handed_down = self._trial(runner, place, points, root)
        self._stages = _stage_map(place, real, noted.order, meta, handed_down)
        whole = compat.module_paths(meta)
        joiner, root.splits = _joiner(place, real, whole, noted)
        self._shards = Shards(place, model, real, whole, joiner)
        is_last = place.stage == place.num_stages - 1
        caching = [path for path, module in real.items() if hasattr(module, "kv_cache")]
        past_edits = PastEdits(behind_caches(noted.order, caching) if is_last else ())
        del noted
        root.joiner = joiner
        root.takes_adapters = self.vllm_config.lora_config is not None
        own = repacked(real, meta, lambda path, name: (path, name) in root.splits)
        root.repacked = frozenset(path for paths in compat.exchange(own) for path in paths)
        with torch.inference_mode(), compat.uncompiled(model):
            untrue = names.untrue(model)
        root.untrue = {key: why for one in compat.exchange(untrue) for key, why in one.items()}
        _hold_real(root, real)
        root.fix_names()
        residents = Residents(root, place.stage)

        def constant(name: str) -> torch.Tensor:
            if name.startswith(PREFIX):
                return residents.tensor(name.removeprefix(PREFIX))
            return constant_of(real, name)

        def object_for(name: tuple[str, Any]) -> Any:
            return residents.give(*name[1]) if name[0] == "kept" else object_of(root, name)

        link = self._link(place, constant, lambda request: standing_of(turns, request))
        turns = Interleaver(
            StepClock(),
            switch,
            stage=place.stage,
            owners=self._stages,
            link=link,
            make_lazy=LazyRemoteTensor,
            snapshot=host_copy,
            joiner=joiner,
            where=str(place),
            arrange=_serve_order(place),
        )
        self._residents = residents
        ledger = Ledger(turns, switch, object_for, place.stage, link, residents, past_edits)
        turns.asks.surface = RankSurface(root, turns, self._stages, place.stage, ledger.fail_worker)
        self.nnsight_side = RankSide(place, turns, ledger, points, link)
        add_tracing(runner, self.nnsight_side, TensorGroup() if place.tp_size > 1 else None)
        print_on_signal(turns.workers, str(place))

    def _trial(
        self, runner: Any, place: Place, points: Points, root: VLLMTree
    ) -> tuple[NamesTrial, Noted, dict[str, str]]:
        """Return what a trial forward says of names, what it serves, and other names of modules."""
        names = NamesTrial(root)
        noted = self._trial_forward(runner, place, points, names.note)
        handed_down = points.settle({location.path for location in noted.order})
        if handed_down:  # these are served under other names now, on every rank of the stage alike
            names = NamesTrial(root)
            noted = self._trial_forward(runner, place, points, names.note)
        return names, noted, handed_down

    def _trial_forward(
        self,
        runner: Any,
        place: Place,
        points: Points,
        see: Callable[[Location, Any], Any],
    ) -> Noted:
        """Run the model once on a dummy token; return what is served here, in order.

        It also makes the buffers that a later stage receives activations in, which vLLM leaves out
        in eager mode (vllm 0.32.0 gpu_model_runner.py:_dummy_run allocates them).
        """
        noted = Noted()

        def note(location: Location, value: Any) -> Any:
            return see(location, noted.serve(location, value))

        points.open(note)
        try:
            with torch.inference_mode(), compat.uncompiled(runner.get_model()):
                hidden, _ = runner._dummy_run(1, is_profile=True)
                if place.stage == place.num_stages - 1:
                    runner.get_model().compute_logits(hidden[:1])
        finally:
            points.shut()
        return noted

    def _link(
        self,
        place: Place,
        constant: Callable[[str], Any],
        standing: Callable[[str], Standing],
    ) -> GlooLink | None:
        if place.num_stages == 1:
            return None
        give_type_to_functions()
        teach_tensor()
        columns = compat.columns()
        group = new_group(columns, compat.this_rank())
        peers = [stage for stage in range(place.num_stages) if stage != place.stage]
        return GlooLink(
            place.stage,
            columns[place.tp_rank],
            group,
            Publications(peers, pick, constant, standing, extension.plain_tensors()),
            encode=encode,
            decode=lambda header, payload: on_device(decode(header, payload), self.device),
            bound_s=float(os.environ.get("NNSIGHT_PP_PULL_TIMEOUT_S", "60")),
            most_bytes=int(os.environ.get("NNSIGHT_PP_MOST_PULL_BYTES", str(2 << 30))),
            ran=str(place),
            sums_alike=compat.IS_CPU,
            casts_copy=self.vllm_config.model_config.dtype.itemsize > torch.float16.itemsize,
        )

    def _load_tokenizer(self) -> Any:
        config = self.vllm_config.model_config
        return get_tokenizer(config.tokenizer, trust_remote_code=config.trust_remote_code)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Decode the blocks of a step before its activations are here, then run it as vLLM does.

        Source: vllm 0.32.0 v1/worker/gpu_worker.py:Worker.execute_model waits for them on CPUs.
        """
        if self.nnsight_side is not None:
            self.nnsight_side.early_blocks.prepare(scheduler_output)
        return super().execute_model(scheduler_output)

    def shutdown(self) -> None:
        """Leave the link, then stop as vLLM does."""
        if self.nnsight_side is not None:
            self.nnsight_side.stop()
        super().shutdown()

    # -- the client's remote calls -------------------------------------------------------------

    def _require_side(self) -> RankSide:
        if self.nnsight_side is None:
            raise RuntimeError("tracing is not set up on this rank")
        return self.nnsight_side

    @_answers
    def nnsight_collect(self, wanted: bytes) -> Any:
        """Return the reports of the traces in ``wanted``."""
        return self._require_side().collect(pickle.loads(wanted))

    @_answers
    def nnsight_fetch(self, is_wanted: bool) -> Any:
        """Drop the report that was too large for an answer; return it where it is wanted."""
        return self._require_side().fetch(is_wanted)

    @_answers
    def nnsight_statistics(self) -> Any:
        """Return what is alive on this rank."""
        kept = {"resident": len(self._residents)}
        return pickle.dumps(self._require_side().statistics() | kept)

    @_answers
    def nnsight_resident(self, wanted: bytes) -> Any:
        """Return a part of a tensor that is kept for a session; nothing where it is not."""
        found = self._residents.part(*from_bytes(wanted))
        return to_bytes(found[0]) if found else b""

    @_answers
    def nnsight_weight(self, wanted: bytes) -> Any:
        """Make a call of `Shards` that reads or edits a weight."""
        self._require_side()
        return self._shards.answer(wanted)

    @_answers
    def nnsight_release(self, session: str) -> Any:
        """Forget what is kept for ``session``."""
        self._require_side()
        self._residents.release(session)
        return b""

    @_answers
    def nnsight_describe(self) -> Any:
        """Return where this rank stands, and which stages own what."""
        side = self._require_side()
        spans = {path: self._stages.span_of(path) for path in self._stages.paths()}
        return pickle.dumps((side.place, os.getpid(), spans))


def _serve_order(place: Place) -> ShuffledRequests | None:
    """Return a shuffled order where tests ask for one. It may differ between stages."""
    seed = os.environ.get("NNSIGHT_PP_SERVE_SEED")
    return ShuffledRequests(f"{seed} {place.stage}") if seed else None


def _stage_map(
    place: Place,
    real: dict[str, torch.nn.Module],
    served: list[Location],
    meta: torch.nn.Module,
    handed_down: dict[str, str],
) -> StageMap:
    """Exchange what is real and what ran on each rank; derive the owner of each path."""
    facts = compat.exchange(_Facts(place.stage, place.tp_rank, sorted(real), served, handed_down))
    leads = sorted((fact for fact in facts if fact.tp_rank == 0), key=lambda fact: fact.stage)
    known = {*compat.module_paths(meta), *(path for fact in facts for path in fact.real)}
    ran = [{location.path for location in fact.served} for fact in leads]
    never = {path for fact in leads for path in fact.real}.difference(*ran)
    silent = dict.fromkeys(never, _NEVER_CALLED) | {
        path: f"It is the module {name}, and is served under that name."
        for fact in leads
        for path, name in fact.handed_down.items()
    }
    return StageMap(
        [fact.real for fact in leads],
        ran,
        sorted(known),
        silent,
        # What a forward meets twice has no one place in its order.
        [[item for item, times in Counter(fact.served).items() if times == 1] for fact in leads],
    )


def _joiner(
    place: Place,
    real: dict[str, torch.nn.Module],
    whole: dict[str, torch.nn.Module],
    noted: Noted,
) -> tuple[Parts | None, dict[tuple[str, str], Columns]]:
    """Return what makes values whole on this rank, and the split weights of every stage.

    The rules that not every rank of the stage has found alike are left out: then the ranks' values
    are compared, and refused.
    """
    if place.tp_size == 1:
        return None, {}
    rules = rules_of(real, whole, noted, place.tp_size)
    weights = {
        (path, name): rule
        for path, module in real.items()
        for name, _ in module.named_parameters(recurse=False)
        if (rule := weight_rule(module, whole.get(path), name, place.tp_size)) is not None
    }
    found = compat.exchange((place.stage, rules, weights))
    peers = [their_rules for stage, their_rules, _ in found if stage == place.stage]
    agreed = {
        location: rule
        for location, rule in rules.items()
        if all(theirs.get(location) == rule for theirs in peers)
    }
    splits = {key: rule for _, _, theirs in found for key, rule in theirs.items()}
    return Parts(TensorGroup(), agreed, num_ids_of(real)), splits


def _hold_real(root: Envoy, real: dict[str, torch.nn.Module]) -> None:
    """Let the nodes of this rank's own modules look at the real ones."""
    for node in root.nodes():
        node.look_at(real.get(node.path))


class RankWorker(_Rank):
    """The name that goes into vLLM's `worker_cls`."""
