"""What the kernels that the attention ``"vmem"`` will choose for a model need of its cache.

SPDX-License-Identifier: MIT
"""

import math

import torch
from transformers import PreTrainedConfig

from pyvmem import attention
from pyvmem.attention.kernel import Shape, capability
from pyvmem.attention.table import choose


def softcap_of(config: PreTrainedConfig) -> float:
    """The soft cap of a model's scores; 0: none."""
    return float(getattr(config, "attn_logit_softcapping", None) or 0.0)


def tile_rows(key: torch.Tensor, config: PreTrainedConfig, windows: list[int]) -> int:
    """The `tile_rows` that a model's cache needs for the kernels that will be chosen.

    key: ``[batch, heads, tokens, head_dim]``. windows: the windows of the model's layers.
    """
    if key.device.type != "cuda":
        return 1
    heads, kv_heads, dim, dtype = config.num_attention_heads, key.shape[1], key.shape[3], key.dtype
    where, softcap = capability(key.device.index), softcap_of(config)
    rows = [1]
    for phase in ("decode", "prefill"):
        for window in set(windows):
            shape = Shape(phase, heads, kv_heads, dim, dtype, kv_dtype=dtype, device="cuda", capability=where,
                          window=window, softcap=softcap, tile_rows=0)  # fmt: skip
            try:
                # With whole tiles, one launch of prefill serves prompts of several lengths.
                rows.append(attention.tile_rows(choose(shape).kernel, heads, kv_heads, dim, dtype, window=window))
            except ValueError:  # no kernel takes it: the dense path does
                pass
    return math.lcm(*rows)
