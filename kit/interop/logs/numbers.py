"""Parses numbers as logs print them: with suffixes, with units, or with too few digits."""

import re

SUFFIXED = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s?([^\d\s]*)")
"""Pattern of a number (group 1) and the suffix or unit after it (group 2)."""
FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "%": 0.01}
"""Dict from the suffix of a number in a log, such as `k`, to its factor."""
SECONDS_OF = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
"""Dict from the name of a unit of time in logs to its length in seconds."""
RATES = ("it/s", "steps/s", "step/s")
"""Names of the unit "steps per second" in logs. A step time is the inverse of such a speed."""
UNITS = {
    "step_time_ms": ("step_time_s", 1000.0),
    "memory_gib": ("memory_bytes", 2.0**-30),
    "memory_mib": ("memory_bytes", 2.0**-20),
    "tflops": ("flops_per_s", 1e-12),
}
"""Names of printed values in another unit than the kit's, such as `step_time_ms`. Each has (the
kit's name, number of printed units in one unit of the kit)."""
COUNTS = frozenset(
    "step total_steps samples consumed_samples consumed_tokens sequence_length".split()
)
"""Names of whole-number values that are used only if the log prints all their digits."""
WHOLE = COUNTS | {"memory_bytes", "skipped_steps", "nan_steps"}
"""Names of values that are converted to whole numbers."""
BOUNDED = WHOLE | {"step_time_s"}
"""Names of values that are ignored if they are negative, or 2**63 or more."""


class UnsureStepError(ValueError):
    """The step of a line of a log is unknown: too few of its digits are printed, or another number
    in the line contradicts it.
    """


def parse_number(text: str | None, unit: str = "") -> float | None:
    """Returns the number in a word of a log, such as `1,234`, `2.1e+4`, `3.4M` or `12.3%`, or None
    if the word is not a number.

    If `unit` is "s" or "ms", the word may also be a time or a rate with its own unit, such as
    `850ms`, `1.2s/it` or `3.1it/s`. The result is then the time per step in `unit`. A number
    without a unit is returned unchanged.
    """
    word = (text or "").replace(",", "")
    try:
        return float(word)
    except ValueError:
        pass
    found = SUFFIXED.fullmatch(word.strip())
    if found is None:
        return None
    value = float(found[1])
    suffix = found[2]
    if suffix in FACTORS:
        return value * FACTORS[suffix]
    if not unit:
        return None
    seconds = _seconds_per_step(value, suffix)
    return None if seconds is None else seconds / SECONDS_OF[unit]


def _seconds_per_step(value: float, suffix: str) -> float | None:
    """Returns the seconds per step of a value with a unit, or None if the unit is unknown."""
    if suffix in RATES:
        return 1 / value if value else None
    unit = suffix.removesuffix("/it").removesuffix("/iter").removesuffix("/step")
    return value * SECONDS_OF[unit] if unit in SECONDS_OF else None


def lacks_digits(text: str) -> bool:
    """Returns whether the last digits of a whole number are not printed, as in `3.1e+4` or `85.8G`,
    so that several numbers are possible.
    """
    found = SUFFIXED.fullmatch(text.replace(",", "").strip())
    if found is None:
        return False
    digits, _, power = found[1].lower().partition("e")
    decimals = len(digits.partition(".")[2])
    unit = FACTORS.get(found[2], 1.0) * 10.0 ** (int(power or 0) - decimals)
    return unit > 1.0


def parse_value(group: str, text: str) -> tuple[str, float | None]:
    """Returns (the kit's name of a value, the number in the kit's unit) for the text of a pattern's
    group. The value is None if the text is not a number or is out of range. It is also None for a
    whole number whose last digits are not printed.

    Raises:
        UnsureStepError: The text is a step that lacks digits.
    """
    name, units = UNITS.get(group, (group, 1.0))
    if name in COUNTS and lacks_digits(text):
        if name == "step":
            raise UnsureStepError(f"the step {text} is rounded, and stands for several")
        return name, None
    unit = ""
    if name == "step_time_s":
        unit = "ms" if group == "step_time_ms" else "s"
    value = parse_number(text, unit)
    if value is None or (name in BOUNDED and not 0 <= value < 2**63):
        return name, None
    value /= units
    if name in COUNTS:
        return name, round(value)
    return name, int(value) if name in WHOLE else value
