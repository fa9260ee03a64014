"""The training loop of one rank.

`Trainer.train` is the loop. It writes only measured values such as times and tokens. Readers
compute MFU from these values.
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

from cluster.directory_handle import RunDirectory
from cluster.heartbeats import GATHER_EVERY_S
from cluster.record import counted
from cluster.state import JobState
from kit.data import shares
from kit.engines import gpu
from kit.engines.build import build_engine
from kit.engines.process_group import control_group
from kit.errors import RunError
from kit.parallel.groups import from_rank_0
from kit.run import Run
from kit.run.metrics import MetricsWriter
from kit.trainer import heartbeat
from kit.trainer.background import Background
from kit.trainer.bad_steps import BadStepPolicy
from kit.trainer.batches import Batches
from kit.trainer.callback import Callback, Step
from kit.trainer.checkpoints import CheckpointManager, load_initial_weights
from kit.trainer.device_readings import device_reader
from kit.trainer.heartbeat import Heartbeat, Notices
from kit.trainer.hook import Hook
from kit.trainer.profiler import Profiler
from kit.trainer.requests import Requests
from kit.trainer.telemetry import Telemetry, busy_s
from kit.trainer.watchdog import Watchdog, patience_s

REQUESTS_EVERY_S = 0.5
"""Target time, in seconds, between two steps at which the ranks agree on requests to stop or to
save."""
REQUESTS_MAX_STEPS = 32
"""Largest number of steps between two agreements on requests, since later steps may be slower than
the last steps."""
FLUSH_WAIT_S = 10.0
"""Longest wait, in seconds, until the metrics of all steps before a checkpoint are written."""
END_WAIT_S = 60.0
"""Longest wait, in seconds, until the last metrics and the last state are written at the end of
training."""
FAILURE_WAIT_S = 10.0
"""Longest wait, in seconds, until the last metrics are written after an error. It is short, since
the other ranks wait, too."""
ASYNCHRONOUS_DEVICES = ("cuda",)
"""Device types that compute a step while the host launches the next step."""


class Trainer:
    """Trains one rank in one attempt of a run."""

    def __init__(self, run: Run, *, attempt: int, device: torch.device) -> None:
        self.run = run
        self.recipe = run.recipe
        self.plan = run.plan
        self.attempt = attempt
        self.rank = dist.get_rank()
        self.device = device
        self.control = control_group()
        """CPU process group of all ranks."""
        self.home = RunDirectory(run.directory)

        # A killed attempt may have left unfinished checkpoints. Rank 0 renames or deletes them
        # before any rank looks for the newest checkpoint.
        has_checkpoint = from_rank_0(run.checkpoints.recover, self.control)
        dataset = run.dataset()
        document_end = dataset.eos_id if self.recipe.mask_documents else None
        self.engine = build_engine(
            run.spec,
            self.plan,
            self.recipe,
            device,
            initialise=not has_checkpoint and not self.recipe.init_from,
            document_end=document_end,
        )
        self.batches = Batches(run, dataset, self.engine.data_rank, device)

        self.background = Background(self.home, self._report_disk)
        self.metrics = MetricsWriter(run.directory / "metrics.jsonl")
        self.requests = Requests(run.directory)
        self.notices = Notices(run.directory, attempt)
        self.device_reader = device_reader(device)
        self.heartbeat = Heartbeat(
            self.home,
            attempt,
            self.control,
            self.notices,
            self.background.wake,
            self.device_reader,
        )
        dump_recorder = gpu.dump_flight_recorder if device.type == "cuda" else None
        self.watchdog = Watchdog(
            patience_s(self.recipe, self.plan),
            rank=self.rank,
            alive=self.heartbeat.answer,
            store_heartbeat_times=self.heartbeat.store_heartbeat_times,
            silent_ranks=self.heartbeat.silent_ranks,
            dump=dump_recorder,
        )
        self.telemetry = Telemetry(self.plan, device)
        self.checkpoints = CheckpointManager(
            run, self.engine, self.control, attempt=attempt, notices=self.notices
        )
        self.bad_steps = BadStepPolicy(
            run, self.checkpoints, self.control, watchdog=self.watchdog, notices=self.notices
        )
        self.callbacks: list[Callback] = [Profiler(run, self.control, device, self.watchdog)]
        """Extensions of the training loop, in the order in which they are called."""
        if self.recipe.hook:
            self.callbacks.append(Hook(run, self.engine, self.control, self.notices))

        self.step, self.samples = self._load_state()
        """Numbers of steps and samples of the run so far, including launched steps that are not
        finished."""
        self.launched: deque[Step] = deque()
        """Launched steps whose result has not been read yet, oldest first."""
        self.max_unfinished = 0
        """Number of launched steps that may be unfinished when the next step is launched. It is 1
        if the device computes a step while the host launches the next step, unless the result of
        each step is needed first. Otherwise it is 0."""
        works_ahead = self.plan.capabilities.works_ahead and device.type in ASYNCHRONOUS_DEVICES
        if works_ahead and not self._needs_each_result():
            self.max_unfinished = 1
        self.rows: list[dict[str, Any]] = []
        """Rows of finished steps for metrics.jsonl that are not yet passed to the background
        thread."""
        self.finished_at = 0.0
        """Time at which the last step finished, in seconds of `time.perf_counter`."""
        self.next_agreement = 0
        """Number of the step after which the ranks next agree on requests."""

    def _load_state(self) -> tuple[int, int]:
        """Loads the newest valid checkpoint into the engine, or else the weights that the recipe
        names. Returns (steps, samples) of the run so far.
        """
        manifest = self.checkpoints.load_latest()
        if manifest is None:
            if self.recipe.init_from:
                load_initial_weights(self.recipe.init_from, self.run.spec, self.engine)
            return 0, 0
        self.bad_steps.restore(manifest)
        if self.rank == 0:
            written_on = counted(manifest.plan.num_devices, "device")
            print(
                f"resumed from step {manifest.step} (written on {written_on}, now"
                f" {self.plan.num_devices})",
                flush=True,
            )
        return manifest.step, manifest.samples

    def _needs_each_result(self) -> bool:
        """Returns whether the result of each step must be known before the next step is
        launched.
        """
        if self.bad_steps.continues_after_bad_step:
            return True
        return any(callback.needs_each_result for callback in self.callbacks)

    def train(self) -> str:
        """Trains until the recipe's last step or a request to stop. Returns the reason why training
        ended.

        On a GPU, a step is launched before the result of the previous step is read. At most
        `max_unfinished` launched steps are without a result. All results are read before a
        checkpoint is saved or the validation loss is computed.
        """
        should_stop = False
        with self._last_rows_written():
            self._start()
            while self.step < self.recipe.num_steps and not should_stop:
                for callback in self.callbacks:
                    callback.before_step(self.step + 1)
                self._launch_step()  # next batch, forward, backward, clip, optimizer
                self._finish_steps(self.max_unfinished)  # metrics row, reaction to a bad step
                # Raises an error if this attempt has lost the run directory.
                self.background.check()

                should_stop, should_save = self._agree_on_requests()
                is_last = self.step == self.recipe.num_steps
                if should_stop or is_last or self._is_due(self.recipe.checkpoint_every):
                    should_save = True
                should_validate = self._is_due(self.recipe.validation_every, is_last)
                if should_save or should_validate or self._needs_finished_steps():
                    self._finish_steps()
                if should_validate:
                    self._validate()
                self._write_rows()
                if should_save:
                    self._save()
            self._end()
        return self._report_end()

    def _start(self) -> None:
        """Starts the background thread, the watchdog and the callbacks."""
        self._start_background()
        self.watchdog.start()
        for callback in self.callbacks:
            callback.on_start()

    def _launch_step(self) -> None:
        """Launches one optimizer step on the next batch. A GPU may still compute the step when the
        function returns.
        """
        start = time.perf_counter()
        learning_rate = self.recipe.learning_rate_at(self.step + 1)
        batch = self.batches.local_batch(self.samples)
        loaded = time.perf_counter()
        busy_before_s = busy_s()
        result = self.engine.begin_step(batch, learning_rate, self.bad_steps.accepts)
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
                busy_s=busy_s() - busy_before_s,
                result=result,
            )
        )

    def _finish_steps(self, max_unfinished: int = 0) -> None:
        """Finishes launched steps, oldest first, until at most `max_unfinished` are left. To finish
        a step is to read its result, judge it and call the callbacks.
        """
        while len(self.launched) > max_unfinished:
            step = self._read_result()
            self.watchdog.after_step(step)
            self.telemetry.after_step(step)
            if stall_s := self.checkpoints.take_stall_s():
                step.row["checkpoint_s"] = stall_s
            step.row |= self.heartbeat.take_device_row()
            self.bad_steps.after_step(step)
            self.checkpoints.poll(step.number)
            for callback in self.callbacks:
                callback.after_step(step)
            self.heartbeat.after_step(step)

    def _read_result(self) -> Step:
        """Waits for the oldest launched step and reads its result. Returns the step with its
        metrics row. The row is stored before the step is judged, so that it is written even if a
        bad loss ends the run.
        """
        step = self.launched.popleft()
        step.row = self._metrics_row(step)
        self.rows.append(step.row)
        return step

    def _metrics_row(self, step: Step) -> dict[str, Any]:
        numbers = step.result.numbers()
        previous_finished_at = self.finished_at
        self.finished_at = time.perf_counter()
        # A step that was launched early could begin only when the device had finished the previous
        # step.
        begun_at = max(previous_finished_at, step.start)
        length = self.run.spec.sequence_length
        batch_size = self.plan.global_batch_size
        row = {
            "step": step.number,
            "attempt": self.attempt,
            "time": time.time(),
            "step_time_s": self.finished_at - begun_at,
            "tokens": batch_size * length,
            **numbers,
            "learning_rate": step.learning_rate,
            "data_s": round(step.data_s, 6),
        }
        row |= step.result.seconds()
        row |= self.engine.loss_scaling()
        data_mix = shares(self.recipe, length, step.samples - batch_size, batch_size)
        for name, share in data_mix.items():
            row[f"share/{name}"] = share
        return row

    def _agree_on_requests(self) -> tuple[bool, bool]:
        """Returns (should stop, should save), equal on all ranks.

        Rank 0 reads the requests and broadcasts them. It also chooses the number of steps until the
        next agreement, so that training acts on a request within about a second.
        """
        if self.step < min(self.next_agreement, self.recipe.num_steps):
            return False, False
        message = torch.zeros(4)
        if self.rank == 0:
            slowest_step_s = max(self.watchdog.times, default=math.inf)
            num_steps = max(1, REQUESTS_EVERY_S // slowest_step_s)
            message = torch.tensor(
                [
                    self.requests.take("stop", self.step),
                    self.requests.take("checkpoint", self.step),
                    self.heartbeat.must_gather(),
                    min(REQUESTS_MAX_STEPS, num_steps),
                ],
                dtype=message.dtype,
            )
        dist.broadcast(message, src=0, group=self.control)
        should_stop, should_save, should_gather, num_steps = message.tolist()
        if should_gather:
            self.heartbeat.gather()
        self.next_agreement = self.step + int(num_steps)
        return bool(should_stop), bool(should_save)

    def _is_due(self, every: int | None, is_last: bool = False) -> bool:
        """Returns whether an action that is repeated every `every` steps is due after the last
        launched step. If `every` is None, the action is never due. Otherwise it is also due if
        `is_last` is True.
        """
        if every is None:
            return False
        return is_last or self.step % every == 0

    def _needs_finished_steps(self) -> bool:
        """Returns whether a callback needs the results of all launched steps before the next step
        is launched.
        """
        next_step = self.step + 1
        return any(callback.needs_finished_steps(next_step) for callback in self.callbacks)

    def _validate(self) -> None:
        """Computes the validation loss. Adds it, and the seconds that it took, to the row of the
        last step.
        """
        row = self.rows[-1]
        start = time.perf_counter()
        with self.watchdog.paused():
            row["validation_loss"] = self.batches.validation_loss(self.engine)
        row["validation_s"] = round(time.perf_counter() - start, 6)

    def _write_rows(self) -> None:
        """Passes the metrics of finished steps to the background thread, which writes them."""
        if self.rank == 0:
            self.metrics.add(self.rows)
        self.rows.clear()

    def _save(self) -> None:
        """Starts writing a checkpoint of the last step."""
        if self.rank == 0:
            with self.watchdog.paused():
                # The metrics of all steps before this checkpoint must be on disk, since a run that
                # resumes from the checkpoint does not compute them again.
                self.background.flush(FLUSH_WAIT_S)
        self.background.check()
        self.home.check()
        with self.watchdog.paused():
            self.checkpoints.save(self.step, self.samples, self.bad_steps.manifest_fields())

    def _end(self) -> None:
        """Ends the callbacks and the watchdog, and waits until the last checkpoint is complete."""
        for callback in self.callbacks:
            callback.on_end()
        self.watchdog.stop()
        self.checkpoints.end()
        self.background.check()

    def _report_end(self) -> str:
        """Writes the last state and metrics. Returns the reason why training ended."""
        if self.step < self.recipe.num_steps:
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

    @contextlib.contextmanager
    def _last_rows_written(self) -> Iterator[None]:
        """Context manager that writes the metrics of all finished steps if an error ends
        training.
        """
        try:
            yield
        except Exception as error:
            # If the run directory is lost, `check` raises. This loss is then the cause of the error
            # on every rank, and is reported instead.
            self.home.check()
            # After a bad step the results of later steps are useless, so they are not read.
            if not isinstance(error, RunError):
                with contextlib.suppress(Exception):  # A failed device returns no more results.
                    while self.launched:
                        self.telemetry.after_step(self._read_result())
            self._finish_background(FAILURE_WAIT_S)
            raise

    # The thread for monitoring files --------------------------------------------------------------

    def _start_background(self) -> None:
        """Starts the thread that reads and writes the monitoring files of this rank."""
        background = self.background
        beat_s = heartbeat.BEAT_EVERY_S
        if self.rank == 0:
            background.add(self.metrics.flush)
            background.add(self.notices.write)
            background.add(self.requests.read_requests)
            background.add(self.heartbeat.write_gathered)
        # With gathered heartbeats, most ranks write no file and need no thread.
        if not self.heartbeat.is_gathered:
            background.add(self.heartbeat.write, beat_s)
            background.add(self.heartbeat.write_answer)
        if self.rank == 0:
            background.add(self.heartbeat.write_state, beat_s)
        if self.device_reader is not None:
            self.device_reader.start()
            if self.rank == 0:
                background.add(self.heartbeat.summarise_devices, GATHER_EVERY_S)
        background.start()

    def _finish_background(self, limit_s: float) -> None:
        """Makes the background thread write the last metrics, notices and heartbeat. Waits for at
        most `limit_s` seconds.
        """
        self._write_rows()
        with self.watchdog.paused():
            self.background.finish(limit_s)
        if self.device_reader is not None:
            self.device_reader.end()
        if unwritten := self.metrics.num_unwritten:
            print(
                f"WARNING: {counted(unwritten, 'line')} of metrics.jsonl could not be written and"
                " are lost",
                file=sys.stderr,
                flush=True,
            )

    def _report_disk(self, problem: str) -> None:
        """Reports the first file system error of the monitoring files. The background thread calls
        it.
        """
        if self.rank == 0:
            self.notices.add("disk", problem, self.step)
        else:
            print(f"WARNING: rank {self.rank}: {problem}", file=sys.stderr, flush=True)
