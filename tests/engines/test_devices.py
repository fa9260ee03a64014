"""On which device a rank computes, by what torch sees and what the site says."""

from types import SimpleNamespace

import pytest
import torch

from cluster.record import ConfigError
from cluster.site import Site
from kit import doctor
from kit.engines.process_group import _has_gpu

LAPTOP, CLUSTER = Site.load("laptop"), Site.load("perlmutter")


@pytest.fixture
def machine(monkeypatch):
    """A function: this machine has so many GPUs and ranks."""

    def become(gpus: int, ranks: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("RANK", "0")

    return become


def test_doctor_tells_what_torch_sees(machine, monkeypatch, capsys):
    machine(2, 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 3)))
    exec(doctor.GPU_PROBE, {})
    assert capsys.readouterr().out.strip() == "2 x NVIDIA H100, NCCL 2.27.3"


@pytest.mark.parametrize(("gpus", "ranks", "has"), [(0, 4, False), (1, 1, True), (4, 4, True), (1, 2, False)])
def test_more_local_ranks_than_gpus_compute_on_the_cpu_and_say_so(machine, capsys, gpus, ranks, has):
    machine(gpus, ranks)
    assert _has_gpu(LAPTOP) is has
    assert ("2 ranks but 1 GPU(s)" in capsys.readouterr().out) is (0 < gpus < ranks)


def test_a_scheduler_may_show_each_rank_one_gpu(machine):
    machine(1, 4)
    assert _has_gpu(CLUSTER)


def test_a_site_of_gpus_is_never_computed_on_the_cpu(machine):
    machine(0, 4)
    with pytest.raises(ConfigError, match="A100.* sees 0 here for 4 ranks"):
        _has_gpu(CLUSTER)
    machine(1, 4)
    with pytest.raises(ConfigError, match="sees 1 here for 4 ranks"):
        _has_gpu(CLUSTER.replace(scheduler="local", slurm=None))
