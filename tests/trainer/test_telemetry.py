"""Measurements that run beside training, on a simulated GPU, and garbage collection by Python."""

import gc
import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.callback import callback_handler, on_compile_end, on_compile_start

from kit.config.spec import ModelSpec
from kit.engines import gpu
from kit.trainer import telemetry
from kit.trainer.telemetry import SpeedProbe, collect_garbage, memory_row
from kit.trainer.watchdog import Watchdog
from tests.support.parity import batches, build, make_plan
from tests.support.recorded_runs import recorded_run
from tests.support.workers import run_ranks
from tests.trainer.steps import done


def tensors_in_cycles(spec: ModelSpec, engine_name: str, changes: dict) -> int:
    """Trains three steps without garbage collection. Returns the number of tensors that remain
    alive only because they are in reference cycles.
    """
    plan = make_plan(changes, engine_name)
    engine = build(spec, plan)
    samples = batches(spec, plan, 0)[0]
    engine.train_step(samples, 1e-3)
    gc.collect()
    gc.disable()
    before = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    for _ in range(3):
        engine.train_step(samples, 1e-3)
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()) - before


@pytest.mark.filterwarnings("ignore:.*reduce_op. is deprecated")
@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("native", {"recompute": "none"}),
        ("native", {"recompute": "selective"}),
        ("native", {"recompute": "full"}),
        ("deepspeed", {"zero_stage": 1}),
        ("deepspeed", {"zero_stage": 3}),
    ],
)
def test_train_step_leaves_no_tensors_in_cycles(llama_spec, engine, changes):
    left = run_ranks(1, tensors_in_cycles, llama_spec, engine, changes)[0]
    assert left < 3, "not one a step; what torch makes once and keeps may be among them"


def test_garbage_is_collected_at_fixed_steps(monkeypatch):
    """Garbage is collected at fixed steps even if other code enables Python's automatic
    collection.
    """
    collected = []
    monkeypatch.setattr(gc, "collect", collected.append)
    try:
        for step in range(1, 2 * telemetry.COLLECT_EVERY + 1):
            collect_garbage(step)
            assert not gc.isenabled() or step == telemetry.COLLECT_EVERY
            if step == telemetry.COLLECT_EVERY:
                gc.enable()
    finally:
        gc.enable()
    assert collected == [1, 1]


class Event:
    """A simulated `torch.cuda.Event`, which reports at the second query that its work is done."""

    looks = 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        Event.looks += 1
        return Event.looks > 1

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


def test_speed_probe_measures_without_waiting(monkeypatch):
    """A new measurement starts only PROBE_EVERY_S seconds after the previous one."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(telemetry, "PROBE_SIZE", 16)
    launched = Mock(wraps=torch.mm)
    monkeypatch.setattr(torch, "mm", launched)
    products = (1 + telemetry.PROBE_PARTS) * telemetry.PROBE_PRODUCTS
    probe = SpeedProbe(torch.device("cpu"))
    assert [probe.poll(), probe.poll()] == [None, None], "launched, and not there yet"
    seconds = probe.poll()
    assert seconds is not None and 0 < seconds < 1
    assert probe.poll() == seconds and launched.call_count == products
    probe.asked_at -= telemetry.PROBE_EVERY_S
    probe.poll()
    assert launched.call_count == 2 * products


def test_watchdog_pauses_while_torch_compiles():
    watchdog = Watchdog(
        None,
        rank=0,
        alive=lambda: None,
        store_heartbeat_times=lambda: None,
        silent_ranks=lambda: None,
    )
    watchdog.after_step(done())  # The watchdog has no time limit for the first step.
    seen = []
    begun, ended = on_compile_start(watchdog.compile_begins), on_compile_end(watchdog.compile_ends)
    try:

        def backend(graph, _):
            seen.append(watchdog.pauses)
            return graph.forward

        doubled = torch.compile(lambda x: 2 * x, backend=backend, dynamic=False)
        for size, compiles in ((3, True), (3, False), (5, True)):
            assert doubled(torch.ones(size)).sum() == 2 * size
            assert watchdog.has_compiled == compiles and not watchdog.pauses
            watchdog.after_step(done(60.0 if compiles else 1.0))
    finally:
        callback_handler.remove_start_callback(begun)
        callback_handler.remove_end_callback(ended)
        torch._dynamo.reset()
    assert seen == [1, 1] and list(watchdog.times) == [1.0], "a step that compiles tells nothing"


def test_set_environment_keeps_user_settings(tmp_path, monkeypatch):
    """Only environment variables that the user has not set are set."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", gpu.TRACE_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    monkeypatch.setattr(torch.version, "hip", None)
    gpu.set_environment(tmp_path)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    gpu.set_environment(tmp_path)
    assert "PYTORCH_ALLOC_CONF" not in os.environ, "it would come before what the user has set"


def test_flight_recorder_is_dumped_beside_the_logs(tmp_path, monkeypatch):
    monkeypatch.delenv(gpu.TRACE_FILE, raising=False)
    monkeypatch.setattr(gpu, "nccl_trace", lambda: b"trace")
    monkeypatch.setattr(gpu.dist, "get_rank", lambda: 3)
    gpu.set_environment(tmp_path)
    gpu.dump_flight_recorder()
    (file,) = tmp_path.iterdir()
    assert (file.name, file.read_bytes()) == ("nccl_trace_rank_3", b"trace")
    monkeypatch.setenv(gpu.TRACE_FILE, str(tmp_path / "gone" / "trace"))
    # A failed dump prints no error, so that the reason for the rank's end stays the last message.
    gpu.dump_flight_recorder()


@pytest.mark.parametrize(
    ("hung_after_s", "waits_s"), [(40.0, 300.0), (200.0, 400.0), (600.0, 600.0), (None, None)]
)
def test_shorten_timeouts_follows_hung_after_s(monkeypatch, hung_after_s, waits_s):
    """The shorter timeout applies to collectives on GPUs, after the first step. Backends for the
    CPU keep their timeout.
    """
    given, (cpu, cuda) = [], map(torch.device, ("cpu", "cuda"))
    backend = SimpleNamespace(_set_default_timeout=given.append)
    both = SimpleNamespace(_device_types=[cpu, cuda], _get_backend=lambda _: backend)
    world = SimpleNamespace(pg_map=[both, SimpleNamespace(_device_types=[cpu])])
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", world)
    gpu.shorten_timeouts(hung_after_s)
    assert given == ([timedelta(seconds=waits_s)] if waits_s else [])


def test_gpu_memory_is_in_the_metrics(tmp_path: Path, monkeypatch):
    stats = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 7, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    row = memory_row(torch.device("cuda"))
    assert row == {"memory_bytes": 5, "reserved_bytes": 7, "allocation_retries": 2}
    run = recorded_run(tmp_path / "run", steps=3)
    file, added = run.directory / "metrics.jsonl", json.dumps(row).removeprefix("{")
    file.write_text(file.read_text().replace("}\n", f", {added}\n"))
    for name, value in row.items():
        assert run.metrics()[name].tolist() == [value] * 3


def test_busy_time_file_is_opened_once_per_thread(monkeypatch):
    """The kernel's file says how long a thread has waited for a core."""
    opened, system_open = [], os.open
    monkeypatch.setattr(
        telemetry.os, "open", lambda file, flags: opened.append(file) or system_open(file, flags)
    )
    for _ in range(2):
        thread = threading.Thread(target=lambda: [telemetry.busy_s() for _ in range(3)])
        thread.start()
        thread.join()
    assert len(opened) == len(set(opened)) == 2, "opened once by each"
