"""Shard a module over ranks block by block: each rank holds its shard, and gathers a block when needed."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from lightning_memkit.activations.blocks import BlockPattern, find_blocks, refuse_single_pattern
from lightning_memkit.utilities.errors import NoEffectWarning


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a module is sharded over all ranks by FSDP2.

    Args:
        stage: 3 frees a block's gathered weights after its forward and gathers them again for the backward; 2
            keeps them until the backward, for more memory and one all-gather less.
        blocks: patterns as for `find_blocks`; None finds blocks automatically.
        cpu_offload: keep shards of weights and gradients, and so the optimizer's states, in host memory.

    Raises:
        ValueError: the stage is neither 2 nor 3, or `blocks` is no list of patterns.
    """

    stage: int = 3
    blocks: Sequence[BlockPattern] | None = None
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (2, 3):
            raise ValueError(
                f"stage={self.stage!r}: FSDP2 shards at stage 3, or 2, which keeps gathered weights until the "
                "backward; for stage 1 shard the optimizer (ZeroRedundancyOptimizer) under DDP."
            )
        if self.blocks is not None:
            refuse_single_pattern(self.blocks)


def shard_blocks(
    module: nn.Module,
    mesh: DeviceMesh,
    sharding: Sharding | None = None,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    forward_methods: Sequence[str] = (),
) -> list[tuple[str, nn.Module]]:
    """Shard a module's blocks, then the rest of it, in place; each rank keeps 1/n of every weight.

    The rest (embeddings, heads, parameters of the root) is gathered for the whole forward. Cast the module
    before. This can't be undone: torch changes the classes of sharded modules.

    Args:
        module: not yet sharded.
        mesh: of one dimension; or of two, of which the first counts copies of the module, whose gradients are
            averaged.
        sharding: stage and blocks; stage 3 by default.
        mixed_precision: the dtypes in which weights are gathered and gradients reduced; by default their own.
        forward_methods: methods of `module` other than `forward` that use its parameters, such as
            `"training_step"`.

    Returns:
        The sharded blocks, with their names.

    Raises:
        ValueError: the mesh has more dimensions.
    """
    sharding = sharding or Sharding()
    if mesh.ndim > 2 or (mesh.ndim == 2 and "tensor_parallel" in (mesh.mesh_dim_names or ())):
        raise ValueError(f'The mesh has {mesh.ndim} dimensions; give one of them: mesh["data_parallel"].')
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed_precision or MixedPrecisionPolicy()}
    if sharding.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    blocks = find_blocks(module, sharding.blocks)
    if not blocks:
        looked_for = "repeated blocks" if sharding.blocks is None else f"blocks that match {sharding.blocks}"
        warnings.warn(
            f"{type(module).__name__} has no {looked_for}, so all its weights are gathered at once; name its "
            'parts: Sharding(blocks=["encoder.*"]).',
            NoEffectWarning,
            stacklevel=2,
        )
    for _, block in blocks:
        fully_shard(block, reshard_after_forward=sharding.stage == 3, **options)
    # The backward begins with the root: if the forward freed it, it would be gathered again immediately.
    fully_shard(module, reshard_after_forward=False, **options)
    for name in forward_methods:
        register_fsdp_forward_method(module, name)
    return blocks
