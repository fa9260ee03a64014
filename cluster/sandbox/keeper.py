"""Runs the keeper, the process that starts and ends all daemons of a sandbox.

    python -m cluster.sandbox.keeper ROOT

Every daemon runs in the foreground as a child of the keeper. The keeper can therefore notice and
reap a daemon that has ended. No daemon outlives the keeper, since the kernel kills the daemons when
the keeper ends. A daemon that ends is restarted, unless the file ROOT/run/NAME.off exists. A
SIGTERM ends the sandbox. ROOT/keeper.json identifies the process of the keeper.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.process import Process, become_rank, become_subreaper, kill_descendants
from cluster.sandbox import Sandbox

LOOK_EVERY_S = 0.2


def tend(sandbox: Sandbox) -> None:
    """Starts all daemons, and restarts daemons that have ended. Never returns."""
    keeper = os.getpid()
    daemons = dict[str, subprocess.Popen]()
    while True:
        with contextlib.suppress(ChildProcessError):
            # Orphaned children of daemons become children of this process.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for name in sandbox.daemons:
            runs = name in daemons and daemons[name].poll() is None
            if not runs and not sandbox.path("run", f"{name}.off").exists():
                with sandbox.path("log", f"{name}.out").open("ab") as log:
                    daemons[name] = sandbox.daemon(
                        name,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        preexec_fn=lambda: become_rank(keeper),
                    )
        time.sleep(LOOK_EVERY_S)


def main() -> None:
    """Runs the sandbox until a SIGTERM ends this process."""
    sandbox = Sandbox.read(Path(sys.argv[1], "sandbox.json"))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    become_subreaper()
    Process.current().write(sandbox.path("keeper.json"))
    os.dup2(2, 1)  # Closes standard output, which `Sandbox.start` awaits.
    try:
        if sandbox.isolated and sandbox.daemon("network_up").wait():
            sys.exit("the network of the nodes could not be made")
        tend(sandbox)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_descendants()


if __name__ == "__main__":
    main()
