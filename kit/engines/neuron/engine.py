"""The Neuron engine: HLAT's recipes (arXiv 2404.10630) with NeuronX Distributed (NxD) on AWS
Trainium.

bf16 with zero_stage 0 is the recipe of HLAT's 7B model: pure bf16 with stochastic rounding and
plain data parallelism. bf16 with zero_stage 1 is the recipe of the 70B model: bf16 compute with
fp32 master weights and fp32 gradient accumulation, sharded over the replicas. Both recipes use
tensor parallelism and weight decay on norms. The 7B recipe has 8 tensor parallel ranks. The 70B
recipe has 32 tensor parallel ranks, with every key/value head on 4 of them, and 8 pipeline stages.

NxD training has reached the end of its life. For this engine, stay on SDK 2.28
(requirements/trainium.txt). `kit.engines.neuron.probe` names the successor. The engine has not run
on Trainium. The tests compare every call with the recorded signatures of NxD and train with a
simulated NxD. `make test-nxd` trains, saves, resumes and imports with NxD's real source, on a CPU.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.engine import Accepts, Engine, StepResult
from kit.engines.neuron.adapter import Nxd
from kit.engines.neuron.configuration import check_neuron_environment, check_platform, nxd_arguments
from kit.engines.neuron.model import LEAVES, RECOMPUTED, NxdBlock, NxdLlama, weight_dtype
from kit.engines.neuron.weights import RankWeights
from kit.run import Run

COMPILED_STEPS = 4
"""Number of steps that are run to record graphs before training. The graphs of the first steps
differ from those of later steps, so one step is not enough. Source: github.com/awslabs/HLAT."""


class NeuronEngine(Engine):
    """The Neuron engine on one rank: trains the part of a Llama model without biases that this rank
    holds. `build_engine` makes it.

    Raises:
        ConfigError: Environment variables differ from `needed_environment`, so that NxD would
            compute in a precision, or communicate between ranks, other than those of the plan. Or
            the platform does not support the model's heads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        recipe: Recipe,
        device: torch.device,
        *,
        initialise: bool = True,
    ) -> None:
        check_neuron_environment(plan, os.environ)
        super().__init__(spec, plan, recipe, device)
        self.is_pipelined = plan.pipeline_parallel > 1
        self.nxd = Nxd(sequence_parallel=plan.sequence_parallel, dtype=weight_dtype(plan))
        check_platform(plan, spec, self.nxd.platform)
        # This call also makes NxD's process groups.
        self.config = self.nxd.config(self._arguments())
        self.data_rank = self.nxd.data_rank
        seed = recipe.seed if initialise else None
        self.weights = RankWeights(spec, plan, self.nxd, seed=seed)
        self.model = self.nxd.model(config=self.config, build=self._build)
        named = list(self.model.named_parameters())
        self.optimizer = self.nxd.optimizer(
            config=self.config,
            parameters=[parameter for _, parameter in named],
            holders=[self.weights.holders(name) for name, _ in named],
            limit=recipe.gradient_clip,
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
        )
        self.optimizer.zero_grad()

    def _arguments(self) -> dict[str, Any]:
        arguments = nxd_arguments(self.spec, self.plan)
        recomputed = list(RECOMPUTED[self.plan.recompute])
        arguments["activation_checkpoint_config"] = recomputed or None
        arguments["model_init_config"] = {
            "meta_device_init": True,
            "param_init_fn": self._fill,
        }
        if arguments["pipeline_config"] is not None:
            arguments["pipeline_config"] |= {
                "output_loss_value_spec": tuple(
                    arguments["pipeline_config"]["output_loss_value_spec"]
                ),
                "transformer_layer_cls": NxdBlock,
                "leaf_module_cls": [leaf.__name__ for leaf in LEAVES],
                "autowrap_modules": self.nxd.tracing(),
            }
        return arguments

    def _build(self) -> NxdLlama:
        # In a pipeline, NxD itself divides the loss by the number of micro-batches.
        scale = 1.0 if self.is_pipelined else 1 / self.plan.num_microbatches
        return NxdLlama(self.spec, self.plan, self.weights, scale)

    def _fill(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Sets the weights of a module for which NxD has just allocated memory. NxD 0.9 calls this
        function with one argument, later versions with two.
        """
        self.nxd.initialise(module)
        self.weights.fill(module)

    def begin_step(
        self, samples: Tensor, learning_rate: float, accepts: Accepts | None = None
    ) -> StepResult:
        """Runs one optimizer step. Returns its loss and its gradient norm before clipping.

        `samples` must have the same shape in all steps. Each other shape makes a new graph, which
        must be compiled.
        """
        result = StepResult(self.device)
        loss = self._loss(samples, self.model.run_train)
        self.set_learning_rate(learning_rate)
        # NxD sums the gradients over sequence parts and replicas. `Nxd._clip` then clips them, as a
        # hook that the optimizer calls before its update.
        norm = self.nxd.step(optimizer=self.optimizer)
        self.optimizer.zero_grad()
        self.nxd.mark_step()
        result.take(float(loss), float(norm))
        return result

    @torch.no_grad()
    def validation_loss(self, samples: Tensor) -> float:
        """Returns the mean loss in nats per token, over all replicas."""
        self.model.eval()
        forward = self.model.run_eval if self.is_pipelined else self.model
        loss = self._loss(samples, forward)
        self.model.train()
        return float(loss)

    def _loss(self, samples: Tensor, forward: Callable[..., Tensor]) -> Tensor:
        """Returns the mean loss over all replicas. In a pipeline, `forward` takes all micro-batches
        in one call. Without a pipeline, it is called once per micro-batch.
        """
        if self.is_pipelined:
            return forward(**_inputs(samples))
        loss = torch.zeros((), device=self.device)
        for micro_batch in samples.to(self.device).split(self.plan.micro_batch_size):
            loss += forward(**_inputs(micro_batch)).detach()
            self.nxd.mark_step()
        return self.nxd.sum_over_replicas(loss / self.plan.data_parallel)


def _inputs(samples: Tensor) -> dict[str, Tensor]:
    return {"input_ids": samples[:, :-1].contiguous(), "labels": samples[:, 1:].contiguous()}


def record_graphs(run: Run, device: torch.device) -> str:
    """Runs training steps on batches of zeros so that their graphs are recorded and compiled before
    the run starts. Returns a sentence for the log. Trains nothing and writes nothing into the run
    directory.

    The tool `neuron_parallel_compile` must run this process. It writes graphs out instead of
    executing them, compiles them in parallel, and puts them into NEURON_COMPILE_CACHE_URL, where
    the run finds them. Graphs depend only on shapes and no losses are computed, so neither data nor
    checkpoints are read.
    """
    engine = NeuronEngine(run.spec, run.plan, run.recipe, device)
    sequences = run.plan.global_batch_size // run.plan.data_parallel
    samples = torch.zeros(sequences, run.spec.sequence_length + 1, dtype=torch.int64)
    for step in range(1, COMPILED_STEPS + 1):
        engine.train_step(samples, run.recipe.learning_rate_at(step))
    if run.recipe.validation_every:
        engine.validation_loss(samples)
    return f"recorded the graphs of {COMPILED_STEPS} steps"
