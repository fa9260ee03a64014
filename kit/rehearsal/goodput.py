"""What failures cost a long job, and how often to save: Young's and Daly's equations."""

import dataclasses
import math

DEVICE_HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
"""Of one device: 419 unexpected interruptions of 16,384 H100 in 54 days (The Llama 3 Herd of
Models, arXiv 2407.21783, section 3.3.4). Other machines fail at other rates: give your own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """A job that saves every so often, fails at random and starts again; all times in seconds."""

    between_failures_s: float
    """Mean time between failures of the whole job."""
    save_s: float
    """How long training waits for a save."""
    write_s: float
    """How much longer a save is written, behind the steps, until it can be started from."""
    restart_s: float
    """From a failure to the first step of the next attempt."""

    def at(self, interval_s: float) -> float:
        """Returns the part of the time, 0 to 1, that is spent on steps which count, with saves so
        far apart.

        Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (Future
        Generation Computer Systems 22, 2006), equation 13: failures strike at a constant rate, in
        saves and restarts too. A save counts only when an attempt has lasted until it was written,
        so each failure costs the time to write as it costs a restart.
        """
        m, lost = self.between_failures_s, self.restart_s + self.write_s
        return interval_s / (m * math.exp(lost / m) * math.expm1((interval_s + self.save_s) / m))

    def best_interval_s(self) -> float:
        """Returns the time between saves at which `at` is highest: Daly's equation 37, Young's
        square root refined.

        It is at least the time to write one: a save is written while training goes on to the next.
        """
        m, save = self.between_failures_s, self.save_s
        if save >= 2 * m:
            return max(m, self.write_s)
        x = save / (2 * m)
        return max(math.sqrt(2 * save * m) * (1 + math.sqrt(x) / 3 + x / 9) - save, self.write_s)
