"""Runs on a login node, `python -m cluster.login.answer`: takes one request from standard input
and answers it.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

from cluster.files import opened, read_small
from cluster.job import Job, JobSpec
from cluster.login.mirror import MARK, TAIL_BYTES
from cluster.record import ConfigError
from cluster.site import Site
from cluster.state import JobError, find_log
from cluster.submission import submit

CHUNK_BYTES, SMALL_BYTES = 8 * 2**20, 2**20
CHECKPOINT = "checkpoints/*/manifest.json"
SMALL = ("*.json", "*.sh", "alerts.jsonl", "eval/*.json", "ranks/*.json*", "control/*", CHECKPOINT)
MINE = ("site.json", "metrics.jsonl", "history.jsonl")
"""Not among the small files: the site as the other side names it, and what grows."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to one request about the run directory `run`.

    Raises:
        ConfigError, JobError: it is refused.
    """
    run_dir, wanted = Path(request["run"]).expanduser(), request["do"]
    if wanted == "lacking":
        return {"lacking": [path for path in request["paths"] if not _exists(path)]}
    if wanted == "submit":
        if request["new"] and run_dir.is_dir() and any(run_dir.iterdir()):
            raise JobError(
                f"{run_dir} exists there already. Give another name, or `kit attach` to look at"
                " that run."
            )
        submit(JobSpec.from_dict(request["job"]), Site.from_dict(request["site"]), request["files"])
        return {}
    if not (run_dir / "job.json").is_file():
        if wanted == "asked":
            raise JobError(
                f"{run_dir} is no run directory there (no job.json). Give the path of one: --there."
            )
        raise JobError(f"{run_dir} is not there any more; what was copied before is kept.")
    job = Job.attach(run_dir)
    if wanted == "request":
        {
            "stop": job.stop,
            "checkpoint": job.checkpoint,
            "cancel": job.cancel,
            "requeue": job.requeue,
        }[request["request"]]()
        return {}
    if wanted == "asked":
        files = [run_dir / f"{name}.json" for name in ("plan", "recipe", "job", "spec")]
        return {file.name: read_small(file).decode() for file in files if file.is_file()}
    return read(job, request["ends"], request["versions"])


def read(job: Job, ends: dict[str, list[int]], versions: dict[str, int]) -> dict[str, Any]:
    """Returns the job's status, and what is new in its run directory since a mirror ended and
    had these versions.
    """
    run_dir, status = job.run_dir, job.status().to_dict()
    grown, more = {}, False
    for name, end in ends.items():
        start, content, rest = _new_bytes(
            _there(job, name), *end, whole_lines=name.endswith(".jsonl")
        )
        if content or start < end[0]:
            grown[name] = (start, content.decode("latin-1"))
        more = more or rest
    changed, found = {}, set()
    for file in sorted(
        {file for pattern in SMALL for file in run_dir.glob(pattern)}
        - {run_dir / name for name in MINE}
    ):
        try:
            # Of a checkpoint that it is there, and since when; its manifest may be large, and
            # serves nobody else.
            told_only, about = file.match(CHECKPOINT), file.stat()
            since = json.dumps({"time": about.st_mtime}).encode()
            new = since if told_only else read_small(file) if about.st_size <= SMALL_BYTES else None
        except OSError:  # taken away in between
            continue
        if new is None or file.name.startswith("."):
            continue
        name = str(file.relative_to(run_dir))
        found.add(name)
        if versions.get(name) != (version := zlib.crc32(new)):
            changed[name] = (version, new.decode(errors="replace"))
    gone = [name for name in versions if name not in found]
    return {"status": status, "grown": grown, "changed": changed, "gone": gone, "more": more}


def _new_bytes(file: Path, end: int, checksum: int, whole_lines: bool) -> tuple[int, bytes, bool]:
    """Returns where new bytes begin, these, and whether there are more; from 0 where the file is
    not as it was.
    """
    try:
        stream = opened(file, follows=True)
    except OSError:
        return end, b"", False
    with stream:
        stream.seek(max(0, end - TAIL_BYTES))
        same = zlib.crc32(stream.read(min(end, TAIL_BYTES))) == checksum and stream.tell() == end
        start = end if same else stream.seek(0)
        content = stream.read(CHUNK_BYTES)
        more = len(content) == CHUNK_BYTES
        # A line that is being written comes with the next poll, so a mirror never ends in a torn
        # one.
        return start, content[: content.rfind(b"\n") + 1] if whole_lines else content, more


def _there(job: Job, name: str) -> Path:
    """Returns the file for a name of the mirror, where each log bears the name of its rank."""
    parts = Path(name).parts
    if parts[0] != "logs":
        return job.run_dir / name
    attempt, rank = (
        int(parts[1].removeprefix("attempt_")),
        int(Path(name).stem.removeprefix("rank_")),
    )
    return find_log(job.run_dir, attempt, rank, job.spec.num_processes // job.spec.num_nodes)


def _exists(path: str) -> bool:
    full = Path(path).expanduser()
    return any(full.parent.glob(f"{full.name}*"))


def main() -> None:
    """Answers the request on standard input."""
    try:
        found = answer(json.loads(zlib.decompress(sys.stdin.buffer.read())))
    except (ConfigError, JobError, OSError) as error:
        found = {"refused": str(error)}
    sys.stdout.buffer.write(MARK + zlib.compress(json.dumps(found).encode()))


if __name__ == "__main__":
    main()
