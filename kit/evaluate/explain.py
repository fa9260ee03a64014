"""One multiple-choice item taken apart: the prompt, and what the model thinks of each choice."""

import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.errors import ConfigError
from kit.evaluate.benchmarks import Options, TaskRequest
from kit.evaluate.report import Shown

if TYPE_CHECKING:
    from kit.data import Tokenizer
    from kit.model import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceScore:
    """What a model thinks of one choice."""

    text: str
    num_tokens: int
    log_likelihood: float  # nats, of the choice after the prompt
    right: bool

    @property
    def per_character(self) -> float:
        """What `acc_norm` compares: nats over the characters of the choice, as the task writes
        it.
        """
        return self.log_likelihood / len(self.text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemScore(Shown):
    """One item: its prompt, and its choices in the order of the data set."""

    task: str
    prompt: str
    choices: tuple[ChoiceScore, ...]

    @property
    def chosen(self) -> ChoiceScore:
        """What `acc` takes for the model's answer: the most likely choice."""
        return max(self.choices, key=lambda choice: choice.log_likelihood)

    @property
    def chosen_norm(self) -> ChoiceScore:
        """What `acc_norm` takes: the most likely choice for its length."""
        return max(self.choices, key=lambda choice: choice.per_character)

    def table(self) -> tuple[str, Sequence[dict[str, str]], Sequence[str]]:
        """Returns title, rows and notes of the table that shows its choices."""
        takers = {"acc": self.chosen, "acc_norm": self.chosen_norm}
        rows = []
        for choice in self.choices:
            taken_by = [name for name, chosen in takers.items() if chosen is choice]
            rows.append(
                {
                    "choice": choice.text,
                    "right": "yes" if choice.right else "",
                    "tokens": str(choice.num_tokens),
                    "log-likelihood, nats": f"{choice.log_likelihood:.2f}",
                    "per character": f"{choice.per_character:.3f}",
                    "taken by": ", ".join(taken_by),
                }
            )
        return f"what the model thinks of each choice ({self.task})", rows, ()

    def to_text(self) -> str:
        """Returns prompt and table for a terminal."""
        return f"{self.prompt}\n\n{super().to_text()}"

    def _repr_html_(self) -> str:
        prompt = f"<pre style='white-space:pre-wrap;margin:0'>{html.escape(self.prompt)}</pre>"
        return prompt + super()._repr_html_()


def explain_item(
    model: "Decoder",
    tokenizer: "Tokenizer",
    sequence_length: int,
    task: str,
    index: int,
    *,
    shots: int | None = None,
    task_data: Path | None = None,
) -> ItemScore:
    """Returns how a model answers one item, through the harness's own prompt.

    The task is a multiple-choice benchmark, the index that of an item in its scored split; the rest
    is as in `evaluate_model` and `Options`.

    Raises:
        ConfigError: the task is unknown or not multiple-choice, or has no such item.
        DataError: its data is not to be had.
    """
    from kit.evaluate.loading import decoder_lm
    from kit.evaluate.tasks import load_task, quiet_harness

    loaded = load_task(TaskRequest(task=task, num_fewshot=shots), task_data=task_data)
    definition: Any = loaded.task
    if definition.OUTPUT_TYPE != "multiple_choice":
        raise ConfigError(
            f"task: {task!r} has no choices. Give a multiple-choice one, for example 'piqa'."
        )
    if not 0 <= index < len(definition.eval_docs):
        raise ConfigError(
            f"index: {index} is not allowed. {task} has items 0 to {len(definition.eval_docs) - 1}."
        )
    with quiet_harness():
        definition.build_all_requests(samples=[index])
    document = definition.eval_docs[index]
    texts = definition.doc_to_choice(document)
    right = definition.doc_to_target(document)
    requests = definition.instances[: len(texts)]
    lm = decoder_lm(model, tokenizer, sequence_length, Options(), "cpu")
    found = lm.loglikelihood(requests)
    choices = []
    for place, text in enumerate(texts):
        prompt, answer = requests[place].args
        choices.append(
            ChoiceScore(
                text=text,
                num_tokens=len(tokenizer.encode(prompt + answer)) - len(tokenizer.encode(prompt)),
                log_likelihood=found[place][0],
                right=place == right,
            )
        )
    return ItemScore(task=task, prompt=requests[0].args[0], choices=tuple(choices))
