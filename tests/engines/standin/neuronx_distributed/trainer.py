"""Configuration, model and optimizer of the simulated NxD."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from neuronx_distributed.parallel_layers import parallel_state
from tests.engines.signatures import CALLS, check, recorded

NAME = "neuronx_distributed"


@recorded(NAME)
def neuronx_distributed_config(**arguments):
    parallel_state.initialise(
        arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]
    )
    optimizer, precision = arguments["optimizer_config"], arguments["mixed_precision_config"]
    if precision["use_master_weights"] and not optimizer["zero_one_enabled"]:
        raise RuntimeError("ZeRO-1 optimizer is not enabled, while `use_master_weights` is True.")
    return arguments


@contextlib.contextmanager
def parameters_on_meta():
    """Context manager that creates parameters on the meta device, but not buffers, as NxD's
    `init_on_device` does.
    """
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@recorded(NAME)
def initialize_parallel_model(nxd_config, model_fn):
    assert nxd_config["model_init_config"]["meta_device_init"]
    with parameters_on_meta():
        model = model_fn()
    if nxd_config["pipeline_config"] is not None:
        layout = nxd_config["pipeline_config"]
        check("neuronx_distributed.pipeline.NxDPPModel", {"module": model, **layout})
        names = dict(model.named_modules())
        assert all(
            isinstance(names[cut], layout["transformer_layer_cls"])
            for cut in layout["pipeline_cuts"]
        )
    fill = nxd_config["model_init_config"]["param_init_fn"]
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                given = {
                    key: value
                    for key, value in vars(parameter).items()
                    if key == "sequence_parallel_enabled"
                }
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                vars(module._parameters[name]).update(given)
            fill(module, torch.device("cpu"))
    classes = nxd_config["activation_checkpoint_config"]
    if classes:
        apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, tuple(classes))
        )
    return NxDModel(model, nxd_config)


class NxDModel(nn.Module):
    def __init__(self, module, config):
        super().__init__()
        self.module, self.layout = module, config["pipeline_config"]

    def forward(self, **inputs):
        return self.module(**inputs)

    def run_train(self, **inputs):
        CALLS.append(("run_train", inputs))
        if self.layout is None:
            loss = self(**inputs)
            loss.backward()
            return loss
        return self.pipeline(inputs, backward=True)

    def run_eval(self, **inputs):
        CALLS.append(("run_eval", inputs))
        assert self.layout is not None, (
            "`run_eval` should be used only when pipeline parallel is enabled."
        )
        return self.pipeline(inputs, backward=False)

    def pipeline(self, inputs, backward):
        count, losses = self.layout["num_microbatches"], []
        assert list(inputs) == self.layout["input_names"] and self.layout[
            "output_loss_value_spec"
        ] == (True, False)
        for parts in zip(*(value.chunk(count) for value in inputs.values()), strict=True):
            loss, _ = self(**dict(zip(inputs, parts, strict=True)))
            if backward:
                (loss / count).backward()
            losses.append(loss.detach())
        assert len(losses) == count and self.layout["broadcast_and_average_loss"]
        mean, group = torch.stack(losses).mean(), parallel_state.mesh()["data"].get_group()
        add_up([mean], group)
        return mean / group.size()

    def state_dict(self, *arguments, **named):
        return self.module.state_dict(*arguments, **named)

    def load_state_dict(self, state, strict=True):
        return self.module.load_state_dict(state, strict=strict)

    def named_parameters(self, *arguments, **named):
        return self.module.named_parameters(*arguments, **named)


@recorded(NAME)
def initialize_parallel_optimizer(nxd_config, optimizer_class, parameters, **defaults):
    return NxDOptimizer(optimizer_class, parameters, defaults, nxd_config)


class NxDOptimizer:
    def __init__(self, optimizer_class, parameters, defaults, config):
        assert not config["optimizer_config"]["grad_clipping"], (
            "NxD's gradient norm is not modelled"
        )
        self.parameters, self.config, self.grad_norm = parameters, config, None
        has_master = config["mixed_precision_config"]["use_master_weights"]
        self.is_sharded = config["optimizer_config"]["zero_one_enabled"]
        self.stepped = (
            [self.shard(p.detach()).float().clone() for p in parameters]
            if has_master
            else parameters
        )
        self.optimizer = optimizer_class(self.stepped, **defaults)
        self.param_groups = self.optimizer.param_groups
        if has_master:
            self.optimizer.init_zero = self.init_zero

    def shard(self, whole):
        """Returns this replica's shard of a tensor, split along the first dimension and padded with
        zeros.
        """
        if not self.is_sharded:
            return whole
        data = parallel_state.mesh()["data"].get_group()
        missing = -len(whole) % data.size()
        return nn.functional.pad(whole, [0, 0] * (whole.dim() - 1) + [0, missing]).chunk(
            data.size()
        )[data.rank()]

    @torch.no_grad()
    def spread(self):
        """Gathers the shards of all replicas and writes the complete tensors to the model's
        weights.
        """
        data = parallel_state.mesh()["data"].get_group()
        for stepped, parameter in zip(self.stepped, self.parameters, strict=True):
            parts = [stepped.data]
            if self.is_sharded and data.size() > 1:
                parts = [torch.empty_like(stepped) for _ in range(data.size())]
                dist.all_gather(parts, stepped.data, group=data)
            parameter.copy_(torch.cat(parts)[: len(parameter)])

    @torch.no_grad()
    def init_zero(self):
        CALLS.append(("init_zero", {}))
        for stepped, parameter in zip(self.stepped, self.parameters, strict=True):
            stepped.copy_(self.shard(parameter))

    def state_dict(self):
        state = self.optimizer.state_dict()
        if self.config["mixed_precision_config"]["use_master_weights_in_ckpt"]:
            state["sharded_master_weights"] = dict(enumerate(self.stepped))
        return state

    def zero_grad(self, set_to_none=False):
        CALLS.append(("zero_grad", {}))
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        CALLS.append(("step", {"learning_rate": self.param_groups[0]["lr"]}))
        tensor, data = parallel_state.tensor_group(), parallel_state.mesh()["data"].get_group()
        marked = [p for p in self.parameters if getattr(p, "sequence_parallel_enabled", False)]
        add_up([p.grad for p in marked] if self.config["sequence_parallel"] else [], tensor)
        add_up([p.grad for p in self.parameters], data)
        torch._foreach_div_([p.grad for p in self.parameters], data.size())
        for stepped, parameter in zip(self.stepped, self.parameters, strict=True):
            stepped.grad = self.shard(parameter.grad).to(stepped.dtype)
        self.optimizer.step()
        self.spread()


def add_up(tensors, group):
    """Replaces the values of tensors with equal dtype by their sums over the ranks of the group."""
    if tensors and group.size() > 1:
        whole = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(whole, group=group)
        for tensor, part in zip(
            tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))
