"""The ranks of one tensor-parallel group. Each runs a scheduler of its own, and all must decide alike.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from typing import Any

import torch


class Ranks:
    """This process's place among the ranks that share one queue of requests.

    Attributes
    ----------
    rank, size : int
        0 and 1 where SGLang has made no group.
    """

    def __init__(self) -> None:
        from sglang.srt.distributed import parallel_state

        self._group: Any = parallel_state.get_attn_tp_group() if torch.distributed.is_initialized() else None
        self.rank: int = self._group.rank_in_group if self._group else 0
        self.size: int = self._group.world_size if self._group else 1

    @property
    def leads(self) -> bool:
        """This is rank 0, which sees for all."""
        return not self.rank

    def tell(self, what: Any) -> Any:
        """Return what rank 0 passes. Every rank calls this at the same point."""
        if self._group is None or self.size == 1:
            return what
        return self._group.broadcast_object(what)

    def most(self, values: list[int]) -> list[int]:
        """The largest of all ranks' values, each for itself. Every rank calls this at the same point."""
        if self._group is None or self.size == 1 or not values:
            return values
        found = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self._group.cpu_group)
        largest: list[int] = found.tolist()
        return largest
