"""Site files generated from Slurm's output: output recorded on other clusters, and output of a real
Slurm.
"""

import re
import shlex
import tomllib
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cluster.login import mirror, submit
from cluster.record import ConfigError
from cluster.render import check_submittable
from cluster.site import Site
from cluster.slurm import inventory
from cluster.state import JobError
from kit.cli import machines
from kit.cli.app import app

CONFIG = """\
Configuration data as of 2026-11-23T10:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = big gpu
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldParameters     = enable_configless
"""


# Formats of GRES as found in: molbuilder's and nodetop's tests of scontrol (A100), JHU's DSAI pages
# (H100), LUMI's documentation (mi250), a public note with `gpu:A100:4(S:0-1),lscratch:3570`,
# slurm_usage_history's tests (two kinds on a node).
@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("gpu:a100:4(S:0-1)", (4, "a100")),
        ("gpu:A100:4(S:0-1),lscratch:3570", (4, "A100")),
        ("gpu:a100:2,gpu:v100:2", (2, "a100")),
        ("gpu:a100:1,gpu:a100_1g.5gb:7", (1, "a100")),
        ("gpu:mi250:8(S:0-3,5)", (8, "mi250")),
        ("gpu:h200:8(S:0-1)", (8, "h200")),
        ("gres/gpu:4", (4, "")),
        ("gpu:a100_3g.20gb:2(S:0)", (2, "a100_3g.20gb")),
        ("gpu:tesla", (1, "tesla")),
        ("shard:16,nvme:1", (0, "")),
        ("(null)", (0, "")),
        # Format in https://slurm.schedmd.com/slurm.conf.html, Gres:
        # name[:type][:no_consume]:count[K|M|...]
        ("gpu:3090:8", (8, "3090")),
        ("gpu:2080:4(S:0-1),mps:400(S:0)", (4, "2080")),
        ("gpu:gtx:no_consume:2", (2, "gtx")),
        ("bandwidth:lustre:no_consume:4G,gpu:a100:4(S:0,2-3,5)", (4, "a100")),
        ("gpu:8(IDX:0-7)", (8, "")),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1),shard:nvidia_h100_80gb_hbm3:64", None),
    ],
)
def test_gres_is_parsed_into_gpu_count_and_type(gres, expected):
    file = f"gpu*|2|64|257000|30:00|1|{gres}"
    text = inventory.site_text(*inventory.parse_node_types(file), {})
    said = tomllib.loads(text)
    expected = expected or (8, "nvidia_h100_80gb_hbm3")
    kind, _, count = said["slurm"].get("gpus_per_node", "0").rpartition(":")
    assert (int(count), kind) == expected and said["devices_per_node"] == (expected[0] or 64)


@pytest.mark.parametrize(
    ("gres", "features", "site"),
    [
        ("gpu:h100:8", "", "dgx-h100"),
        ("gpu:nvidia_h100_80gb_hbm3:8", "", "dgx-h100"),
        ("gpu:8", "intel,h100", "dgx-h100"),
        ("gpu:nvidia_h100_pcie:2", "", None),
        ("gpu:nvidia_h100_nvl:4", "", None),
        ("gpu:nvidia_h100_80gb_hbm3_3g.40gb:2", "", None),
        ("gpu:h100-96:4", "", None),
        ("gpu:h200:8", "", "hgx-h200"),
        ("gpu:gh200:1", "", None),
        ("gpu:a100:4", "", "perlmutter"),
        ("gpu:a100:4", "gpu80,ib100g", "selene"),
        ("gpu:nvidia_a100-sxm4-80gb:8", "", "selene"),
        ("gpu:a100:8", "p4d.24xlarge,efa", "p4d.24xlarge"),
        ("gpu:rtx_a1000:1", "", None),
        ("gpu:gb200:4", "", "gb200-nvl72"),
        ("gpu:mi300x:8", "", "mi300x"),
        ("gpu:mi300a:4", "", None),
        ("gpu:v100:4", "", None),
        ("(null)", "dynamic,trn1.32xlarge", "trn1.32xlarge"),
        ("(null)", "trn2.48xlarge", None),
        ("(null)", "intel", None),
    ],
)
def test_packaged_site_is_selected_by_gpu_name(gres, features, site):
    """The product names are written as vendors and clouds write them in GRES and features."""
    (nodes,) = inventory.parse_node_types(
        f"gpu*|2|64|257000|30:00|1|{gres}|{features or '(null)'}|n[1-2]"
    )
    assert inventory.packaged_site(nodes)[0] == site


