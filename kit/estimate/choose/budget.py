"""Budgets of a training run: tokens, days or money. Each of them determines the two others on a
layout with known speed and price.
"""

import dataclasses
import math
from typing import Any

from kit.errors import ConfigError

UNKNOWN_PRICE = "price unknown: pass --price USD_PER_DEVICE_HOUR"
FEW_DAYS = 3
"""Days of training below which a text states hours, since tenths of a day would be too coarse."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit of a training run in tokens, days or USD. Exactly one of the numbers is given."""

    tokens: float | None = None
    """Number of tokens to train on."""
    days: float | None = None
    """Days of training on all devices."""
    usd: float | None = None
    """Price of the training in USD."""

    def __post_init__(self) -> None:
        given = {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }
        if len(given) != 1:
            raise ConfigError(
                f"--tokens, --days, --budget: {len(given)} of them are given. Give one of them."
            )
        ((name, value),) = given.items()
        if not 0 < value < math.inf:
            flag = {"tokens": "--tokens", "days": "--days", "usd": "--budget"}[name]
            raise ConfigError(f"{flag}: {value} is not allowed. Give a finite number above 0.")

    @property
    def label(self) -> str:
        """Text with the given number and its unit, e.g. `14 days`."""
        if self.tokens is not None:
            return f"{self.tokens:.3g} tokens"
        if self.days is not None:
            return f"{self.days:g} days"
        return f"{self.usd:,.0f} USD"

    def use(self, tokens_per_s: float, usd_per_hour: float | None) -> dict[str, float | None]:
        """Returns `tokens`, `days` and `price_usd` of a training at a speed in tokens/s and a price
        of all devices in USD per hour. If the price is unknown, `price_usd` is None. Restarts are
        not included.

        Raises:
            ConfigError: The budget is money, and the price of the devices is unknown.
        """
        if self.usd is not None:
            if usd_per_hour is None:
                raise ConfigError(f"--budget {self.usd:,.0f}: {UNKNOWN_PRICE}.")
            days = self.usd / usd_per_hour / 24
        elif self.days is not None:
            days = self.days
        else:
            assert self.tokens is not None
            days = self.tokens / tokens_per_s / 86_400
        tokens = self.tokens or days * 86_400 * tokens_per_s
        price = None if usd_per_hour is None else days * 24 * usd_per_hour
        return {"tokens": tokens, "days": days, "price_usd": price}

    def text(self, row: dict[str, Any], num_params: int) -> str:
        """Returns what the budget gives on one layout, with the 90 % interval that follows from the
        interval of the step time, e.g. `8.1e+11 tokens (90 % interval 6.5e+11 to 1e+12; 101 a
        parameter), 43,008 USD`. `row` has the numbers that `use` returns, and the step time with
        its interval.
        """
        shortest = row["step_time_low_s"] / row["step_time_s"]
        longest = row["step_time_high_s"] / row["step_time_s"]
        parts = []
        if self.tokens is None:
            tokens = row["tokens"]
            parts.append(
                f"{tokens:.3g} tokens (90 % interval {tokens / longest:.3g} to"
                f" {tokens / shortest:.3g}; {tokens / num_params:,.0f} a parameter)"
            )
        if self.days is None:
            number, unit = row["days"], "days"
            if number < FEW_DAYS:
                number, unit = 24 * number, "hours"
            parts.append(f"{number:,.1f} {unit}")
            if self.tokens is not None:
                parts[-1] += f" (90 % interval {number * shortest:,.1f} to {number * longest:,.1f})"
        if self.usd is None:
            price = row["price_usd"]
            parts.append(UNKNOWN_PRICE if price is None else f"{price:,.0f} USD")
            if self.tokens is not None and price is not None:
                parts[-1] += f" (90 % interval {price * shortest:,.0f} to {price * longest:,.0f})"
        return ", ".join(parts)


def budget_of(
    tokens: float | None = None, days: float | None = None, usd: float | None = None
) -> Budget | None:
    """Returns the budget, or None if none of the numbers is given.

    Raises:
        ConfigError: Several numbers are given, or a number is not above 0.
    """
    if tokens is None and days is None and usd is None:
        return None
    return Budget(tokens=tokens, days=days, usd=usd)
