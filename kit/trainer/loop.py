"""The training loop of one rank. It logs raw times and tokens only; MFU is derived by the reader."""

import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.heartbeats import MANY
from cluster.home import Home
from cluster.state import JobState, take_request, update_state
from kit.data import Samples, training_samples
from kit.engines import ScalingEngine, build_engine
from kit.engines.process_group import control_group
from kit.errors import RunError
from kit.run import Run
from kit.run.metrics import MetricsWriter
from kit.trainer.checkpoints import engine_checkpoints
from kit.trainer.recovery import Recovery
from kit.trainer.signs import Signs
from kit.trainer.watchdog import Watchdog, patience_s

HEARTBEAT_EVERY_S = 1.0


class Trainer:
    """One rank of one attempt of a run."""

    def __init__(self, run: Run, *, attempt: int, device: torch.device) -> None:
        self.run, self.recipe, self.plan, self.attempt = run, run.recipe, run.plan, attempt
        self.rank, self.device = dist.get_rank(), device
        self.control, self.home = control_group(), Home(run.directory)
        self.dataset = run.dataset()
        self.samples = training_samples(self.recipe, run.spec.sequence_length)
        self.step, self.consumed, self.step_time_s = 0, 0, 0.0
        self.work_s: float | None = None
        self.recovery = Recovery(run, attempt=attempt, group=self.control)
        if self.rank == 0:
            run.checkpoints.recover()
        dist.barrier(self.control)
        begins = not self.recovery.steps()
        self.engine = build_engine(run.spec, self.plan, self.recipe, device, initialise=begins)
        self.checkpoints = engine_checkpoints(self.engine, run, attempt, self.control)
        self._resume()
        self.metrics = MetricsWriter(run.directory / "metrics.jsonl") if self.rank == 0 else None
        self.recovery.watch(self.engine)
        # With engine neuron any step may compile, for longer than anyone would wait for a hung rank.
        asked_s, is_many = self.recipe.hung_after_s, self.plan.num_devices > MANY
        limit_s = None if self.plan.engine == "neuron" else patience_s(asked_s, type(self.recipe).hung_after_s, is_many)
        self.signs = Signs(run.directory, attempt, self.control)
        self.watchdog = Watchdog(limit_s, rank=self.rank, alive=self.signs.say, silent_ranks=self.signs.silent_ranks)
        self.last_beat = float("-inf")
        self.is_stopped = False

    def _resume(self) -> None:
        manifest = self.recovery.load_newest(self.checkpoints)
        if manifest is None:
            return
        self.step, self.consumed = manifest.step, manifest.samples
        if self.rank == 0:
            saved, now = manifest.plan.num_devices, self.plan.num_devices
            print(f"resumed from step {self.step} (written on {saved} devices, now {now})", flush=True)

    def train(self) -> str:
        """Runs until the recipe's last step or a request to stop; returns why it ended."""
        try:
            return self._train()
        except Exception:
            self.home.check()  # where the directory is gone, that is why the rest failed, on every rank
            raise

    def _train(self) -> str:
        while self.step < self.recipe.num_steps:
            row = self._one_step()
            self._respond(row)
            last = self.step == self.recipe.num_steps
            stop, checkpoint = self._requests()
            if self._due(self.recipe.validation_every) or (last and self.recipe.validation_every):
                with self.watchdog.paused():
                    row["validation_loss"] = self._validate()
            if self.metrics is not None:
                self.metrics.append(row)
            self._beat()
            with self.watchdog.paused():
                self.checkpoints.poll()
                if last or stop or checkpoint or self._due(self.recipe.checkpoint_every):
                    self._checkpoint()
            if stop and not last:
                self.is_stopped = True
                break
        self.watchdog.close()
        self.checkpoints.finish()
        if self.is_stopped:
            return f"stopped by request after step {self.step}; resume continues from there"
        return f"finished {self.step} steps"

    def _respond(self, row: dict[str, Any]) -> None:
        """Answers a bad step as the recipe says; where that ends the run, the step is still in the metrics."""
        self.watchdog.step_done(self.step, self.step_time_s)
        self.signs.step_done(self.step, self.step_time_s, self.work_s)
        try:
            with self.watchdog.paused():
                self.recovery.respond(row, self.checkpoints)
        except RunError:
            if self.metrics is not None:
                self.metrics.append(row)
            raise

    def _one_step(self) -> dict[str, Any]:
        start = time.perf_counter()
        learning_rate = self.recipe.learning_rate_at(self.step + 1)
        samples = self._batch(self.samples, self.consumed)
        loaded, computing = time.perf_counter(), time.thread_time()
        loss, grad_norm = self.engine.train_step(samples, learning_rate)
        self.step_time_s = time.perf_counter() - start
        if self.device.type == "cpu":  # this thread computes, and does not while it waits for other ranks
            self.work_s = loaded - start + time.thread_time() - computing
        self.step += 1
        self.consumed += self.plan.global_batch_size
        scaling = self.engine.loss_scaling() if isinstance(self.engine, ScalingEngine) else {}
        return {
            "step": self.step,
            "attempt": self.attempt,
            "time": time.time(),
            "step_time_s": self.step_time_s,
            "tokens": self.plan.global_batch_size * self.run.spec.sequence_length,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "memory_bytes": _memory_bytes(self.device),
            **scaling,
        }

    def _batch(self, samples: Samples, first: int) -> Tensor:
        """Returns this replica's part of the global batch that starts at sample `first`, [S, T + 1]."""
        share = self.plan.global_batch_size // self.plan.data_parallel
        return torch.from_numpy(samples.batch(first + self.engine.data_rank * share, share))

    def _validate(self) -> float:
        held_out = self.dataset.samples("validation", self.run.spec.sequence_length, self.recipe.seed)
        batches = max(1, self.recipe.validation_sequences // self.plan.global_batch_size)
        firsts = range(0, batches * self.plan.global_batch_size, self.plan.global_batch_size)
        return sum(self.engine.validation_loss(self._batch(held_out, first)) for first in firsts) / batches

    def _requests(self) -> tuple[bool, bool]:
        """Returns whether to stop and whether to checkpoint: read by rank 0, agreed by all at this step boundary."""
        asked = torch.zeros(3)
        if self.rank == 0:
            asked[0] = take_request(self.run.directory, "stop", step=self.step)
            asked[1] = take_request(self.run.directory, "checkpoint", step=self.step)
            asked[2] = self.signs.must_gather()
        dist.broadcast(asked, src=0, group=self.control)
        if asked[2]:
            self.signs.gather()
        return bool(asked[0]), bool(asked[1])

    def _checkpoint(self) -> None:
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
        self.checkpoints.save(facts)

    def _beat(self) -> None:
        now = time.monotonic()  # a wall clock that is set back must not silence a run
        if now - self.last_beat < HEARTBEAT_EVERY_S and self.step < self.recipe.num_steps:
            return
        self.last_beat = now
        if self.rank == 0 or self.signs.has_own_file:  # else nothing is written, and thousands of ranks would look
            self.home.check()
        self.signs.say()
        if self.rank == 0:
            update_state(
                self.run.directory,
                attempt=self.attempt,
                state=JobState.RUNNING,
                step=self.step,
                heartbeat=time.time(),
                step_time_s=self.step_time_s,
                notice=self.recovery.notice,
            )

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0


def _memory_bytes(device: torch.device) -> int | None:
    """Returns the peak memory of this rank: of the device if it tells, or resident memory of the process on a CPU."""
    if device.type == "xla":
        return None
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
