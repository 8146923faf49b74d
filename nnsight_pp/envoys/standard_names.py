"""Names that mean the same on every engine and architecture: `model.layers[5].residual`.

A root that has them mixes in `StandardNames`. `model.layers` is a list of views of the decoder
layers; each value on them is one row per token of the prompt, ``[T, H]``, without padding. What a
view does not know it looks up on the layer's own node. Where the model has a module that is called
as one of these names, that module is meant.

What stands where is `envoys.architectures`, how it is read and put back `envoys.standard_lens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from nnsight_pp.core.lens import Seen
from nnsight_pp.core.location import ROOT
from nnsight_pp.envoys.architectures import Family, Site, family_of, location_of, site_of
from nnsight_pp.envoys.standard_lens import Flat, Layout, StandardLens
from nnsight_pp.envoys.tree_node import TreeNode
from nnsight_pp.errors import NotSupportedError, UnknownLocationError, explain
from nnsight_pp.interleave.worker import current_worker, running_worker
from nnsight_pp.trace.mount import savable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from nnsight_pp.core.location import Location
    from nnsight_pp.interleave.worker import Worker

_LAYERS = "layers"
_OF_MODEL = frozenset({"embeddings", "final_norm", "logits"})
_ALIASES = {"residual_stream": "residual", "attn_out": "attn.output", "mlp_out": "mlp.output"}
_OF_LAYER = frozenset({"residual", "residual_in", *_ALIASES})
_PARTS = {
    "attn": frozenset({"output", "input", "q", "k", "v", "z"}),
    "mlp": frozenset({"output", "input"}),
}


class StandardNames(TreeNode):
    """The part of a root that knows the standard names.

    `model.embeddings`: the stream that enters the first layer. `model.final_norm`: the stream
    behind the last norm, which goes to the head. `model.logits`: those of the last position.
    """

    if TYPE_CHECKING:

        def _check_worker(self, worker: Worker, location: Location) -> None: ...

    # What a fixed tree has found: by the parts of a name, the location and where it is served.
    _found: dict[tuple[int | None, str, str], tuple[Location, Seen]] | None = None

    def fix_names(self) -> None:
        """Keep what is found from now on: nothing of the tree changes any more."""
        self._found = {}
        if self._is_standard(_LAYERS) and family_of(self) is not None:
            layers = Layers(self, self._family(_LAYERS))
            layers.keep_views()
            self.__dict__[_LAYERS] = layers

    def __getattr__(self, name: str) -> Any:
        if (name == _LAYERS or name in _OF_MODEL) and self._is_standard(name):
            family = self._family(name)
            return Layers(self, family) if name == _LAYERS else read_standard(self, None, "", name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_MODEL and running_worker() is not None and self._is_standard(name):
            write_standard(self, None, "", name, value)
        else:
            super().__setattr__(name, value)

    def _is_standard(self, name: str) -> bool:
        """Whether ``name`` means nothing else on this root."""
        known = self.__dict__
        if "_module" not in known or name in known.get("_children", ()):
            return False
        return not hasattr(known["_module"], name)

    def _family(self, name: str) -> Family:
        """Return the model's family.

        Raises:
            UnknownLocationError: It is not known.
        """
        family = self.__dict__.get("_known_family")
        if family is None:
            family = self._known_family = family_of(self)
        if family is None:
            kind = type(self._module).__name__
            raise UnknownLocationError(
                explain(
                    f"{type(self).__name__} {ROOT!r} ({kind}) has no {name!r}.",
                    why=f"The standard names are not known for the architecture {kind}.",
                    todo="Use `.output` and `.input` of its modules: `print(model)` shows them.",
                )
            )
        return family

    def _layout(self) -> Layout:
        """Return how a tensor of this engine becomes rows of tokens."""
        raise NotImplementedError

    def _rotated(
        self, attn: TreeNode, index: int, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys of a whole prompt, ``[T, N, D]``, with their positions in them.

        Runs where the layer is.
        """
        raise NotImplementedError

    def _run_quietly(self, node: TreeNode, *args: Any) -> Any:
        """Run a module of this process for a block; nothing of it is served."""
        raise NotImplementedError

    def _untrue_names(self) -> Mapping[str, str]:
        """Return why standard names do not mean what they say on this model, by location."""
        raise NotImplementedError


def seen_at(
    root: StandardNames, index: int | None, part: str, name: str, layout: Layout
) -> Seen | None:
    """Return where a standard value of ``root`` is served, and its lens; None without one."""
    sites: dict[tuple[int | None, str, str], Site | None]
    seen: dict[tuple[int | None, str, str], Seen]
    sites = root.__dict__.setdefault("_sites", {})
    # On an engine, where a layout knows nothing of the prompt.
    seen = root.__dict__.setdefault("_seen", {}) if type(layout) is Flat else {}
    key = (index, part, name)
    if key in seen:
        return seen[key]
    if key not in sites:
        sites[key] = site_of(root, root._family(name), index, part, name)
    site = sites[key]
    if site is None:
        return None
    lens = StandardLens(site.pick, layout, site.columns, is_last=name == "logits")
    seen[key] = Seen(site.place, lens)
    return seen[key]


