"""The harness's index of task definitions: which names it has, and what they ask for."""

import contextlib
import difflib
import functools
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, MissingPackageError
from kit.evaluate.benchmarks import BENCHMARKS, HELDOUT
from kit.evaluate.task_folder import swapped


def require_harness() -> None:
    """Raises MissingPackageError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError("lm-eval", "eval", "Scoring a model")


def tasks_of(name: str) -> list[str]:
    """Returns the tasks that a name asks for: itself, if it is a task or a group of them, or all
    tasks of a tag.

    Raises:
        ConfigError: the harness has none of that name.
    """
    if name in BENCHMARKS or name == HELDOUT:
        return [name]
    with quiet():
        index = task_manager(everything=True).task_index
    if name not in index:
        ours = [*BENCHMARKS, HELDOUT]
        close = difflib.get_close_matches(name, ours, n=1) or difflib.get_close_matches(
            name, index, n=1
        )
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"tasks: {name!r} is unknown. {hint}Give names of lm-eval (`lm-eval ls tasks`), or "
            f"{', '.join(ours)}."
        )
    return sorted(index[name].tags) if index[name].kind.name == "TAG" else [name]


@functools.cache
def task_manager(everything: bool = False) -> Any:
    """Returns the harness's index of the definitions that the kit knows, or of all.

    Indexing the kit's folders takes milliseconds; `everything`, 14,000 tasks, takes seconds.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    if everything:
        return TaskManager()
    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders: list[str | Path] = [
        tasks / folder for folder in sorted({b.definition for b in BENCHMARKS.values()})
    ]
    return TaskManager(include_path=folders, include_defaults=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the context, the harness and `datasets` print no notes and no progress bars; errors
    are still raised.
    """
    import datasets
    import lm_eval.api.task

    bars = datasets.are_progress_bars_disabled()
    logger = logging.getLogger("lm_eval")
    level = logger.level
    datasets.disable_progress_bars()
    logger.setLevel(logging.ERROR)
    silent = functools.partial(lm_eval.api.task.tqdm, disable=True)
    try:
        with swapped(lm_eval.api.task, "tqdm", silent):
            yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
