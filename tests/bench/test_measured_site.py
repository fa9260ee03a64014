"""The measured site: numbers of this machine that a site file keeps."""

from pathlib import Path

import pytest

from cluster.site import Site
from kit.bench.collectives import bus_factor
from kit.bench.site import best_rates, measure_site, to_toml
from kit.errors import ConfigError


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


def test_other_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="'slurm' is not this machine"):
        measure_site(Site.load("frontier"))


def test_rates_count_the_slowest_link() -> None:
    assert bus_factor("all_reduce", 4) == 1.5 and bus_factor("all_gather", 4) == 0.75 and bus_factor("send", 2) == 1
    rows = [{"operation": "all_reduce", "ranks": 2, "bus_bytes_per_s": rate} for rate in (1.0, 3.0, 2.0)]
    assert best_rates([*rows, {"operation": "send", "ranks": 2, "bus_bytes_per_s": 9.0}]) == {2: 3.0}
