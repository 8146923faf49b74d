"""`TreeNode`: one place of the tree that mirrors a module.

A node finds its children, its names, and what it does not know on the module itself. One module
object is one node, however many paths lead to it: the first path names it, the others are further
names of the same node (a `Forest` that keeps them apart is for engines that split a model).
"""

from __future__ import annotations

import difflib
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from nnsight_pp.envoys.outline import outline
from nnsight_pp.errors import UnknownLocationError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nnsight_pp.envoys.renaming import Spelling


class Forest:
    """What all nodes of one model share: who mirrors which module, and in which class.

    Args:
        spelling: The names and classes that the user chose.
        is_split: Whether each path has a node of its own, though two hold one module.
    """

    def __init__(self, spelling: Spelling, *, is_split: bool = False) -> None:
        self.spelling = spelling
        self._is_split = is_split
        # Weak: a node holds its children, and nothing holds it from below.
        self._nodes: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # How often a node has been put in; what was gathered before may lack it.
        self.num_changes = 0
        # The asks of the run that is on in this process: a worker with them may use every node.
        self.open_asks: Any = None  # `interleave.asks.Asks`

    @property
    def interleaving(self) -> bool:
        """Whether a run with blocks is on."""
        return False

    def known(self, module: torch.nn.Module) -> Any:
        """Return the node that stands for ``module`` wherever it is held, or None."""
        node = None if self._is_split else self._nodes.get(id(module))
        return node if node is not None and node._module is module else None

    def find(self, module: torch.nn.Module) -> Any:
        """Return a node that mirrors ``module``, or None."""
        node = self._nodes.get(id(module))
        return node if node is not None and node._module is module else None

    def add(self, node: TreeNode) -> None:
        """Let ``node`` stand for its module, unless another does already."""
        if self.find(node._module) is None:
            self._nodes[id(node._module)] = node

    def forget(self, node: TreeNode) -> None:
        """Let ``node`` stand for its module no longer."""
        if self.find(node._module) is node:
            del self._nodes[id(node._module)]

    def added(self, node: TreeNode) -> None:
        """Take notice of a node that was added after the tree was made."""

    @property
    def wraps_strays(self) -> bool:
        """Whether a module that is no registered child gets a node when it is first reached."""
        return not self._is_split


