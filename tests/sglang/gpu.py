"""SGLang and SGLang on vMem on one GPU, class of model by class, with made-up weights: one line for each.

    python tests/sglang/gpu.py llama gemma3 deepseek --jobs 3 --seconds 150

For each class two engines run at the same time, one of them on vMem. Both answer the same requests twice (the second
time from the radix cache), with SGLang's kernels whose results do not depend on the batch
(``--enable-deterministic-inference``). Their tokens are compared. Then the engine on vMem serves them again while its
limit moves ten times a second, is left idle, and is flushed. Of an answer that differs then, the gap is told: by how
much the log probabilities of the two most likely tokens differ where the answers part. ``--own-chunk 192`` compares
SGLang with SGLang itself, whose prompts are computed in parts of so many tokens: what differs there is SGLang's own.
``--cpu`` runs the classes that SGLang's CPU engine takes. In ``llama-sleep``, the weights are in a pool: the model
sleeps, another member takes the whole pool and gives it back, the model wakes, and serves them once more. In
``llama-hicache``, prefixes that the limit takes must come back from host memory.
"""

import argparse
import concurrent.futures
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASE = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
            head_dim=128, vocab_size=32000, max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act="silu",
            tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)  # fmt: skip
LLAMA = dict(BASE, architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=500000.0)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, decoder_sparse_step=1,
               norm_topk_prob=True, mlp_only_layers=[])  # fmt: skip
