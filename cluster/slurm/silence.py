"""Who is to blame when a supervisor no longer hears nodes: they, or the supervisor.

Standard library only.
"""

import os

from cluster.outcome import say
from cluster.slurm.beat import BEAT_EVERY_S, SILENT_AFTER_S, Switchboard
from cluster.slurm.queries import nodes_down
from cluster.state import JobError

MASS = 0.2
"""Of the nodes: when more of them fall silent at once, it is likelier that the supervisor hears
badly."""
DOUBT_S = 4 * SILENT_AFTER_S
"""So long it then waits for them, unless Slurm says that some are down."""
ASK_EVERY_S = 3 * BEAT_EVERY_S


class SilenceJudge:
    """Judges the silence of nodes by what one switchboard hears."""

    def __init__(self, board: Switchboard, config: str | None) -> None:
        self.board, self.config = board, config
        self.doubted_at = self.asked_at = float("-inf")
        self.is_in_doubt = False

    def lost(self) -> tuple[str, str] | None:
        """Returns the node that is lost and the reason for people, or None while none is, or it
        is not clear which.
        """
        silent, num_heard = self.board.silent(), len(self.board.heard)
        many = len(silent) > max(1, MASS * num_heard)
        if many and not self.is_in_doubt:
            say(
                f"{len(silent)} of {num_heard} nodes fell silent at once: waiting for them, and"
                " asking Slurm"
            )
            self.doubted_at = self.board.clock
        self.is_in_doubt = many
        if many and self.board.clock - self.doubted_at < DOUBT_S:
            silent = self._down(silent)
        elif (
            many
            and len(silent) >= num_heard - 1
            and (own := os.environ.get("SLURMD_NODENAME", "")) not in silent
        ):
            return own, f"{own} hears none of the other nodes: it is cut off"
        return (silent[0], f"{', '.join(silent)} fell silent") if silent else None

    def _down(self, silent: list[str]) -> list[str]:
        """Returns those of some nodes that Slurm takes for down too."""
        if self.board.clock - self.asked_at < ASK_EVERY_S:
            return []
        self.asked_at = self.board.clock
        try:
            return sorted(nodes_down(silent, self.config))
        except JobError as error:
            say(str(error))
            return []
