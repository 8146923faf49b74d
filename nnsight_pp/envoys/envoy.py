"""`Envoy`: a node that mirrors a module and turns attribute access into locations.

`model.layers[5].output` walks the tree and asks the running worker for a value. What the node does
not know it looks up on the module, so parameters, settings and methods are where they were.
"""

from __future__ import annotations

import difflib
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.core.location import ROOT, Location
from nnsight_pp.envoys.operations import source_of
from nnsight_pp.envoys.outline import outline
from nnsight_pp.errors import NotSupportedError, UnknownLocationError, Where, explain
from nnsight_pp.interleave.worker import current_worker, running_worker
from nnsight_pp.parallel.lazy import first_input, with_first_input
from nnsight_pp.trace.mount import savable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nnsight_pp.envoys.gate import Gate
    from nnsight_pp.envoys.operations import Source
    from nnsight_pp.interleave.worker import Worker

# Names that a node serves or knows itself; a child of such a name is reached as `E_<name>`.
_OWN = ("output", "input", "inputs", "parent", "path", "root", "source")


class Envoy:
    """One module of the tree, with the values that it takes and gives.

    Args:
        module: The mirrored module.
        path: Its dotted path; the root's is ``model``.
        parent: The node above, or None at the root.
    """

    def __init__(self, module: torch.nn.Module, path: str = ROOT, parent: Envoy | None = None):
        self._module = module
        self._path = path
        self._parent = None if parent is None else weakref.ref(parent)
        self._input = Location(path, "input")
        self._output = Location(path, "output")
        # An AttributeError that a value's getter raised; Python would look the name up instead.
        self._raised: AttributeError | None = None
        self._children: dict[str, Envoy] = {}
        for name, child in module._modules.items():
            if child is not None:
                self._adopt(name, child)

    def _adopt(self, name: str, module: torch.nn.Module) -> Envoy:
        node = Envoy(module, f"{self._path}.{name}", self)
        self._children[name] = node
        if name in _OWN:
            warnings.warn(
                f"{self._path} has a module named {name!r}, which every node already serves: it "
                f"is reached as `E_{name}`.",
                UserWarning,
                stacklevel=2,
            )
        return node

    # -- the tree ------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The dotted path of this module, from ``model``."""
        return self._path

    @property
    def parent(self) -> Envoy | None:
        """The node above; None at the root."""
        return None if self._parent is None else self._parent()

    @property
    def root(self) -> Envoy:
        """The topmost node."""
        node = self
        while (above := node.parent) is not None:
            node = above
        return node

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__
        if (error := known.get("_raised")) is not None:
            self._raised = None
            raise error
        children: dict[str, Envoy] | None = known.get("_children")
        if children is None:
            raise AttributeError(name)
        if name in children:
            return children[name]
        if name.startswith("E_") and name[2:] in _OWN and name[2:] in children:
            return children[name[2:]]
        try:
            value = getattr(self._module, name)
        except AttributeError as error:
            # A property that fails has more to say than torch's word that it is not there.
            if hasattr(type(self._module), name):
                object.__getattribute__(self._module, name)
            raise unknown(self, name) from error
        if isinstance(value, torch.nn.Module):
            return next((node for node in self.root.nodes() if node._module is value), value)
        return self.root._attribute_of(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a module on the mirrored module too, and mirror it; else set on this node alone."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        if not hasattr(getattr(type(self), name, None), "__set__"):
            self.root._will_set(self, name)
        if not issubclass(type(value), torch.nn.Module):
            object.__setattr__(self, name, value)
            return
        setattr(self._module, name, value)
        self.root._has_new(self._adopt(name, value))

    def _will_set(self, node: Envoy, name: str) -> None:
        """Take notice of an attribute that is set on ``node``; a root may refuse it."""

    def _has_new(self, node: Envoy) -> None:
        """Take notice of a node that was added to the tree; asked of the root."""

    def _attribute_of(self, node: Envoy, name: str, value: Any) -> Any:
        """Return ``value``, found on the module of ``node``; a root may refuse it."""
        return value

    def look_at(self, module: torch.nn.Module | None) -> None:
        """Mirror ``module`` from now on; None changes nothing."""
        if module is not None:
            self._module = module

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, slice):
            return list(self._children.values())[index]
        if isinstance(index, int) and not isinstance(index, bool):
            position = index + len(self._children) if index < 0 else index
            name = str(position)
        elif isinstance(index, str):
            name = index
        else:
            raise unknown(self, f"[{index!r}]")
        child = self._children.get(name)
        if child is None:
            raise unknown(self, f"[{index!r}]", name)
        return child

    def __iter__(self) -> Iterator[Envoy]:
        return iter(self._children.values())

    def __len__(self) -> int:
        return len(self._module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._module)

    def to(self, *args: Any, **kwargs: Any) -> Envoy:
        """Move or cast the module as `torch.nn.Module.to` does, and return this node."""
        self._module.to(*args, **kwargs)
        return self

    def cpu(self) -> Envoy:
        """Move the module to the CPU, and return this node."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Envoy:
        """Move the module to a GPU, and return this node."""
        self._module.cuda(device)
        return self

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._children, *dir(self._module)})

    def get(self, path: str) -> Any:
        """Return what stands at the dotted ``path`` below this node."""
        node: Any = self
        for name in path.split("."):
            node = (
                node[name]
                if isinstance(node, Envoy) and name in node._children
                else getattr(node, name)
            )
        return node

    def nodes(self) -> Iterator[Envoy]:
        """Yield this node and all below it, children before parents."""
        for child in self._children.values():
            yield from child.nodes()
        yield self

    def modules(
        self, include: Callable[[Envoy], bool] | None = None, *, names: bool = False
    ) -> list[Any]:
        """Return the nodes below and including this one, children before parents."""
        chosen = [node for node in self.nodes() if include is None or include(node)]
        return [(node.path, node) for node in chosen] if names else chosen

    def named_modules(self) -> list[tuple[str, Envoy]]:
        """Return the nodes with their paths, children before parents."""
        return self.modules(names=True)

    # -- values --------------------------------------------------------------------------------

    def _worker(self, location: Location) -> Worker:
        worker = current_worker(location)
        self.root._check_worker(worker, location)
        return worker

    def _check_worker(self, worker: Worker, location: Location) -> None:
        """Raise where ``worker`` does not run beside this tree; asked of the root."""

    def _value(self, location: Location) -> Any:
        worker = self._worker(location)
        assert worker.turns is not None
        return savable(worker.turns.read(worker, location))

    def _read(self, location: Location) -> Any:
        """Return a value, for the getter of a property."""
        try:
            return self._value(location)
        except AttributeError as error:
            self._raised = error
            raise

    def _write(self, location: Location, value: Any) -> None:
        worker = self._worker(location)
        assert worker.turns is not None
        worker.turns.write(worker, location, value)

    @property
    def output(self) -> Any:
        """What the module's forward returns at this step."""
        return self._read(self._output)

    @output.setter
    def output(self, value: Any) -> None:
        self._write(self._output, value)

    @property
    def inputs(self) -> Any:
        """What the module is called with: ``(args, kwargs)``."""
        return self._read(self._input)

    @inputs.setter
    def inputs(self, value: Any) -> None:
        self._write(self._input, value)

    @property
    def input(self) -> Any:
        """The first positional argument of the module, else the first named one."""
        return first_input(self._read(self._input))

    @input.setter
    def input(self, value: Any) -> None:
        self._write(self._input, with_first_input(self._value(self._input), value))

    def skip(self, value: Any) -> None:
        """Do not run the module's forward at this step: ``value`` is its output.

        ``value`` may be computed from the module's own input. In a batch of several prompts every
        block must skip it, each for its own rows.
        """
        location = Location(self.path, "skip")
        self.root._will_skip(location)
        self._write(location, value)

    def _will_skip(self, location: Location) -> None:
        """Take notice that a call is to be skipped; asked of the root, which may refuse it."""
        raise _unsupported(
            f"{location} was called.",
            None,
            "runs every module for all requests of a step at once",
            "Assign to the module's `.output`",
        )

    @property
    def source(self) -> Source:
        """The calls and assignments inside the module's forward. Touch it before the trace."""
        return source_of(self)

    def _gate_of_sources(self) -> Gate:
        """Return what the operations of this tree are offered to; asked of the root."""
        raise _unsupported(
            f"{self.path}.source was asked for.",
            None,
            "runs no rewritten forwards",
            "Read the module's `.input` and `.output`",
        )

    def trace(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run this module alone on ``inputs``, with the block of the `with` beside it."""
        return self.root._trace_from(self, inputs, kwargs)

    def _trace_from(self, node: Envoy, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _unsupported(
            f"{node.path}.trace was called.", None, "runs only the whole model", "Trace the model"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Inside a block, what runs in this call is not served to anybody."""
        worker = running_worker()
        if worker is None:
            return self._module(*args, **kwargs)
        return self.root._call_from_block(self, args, kwargs)

    def _call_from_block(self, node: Envoy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``node`` for a block; the root of a tree decides whether it can."""
        raise _unsupported(
            f"{node.path} was called inside a block.",
            current_worker(node.path).where(),
            "runs no calls of modules from a block yet",
            "Save the value and call the module after the trace",
        )

    def __repr__(self) -> str:
        return "\n".join(outline(self))

    def _note_of(self, path: str) -> str:
        """Return what `print` adds to the line of ``path``; asked of the root."""
        return ""


def unknown(node: Envoy, name: str, wanted: str = "") -> UnknownLocationError:
    """Return the error for a ``name`` that neither ``node`` nor its module knows.

    Args:
        node: The node that was asked.
        name: The name as it was written.
        wanted: What to look for near matches of, where that is not ``name``.
    """
    module = node._module
    known = [*node._children, *module._parameters, *module._buffers, "output", "input", "inputs"]
    near = difflib.get_close_matches(wanted or name, known, n=3)
    shown = ", ".join(list(node._children)[:12]) or "no modules below it"
    more = ", ..." if len(node._children) > 12 else ""
    return UnknownLocationError(
        explain(
            f"{type(node).__name__} {node.path!r} ({type(module).__name__}) has no {name!r}.",
            why=f"Near matches: {', '.join(near)}." if near else f"It has: {shown}{more}.",
            todo="`print(model)` shows the whole tree.",
        )
    )


def _unsupported(what: str, where: Where | None, why: str, todo: str) -> NotSupportedError:
    return NotSupportedError(explain(what, where=where, why=f"This engine {why}.", todo=f"{todo}."))
