"""`python -m tests.support.parity_table`: differences between each engine and layout and the native
engine on one rank.

The table has the largest relative differences of loss, gradient norm and weights, over all ranks
and ten steps. For a tensor, the largest difference is divided by its largest weight. The column
Muon has the largest relative difference of the first update of a matrix by Muon. The first row has
the difference that another order of sums makes in one process. Training is in fp32 on this
machine's CPUs over gloo. The Neuron engine runs on a simulated NxD.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.deepspeed.start import import_deepspeed
from kit.interop.weights.neuron import import_nxd
from tests.engines import test_neuron
from tests.engines.conftest import STANDIN, VERSIONS, install
from tests.parallel import test_deepspeed, test_muon, test_parity
from tests.support.checkpoints import facts, nxd_in
from tests.support.parity import CPU, Trained, batches, build, differences, fit, make_plan
from tests.support.workers import run_ranks

STEPS = 10

SHAPES = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
SHAPES |= {"ffn_hidden_size": 64, "vocab_size": 128, "sequence_length": 16}
SPEC = ModelSpec.llama(name="tiny-llama", **SHAPES)
ENGINES = {
    "native": test_parity.LAYOUTS,
    "deepspeed": test_deepspeed.LAYOUTS,
    "neuron": test_neuron.LAYOUTS,
}


def train_and_leave_weights(spec: ModelSpec, plan: Plan, folder: Path) -> Trained:
    """Trains ten steps and writes this rank's weights to `folder`. Returns (validation loss before
    training, (loss, gradient norm) of each step).
    """
    engine = build(spec, plan)
    mine = batches(spec, plan, engine.data_rank, STEPS)
    said = engine.validation_loss(mine[0]), [engine.train_step(samples, 1e-3) for samples in mine]
    if plan.engine == "neuron":
        checkpoints = nxd_in(folder, spec, engine)
        checkpoints.save(facts(spec, STEPS, plan))
        checkpoints.finish()
        return said
    whole = {
        key.removeprefix("model."): value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in engine.state_dict().items()
        if key.startswith("model.")
    }
    torch.save(whole, folder / f"{dist.get_rank()}.pt")
    return said


def measure(spec: ModelSpec, plan: Plan) -> tuple[list[Trained], dict[str, Tensor]]:
    """Trains ten steps on all ranks. Returns (results of `train_and_leave_weights` in rank order,
    weights of the complete model after the steps).
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said = run_ranks(plan.num_devices, train_and_leave_weights, spec, plan, folder)
        if plan.engine == "neuron":
            return said, import_nxd(folder / f"step_{STEPS:08d}", spec).decoder().state_dict()
        parts = map(torch.load, folder.glob("*.pt"))
        return said, {key: weight for part in parts for key, weight in part.items()}


def muon_update_difference(spec: ModelSpec, plan: Plan) -> str:
    """Returns the largest relative difference of an update by Muon from that of one process, as
    text. Returns "refused" if the engine cannot train with Muon.
    """
    if not plan.capabilities.gathers_matrices:
        return "refused"
    with tempfile.TemporaryDirectory() as name:
        recipe = test_muon.MUON.replace(num_steps=1)
        found, expected = (
            test_muon.train(run_ranks, spec, each, recipe, Path(name) / str(number))
            for number, each in enumerate((plan, make_plan({})))
        )
    return f"{test_muon.differences(found, expected)[1]:.0e}"


def main() -> None:
    """Prints a row of a Markdown table for each engine and layout."""
    import_deepspeed(CPU)
    installed = tempfile.TemporaryDirectory()
    sys.path[:0] = [str(STANDIN), str(install(Path(installed.name) / "site", VERSIONS))]
    print("| engine | layout | loss | gradient norm | weights | Muon |\n|---|---|---|---|---|---|")
    reordered = muon_update_difference(SPEC, make_plan(test_muon.REORDERED))
    print(f"| native | one process, other order of sums | | | | {reordered} |", flush=True)
    for engine, layouts in ENGINES.items():
        for name, changes in layouts.items():
            plan = make_plan(changes, engine)
            spec = fit(SPEC, plan)
            said, weights = measure(spec, plan)
            reference, expected = measure(spec, make_plan({}))
            found = differences(said, reference[0])
            assert weights.keys() == expected.keys()
            strayed = max(
                float((weights[key] - whole).abs().max() / whole.abs().max())
                for key, whole in expected.items()
            )
            cells = f"{found['loss']:.0e} | {found['grad_norm']:.0e} | {strayed:.0e}"
            cells += f" | {muon_update_difference(spec, plan)}"
            print(f"| {engine} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
