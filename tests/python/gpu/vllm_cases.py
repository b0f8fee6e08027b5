"""vLLM engines for test_vllm_answers.py, one after the other in one process: the cases' answers become JSON lines.

Run with VMEM_VLLM=0 or 1, a file for the answers, and the names of cases. Models have made-up weights.

SPDX-License-Identifier: MIT
"""

import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback

MANY = dict(max_num_seqs=128, kv_cache_memory_bytes=1 << 30)
TABLE = dict(VMEM_VLLM_ATTENTION="table")
FUSED = dict(VMEM_VLLM_ATTENTION="fused")
CACHED = dict(cached=True, uncached=False)
TWO_GPUS = dict(tensor_parallel_size=2, disable_custom_all_reduce=True, block_size=64)  # whole pages of each GPU
FAMILIES = ("llama", "qwen3", "mistral", "phi3", "window", "qwen2_moe")
# name: (settings of the engine, what is run with it)
CASES = {
    "plain": ({}, "mixed"),
    "prefix_caching": (dict(enable_prefix_caching=True), "shared"),
    "larger_blocks": (dict(block_size=16, enable_prefix_caching=True), "mixed"),  # vMem's fill a page
    "preemption": (dict(enable_prefix_caching=True, num_gpu_blocks_override=130), "crowd"),
    "preemption_without_prefix_cache": (dict(num_gpu_blocks_override=130), "crowd"),
    "chunked_prefill": (dict(max_num_batched_tokens=256, enable_prefix_caching=True), "shared"),
    "no_async_scheduling": (dict(async_scheduling=False, enable_prefix_caching=True), "shared"),
    "cuda_graphs": (dict(enforce_eager=False, enable_prefix_caching=True), "shared"),
    "fp8_kv": (dict(kv_cache_dtype="fp8"), "mixed"),
    "sliding_window": (dict(shape="window"), "mixed"),
    "sampling": ({}, "sampled"),
    "abort": (dict(enable_prefix_caching=True), "aborts"),
    "sleep": (dict(enable_sleep_mode=True, enable_prefix_caching=True), "sleeps"),
    "reset_prefix_cache": (dict(enable_prefix_caching=True), "resets"),
    "lora": (dict(enable_lora=True, max_lora_rank=8), "adapters"),
    "layer_layout": (dict(enable_prefix_caching=True, VMEM_VLLM_LAYOUT="layer"), "shared"),
    "token_layout": (dict(enable_prefix_caching=True, VMEM_VLLM_LAYOUT="token"), "shared"),
    "triton_attention": (dict(attention_backend="TRITON_ATTN"), "mixed"),
    "table": (dict(TABLE, enforce_eager=False, enable_prefix_caching=True, max_num_seqs=48), "shared"),
    "chosen_by_name": (dict(attention_backend="FLASH_ATTN", max_num_seqs=48), "mixed"),
    # Steps of 32 requests and more. Another kernel than vLLM's, so other roundings: the tokens need not all be equal
    # (test_vllm_answers.py).
    "slots": (dict(enforce_eager=False, enable_prefix_caching=True, max_num_seqs=48), "shared"),
    "slots_window": (dict(shape="window", max_num_seqs=48), "mixed"),
    "slots_fused": (dict(FUSED, enforce_eager=False, enable_prefix_caching=True, max_num_seqs=48), "shared"),
    "slots_fused_window": (dict(FUSED, shape="window", max_num_seqs=48), "mixed"),
    "slots_fused_speculative": (dict(FUSED, draft="draft", enforce_eager=False, max_num_seqs=48), "mixed"),
    "slots_fused_llama_cached": (dict(MANY, **FUSED, shape="llama", enable_prefix_caching=True), "many"),
    "slots_chosen_by_name": (dict(on_vmem=dict(attention_backend="CUSTOM"), max_num_seqs=48), "mixed"),
    # A draft of made-up weights is almost always wrong: rows that were written for rejected tokens are written again.
    "speculative": (dict(draft="draft", enable_prefix_caching=True), "shared"),
    "slots_speculative": (dict(draft="draft", enforce_eager=False, max_num_seqs=48), "mixed"),
    "structured_output": (dict(skip_tokenizer_init=False, enable_prefix_caching=True), "structured"),
    **{f"{family}_{suffix}": (dict(MANY, **TABLE, shape=family, enable_prefix_caching=cached), "many")
       for family in FAMILIES for suffix, cached in CACHED.items()},
    **{f"slots_{family}_{suffix}": (dict(MANY, shape=family, enable_prefix_caching=cached), "many")
       for family in FAMILIES for suffix, cached in CACHED.items()},
    **{f"{family}_two_gpus_{suffix}": (dict(MANY, **TWO_GPUS, **TABLE, shape=family, enable_prefix_caching=cached),
                                       "many")
       for family in ("llama", "qwen3", "mistral", "window") for suffix, cached in CACHED.items()},
    **{f"slots_{family}_two_gpus_{suffix}": (dict(MANY, **TWO_GPUS, shape=family, enable_prefix_caching=cached), "many")
       for family in ("llama", "qwen3", "mistral", "window") for suffix, cached in CACHED.items()},
    "refused_groups": (dict(shape="gemma3"), "mixed"),
    "refused_ngram": (dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)),
                      "mixed"),
    "refused": (dict(shape="mixtral"), "mixed"),  # vLLM's model runner V1 runs it
}  # fmt: skip

