"""`Envoy`: a node that mirrors a module and turns attribute access into locations.

`model.layers[5].output` walks the tree and asks the running worker for a value. What the node does
not know it looks up on the module, so parameters, settings and methods are where they were.
"""

from __future__ import annotations

import difflib
import weakref
from typing import TYPE_CHECKING, Any

from nnsight_pp.core.location import ROOT, Location
from nnsight_pp.errors import NotSupportedError, UnknownLocationError, explain
from nnsight_pp.interleave.worker import current_worker, running_worker
from nnsight_pp.parallel.lazy import first_input, with_first_input
from nnsight_pp.trace.mount import savable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


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
        self._children: dict[str, Envoy] = {
            name: Envoy(child, f"{path}.{name}", self)
            for name, child in module._modules.items()
            if child is not None
        }

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
        children = self.__dict__.get("_children")
        if children is None:
            raise AttributeError(name)
        if name in children:
            return children[name]
        try:
            value = getattr(self._module, name)
        except AttributeError:
            raise self._unknown(name) from None
        return self.root._attribute_of(self, name, value)

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
            raise AttributeError(f"{self._path} has no child {index!r}")
        child = self._children.get(name)
        if child is None:
            raise self._unknown(f"[{index!r}]")
        return child

    def __iter__(self) -> Iterator[Envoy]:
        return iter(self._children.values())

    def __len__(self) -> int:
        return len(self._module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._children, *dir(self._module)})

    def get(self, path: str) -> Any:
        """Return what stands at the dotted ``path`` below this node."""
        node: Any = self
        for name in path.split("."):
            node = node[name] if isinstance(node, Envoy) and name in node._children else getattr(
                node, name
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

    def _unknown(self, name: str) -> UnknownLocationError:
        known = [*self._children, *self._module._parameters, "output", "input", "inputs"]
        near = difflib.get_close_matches(name.strip("[]'"), known, n=3)
        here = ", ".join(list(self._children)[:12])
        return UnknownLocationError(
            explain(
                f"{type(self).__name__} {self._path!r} ({type(self._module).__name__}) has no "
                f"{name!r}.",
                why=f"Near matches: {', '.join(near)}." if near else f"It has: {here}.",
                todo="`print(model)` shows the whole tree.",
            )
        )

    # -- values --------------------------------------------------------------------------------

    def _read(self, location: Location) -> Any:
        worker = current_worker(location)
        assert worker.turns is not None
        return savable(worker.turns.read(worker, location))

    def _write(self, location: Location, value: Any) -> None:
        worker = current_worker(location)
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
        self._write(self._input, with_first_input(self._read(self._input), value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Inside a block, what runs in this call is not served to anybody."""
        worker = running_worker()
        if worker is None:
            return self._module(*args, **kwargs)
        return self.root._call_from_block(self, args, kwargs)

    def _call_from_block(
        self, node: Envoy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``node`` for a block; the root of a tree decides whether it can."""
        worker = current_worker(node.path)
        raise NotSupportedError(
            explain(
                f"{node.path} was called inside a block.",
                where=worker.where(),
                why="Calls of modules from a block are not supported on this engine yet.",
                todo="Save the value and call the module after the trace.",
            )
        )

    # -- print ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n".join(self._lines("", type(self._module).__name__))

    def _note(self) -> str:
        """Return what `print` adds to this node's line."""
        root = self.root
        return root._note_of(self._path) if root is not self else self._note_of(self._path)

    def _note_of(self, path: str) -> str:
        return ""

    def _lines(self, name: str, kind: str) -> list[str]:
        head = f"({name}): {kind}" if name else kind
        extra = self._module.extra_repr()
        note = self._note()
        note = f"  # {note}" if note else ""
        if not self._children:
            return [f"{head}({extra}){note}"]
        lines = [f"{head}({note}"]
        for label, child in _folded(self._children):
            child_lines = child._lines(label, type(child._module).__name__)
            lines += [f"  {line}" for line in child_lines]
        return [*lines, ")"]


def _folded(children: dict[str, Envoy]) -> Iterator[tuple[str, Envoy]]:
    """Yield children with their labels, runs of alike ones under one label."""
    run: list[tuple[str, Envoy, str]] = []
    for name, child in children.items():
        shape = f"{child._note()} {child._module!r}" if name.isdigit() else ""
        if run and shape and shape == run[-1][2]:
            run.append((name, child, shape))
            continue
        if run:
            yield _label(run)
        run = [(name, child, shape)]
    if run:
        yield _label(run)


def _label(run: list[tuple[str, Envoy, str]]) -> tuple[str, Envoy]:
    first, last = run[0], run[-1]
    return (first[0] if len(run) == 1 else f"{first[0]}-{last[0]}"), first[1]
