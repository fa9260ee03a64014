"""The training loop of one rank.

It logs raw times and tokens only; MFU is derived by the reader.
"""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from cluster.outcome import RunDirectory
from cluster.record import counted
from cluster.state import JobState
from kit.data import shares
from kit.engines import build_engine, gpu
from kit.engines.process_group import control_group
from kit.errors import RunError
from kit.parallel.groups import from_rank_0
from kit.run import Run
from kit.run.metrics import MetricsWriter
from kit.trainer import heartbeat
from kit.trainer.background import Background
from kit.trainer.batches import Batches
from kit.trainer.callback import Callback, Step
from kit.trainer.heartbeat import Heartbeat, Notices
from kit.trainer.hook import Hook
from kit.trainer.profiler import Profiler
from kit.trainer.recovery import Recovery
from kit.trainer.requests import Requests
from kit.trainer.telemetry import Telemetry, busy_s
from kit.trainer.watchdog import Watchdog, patience_s

ASKED_EVERY_S, ASKED_STEPS = 0.5, 32
"""Seconds between two looks at what people ask for, and the most steps between them, of which
any may be slow."""
FLUSH_WAIT_S = 10.0
"""Longest wait, in seconds, for the metrics of the steps before a checkpoint."""
END_WAIT_S = 60.0
"""Longest wait, in seconds, for the last metrics and the last state at the end of training."""
FAILURE_WAIT_S = 10.0
"""Longest wait, in seconds, for the last metrics after an error, since other ranks wait too."""
AHEAD_ON = ("cuda",)
"""Devices that work on a step while this process launches the next, and reads only then what the
step gave."""


