"""Answers one request of a mirror, on the login node. `python -m cluster.login.answer` reads the
request as JSON from standard input and prints the answer as one line of JSON.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from cluster.files import read_small
from cluster.job import Job, JobSpec
from cluster.record import ConfigError
from cluster.site import Site
from cluster.state import JobError, read_history
from cluster.submission import submit


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to one request about the run directory `request["run"]` on the cluster.
    `request["do"]` names the action, such as submit, status or stop.

    Raises:
        ConfigError, JobError: The request is refused.
    """
    run_dir = Path(request["run"]).expanduser()
    wanted = request["do"]
    if wanted == "lacking":
        return {"lacking": [path for path in request["paths"] if _is_missing(path)]}
    if wanted == "submit":
        if request["new"] and run_dir.is_dir() and any(run_dir.iterdir()):
            raise JobError(
                f"{run_dir} exists there already. Give another name, or look at that"
                " run by `kit launch --there`."
            )
        submit(JobSpec.from_dict(request["job"]), Site.from_dict(request["site"]), request["files"])
        return {}
    if not (run_dir / "job.json").is_file():
        raise JobError(
            f"{run_dir} is no run directory there, or not there any more (no job.json). Give the"
            " path of one: --there. What was copied before is kept."
        )
    job = Job.attach(run_dir)
    if wanted == "status":
        return _status(job, request)
    actions = {
        "stop": job.stop,
        "checkpoint": job.checkpoint,
        "cancel": job.cancel,
        "requeue": job.requeue,
    }
    actions[wanted]()
    return {}


def _is_missing(path: str) -> bool:
    """Returns whether there is no file or folder whose path begins with `path`, such as the files
    of a dataset with this prefix.
    """
    file = Path(path).expanduser()
    return not any(file.parent.glob(f"{file.name}*"))


def _status(job: Job, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the status of a job, and the lines of alerts.jsonl that the mirror on the user's
    machine does not have yet.
    """
    history = read_history(job.run_dir)
    began = history[0].time if history else None
    alerts = b""
    with contextlib.suppress(OSError):
        alerts = read_small(job.run_dir / "alerts.jsonl")
    status = job.status().to_dict()
    del status["heard_at"]  # An older kit that reads the answer would refuse this key.
    end = alerts.rfind(b"\n") + 1  # An incomplete last line is left out.
    known = 0
    if request["began"] == began:
        known = request["alerts"]
    return {
        "status": status,
        "began": began,
        "alerts": alerts[known:end].decode(errors="replace"),
        "alerts_end": end,
    }


def main() -> None:
    """Reads a request from standard input and prints the answer to it."""
    try:
        found = answer(json.loads(sys.stdin.buffer.read()))
    except (ConfigError, JobError, OSError) as error:
        found = {"refused": str(error)}
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
