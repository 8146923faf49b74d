"""`Envoy`: a node of the tree, with the values that its module takes and gives.

`model.layers[5].output` walks the tree and asks the running worker for a value. A root runs its
module in this process (`envoys.local_run`); an engine's root overrides what it does otherwise, in
the methods that are asked of the root.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from nnsight_pp.core.location import ROOT
from nnsight_pp.envoys import row_batch
from nnsight_pp.envoys.edits import Edit, EditTracer
from nnsight_pp.envoys.local_run import LocalForest
from nnsight_pp.envoys.older_names import OlderNames
from nnsight_pp.envoys.renaming import Spelling
from nnsight_pp.envoys.tree_node import Forest, TreeNode
from nnsight_pp.envoys.values import Values
from nnsight_pp.errors import NotSupportedError, Where, explain
from nnsight_pp.interleave import nearby
from nnsight_pp.interleave.worker import running_worker
from nnsight_pp.trace.mount import savable
from nnsight_pp.trace.session import Session
from nnsight_pp.trace.tracer import Invocation, Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from nnsight_pp.core.location import Location
    from nnsight_pp.core.protocols import Cut
    from nnsight_pp.envoys.gate import Gate
    from nnsight_pp.interleave.worker import Worker


class Envoy(Values, OlderNames, TreeNode):
    """One module, with the values that it takes and gives, and with runs that start at it.

    Args:
        module: The mirrored module. Its parameters and buffers stay where they are.
        path: Its dotted path.
        parent: The node above, or None at the root.
        interleaver: That of another node, which this one's runs are to be part of.
        rename: Further names for modules below: see `envoys.renaming`.
        envoys: Classes for the nodes below: by module class, by the end of a path, or one for all.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        path: str = ROOT,
        parent: TreeNode | None = None,
        *,
        interleaver: Any = None,
        rename: Mapping[Any, str | list[str]] | None = None,
        envoys: Mapping[Any, type] | type | None = None,
    ) -> None:
        forest: Forest | None = interleaver
        if forest is None and parent is not None:
            forest = parent._forest
        is_first = forest is None
        if forest is None:
            forest = self._new_forest(Spelling(rename, envoys))
        self._set_locations(path)
        self._edits: list[Edit] = []
        super().__init__(module, path, parent, forest)
        if is_first:
            _quicken()
            forest.spelling.bind(self)
            self._install()
        elif interleaver is not None:
            forest.added(self)

    @property
    def _node_class(self) -> type[Envoy]:
        return Envoy

    def _new_forest(self, spelling: Spelling) -> Forest:
        """Return what the nodes below this root will share."""
        return LocalForest(spelling)

    def _install(self) -> None:
        """Put serve points on what the tree mirrors now."""
        self._forest.added(self)

    @property
    def interleaver(self) -> Any:
        """What runs this model's blocks; `.interleaving` says whether one is running."""
        return self._forest

    # -- runs ----------------------------------------------------------------------------------

    def trace(
        self,
        *inputs: Any,
        fn: Callable[..., Any] | str | None = None,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run this module alone on ``inputs``, with the block of the `with` beside it.

        Args:
            *inputs: What it is called with. Without any, `tracer.invoke(...)` gives them.
            fn: What is called instead of the module: a callable, or the name of its method.
            trace: False runs it at once, with the stored edits only, and returns its output.
            **kwargs: Named arguments of the call.
        """
        if not trace:
            self._check_is_local("trace(..., trace=False)")
            return self._run_at_once(fn, inputs, kwargs)
        root = self if self._parent is None else self.root
        return root._trace_from(self, inputs, {"fn": fn, **kwargs})

    def session(self) -> Session:
        """Run several traces as one: what one binds, the next can use; only what is saved stays."""
        self._check_is_local("session")
        return Session()

    def edit(self, *, inplace: bool = False) -> EditTracer:
        """Store the block of the `with`: it runs first in every later run that starts here.

        Used as `with model.edit() as (tracer, edited):`, which leaves this model as it is, or as
        `with model.edit(inplace=True) as tracer:`.
        """
        self._check_is_local("edit")
        twin = self if inplace else type(self).__new__(type(self))
        if not inplace:
            twin.__dict__.update(self.__dict__)
            twin._edits = list(self._edits)
        return EditTracer(twin._edits.append, None if inplace else twin)

    def clear_edits(self) -> None:
        """Forget the blocks stored by `edit` on this node."""
        self._check_is_local("clear_edits")
        self._edits.clear()

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        """Call the module.

        Inside a block, what runs in this call is not served to anybody. With ``hook`` it is, to
        the other blocks of the run.
        """
        if running_worker() is None:
            return self._module(*args, **kwargs)
        if hook:
            return self.root._call_with_hooks(self, args, kwargs)
        return self.root._call_from_block(self, args, kwargs)

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        """Return how many rows one invoke's inputs are, 0 for options only; override it freely."""
        return row_batch.num_rows(*inputs, **kwargs)

    def _batch(self, invokes: list[row_batch.Given], fn: Any) -> row_batch.Given:
        """Make one call's arguments of several invokes' ones; override it freely."""
        return row_batch.join_tensors(invokes, fn)

    def _check_is_local(self, name: str) -> None:
        if not isinstance(self._forest, LocalForest):
            worker = running_worker()
            raise unsupported(
                f"{self.path}.{name} was called.",
                None if worker is None else worker.where(),
                "runs each block with its own request",
                "Put the statements into each trace",
            )

    # -- asked of the root ---------------------------------------------------------------------

    def _trace_from(self, node: Envoy, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a tracer that runs the module of ``node``."""
        fn = kwargs.pop("fn", None)
        return node._tracer_of(fn, inputs, kwargs)

    def _tracer_of(self, fn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer:
        """Return a tracer that calls ``fn``, by default the module, with this node's edits."""

        def run(tracer: Tracer, invocations: list[Invocation]) -> None:
            call = _callee(self, fn)
            known = row_batch.alone(invocations)
            if known is None:
                root = self.root
                known = row_batch.joined(invocations, root._batch_size, root._batch, call)
            self._run_call(call, self._module, *known, invocations)

        return Tracer(run, inputs, kwargs, has_input=bool(inputs) or bool(kwargs))

    def _run_at_once(self, fn: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call with nothing but the stored edits beside it, and return its result."""
        call = _callee(self, fn)
        if running_worker() is not None:  # a block's own call is not part of the run
            return call(*inputs, **kwargs)
        return self._run_call(call, self._module, (inputs, kwargs), [], [])

    def _run_call(
        self,
        call: Callable[..., Any],
        module: torch.nn.Module,
        arguments: row_batch.Given,
        cuts: Sequence[Cut],
        invocations: Sequence[Invocation],
    ) -> Any:
        """Make one call with blocks beside it, this node's edits first; return its result.

        Args:
            call: What is called.
            module: Where the arguments are moved to.
            arguments: The positional and the named ones.
            cuts: How each block sees the call's values.
            invocations: The blocks.
        """
        forest = self._forest
        assert isinstance(forest, LocalForest)
        return forest.run(self, call, module, arguments, (cuts, invocations), self._edits)

    def _check_worker(self, worker: Worker, location: Location) -> None:
        """Raise where ``worker`` does not run beside this tree."""
        if isinstance(self._forest, LocalForest):
            self._forest.check(worker, location)

    def _will_skip(self, location: Location) -> None:
        """Take notice that a call is to be skipped; a root may refuse it."""
        assert isinstance(self._forest, LocalForest)
        self._forest.gate.is_skipping = self._forest.interleaving

    def _gate_of_sources(self) -> Gate:
        """Return what the operations of this tree are offered to."""
        assert isinstance(self._forest, LocalForest)
        return self._forest.gate

    def _call_from_block(self, node: Envoy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``node`` for a block; a run serves only what its own call computes."""
        return node._module(*args, **kwargs)

    def _call_with_hooks(self, node: Envoy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``node`` for a block, and serve what it computes to the others."""
        assert isinstance(self._forest, LocalForest)
        with self._forest.hooking():
            return node._module(*args, **kwargs)


@functools.cache
def _quicken() -> None:
    """Let the blocks of this process come to values without Python, where they can."""
    nearby.quicken(Envoy, {"output": "_output", "inputs": "_input"}, savable)


def _callee(node: Envoy, fn: Callable[..., Any] | str | None) -> Callable[..., Any]:
    if isinstance(fn, str):
        return getattr(node._module, fn)
    return node._module if fn is None else fn


def unsupported(what: str, where: Where | None, why: str, todo: str) -> NotSupportedError:
    """Return the error for a part of the surface that an engine refuses."""
    return NotSupportedError(explain(what, where=where, why=f"This engine {why}.", todo=f"{todo}."))
