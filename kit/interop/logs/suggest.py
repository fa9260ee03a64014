"""Finds advice for a log that no known format matches: the type of the file, or a pattern that
finds its steps.
"""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from cluster.files import open_for_reading
from kit.data.detect import HEAD_BYTES, MAGIC
from kit.errors import DataError
from kit.interop.logs.formats import BETWEEN
from kit.interop.logs.logs import LogLines, Parser
from kit.interop.logs.numbers import parse_number
from kit.interop.logs.patterns import pattern_format
from kit.interop.weights.other_trainers import FORMATS

LOOKED_AT = 20_000
"""Largest number of lines of a log that are searched for a step and a loss."""
STEP = re.compile(
    r"(?i)(?<![a-z])((?:global[_ ]?)?steps?|iter(?:ation)?s?|it|batch|update)"
    r"([\"']?\s{0,4}[:=\[#]?\s{0,4})(\d[\d,]*)(?![\d.eE])"
)
"""Pattern of a step in a line, with three groups: label, characters between, number."""
BAR = re.compile(r"(\|)(\s*)(\d+)(?=/\d+ \[)")
"""Pattern of the number of batches in a progress bar, used for lines without a step. Its groups are
label, characters between, number."""
STEP_NUMBER = r"\d[\d,]*"
"""Pattern of a whole number, with or without commas between thousands, for the step in a suggested
pattern."""
LOSS = re.compile(
    r"(?i)(?<![a-z])((?:train(?:ing)?|lm|ce|total)?[_/ -]{0,2}(?:ce )?loss)"
    r"([\"']?\s{0,4}[:=]?\s{0,4}[\"']?)(\d[^\s,|;\]})\"']*)"
)
"""Pattern of a loss in a line, with three groups: label, characters between, number."""
SECONDS = re.compile(
    r"(?i)(?<![a-z])((?:step|iter(?:ation)?|elapsed)?[_ ]?(?:time|dt))"
    r"([\"']?\s{0,4}[:=]?\s{0,4})([\d.]+ ?m?s)\b"
)
"""Pattern of the time of a step in a line, with three groups: label, characters between, number
with unit."""
KINDS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it: a checkpoint, not a log"),
    (b"\x80", "a pickle: a checkpoint, not a log"),
    (b"\x89HDF", "an HDF5 file, not a log"),
    *((magic, f"compressed by {name}. Unpack it") for magic, name in MAGIC),
)
"""Pairs (first bytes of a file, text that names the type of the file) for files that are not logs.
"""
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".distcp", ".safetensors")
"""Extensions of checkpoint files."""
CONVERT = (
    "Its weights are imported from a Hugging Face folder: write one with that trainer's own tools."
    " For the steps, give the text that the trainer printed"
)
"""Advice for a user who gave a file with weights instead of a log."""
TEXT_SHARE = 0.9
"""Smallest share of printable bytes at the beginning of a text file. A log may have damaged
lines."""


def check_text(file: Path) -> None:
    """Raises DataError with the type of the file if a file is binary or cannot be read."""
    try:
        open_for_reading(file).close()
        binary = binary_file_type(file)
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror}). Give the trainer's log file."
        ) from error
    if binary:
        raise DataError(f"{file}: {binary}.")


def binary_file_type(file: Path) -> str:
    """Returns the type of a binary file and advice, or "" for a text. Reads its first bytes."""
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    kind = next((text for magic, text in KINDS if head.startswith(magic)), "")
    printable = sum(byte >= 32 or byte in b"\t\n\r\x1b" for byte in head)
    if not kind and len(head) >= 8 and head[8:9] == b"{" and not any(head[4:8]):
        return f"a safetensors file: weights, not a log. {CONVERT}"
    if not kind and printable >= TEXT_SHARE * len(head):
        return ""
    if known := next((what for glob, what, _ in FORMATS if file.match(glob)), ""):
        return f"{known}, not a log. {CONVERT}"
    if file.suffix in CHECKPOINTS or "checkpoint" in kind or "weights" in kind:
        return f"{kind or 'a checkpoint, not a log'}. {CONVERT}"
    return kind or "binary data, not a log. Give the text that the trainer printed"


def suggested_pattern(file: Path) -> str:
    """Returns a sentence that suggests a pattern for a log, or "" if no pattern finds a loss in it.

    The whole log is read with the pattern, and the sentence says how many steps it finds.
    """
    first_lines = list(itertools.islice(LogLines(file).new(), LOOKED_AT))
    for pattern in _patterns(first_lines):
        form = pattern_format(pattern, LogLines(file).new())
        losses = [step for step in Parser(file, form).steps() if "loss" in step]
        if losses:
            first = losses[0]
            return (
                f" Its lines may be read by --pattern {shlex.quote(pattern)}, which finds"
                f" {len(losses):,} steps here, first step {first['step']:.0f} with loss"
                f" {first['loss']:g}: check that."
            )
    return ""


def _patterns(lines: list[str]) -> Iterator[str]:
    """Yields patterns for lines with both a step and a loss. If there are no such lines, yields a
    pattern that finds step and loss in separate lines.
    """
    alone: dict[str, re.Match[str]] = {}
    for line in lines:
        step = STEP.search(line) or BAR.search(line)
        loss = LOSS.search(line)
        if step is not None and loss is not None and parse_number(loss[3]) is not None:
            parts = [(step, "step", STEP_NUMBER), (loss, "loss", r"[\w.+-]+")]
            if (seconds := SECONDS.search(line)) is not None:
                yield _joined([*parts, (seconds, "step_time_s", r"[\d.]+ ?m?s")])
            yield _joined(parts)
            return
        if step is not None:
            alone.setdefault("step", step)
        if loss is not None and parse_number(loss[3]) is not None:
            alone.setdefault("loss", loss)
    if len(alone) == 2:
        step = _named(alone["step"], "step", STEP_NUMBER)
        loss = _named(alone["loss"], "loss", r"[\w.+-]+")
        yield f"{step}|{loss}"


def _joined(parts: list[tuple[re.Match[str], str, str]]) -> str:
    """Returns a pattern of several values in their order in the line. A part is (match of the value
    in the line, name of its group, pattern of the value).
    """
    parts = sorted(parts, key=lambda part: part[0].start())
    return BETWEEN.join(_named(*part) for part in parts)


def _named(found: re.Match[str], name: str, value: str) -> str:
    """Returns a pattern that finds a value after its label. The pattern has the value in a named
    group with the name `name`.
    """
    label = re.escape(found[1] + found[2]).replace("\\ ", " ")
    label = re.sub(" +", " *", label)
    before = r"(?<![A-Za-z])" if label[0].isalpha() else ""
    return rf"{before}{label}(?P<{name}>{value})"
