"""Checkpoints of the simulated NxD, with the file names and marker files of the real NxD. Files are
written only when the save is finished, as by async_save on a slow disk.

Tensors that stand for device memory are copied when the save starts. AdamW's step counts are on the
host. They are written with the values that they have when the writer reads them.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from neuronx_distributed.parallel_layers import parallel_state
from tests.engines.signatures import recorded

NAME = "neuronx_distributed"
PENDING: list[tuple[Path, list[tuple[Any, Path]]]] = []


def ranks() -> dict[str, int]:
    return {
        name: parallel_state.mesh()[name].get_local_rank()
        for name in ("data", "tensor", "pipeline")
    }


def file(folder: Path, kind: str, is_sharded: bool = False) -> Path:
    of = ranks()
    replica = of["data"] if is_sharded else 0
    return (
        folder
        / kind
        / f"dp_rank_{replica:02d}_tp_rank_{of['tensor']:02d}_pp_rank_{of['pipeline']:02d}.pt"
    )


@recorded(NAME)
def save_checkpoint(
    checkpoint_dir_str, tag, model, optimizer, zero1_optimizer, user_content, async_save
):
    assert async_save and isinstance(optimizer, dict)
    folder = Path(checkpoint_dir_str) / tag
    for kind in ("model", "optim"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    items: list[tuple[Any, Path]] = []
    if ranks()["data"] == 0:
        items.append((from_device(stage(model)), file(folder, "model")))
    if zero1_optimizer or ranks()["data"] == 0:
        items.append((from_device(optimizer), file(folder, "optim", zero1_optimizer)))
    if dist.get_rank() == 0:
        (folder / "checkpoint").write_text("1")
        items.append((user_content, folder / "user_content.pt"))
    PENDING.append((folder, items))


def from_device(state: Any, name: str = "") -> Any:
    """Returns the state as it will be written. Device tensors are copied. Step counts, which are on
    the host, are not copied.
    """
    if isinstance(state, dict):
        return {key: from_device(value, key) for key, value in state.items()}
    return state if name == "step" else copy.deepcopy(state)


def stage(model) -> dict[str, torch.Tensor]:
    """Returns the weights of this rank's pipeline stage. Each rank holds the whole model, but
    writes only its stage.
    """
    state = model.state_dict()
    if model.layout is None:
        return state
    cuts = [int(cut.rsplit(".", 1)[1]) for cut in model.layout["pipeline_cuts"]]
    own, stages = ranks()["pipeline"], len(cuts) + 1

    def stage_of(name: str) -> int:
        if name.startswith("model.layers."):
            return sum(int(name.split(".")[2]) > cut for cut in cuts)
        return 0 if name.startswith("model.embed") else stages - 1

    return {name: value for name, value in state.items() if stage_of(name) == own}


@recorded(NAME)
def finalize_checkpoint():
    dist.barrier()
    while PENDING:
        folder, items = PENDING.pop()
        for item, path in items:
            torch.save(item, path)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "done").write_text("1")
    dist.barrier()


@recorded(NAME)
def load_checkpoint(path, tag, model=None, optimizer=None):
    """Loads a checkpoint. The optimizer is loaded before the model, as in NxD 0.17, so its master
    weights start from the weights that the model has at that time.
    """
    folder = Path(path) / tag
    assert (folder / "done").exists()
    if optimizer is not None:
        is_sharded = optimizer.config["optimizer_config"]["zero_one_enabled"]
        state = torch.load(file(folder, "optim", is_sharded))
        master = state.pop("sharded_master_weights", {})
        if is_sharded:
            optimizer.init_zero()
        optimizer.optimizer.load_state_dict(state)
        with torch.no_grad():
            for index, saved in master.items():
                optimizer.stepped[index].copy_(saved)
        optimizer.spread()
    if model is not None:
        assert model.layout is None, "the stand-in loads no pipeline"
        model.load_state_dict(torch.load(file(folder, "model")))
    return torch.load(folder / "user_content.pt")