class TreeNode:
    """One module of the tree. `Envoy` adds the values that it takes and gives.

    Args:
        module: The mirrored module.
        path: Its dotted path; the root's is ``model``.
        parent: The node above, or None at the root.
        forest: What the nodes of the model share.
    """

    def __init__(
        self, module: torch.nn.Module, path: str, parent: TreeNode | None, forest: Forest
    ) -> None:
        self._module = module
        self._path = path
        self._parent = None if parent is None else weakref.ref(parent)
        self._forest = forest
        # An AttributeError that a value's getter raised; Python would look the name up instead.
        self._raised: AttributeError | None = None
        # By the module's own names; an attribute of the node may be called `E_<name>`.
        self._children: dict[str, Any] = {}
        # What a further name stands for, as a dotted path from here.
        self._aliases: dict[str, str] = {}
        forest.add(self)
        for name, child in module._modules.items():
            if child is not None:
                self._adopt(name, child)

    def _adopt(self, name: str, module: torch.nn.Module) -> Any:
        """Mirror ``module`` as the child ``name``."""
        before = self._children.get(name)
        if before is not None and before._module is not module:
            for node in before.nodes():
                self._forest.forget(node)
        node = self._forest.known(module)
        if node is None:
            path = f"{self._path}.{name}"
            kind = self._forest.spelling.class_for(module, path) or self._node_class
            node = kind(module, path, self)
        self._children[name] = node
        self._forest.num_changes += 1
        attribute = name
        if is_served(type(self), name):
            attribute = f"E_{name}"
            warnings.warn(
                f"{self._path} has a module named {name!r}, which every node already serves: it "
                f"is reached as `E_{name}`.",
                UserWarning,
                stacklevel=2,
            )
        self.__dict__[attribute] = node
        return node

    @property
    def _node_class(self) -> Any:
        raise NotImplementedError

    # -- where it stands -----------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The dotted path of this module, from ``model``."""
        return self._path

    @property
    def parent(self) -> Any:
        """The node above; None at the root."""
        return None if self._parent is None else self._parent()

    @property
    def root(self) -> Any:
        """The topmost node."""
        node = self
        while node._parent is not None and (above := node._parent()) is not None:
            node = above
        return node

    # -- what it holds -------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__
        if (error := known.get("_raised")) is not None:
            self._raised = None
            raise error
        children: dict[str, Any] | None = known.get("_children")
        if children is None or name.startswith("__"):
            raise AttributeError(name)
        if name in children:
            return children[name]
        try:
            value = getattr(self._module, name)
        except AttributeError as error:
            # A property that fails has more to say than torch's word that it is not there.
            if hasattr(type(self._module), name):
                object.__getattribute__(self._module, name)
            raise unknown(self, name) from error
        if isinstance(value, torch.nn.Module):
            node = self._forest.find(value)
            if node is None and self._forest.wraps_strays:
                node = self._adopt(name, value)
                self._forest.added(node)
            return value if node is None else node
        return self.root._attribute_of(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a weight on the module, and a module on both; all else on this node alone."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        is_module = issubclass(type(value), torch.nn.Module)
        if type(getattr(type(self), name, None)) is property and not is_module:
            object.__setattr__(self, name, value)  # the usual case: a value is written
            return
        if not is_served(type(self), name) and self.root._takes(self, name, value):
            return
        if name in self._module._parameters or name in self._module._buffers:
            setattr(self._module, name, value)
            return
        if not is_module:
            object.__setattr__(self, name, value)
            return
        setattr(self._module, name, value)
        self._forest.added(self._adopt(name, value))

    def _takes(self, node: TreeNode, name: str, value: Any) -> bool:
        """Whether an attribute set on ``node`` needs no place there; a root may refuse it."""
        return False

    def _will_change(self, node: TreeNode, name: str) -> None:
        """Take notice that the method ``name`` is to change the module of ``node``."""

    def _attribute_of(self, node: TreeNode, name: str, value: Any) -> Any:
        """Return ``value``, found on the module of ``node``; a root may refuse it."""
        return value

    def _bind(self, alias: str, node: TreeNode, target: str) -> None:
        """Let ``alias`` be a further name, on this node, of ``node``, which is at ``target``."""
        self.__dict__[alias] = node
        self._aliases[alias] = target

    def look_at(self, module: torch.nn.Module | None) -> None:
        """Mirror ``module`` from now on; None changes nothing."""
        if module is not None:
            self._forest.forget(self)
            self._module = module
            self._forest.add(self)

    def __getitem__(self, index: int | slice | str) -> Any:
        if type(index) is int and (found := self._children.get(str(index))) is not None:
            return found  # the usual case
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
        if child is None and name in self._aliases:
            child = self.__dict__[name]
        if child is None:
            raise unknown(self, f"[{index!r}]", name)
        return child

    def __iter__(self) -> Iterator[Any]:
        return iter(self._children.values())

    def __len__(self) -> int:
        return len(self._module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._module)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._children, *dir(self._module)})

    def get(self, path: str) -> Any:
        """Return what stands at the dotted ``path`` below this node, further names allowed."""
        node: Any = self
        for name in path.split("."):
            is_entry = isinstance(node, TreeNode) and name in node._children
            node = node[name] if is_entry else getattr(node, name)
        return node

    def nodes(self) -> Iterator[Any]:
        """Yield this node and all below it, each once, children before parents."""
        found: list[Any] = []
        self._gather(found)
        return iter(found)

    def _gather(self, found: list[Any]) -> None:
        for child in dict.fromkeys(self._children.values()):
            # Not what this is a second place of. An edited copy has the children of its original.
            if child._path.rpartition(".")[0] == self._path:
                if child._children:
                    child._gather(found)
                else:
                    found.append(child)
        found.append(self)

    def modules(
        self, include_fn: Callable[[Any], bool] | None = None, *, names: bool = False
    ) -> list[Any]:
        """Return the nodes below and including this one, children before parents."""
        chosen = [node for node in self.nodes() if include_fn is None or include_fn(node)]
        return [(node.path, node) for node in chosen] if names else chosen

    def named_modules(self) -> list[tuple[str, Any]]:
        """Return the nodes with their paths, children before parents."""
        return self.modules(names=True)

    # -- where its weights are -----------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the module as `torch.nn.Module.to` does, and return this node."""
        self.root._will_change(self, "to")
        self._module.to(*args, **kwargs)
        return self

    def cpu(self) -> Any:
        """Move the module to the CPU, and return this node."""
        self.root._will_change(self, "cpu")
        self._module.cpu()
        return self

    def cuda(self, device: Any = None) -> Any:
        """Move the module to a GPU, and return this node."""
        self.root._will_change(self, "cuda")
        self._module.cuda(device)
        return self

    @property
    def device(self) -> torch.device | None:
        """Where the first parameter is; None without one."""
        first = next(self._module.parameters(), None)
        return None if first is None else first.device

    @property
    def devices(self) -> set[torch.device]:
        """Everywhere that a parameter is."""
        return {parameter.device for parameter in self._module.parameters()}

    def __repr__(self) -> str:
        return "\n".join(outline(self))

    def _note_of(self, path: str) -> str:
        """Return what `print` adds to the line of ``path``; asked of the root."""
        return ""


def is_served(kind: type, name: str) -> bool:
    """Whether a node of class ``kind`` answers ``name`` itself, whatever it is set to."""
    for one in kind.__mro__:
        if name in one.__dict__:
            return hasattr(type(one.__dict__[name]), "__set__")
    return False


def unknown(node: TreeNode, name: str, wanted: str = "") -> UnknownLocationError:
    """Return the error for a ``name`` that neither ``node`` nor its module knows.

    Args:
        node: The node that was asked.
        name: The name as it was written.
        wanted: What to look for near matches of, where that is not ``name``.
    """
    module = node._module
    known = [*node._children, *node._aliases, *module._parameters, *module._buffers]
    known += ["output", "input", "inputs"]
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
