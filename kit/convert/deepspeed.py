"""DeepSpeed's universal checkpoints: a run's checkpoint as DeepSpeed itself goes on from it, and the way back.

The kit's checkpoints do not depend on the layout, nor on the engine, and DeepSpeed has such a format too: under `zero/`
a folder for each weight, whole, by the name that the module gives it, with its AdamW moments. Any DeepSpeed program
that trains this module loads one on its own ranks and ZeRO stage, with "checkpoint": {"load_universal": true}. Source:
deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py of github.com/deepspeedai/DeepSpeed, 0.19.8.
"""

from pathlib import Path

import torch
from torch import Tensor

from kit.convert.formats import named
from kit.convert.neuron import load_tensors
from kit.convert.weights import Weights, parameter_shapes
from kit.convert.whole_folder import whole_folder
from kit.errors import DataError
from kit.parallel.linear import split_dim
from kit.recipe import Recipe
from kit.run import Run
from kit.run.checkpoint_tensors import CheckpointTensors
from kit.spec import ModelSpec

KINDS = {"fp32": "model", "exp_avg": "adamw.exp_avg", "exp_avg_sq": "adamw.exp_avg_sq"}
"""DeepSpeed's files of a weight, and the kit's names of the same."""
VERSION = "0.19.8"
"""Whose reader this was tried with; DeepSpeed asks which version wrote a checkpoint."""


def export_universal(run: Run, step: int | None, folder: str | Path) -> Path:
    """Writes one checkpoint of a run (None: the newest) as DeepSpeed's universal checkpoint, and returns the folder.

    It must be absent or empty, and appears when it is complete.

    Raises:
        CheckpointError: there is no such checkpoint, or NxD wrote it.
        ConfigError: the folder holds something.
    """
    folder = Path(folder)
    step = run.checkpoints.newest() if step is None else step
    described = run.checkpoints.describe(step)
    updates = step - described[0].skipped  # by which AdamW corrects the bias of its moments
    with whole_folder(folder) as part:
        tensors = CheckpointTensors(run.checkpoints, described, run.spec)
        tag = part / f"global_step{step}"
        for name, shape in parameter_shapes(run.spec).items():
            state = {f"{kind}.{name}": torch.empty(shape) for kind in KINDS.values()}
            tensors.fill_all(state)
            _write_weight(tag / "zero" / name, name, state, updates)
        _write_common(tag, run.recipe, step, updates)
        (part / "latest_universal").write_text(tag.name)
    return folder


def import_universal(folder: str | Path, spec: ModelSpec) -> Weights:
    """Returns the weights of a universal checkpoint.

    The folder is `global_stepN`, written by the kit, or by DeepSpeed's converter for a module of the kit; its files do
    not describe the model.

    Raises:
        DataError: a weight is missing, damaged or of another shape.
    """
    shapes = parameter_shapes(spec)

    def read(name: str) -> Tensor:
        file = Path(folder) / "zero" / name / "fp32.pt"
        if not file.exists():
            raise DataError(
                f"{file} does not exist. {named(Path(folder), 'universal')}"
                f"Give a folder global_stepN of a module with the kit's names."
            )
        held = load_tensors(file)
        weight = held["param"] if "param" in held else held[""]
        # From ZeRO 3, DeepSpeed's converter writes a weight as a row, with what padded it out to all ranks.
        shape = shapes[name]
        return weight[: shape.numel()].view(shape) if weight.ndim == 1 and len(weight) >= shape.numel() else weight

    return Weights.read_by(spec, read, Path(folder))


def _write_weight(folder: Path, name: str, state: dict[str, Tensor], updates: int) -> None:
    folder.mkdir(parents=True)
    for theirs, ours in KINDS.items():
        torch.save({"param": state[f"{ours}.{name}"], "cat_dim": split_dim(name) or 0}, folder / f"{theirs}.pt")
    torch.save(torch.tensor(float(updates)), folder / "step.pt")


def _write_common(tag: Path, recipe: Recipe, step: int, updates: int) -> None:
    """Writes what is not a weight's own: once as ZeRO 1 and 2 read it, once as ZeRO 3 does."""
    group = {"lr": recipe.learning_rate_at(max(1, step)), "betas": (recipe.beta1, recipe.beta2), "eps": recipe.eps,
             "weight_decay": recipe.weight_decay, "params": [0]}  # fmt: skip
    optimizer = {
        "ds_version": VERSION,
        "clip_grad": recipe.gradient_clip or 0.0,
        "param_groups": [group],
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(float(updates))}}, "param_groups": [group]},
    }
    torch.save(optimizer, tag / "zero" / "optimizer_state.pt")
    model = {"module": {}, "optimizer": None, "lr_scheduler": None, "dp_world_size": 1, "mp_world_size": 1,
             "global_steps": step, "skipped_steps": step - updates, "ds_version": VERSION}  # fmt: skip
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(model, tag / file)