@pytest.mark.parametrize(
    "line",
    [
        "q|4|64|498074|infinite|1-4|(null)",  # The node has neither GPUs nor features.
        "trn1|4|64|498074|infinite|1-4|(null)",
        "q|4|128|498074|infinite|1-4|(null)|(null)|q-st-trn132xlarge-[1-4]",
        "q|4|8|32000|infinite|1-4|neuroncore:2|(null)|q-[1-4]",
        "q|4|192|2000000|infinite|1-4|(null)|trn2.48xlarge|q-[1-4]",
        "q|4|192|2000000|infinite|1-4|(null)|trn2u.48xlarge|q-[1-4]",
    ],
)
def test_trainium_nodes_are_recognised(line, tmp_path):
    (nodes,) = inventory.parse_node_types(line)
    file = tmp_path / "site.toml"
    file.write_text(inventory.site_text(nodes, {}))
    site = Site.load(file)
    expected = {"q-st": "trn1", "neuroncore": "trn1", "trn1|": "trn1", "trn2": "trn2"}
    wanted = next((name for mark, name in expected.items() if mark in line), None)
    assert site.device.trainium == wanted
    assert site.engine == ("neuron" if wanted else "native")


@pytest.mark.parametrize(
    ("cpus", "gres", "features", "devices"),
    [
        (192, "(null)", "trn2.48xlarge", 64),
        (192, "(null)", "trn2", 64),
        (192, "(null)", "trn2u.48xlarge", 64),
        (8, "(null)", "trn2.3xlarge", 4),
        (8, "neuroncore:128", "trn2.48xlarge", 128),
        (8, "neuron:16", "trn2", 64),
        (8, "neurondevice:16", "trn1", 32),
        (8, "(null)", "trn1.2xlarge", 2),
        (8, "neuron:16", "(null)", None),
        (8, "gpu:v100:4", "(null)", 4),
    ],
)
def test_edit_lines_are_toml_with_the_number_of_devices(cpus, gres, features, devices):
    """A user removes `# EDIT:` and writes the values. The line of the links then has the number of
    devices of a node. If Slurm does not determine this number, a comment names the field.
    """
    (nodes,) = inventory.parse_node_types(f"q|4|{cpus}|99000|infinite|1|{gres}|{features}|q-[1-4]")
    text = inventory.site_text(nodes, {})
    said = tomllib.loads(re.sub(r"(?m)^# EDIT: (?=\w+ = )", "", text))
    (link,) = said["links"]["intra_node"]
    assert link["num_devices"] == said["devices_per_node"] == (devices or 1)
    (line,) = [line for line in text.splitlines() if "intra_node = " in line]
    assert line.endswith("# num_devices: as devices_per_node") == (devices is None)


@pytest.mark.parametrize(
    ("gres", "is_slice", "text"),
    [
        ("gpu:1g.10gb:7(S:0)", True, "7 MIG slices 1g.10gb"),
        ("gpu:a100_3g.20gb:2(S:0-1)", True, "2 MIG slices a100_3g.20gb"),
        ("gpu:nvidia_a100_80gb_pcie_3g.39gb:1", True, "1 MIG slice nvidia_a100_80gb_pcie_3g.39gb"),
        ("gpu:nvidia_h100_80gb_hbm3_1g.10gb:8", True, "8 MIG slices nvidia_h100_80gb_hbm3_1g.10gb"),
        ("gpu:h100_1g10gb:8", True, "8 MIG slices h100_1g10gb"),
        ("gpu:nvidia_h100_80gb_hbm3:8", False, "8 x nvidia_h100_80gb_hbm3"),
        ("gpu:nvidia_a100-sxm4-80gb:8", False, "8 x nvidia_a100-sxm4-80gb"),
        ("gpu:8", False, "8 x GPU"),
    ],
)
def test_mig_slices_are_recognised_by_their_type(gres, is_slice, text):
    """The GRES are from documentation and scripts of clusters with MIG."""
    (gpu,) = inventory.parse_gres(gres)
    assert (gpu.is_slice, gpu.text) == (is_slice, text)
    (nodes,) = inventory.parse_node_types(f"gpu*|2|64|257000|30:00|1|{gres}")
    assert ("# The devices are MIG slices" in inventory.site_text(nodes, {})) == is_slice


def test_gpu_model_read_as_a_count_is_refused():
    found = inventory.parse_node_types(
        "gpu*|2|64|257000|30:00|1|gpu:3090\ncpu|2|64|257000|30:00|1|(null)"
    )
    with pytest.raises(JobError, match=r"'gpu:3090' means 3,090 GPUs in a node.*gpu:3090:8"):
        inventory.choose_node_type(found)
    assert inventory.choose_node_type(found, "cpu").cpus == 64


