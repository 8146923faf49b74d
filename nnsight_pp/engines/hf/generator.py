"""What `generate` hands out on its way: each step's tokens, and the finished ids.

transformers gives a streamer the prompt and then one token per step. The one here is a module, so
that `model.generator.streamer.output` is a location like any other.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tqdm.auto import tqdm

from nnsight_pp.envoys.envoy import Envoy
from nnsight_pp.errors import NNsightDeprecationWarning, NotSupportedError, explain

if TYPE_CHECKING:
    from collections.abc import Callable

# A bar is worth showing when the generation takes longer than this.
_LONG_S = 3.0


class _Passing(torch.nn.Module):
    """Returns what it is given; its serve point is all that matters."""

    def forward(self, value: Any) -> Any:
        return value


class Streamer(_Passing):
    """Takes the tokens of each step from transformers' `generate`, the prompt first."""

    def __init__(self) -> None:
        super().__init__()
        self._also: Any = None
        self._bar: Any = None

    def start(self, num_steps: int | None, also: Any) -> None:
        """Get ready for a generation of at most ``num_steps`` tokens.

        Args:
            num_steps: For the progress bar, which shows on a terminal only.
            also: A streamer of the user's, which is given the same.
        """
        self._also = also
        self._bar = tqdm(
            desc="Generating", total=num_steps, unit="token", delay=_LONG_S, leave=False,
            disable=None,
        )  # fmt: skip

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt's ids, or one step's tokens ``[B]``."""
        value = self(value)
        if self._also is not None:
            self._also.put(value)
        if self._bar is not None:
            self._bar.update(1)

    def end(self) -> None:
        """Take note that the last token has come."""
        if self._also is not None:
            self._also.end()
        self.stop()

    def stop(self) -> None:
        """Let go of the bar and of the user's streamer."""
        bar, self._bar, self._also = self._bar, None, None
        if bar is not None:
            bar.close()


class Generator(_Passing):
    """Stands at `model.generator`; the finished ids pass through it."""

    def __init__(self) -> None:
        super().__init__()
        self.streamer = Streamer()


class GeneratorEnvoy(Envoy):
    """`model.generator`. Its `.streamer.output` is each step's tokens."""

    @property
    def output(self) -> Any:
        """The finished ids. Deprecated: use `tracer.result`."""
        _warn()
        return self._read(self._output)

    @output.setter
    def output(self, value: Any) -> None:
        _warn()
        self._write(self._output, value)


def _warn() -> None:
    warnings.warn(
        "`model.generator.output` is deprecated: use tracer.result.",
        NNsightDeprecationWarning,
        stacklevel=3,
    )


def generating(module: Any, finished: Generator, pad_token: int | None) -> Callable[..., Any]:
    """Return the `generate` of ``module``, which hands its tokens to ``finished`` on the way.

    Args:
        module: The model.
        finished: Takes each step's tokens, then the ids.
        pad_token: Fills rows that end early, where the model names no token for that.

    Raises:
        NotSupportedError: The model does not generate.
    """
    if not issubclass(type(module), transformers.GenerationMixin):
        raise NotSupportedError(
            explain(
                f"{type(module).__name__} does not generate.",
                why="It is not a model of transformers that continues text.",
                todo="Use `trace`.",
            )
        )

    def generate(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("generation_config")
        config = module.generation_config if given is None else given
        if given is None and config.pad_token_id is None:
            kwargs.setdefault("pad_token_id", pad_token)
        streamer = finished.streamer
        # transformers refuses a streamer beside a beam search.
        if (kwargs.get("num_beams", config.num_beams) or 1) == 1:
            num_steps = kwargs.get("max_new_tokens", config.max_new_tokens)
            streamer.start(num_steps, kwargs.pop("streamer", None))
            kwargs["streamer"] = streamer
        try:
            return finished(module.generate(*args, **kwargs))
        finally:
            streamer.stop()

    return generate
