"""vLLM and vLLM on vMem on one GPU, class of model by class, with made-up weights: one line for each.

    python tests/vllm/gpu.py llama gemma3 deepseek --jobs 3 --seconds 240

For each class two engines run at the same time, one of them on vMem. Both answer the same requests twice (the second
time from the prefix cache). Their tokens are compared. Then the engine on vMem serves them again while its limit moves
ten times a second, and is left idle. Without names, the most important classes run.
"""

import argparse
import concurrent.futures
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from entry_point import needed, write

BASE = dict(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
)
EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    decoder_sparse_step=1,
    shared_expert_intermediate_size=256,
    mlp_only_layers=[],
)
CLASSES = {
    "llama": dict(BASE, architectures=["LlamaForCausalLM"], model_type="llama"),
    "llama-graphs": dict(BASE, architectures=["LlamaForCausalLM"], model_type="llama"),
    "llama-random": dict(BASE, architectures=["LlamaForCausalLM"], model_type="llama", num_key_value_heads=2,
                         initializer_range=0.08),
    "qwen3": dict(BASE, architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_key_value_heads=2),
    "gemma3": dict(BASE, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", num_hidden_layers=12,
                   num_key_value_heads=4, sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=128,
                   hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6),
    "deepseek": dict(BASE, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", num_attention_heads=16,
                     num_key_value_heads=16, moe_intermediate_size=512, kv_lora_rank=512, q_lora_rank=None,
                     qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=8,
                     n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, moe_layer_freq=1,
                     topk_method="greedy", n_group=1, topk_group=1, scoring_func="softmax", norm_topk_prob=False,
                     routed_scaling_factor=1.0, rope_theta=10000),
    "gptoss": dict(BASE, architectures=["GptOssForCausalLM"], model_type="gpt_oss", intermediate_size=1024,
                   num_key_value_heads=4, head_dim=64, num_attention_heads=16, num_local_experts=4,
                   num_experts_per_tok=2, sliding_window=128, initializer_range=0.08,
                   layer_types=["sliding_attention", "full_attention"] * 2),
    "mistral": dict(BASE, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=256),
    "gemma2": dict(BASE, architectures=["Gemma2ForCausalLM"], model_type="gemma2", num_key_value_heads=4,
                   sliding_window=256, query_pre_attn_scalar=128, hidden_activation="gelu_pytorch_tanh",
                   layer_types=["sliding_attention", "full_attention"] * 2),
    "mixtral": dict(BASE, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4,
                    num_experts_per_tok=2, intermediate_size=1024),
    "falconh1": dict(BASE, architectures=["FalconH1ForCausalLM"], model_type="falcon_h1", num_key_value_heads=2,
                     mamba_d_ssm=1024, mamba_n_heads=16, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=64,
                     mamba_d_conv=4, mamba_chunk_size=256, initializer_range=0.08),
    "qwen2moe": dict(BASE, **EXPERTS, architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe"),
    "next": dict(BASE, **EXPERTS, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", num_hidden_layers=8,
                 num_key_value_heads=2, head_dim=256, full_attention_interval=4, linear_num_value_heads=8,
                 linear_num_key_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
                 linear_conv_kernel_dim=4, rms_norm_eps=1e-6, partial_rotary_factor=0.25),
}  # fmt: skip
FEW = ("llama", "gemma3", "deepseek", "gptoss", "next", "qwen2moe", "llama-graphs")
WEIGHTS = threading.Lock()  # torch's random numbers are the process's, and threads import transformers' parts badly
OPTIONS = {"next": dict(additional_config={"gdn_prefill_backend": "triton"})}  # the other kernel is FlashInfer's


def requests_of(n):
    draw = random.Random(0).randrange
    prefixes = [[draw(10, 30000) for _ in range(300)] for _ in range(4)]
    prompts = []
    for i in range(n):
        prompt = [draw(10, 30000) for _ in range(draw(5, 1500))]
        prompts.append(prefixes[i % 4] + prompt[:800] if i % 2 else prompt)
    return [{"prompt_token_ids": p} for p in prompts]


def load_format(name):
    """Where the weights of a class come from: from its folder, or made up."""
    return "auto" if "initializer_range" in CLASSES[name] else "dummy"


def engine(name, folder, device_memory, requests):
    """In a process of its own: serve the requests; prints one line of JSON."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(folder, load_format=load_format(name), skip_tokenizer_init=True, max_model_len=4096, seed=0,
              gpu_memory_utilization=0.1, kv_cache_memory_bytes=device_memory, max_num_seqs=64,
              enforce_eager=not name.endswith("graphs"), enable_prefix_caching=True,
              max_num_batched_tokens=2048, **OPTIONS.get(name, {}))  # fmt: skip
    told = dict(start=time.perf_counter() - begin, tokens=[], seconds=[], cached=0)
    prompts, params = (
        requests_of(requests),
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False),
    )

    def serve():
        begin = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        told["seconds"].append(time.perf_counter() - begin)
        told["cached"] = sum(a.num_cached_tokens or 0 for a in answers)
        return [list(a.outputs[0].token_ids) for a in answers]

    told["tokens"] = serve() + serve()
    if os.environ.get("VMEM_VLLM") == "1":
        told.update(on_vmem(llm, serve, told["tokens"]))
    print("RESULT " + json.dumps(told), flush=True)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def on_vmem(llm, serve, tokens):
    from pyvmem.engine import control

    (found, page), = [e for e in control.engines() if os.getpid() in (e[0].pid, parent(e[0].pid))]  # fmt: skip
    plain = found.step_maps
    stop = threading.Event()

    def move():
        draw = random.Random(1)
        while not stop.wait(0.1):
            page[control.LIMIT] = draw.choice([1, 2, 4, 8, 1000]) * found.least

    mover = threading.Thread(target=move)
    mover.start()
    try:
        moved = serve()
    finally:
        stop.set()
        mover.join()
    page[control.LIMIT] = control.NO_LIMIT
    time.sleep(1.5)
    idle = control.Engine.of("", 0, page)
    llm.reset_prefix_cache()
    time.sleep(1.5)
    reset = control.Engine.of("", 0, page)
    half = len(moved)
    return dict(moved=sum(a == b for a, b in zip(moved, tokens[:half])), maps=plain,
                moved_maps=idle.step_maps - plain, preempted=idle.preempted, refused=idle.refused,
                idle_mib=idle.resident >> 20,
                cached_mib=idle.cached >> 20, reset_mib=reset.resident >> 20, steps=idle.steps,
                all_mib=found.blocks * found.block_bytes >> 20)  # fmt: skip


def environment_of(vmem, plugin, layout):
    """Of an engine with or without vMem. plugin: the folder of pyvmem's entry point, if it needs one."""
    environment = dict(os.environ, VMEM_VLLM="1" if vmem else "0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
                       DO_NOT_TRACK="1", VLLM_USE_FLASHINFER_SAMPLER="0", VMEM_VLLM_LAYOUT=layout)  # fmt: skip
    # Where pyvmem is not installed, it is that of the checkout, which `make` has built.
    own = [str(plugin), str(Path(__file__).resolve().parents[2])] if plugin else []
    paths = [*own, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def start(name, vmem, folder, plugin, seconds, device_memory, requests, log, layout):
    environment = environment_of(vmem, plugin, layout)
    command = ["timeout", "-k", "5", str(seconds), sys.executable, __file__, "--engine", name, str(folder),
               str(device_memory), str(requests)]  # fmt: skip
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def write_weights(config, folder):
    """For a class that says how: those that vLLM makes up give every request the same tokens."""
    about = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with WEIGHTS:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **about))
    made.to(torch.bfloat16).save_pretrained(folder)


