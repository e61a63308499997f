"""A rank's process groups along the axes of the layout."""

from __future__ import annotations

import torch.distributed as dist

from hpc_gpt.settings.layout import Layout


def own_group(layout: Layout, axis: str, rank: int) -> dist.ProcessGroup | None:
    """This rank's process group along `axis`; None for a group of one. Every rank makes every group, in order."""
    own = None
    for ranks in layout.groups(axis):
        if len(ranks) > 1:
            group = dist.new_group(ranks)
            own = group if rank in ranks else own
    return own
