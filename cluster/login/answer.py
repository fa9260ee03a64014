"""Runs on a login node, `python -m cluster.login.answer`: takes one request from standard input
and answers it on one line.
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
    """Returns the answer to one request about the run directory `run`.

    Raises:
        ConfigError, JobError: it is refused.
    """
    run_dir = Path(request["run"]).expanduser()
    wanted = request["do"]
    if wanted == "lacking":
        asked = {path: Path(path).expanduser() for path in request["paths"]}
        lacking = [path for path, it in asked.items() if not any(it.parent.glob(f"{it.name}*"))]
        return {"lacking": lacking}
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
    if wanted != "status":
        {
            "stop": job.stop,
            "checkpoint": job.checkpoint,
            "cancel": job.cancel,
            "requeue": job.requeue,
        }[wanted]()
        return {}
    history = read_history(run_dir)
    alerts = b""
    began = history[0].time if history else None
    with contextlib.suppress(OSError):
        alerts = read_small(run_dir / "alerts.jsonl")
    status = job.status().to_dict()
    del status["heard_at"]  # An older kit on the other side refuses keys that it does not know.
    whole = alerts.rfind(b"\n") + 1
    known = request["alerts"] if request["began"] == began else 0
    return {
        "status": status,
        "began": began,
        "alerts": alerts[known:whole].decode(errors="replace"),
        "alerts_end": whole,
    }


def main() -> None:
    """Answers the request on standard input."""
    try:
        found = answer(json.loads(sys.stdin.buffer.read()))
    except (ConfigError, JobError, OSError) as error:
        found = {"refused": str(error)}
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
