"""Advice on an unknown option of the command line: the option or the setting that the user probably
means.
"""

import dataclasses
import difflib
import shlex
from collections.abc import Sequence
from typing import Any

OPTIONS = {
    "plan.global_batch_size": "--batch",
    "recipe.data": "--data",
    "recipe.init_from": "--init-from",
    "recipe.learning_rate": "--learning-rate",
    "recipe.num_steps": "--steps",
    "recipe.optimizer": "--optimizer",
    "recipe.seed": "--seed",
    "spec.sequence_length": "--seq",
    "plan.data_parallel=REPLICAS": "--devices",
}
"""Options that some commands have for a setting, by the setting. With REPLICAS, the user gave a
number of devices (`kit.config.other_names`)."""
SET = {
    "launch": ("spec", "plan", "recipe"),
    "import": ("spec", "plan", "recipe"),
    "plan": ("plan",),
    "resume": ("plan",),
}
"""First parts of the settings that the option `--set` of a command changes, by the command."""


def option_advice(command: Any, option: str, words: Sequence[str]) -> str:
    """Returns a sentence about an option that a command does not have: the nearest option of the
    command, or else the setting of the kit with this name or with this name in another tool.
    Returns "" if nothing is near.

    Args:
        command: the command of Typer.
        option: the unknown option, such as `--lr`.
        words: the words of the command line, from which the value of the option is taken.
    """
    known = [name for parameter in command.params for name in parameter.opts if name[:2] == "--"]
    found = _find_setting(option)
    setting, _, value = found.partition("=")
    place, _, field = setting.partition(".")
    if OPTIONS.get(found) in known:
        return f"Give {OPTIONS[found]}{_value(option, words)}."
    own = OPTIONS.get(setting, f"--{field.replace('_', '-')}")
    if field and own in known:
        return f"Give {own}{f' {value}' if value else _value(option, words)}."
    begun = [name for name in known if name.startswith(option)]
    bare = [name.strip("-") for name in known]
    # A known setting is more probable than an option that is only similar.
    cutoff = 0.8 if field else 0.6
    close = difflib.get_close_matches(option.strip("-"), bare, n=1, cutoff=cutoff)
    if near := begun or [f"--{name}" for name in close]:
        return f"Did you mean {' or '.join(near)}?"
    if not field:
        return ""
    given = f"--set {setting}={value or _value(option, words).strip() or 'VALUE'}"
    if place in SET.get(command.name, ()):
        return f"Give {given}."
    return f"It is a setting of `kit launch`: {given}."


def _find_setting(option: str) -> str:
    """Returns the setting that an unknown option means, or "" if there is none."""
    from kit.config.other_names import OWNERS, find_setting
    from kit.config.plan import Plan
    from kit.config.recipe import Recipe
    from kit.config.spec import ModelSpec

    fields = []
    for place, record in zip(OWNERS, (ModelSpec, Plan, Recipe), strict=True):
        fields += [f"{place}.{field.name}" for field in dataclasses.fields(record)]
    return find_setting(option, fields)


def _value(option: str, words: Sequence[str]) -> str:
    """Returns the value that follows an option in the words of a command line, preceded by a space.
    Returns "" if there is none.
    """
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != option:
            continue
        following = words[index + 1 : index + 2]
        if not equals and following and not following[0].startswith("--"):
            value = following[0]
        return f" {shlex.quote(value)}" if value else ""
    return ""
