"""Choice of the device on which a rank computes, from the GPUs that torch sees and the site."""

from types import SimpleNamespace

import pytest
import torch

from cluster.record import ConfigError
from cluster.site import Site
from kit import doctor
from kit.config.plan import Plan
from kit.engines.process_group import _has_gpu
from kit.measure.device import DeviceName, on_device

LAPTOP, CLUSTER = Site.load("laptop"), Site.load("perlmutter")


def _plan(ranks: int) -> Plan:
    return Plan(data_parallel=ranks, global_batch_size=ranks)


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that makes this machine seem to have the given numbers of GPUs and local
    ranks.
    """

    def become(gpus: int, ranks: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        card = SimpleNamespace(name="Tesla T4", total_memory=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
        monkeypatch.setenv("RANK", "0")

    return become


def test_doctor_reports_torch_gpus_and_nccl(machine, monkeypatch, capsys):
    machine(2, 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 3)))
    exec(doctor.TORCH_PROBE, {})
    took, seen = capsys.readouterr().out.splitlines()
    assert took.startswith(f"{torch.__version__}, imported in ")
    assert seen == "2 x NVIDIA H100, NCCL 2.27.3"


def test_doctor_reports_matmul_and_all_reduce_rates(monkeypatch):
    """The ranks of the measurement use the GPUs of the machine. With one GPU, no all-reduce is
    measured. A failed measurement is reported with the last line of its error and the advice to set
    NCCL_DEBUG.
    """
    node = {"nodes": [{"matmul_flops_per_s": 7e14}], "dtype": "bf16"}
    for gpus, sent in ((1, None), (8, 2e11)):
        seen = {gpus: {**node, "all_reduce_bytes_per_s": sent}}
        monkeypatch.setattr(
            "kit.measure.site.by_ranks", lambda module, ranks, limit_s, seen=seen: seen[ranks]
        )
        product, summed = doctor._rates(gpus)
        assert product.ok and "700 TFLOP/s in bf16" in product.found
        assert summed.ok is (True if sent else None) and ("200 GB/s" in summed.found) is (gpus == 8)

    def fail(*_):
        raise RuntimeError("failed: rank 1\nncclSystemError: no link")

    monkeypatch.setattr("kit.measure.site.by_ranks", fail)
    (finding,) = doctor._rates(8)
    assert finding.ok is False and "NCCL_DEBUG" in finding.advice
    assert finding.found.endswith("no link")


@pytest.mark.parametrize(
    ("gpus", "ranks", "has"), [(0, 4, False), (1, 1, True), (4, 4, True), (1, 2, False)]
)
def test_more_local_ranks_than_gpus_compute_on_the_cpu(machine, capsys, gpus, ranks, has):
    machine(gpus, ranks)
    site = on_device(LAPTOP, _plan(ranks))
    assert _has_gpu(site) is site.device.is_gpu is has
    assert ("2 ranks, 1 GPU here" in capsys.readouterr().out) is (0 < gpus < ranks)


def test_device_argument_selects_the_sites_device(machine, capsys):
    machine(2, 2)
    measured = LAPTOP.with_measured_peak("fp32", 1e11, "here").replace(devices_per_node=2)
    assert on_device(measured, _plan(2)) is measured, "its peak is a core's: on the cores"
    assert not _has_gpu(measured) and "all ranks compute on the CPU" in capsys.readouterr().out
    gpu = on_device(measured, _plan(2), "cuda")
    assert (gpu.device.name, gpu.devices_per_node) == ("Tesla T4 (GPU)", 2)
    assert gpu.device.peak_flops_per_s == {}
    assert _has_gpu(gpu) and on_device(gpu, _plan(2)) is gpu is on_device(gpu, _plan(1), "cuda")
    assert on_device(gpu, _plan(2), "cpu").device == LAPTOP.device


def test_on_device_refuses_unavailable_devices(machine):
    machine(1, 1)
    gpu = on_device(LAPTOP, _plan(1))
    asked: list[tuple[Site, DeviceName | None]] = [(LAPTOP, "cuda"), (gpu, None), (gpu, "cuda")]
    for site, device in asked:
        with pytest.raises(ConfigError, match="2 ranks .* sees 1 here"):
            on_device(site, _plan(2), device)
    with pytest.raises(ConfigError, match="device: 'cpu': .* 'perlmutter' .*NVIDIA A100"):
        on_device(CLUSTER, _plan(4), "cpu")
    assert on_device(CLUSTER, _plan(4)) is CLUSTER
    with pytest.raises(ConfigError, match="'tpu' is not allowed"):
        on_device(LAPTOP, _plan(1), "tpu")  # type: ignore[arg-type]


def test_scheduler_may_expose_one_gpu_per_rank(machine):
    machine(1, 4)
    assert _has_gpu(CLUSTER)


def test_gpu_site_does_not_fall_back_to_the_cpu(machine):
    machine(0, 4)
    with pytest.raises(ConfigError, match="A100.* sees 0 here for 4 ranks"):
        _has_gpu(CLUSTER)
    machine(1, 4)
    with pytest.raises(ConfigError, match="sees 1 here for 4 ranks"):
        _has_gpu(CLUSTER.replace(scheduler="local", slurm=None))
