"""The command line of the sandbox: `python -m cluster.sandbox start | stop | status`."""

import argparse
import shlex
import sys

from cluster.sandbox import Sandbox, default_root, stop_sandbox
from cluster.state import JobError


def main() -> int:
    """Runs the command and returns its exit code: 0 after success, 1 after an error. `status`
    returns 1 if no sandbox runs.
    """
    parser = argparse.ArgumentParser(
        prog="python -m cluster.sandbox", description="A real Slurm on this machine."
    )
    parser.add_argument("action", choices=("start", "stop", "status"))
    parser.add_argument(
        "--root", default=str(default_root()), help="its directory (default: %(default)s)"
    )
    parser.add_argument("--nodes", type=int, default=4, help="simulated nodes")
    parser.add_argument(
        "--accounting", action="store_true", help="with a database, so that sacct works"
    )
    options = parser.parse_args()
    try:
        if options.action == "stop":
            was_running = stop_sandbox(options.root)
            print("stopped" if was_running else "no sandbox was running")
        elif options.action == "start":
            sandbox = Sandbox.start(
                options.root, num_nodes=options.nodes, accounting=options.accounting
            )
            state = "runs already" if sandbox.was_running else "is up"
            print(
                f"# {state}; for sbatch, squeue and notebooks:\n"
                f"export SLURM_CONF={shlex.quote(sandbox.environment['SLURM_CONF'])}\n"
                f"# site file: {sandbox.site_file}"
            )
        elif sandbox := Sandbox.find(options.root):
            print(*(f"{node} {state}" for node, state in sandbox.node_states().items()), sep="\n")
            print(sandbox.run("squeue", "--noheader", "--format=%i %j %T %r"), end="")
        else:
            print(f"no sandbox runs in {options.root}")
            return 1
    except JobError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