# {class: (configuration, arguments of the engine, settings of vMem)}
CLASSES = {
    "llama": (LLAMA, {}, {}),
    "llama-page-1": (dict(LLAMA, num_key_value_heads=8), dict(page_size=1), {}),
    "llama-uncached": (LLAMA, dict(disable_radix_cache=True), {}),
    "llama-fp8": (LLAMA, dict(kv_cache_dtype="fp8_e4m3"), {}),
    "llama-tp2": (dict(LLAMA, num_key_value_heads=4), dict(tp_size=2), {}),  # on two GPUs
    "llama-triton": (LLAMA, dict(attention_backend="triton"), {}),
    "llama-sleep": (LLAMA, {}, dict(VMEM_SGLANG_POOL="sleep", VMEM_SGLANG_POOL_SIZE="4G", VMEM_SGLANG_WEIGHTS="1")),
    "llama-hicache": (LLAMA, dict(enable_hierarchical_cache=True, hicache_size=2), {}),
    "qwen2": (dict(BASE, architectures=["Qwen2ForCausalLM"], model_type="qwen2"), {}, {}),
    "qwen3": (dict(BASE, architectures=["Qwen3ForCausalLM"], model_type="qwen3"), {}, {}),
    "qwen3-dp2": (dict(BASE, architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
                  dict(tp_size=2, attn_dp_size=2), {}),  # on two GPUs
    "gemma3": (dict(BASE, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", num_hidden_layers=12,
                    num_key_value_heads=4, sliding_window=512, query_pre_attn_scalar=128, rms_norm_eps=1e-6,
                    hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True,
                    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2), {}, {}),
    "gptoss": (dict(BASE, architectures=["GptOssForCausalLM"], model_type="gpt_oss", intermediate_size=1024,
                    num_key_value_heads=4, head_dim=64, num_attention_heads=16, num_local_experts=4,
                    num_experts_per_tok=2, sliding_window=128,
                    layer_types=["sliding_attention", "full_attention"] * 2), {}, {}),
    "deepseek": (dict(BASE, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", num_attention_heads=16,
                      num_key_value_heads=16, moe_intermediate_size=512, kv_lora_rank=512, q_lora_rank=None,
                      qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=8,
                      n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, moe_layer_freq=1,
                      topk_method="greedy", n_group=1, topk_group=1, scoring_func="softmax", norm_topk_prob=False,
                      routed_scaling_factor=1.0, rope_theta=10000), {}, {}),
    "mixtral": (dict(BASE, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4,
                     num_experts_per_tok=2, intermediate_size=1024), {}, {}),
    "qwen3moe": (dict(BASE, **EXPERTS, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe"), {}, {}),
}  # fmt: skip
FEW = ("llama", "gemma3", "deepseek", "gptoss", "qwen3moe", "qwen2", "llama-fp8", "llama-page-1")
GPU = dict(attention_backend="fa3", enable_deterministic_inference=True, cuda_graph_bs_decode=[1, 8, 32, 64],
           disable_prefill_cuda_graph=True)  # fmt: skip
CPU = dict(device="cpu", attention_backend="torch_native", disable_cuda_graph=True)


# ---- within the engine's processes -----------------------------------------------------------------------------------


def weights(model):
    """Random weights by which each request gets tokens of its own: SGLang's made-up ones are nearly zero."""
    import torch

    for name, value in model.state_dict().items():
        if not torch.is_floating_point(value) or name.endswith(("_scale", "_scale_inv", "inv_freq", "cos_sin_cache")):
            continue
        draw = torch.Generator(device=value.device).manual_seed(zlib.crc32(name.encode()))
        if "norm" in name:
            value.fill_(1.0)
        else:
            made = torch.empty(value.shape, dtype=torch.float32, device=value.device)
            value.copy_(made.normal_(0, 0.06, generator=draw).to(value.dtype))


def activate():
    """SGLang's entry point: made-up weights are those of `weights`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", weights, HookType.REPLACE)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _copy_on_cpu, HookType.BEFORE)


def _copy_on_cpu(*_, **__):
    import hicache

    hicache.on_cpu()


def jobs_of(n):
    draw = random.Random(0).randrange
    prefixes = [[draw(10, 30000) for _ in range(300)] for _ in range(4)]
    prompts = []
    for i in range(n):
        prompt = [draw(10, 30000) for _ in range(draw(5, 1500))]
        prompts.append(prefixes[i % 4] + prompt[:800] if i % 2 else prompt)
    return prompts


def engine(name, folder, kv_tokens, requests, chunk, cpu):
    """In a process of its own: serve the requests; prints one line of JSON."""
    import sglang

    begin = time.perf_counter()
    options = dict(page_size=64, chunked_prefill_size=chunk, context_length=4096, max_total_tokens=kv_tokens,
                   max_running_requests=64, mem_fraction_static=0.85, load_format="dummy", random_seed=1,
                   sampling_backend="pytorch", log_level="warning", dtype="float32" if cpu else "bfloat16")  # fmt: skip
    options.update(CPU if cpu else GPU)
    options.update(CLASSES[name][1])
    if cpu and "hicache_size" in options:
        options.update(hicache_io_backend="direct", hicache_mem_layout="layer_first")
    with socket.socket() as free:  # two engines run, and ranks that share attention listen beside this port
        free.bind(("127.0.0.1", 0))
        options["port"] = free.getsockname()[1]
    llm = sglang.Engine(model_path=folder, skip_tokenizer_init=True, **options)
    told = dict(start=time.perf_counter() - begin, tokens=[], seconds=[], cached=0, hosted=[])
    asked = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}

    def serve():
        begin = time.perf_counter()
        answers = llm.generate(input_ids=jobs_of(requests), sampling_params=asked)
        told["seconds"].append(time.perf_counter() - begin)
        told["cached"] = sum(a["meta_info"].get("cached_tokens") or 0 for a in answers)
        told["hosted"].append(sum((a["meta_info"].get("cached_tokens_details") or {}).get("host", 0) for a in answers))
        return [a["output_ids"] for a in answers]

    told["tokens"] = serve() + serve()
    if os.environ.get("VMEM_SGLANG") == "1":
        told.update(on_vmem(llm, serve, jobs_of(requests), told["tokens"]))
    print("RESULT " + json.dumps(told), flush=True)
    llm.shutdown()


def gap(llm, prompt, own, other):
    """By how much the log probabilities of the two most likely tokens differ where two answers part."""
    at = next(i for i, (a, b) in enumerate(zip(own, other)) if a != b)
    made = llm.generate(input_ids=prompt + own[:at], sampling_params={"temperature": 0, "max_new_tokens": 1},
                        return_logprob=True, top_logprobs_num=2)  # fmt: skip
    (first, *_), (second, *_) = made["meta_info"]["output_top_logprobs"][0]
    return first - second


def sleep(llm, serve, tokens):
    """How many answers are the same after a sleep in which another member of the pool took everything, and seconds."""
    import torch

    import pyvmem
    from pyvmem.blocks import BlockRange, Blocks
    from pyvmem.engine import metrics
    from pyvmem.sglang import open_pool

    (engine, page), *_ = metrics.engines(os.getpid())
    context = pyvmem.Context(device=0) if torch.cuda.is_available() else pyvmem.Context("host")
    with open_pool(context) as pool:
        size, unit = pool.budget - (64 << 20), 2 << 20
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        space = pyvmem.VirtualTensor((size,), torch.int8, device, page_size=unit, zero=True, context=context)
        blocks = Blocks(space, [BlockRange(offset=0, stride=unit, bytes=unit)], size // unit)
        blocks.join(pool, name="neighbour")
        begin, told = time.perf_counter(), {}
        llm.release_memory_occupation(tags=["vmem"])
        told["sleep"] = time.perf_counter() - begin
        while True:
            try:
                if not blocks.ask(size):
                    blocks.back(range(size // unit))
                    break
            except MemoryError:
                pass
            time.sleep(0.001)
        told["taken"], told["held"] = time.perf_counter() - begin, type(engine).of("", 0, page).weights_held
        blocks.close()
        begin = time.perf_counter()
        llm.resume_memory_occupation(tags=["vmem"])
        told["wake"] = time.perf_counter() - begin
        told["weights"] = type(engine).of("", 0, page).weights
    told["equal"] = sum(a == b for a, b in zip(serve(), tokens))
    return told


def on_vmem(llm, serve, prompts, tokens):
    from pyvmem.engine import control, metrics

    engines = metrics.engines(os.getpid())  # one for each group of DP attention: the first is told
    found, page = engines[0]
    stop, most = threading.Event(), []

    def move():
        draw = random.Random(1)
        while not stop.wait(0.1):
            limit = draw.choice([1, 2, 4, 8, 1000]) * found.least
            for _, one in engines:
                one[control.LIMIT] = limit
            most.append(control.Engine.of("", 0, page).used)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        moved = serve()
    finally:
        stop.set()
        mover.join()
    for _, one in engines:
        one[control.LIMIT] = control.NO_LIMIT
    slept = sleep(llm, serve, tokens) if os.environ.get("VMEM_SGLANG_WEIGHTS") else None
    gaps = [gap(llm, prompt, a, b) for prompt, a, b in zip(prompts, tokens, moved) if a != b]
    time.sleep(1.5)
    idle = control.Engine.of("", 0, page)
    llm.flush_cache()
    time.sleep(1.5)
    flushed = control.Engine.of("", 0, page)
    return dict(moved=len(prompts) - len(gaps), gaps=gaps, slept=slept, preempted=idle.preempted, refused=idle.refused,
                maps=idle.step_maps, steps=idle.steps, idle=idle.backed, idle_cached=idle.cached,
                flushed=flushed.backed, least=found.least, whole=found.blocks * found.block_bytes)  # fmt: skip


# ---- the parent ------------------------------------------------------------------------------------------------------


def start(name, vmem, folder, args, log, chunk=2048):
    plugins = Path(folder, "plugins")
    entries = f"weights = {Path(__file__).stem}:activate\n"
    made = plugins / "made_up_weights-0.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up-weights\nVersion: 0\n")
    (made / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entries}")
    sys.path.insert(0, str(HERE))
    from entry_point import needed, write

    # Where pyvmem is not installed, it is that of the checkout, which `make` has built.
    paths = [str(plugins), str(HERE), *([str(write(plugins)), str(HERE.parents[1])] if needed() else ())]
    environment = dict(os.environ, VMEM_SGLANG=str(int(vmem)), HF_HUB_OFFLINE="1", DO_NOT_TRACK="1",
                       PYTHONPATH=os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
                       **(dict(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1") if args.cpu else {}),
                       **(CLASSES[name][2] if vmem else {}))  # fmt: skip
    command = [sys.executable, __file__, "--engine", name, folder, str(args.kv_tokens), str(args.requests),
               str(chunk), str(int(args.cpu))]  # fmt: skip
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
                            start_new_session=True)  # fmt: skip


def answer(process, seconds):
    """The output of an engine's process. Its process group ends with it, or after so many seconds."""
    try:
        out = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        out = ""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1][7:]) if lines else None


def compare(name, args):
    """One line about a class, and whether all tokens are equal."""
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(CLASSES[name][0], torch_dtype="bfloat16")))
        files = [open(Path(args.logs, f"{name}-{kind}.log"), "w") for kind in ("own", "vmem")]
        second = (False, args.own_chunk) if args.own_chunk else (True, 2048)
        ran = [start(name, vmem, folder, args, file, chunk)
               for file, (vmem, chunk) in zip(files, ((False, 2048), second))]  # fmt: skip
        own, on = [answer(process, max(end - time.monotonic(), 1)) for process in ran]
        for file in files:
            file.close()
    if not own or not on:
        kind = "SGLang on vMem" if own else "SGLang itself" if on else "both"
        last = Path(args.logs, f"{name}-{'own' if not own else 'vmem'}.log").read_text().strip().splitlines()[-1:]
        return f"{name}: {kind} failed (exit {[p.returncode for p in ran]}): {' '.join(last)[:300]}", False
    n = args.requests
    same = sum(a == b for a, b in zip(own["tokens"], on["tokens"]))
    again = sum(a == b for a, b in zip(own["tokens"], own["tokens"][n:]))
    distinct = len({tuple(tokens) for tokens in own["tokens"]})
    if args.own_chunk:
        return f"{name}: {same} of {2 * n} equal with parts of {args.own_chunk} tokens, of SGLang's own", same == 2 * n
    slept = on["slept"] and (f"asleep in {1000 * on['slept']['sleep']:.0f} ms, weights taken in "
                             f"{1000 * on['slept']['taken']:.0f} ({on['slept']['held'] >> 20} MiB left of "
                             f"{on['slept']['weights'] >> 20}), awake in {1000 * on['slept']['wake']:.0f}, "
                             f"{on['slept']['equal']} of {n} equal; ")  # fmt: skip
    gaps = f" (gaps {', '.join(f'{gap:.2g}' for gap in on['gaps'])})" if on["gaps"] else ""
    hosts, hosted = "hicache_size" in CLASSES[name][1], on["hosted"][2]
    slept = f"{slept or ''}{f'{hosted} tokens from the host; ' if hosts else ''}"
    return (f"{name}: {same} of {2 * n} equal ({again} of {n} of SGLang's own are when cached, {distinct} distinct); "
            f"limit moving: {on['moved']} of {n}{gaps}, {on['preempted']} retracted, {on['refused']} refused; "
            f"{slept}{on['maps']} pages mapped in {on['steps']} steps; idle {on['idle'] >> 20} MiB for "
            f"{on['idle_cached'] >> 20} cached ({on['idle'] / max(on['idle_cached'], 1):.3f}x), flushed "
            f"{on['flushed'] >> 10} KiB, of {on['whole'] >> 20} MiB; seconds "
            f"{'/'.join(f'{s:.1f}' for s in on['seconds'])} (own {'/'.join(f'{s:.1f}' for s in own['seconds'])}), "
            f"start {on['start']:.0f} ({own['start']:.0f})"), (
                same == 2 * n and on["moved"] == n and (not on["slept"] or on["slept"]["equal"] == n)
                and (hosted > 0) == hosts)  # fmt: skip


def main():
    if sys.argv[1:2] == ["--engine"]:
        return engine(*sys.argv[2:4], *map(int, sys.argv[4:8]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], help=", ".join(CLASSES))
    parser.add_argument("--jobs", type=int, default=3, help="pairs of engines at a time")
    parser.add_argument("--seconds", type=int, default=240, help="for one pair")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--own-chunk", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--logs", default=tempfile.gettempdir())
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    wrong = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(compare, name, args) for name in args.names or FEW]):
            line, equal = done.result()
            wrong += not equal
            print(line, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