def write_model(name, folder):
    """Write a class's config.json and, if it needs them, its weights."""
    config = dict(CLASSES[name], torch_dtype="bfloat16", dtype="bfloat16", tie_word_embeddings=False, bos_token_id=1,
                  eos_token_id=2)  # fmt: skip
    config.setdefault("hidden_act", "silu")
    Path(folder, "config.json").write_text(json.dumps(config))
    if load_format(name) == "auto":
        write_weights(config, folder)


def compare(name, seconds, device_memory, requests, logs, layout):
    """One line about a class, and whether all tokens are equal."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(name, folder)
        plugin = write(Path(folder, "plugin")) if needed() else None
        told, files = {}, [open(Path(logs, f"{name}-{kind}.log"), "w") for kind in ("own", "vmem")]
        ran = [start(name, vmem, folder, plugin, seconds, device_memory, requests, files[vmem], layout)
               for vmem in (False, True)]  # fmt: skip
        for vmem, process in enumerate(ran):
            out = process.communicate()[0]
            lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
            if not lines:
                files[vmem].write(out)
            told[vmem] = json.loads(lines[-1][7:]) if lines else None
        for file in files:
            file.close()
    if not told[0] or not told[1]:
        kind = "vLLM on vMem" if told[0] else "vLLM itself" if told[1] else "both"
        last = Path(logs, f"{name}-{'vmem' if not told[1] else 'own'}.log").read_text().strip().splitlines()[-1:]
        return f"{name}: {kind} failed (exit {[p.returncode for p in ran]}): {' '.join(last)[:300]}", False
    own, on = told[0], told[1]
    same = sum(a == b for a, b in zip(own["tokens"], on["tokens"]))
    again = sum(a == b for a, b in zip(own["tokens"], own["tokens"][requests:]))
    distinct = len({tuple(t) for t in own["tokens"]})
    return (f"{name}: {same} of {len(own['tokens'])} equal ({again} of {requests} of vLLM's own are when cached, "
            f"{distinct} distinct); limit moving: {on['moved']} of {requests}, {on['preempted']} preempted, "
            f"{on['refused']} refused; "
            f"blocks mapped in steps {on['maps']}, with limits {on['moved_maps']}, of {on['steps']} steps; "
            f"idle {on['idle_mib']} MiB for {on['cached_mib']} cached, reset {on['reset_mib']} of {on['all_mib']}; "
            f"seconds {'/'.join(f'{s:.1f}' for s in on['seconds'])} "
            f"(own {'/'.join(f'{s:.1f}' for s in own['seconds'])}), "
            f"start {on['start']:.1f} ({own['start']:.1f})"), same == len(own["tokens"])  # fmt: skip


def main():
    if sys.argv[1:2] == ["--engine"]:
        return engine(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help=", ".join(CLASSES))
    parser.add_argument("--layout", default="auto", choices=("auto", "vllm"))
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=240, help="for one engine")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--logs", default=tempfile.gettempdir())
    args = parser.parse_args()
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done in concurrent.futures.as_completed(
            [
                pool.submit(compare, name, args.seconds, args.kv_mib << 20, args.requests, args.logs, args.layout)
                for name in args.names or FEW
            ]
        ):
            line, equal = done.result()
            wrong += not equal
            print(line, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
