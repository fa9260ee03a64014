"""The way from `sinfo` to a job script on five simulated clusters. Each step runs the command that
the previous step advised.

The output of `sinfo` and `scontrol` has the format shown in the clusters' own documentation and in
https://slurm.schedmd.com/sinfo.html: partition, nodes, CPUs, MB, time limit, nodes of a job, GRES,
features, node names.
"""

import os
import re
import shlex
import tomllib

import pytest
from typer.testing import CliRunner

from cluster.site import Site
from kit.cli.app import app
from tests.cluster.shell import programs, shellcheck

CONFIG = """\
Configuration data as of 2026-08-20T10:00:00
AccountingStorageEnforce = associations,limits,qos,safe
ClusterName             = mycluster
SelectType              = select/cons_tres
SLURM_VERSION           = 24.05.3
"""
CLUSTERS = {
    "A100": (
        "gpu*|80|128|515000|2-00:00:00|1-64|gpu:a100:4(S:0,2-3,5)|amd,gpu80|g[01-80]\n"
        "gpu*|4|128|2063000|2-00:00:00|1-64|gpu:a100:4(S:0-1)|amd,gpu40|g[81-84]"
    ),
    "H100": "batch*|11|112|2063000+|7-00:00:00|1-infinite|gpu:nvidia_h100_80gb_hbm3:8(S:0-1),shard:64|rack1|h[1-11]",  # noqa: E501
    "3090": "viscam*|6|96|515000|5-00:00:00|1-infinite|gpu:3090:8(S:0-1)|(null)|v[1-6]",
    "MI250X": "standard-g|2900|128|503500|2-00:00:00|1-1024|gpu:mi250x:8(S:0-3)|(null)|nid[005000-007899]",  # noqa: E501
    "Trainium": "compute1*|4|64|498074|infinite|1-infinite|(null)|dynamic,trn1.32xlarge,efa|compute1-dy-trn132xlarge-[1-4]",  # noqa: E501
}
# RTX 3090: NVIDIA's data sheet of the GA102 (24 GB, 936 GB/s, 71 TFLOP/s with fp32 accumulation).
NUMBERS = {
    "memory_bytes": "25769803776",
    "memory_bytes_per_s": "936e9",
    "bf16": "71e12",
    "intra_node": "32e9",
}
RECIPE = "num_steps = 10\nlearning_rate = 1e-4\nwarmup_steps = 1\n"


def be_cluster(folder, monkeypatch, lines):
    """Puts scripts named `sinfo` and `scontrol` into PATH, which print the output of a cluster."""
    fakes = {"sinfo": f"echo '{lines}'", "scontrol": f"echo '{CONFIG}'"}
    monkeypatch.setenv("PATH", f"{programs(folder / 'bin', fakes)}:{os.environ['PATH']}")


def run(*words):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, f"{words}: {done.output} {done.exception}"
    return done


def advised(text):
    """Returns the arguments of the last `kit plan` or `kit launch` command in a text."""
    return shlex.split(re.findall(r"kit ((?:plan|launch) .*)", text)[-1])


def fill_in(file):
    """Fills in the lines marked EDIT of a site file that a job on one node needs, as a user
    would.
    """
    text = file.read_text().replace('account = "EDIT"', 'account = "abc123"')
    for name, value in NUMBERS.items():
        pattern = rf"# EDIT: ({name} = .*value = )0"
        text = re.sub(pattern, rf"\g<1>{value}", text)
    file.write_text(text)


@pytest.mark.parametrize(
    ("cluster", "device", "gib", "directives"),
    [
        (
            "A100",
            "NVIDIA A100-SXM4-80GB",
            80,
            {"gpus-per-node": "a100:4", "ntasks-per-node": "4", "constraint": "gpu80"},
        ),
        ("H100", "NVIDIA H100-SXM5-80GB", 80, {"gpus-per-node": "nvidia_h100_80gb_hbm3:8"}),
        ("3090", "GPU 3090", 24, {"gpus-per-node": "3090:8", "cpus-per-task": "12"}),
        (
            "MI250X",
            "AMD Instinct MI250X, one GCD",
            64,
            {"gpus-per-node": "mi250x:8", "ntasks-per-node": "8", "cpus-per-task": "16"},
        ),
        (
            "Trainium",
            "AWS Trainium, one NeuronCore-v2",
            16,
            {"gpus-per-node": None, "ntasks-per-node": "1", "cpus-per-task": "64"},
        ),
    ],
)
def test_advised_commands_lead_to_a_valid_job_script(
    tmp_path, monkeypatch, cluster, device, gib, directives
):
    monkeypatch.chdir(tmp_path)
    be_cluster(tmp_path, monkeypatch, CLUSTERS[cluster])
    words = advised(run("site", "init", "my.toml").output)
    assert words[:1] == ["plan"] and {"--site", "my.toml"} <= {*words}
    said = tomllib.loads((tmp_path / "my.toml").read_text())
    assert (said.get("base") is not None) == (cluster == "Trainium")
    fill_in(tmp_path / "my.toml")
    site = Site.load("my.toml")
    assert site.device.name == device and site.device.memory_bytes.value == gib * 2**30
    words = advised(run(*words).output)
    assert words[:1] == ["launch"] and {"--plan", "plan.json"} <= {*words}
    (tmp_path / "recipe.toml").write_text(RECIPE)
    shown = run(*words, "--show")
    assert "Asked of Slurm where the site file says nothing" in shown.stderr
    left = shown.stderr.partition("Still to fill in:")[2].split("\n")[1:]
    assert [line.strip().partition(":")[0] for line in left if line] == ["recipe.data"]
    script = shown.stdout.partition("#### submit.sh")[2] or shown.stdout
    asked = dict(re.findall(r"#SBATCH --([a-z-]+)=?(.*)", script))
    assert {key: asked.get(key) for key in directives} == directives
    assert asked["nodes"] == "1" and asked["mem"] == "0" and "exclusive" in asked
    shellcheck("#!/bin/bash\n" + script.partition("#!/bin/bash\n")[2])


