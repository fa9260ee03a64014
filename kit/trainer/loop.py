"""The training loop of one rank.

It logs raw times and tokens only; MFU is derived by the reader.
"""

import contextlib
import math
import time
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cluster.files import unless_full
from cluster.outcome import Home
from cluster.record import counted
from cluster.state import JobState, take_request, update_state
from kit.data import shares
from kit.engines import build_engine, gpu
from kit.engines.process_group import control_group
from kit.errors import RunError
from kit.run import HOOK, Run
from kit.run.metrics import MetricsWriter
from kit.torch_private import on_compile
from kit.trainer.batches import Batches
from kit.trainer.heartbeat import Heartbeat
from kit.trainer.hook import Hook, StepState
from kit.trainer.profiler import Profiler
from kit.trainer.recovery import Recovery, start_from
from kit.trainer.telemetry import SpeedProbe, busy_s, collect_garbage, memory_row
from kit.trainer.watchdog import Watchdog, patience_s

HEARTBEAT_EVERY_S = 1.0
ASKED_EVERY_S, ASKED_STEPS = 0.5, 32
"""Seconds between two looks at what people ask for, and the most steps between them, of which
any may be slow."""
AHEAD_ON = ("cuda",)
"""Devices that work on a step while this process launches the next, and reads only then what the
step gave."""


class Launched(NamedTuple):
    """A step that its device may still be at."""

    step: int
    first: int  # sample
    start: float
    learning_rate: float
    begun: Any  # what the engine reads loss and gradient norm from
    waits: dict[str, float]  # seconds


