"""Refuses configurations that cannot work on vMem, at start and with one line.

SPDX-License-Identifier: MIT
"""

import itertools
from collections.abc import Iterator
from typing import Any


class Refused(ValueError):
    """vLLM on vMem does not support this configuration. The message says which setting, and what to do."""


def _config(c: Any) -> Iterator[str]:
    parallel, cache = c.parallel_config, c.cache_config
    if getattr(c, "kv_transfer_config", None) is not None:
        yield ("KV connectors register KV memory and would see unbacked addresses; unset --kv-transfer-config and "
               "--kv-offloading-size")  # fmt: skip
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism is not supported yet; use tensor parallelism"
    if any(getattr(parallel, f"{kind}_context_parallel_size", 1) > 1 for kind in ("decode", "prefill")):
        yield "context parallelism deals a request's blocks out to several GPUs; set its sizes to 1"
    if getattr(getattr(c, "speculative_config", None), "method", None) in ("ngram", "ngram_gpu"):
        yield "vLLM drafts by n-grams only with its model runner V1; use a draft model (eagle, eagle3, mtp)"
    if not c.use_v2_model_runner:
        yield "vLLM's model runner V2 is needed; set VLLM_USE_V2_MODEL_RUNNER=1 if the model allows it"
    if getattr(c.model_config, "enable_return_routed_experts", False):
        yield "routed experts are returned by block numbers of the scheduler; unset --enable-return-routed-experts"
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"):
        yield f"KV cache dtype {cache.cache_dtype} is not supported; use auto or fp8"


def _model(c: Any) -> Iterator[str]:
    """What `_kv_cache` refuses once the model is loaded, as far as the model's configuration shows it."""
    model = c.model_config
    for name, kind in (("use_mla", "latent attention (MLA)"), ("is_hybrid", "Mamba or linear attention"),
                       ("is_attention_free", "no attention"), ("is_encoder_decoder", "cross attention")):  # fmt: skip
        if getattr(model, name, False):
            yield f"the model has {kind}, which is not supported yet"
    kinds = set(getattr(getattr(model, "hf_text_config", None), "layer_types", None) or ())
    one = getattr(model, "disable_sliding_window", False)
    one = one or getattr(c.scheduler_config, "disable_hybrid_kv_cache_manager", False)
    if len(kinds) > 1 and not one:
        yield f"the model has layers of several kinds ({', '.join(sorted(kinds))}), which is not supported yet"


def _kv_cache(config: Any) -> Iterator[str]:
    if len(config.kv_cache_groups) != 1:
        yield (f"the model has {len(config.kv_cache_groups)} groups of KV caches (sliding windows beside full "
               "attention, Mamba, cross attention), which is not supported yet")  # fmt: skip
        return
    spec = config.kv_cache_groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":
        yield f"KV caches of kind {type(spec).__name__} are not supported yet"
        return
    if any(len(t.shared_by) != 1 or getattr(t, "block_stride", 0) for t in config.kv_cache_tensors):
        yield "layers that share a KV tensor are not supported"
    if getattr(spec, "page_size_padded", None) is not None:
        yield "padded KV pages are not supported"


def backend(name: str, device: str) -> None:
    """Raise `Refused` if the backend's memory is not that of vLLM's device."""
    if name == "host" and device != "cpu":
        raise Refused("VMEM_BACKEND=host has memory of the CPU only; unset it, or choose uvm, stock or cuda")


def _first(reasons: Iterator[str]) -> None:
    for reason in reasons:
        raise Refused(f"VMEM_VLLM=1: {reason} (or unset VMEM_VLLM)")


def settings(vllm_config: Any) -> None:
    """Raise `Refused` with the first reason why vLLM's settings cannot work."""
    _first(itertools.chain(_config(vllm_config), _model(vllm_config)))


def kv_cache(kv_cache_config: Any) -> None:
    """Raise `Refused` with the first reason why the model's KV caches cannot work."""
    _first(_kv_cache(kv_cache_config))
