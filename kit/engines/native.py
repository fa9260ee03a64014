"""The native engine: runs the optimizer steps of a plan with torch's own DTensor, fully_shard and
pipelining.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.config.weight_groups import WEIGHT_GROUPS, weight_group
from kit.engines.engine import (
    MOMENTS,
    Accepts,
    PortableEngine,
    StepResult,
    adamw,
    adamw_state,
    optimizer_groups,
    state_key,
)
from kit.engines.muon import MOMENTUM, Muon
from kit.model import Decoder
from kit.model.cross_entropy import ZLoss
from kit.model.past import Past, has_document_kernel
from kit.parallel.apply import build_decoders
from kit.parallel.data import drop_gathered, prepare_backward
from kit.parallel.gradients import GradientNorms, clip, local, reduce_partial
from kit.parallel.groups import pipeline_rank, split_world
from kit.parallel.pipeline import build_schedule, forward_only
from kit.parallel.tensor import cross_entropy
from kit.parallel.whole_matrices import stage_group


class NativeEngine(PortableEngine):
    """The native engine on one rank: trains the part of the model that this rank holds.
    `build_engine` makes it.
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
        super().__init__(spec, plan, recipe, device)
        seed = recipe.seed if initialise else None
        self.decoders: list[Decoder] = build_decoders(
            spec, plan, self.mesh, device=device, seed=seed, recipe=recipe
        )
        self.is_first = any(decoder.embedding is not None for decoder in self.decoders)
        self.is_last = any(decoder.output is not None for decoder in self.decoders)
        self.tied: _TiedStages | None = None
        if spec.tied_embeddings and self.pipeline_group is not None:
            self.tied = _TiedStages(self)
        self.document_end: int | None = None
        """Token that ends a document, if each token attends only to its own document. None if each
        token attends to all earlier tokens."""
        self.z_loss = ZLoss(recipe.z_loss) if recipe.z_loss else None
        self.schedule = None
        if self.pipeline_group is not None:
            self.schedule = build_schedule(
                self.decoders,
                plan=plan,
                pipeline_rank=pipeline_rank(self.mesh),
                group=self.pipeline_group,
                device=device,
                loss=lambda logits, targets: cross_entropy(
                    logits, targets, self.tensor_mesh, self.z_loss
                ),
            )
        self.optimizer, self.muon = self._make_optimizers()
        self.norms = self._gradient_norms()

    def parameters(self) -> list[Parameter]:
        """Returns this rank's parameters. If the output weight is tied to the embedding, and this
        rank has the first and the last pipeline stage, the list contains both copies of the weight.
        """
        return [parameter for decoder in self.decoders for parameter in decoder.parameters()]

    def mask_documents(self, end: int) -> None:
        """Restricts attention to tokens of the same document. `end` is the token that ends a
        document.
        """
        self.document_end = end

    def begin_step(
        self, samples: Tensor, learning_rate: float, accepts: Accepts | None = None
    ) -> StepResult:
        """Begins one optimizer step and returns its loss and gradient norm. If `accepts` is None, a
        GPU may still compute the step when the function returns.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        result = StepResult(self.device)
        loss = self._forward_backward(samples)
        result.mark()
        reduce_partial(self.parameters())
        if self.tied is not None:
            self.tied.reduce_gradients()
        squares = self.norms.squares()
        norm = squares.sum().sqrt()
        more = self._norms_by_group(squares)
        if self.recipe.gradient_clip is not None:
            clip(self.parameters(), norm, self.recipe.gradient_clip)
        if accepts is not None:
            self._take(result, loss, norm, more)
            if not accepts(*result.read()):
                return result
        result.mark()
        self._update(learning_rate)
        result.mark()
        if accepts is None:  # The update is launched before the host waits for the loss.
            self._take(result, loss, norm, more)
        return result

    def _take(
        self, result: StepResult, loss: Tensor, norm: Tensor, more: dict[str, Tensor]
    ) -> None:
        """Gives the numbers of a step to `result`. `loss` is the mean over this replica, and
        contains the z-loss. In `result`, loss and z-loss are means over all replicas, and the loss
        does not contain the z-loss.
        """
        if self.z_loss is None:
            result.take(self.mean_over_replicas(loss), norm, **more)
            return
        z_loss = self.z_loss.take()
        if z_loss is None:  # This rank does not have the last pipeline stage.
            z_loss = torch.zeros_like(loss)
        both = self.mean_over_replicas(torch.stack((loss - z_loss, z_loss)))
        result.take(both[0], norm, z_loss=both[1], **more)

    def _gradient_norms(self) -> GradientNorms:
        """Returns the object that computes the gradient norm of each of WEIGHT_GROUPS. A tied
        weight must count once, so the output layer's copy is left out.
        """
        copy = self.tied.output if self.tied is not None else None
        groups: dict[str, list[Parameter]] = {group: [] for group in WEIGHT_GROUPS}
        for name, parameter in self._all_named():
            if parameter is not copy:
                groups[weight_group(name, parameter.ndim)].append(parameter)
        return GradientNorms(list(groups.values()), self.pipeline_group)

    def _norms_by_group(self, squares: Tensor) -> dict[str, Tensor]:
        """Returns columns of metrics.jsonl: the gradient norm of each group of weights that the
        model has, before clipping.
        """
        norms = zip(WEIGHT_GROUPS, squares.sqrt().unbind(), strict=True)
        has_output = not self.spec.tied_embeddings
        return {f"grad_norm/{g}": norm for g, norm in norms if g != "output" or has_output}

    def _make_optimizers(self) -> tuple[torch.optim.AdamW, Muon | None]:
        """Returns (AdamW, Muon). Muon is None if the recipe does not name it, or if this rank has
        no matrix for it.
        """
        named = self._all_named()
        if self.recipe.optimizer == "adamw":
            return adamw(optimizer_groups(named, self.recipe, self.spec), self.recipe), None
        matrices = []
        others = []
        for name, parameter in named:
            is_matrix = weight_group(name, parameter.ndim) == "matrices"
            (matrices if is_matrix else others).append((name, parameter))
        optimizer = adamw(optimizer_groups(others, self.recipe, self.spec), self.recipe)
        group = stage_group(self.mesh)
        if not matrices:
            return optimizer, None
        muon = Muon(
            optimizer_groups(matrices, self.recipe, self.spec),
            self.recipe,
            mesh=self.mesh,
            group=group,
            dtype=torch.bfloat16 if self.plan.precision == "bf16" else torch.float32,
        )
        return optimizer, muon

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW and, if the recipe names it, Muon, in the order in which they update the weights.
        AdamW comes first: before its update it waits until the state for a checkpoint is copied
        (`PortableCheckpoints`), so Muon's update also follows the copy.
        """
        return [self.optimizer] if self.muon is None else [self.optimizer, self.muon]

    def _update(self, learning_rate: float) -> None:
        self.set_learning_rate(learning_rate)
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def validation_loss(self, samples: Tensor) -> float:
        """Returns the mean loss of the sequences in nats per token, over all replicas."""
        loss = torch.zeros((), device=self.device)
        with self.loss_context():
            for x_BT, y_BT, past in self._micro_batches_with_past(samples):
                loss += self._loss(x_BT, y_BT, past)
        for decoder in self.decoders:
            drop_gathered(decoder)
        return self.mean_over_replicas(loss / (len(samples) // self.plan.micro_batch_size)).item()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns weights, AdamW moments and Muon's momentum by their names in the complete model.
        The tensors are not copied, so the next step changes them. Tensors that are split over ranks
        are DTensors.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters().items():
            kept = {}
            for optimizer in self.optimizers:
                kept |= optimizer.state.get(parameter, {})
            assert kept or not self.optimizer.state, f"{name} is not an optimizer's"
            state[state_key("weight", name)] = parameter.detach()
            for kind in (*MOMENTS, MOMENTUM):
                if kind in kept:
                    state[state_key(kind, name)] = kept[kind]
        return state

    def named_parameters(self) -> dict[str, Parameter]:
        """Returns this rank's parameters by their names in the complete model. If the output weight
        is tied to the embedding, the output weight is listed under the name of the embedding's
        weight.
        """
        named: dict[str, Parameter] = {}
        for name, parameter in self._all_named():
            named.setdefault(name, parameter)
        return named

    def _all_named(self) -> list[tuple[str, Parameter]]:
        """Returns each parameter of `parameters` with its name in the complete model. If this rank
        has two copies of a tied weight, both have the name of the embedding's weight.
        """
        named = []
        for decoder in self.decoders:
            for name, parameter in decoder.named_parameters():
                if name == "output.weight" and self.spec.tied_embeddings:
                    name = "embedding.tokens.weight"
                named.append((name, parameter))
        return named

    def load(self, fill: Callable[[dict[str, Tensor]], None], *, num_updates: int) -> None:
        """Replaces weights and the state of the optimizers. All ranks must call it. `fill` writes
        the new values into the tensors that it receives, and `num_updates` is the number of updates
        that the moments contain.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = adamw_state(parameter, num_updates)
        if self.muon is not None:
            self.muon.reset()
        fill(self.state_dict())
        if self.tied is not None:
            # A rank with the first and the last stage has two copies of the tied weight. `fill` has
            # written only the copy of the embedding.
            self.tied.copy_to_output(self.optimizer)

    # Forward and backward -------------------------------------------------------------------------

    def _forward_backward(self, samples: Tensor) -> Tensor:
        """Adds the gradients of the mean loss to the parameters. Returns the mean loss, or zero if
        this rank does not have the last pipeline stage.
        """
        if self.schedule is not None:
            return self._run_schedule(self.schedule, samples)
        decoder = self.decoders[0]
        count = self.plan.num_microbatches
        total = torch.zeros((), device=self.device)
        for i, (x_BT, y_BT, past) in enumerate(self._micro_batches_with_past(samples)):
            prepare_backward(decoder, self.plan, last_microbatch=i == count - 1)
            with self.loss_context():
                loss = self._loss(x_BT, y_BT, past, self.z_loss) / count
                loss.backward()
            total += loss.detach()
        return total

    def _micro_batches_with_past(
        self, samples: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Past | None]]:
        """Yields (inputs, targets, past) of each micro-batch. `past` describes which tokens each
        token may attend to. If `past` is None, each token attends to all earlier tokens.

        If attention has a kernel for documents, the document boundaries are searched in host
        memory, in `samples`. A search on the GPU would make the host wait until the GPU has
        finished the previous micro-batch.
        """
        has_kernel = self.spec.has_plain_attention and has_document_kernel(
            self.device,
            self.plan.precision,
            has_grouped_heads=self.spec.num_heads != self.spec.num_kv_heads,
        )
        parts = samples.split(self.plan.micro_batch_size)
        for part, (x_BT, y_BT) in zip(parts, self.micro_batches(samples), strict=True):
            past = None
            if self.document_end is not None:
                tokens_BT = part[:, :-1] if has_kernel else x_BT
                past = Past.within_documents(
                    tokens_BT,
                    self.document_end,
                    device=self.device,
                    has_kernel=has_kernel,
                )
            yield x_BT, y_BT, past

    def _run_schedule(self, schedule: Any, samples: Tensor) -> Tensor:
        samples = samples.to(self.device, non_blocking=True)
        losses = []
        # Pipelines of torch 2.11 and 2.12 reject an input whose strides differ from those of the
        # input with which the stage was built, so both slices are made contiguous.
        first = [samples[:, :-1].contiguous()] if self.is_first else []
        last = {"target": samples[:, 1:].contiguous(), "losses": losses} if self.is_last else {}
        with self.loss_context():
            schedule.step(*first, return_outputs=False, **last)
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).mean().detach()

    def _loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        past: Past | None,
        z_loss: ZLoss | None = None,
    ) -> Tensor:
        """Returns the mean loss of a micro-batch. Returns zero without a gradient if this rank does
        not have the last pipeline stage. With a pipeline, `past` and `z_loss` must be None.
        """
        if self.pipeline_group is None and self.tensor_mesh is None:
            return self.decoders[0](tokens_BT, targets_BT, past=past, z_loss=z_loss)
        if self.pipeline_group is None:
            logits_BTV = self.decoders[0](tokens_BT, past=past)
            return cross_entropy(logits_BTV, targets_BT, self.tensor_mesh, z_loss)
        group = self.pipeline_group
        rank = pipeline_rank(self.mesh)
        logits_BTV = forward_only(
            self.decoders, tokens_BT, plan=self.plan, pipeline_rank=rank, group=group
        )
        if logits_BTV is None:
            return torch.zeros((), device=self.device)
        return cross_entropy(logits_BTV, targets_BT, self.tensor_mesh)


class _TiedStages:
    """The tied embedding weight in a pipeline: the first and the last stage each hold a copy. The
    copies stay equal because both are updated with the sum of their gradients.
    """

    def __init__(self, engine: NativeEngine) -> None:
        embeddings = [decoder.embedding for decoder in engine.decoders if decoder.embedding]
        outputs = [decoder.output for decoder in engine.decoders if decoder.output]
        self.embedding = cast(Parameter, embeddings[0].tokens.weight) if embeddings else None
        self.output = cast(Parameter, outputs[0].weight) if outputs else None
        # Each group is a pair of ranks, one of the first and one of the last stage, whose other
        # mesh coordinates are equal. In the schedule `zbv`, one rank has both stages and needs no
        # group.
        ends = engine.mesh.mesh[[0, -1]].flatten(1).t().tolist()
        self.group: Any = None if engine.plan.schedule == "zbv" else split_world(ends, "tied")

    def reduce_gradients(self) -> None:
        """Replaces the gradient of each copy by the sum of the gradients of both copies."""
        if self.embedding is not None and self.output is not None:
            total = cast(Tensor, self.embedding.grad) + cast(Tensor, self.output.grad)
            self.embedding.grad = total
            self.output.grad = total.clone()
            return
        weight = self.embedding if self.embedding is not None else self.output
        if weight is not None:
            dist.all_reduce(local(cast(Tensor, weight.grad)), group=self.group)

    @torch.no_grad()
    def copy_to_output(self, optimizer: torch.optim.Optimizer) -> None:
        """Copies weight and moments from the embedding to the output layer if both are on this
        rank, since loading a checkpoint fills only the embedding.
        """
        if self.embedding is None or self.output is None:
            return
        local(self.output).copy_(local(self.embedding))
        target = optimizer.state[self.output]
        source = optimizer.state[self.embedding]
        for moment in MOMENTS:
            local(target[moment]).copy_(local(source[moment]))
