"""Advice for a log that no format reads: what the file is, and a pattern that was tried on it."""

import datetime
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from cluster.files import opened
from kit.convert.other_trainers import FORMATS
from kit.data.detect import MAGIC
from kit.errors import DataError
from kit.foreign.formats import Format, number, pattern_format
from kit.foreign.logs import Parser

LOOKED_AT = 20_000
"""Number of lines of a log that are searched for a step and a loss."""
STEP = re.compile(
    r"(?i)(?<![a-z])((?:global[_ ]?)?steps?|iter(?:ation)?s?|it|batch|update)"
    r"([\"']?\s{0,4}[:=\[#]?\s{0,4})(\d[\d,]*)(?![\d.eE])"
)
BAR = re.compile(r"(\|)(\s*)(\d+)(?=/\d+ \[)")
"""The count of a progress bar, for lines without a step."""
STEP_NUMBER = r"\d[\d,]*"
"""A step as logs print it, with or without commas between thousands."""
LOSS = re.compile(
    r"(?i)(?<![a-z])((?:train(?:ing)?|lm|ce|total)?[_/ -]{0,2}(?:ce )?loss)"
    r"([\"']?\s{0,4}[:=]?\s{0,4}[\"']?)(\d[^\s,|;\]})\"']*)"
)
SECONDS = re.compile(
    r"(?i)(?<![a-z])((?:step|iter(?:ation)?|elapsed)?[_ ]?(?:time|dt))"
    r"([\"']?\s{0,4}[:=]?\s{0,4})([\d.]+ ?m?s)\b"
)
"""Label, what stands between, and value of a step, a loss and a time in a line."""
KINDS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it: a checkpoint, not a log"),
    (b"\x80", "a pickle: a checkpoint, not a log"),
    (b"\x89HDF", "an HDF5 file, not a log"),
    *((magic, f"compressed by {name}. Unpack it") for magic, name in MAGIC),
)
"""First bytes of files that are no log, and what they are."""
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".distcp", ".safetensors")
CONVERT = (
    "Its weights are imported from a Hugging Face folder: write one with that trainer's own tools."
    " For the steps, give the text that the trainer printed"
)
HEAD_BYTES = 4096
TEXT_SHARE = 0.9
"""Share of printable bytes in the beginning of a text, which may hold damaged lines."""


def check_text(file: Path) -> None:
    """Raises DataError for a file that cannot be read or is binary, with what it is."""
    try:
        opened(file).close()
        binary = what_it_is(file)
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror}). Give the trainer's log file."
        ) from error
    if binary:
        raise DataError(f"{file}: {binary}.")


def what_it_is(file: Path) -> str:
    """Returns what a binary file is and what to do, or "" for a text. Reads its first bytes."""
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


def suggested_pattern(file: Path, zone: datetime.tzinfo) -> str:
    """Returns a sentence with a pattern that finds steps in a log, or "" if none was found. The
    pattern was tried on the log.
    """
    lines = _lines(file, zone)
    for pattern in _patterns(lines):
        form = pattern_form(file, pattern, zone)
        steps = [step for step in Parser(file, form, zone).steps() if "attempt" in step]
        losses = [step for step in steps if "loss" in step]
        if losses:
            first = losses[0]
            return (
                f" Its lines may be read by --pattern {shlex.quote(pattern)}, which finds"
                f" {len(losses):,} steps here, first step {first['step']:.0f} with loss"
                f" {first['loss']:g}: check that."
            )
    return ""


def pattern_form(file: Path, pattern: str, zone: datetime.tzinfo) -> Format:
    """Returns the format of a user's pattern: of one line a step or, if its matches in the log have
    a step or a loss alone, of several.

    Raises:
        ConfigError: as `pattern_format`.
    """
    form = pattern_format(pattern)
    for line in Parser(file, form, zone).new():
        for found in re.finditer(form.line, line):
            if found["step"] is None or found["loss"] is None:
                return pattern_format(pattern, gathers=True)
    return form


def _lines(file: Path, zone: datetime.tzinfo) -> list[str]:
    lines = list[str]()
    for line in Parser(file, Format(name="", sign="", line=""), zone).new():
        lines.append(line)
        if len(lines) == LOOKED_AT:
            break
    return lines


def _patterns(lines: list[str]) -> Iterator[str]:
    """Yields patterns for lines that tell a step and a loss, then for lines that tell one each."""
    alone: dict[str, re.Match[str]] = {}
    for line in lines:
        step, loss = STEP.search(line) or BAR.search(line), LOSS.search(line)
        if step is not None and loss is not None and number(loss[3]) is not None:
            parts = [(step, "step", STEP_NUMBER), (loss, "loss", r"[\w.+-]+")]
            if (seconds := SECONDS.search(line)) is not None:
                yield _joined([*parts, (seconds, "step_time_s", r"[\d.]+ ?m?s")])
            yield _joined(parts)
            return
        if step is not None:
            alone.setdefault("step", step)
        if loss is not None and number(loss[3]) is not None:
            alone.setdefault("loss", loss)
    if len(alone) == 2:
        step = _named(alone["step"], "step", STEP_NUMBER)
        loss = _named(alone["loss"], "loss", r"[\w.+-]+")
        yield f"{step}|{loss}"


def _joined(parts: list[tuple[re.Match[str], str, str]]) -> str:
    """Returns a pattern of values in the order in which they stand in a line."""
    parts = sorted(parts, key=lambda part: part[0].start())
    return ".*?".join(_named(*part) for part in parts)


def _named(found: re.Match[str], name: str, value: str) -> str:
    """Returns a pattern of a value behind its label."""
    label = re.escape(found[1] + found[2]).replace("\\ ", " ")
    label = re.sub(" +", " *", label)
    before = r"(?<![A-Za-z])" if label[0].isalpha() else ""
    return rf"{before}{label}(?P<{name}>{value})"
