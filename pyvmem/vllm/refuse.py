"""Refuses configurations that cannot work on vMem, at start and with one line.

SPDX-License-Identifier: MIT
"""

from collections.abc import Collection, Iterator
from typing import Any


class Refused(ValueError):
    """vLLM on vMem does not support this configuration. The message says which setting, and what to do."""


def _config(c: Any) -> Iterator[str]:
    parallel = c.parallel_config
    offloads = getattr(getattr(c, "cache_config", None), "kv_offloading_size", None) is not None
    if offloads or getattr(c, "kv_transfer_config", None) is not None:  # which vLLM makes later from the former
        yield ("KV connectors register KV memory and would see unbacked addresses; unset --kv-transfer-config and "
               "--kv-offloading-size")  # fmt: skip
    if any(getattr(parallel, f"{kind}_context_parallel_size", 1) > 1 for kind in ("decode", "prefill")):
        yield "context parallelism deals a request's blocks out to several GPUs; set its sizes to 1"
    if getattr(getattr(c, "attention_config", None), "hisparse_config", None) is not None:
        yield "HiSparse keeps blocks in host memory, which vMem does not follow; unset its configuration"
    ranks = getattr(parallel, "tensor_parallel_size", 1) * getattr(parallel, "pipeline_parallel_size", 1)
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and ranks > 1:
        yield ("an external launcher runs a scheduler for each worker, which must all decide alike, and memory comes "
               "to each at another time; let vLLM start the workers, or set --tensor-parallel-size and "
               "--pipeline-parallel-size to 1")  # fmt: skip
    if getattr(parallel, "enable_elastic_ep", False):
        yield "elastic expert parallelism adds workers while it runs; unset --enable-elastic-ep"


def backend(name: str, device: str) -> None:
    """Raise `Refused` if the backend's memory is not that of vLLM's device. name: "" for the best that works."""
    if name == "host" and device != "cpu":
        raise Refused("VMEM_BACKEND=host has memory of the CPU only; unset it, or choose uvm, stock or cuda")
    if name not in ("", "host") and device == "cpu":
        raise Refused(f"VMEM_BACKEND={name}: vLLM runs on the CPU here, whose memory is that of host; unset it")


def page_size(size: int, backend: str, sizes: Collection[int]) -> None:
    """Raise `Refused` if the backend has no pages of the size that VMEM_VLLM_PAGE_SIZE sets; 0: it is not set."""
    if size and size not in sizes:
        has = ", ".join(str(s) for s in sorted(sizes))
        raise Refused(f"VMEM_VLLM_PAGE_SIZE={size}: pages of backend {backend} have {has} bytes (or unset "
                      "VMEM_VLLM_PAGE_SIZE)")  # fmt: skip


def settings(vllm_config: Any) -> None:
    """Raise `Refused` with the first reason why vLLM's settings cannot work."""
    for reason in _config(vllm_config):
        raise Refused(f"VMEM_VLLM=1: {reason} (or unset VMEM_VLLM)")
