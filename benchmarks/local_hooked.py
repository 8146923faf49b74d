"""The local rows once more with torch's own hooks, written by hand: what anybody could do."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.local_models import Chain, middle_layer, random_gpt2, smollm2
from benchmarks.local_traced import NEW_TOKENS, NUM_INVOKES, NUM_LAYERS, Row


class HookedRows:
    """Each method stands beside the one of the same name in `TracedRows`."""

    def __init__(self) -> None:
        self.x = torch.zeros(1, 16)

    def idle(self) -> Row:
        """Time hooks that are left on a model and look whether anybody wants a value."""
        return self._with_idle_hooks()

    def unread(self) -> Row:
        """Time the same: a hook that is not wanted."""
        return self._with_idle_hooks()

    def _with_idle_hooks(self) -> Row:
        hooked, bare = Chain(NUM_LAYERS), Chain(NUM_LAYERS)
        wanted: dict[int, Any] = {}
        for layer in hooked.layers:
            layer.register_forward_pre_hook(lambda module, args: wanted.get(id(module)))
            layer.register_forward_hook(lambda module, args, out: wanted.get(id(module)))
        return Row(lambda: hooked(self.x), lambda: bare(self.x), NUM_LAYERS)

    def read(self) -> Row:
        model = Chain(NUM_LAYERS)

        def reading(layers: Any) -> None:
            seen: list[Any] = []

            def keep(module: Any, args: Any, out: Any) -> None:
                seen.append(out)

            handles = [layer.register_forward_hook(keep) for layer in layers]
            model(self.x)
            for handle in handles:
                handle.remove()

        last = model.layers[-1:]
        return Row(lambda: reading(model.layers), lambda: reading(last), NUM_LAYERS - 1)

    def read_and_write(self) -> Row:
        model = Chain(NUM_LAYERS)

        def writing(layers: Any) -> None:
            handles = [layer.register_forward_hook(lambda _, args, out: out) for layer in layers]
            model(self.x)
            for handle in handles:
                handle.remove()

        last = model.layers[-1:]
        return Row(lambda: writing(model.layers), lambda: writing(last), NUM_LAYERS - 1)

    def invoke_rows(self) -> Row:
        return Row(
            self._with_rows(1, NUM_INVOKES).step, self._with_rows(1, 1).step, NUM_INVOKES - 1
        )

    def _with_rows(self, num_layers: int, prompts: int) -> Row:
        """Keep each prompt's own row of each layer."""
        model, bare = Chain(num_layers), Chain(num_layers)
        x, whole = self.x, torch.zeros(prompts, 16)

        def rows() -> None:
            batch = torch.cat([x] * prompts)
            seen: list[Any] = []

            def keep(module: Any, args: Any, out: Any) -> None:
                seen.extend(out.narrow(0, row, 1) for row in range(prompts))

            handles = [layer.register_forward_hook(keep) for layer in model.layers]
            model(batch)
            for handle in handles:
                handle.remove()

        return Row(rows, lambda: bare(whole), prompts * num_layers)

    def one_save(self) -> Row:
        model, bare = Chain(1), Chain(1)

        def saved() -> Any:
            seen: list[Any] = []

            def keep(module: Any, args: Any, out: Any) -> None:
                seen.append(out)

            handle = model.layers[0].register_forward_hook(keep)
            model(self.x)
            handle.remove()
            return seen[0]

        return Row(saved, lambda: bare(self.x), 1)

    def cache(self) -> Row:
        model, bare = Chain(NUM_LAYERS), Chain(NUM_LAYERS)
        names = {id(module): name for name, module in model.named_modules()}

        def cached() -> dict[str, Any]:
            seen: dict[str, Any] = {}

            def keep(module: Any, args: Any, out: Any) -> None:
                seen[names[id(module)]] = out.detach().to("cpu").clone()

            handles = [layer.register_forward_hook(keep) for layer in model.layers]
            model(self.x)
            for handle in handles:
                handle.remove()
            return seen

        return Row(cached, lambda: bare(self.x), NUM_LAYERS)

    def generate_small(self) -> Row:
        return self._generate(*random_gpt2())

    def generate_smollm2(self) -> Row:
        return self._generate(*smollm2())

    def _generate(self, model: Any, _: Any, ids: torch.Tensor) -> Row:
        layer = middle_layer(model)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def generated() -> Any:
            seen: list[Any] = []

            def keep(module: Any, args: Any, out: Any) -> None:
                seen.append(out)

            handle = layer.register_forward_hook(keep)
            with torch.no_grad():
                model.generate(
                    **given,
                    max_new_tokens=NEW_TOKENS,
                    min_new_tokens=NEW_TOKENS,
                    do_sample=False,
                )
            handle.remove()
            return seen

        assert len(generated()) == NEW_TOKENS
        return Row(generated, None, 1)

    def many_small(self) -> Row:
        return self._with_rows(32, 64)

    def many_large(self) -> Row:
        return self._with_rows(32, 256)
