"""Checkpoints of the stand-in: NxD's names and marks; `done` is written when saving is finished, as with async_save."""

from pathlib import Path

import torch
import torch.distributed as dist

from neuronx_distributed.parallel_layers import parallel_state
from tests.engines.signatures import recorded

NAME = "neuronx_distributed"
PENDING: list[Path] = []


def ranks() -> dict[str, int]:
    return {name: parallel_state.mesh()[name].get_local_rank() for name in ("data", "tensor", "pipeline")}


def file(folder: Path, kind: str, is_sharded: bool = False) -> Path:
    of = ranks()
    replica = of["data"] if is_sharded else 0
    return folder / kind / f"dp_rank_{replica:02d}_tp_rank_{of['tensor']:02d}_pp_rank_{of['pipeline']:02d}.pt"


@recorded(NAME)
def save_checkpoint(checkpoint_dir_str, tag, model, optimizer, user_content, async_save):
    assert async_save
    folder = Path(checkpoint_dir_str) / tag
    is_sharded = optimizer.config["optimizer_config"]["zero_one_enabled"]
    for kind in ("model", "optim"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    if ranks()["data"] == 0:
        torch.save(stage(model), file(folder, "model"))
    if is_sharded or ranks()["data"] == 0:
        has_master = optimizer.config["mixed_precision_config"]["use_master_weights_in_ckpt"]
        master = optimizer.stepped if has_master else None
        torch.save((optimizer.optimizer.state_dict(), master), file(folder, "optim", is_sharded))
    if dist.get_rank() == 0:
        (folder / "checkpoint").write_text("1")
        torch.save(user_content, folder / "user_content.pt")
    PENDING.append(folder)


def stage(model) -> dict[str, torch.Tensor]:
    """Returns the weights of this pipeline stage: each rank holds all, but writes its own."""
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
        folder = PENDING.pop()
        if dist.get_rank() == 0:
            (folder / "done").write_text("1")
    dist.barrier()


@recorded(NAME)
def load_checkpoint(path, tag, model=None, optimizer=None):
    """The optimizer first, as in 0.17: its master weights start from the model that it finds."""
    folder = Path(path) / tag
    assert (folder / "done").exists()
    if optimizer is not None:
        is_sharded = optimizer.config["optimizer_config"]["zero_one_enabled"]
        state, master = torch.load(file(folder, "optim", is_sharded))
        if is_sharded:
            optimizer.init_zero()
        optimizer.optimizer.load_state_dict(state)
        with torch.no_grad():
            for stepped, parameter, saved in zip(optimizer.stepped, optimizer.parameters, master or [], strict=False):
                stepped.copy_(saved)
                parameter.copy_(saved)
    if model is not None:
        assert model.layout is None, "the stand-in loads no pipeline"
        model.load_state_dict(torch.load(file(folder, "model")))
    return torch.load(folder / "user_content.pt")
