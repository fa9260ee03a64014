"""Shows one multiple-choice item: the prompt, and the log-likelihood that a model gives each
choice.
"""

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
    """One choice of a multiple-choice item, and the log-likelihood that a model gives it."""

    text: str
    num_tokens: int
    log_likelihood: float  # log p(choice | prompt), in nats
    right: bool

    @property
    def per_character(self) -> float:
        """Log-likelihood in nats, divided by the number of characters of the choice as the task
        writes it. `acc_norm` compares this value.
        """
        return self.log_likelihood / len(self.text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemScore(Shown):
    """One multiple-choice item: its prompt, and the log-likelihoods of its choices in the order of
    the data set.
    """

    task: str
    prompt: str
    choices: tuple[ChoiceScore, ...]

    @property
    def chosen(self) -> ChoiceScore:
        """Choice that is the model's answer for `acc`: the choice with the largest
        log-likelihood.
        """
        return max(self.choices, key=lambda choice: choice.log_likelihood)

    @property
    def chosen_norm(self) -> ChoiceScore:
        """Choice that is the model's answer for `acc_norm`: the choice with the largest
        log-likelihood per character.
        """
        return max(self.choices, key=lambda choice: choice.per_character)

    def table(self) -> tuple[str, Sequence[dict[str, str]], Sequence[str]]:
        """Returns (title, rows, notes) of the table of choices."""
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
                    "chosen by": ", ".join(taken_by),
                }
            )
        return f"log-likelihood of each choice ({self.task})", rows, ()

    def to_text(self) -> str:
        """Returns prompt and table as text for a terminal."""
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
    """Returns the log-likelihoods that a model gives the choices of one item, with the prompt that
    lm-eval writes.

    `task` is a multiple-choice benchmark. `index` is the number of an item in its scored split,
    from 0. `shots` is the number of solved examples in the prompt. The other arguments are those of
    `evaluate_model` and `Options`.

    Raises:
        ConfigError: The task is unknown or not multiple-choice, or has no such item.
        DataError: The task's data is not available.
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
