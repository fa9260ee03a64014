"""A site on Amazon EKS (Kubernetes) with all fields filled in, and a job for this site."""

from cluster.job import JobSpec
from cluster.site import Site


def eks(shared="/fsx", **changes):
    """Returns the site `eks-trn1` with container image, volume claim and mount path filled in."""
    site = Site.load("eks-trn1")
    assert site.kubernetes is not None
    given = {"image": "registry.example/kit:1", "claim": "fsx", "mount_path": str(shared)} | changes
    return site.replace(kubernetes=site.kubernetes.replace(**given))


def training_job(shared="/fsx", **changes):
    run_dir = f"{shared}/runs/7b"
    given = {
        "name": "hlat 7B",
        "run_dir": run_dir,
        "working_directory": str(shared),
        "num_processes": 2048,
        "num_nodes": 64,
        "argv": ("/home/me/venv/bin/python", "-P", "-m", "kit.train", "--run", run_dir),
    }
    return JobSpec(**{**given, **changes})
