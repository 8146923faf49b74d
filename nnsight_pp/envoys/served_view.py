"""`eproperty`: a view of a value, as an attribute of the user's own `Envoy` class.

    class Heads(Envoy):
        @eproperty(key="output")
        def heads(self, value):                       # what a block reads
            return value.unflatten(-1, (12, -1))

        @heads.transform
        def heads(self, edited, raw):                 # what goes back when the view was edited
            return edited.flatten(-2)

`@x.postprocess` is its counterpart for an assignment: it turns the assigned value into the one
that the model goes on with.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, final

import torch

from nnsight_pp.core.location import Location

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class eproperty:  # noqa: N801 - it is used like `property`
    """Serve a view of one of a module's values as an attribute of its node.

    Args:
        read: Turns the node and the served value into what a block sees.
        key: Which value: ``output``, ``input`` (which is ``(args, kwargs)``), or a name of its
            own that the user's code serves by `provide`. Default: the name of the attribute.
        description: Shown by `print(model)`.
    """

    def __init__(
        self,
        read: Callable[[Any, Any], Any] | None = None,
        *,
        key: str | None = None,
        description: str | None = None,
    ) -> None:
        self.key = key
        self.description = description
        self.name = ""
        self._read: Callable[[Any, Any], Any] | None = None
        self._postprocess: Callable[[Any, Any], Any] | None = None
        self._transform: Callable[[Any, Any, Any], Any] | None = None
        if read is not None:
            self(read)

    def __call__(self, read: Callable[[Any, Any], Any]) -> eproperty:
        """Take ``read``, where the arguments were given first: `@eproperty(key=...)`."""
        self._read = read
        self.name = self.name or getattr(read, "__name__", "")
        self.__doc__ = read.__doc__
        return self

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def postprocess(self, function: Callable[[Any, Any], Any]) -> eproperty:
        """Turn what a block assigns into what the model goes on with: ``function(node, value)``."""
        self._postprocess = function
        return self

    def transform(self, function: Callable[[Any, Any, Any], Any]) -> eproperty:
        """Turn an edited view into the value that goes back: ``function(node, view, value)``."""
        self._transform = function
        return self

    def provide(self, node: Any, value: Any) -> Any:
        """Serve ``value`` as this attribute of ``node``; return it with the edits of the blocks."""
        return node._offer(self._location(node), value)

    def _location(self, node: Any) -> Location:
        return Location(node.path, self.key or self.name)

    def __get__(self, node: Any, kind: type | None = None) -> Any:
        if node is None:
            return self
        location = self._location(node)
        worker = node._worker(location)
        memo, visit = worker.memo, worker.visit
        if visit is not None and memo is not None and self._transform is not None:
            same = memo.location == location and memo.step == worker.step
            known = visit.view_of(self, node) if same else None
            if known is not None:
                return known[0]
        value = node._read(location)
        assert self._read is not None
        try:
            view = self._read(node, value)
        except AttributeError as error:
            node._raised = error
            raise
        visit = worker.visit
        if self._transform is not None and visit is not None:
            transform = self._transform
            visit.watch(
                self,
                node,
                view,
                _mark(view),
                lambda raw: transform(node, view, raw),
                writes_raw=worker.may_write_raw(self),
            )
        return view

    def __set__(self, node: Any, value: Any) -> None:
        if self._transform is not None:
            worker = node._worker(self._location(node))
            known = None if worker.visit is None else worker.visit.view_of(self, node)
            if known is not None and known[0] is value:  # `node.view += 1` edits and assigns it
                return
        if self._postprocess is not None:
            value = self._postprocess(node, value)
        node._write(self._location(node), value)

    def __str__(self) -> str:
        given = {} if self._read is None else getattr(self._read, "__annotations__", {})
        result = given.get("return")
        named = result if isinstance(result, str) else getattr(result, "__name__", "")
        arrow = f" -> {named.rpartition('.')[2]}" if named else ""
        return f"({self.name}){arrow}: {inspect.cleandoc(self.description or '')}"


def _mark(view: Any) -> int | None:
    """Return what tells an edited view from an untouched one, where something does."""
    return view._version if isinstance(view, torch.Tensor) and not view.is_inference() else None
