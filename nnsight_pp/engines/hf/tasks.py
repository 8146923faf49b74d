"""What a model is for: the task of a checkpoint or module, and transformers' class for it."""

from __future__ import annotations

from typing import Any

import transformers

from nnsight_pp.errors import ConfigurationError, explain

TEXT_GENERATION = "text-generation"
FILL_MASK = "fill-mask"

_ALIASES = {
    "ner": "token-classification",
    "sentiment-analysis": "text-classification",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
}
# The class that loads the model of a task.
_CLASSES = {
    TEXT_GENERATION: "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    FILL_MASK: "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "zero-shot-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "feature-extraction": "AutoModel",
}
# How the names of model classes end. The first that fits counts.
_ENDINGS = {
    "ForCausalLM": TEXT_GENERATION,
    "LMHeadModel": TEXT_GENERATION,
    "ForConditionalGeneration": TEXT_GENERATION,
    "ForMaskedLM": FILL_MASK,
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "Model": "feature-extraction",
}


def task_of_class(name: str) -> str | None:
    """Return the task of the model class ``name``, or None."""
    return next((task for ending, task in _ENDINGS.items() if name.endswith(ending)), None)


def task_of_module(module: Any) -> str | None:
    """Return the task that a loaded module is for, or None for a class of another kind."""
    if isinstance(module, transformers.PreTrainedModel) and module.can_generate():
        return TEXT_GENERATION
    return task_of_class(type(module).__name__)


def task_of_config(config: Any, repo: str) -> str:
    """Return the task that a checkpoint's own configuration names.

    Raises:
        ConfigurationError: It names none that is known here.
    """
    for name in config.architectures or ():
        task = task_of_class(name)
        if task is not None:
            return task
    raise ConfigurationError(
        explain(
            f"The task of {repo!r} is not known.",
            why=f"Its configuration names the classes {config.architectures}.",
            todo="Pass `task=`, such as `task='text-generation'`.",
        )
    )


def class_for(task: str, config: Any) -> Any:
    """Return transformers' class that loads a model for ``task``.

    Raises:
        ConfigurationError: There is none.
    """
    name = _CLASSES.get(_ALIASES.get(task, task))
    if name is None:
        raise ConfigurationError(
            explain(
                f"The task {task!r} is not one of text.",
                why=f"Known are {', '.join([*_CLASSES, *_ALIASES])}.",
                todo="Load the model with transformers and wrap it in `NNsight(module)`.",
            )
        )
    if task == TEXT_GENERATION and config.is_encoder_decoder:
        name = "AutoModelForSeq2SeqLM"
    return getattr(transformers, name)
