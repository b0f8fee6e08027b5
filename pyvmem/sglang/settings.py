"""The settings of SGLang on vMem: environment variables, which SGLang's processes inherit. See docs/sglang.md.

Arguments of SGLang's own that cannot work with them are refused at start, with one line.

SPDX-License-Identifier: MIT
"""

import os
from collections.abc import Mapping
from typing import Any

from pyvmem.engine import settings
from pyvmem.engine.settings import Settings, cannot

SWITCH = "VMEM_SGLANG"
_OF_SLEEP = ("idle", "queue", "slice")


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment, as `pyvmem.engine.settings.read` has them."""
    made = settings.read(SWITCH, (), environ, ("http", "weights", *_OF_SLEEP))
    for field in _OF_SLEEP:
        name = f"{SWITCH}_{field.upper()}"
        if made.on and not made.weights and environ.get(name, "").strip():
            raise ValueError(f"{name} has no effect without {SWITCH}_WEIGHTS=1: set that, too, or unset {name}")
    return made


# Arguments that cannot work: (name, the value that can, if one must be set; the reason).
REFUSED = (
    ("hicache_host_memory_mode", "cache", "HiCache's buffers have not been tried with vMem"),
    ("enable_lmcache", None, "LMCache copies rows to host memory, which vMem does not follow"),
    ("enable_flexkv", None, "FlexKV copies rows to host memory, which vMem does not follow"),
    ("enable_unified_cache_external_linker", None, "an external linker copies rows, which vMem does not follow"),
    ("enable_hisparse", None, "HiSparse keeps rows in host memory, which vMem does not follow"),
    ("enable_unified_memory", None, "unified memory moves the rows of several kinds of layers in one buffer"),
    ("enable_streaming_session", None, "streaming sessions hold rows that no request runs for"),
    ("enable_pdmux", None, "PD multiplexing runs prefill and decode on streams of their own"),
    ("disaggregation_decode_enable_offload_kvcache", None, "offloading copies rows to host memory"),
    ("dllm_algorithm", None, "diffusion models stage requests, which vMem does not count so far"),
    ("speculative_algorithm", None,
     "drafts take more rows in a step than vMem counts, and a draft model has its own"),
    ("elastic_ep_backend", None, "elastic expert parallelism adds ranks while it runs"),
    ("attn_cp_size", 1, "context parallelism deals a prompt's rows out to several GPUs"),
    ("nnodes", 1, "ranks on several hosts have no memory in which they could agree"),
    ("pp_size", 1,
     "the stages of a pipeline schedule a step one after the other, and vMem's ranks must agree within it"),
    ("dcp_size", 1, "decode context parallelism deals a request's rows out to several GPUs"),
    ("disaggregation_mode", "null",
     "disaggregated prefill registers KV memory, and would see addresses without memory"),
)  # fmt: skip
# The same with weights in the pool.
_POOLED = f"{SWITCH}_WEIGHTS=1 has the weights in the pool"
REFUSED_WITH_WEIGHTS = (
    ("weight_cache_mode", "off", f"{_POOLED}, and a weight cache shares them with other processes"),
    ("tokenizer_worker_num", 1, f"{_POOLED}, and one process must hold the requests of a model that sleeps"),
    ("dp_size", 1, f"{_POOLED}, and no sleep of data-parallel ranks has been tried"),
    ("attn_dp_size", 1, f"{_POOLED}, and no sleep of data-parallel ranks has been tried"),
)


def check_arguments(args: Any) -> None:
    """Raise `Refused` with the first reason why SGLang's ServerArgs cannot work."""
    for name, works, reason in REFUSED + (REFUSED_WITH_WEIGHTS if read().weights else ()):
        given, option = getattr(args, name, None), f"--{name.replace('_', '-')}"
        if given and given != works:
            raise cannot(SWITCH, f"{reason}; {f'set {option} to {works}' if works else f'unset {option}'}")


def check_scheduler(scheduler: Any) -> None:
    """Raise `Refused` if a scheduler is of a kind that vMem does not know."""
    if getattr(scheduler, "is_hybrid_ssm", False):
        raise cannot(SWITCH, "models with states beside attention (Mamba, linear attention) have not been tried with "
                             "vMem: SGLang's CPU engine runs none")  # fmt: skip
    if getattr(scheduler, "kv_shard_widening", 1) > 1:
        raise cannot(SWITCH, "KV sharding deals a request's pages out to several GPUs")
