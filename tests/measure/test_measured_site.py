"""The measured site: a site file with speeds that were measured on this machine."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.site import Fact, Site
from cluster.state import JobState
from kit.errors import ConfigError, RunError
from kit.measure import gemm, site
from kit.measure.collectives import bus_factor
from kit.measure.gemm import is_settled, measure_peak
from kit.measure.site import best_rates, measure_site, remeasure, to_toml
from kit.run import Run
from tests.support.recorded_runs import dead_process, recorded_run, say


@pytest.mark.slow
def test_measured_site_round_trips_through_toml(tmp_path: Path) -> None:
    site = measure_site(Site.load("laptop"), num_processes=2)
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(site.replace(name="mine")))
    again = Site.load(str(file))
    peak, bandwidth = again.peak_flops_per_s("fp32"), again.device.memory_bytes_per_s
    assert again.name == "mine" and peak and 1e9 < peak < 1e13
    assert bandwidth and 1e8 < bandwidth.value < 1e13 and "measured" in bandwidth.source
    assert [link.num_devices for link in again.links.intra_node] == [2]
    assert 1e6 < again.links.intra_node[0].bytes_per_s.value < bandwidth.value


def test_peak_is_measured_until_two_rounds_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([2e10, 9e10, 5e10, 10e10, 9.9e10, 1.0])
    monkeypatch.setattr(gemm, "measure_gemm_flops_per_s", lambda *_, **__: next(rounds))
    peak = measure_peak("fp32")
    assert peak.value == 10e10 and is_settled(peak)
    assert "5 rounds" in peak.source and "busy" not in peak.source and next(rounds) == 1.0
    # every round is faster than the previous one, so the measurement never settles
    rounds = (1e10 * 1.1**number for number in itertools.count())
    doubtful = measure_peak("fp32")
    assert not is_settled(doubtful) and "too busy" in doubtful.source
    assert doubtful.error == pytest.approx(1 - 1 / 1.1)


def test_gpu_peak_is_measured_in_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the measurement, the process of a notebook must hold no GPU memory."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this process multiplied matrices")

    monkeypatch.setattr(gemm, "measure_gemm_flops_per_s", refuse)
    monkeypatch.setattr(gemm, "torch_device", lambda site: "cuda")
    child = gemm.subprocess.run
    calls: list[tuple[str, ...]] = []

    def run_on_cpu(command: tuple[str, ...], **options: Any) -> Any:
        calls.append(command)
        return child([*command[:-1], "cpu"], **options)

    monkeypatch.setattr(gemm.subprocess, "run", run_on_cpu)
    peak = gemm.measured_site(Site.load("laptop")).device.peak_flops_per_s["fp32"]
    assert 1e9 < peak.value < 1e13 and "best fp32 matrix product" in peak.source
    assert calls[0][-2:] == ("fp32", "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured")
def test_unmeasurable_gpu_is_refused() -> None:
    with pytest.raises(RunError, match="device 'cuda'.*could not be measured: .*kit doctor"):
        measure_peak("fp32", "cuda")


def test_remeasure_replaces_the_peak_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Fact(value=1e9, source="measured", error=0.4)
    monkeypatch.setattr(site, "measure_peak", lambda dtype, device: seen)
    run = recorded_run(tmp_path / "run", steps=30, state=JobState.DONE)
    true = run.metrics().mfu()
    busy = r"too busy to measure its fp32 peak: rounds differ by 40%.*Nothing was changed"
    with pytest.raises(RunError, match=busy):
        remeasure(run)
    assert Run.open(run.directory).site == run.site
    run.site.with_measured_peak("fp32", 1e8, "a slip").write(run.directory / "site.json")
    slip = Run.open(run.directory)
    assert slip.metrics().mfu() is None
    seen = seen.replace(value=4e11, error=0.01)
    found = remeasure(slip)
    [(dtype, (old, new))] = found.items()
    assert (dtype, old and old.value, new.value) == ("fp32", 1e8, 4e11)
    mfu = Run.open(run.directory).metrics().mfu()
    assert true is not None and mfu is not None and mfu[-1] == pytest.approx(true[-1] / 2)
    told = (run.directory / "alerts.jsonl").read_text()
    assert "measured again, 0.4 TFLOP/s a device: it was 0.0001" in told
    say(run, JobState.DONE, process=dead_process().replace(host="elsewhere"))
    with pytest.raises(ConfigError, match="trained on elsewhere"):
        remeasure(run)
    Site.load("frontier").write(run.directory / "site.json")
    with pytest.raises(ConfigError, match="'frontier' is not this machine"):
        remeasure(Run.open(run.directory))
    with pytest.raises(ConfigError, match="'slurm' is not this machine"):
        measure_site(Site.load("frontier"))


def test_bus_factor_of_ring_and_best_rate_by_ranks() -> None:
    assert [bus_factor(ranks) for ranks in (1, 2, 4)] == [0, 1, 1.5]
    rows = [{"ranks": 2, "bus_bytes_per_s": rate} for rate in (1.0, 3.0, 2.0)]
    assert best_rates(rows) == {2: 3.0}