def _known(
    root: StandardNames, index: int | None, part: str, name: str
) -> tuple[Worker, Location, Seen]:
    """Return who asks, for what, and where that is served.

    Raises:
        NotSupportedError: The model's own numbers say that it is something else.
        UnknownLocationError: This architecture has no such value.
    """
    found = root._found
    known = None if found is None else found.get((index, part, name))
    if known is not None:
        return current_worker(known[0]), *known
    location = location_of(index, part, name)
    worker = current_worker(location)
    root._check_worker(worker, location)
    seen = seen_at(root, index, part, name, root._layout())
    kind = type(root._module).__name__
    if seen is None:
        raise UnknownLocationError(
            explain(
                f"{location} is not known for the architecture {kind}.",
                where=worker.where(),
                why="Its modules do not compute this value on its own.",
                todo="Use `.output` and `.input` of its modules: `print(model)` shows them.",
            )
        )
    untrue = root._untrue_names()
    why = untrue.get(str(location)) if untrue else None
    if why is not None:
        raise NotSupportedError(
            explain(
                f"{location} does not mean what it says for the architecture {kind}.",
                where=worker.where(),
                why=why,
                todo=f"Use {seen.place} and its like: `print(model)` shows the modules.",
            )
        )
    if found is not None:
        found[index, part, name] = location, seen
    return worker, location, seen


def read_standard(root: StandardNames, index: int | None, part: str, name: str) -> Any:
    """Return a standard value at the worker's step."""
    worker, location, seen = _known(root, index, part, name)
    assert worker.turns is not None
    return savable(worker.turns.read(worker, location, seen))


def write_standard(
    root: StandardNames, index: int | None, part: str, name: str, value: Any
) -> None:
    """Let the model go on with ``value`` for a standard value."""
    worker, location, seen = _known(root, index, part, name)
    assert worker.turns is not None
    worker.turns.write(worker, location, value, seen)


class View:
    """Something standard in front of a node. What it does not know is the node's."""

    __slots__ = ("_node", "_root", "standard_path")

    def __init__(self, root: StandardNames, node: Any, path: str) -> None:
        object.__setattr__(self, "_root", root)
        object.__setattr__(self, "_node", node)
        # Such as ``layers.5.attn``.
        object.__setattr__(self, "standard_path", path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_node", "_root", "_index", "_part", "_views"):
            raise AttributeError(name)
        return getattr(self._node, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return view_at, (self._root, self.standard_path)  # the root travels as a name

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._node, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, as its node does."""
        return self._node(*args, **kwargs)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._node)})

    def __repr__(self) -> str:
        return f"<{ROOT}.{self.standard_path} of {self._node.path}>\n{self._node!r}"


@final
class Layers(View):
    """The decoder layers, first to last: `model.layers`."""

    __slots__ = ("_views",)

    def __init__(self, root: StandardNames, family: Family) -> None:
        super().__init__(root, root.get(family.layers), _LAYERS)
        object.__setattr__(self, "_views", None)

    def keep_views(self) -> None:
        """Make the view of each layer once."""
        object.__setattr__(self, "_views", self[:])

    def __len__(self) -> int:
        return len(self._node._children)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if self._views is not None and type(index) is int and 0 <= index < len(self._views):
            return self._views[index]
        number = int(index) if isinstance(index, str) else index
        position = number + len(self) if number < 0 else number
        node = self._node[position]  # says what is wrong with the index
        return Layer(self._root, node, f"{_LAYERS}.{position}", position)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self[:])


@final
class Layer(View):
    """One decoder layer.

    `.residual` is the stream behind the layer, `.residual_in` the one that enters it; `.attn` and
    `.mlp` are its two parts. `.residual_stream`, `.attn_out` and `.mlp_out` are other names of
    `.residual`, `.attn.output` and `.mlp.output`.
    """

    __slots__ = ("_index",)

    def __init__(self, root: StandardNames, node: Any, path: str, index: int) -> None:
        super().__init__(root, node, path)
        object.__setattr__(self, "_index", index)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_LAYER:
            return read_standard(self._root, self._index, *_part_and_name(name))
        if name in _PARTS:
            return Part(self, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_LAYER:
            write_standard(self._root, self._index, *_part_and_name(name), value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_OF_LAYER, *_PARTS})


def _part_and_name(name: str) -> tuple[str, str]:
    part, _, own = _ALIASES.get(name, name).rpartition(".")
    return part, own


@final
class Part(View):
    """Attention or the feed-forward part of a layer.

    `.output` is what the part adds to the stream, `.input` the normed stream that it is given.
    Attention has its heads as well, ``[T, heads, head size]``: `.q`, `.k` and `.v` as they are
    projected, before norms of heads and rotary embedding, and `.z`, what goes into the projection
    back to the stream.
    """

    __slots__ = ("_index", "_part")

    def __init__(self, layer: Layer, part: str) -> None:
        module = getattr(layer._root._family(part), part)
        super().__init__(layer._root, layer._node.get(module), f"{layer.standard_path}.{part}")
        object.__setattr__(self, "_index", layer._index)
        object.__setattr__(self, "_part", part)

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS[self._part]:
            return read_standard(self._root, self._index, self._part, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PARTS[self._part]:
            write_standard(self._root, self._index, self._part, name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_PARTS[self._part]})


def view_at(root: Any, path: str) -> Any:
    """Return the view of ``root`` whose `standard_path` is ``path``."""
    view = root.layers
    for name in path.split(".")[1:]:
        view = getattr(view, name) if name in _PARTS else view[name]
    return view
