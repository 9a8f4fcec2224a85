"""A strategy in one file: ranks exchange gradients in 16 bits, with error feedback.

python -m torch.distributed.run --nproc-per-node=2 train.py  # with Trainer(strategy=RoundedGradients(), devices=2)
"""

from contextlib import contextmanager

import torch

from drivetrain.strategies import ParallelStrategy

NOTHING = torch.zeros(0)


class RoundedGradients(ParallelStrategy):
    """What rounding takes from a gradient, the rank adds to its next one."""

    def __init__(self, dtype=torch.bfloat16, **arguments):
        super().__init__(**arguments)
        self.dtype = dtype
        self.exchanges = True
        self.residuals = {}  # module -> what this rank has not sent yet, all its gradients in one vector

    def agreed_options(self):
        return {**super().agreed_options(), "dtype": self.dtype}

    def setup_module(self, module, move_to_device=True):
        module = super().setup_module(module, move_to_device)
        self.share_from_rank_zero([*module.parameters(), *module.buffers()])  # all ranks begin with the same values
        self.residuals.setdefault(module, NOTHING)
        return module

    @contextmanager
    def accumulating(self, model):
        self.exchanges = False
        try:
            yield
        finally:
            self.exchanges = True

    def backward(self, closure_loss, optimizer, *args, **kwargs):
        super().backward(closure_loss, optimizer, *args, **kwargs)
        if self.exchanges:
            of_run = self.lightning_module  # None under an Engine, which may have set up several modules
            for module in self.residuals if of_run is None else [of_run]:
                self.exchange(module)
        return closure_loss

    @torch.no_grad()
    def exchange(self, module):
        trained = [each for each in module.parameters() if each.requires_grad]
        gradient = torch.cat([flat_gradient(each) for each in trained])
        # Gradients are scaled and not weighted yet. The residual is kept as they will be when the optimizer gets them.
        unit = self.driver.remaining_factor() / self.precision_plugin.scale(gradient.new_ones(()))
        residual = self.residuals[module].to(gradient)
        if residual.shape != gradient.shape:  # the first exchange, or other parameters are trained now
            residual = torch.zeros_like(gradient)
        complete = gradient + residual / unit
        sent = complete.to(self.dtype)
        mean = self.data.all_gather(sent).to(complete.dtype).mean(0)
        # The step after an overflow is skipped on all ranks, so nothing has been sent.
        self.residuals[module] = torch.where(mean.isfinite().all(), (complete - sent) * unit, residual)
        for parameter, part in zip(trained, mean.split([each.numel() for each in trained]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def rank_state(self, module):
        return {**super().rank_state(module), "residual": self.residuals.get(module, NOTHING)}

    def load_rank_state(self, module, state):
        super().load_rank_state(module, state)
        self.residuals[module] = state.get("residual", NOTHING)


def flat_gradient(parameter):
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()
