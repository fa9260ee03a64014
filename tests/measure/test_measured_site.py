"""The measured site: numbers of this machine that a site file keeps."""

import itertools
from pathlib import Path

import pytest

from cluster.site import Fact, Site
from cluster.state import JobState
from kit.errors import ConfigError, RunError
from kit.measure.collectives import bus_factor
from kit.measure.gemm import is_settled, measure_peak
from kit.measure.site import best_rates, measure_site, remeasure, to_toml
from kit.run import Run
from tests.monitor.recorded import dead_process, recorded_run, say


@pytest.mark.slow
def test_measured_site_survives_its_file(tmp_path: Path) -> None:
    site = measure_site(Site.load("laptop"), num_processes=2)
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(site.replace(name="mine")))
    again = Site.load(str(file))
    peak, bandwidth = again.peak_flops_per_s("fp32"), again.device.memory_bytes_per_s
    assert again.name == "mine" and peak and 1e9 < peak < 1e13
    assert bandwidth and 1e8 < bandwidth.value < 1e13 and "measured" in bandwidth.source
    assert [link.num_devices for link in again.links.intra_node] == [2]
    assert 1e6 < again.links.intra_node[0].bytes_per_s.value < bandwidth.value


def test_a_peak_is_measured_until_two_rounds_agree() -> None:
    rates = iter([2e10, 9e10, 5e10, 10e10, 9.9e10, 1.0])
    peak = measure_peak("fp32", lambda: next(rates))
    assert (
        peak.value == 10e10
        and is_settled(peak)
        and "5 rounds" in peak.source
        and "busy" not in peak.source
    )
    assert next(rates) == 1.0
    ever_faster = itertools.accumulate(
        itertools.repeat(1.1), initial=1e10, func=lambda rate, by: rate * by
    )
    doubtful = measure_peak("fp32", lambda: next(ever_faster))
    assert (
        not is_settled(doubtful)
        and "too busy" in doubtful.source
        and doubtful.error == pytest.approx(1 - 1 / 1.1)
    )


def test_a_runs_peak_is_measured_again(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", steps=30, state=JobState.DONE)
    true = run.metrics().mfu()
    busy = Fact(value=1e9, source="measured", error=0.4)
    with pytest.raises(
        RunError,
        match=r"too busy to measure its fp32 peak: rounds differ by 40%.*Nothing was changed",
    ):
        remeasure(run, lambda dtype: busy)
    assert Run.open(run.directory).site == run.site
    run.site.with_measured_peak("fp32", 1e8, "a slip").write(run.directory / "site.json")
    slip = Run.open(run.directory)
    assert slip.metrics().mfu() is None
    found = remeasure(slip, lambda dtype: busy.replace(value=4e11, error=0.01))
    assert {dtype: (old and old.value, new.value) for dtype, (old, new) in found.items()} == {
        "fp32": (1e8, 4e11)
    }
    mfu = Run.open(run.directory).metrics().mfu()
    assert true is not None and mfu is not None and mfu[-1] == pytest.approx(true[-1] / 2)
    assert (
        "measured again, 0.4 TFLOP/s a device: it was 0.0001"
        in (run.directory / "alerts.jsonl").read_text()
    )
    say(run, JobState.DONE, process=dead_process().replace(host="elsewhere"))
    with pytest.raises(ConfigError, match="trained on elsewhere"):
        remeasure(run, lambda dtype: busy)
    Site.load("frontier").write(run.directory / "site.json")
    with pytest.raises(ConfigError, match="'frontier' is not this machine"):
        remeasure(Run.open(run.directory), lambda dtype: busy)


def test_other_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="'slurm' is not this machine"):
        measure_site(Site.load("frontier"))


def test_rates_count_the_slowest_link() -> None:
    assert [bus_factor(ranks) for ranks in (1, 2, 4)] == [0, 1, 1.5]
    assert best_rates([{"ranks": 2, "bus_bytes_per_s": rate} for rate in (1.0, 3.0, 2.0)]) == {
        2: 3.0
    }