def test_banner_lines_of_sinfo_wrappers_are_ignored():
    wrapped = "NOTICE: maintenance on Monday | see motd\ngpu*|2|64|257000|30:00|1|gpu:4"
    assert [nodes.count for nodes in inventory.parse_node_types(wrapped)] == [2]
    for text in ("NOTICE: no cluster", "gpu*|two|64|257000|30:00|1|gpu:4"):
        with pytest.raises(JobError, match="is not of the form"):
            inventory.parse_node_types(text)


def test_site_for_select_linear_requests_gpus_by_gres():
    (nodes,) = inventory.parse_node_types("gpu*|2|64|257000|30:00|1|gpu:v100:4")
    said = tomllib.loads(inventory.site_text(nodes, {"SelectType": "select/linear"}))
    assert said["slurm"]["sbatch_options"] == ["--gres=gpu:v100:4"]
    assert "gpus_per_node" not in said["slurm"]


def test_time_limits_of_sinfo_are_parsed():
    limits = {"2-00:00:00": 172800, "12:00:00": 43200, "30:00": 1800, "1:30": 90}
    for limit, seconds in {**limits, "infinite": None, "n/a": None}.items():
        assert inventory.parse_time_limit(limit) == seconds


LINES = """\
cpu*|1024|128|257000|infinite|1-infinite|(null)
gpu|80|128|515000|2-00:00:00|1-64|gpu:a100:4(S:0-1)
gpu|11|112+|2063000+|2-00:00:00|1-64|gpu:h100:8(S:0-1)
debug|2|64|257000|30:00|1|gpu:4
"""


def write(tmp_path, partition=None, lines=LINES, **more):
    nodes = inventory.choose_node_type(inventory.parse_node_types(lines), partition)
    file = tmp_path / "site.toml"
    file.write_text(inventory.site_text(nodes, inventory.parse_settings(CONFIG), **more))
    return Site.load(str(file)), file.read_text()


@pytest.mark.parametrize(
    ("partition", "devices", "gpus", "max_nodes", "max_s"),
    [
        # If no partition is chosen, nodes with GPUs are preferred.
        (None, 4, "a100:4", 64, 48 * 3600),
        ("debug", 4, "4", 1, 1800),
        ("cpu", 128, None, None, None),
    ],
)
def test_site_file_describes_the_chosen_partition(
    tmp_path, partition, devices, gpus, max_nodes, max_s
):
    site, _ = write(tmp_path, partition)
    slurm = site.slurm
    found = (site.devices_per_node, slurm.gpus_per_node, slurm.max_nodes, slurm.max_seconds(1))
    assert found == (devices, gpus, max_nodes, max_s)
    assert site.device.is_gpu == (gpus is not None)


def test_values_unknown_to_slurm_are_marked_edit(tmp_path):
    site, text = write(tmp_path)
    assert (site.name, site.slurm.partition, site.slurm.cpus_per_task) == ("big-gpu", "gpu", 32)
    # GRES does not say whether the GPU has 40 or 80 GB. The generated file assumes 40 GB, and shows
    # the line for 80 GB.
    assert site.device == Site.load("perlmutter").device
    more = Site.load("selene").device
    assert "# EDIT: sinfo says a100 and not how much memory" in text
    assert f"#   80 GB: memory_bytes = {{ value = {more.memory_bytes.value:.0f}," in text
    assert "EDIT: inter_node_bytes_per_s" in text and site.links.inter_node_bytes_per_s is None
    assert site.slurm.account == "EDIT" and site.slurm.sbatch_options == ()
    with pytest.raises(ConfigError, match="slurm.account"):
        check_submittable(site)
    site, text = write(tmp_path, login="frontier", account="abc123")
    assert site.slurm.account == "abc123" and 'account = "EDIT"' not in text
    assert site.login == "frontier" and site.there.sync and "/EDIT/bin/python" in text


def test_edited_lines_make_a_submittable_site(tmp_path):
    _, text = write(tmp_path, lines=LINES.replace("a100", "v100"), login="frontier")
    filled = text.replace("/EDIT/", "/home/me/").replace('account = "EDIT"', 'account = "abc123"')
    edited = {"price_per_node_hour": "9", "memory_bytes": "85899345920"}
    edited |= {"memory_bytes_per_s": "2e12"}
    for name, value in {**edited, "bf16": "312e12", "inter_node_bytes_per_s": "100e9"}.items():
        assert f"# EDIT: {name} = {{ value = 0" in filled
        filled = filled.replace(f"# EDIT: {name} = {{ value = 0", f"{name} = {{ value = {value}")
    (tmp_path / "mine.toml").write_text(filled)
    site = Site.load(str(tmp_path / "mine.toml"))
    check_submittable(site)
    assert site.device.memory_bytes.value == 80 * 2**30 and site.peak_flops_per_s("bf16") == 312e12
    assert site.device.memory_bytes_per_s.value == 2e12
    assert site.links.inter_node_bytes_per_s.value == 100e9 and site.price_per_node_hour.value == 9