class Trainer:
    """One rank of one attempt of a run."""

    def __init__(self, run: Run, *, attempt: int, device: torch.device) -> None:
        self.run, self.recipe, self.plan, self.attempt = run, run.recipe, run.plan, attempt
        self.rank, self.device = dist.get_rank(), device
        self.control, self.home = control_group(), RunDirectory(run.directory)
        # What a killed attempt left is in order, before any rank looks for a checkpoint.
        saved = from_rank_0(run.checkpoints.recover, self.control)
        dataset = run.dataset()
        self.engine = build_engine(
            run.spec,
            self.plan,
            self.recipe,
            device,
            initialise=not saved and not self.recipe.init_from,
            document_end=dataset.eos_id if self.recipe.mask_documents else None,
        )
        self.batches = Batches(run, dataset, self.engine.data_rank, device)
        self.background = Background(self.home, self._report_disk)
        self.metrics = MetricsWriter(run.directory / "metrics.jsonl")
        self.requests = Requests(run.directory)
        self.callbacks = self._make_callbacks()
        """Called in this order: each finds in a step's row what those before it have added."""
        self.step, self.samples = self.recovery.resume()
        """Of launched steps, which are finished but for those in `launched`."""
        self.launched: deque[Step] = deque()  # of which the device may still be at the last
        waits = any(callback.needs_each_result for callback in self.callbacks)
        works_ahead = self.plan.engine == "native" and device.type in AHEAD_ON
        self.in_flight = 1 if works_ahead and not waits else 0
        """How many steps may be launched whose results nobody has seen."""
        self.rows: list[dict[str, Any]] = []
        """Rows of finished steps that are not handed to the background yet."""
        self.finished_at, self.ask_at = 0.0, 0

    def _make_callbacks(self) -> list[Callback]:
        run, control = self.run, self.control
        self.notices = notices = Notices(run.directory, self.attempt)
        self.heartbeat = Heartbeat(self.home, self.attempt, control, notices, self.background.wake)
        self.watchdog = Watchdog(
            patience_s(self.recipe, self.plan),
            rank=self.rank,
            alive=self.heartbeat.answer,
            look_at_ranks=self.heartbeat.look_at_ranks,
            silent_ranks=self.heartbeat.silent_ranks,
            dump=gpu.dump_flight_recorder if self.device.type == "cuda" else None,
        )
        self.recovery = Recovery(
            run,
            self.engine,
            control,
            attempt=self.attempt,
            watchdog=self.watchdog,
            notices=notices,
        )
        self.profiler = Profiler(run, control, self.device, self.watchdog)
        self.telemetry = Telemetry(self.plan, self.device)
        hook = [Hook(run, self.engine, control, notices)] if self.recipe.hook else []
        return [
            self.profiler,
            self.watchdog,
            self.telemetry,
            self.recovery,
            *hook,
            self.heartbeat,
        ]

    def train(self) -> str:
        """Runs until the recipe's last step or a request to stop; returns why it ended.

        A GPU is given a step before the result of the one before is looked at: there are at most
        `in_flight` such steps, and none when a checkpoint is made or held-out text is judged.
        """
        stop, last_step = False, self.recipe.num_steps
        with self._rows_of_a_failed_run_written():
            self._start_background()
            for callback in self.callbacks:
                callback.on_start()
            while self.step < last_step and not stop:
                for callback in self.callbacks:
                    callback.before_step(self.step + 1)
                self._launch_step()  # on the next batch
                self._finish_steps(but=self.in_flight)  # their rows, then each callback.after_step
                self.background.check()  # raises if this attempt has lost the run directory
                stop, save = self._requests()
                is_last = self.step == last_step
                save |= stop or is_last or self._is_due(self.recipe.checkpoint_every)
                validate = self._is_due(self.recipe.validation_every, is_last)
                if save or validate or self.profiler.turns_before(self.step + 1):
                    self._finish_steps()
                if validate:
                    self._validate()
                self._write_rows()
                if save:
                    self._save()
            for callback in self.callbacks:
                callback.on_end()
            self.background.check()
        if self.step < last_step:
            state = JobState.STOPPING
            reason = f"stopped by request after step {self.step}; resume continues from there"
        else:
            # No final state here: the supervisor writes it after all ranks have exited.
            state = JobState.RUNNING
            reason = f"finished {counted(self.step, 'step')}"
        self.heartbeat.end(state, reason, self.step)
        self._finish_background(END_WAIT_S)
        self.background.check()
        return reason

    def _launch_step(self) -> None:
        start = time.perf_counter()
        learning_rate = self.recipe.learning_rate_at(self.step + 1)
        batch = self.batches.at(self.samples)
        loaded, busy = time.perf_counter(), busy_s()
        begun = self.engine.begin_step(batch, learning_rate, self.recovery.accepts)
        self.step += 1
        self.samples += self.plan.global_batch_size
        self.launched.append(
            Step(
                number=self.step,
                samples=self.samples,
                learning_rate=learning_rate,
                start=start,
                data_s=loaded - start,
                launch_s=time.perf_counter() - loaded,
                busy_s=busy_s() - busy,
                begun=begun,
            )
        )

    def _finish_steps(self, but: int = 0) -> None:
        """Waits for all launched steps `but` so many, and shows them to the callbacks."""
        while len(self.launched) > but:
            step = self._finish_step()
            for callback in self.callbacks:
                callback.after_step(step)

    def _finish_step(self) -> Step:
        """Returns the first launched step, once its result is there, with its row, which is in the
        metrics also where a callback ends the run.
        """
        step = self.launched.popleft()
        step.row = self._row(step)
        self.rows.append(step.row)
        return step

    def _row(self, step: Step) -> dict[str, Any]:
        loss, grad_norm = step.begun.read()
        before, self.finished_at = self.finished_at, time.perf_counter()
        length, batch = self.run.spec.sequence_length, self.plan.global_batch_size
        mix = shares(self.recipe, length, step.samples - batch, batch)
        return {
            "step": step.number,
            "attempt": self.attempt,
            "time": time.time(),
            # Launched early, it had to wait its turn.
            "step_time_s": self.finished_at - max(before, step.start),
            "tokens": batch * length,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": step.learning_rate,
            "data_s": round(step.data_s, 6),
            **step.begun.seconds(),
            **self.engine.loss_scaling(),
            **{f"share/{name}": share for name, share in mix.items()},
        }

    def _requests(self) -> tuple[bool, bool]:
        """Returns whether to stop and whether to checkpoint: found by rank 0, agreed by all at this
        step boundary.

        Rank 0 says too after how many steps all of them ask again, so that an answer takes no more
        than about a second.
        """
        if self.step < min(self.ask_at, self.recipe.num_steps):
            return False, False
        asked = torch.zeros(4)
        if self.rank == 0:
            slowest_s = max(self.watchdog.times, default=math.inf)
            asked = torch.tensor(
                [
                    self.requests.take("stop", self.step),
                    self.requests.take("checkpoint", self.step),
                    self.heartbeat.must_gather(),
                    min(ASKED_STEPS, max(1, ASKED_EVERY_S // slowest_s)),
                ],
                dtype=asked.dtype,
            )
        dist.broadcast(asked, src=0, group=self.control)
        stop, save, gather, steps = asked.tolist()
        if gather:
            self.heartbeat.gather()
        self.ask_at = self.step + int(steps)
        return bool(stop), bool(save)

    def _is_due(self, every: int | None, is_last: bool = False) -> bool:
        return every is not None and (is_last or self.step % every == 0)

    def _validate(self) -> None:
        """Adds the validation loss, and the seconds that it took, to the row of the last step."""
        row = self.rows[-1]
        start = time.perf_counter()
        with self.watchdog.paused():
            row["validation_loss"] = self.batches.validation_loss(self.engine)
        row["validation_s"] = round(time.perf_counter() - start, 6)

    def _save(self) -> None:
        if self.rank == 0:
            with self.watchdog.paused():
                # A run that resumes from this checkpoint has the metrics of all steps before it.
                self.background.flush(FLUSH_WAIT_S)
        self.background.check()
        self.home.check()
        self.recovery.save(self.step, self.samples)

    def _write_rows(self) -> None:
        if self.rank == 0:
            self.metrics.add(self.rows)
        self.rows.clear()

    def _start_background(self) -> None:
        """Starts the thread that reads and writes the monitoring files of this rank."""
        background, beat_s = self.background, heartbeat.BEAT_EVERY_S
        if self.rank == 0:
            background.add(self.metrics.flush)
            background.add(self.notices.write)
            background.add(self.requests.look)
            background.add(self.heartbeat.write_gathered)
        if not self.heartbeat.is_gathered:  # Else most ranks have no such file, and need no thread.
            background.add(self.heartbeat.write, beat_s)
            background.add(self.heartbeat.write_answer)
        if self.rank == 0:
            background.add(self.heartbeat.write_state, beat_s)
        background.start()

    def _finish_background(self, limit_s: float) -> None:
        """Has the last metrics, notices and heartbeat written, for at most `limit_s` seconds."""
        self._write_rows()
        with self.watchdog.paused():
            self.background.finish(limit_s)
        if unwritten := self.metrics.num_unwritten:
            print(
                f"WARNING: {counted(unwritten, 'line')} of metrics.jsonl could not be written and"
                " are lost",
                file=sys.stderr,
                flush=True,
            )

    def _report_disk(self, problem: str) -> None:
        """Reports that the file system fails under the monitoring files. Called in the
        background.
        """
        if self.rank == 0:
            self.notices.add("disk", problem, self.step)
        else:
            print(f"WARNING: rank {self.rank}: {problem}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _rows_of_a_failed_run_written(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # where the directory is gone, that is why the rest failed, on every rank
            self.home.check()
            if not isinstance(error, RunError):  # else they come after a bad one
                with contextlib.suppress(Exception):  # a device that has failed tells nothing more
                    while self.launched:
                        self.telemetry.after_step(self._finish_step())
            self._finish_background(FAILURE_WAIT_S)
            raise
