"""`python -m kit.engines.deepspeed.probe` runs one training step of a tiny model on the CPU, to
check that DeepSpeed works on this machine.
"""

import sys

import torch
import torch.distributed as dist

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import build_engine
from kit.engines.process_group import leave
from kit.errors import MissingPackageError


def main() -> int:
    """Runs one training step of a tiny model with DeepSpeed. Prints the version of DeepSpeed, or
    the reason why DeepSpeed cannot run. Returns the exit code, 0 or 1.
    """
    spec = ModelSpec.gpt(
        name="probe", num_layers=1, hidden_size=8, num_heads=1, vocab_size=8, sequence_length=4
    )
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        engine = build_engine(
            spec,
            Plan(engine="deepspeed", zero_stage=1),
            Recipe(data="none", num_steps=1),
            torch.device("cpu"),
        )
        engine.train_step(torch.arange(5).unsqueeze(0), 1e-3)
    except MissingPackageError as error:
        print(error, file=sys.stderr)
        return 1
    import deepspeed

    print(deepspeed.__version__)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main())
