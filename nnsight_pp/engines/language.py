"""`LanguageModel`: a Hugging Face text model of this process, as the user holds it.

The tree is there at once, on the meta device; the weights come at the first run, under the same
nodes. Prompts are whatever `hf.encode` reads, and the prompts of several invokes become one padded
batch. `trace` runs one forward, `generate` a generation, `pipe` transformers' whole pipeline, and
`scan` a forward on shapes alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "`LanguageModel` needs transformers, which is not installed. "
        "Install it with `pip install nnsight_pp[hf]`."
    ) from error

from nnsight_pp.core.location import ROOT
from nnsight_pp.engines.hf import checkpoint as loading
from nnsight_pp.engines.hf import tasks
from nnsight_pp.engines.hf.encode import Encoder, has_prompt
from nnsight_pp.engines.hf.fake_run import faked
from nnsight_pp.engines.hf.fields import Padding
from nnsight_pp.engines.hf.generator import Generator, GeneratorEnvoy, generating
from nnsight_pp.engines.hf.prompt_batch import (
    Call,
    Given,
    HasInput,
    call_of,
    for_one_forward,
    pipeline_call_of,
)
from nnsight_pp.engines.hf.prompt_names import PromptNames
from nnsight_pp.engines.hf.shipping import check_remote, check_ships
from nnsight_pp.engines.hf.weights import Weights, form_of, is_part, repoint
from nnsight_pp.engines.local import NNsight
from nnsight_pp.envoys.module_methods import is_changing
from nnsight_pp.errors import ConfigurationError, explain
from nnsight_pp.interleave.worker import running_worker
from nnsight_pp.trace.call_site import is_entered_by_with
from nnsight_pp.trace.tracer import Invocation, Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Mode = Literal["trace", "generate", "pipe", "scan"]
_GENERATOR = "generator"


class LanguageModel(PromptNames, NNsight):
    """A Hugging Face causal, encoder or encoder-decoder text model, with blocks beside its runs.

    Args:
        source: A repository name, a folder, or a loaded model.
        task: What the model is for, such as ``text-generation`` or ``fill-mask``. Default: what
            the checkpoint or the class of the model says.
        tokenizer: Reads text. Default: the one that came with the model.
        tokenizer_kwargs: Attributes to set on the tokenizer; they win over what the model needs.
        dispatch: Load the weights now. Default: at the first run.
        rename: Other names for modules, as `NNsight` takes them.
        envoys: Classes for the nodes of modules, as `NNsight` takes them.
        **options: Arguments of transformers' `from_pretrained`, and ``device``.

    Raises:
        ConfigurationError: The task is not known, or not one of text.
    """

    # What models of other kinds have beside or instead of a tokenizer.
    processor = image_processor = feature_extractor = None

    def __init__(
        self,
        source: str | torch.nn.Module,
        *,
        task: str | None = None,
        tokenizer: Any = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        dispatch: bool = False,
        rename: dict[Any, Any] | None = None,
        envoys: Any = None,
        **options: Any,
    ) -> None:
        self._finished = Generator()
        self._pipeline: Any = None
        # The root of the tree: a copy of this one, made by `edit`, has the same tree below it.
        self._origin = weakref.ref(self)
        checkpoint = None
        if isinstance(source, torch.nn.Module):
            module = source
            task = tasks.task_of_module(module) if task is None else task
            if "device" in options:
                module.to(options.pop("device"))
            if options:
                raise ConfigurationError(f"A loaded model takes no {', '.join(options)}.")
        else:
            checkpoint = loading.Checkpoint(str(source), task, options)
            task = checkpoint.task
            module = checkpoint.load() if dispatch else checkpoint.architecture()
        self._weights = Weights(checkpoint, module if dispatch or checkpoint is None else None)
        repo = getattr(getattr(module, "config", None), "name_or_path", "") or ""
        if tokenizer is None:
            tokenizer = loading.tokenizer_of(repo) if checkpoint is None else checkpoint.tokenizer()
        loading.make_ready(tokenizer, module, tokenizer_kwargs)
        super().__init__(module, rename=rename, envoys=envoys)
        self.repo_id: str = repo
        self.revision: str | None = options.get("revision")
        self.task = task
        self.tokenizer = tokenizer

    # -- the model -----------------------------------------------------------------------------

    @property
    def dispatched(self) -> bool:
        """Whether the weights are loaded."""
        return self._weights.module is not None

    def dispatch(self) -> LanguageModel:
        """Load the weights, if they are not there yet; the nodes of the tree stay the same."""
        weights = self._weights
        with weights.lock:
            if weights.module is None:
                assert weights.checkpoint is not None
                weights.module = weights.checkpoint.load()
                root = self._origin() or self
                repoint(root, weights.module, except_below=f"{ROOT}.{_GENERATOR}")
        self._module = weights.module
        return self

    def _install(self) -> None:
        node = GeneratorEnvoy(self._finished, f"{ROOT}.{_GENERATOR}", self)
        self._children.setdefault(_GENERATOR, node)
        super()._install()

    def _will_change(self, node: Any, name: str) -> None:
        self.dispatch()  # else the weights that come later would know nothing of it

    def _attribute_of(self, node: Any, name: str, value: Any) -> Any:
        if is_changing(node._module, name, value):
            self.dispatch()
            return getattr(node._module, name)
        is_known = self.dispatched or running_worker() is not None
        return value if is_known else form_of(node._module, name, value)

    def _takes(self, node: Any, name: str, value: Any) -> bool:
        if is_part(node._module, name):
            self.dispatch()
        return False

    @property
    def attn_implementation(self) -> str | None:
        """How attention is computed: ``eager``, ``sdpa``, or another name of transformers."""
        return getattr(self.config, "_attn_implementation", None)

    @property
    def pipeline(self) -> Any:
        """Transformers' pipeline around the loaded model.

        Raises:
            ConfigurationError: The model's task is not known.
        """
        if self._pipeline is None:
            if self.task is None:
                raise ConfigurationError(
                    explain(
                        f"The task of {type(self._module).__name__} is not known.",
                        why="A pipeline is made for a task.",
                        todo="Wrap the model with `task=...`.",
                    )
                )
            self.dispatch()
            module: Any = self._module
            placed = {} if hasattr(module, "hf_device_map") else {"device": module.device}
            side = getattr(self.tokenizer, "padding_side", None)
            make: Any = transformers.pipeline
            self._pipeline = make(self.task, model=module, tokenizer=self.tokenizer, **placed)
            if side is not None:
                self.tokenizer.padding_side = side
        return self._pipeline

    # -- runs ----------------------------------------------------------------------------------

    def trace(
        self,
        *inputs: Any,
        fn: Callable[..., Any] | str | None = None,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one forward on the prompt with the block of the `with` beside it.

        Args:
            *inputs: The prompt. Without one, `tracer.invoke(...)` gives them.
            fn: What is called instead of the model: a callable, or the name of its method.
            trace: False runs the forward at once and returns its output.
            **kwargs: Named inputs, options of the tokenizer, and arguments of the forward.
        """
        if not trace:
            return self._run_now("trace", inputs, kwargs, fn)
        return self._tracer("trace", inputs, kwargs, fn)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Generate from the prompt; `tracer.result` is the ids, prompt and continuation.

        In a `with` a block runs beside it. Without, it runs at once and returns the ids.
        """
        if is_entered_by_with(sys._getframe(1)):
            return self._tracer("generate", inputs, kwargs)
        return self._run_now("generate", inputs, kwargs)

    def pipe(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run transformers' whole pipeline of the model's task; `tracer.result` is its records.

        In a `with` a block runs beside it. Without, it runs at once and returns the records.
        """
        if is_entered_by_with(sys._getframe(1)):
            return self._tracer("pipe", inputs, kwargs)
        return self._run_now("pipe", inputs, kwargs)

    def scan(self, *inputs: Any, **kwargs: Any) -> Tracer:
        """Run one forward on shapes alone: nothing is loaded, and values hold no numbers."""
        return self._tracer("scan", inputs, kwargs)

    def _trace_from(self, node: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.dispatch()  # a part of the model takes tensors, as any torch module does
        return super()._trace_from(node, inputs, kwargs)

    def _tracer(
        self,
        mode: Mode,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        fn: Callable[..., Any] | str | None = None,
    ) -> Tracer:
        kwargs = dict(kwargs)
        ships = check_remote(kwargs.pop("remote", None))
        has_input = has_prompt(inputs, kwargs)
        options = {} if has_input else kwargs

        def run(tracer: Tracer, invocations: list[Invocation]) -> BaseException | None:
            if ships:
                check_ships(self._origin() or self, [self, self.tokenizer], invocations)
            call = self._call_of(mode, fn, invocations, options)
            invocations[0].warn(call.warnings)
            callee = self._callee(mode, fn, self._finished)
            arguments = (call.args, call.kwargs)
            self._run_call(callee, self._module, arguments, call.cuts, invocations)
            return None

        return Tracer(run, inputs, kwargs, has_input=has_input)

    def _run_now(
        self,
        mode: Mode,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        fn: Callable[..., Any] | str | None = None,
    ) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name != "remote"}
        call = self._call_of(mode, fn, [Given(inputs, kwargs)], {})
        for text in call.warnings:
            warnings.warn(text, UserWarning, stacklevel=3)
        if running_worker() is not None:  # a block's own call is not part of the run
            return self._callee(mode, fn, Generator())(*call.args, **call.kwargs)
        callee = self._callee(mode, fn, self._finished)
        return self._run_call(callee, self._module, (call.args, call.kwargs), [], [])

    def _call_of(
        self,
        mode: Mode,
        fn: Callable[..., Any] | str | None,
        invocations: Sequence[HasInput],
        options: dict[str, Any],
    ) -> Call:
        if mode != "scan":
            self.dispatch()
        config = getattr(self._module, "generation_config", None)
        if mode == "pipe":
            return pipeline_call_of(invocations, options, config)
        takes = _arguments_of(type(self._module))
        is_generating = mode == "generate" or fn == "generate"
        has_decoder = loading.is_encoder_decoder(self._module)
        encoder = Encoder(
            self.tokenizer, takes, has_decoder, is_generating, self.task == tasks.FILL_MASK
        )
        padding = Padding(
            side=self._padding_side(),
            token=self._pad_token(),
            counts_positions=not is_generating and "position_ids" in takes,
            masks="attention_mask" in takes,
            has_decoder=has_decoder,
        )
        if is_generating:
            return call_of(invocations, options, encoder, padding, config)
        call = call_of(invocations, options, encoder, padding)
        return call if fn is not None else for_one_forward(call, takes)

    def _padding_side(self) -> str:
        if self.tokenizer is not None:
            return self.tokenizer.padding_side
        return "left" if loading.is_causal(self._module) else "right"

    def _pad_token(self) -> int | None:
        if self.tokenizer is not None:
            return self.tokenizer.pad_token_id
        return getattr(self.config, "pad_token_id", None)

    def _callee(
        self, mode: Mode, fn: Callable[..., Any] | str | None, finished: Generator
    ) -> Callable[..., Any]:
        if mode == "generate" or fn == "generate":
            return generating(self._module, finished, self._pad_token())
        if mode == "pipe":
            return self.pipeline
        call = getattr(self._module, fn) if isinstance(fn, str) else fn or self._module
        return faked(call, self._module) if mode == "scan" else call


@functools.cache
def _arguments_of(kind: type) -> frozenset[str]:
    """Return the names of what the forward of a class of modules takes."""
    return frozenset(inspect.signature(kind.forward).parameters)  # type: ignore[attr-defined]


TransformersModel = LanguageModel