def test_site_init_selects_a_node_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [
        text.replace("batch*", "gpu*").replace("viscam*", "gpu*") for text in CLUSTERS.values()
    ]
    be_cluster(tmp_path, monkeypatch, "\n".join(lines[:3]))
    told = run("site", "init", "most.toml").output
    assert "Taken of partition gpu: 80 nodes with 4 x a100" in told
    for name in ("gpu40", "3090", "nvidia_h100_80gb_hbm3"):
        (line,) = [line for line in told.splitlines() if f"--node-type {name}" in line]
        run("site", "init", f"{name}.toml", *line.split(": ")[-1].split())
    sites = {name: Site.load(f"{name}.toml") for name in ("gpu40", "3090")}
    assert sites["gpu40"].device.name == "NVIDIA A100-SXM4-40GB"
    assert (sites["3090"].devices_per_node, sites["3090"].slurm.gpus_per_node) == (8, "3090:8")
    wrong = CliRunner().invoke(app, ["site", "init", "x.toml", "--node-type", "v100"])
    assert "'v100'. Give a GPU type" in str(wrong.exception) and "gpu40" in str(wrong.exception)


@pytest.mark.parametrize(
    ("gres", "taken", "other"),
    [
        ("gpu:a100_3g.20gb:4(S:0),gpu:a100:6(S:0-1)", "a100:6", "a100_3g.20gb:4"),
        ("gpu:a100:4,gpu:v100:2", "a100:4", "v100:2"),
    ],
)
def test_site_init_lists_other_gpu_types_of_a_node(tmp_path, monkeypatch, gres, taken, other):
    """`kit site init` selects complete GPUs before MIG slices (parts of a GPU). The printed option
    selects the other GPU type.
    """
    monkeypatch.chdir(tmp_path)
    be_cluster(tmp_path, monkeypatch, f"gpu*|6|96|515000|1-00:00:00|1-infinite|{gres}|(null)|n1")
    printed = run("site", "init", "first.toml").output
    assert Site.load("first.toml").slurm.gpus_per_node == taken
    (line,) = [line for line in printed.splitlines() if f"also have gpu:{other}" in line]
    run("site", "init", "second.toml", *line.split(": ")[-1].split())
    assert Site.load("second.toml").slurm.gpus_per_node == other
    assert Site.load("second.toml").devices_per_node == int(other[-1])


def test_site_init_lists_mig_slices_of_all_nodes(tmp_path, monkeypatch):
    """The slices are named for the nodes of the site file, for other nodes of the partition, and
    for other partitions. The site file names them too.
    """
    monkeypatch.chdir(tmp_path)
    lines = [
        "gpu*|6|96|515000|1-00:00:00|1-infinite|gpu:h100:7,gpu:h100_1g.10gb:7|(null)|n[1-6]",
        "gpu*|2|96|515000|1-00:00:00|1-infinite|gpu:1g.10gb:56(S:0-1)|(null)|n[7-8]",
        "small|1|96|515000|1-00:00:00|1-infinite|gpu:a100:1,gpu:a100_3g.20gb:2,gpu:a100_2g.10gb:1"
        "|(null)|n9",
    ]
    be_cluster(tmp_path, monkeypatch, "\n".join(lines))
    printed = run("site", "init", "my.toml").output
    assert "6 nodes with 7 x h100 and 7 MIG slices h100_1g.10gb" in printed
    assert "2 nodes with 56 MIG slices 1g.10gb, 96 CPUs: --partition gpu" in printed
    assert "small (1 x a100 and 2 MIG slices a100_3g.20gb and 1 MIG slice a100_2g.10gb)" in printed
    assert "also have gpu:h100_1g.10gb:7 (MIG slices), which jobs do not request" in printed
    written = (tmp_path / "my.toml").read_text()
    assert "# These nodes also have 7 MIG slices h100_1g.10gb, which jobs do not ask" in written
    assert "# Other nodes of this partition: 2 nodes with 56 MIG slices 1g.10gb" in written
    assert Site.load("my.toml").slurm.gpus_per_node == "h100:7"


def test_plan_names_all_missing_numbers_of_a_site(tmp_path, monkeypatch):
    """The error message gives an example. With this example in place of the EDIT lines of the site
    file, `kit plan` succeeds.
    """
    monkeypatch.chdir(tmp_path)
    be_cluster(tmp_path, monkeypatch, CLUSTERS["3090"])
    run("site", "init", "my.toml")
    words = "plan gpt-1.4b --site my.toml --devices 16 --batch 64".split()
    error = str(CliRunner().invoke(app, words).exception)
    names = ["peak_flops_per_s.bf16", "memory_bytes,", "memory_bytes_per_s", "links.intra_node"]
    assert not [name for name in [*names, "links.inter_node_bytes_per_s"] if name not in error]
    example = tomllib.loads(error.partition("For example:\n")[2])
    assert example["links"]["intra_node"][0]["num_devices"] == 8
    lines = (tmp_path / "my.toml").read_text().splitlines()
    heads = ("[links]", "[device.peak_flops_per_s]", "[device]", 'name = "GPU')
    kept = [line for line in lines if not line.startswith(heads)]
    first = kept.index("[slurm]")
    shown = error.partition("For example:\n")[2].replace("[device]", '[device]\nname = "GPU 3090"')
    (tmp_path / "my.toml").write_text("\n".join([*kept[:first], shown, *kept[first:]]))
    assert "16 devices of mycluster" in run(*words).output
