"""The local rows with blocks. The same text runs on this library and on nnsight.

A row is a pair: what is timed, and what is taken off it; the difference is divided by a count.
Every block stands in a function that is called again and again, as a sweep does it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.local_models import Chain, middle_layer, random_gpt2, smollm2

NUM_LAYERS = 200
NUM_INVOKES = 64
NEW_TOKENS = 32


class Row(NamedTuple):
    """What is timed, what is taken off, and how many of the things asked about that is."""

    step: Callable[[], object]
    without: Callable[[], object] | None
    count: float
    # Called before each pair, untimed.
    prepare: Callable[[], None] | None = None


class TracedRows:
    """The rows of one library. Each method makes its models and returns its `Row`.

    Args:
        library: `nnsight` or `nnsight_pp`.
        folder: Where `cold_files` has written its files.
    """

    def __init__(self, library: str, folder: Path) -> None:
        self.library = importlib.import_module(library)
        self.folder = folder
        self.x = torch.zeros(1, 16)
        self.rows = torch.zeros(NUM_INVOKES, 16)

    def _chain(self, count: int = NUM_LAYERS) -> tuple[Any, Any]:
        return self._wrapped(Chain(count)), Chain(count)

    def _wrapped(self, module: torch.nn.Module) -> Any:
        """Wrap ``module`` so that several invokes can have rows, which upstream leaves to users."""

        class Joining(self.library.NNsight):
            def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
                return len(inputs[0]) if inputs else 0

            def _batch(self, invokes: list[Any], fn: Any) -> Any:
                return (torch.cat([inputs[0] for inputs, _ in invokes]),), {}

        return Joining(module)

    def idle(self) -> Row:
        model, bare = self._chain()
        x, module = self.x, model._module
        return Row(lambda: module(x), lambda: bare(x), NUM_LAYERS)

    def unread(self) -> Row:
        many, bare = self._chain()
        few, _ = self._chain(1)
        x = self.x

        def last(model: Any) -> None:
            with model.trace(x):
                model.layers[-1].output.save()

        return Row(
            lambda: (last(many), bare.layers[0](x)), lambda: (last(few), bare(x)), NUM_LAYERS
        )

    def read(self) -> Row:
        model, _ = self._chain()
        x = self.x

        def every() -> None:
            with model.trace(x):
                for layer in model.layers:
                    layer.output

        def last() -> None:
            with model.trace(x):
                model.layers[-1].output

        return Row(every, last, NUM_LAYERS - 1)

    def read_and_write(self) -> Row:
        model, _ = self._chain()
        x = self.x

        def every() -> None:
            with model.trace(x):
                for layer in model.layers:
                    layer.output = layer.output

        def last() -> None:
            with model.trace(x):
                layer = model.layers[-1]
                layer.output = layer.output

        return Row(every, last, NUM_LAYERS - 1)

    def invoke(self) -> Row:
        """Time invokes that see the whole batch, which the first one gives."""
        return self._invokes(is_empty=True)

    def invoke_rows(self) -> Row:
        return self._invokes(is_empty=False)

    def _invokes(self, *, is_empty: bool) -> Row:
        model, _ = self._chain(1)
        x = self.x
        given = () if is_empty else (x,)

        def traced(count: int) -> None:
            with model.trace() as tracer:
                with tracer.invoke(x):
                    model.layers[0].output
                for _ in range(count):
                    with tracer.invoke(*given):
                        model.layers[0].output

        return Row(lambda: traced(NUM_INVOKES), lambda: traced(0), NUM_INVOKES)

    def warm_trace(self) -> Row:
        model, bare = self._chain(1)
        x = self.x

        def traced() -> None:
            with model.trace(x):
                _ = 1

        return Row(traced, lambda: bare(x), 1)

    def one_save(self) -> Row:
        model, bare = self._chain(1)
        x = self.x

        def traced() -> Any:
            with model.trace(x):
                out = model.layers[0].output.save()
            return out

        return Row(traced, lambda: bare(x), 1)

    def cold_first(self) -> Row:
        return self._cold("first", warm_up=None)

    def cold_next(self) -> Row:
        return self._cold("next", warm_up="zeroth")

    def _cold(self, files: str, warm_up: str | None) -> Row:
        model, _ = self._chain(4)
        x = self.x
        unread = iter(sorted(self.folder.glob(f"{files}_*.py")))
        kept: list[Any] = []

        def prepare() -> None:
            module = _loaded(next(unread))
            if warm_up is not None:
                getattr(module, warm_up)(model, x)
            kept[:] = [module.first]

        return Row(lambda: kept[0](model, x), lambda: kept[0](model, x), 1, prepare)

    def cache(self) -> Row:
        model, bare = self._chain()
        x = self.x

        def cached() -> None:
            with model.trace(x) as tracer:
                tracer.cache()

        return Row(cached, lambda: bare(x), NUM_LAYERS)

    def generate_small(self) -> Row:
        return self._generate(*random_gpt2())

    def generate_smollm2(self) -> Row:
        return self._generate(*smollm2())

    def _generate(self, module: Any, tokenizer: Any, ids: torch.Tensor) -> Row:
        model = self.library.LanguageModel(module, tokenizer=tokenizer)
        layer = middle_layer(model)

        def generated() -> Any:
            with model.generate(
                ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
            ) as tracer:
                kept = [].save()
                for _ in tracer.iter[:NEW_TOKENS]:
                    kept.append(layer.output)
            return kept

        assert len(generated()) == NEW_TOKENS
        return Row(generated, None, 1)

    def many_small(self) -> Row:
        return self._many(64)

    def many_large(self) -> Row:
        return self._many(256)

    def _many(self, invokes: int) -> Row:
        model, bare = self._chain(32)
        x, whole = self.x, torch.zeros(invokes, 16)

        def traced() -> None:
            with model.trace() as tracer:
                for _ in range(invokes):
                    with tracer.invoke(x):
                        for layer in model.layers:
                            layer.output

        return Row(traced, lambda: bare(whole), invokes * 32)


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
