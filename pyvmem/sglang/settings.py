"""The settings of SGLang on vMem: environment variables, which SGLang's processes inherit. See docs/sglang.md.

Arguments of SGLang's own that cannot work with them are refused at start, with one line.

SPDX-License-Identifier: MIT
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pyvmem.engine import settings
from pyvmem.engine.settings import Settings, cannot

SWITCH = "VMEM_SGLANG"
LAYOUTS = ("layers", "tokens")


def read(environ: Mapping[str, str] = os.environ) -> Settings:
    """The `Settings` of an environment, as `pyvmem.engine.settings.read` has them."""
    return settings.read(SWITCH, LAYOUTS, environ, ("http", "weights", "idle", "queue", "slice"))


# Arguments with which SGLang copies or registers KV memory, or shares its rows among devices, each with the reason.
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
    ("speculative_algorithm", "drafts take more rows in a step than vMem counts, and a draft model has its own"),
    ("elastic_ep_backend", "elastic expert parallelism adds ranks while it runs"),
)
_SIZES = (
    ("attn_cp_size", "context parallelism deals a prompt's rows out to several GPUs"),
    ("nnodes", "ranks on several hosts have no memory in which they could agree"),
    ("pp_size", "the stages of a pipeline schedule a step one after the other, and vMem's ranks must agree within it"),
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
    if read().weights:
        yield from _against_sleep(args)
    if getattr(args, "disaggregation_mode", "null") not in ("null", None):
        yield ("disaggregated prefill registers KV memory, and would see addresses without memory; unset "
               "--disaggregation-mode")  # fmt: skip


def _against_sleep(args: Any) -> Iterator[str]:
    """Reasons why a model cannot sleep with its weights in the pool."""
    weights = f"{SWITCH}_WEIGHTS=1 has the weights in the pool"
    if getattr(args, "enable_memory_saver", False):
        yield f"{weights}, where torch_memory_saver would have them, too; unset --enable-memory-saver"
    if getattr(args, "weight_cache_mode", "off") != "off":
        yield f"{weights}, and a weight cache shares them with other processes; set --weight-cache-mode off"
    if getattr(args, "tokenizer_worker_num", 1) > 1:
        yield f"{weights}, and one process must hold the requests of a model that sleeps; set --tokenizer-worker-num 1"
    for name in ("tp_size", "dp_size"):
        if (getattr(args, name, 1) or 1) > 1:
            yield f"{weights}, and no sleep of several ranks has been tried; set {_option(name)} to 1"


def check_arguments(args: Any) -> None:
    """Raise `Refused` with the first reason why SGLang's ServerArgs cannot work."""
    for reason in _reasons(args):
        raise cannot(SWITCH, reason)


def check_scheduler(scheduler: Any) -> None:
    """Raise `Refused` if a scheduler is of a kind that vMem does not know."""
    if getattr(scheduler, "is_hybrid_ssm", False):
        raise cannot(SWITCH, "models with states beside attention (Mamba, linear attention) have not been tried with "
                             "vMem: SGLang's CPU engine runs none")  # fmt: skip
    if getattr(scheduler, "kv_shard_widening", 1) > 1:
        raise cannot(SWITCH, "KV sharding deals a request's pages out to several GPUs")