HIDDEN = 512
LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=HIDDEN, intermediate_size=1024,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=128, vocab_size=4096,
    max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10000.0, torch_dtype="bfloat16", hidden_act="silu",
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SHAPES = {
    "llama": LLAMA,
    "draft": {**LLAMA, "num_hidden_layers": 1},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 4},
    "mistral": {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "phi3": {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_hidden_layers": 4,
             "original_max_position_embeddings": 2048, "pad_token_id": 0},
    "window": {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
    "gemma3": {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 128,
               "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
               "query_pre_attn_scalar": 128, "rope_local_base_freq": 10000.0},
    "qwen2_moe": {**LLAMA, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 8,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512,
                  "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
                  "use_sliding_window": False},
    "mixtral": {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
                "num_experts_per_tok": 2, "sliding_window": None},
}  # fmt: skip


def write_model(folder, shape="llama"):
    """A model with made-up weights, and a tokenizer that has a word for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    def write(name, what):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(what, file)

    write("config.json", SHAPES[shape])
    words = {f"w{i}": i for i in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    write("tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="w1", eos_token="w2",
                                        unk_token="w0"))  # fmt: skip


def prompts(n, shared=0):
    import numpy as np

    rng = np.random.default_rng(5)
    common = [rng.integers(10, 4000, shared).tolist() for _ in range(3)]
    return [{"prompt_token_ids": (common[i % 3] if i % 4 else []) + rng.integers(10, 4000, 20 + 29 * i % 500).tolist()}
            for i in range(n)]  # fmt: skip


def generate(llm, made, output=24, **sampling):
    from vllm import SamplingParams

    lora = sampling.pop("lora", None)
    options = dict(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False, **sampling)
    outputs = llm.generate(made, SamplingParams(**options), use_tqdm=False, lora_request=lora)
    return [list(o.outputs[0].token_ids) for o in outputs]


def mixed(llm):
    return generate(llm, prompts(40))


def shared(llm):
    made = prompts(40, shared=200)
    return [generate(llm, made), generate(llm, made)]


def crowd(llm):
    made = prompts(40, shared=64)
    return generate(llm, made, output=100)


def many(llm):
    """512 requests; some begin alike."""
    return generate(llm, prompts(512, shared=200), output=32)


def sampled(llm):
    return generate(llm, prompts(20), seed=3, top_p=0.9, top_k=50) + generate(llm, prompts(8), logprobs=2)


def aborts(llm):
    """Every third request is aborted after some steps; the others are not disturbed."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    found, steps = {}, 0
    for i, prompt in enumerate(prompts(30, shared=100)):
        engine.add_request(f"a{i}", prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True,
                                                           detokenize=False))  # fmt: skip
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps in (3, 9, 15):
            engine.abort_request([f"a{i}" for i in range(steps // 3, 30, 9)])
    aborted = {i for k in (1, 3, 5) for i in range(k, 30, 9)}
    others = [found[f"a{i}"] for i in range(30) if i not in aborted]
    return [others, generate(llm, prompts(10, shared=100))]


def sleeps(llm):
    import torch

    first = generate(llm, prompts(10, shared=100))
    llm.sleep(level=1)
    asleep = torch.cuda.mem_get_info()[0]
    held = held_bytes()
    llm.wake_up()
    second = generate(llm, prompts(10, shared=100))
    assert held in (None, 0), f"{held} bytes of KV memory are held asleep, {asleep} free"
    return [first, second]


def resets(llm):
    first = generate(llm, prompts(10, shared=100))
    assert llm.reset_prefix_cache()
    return [first, generate(llm, prompts(10, shared=100))]


def structured(llm):
    """Words of one kind only."""
    from vllm.sampling_params import StructuredOutputsParams

    found = generate(llm, prompts(20, shared=100), structured_outputs=StructuredOutputsParams(regex="(w3[0-9]*)+"))
    words = [f"w{token}" for tokens in found for token in tokens]
    assert all(w.startswith("w3") for w in words), words
    return found


def adapters(llm):
    from vllm.lora.request import LoRARequest

    folder = adapter()
    return [generate(llm, prompts(8)), generate(llm, prompts(8), lora=LoRARequest("one", 1, folder))]


def adapter():
    """A LoRA adapter for q_proj with numbers of a seed."""
    import torch
    from safetensors.torch import save_file

    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    weights = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, HIDDEN).bfloat16() * 0.2
        weights[f"{name}.lora_B.weight"] = torch.randn(512, 8).bfloat16() * 0.2
    save_file(weights, os.path.join(folder, "adapter_model.safetensors"))
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(dict(peft_type="LORA", r=8, lora_alpha=16, target_modules=["q_proj"], bias="none",
                       base_model_name_or_path="", task_type="CAUSAL_LM"), file)  # fmt: skip
    return folder


def held_bytes():
    from pyvmem.vllm import worker

    engine = worker.current()
    if engine is None:
        return None
    stats = engine.cache.stats()
    return stats.held_pages * stats.page_size


def published():
    """What the KV caches of worker processes publish: nothing without vMem."""
    from pyvmem.vllm.metrics import own_views

    views = [view.stats for view in own_views()]
    return dict(steps=min(s["steps"] for s in views), hits=min(s["attached_pages"] for s in views)) if views else {}


def preemptions(llm):
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def routing_without_the_extension():
    """vLLM's three functions of a mixture of experts in torch, where its extension for them is not installed."""
    import torch
    from vllm import _custom_ops as ops

    if importlib.util.find_spec("vllm._moe_C_stable_libtorch"):
        return

    def topk_softmax(weights, ids, token_expert_indices, gating, renormalize=False, bias=None):
        found, chosen = gating.float().softmax(-1).topk(ids.shape[1])
        weights.copy_(found / found.sum(-1, keepdim=True) if renormalize else found)
        ids.copy_(chosen)

    def moe_align_block_size(topk_ids, experts, block, ids, expert_ids, padded, expert_map=None):
        flat = topk_ids.flatten().long()
        order = flat.argsort(stable=True)
        counts = torch.zeros(experts, dtype=torch.long, device=flat.device).index_add_(0, flat, torch.ones_like(flat))
        ends = ((counts + block - 1) // block * block).cumsum(0)
        begins = ends - (counts + block - 1) // block * block
        expert = flat[order]
        rank = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[expert]
        ids.fill_(len(flat))
        ids[begins[expert] + rank] = order.int()
        first = torch.arange(len(expert_ids), device=flat.device) * block
        expert_ids.copy_(torch.searchsorted(ends, first, right=True).clamp(max=experts - 1))
        padded.copy_(ends[-1:])

    ops.topk_softmax, ops.moe_align_block_size = topk_softmax, moe_align_block_size
    ops.moe_sum = lambda input, output, *_: torch.sum(input, 1, out=output)


def run(name):
    from vllm import LLM

    changes, what = CASES[name]
    changes = dict(changes)
    for setting in ("VMEM_VLLM_LAYOUT", "VMEM_VLLM_ATTENTION"):
        os.environ[setting] = changes.pop(setting, "")
    import torch

    if changes.get("tensor_parallel_size", 1) > torch.cuda.device_count():
        raise RuntimeError(f"{torch.cuda.device_count()} GPUs")
    if changes.get("shape") in ("qwen2_moe", "mixtral"):
        routing_without_the_extension()
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, changes.pop("shape", "llama"))
        if "draft" in changes:
            draft = os.path.join(folder, "draft")
            os.mkdir(draft)
            write_model(draft, changes.pop("draft"))
            changes["speculative_config"] = dict(method="eagle", model=draft, num_speculative_tokens=3)
        if os.environ.get("VMEM_VLLM") == "1":
            changes.update(changes.get("on_vmem", {}))
        changes.pop("on_vmem", None)
        settings = dict(
            load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=24, enforce_eager=True,
            enable_prefix_caching=False, gpu_memory_utilization=0.05, kv_cache_memory_bytes=256 << 20, block_size=32,
            disable_log_stats=False,
        )  # fmt: skip
        llm = LLM(model=folder, **{**settings, **changes})
        tokens = globals()[what](llm)
        answer = dict(tokens=tokens, preemptions=preemptions(llm), **published())
        from pyvmem.vllm import worker

        engine = worker.current()
        if engine is not None:
            answer.update(backend=engine.context.backend, attention=worker.attention_names(engine),
                          hits=engine.requests.hit_blocks, steps=engine.cache.stats().steps,
                          waits=engine.requests.fence_waits)  # fmt: skip
            engine.close()
        if changes.get("tensor_parallel_size", 1) > 1:
            llm.llm_engine.engine_core.shutdown()  # ends the workers
        del llm
    gc.collect()
    return answer


def main():
    sink = open(sys.argv[1], "w", encoding="utf-8")  # noqa: SIM115
    for name in sys.argv[2:]:
        began = time.monotonic()
        try:
            answer = run(name)
        except BaseException as error:  # the parent says it
            traceback.print_exc()
            answer = dict(error=f"{type(error).__name__}: {error}")
        sink.write(json.dumps(dict(name=name, seconds=time.monotonic() - began, **answer)) + "\n")
        sink.flush()


if __name__ == "__main__":
    main()