def kit_site_init(file, *words):
    return CliRunner().invoke(app, ["site", "init", str(file), *words])


def test_site_init_local_describes_this_machine(tmp_path):
    done = kit_site_init(tmp_path / "desk.toml", "--local")
    assert done.exit_code == 0 and "kit launch runs/first --site" in done.output, done.exception
    site = Site.load(tmp_path / "desk.toml")
    assert site.scheduler == "local" and site.devices_per_node >= 1
    wrong = kit_site_init(tmp_path / "b.toml", "--local", "--account", "x")
    assert "--account: not with --local" in str(wrong.exception)
    assert not (tmp_path / "b.toml").exists()


def test_site_init_local_takes_gpus_from_torch(tmp_path, monkeypatch):
    """The GPU name and memory were recorded on a machine with two H100."""
    import torch

    told = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=84929347584)
    says = {"is_available": True, "device_count": 2, "get_device_properties": told}
    for name, value in says.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert kit_site_init(tmp_path / "desk.toml", "--local").exit_code == 0
    site = Site.load(tmp_path / "desk.toml")
    assert site.device.is_gpu and "H100" in site.device.name and site.devices_per_node == 2
    assert site.device.memory_bytes.value == pytest.approx(84929347584, rel=1e-5)


@pytest.fixture
def login_node(monkeypatch):
    """A fake login node that answers `sinfo` and `scontrol`, and refuses all other commands. The
    fixture's value is the list of received commands.
    """
    asked = []
    answers = {"sinfo": LINES, "scontrol": CONFIG}

    def ssh(login, command, data=b"", timeout_s=0.0):
        asked.append(shlex.split(shlex.split(command)[-1]))
        if asked[-1][0] not in answers:
            raise JobError(f"{login}: exit code 127: {asked[-1][0]}: No such file or directory")
        return answers[asked[-1][0]].encode()

    for place in (machines, submit, mirror):
        monkeypatch.setattr(place, "ssh", ssh)
    return asked


def test_advice_after_site_init_needs_no_connection(login_node, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    app(["site", "init", "my.toml", "--login", "frontier"], standalone_mode=False)
    said = capsys.readouterr().out.splitlines()
    lines = enumerate((tmp_path / "my.toml").read_text().splitlines(), 1)
    marked = [(n, line) for n, line in lines if "EDIT:" in line]
    assert said[-len(marked) :] == [f"  my.toml, line {n}: {line}" for n, line in marked]
    assert marked[0][0] > 1, "the heading is nothing to edit"
    assert any("# EDIT: inter_node" in line for line in said)
    asked = len(login_node)
    advised = shlex.split(said[-len(marked) - 1].split("kit ")[1])
    sizes = ["--devices", "4", "--batch", "64", "--out", "plan.json"]
    assert advised == ["plan", "gpt-1.4b", "--site", "my.toml", *sizes]
    advised = ["launch", "runs/first", "--site", "my.toml", "--show"]
    app(advised, standalone_mode=False)
    left = [line.strip() for line in capsys.readouterr().err.splitlines()][1:]
    fields = ("site.there.python", "site.there.folder", "site.slurm.account")
    assert left == [f"{field}: in my.toml" for field in fields]
    to_another_folder = [*advised[:2], "--there", "/runs/x", *advised[2:-1]]
    for words, message in (
        (advised[:-1], r"there.python, .*account: still 'EDIT'. Write your own values in the site"),
        (to_another_folder, r"^site.there.python, site.there.folder: still 'EDIT'"),
    ):
        with pytest.raises(ConfigError, match=message):
            app(words, standalone_mode=False)
    assert len(login_node) == asked and not (tmp_path / "runs").exists()


def test_site_init_on_a_real_slurm(sandbox, tmp_path):
    file = tmp_path / "mine.toml"
    done = kit_site_init(file)
    assert done.exit_code == 0 and "Other partitions: " in done.output, done.output
    site = Site.load(file)
    check_submittable(site)
    assert site.name == "sandbox" and site.slurm.partition in done.output
    assert "already exists" in str(kit_site_init(file).exception)


def test_site_init_without_slurm_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = kit_site_init(tmp_path / "mine.toml")
    assert "give --login NAME" in str(done.exception) and not list(tmp_path.iterdir())
