"""Makes a log format from a user's regular expression (`kit import --pattern`). The expression is
checked, and its time is limited.
"""

import contextlib
import dataclasses
import re
import signal
import threading
from collections.abc import Iterable, Iterator

from cluster.record import ConfigError, suggestion
from kit.interop.logs.formats import Format

GROUPS = tuple(
    "step loss total_steps samples consumed_samples step_time_s step_time_ms grad_norm "
    "learning_rate validation_loss memory_gib tflops time".split()
)
"""Names of the groups that a user's pattern may have. `samples` are the sequences of the step,
`consumed_samples` the sequences since the start. `tflops` is the TFLOP/s of one device. `time` is
written as `2025-11-25 19:45:01,441`."""
PATTERN_S = 1.0
"""Longest processor time of a user's pattern on one line, in seconds. A pattern takes microseconds,
unless Python has to try all combinations of its repetitions."""
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![,.]?\d)")
"""Pattern of a whole number with commas between thousands. A list such as `12,345,0.5` does not
match."""


class PatternFormat(Format):
    """Format of a log whose steps are found by a user's pattern, in limited time. The field `sign`
    is not used.
    """

    def is_about_step(self, line: str) -> bool:
        """Returns whether the pattern finds a step in a line."""
        return bool(self.matches(line))

    def matches(self, line: str) -> list[re.Match[str]]:
        """Returns the matches of the pattern in a line of a log.

        Raises:
            ConfigError: The pattern takes longer than PATTERN_S, or takes only some digits of a
                number with commas as the step.
        """
        with limited_time(len(line)):
            matches = super().matches(line)
            for found in matches:
                _check_step(found)
        return matches


def pattern_format(pattern: str, lines: Iterable[str] = ()) -> Format:
    """Returns the format of a user's pattern. If a match in `lines` has only the step or only the
    loss, the values of a step are gathered from several lines. Otherwise, each step has one line.

    Raises:
        ConfigError: The pattern is no regular expression, lacks the groups `step` or `loss`, has a
            group that is not in GROUPS, or takes too long.
    """
    try:
        groups = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"--pattern {pattern!r} is no regular expression of Python: {error}."
        ) from error
    for name in groups:
        if name not in GROUPS:
            raise ConfigError(
                f"--pattern: the group {name!r} is unknown. {suggestion(name, GROUPS)}"
            )
    for name in ("step", "loss"):
        if name not in groups:
            example = r"For example: 'it (?P<step>\d+) .*loss=(?P<loss>\S+)'."
            raise ConfigError(f"--pattern: the group {name!r} is missing. {example}")
    form = PatternFormat(name="pattern", sign="", line=pattern, values="the line's values")
    for line in lines:
        for found in form.matches(line):
            if found["step"] is None or found["loss"] is None:
                return dataclasses.replace(form, gathers=True)
    return form


@contextlib.contextmanager
def limited_time(length: int) -> Iterator[None]:
    """Limits the processor time of a user's pattern on one line of `length` characters.

    Python handles signals while it searches. Threads other than the main thread get no signals, so
    they have no limit.

    Raises:
        ConfigError: The pattern takes longer than PATTERN_S.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def refuse(*_: object) -> None:
        raise ConfigError(
            f"--pattern: takes more than {PATTERN_S:g} s on one line of {length:,} characters."
            " Write [^,]* or .{0,99}? where it has .* more than once."
        )

    before = signal.signal(signal.SIGVTALRM, refuse)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATTERN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _check_step(found: re.Match[str]) -> None:
    """Raises ConfigError if a match takes only some digits of a number with commas between
    thousands as the step. A pattern that contains the comma itself, as for a CSV file, is accepted.
    """
    step = found["step"]
    if step is None:
        return
    begin, end = found.span("step")
    for whole in GROUPED.finditer(found.string):
        encloses = whole.start() <= begin and end <= whole.end() and whole[0] != step
        if encloses and not _names_comma(found):
            raise ConfigError(
                f"--pattern: finds step {step!r} where the log has {whole[0]!r}. If that is one"
                r" number, write (?P<step>[\d,]+). If the comma separates two values, write it"
                r" beside the group, as in (?P<step>\d+),"
            )


def _names_comma(found: re.Match[str]) -> bool:
    """Returns whether a pattern requires the commas beside the step. Such a pattern no longer
    matches when the commas are replaced by semicolons.
    """
    begin, end = found.span("step")
    characters = list(found.string)
    for place in (begin - 1, end):
        if 0 <= place < len(characters) and characters[place] == ",":
            characters[place] = ";"
    changed = found.re.match("".join(characters), found.start())
    return changed is None or changed.span("step") != (begin, end)
