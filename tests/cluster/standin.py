"""A trainer without torch: RUN_DIR STEPS SECONDS. Steps, heartbeats, a checkpoint every 5 steps,
a stop when asked.
"""

import os
import sys
import time
from pathlib import Path

from cluster.files import write_atomic
from cluster.heartbeats import RankHeartbeat, keeper_of, tell
from cluster.state import take_request, update_state

run_dir, num_steps, step_time_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank, attempt = int(os.environ["RANK"]), int(os.environ["KIT_ATTEMPT"])
saved, begun, stopped = (
    run_dir / "saved",
    run_dir / f"begun_{attempt}",
    run_dir / f"stopped_{attempt}",
)
if rank == 0:
    write_atomic(begun, saved.read_text() if saved.exists() else "0")
while not begun.exists():  # rank 0 may have saved already when this one starts
    time.sleep(0.02)
step = int(begun.read_text())
print(f"attempt {attempt} rank {rank} from step {step}", flush=True)
while step < num_steps and not stopped.exists():
    time.sleep(step_time_s)
    step += 1
    if keeper_of(run_dir):
        node = os.environ.get("SLURMD_NODENAME")
        tell(
            run_dir,
            RankHeartbeat(rank=rank, attempt=attempt, step=step, time=time.time(), host=node),
        )
    if rank == 0:
        beat = {"step": step, "heartbeat": time.time(), "step_time_s": step_time_s}
        update_state(run_dir, attempt=attempt, state="running", **beat)
        stop = take_request(run_dir, "stop")
        if stop or step % 5 == 0:
            write_atomic(saved, str(step))  # it may be killed at any moment
        if stop:
            update_state(
                run_dir, attempt=attempt, state="stopping", reason=f"stopped after step {step}"
            )
            stopped.touch()
