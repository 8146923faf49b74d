"""Load a checkpoint twice: its architecture on the meta device, and later the model itself.

The first takes a configuration file and no weights. Both are made from one configuration, so that
what the tree shows before is what runs after.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import TYPE_CHECKING, Any

import torch
import transformers

from nnsight_pp.engines.hf import tasks
from nnsight_pp.errors import ConfigurationError, explain

if TYPE_CHECKING:
    from collections.abc import Iterator

_REPOSITORY_OPTIONS = (
    "revision", "token", "cache_dir", "local_files_only", "subfolder", "gguf_file",
)  # fmt: skip
_AUTO = "auto"


class Checkpoint:
    """A repository or folder, and how it is to be loaded.

    Args:
        repo: Name of the repository, or a folder.
        task: What the model is for. Default: what the configuration names.
        options: Arguments of transformers' `from_pretrained`, ``config`` and ``device`` too.
    """

    def __init__(self, repo: str, task: str | None, options: dict[str, Any]) -> None:
        self.repo = repo
        options = dict(options)
        config = options.pop("config", None)
        dtype = options.pop("torch_dtype", None)
        self._dtype = options.pop("dtype", dtype)
        self._placed = _placement(options)
        trusted = {
            name: options[name]
            for name in ("trust_remote_code", *_REPOSITORY_OPTIONS)
            if name in options
        }
        self._trusted = trusted
        read: Any = transformers.AutoConfig.from_pretrained
        if config is None:
            config, options = read(repo, return_unused_kwargs=True, **{**options, **trusted})
            if config.dtype == _AUTO:
                config.dtype = None
        else:
            config = copy.deepcopy(config)
        self._config = config
        self._options = {**options, **trusted}
        if task is None:
            # A configuration made by hand may name no class; the checkpoint's own does.
            named = config if config.architectures else read(repo, **trusted)
            task = tasks.task_of_config(named, repo)
        self.task = task
        self._class = tasks.class_for(self.task, config)

    def architecture(self) -> torch.nn.Module:
        """Return the model without weights, on the meta device."""
        given = {
            name: value
            for name, value in self._options.items()
            if name.endswith("_implementation") or name == "trust_remote_code"
        }
        if self._dtype not in (None, _AUTO):
            given["dtype"] = self._dtype
        with torch.device("meta"):
            module = self._class.from_config(copy.deepcopy(self._config), **given)
        return module.eval()

    def load(self) -> torch.nn.Module:
        """Return the model with its weights, in evaluation mode.

        Cost: reads the checkpoint; downloads it where it is not in the cache.
        """
        given = dict(self._options)
        if self._dtype is not None:
            given["dtype"] = self._dtype
        with _quiet_off_terminal():
            module = self._class.from_pretrained(
                self.repo, config=copy.deepcopy(self._config), **given, **self._placed
            )
        return module.eval()

    def tokenizer(self) -> Any:
        """Return the tokenizer that came with the checkpoint, or None."""
        return tokenizer_of(self.repo, self._trusted)


def tokenizer_of(repo: str, options: dict[str, Any] | None = None) -> Any:
    """Return the tokenizer in ``repo``, or None where there is none to be read."""
    if not repo:
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(repo, **(options or {}))
    except (OSError, ValueError, KeyError):
        return None


def _placement(options: dict[str, Any]) -> dict[str, Any]:
    """Take where the weights shall go out of ``options``."""
    placed = {
        name: options.pop(name)
        for name in ("device_map", "max_memory", "offload_folder", "offload_state_dict")
        if name in options
    }
    device = options.pop("device", None)
    if device is not None:
        if "device_map" in placed:
            raise ConfigurationError(
                explain(
                    "Both `device` and `device_map` were given.",
                    why="Each says where the weights go.",
                    todo="Keep one of them.",
                )
            )
        placed["device_map"] = device
    if "device_map" not in placed and torch.accelerator.is_available():
        placed["device_map"] = torch.accelerator.current_accelerator()
    return placed


@contextlib.contextmanager
def _quiet_off_terminal() -> Iterator[None]:
    """Show transformers' loading bars on a terminal only."""
    log = transformers.utils.logging
    if sys.stderr.isatty() or not log.is_progress_bar_enabled():
        yield
        return
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.enable_progress_bar()


def make_ready(tokenizer: Any, module: Any, settings: dict[str, Any] | None = None) -> None:
    """Give ``tokenizer`` the padding that ``module`` needs for batches.

    A causal decoder pads on the left, or the last token of a row would be padding; a model with
    an encoder and a decoder pads on the right, where its encoder's positions start.

    Args:
        tokenizer: The tokenizer to change, or None.
        module: The model that it serves.
        settings: Attributes to set on it; they win.
    """
    if tokenizer is None:
        return
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if is_encoder_decoder(module):
        tokenizer.padding_side = "right"
    elif is_causal(module):
        tokenizer.padding_side = "left"
    for name, value in (settings or {}).items():
        setattr(tokenizer, name, value)


def is_encoder_decoder(module: Any) -> bool:
    """Tell whether ``module`` has an encoder and a decoder of its own."""
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def is_causal(module: Any) -> bool:
    """Tell whether ``module`` is a decoder that continues its input."""
    return (
        isinstance(module, transformers.PreTrainedModel)
        and module.can_generate()
        and not is_encoder_decoder(module)
    )
