"""A strategy in one file: FSDP2, where each process keeps a shard of every parameter, gradient and optimizer state.

python -m torch.distributed.run --nproc-per-node=2 train.py  # with Trainer(strategy=FSDP2Strategy(), devices=2)
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from drivetrain.strategies import ParallelStrategy
from drivetrain.strategies import sharded_state as sharded


class FSDP2Strategy(ParallelStrategy):
    facts = ParallelStrategy.facts.but(
        calls_through_forward=True,  # fully_shard gathers parameters around the module's __call__
        allows_inference_mode=False,  # nor can it gather them under inference mode
        restores_after_setup=True,  # weights are loaded into the shards
    )

    def setup_module(self, module, move_to_device=True):
        module = super().setup_module(module, move_to_device)
        if not isinstance(module, FSDPModule):  # after an earlier run it is sharded already
            self.share_from_rank_zero([*module.parameters(), *module.buffers()])
            mesh = init_device_mesh(self.root_device.type, (self.world_size,))
            for block in module.children():
                fully_shard(block, mesh=mesh)
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        return module

    def module_state(self, module):
        return sharded.whole_model_state(module)

    def load_module_state(self, module, state, strict=True):
        sharded.load_whole_model_state(module, state, strict)

    def optimizer_state(self, optimizer):
        return sharded.whole_optimizer_state(optimizer)

    def load_optimizer_states(self, optimizers, states, module_state):
        sharded.load_whole_optimizer_states(optimizers, states)
