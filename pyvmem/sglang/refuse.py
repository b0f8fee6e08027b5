"""Refuses arguments of SGLang's that cannot work on vMem, at start and with one line.

SPDX-License-Identifier: MIT
"""

from collections.abc import Iterator
from typing import Any

from pyvmem.engine.refuse import Refused as Refused

# What copies or registers KV memory, or shares its rows among devices or with the host: (argument, reason).
_FLAGS = (
    ("enable_hierarchical_cache", "HiCache copies rows to host memory, which vMem does not follow"),
    ("enable_lmcache", "LMCache copies rows to host memory, which vMem does not follow"),
    ("enable_flexkv", "FlexKV copies rows to host memory, which vMem does not follow"),
    ("enable_unified_cache_external_linker", "an external linker copies rows, which vMem does not follow"),
    ("enable_hisparse", "HiSparse keeps rows in host memory, which vMem does not follow"),
    ("enable_unified_memory", "unified memory moves the rows of several kinds of layers in one buffer"),
    ("enable_streaming_session", "streaming sessions hold rows that no request runs for"),
    ("enable_pdmux", "PD multiplexing runs prefill and decode on streams of their own"),
    ("disaggregation_decode_enable_offload_kvcache", "offloading copies rows to host memory"),
    ("dllm_algorithm", "diffusion models stage requests, which vMem does not count so far"),
    ("speculative_algorithm", "drafts keep rows of their own, which vMem has not been tried with"),
    ("elastic_ep_backend", "elastic expert parallelism adds ranks while it runs"),
)
_SIZES = (
    ("attn_dp_size", "with DP attention, ranks without requests run beside others, which vMem has not been tried with"),
    ("attn_cp_size", "context parallelism deals a prompt's rows out to several GPUs"),
    ("nnodes", "ranks on several hosts have no memory in which they could agree"),
    ("pp_size", "a pipeline has several batches in flight"),
    ("dcp_size", "decode context parallelism deals a request's rows out to several GPUs"),
)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _reasons(args: Any) -> Iterator[str]:
    for name, reason in _FLAGS:
        if getattr(args, name, None):
            yield f"{reason}; unset {_option(name)}"
    for name, reason in _SIZES:
        size = getattr(args, name, None)
        if isinstance(size, int) and size > 1:
            yield f"{reason}; set {_option(name)} to 1"
    if getattr(args, "disaggregation_mode", "null") not in ("null", None):
        yield ("disaggregated prefill registers KV memory, and would see addresses without memory; unset "
               "--disaggregation-mode")  # fmt: skip


def arguments(args: Any) -> None:
    """Raise `Refused` with the first reason why SGLang's ServerArgs cannot work."""
    for reason in _reasons(args):
        raise Refused(f"VMEM_SGLANG=1: {reason} (or unset VMEM_SGLANG)")


def scheduler(scheduler: Any) -> None:
    """Raise `Refused` if a scheduler is of a kind that vMem does not know."""
    if getattr(scheduler, "is_hybrid_ssm", False):
        raise Refused("VMEM_SGLANG=1: models with states beside attention (Mamba, linear attention) are not supported "
                      "so far (or unset VMEM_SGLANG)")  # fmt: skip
    if getattr(scheduler, "kv_shard_widening", 1) > 1:
        raise Refused("VMEM_SGLANG=1: KV sharding deals a request's pages out to several GPUs "
                      "(or unset VMEM_SGLANG)")  # fmt: skip
