"""`tracer.cache()`: what modules took and gave in a run, kept as it was after every edit.

One entry per visit, in the order in which the modules ended. A kept tensor is a copy: the model
may go on to overwrite its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from nnsight_pp.core.kept import Split
from nnsight_pp.core.location import ROOT, Location
from nnsight_pp.core.report import Elsewhere
from nnsight_pp.core.rows import WholeCut
from nnsight_pp.core.saved import save
from nnsight_pp.core.tree import map_leaves
from nnsight_pp.errors import CacheError, NotSupportedError, explain
from nnsight_pp.interleave.worker import running_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nnsight_pp.core.protocols import Cut
    from nnsight_pp.envoys.envoy import Envoy
    from nnsight_pp.envoys.tree_node import TreeNode
    from nnsight_pp.interleave.worker import Worker


_CPU = torch.device("cpu")
_new_tuple = tuple.__new__  # a named tuple's own `__new__` takes three times as long


class Entry(NamedTuple):
    """One visit of one module; None stands for what was not asked for."""

    output: Any
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None


@final
class Cache:
    """What one block keeps.

    Args:
        model: The root of the tree.
        worker: The block's worker; the cache sees the rows that it sees.
        modules: Nodes or paths; all by default. A path that is nowhere is left out.
        options: The arguments of `tracer.cache`.
        owns: On an engine, whether a location is computed on this rank; it keeps only these.

    Raises:
        CacheError: The block has read or written a value already.
    """

    def __init__(
        self,
        model: Envoy,
        worker: Worker,
        modules: Sequence[Any] | None,
        options: dict[str, Any],
        owns: Callable[[Location], bool] | None = None,
    ) -> None:
        if worker.asked:
            raise CacheError(
                explain(
                    "A cache must be made before reading or modifying any value in its block.",
                    where=worker.where(),
                    why="What the model has computed by now would be missing from it.",
                    todo="Make `tracer.cache()` the first statement of the block.",
                )
            )
        known = model._all_outputs()
        if modules is not None:
            chosen = [_path_of(model, one) for one in modules]
            known = {path: known[path] for path in chosen if path in known}
        self.model: TreeNode | None = model
        self.entries: dict[str, list[Entry]] = {}
        self._outputs: Mapping[str, Location] = known
        self._options = options
        self._owns = owns
        # Where a rank keeps it, nothing can be read: the rest is on other ranks.
        self.is_part = owns is not None
        cut = worker.cut
        self._cut_of: Callable[[], Cut | None] = (
            (lambda: cut) if owns is None else partial(getattr, worker, "cut")
        )
        # With the default options a tensor of the CPU is copied, and that is all.
        self._is_plain = (
            options["detach"] and options["dtype"] is None and options["device"] in ("cpu", _CPU)
        )
        # Whether a visit is one such copy of the value itself.
        self.is_simple = (
            self._is_plain
            and options["include_output"]
            and not options["include_inputs"]
            and owns is None
            and type(cut) is WholeCut
        )

    def view(self) -> CacheView:
        """Return what the block holds of it, saved."""
        return save(CacheView(self, ""))

    def observers(self) -> list[tuple[Location, Callable[[Any], None]]]:
        """Return what is to be called with the value of each location."""
        takes_inputs = self._options["include_inputs"]
        if not takes_inputs and self._owns is None:  # the usual case
            return [(out, partial(_given, self, path)) for path, out in self._outputs.items()]
        found: list[tuple[Location, Callable[[Any], None]]] = []
        for path, out in self._outputs.items():
            taken: list[Any] = []
            into = Location(path, "input")
            takes = takes_inputs and self._has(into)
            if takes:
                found.append((into, _Taking(self, taken)))
            if takes or self._has(out):
                found.append((out, _Giving(self, path, taken)))
        return found

    def _has(self, location: Location) -> bool:
        return self._owns is None or self._owns(location)

    def keep(self, value: Any) -> Any:
        """Return a copy of this block's share of ``value``, where the options want it."""
        cut = self._cut_of()
        assert cut is not None
        given = cut.give(value)
        if type(given) is torch.Tensor:  # the usual case
            return self._copied(given)
        return map_leaves(given, self._copied)

    def _copied(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module) and self.is_part:
            return f"<{type(leaf).__name__}>"  # it stays where it is
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._is_plain and not leaf.requires_grad and leaf.device.type == "cpu":
            return leaf.clone()
        given = self._options
        if given["detach"]:
            leaf = leaf.detach()
        is_cast = given["dtype"] is not None and leaf.is_floating_point()
        moved = leaf.to(
            device=given["device"],
            dtype=given["dtype"] if is_cast else None,
            non_blocking=given["non_blocking"],
        )
        return moved.clone() if moved is leaf else moved

    def add(self, path: str, output: Any, inputs: Any) -> None:
        """Note one visit of the module at ``path``."""
        kept: Any = None
        if self._options["include_output"]:
            kept = self.keep(output) if self._has(Location(path, "output")) else Elsewhere()
        if self._options["include_inputs"] and not self._has(Location(path, "input")):
            inputs = Elsewhere()
        self.entries.setdefault(path, []).append(Entry(kept, inputs))

    def add_part(self, entries: dict[str, list[Entry]]) -> None:
        """Add what the next stage has kept; a module that spans stages ends on the last of them."""
        for path, found in entries.items():
            before = self.entries.pop(path, None)
            if before is not None:
                found = [_joined(*pair) for pair in zip(before, found, strict=False)]
            self.entries[path] = found

    def __getstate__(self) -> dict[str, Any]:
        return {"model": None, "entries": self.entries, "is_part": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _joined(one: Entry, other: Entry) -> Entry:
    pairs = zip(one, other, strict=True)
    return Entry(*(b if isinstance(a, Elsewhere) else a for a, b in pairs))


class _Taking:
    """Keeps the inputs of a call until its output comes."""

    __slots__ = ("_cache", "_taken")

    def __init__(self, cache: Cache, taken: list[Any]) -> None:
        self._cache = cache
        self._taken = taken

    def __call__(self, value: Any) -> None:
        self._taken.append(self._cache.keep(value))


class _Giving:
    """Notes a visit when the output of a call has come."""

    __slots__ = ("_cache", "_path", "_taken")

    def __init__(self, cache: Cache, path: str, taken: list[Any]) -> None:
        self._cache = cache
        self._path = path
        self._taken = taken

    def __call__(self, value: Any) -> None:
        # A module that calls itself gives the inner output first.
        self._cache.add(self._path, value, self._taken.pop() if self._taken else None)


def _given(cache: Cache, path: str, value: Any) -> None:
    """Note a visit whose inputs are not wanted."""
    is_tensor = type(value) is torch.Tensor
    if is_tensor and cache.is_simple and not value.requires_grad and value.is_cpu:
        entry = _new_tuple(Entry, (value.clone(), None))
        entries = cache.entries.get(path)
        if entries is None:
            cache.entries[path] = [entry]
        else:
            entries.append(entry)
        return
    cache.add(path, value, None)


@final
class CacheView(Split):
    """A place in a cache: `cache["model.layers.0"].output`, `cache.layers[0].output`."""

    def __init__(self, cache: Cache, path: str) -> None:
        self._whole = cache
        self._path = path

    @property
    def _cache(self) -> Cache:
        """What is looked at.

        Raises:
            NotSupportedError: A block on an engine reads it, while each rank keeps only its own.
        """
        if self._whole.is_part:
            worker = running_worker()
            raise NotSupportedError(
                explain(
                    "A cache was read in its block.",
                    where=None if worker is None else worker.where(),
                    why="On an engine each rank keeps what it computes, and they are joined when "
                    "the request is over.",
                    todo="Read it behind the `with`, or read the values themselves.",
                )
            )
        return self._whole

    def joined(self, parts: Sequence[CacheView]) -> CacheView:
        """Return the cache of which each stage has kept its part."""
        whole = parts[0]._whole
        for part in parts[1:]:
            whole.add_part(part._whole.entries)
        return CacheView(whole, self._path)

    def belongs_to(self, model: TreeNode) -> None:
        """Let names of ``model`` lead through this cache, which comes from an engine."""
        self._whole.model = model

    # -- the values ----------------------------------------------------------------------------

    def _visits(self) -> list[Entry]:
        path = self._path or ROOT
        if path not in self._cache.entries:
            raise KeyError(
                explain(
                    f"{path} is not in the cache.",
                    why=f"It holds {', '.join(self.keys()) or 'nothing'}.",
                    todo="Name it in `tracer.cache(modules=[...])`, if the run calls it at all.",
                )
            )
        return self._cache.entries[path]

    def _values(self, of: Callable[[Entry], Any]) -> Any:
        values = [of(entry) for entry in self._visits()]
        return values[0] if len(values) == 1 else values

    @property
    def output(self) -> Any:
        """What the module returned: one value, or a list where it was called several times."""
        return self._values(lambda entry: entry.output)

    @property
    def inputs(self) -> Any:
        """What the module was called with, ``(args, kwargs)``, once or in a list."""
        return self._values(lambda entry: entry.inputs)

    @property
    def input(self) -> Any:
        """The first argument of each call, None where there was none."""
        return self._values(lambda entry: None if entry.inputs is None else _first(*entry.inputs))

    def __len__(self) -> int:
        """Return the number of visits; of the whole cache, the number of modules."""
        return len(self._visits()) if self._path else len(self._cache.entries)

    def keys(self) -> list[str]:
        """Return the paths of the cached modules at or below this place, in order of execution."""
        return [path for path in self._cache.entries if _is_below(path, self._path)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._found(path) in self._cache.entries

    # -- the way -------------------------------------------------------------------------------

    def __getitem__(self, key: str | int) -> CacheView:
        found = self._found(str(key))
        if not self._holds(found):
            raise KeyError(f"{key!r} is not in the cache, which holds {', '.join(self.keys())}")
        return CacheView(self._cache, found)

    def __getattr__(self, name: str) -> CacheView:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._found(name)
        if not self._holds(found):
            raise AttributeError(f"nothing is cached at or below {found!r}")
        return CacheView(self._cache, found)

    def _found(self, name: str) -> str:
        """Return the path that ``name`` means from here: a path, a child, or a further name."""
        here = self._path
        near = f"{here or ROOT}.{name}"
        if self._holds(near):
            return near
        is_absolute = name.partition(".")[0] == ROOT
        if is_absolute and not here and self._holds(name):
            return name
        node = self._node_at(here, name)
        if node is None and is_absolute:
            node = self._node_at("", name.partition(".")[2])
        if node is not None:
            return node.path
        return name if is_absolute and self._holds(name) else near

    def _holds(self, place: str) -> bool:
        return any(_is_below(path, place) for path in self._cache.entries)

    def _node_at(self, start: str, below: str) -> TreeNode | None:
        """Return the node at ``below``, in any names, from the path ``start``; None without."""
        node: Any = self._cache.model
        if node is None:
            return None
        try:
            for part in [*start.split(".")[1:], *below.split(".")]:
                node = _below(node, part)
        except KeyError:
            return None
        return node

    def save(self) -> CacheView:
        """Return this view, which is saved already."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"_whole": self._whole, "_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        if self._whole.is_part:
            return "CacheView(of one rank)"
        return f"CacheView({self._path or ROOT}: {', '.join(self.keys())})"


def _is_below(path: str, place: str) -> bool:
    return not place or path == place or path.startswith(f"{place}.")


def _below(node: Any, part: str) -> Any:
    found = node._children.get(part)
    if found is None and part in node._aliases:
        found = node.__dict__[part]
    if found is None:
        raise KeyError(part)
    return found


def _path_of(model: TreeNode, module: Any) -> str:
    if not isinstance(module, str):
        return module.path
    try:
        return model.get(module.removeprefix(f"{ROOT}.")).path if module != ROOT else ROOT
    except (AttributeError, ValueError):
        return module


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next(iter((*args, *kwargs.values())), None)
