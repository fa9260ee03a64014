"""Configuration of a run in the format that the engine's library (DeepSpeed, NxD) reads. The files
are written into the run directory. This module does not import torch.
"""

import json
import shlex

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.deepspeed.configuration import (
    CONFIG_FILE,
    deepspeed_config,
    is_frontier_gpt,
    megatron_arguments,
)
from kit.engines.neuron.configuration import nxd_arguments

DEEPSPEED, MEGATRON, NEURON = FILES = CONFIG_FILE, "megatron_deepspeed.txt", "neuron.json"


def configuration_files(spec: ModelSpec, plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Returns the engine's configuration files, as a dict from file name to content.

    For engine deepspeed, the files are DeepSpeed's JSON and, if the model is a GPT, the command
    line of Megatron-DeepSpeed. For engine neuron, the file has the arguments of NxD. The native
    engine needs only plan.json and recipe.json, so the result is empty.
    """
    if plan.engine == "neuron":
        return {NEURON: _json(nxd_arguments(spec, plan))}
    if plan.engine != "deepspeed":
        return {}
    files = {DEEPSPEED: _json(deepspeed_config(plan, recipe))}
    # Megatron-DeepSpeed has no schedule 'wsd'.
    if is_frontier_gpt(spec) and recipe.schedule != "wsd":
        files[MEGATRON] = f"pretrain_gpt.py {shlex.join(megatron_arguments(spec, plan, recipe))}\n"
    return files


def _json(told: dict) -> str:
    return json.dumps(told, indent=2) + "\n"
