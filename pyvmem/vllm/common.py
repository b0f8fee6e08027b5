"""Weights that several engines of vLLM's read in common (`pyvmem.sleep.common`): which ones, and how vLLM takes them.

An engine takes weights instead of loading them only if its key is equal: the model's files, and all that decides what
vLLM makes of them. What vLLM repacks, spreads or changes is not in common.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pyvmem.engine.settings import Refused
from pyvmem.errors import VmemError
from pyvmem.sleep.checkpoint import folder_of
from pyvmem.sleep.common import CommonWeights
from pyvmem.sleep.image import Different, Trace

logger = logging.getLogger("vllm.vmem")


def _reasons(c: Any) -> Iterator[str]:
    """Why these weights are this engine's alone."""
    model, load, parallel = c.model_config, c.load_config, c.parallel_config
    if model.quantization is not None:
        yield f"quantization {model.quantization}: its layers repack what was loaded"
    if load.load_format not in ("auto", "hf", "safetensors", "pt"):
        yield f"--load-format {load.load_format}"
    if load.model_loader_extra_config:
        yield "--model-loader-extra-config"
    if c.speculative_config is not None:
        yield "a draft model"
    if c.lora_config is not None:
        yield "--enable-lora: adapters wrap the layers"
    if parallel.enable_eplb:
        yield "--enable-eplb: experts move"
    if parallel.enable_expert_parallel:
        yield "--enable-expert-parallel: ranks hold other experts"
    if getattr(c, "weight_transfer_config", None) is not None:
        yield "a trainer sends weights (weight_transfer_config)"
    if getattr(load, "device", None) is not None:
        yield "a device for loading"


def _files(folder: Path) -> list[Any]:
    """What tells a model's files from any others, without reading all of them."""
    found = []
    for path in sorted(folder.iterdir()):
        about = path.stat()
        if path.is_file():
            found.append([path.name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_dev])
    return found


def key_of(worker: Any) -> str:
    """The key of a worker's weights. Raises Different with the reason why they are this engine's alone."""
    c = worker.vllm_config
    for reason in _reasons(c):
        raise Different(reason)
    model, parallel = c.model_config, c.parallel_config
    folder = folder_of(model.model, model.revision, c.load_config.download_dir)
    if folder is None:
        raise Different("its files are not on this machine")
    import vllm

    import pyvmem

    about = dict(
        engine="vllm", version=vllm.__version__, vmem=pyvmem.__version__, torch=torch.__version__,
        folder=str(folder.resolve()), files=_files(folder), dtype=str(model.dtype), rank=worker.rank,
        ranks=[parallel.tensor_parallel_size, parallel.pipeline_parallel_size], device=_device(worker.device),
        config=model.hf_config.to_json_string(use_diff=False), type=type(model.hf_config).__name__,
        architecture=model.architecture, runner=model.runner_type, convert=model.convert_type,
        kernels=repr(getattr(c, "kernel_config", None)), attention=repr(getattr(c, "attention_config", None)),
        environ=_environment(), prefix=sys.prefix, cache=str(c.cache_config.cache_dtype),
        format=c.load_config.load_format,
        trust=model.trust_remote_code, impl=str(model.model_impl),
    )  # fmt: skip
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:32]


def _environment() -> list[tuple[str, str]]:
    """vLLM's variables, any of which may choose another layout of the weights."""
    apart = ("VLLM_LOGGING", "VLLM_PORT", "VLLM_HOST_IP", "VLLM_API_KEY", "VLLM_ENABLE_V1_MULTIPROCESSING",
             "VLLM_DIST_IDENT")  # fmt: skip
    return sorted((k, v) for k, v in os.environ.items() if k.startswith("VLLM_") and not k.startswith(apart))


def _device(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else os.uname().machine


def _plain_linear() -> None:
    """Have vLLM's linear layers on CPUs read their weights where they are, not repacked copies of them."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_zen_cpu():
        raise Different("zentorch repacks the weights")
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *args: False


def find(worker: Any, weights: CommonWeights) -> bool:
    """Whether the worker can take its weights from others. If not, they are loaded, and offered if they can be."""
    try:
        key = key_of(worker)
        if worker.device.type == "cpu":
            _plain_linear()
        return weights.find(key)
    except Different as reason:
        logger.info("vMem: the weights are this engine's alone: %s", reason)
    except VmemError as error:
        logger.warning("vMem: the weights are this engine's alone: %s", error)
    return False


@contextlib.contextmanager
def _without_files(config: Any, trace: Trace) -> Iterator[None]:
    """The context in which vLLM makes a model whose weights nobody fills.

    vLLM's loader of random weights calls a function for each tensor that another loader would read from the files.
    """
    from vllm.model_executor.model_loader import dummy_loader

    load, fill = config.load_config, dummy_loader.initialize_single_dummy_weight
    asked = load.load_format
    load.load_format, dummy_loader.initialize_single_dummy_weight = (
        "dummy",
        lambda tensor, *args, **kwargs: trace.forget(tensor),
    )
    try:
        yield
    finally:
        load.load_format, dummy_loader.initialize_single_dummy_weight = asked, fill


def take(worker: Any, weights: CommonWeights, load: Callable[[], None]) -> bool:
    """Have the worker's model read the weights that `find` has found. False: it must be loaded, for the reason logged.

    load : vLLM's own load_model.
    """
    config = worker.vllm_config
    # Where the layers of a model enter themselves, each once.
    contexts = config.compilation_config.static_forward_context
    experts = getattr(config.compilation_config, "static_all_moe_layers", [])
    before, n = dict(contexts), len(experts)
    try:
        with weights.trace() as trace, _without_files(config, trace):
            load()
        weights.take(worker._vmem_models(), trace)
        return True
    except Different as reason:
        logger.warning("vMem: the weights in common do not fit, and are loaded: %s", reason)
    worker.model_runner.model = None
    weights.leave()
    contexts.clear()
    contexts.update(before)
    del experts[n:]
    return False


def part(worker: Any, weights: CommonWeights) -> None:
    """Have a copy of this engine's own, as its weights are about to change."""
    if worker.device.type == "cuda" and not worker.model_config.enforce_eager:
        raise Refused("the weights are in common with other engines, and CUDA graphs keep their addresses: start this "
                      "engine with VMEM_VLLM_COMMON=0 to change them, or with --enforce-eager")  # fmt: skip
    weights.part_from_others(worker._vmem_models())