class Trainer:
    """One rank of one attempt of a run."""

    def __init__(self, run: Run, *, attempt: int, device: torch.device) -> None:
        self.run, self.recipe, self.plan, self.attempt = run, run.recipe, run.plan, attempt
        self.rank, self.device = dist.get_rank(), device
        self.control, self.home = control_group(), Home(run.directory)
        # Of launched steps, which are finished but for those in `launched`.
        self.step, self.consumed = 0, 0
        self.launched: deque[Launched] = deque()
        self.rows: list[dict[str, Any]] = []  # of finished steps, to be written
        self.step_time_s, self.finished_at, self.last_beat = 0.0, 0.0, float("-inf")
        self.work_s: float | None = None
        self.ask_at = 0
        self.heartbeat = Heartbeat(run.directory, attempt, self.control)
        self.profiler = Profiler(run, self.control, device)
        self.probe = SpeedProbe(device) if device.type == "cuda" else None
        self.watchdog = Watchdog(
            patience_s(self.recipe, self.plan),
            rank=self.rank,
            alive=self.heartbeat.say,
            silent_ranks=self.heartbeat.silent_ranks,
            dump=gpu.dump_flight_recorder if device.type == "cuda" else None,
        )
        self.recovery = Recovery(run, attempt=attempt, group=self.control)
        self.hook = Hook(run.directory / HOOK, self.control) if self.recipe.hook else None
        # Where training goes on after a bad step, none may come between that step and its answer;
        # a hook sees the step's own weights.
        can_wait = self.plan.engine == "native" and not self.recovery.guard.goes_on_after_bad
        self.is_ahead = can_wait and device.type in AHEAD_ON and self.hook is None
        dataset = run.dataset()
        self.engine = build_engine(
            run.spec,
            self.plan,
            self.recipe,
            device,
            initialise=not self.recovery.steps() and not self.recipe.init_from,
            document_end=dataset.eos_id if self.recipe.mask_documents else None,
        )
        self.checkpoints = self.recovery.checkpoints_of(self.engine)
        self.batches = Batches(run, dataset, self.engine.data_rank, device)
        self._resume()
        self.metrics = MetricsWriter(run.directory / "metrics.jsonl") if self.rank == 0 else None

    @property
    def finished(self) -> int:
        """The last step whose result is there."""
        return self.step - len(self.launched)

    def _resume(self) -> None:
        manifest = self.recovery.load_newest(self.checkpoints)
        if manifest is None:
            if self.recipe.init_from:
                start_from(self.recipe.init_from, self.run.spec, self.engine)
            return
        self.step, self.consumed = manifest.step, manifest.samples
        if self.rank == 0:
            saved, now = manifest.plan.num_devices, self.plan.num_devices
            print(
                f"resumed from step {self.step} (written on {counted(saved, 'device')}, now {now})",
                flush=True,
            )

    def train(self) -> str:
        """Runs until the recipe's last step or a request to stop; returns why it ended."""
        on_compile(self.watchdog.compile_begins, self.watchdog.compile_ends)
        try:
            return self._train()
        except Exception as error:
            # where the directory is gone, that is why the rest failed, on every rank
            self.home.check()
            if not isinstance(error, RunError):  # else they come after a bad one
                with contextlib.suppress(Exception):  # a device that has failed tells nothing more
                    self.rows += [self._row(launched) for launched in self.launched]
            self._write()
            raise

    def _train(self) -> str:
        while self.step < self.recipe.num_steps:
            self._profile()
            self._launch_step()
            self._finish_steps(but=1 if self.is_ahead else 0)
            last = self.step == self.recipe.num_steps
            stop, checkpoint = self._requests()
            validate = self._due(self.recipe.validation_every) or (
                last and self.recipe.validation_every
            )
            save = last or stop or checkpoint or self._due(self.recipe.checkpoint_every)
            if validate or save:  # which hold no step that was not judged
                self._finish_steps()
            if validate:
                with self.watchdog.paused():
                    self.rows[-1]["validation_loss"] = self.batches.validation_loss(self.engine)
            self._write()
            self._beat()
            with self.watchdog.paused():
                self.checkpoints.poll()
                if save:
                    self._checkpoint()
            if stop:
                break
        self._profile(ends=True)
        self.watchdog.close()
        self.checkpoints.finish()
        self._write()  # what waited for room, which the last checkpoint has found
        if self.step < self.recipe.num_steps:
            return f"stopped by request after step {self.step}; resume continues from there"
        return f"finished {counted(self.step, 'step')}"

    def _profile(self, *, ends: bool = False) -> None:
        """Begins or ends the recording of steps, where it is time to."""
        if self.profiler.is_to_turn(self.step + 1, ends=ends):
            self._finish_steps()
            with self.watchdog.paused():
                self.profiler.turn(self.step + 1)

    def _launch_step(self) -> None:
        start = time.perf_counter()
        learning_rate = self.recipe.learning_rate_at(self.step + 1)
        samples = self.batches.at(self.consumed)
        loaded, busy = time.perf_counter(), busy_s()
        begun = self.engine.begin_step(samples, learning_rate)
        waits = {"data_s": round(loaded - start, 6)}
        if self.device.type == "cpu":
            # This thread computes, and does not while it waits for other ranks.
            busy = busy_s() - busy
            self.work_s = loaded - start + busy
            waits["waiting_s"] = round(max(0.0, time.perf_counter() - loaded - busy), 6)
        elif self.probe:
            self.work_s = self.probe.look()
        if self.plan.engine != "neuron":  # whose cycles may hold tensors
            collect_garbage(self.step)
        self.step += 1
        self.launched.append(Launched(self.step, self.consumed, start, learning_rate, begun, waits))
        self.consumed += self.plan.global_batch_size

    def _finish_steps(self, but: int = 0) -> None:
        """Waits for all launched steps `but` so many, and answers a bad one as the recipe says."""
        while len(self.launched) > but:
            row = self._row(self.launched.popleft())
            # First: where its answer ends the run, it is in the metrics all the same.
            self.rows.append(row)
            if not self.watchdog.has_begun:
                gpu.shorten_timeouts(self.watchdog.limit_s)
            self.watchdog.step_done(row["step"], self.step_time_s)
            self.heartbeat.step_done(row, self.work_s)
            with self.watchdog.paused():
                self.recovery.respond(row, self.checkpoints)
            if self.hook is not None:
                self._ask_hook(self.hook, row)

    def _ask_hook(self, hook: Hook, row: dict[str, Any]) -> None:
        state = StepState(
            step=row["step"],
            loss=row["loss"],
            grad_norm=row["grad_norm"],
            learning_rate=row["learning_rate"],
            tokens=self.consumed * self.run.spec.sequence_length,
            rank=self.rank,
            num_ranks=dist.get_world_size(),
            parts=tuple(self.engine.decoders),
        )
        numbers, problem = hook.numbers(state)
        row |= numbers
        if problem:
            self.recovery.tell("hook", problem, row["step"])

    def _row(self, launched: Launched) -> dict[str, Any]:
        """Returns what the metrics say of a step, once its result is there."""
        loss, grad_norm, phases = self.engine.end_step(launched.begun)
        before, self.finished_at = self.finished_at, time.perf_counter()
        # Launched early, it had to wait its turn.
        self.step_time_s = self.finished_at - max(before, launched.start)
        stall_s, self.checkpoints.stall_s = self.checkpoints.stall_s, 0.0
        length, batch = self.run.spec.sequence_length, self.plan.global_batch_size
        mix = shares(self.recipe, length, launched.first, batch)
        return {
            "step": launched.step,
            "attempt": self.attempt,
            "time": time.time(),
            "step_time_s": self.step_time_s,
            "tokens": batch * length,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": launched.learning_rate,
            **memory_row(self.device),
            **self.engine.loss_scaling(),
            **({"checkpoint_s": stall_s} if stall_s else {}),
            **launched.waits,
            **phases,
            **{f"share/{name}": share for name, share in mix.items()},
        }

    def _write(self) -> None:
        if self.metrics is not None:
            with unless_full():
                self.metrics.write(self.rows)
        self.rows.clear()

    def _requests(self) -> tuple[bool, bool]:
        """Returns whether to stop and whether to checkpoint: read by rank 0, agreed by all at this
        step boundary.

        Rank 0 says too after how many steps all of them ask again, so that an answer takes no more
        than about a second.
        """
        if self.step < min(self.ask_at, self.recipe.num_steps):
            return False, False
        asked = torch.zeros(4)
        if self.rank == 0:
            asked[0] = take_request(self.run.directory, "stop", step=self.step)
            asked[1] = take_request(self.run.directory, "checkpoint", step=self.step)
            asked[2] = self.heartbeat.must_gather()
            asked[3] = min(
                ASKED_STEPS, max(1, ASKED_EVERY_S // max(self.watchdog.times, default=math.inf))
            )
        dist.broadcast(asked, src=0, group=self.control)
        if asked[2]:
            self.heartbeat.gather()
        self.ask_at = self.step + int(asked[3])
        return bool(asked[0]), bool(asked[1])

    def _checkpoint(self) -> None:
        assert not self.launched, "a checkpoint holds no step that was not judged"
        self.home.check()
        facts = {
            "step": self.step,
            "samples": self.consumed,
            "tokens": self.consumed * self.run.spec.sequence_length,
            "seed": self.recipe.seed,
            "skipped": self.recovery.guard.skipped,
            "recent_losses": self.recovery.guard.recent,
            "spec": self.run.spec,
            "plan": self.plan,
        }
        start = time.perf_counter()
        self.checkpoints.save(facts)
        self.checkpoints.stall_s += time.perf_counter() - start  # of the next step

    def _beat(self) -> None:
        now = time.monotonic()  # a wall clock that is set back must not silence a run
        if now - self.last_beat < HEARTBEAT_EVERY_S and self.step < self.recipe.num_steps:
            return
        self.last_beat = now
        # Else nothing is written, and thousands of ranks would look.
        if self.rank == 0 or not self.heartbeat.is_gathered:
            self.home.check()
        with unless_full():
            self.heartbeat.say()
            if self.rank == 0:
                update_state(
                    self.run.directory,
                    attempt=self.attempt,
                    state=JobState.RUNNING,
                    step=self.finished,
                    heartbeat=time.time(),
                    step_time_s=self.step_time_s,
                    notice=self.recovery.notice,
                )

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0
