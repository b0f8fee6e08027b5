"""How fast KV connectors store and load rows, on vLLM's own memory and on vMem's: one line of JSON for each.

    python tests/vllm/rates.py                    on a GPU: LMCache and vLLM's offloading, less than 5 minutes
    python tests/vllm/rates.py --tiny lmcache     on a CPU, with what only a GPU can do replaced: a trial of this file

Engines with and without vMem take turns, each in a process of its own, with random weights of Llama-3-8B's shape in 16
layers. In each round, new prompts are computed and stored. Then all are served again in the same order, from the
connector: the KV cache holds less than two rounds, so that later prompts have evicted each. ``store`` and ``load`` are
the prompts' tokens a second of these two services, ``hits`` the tokens that the second one did not compute. ``equal``
counts answers that both engines give alike, and ``again`` those that an engine gives alike when it serves a prompt
again: where plain vLLM differs from itself, a step's other requests have changed its sums. A line comes after each
turn: the last counts.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import connect
from entry_point import needed, write
from gpu import environment_of

KINDS = {
    "none": None,
    "lmcache": connect.chosen("LMCacheConnectorV1"),
    "offloading": connect.chosen("OffloadingConnector"),
    "simple": connect.chosen("SimpleCPUOffloadConnector"),
}
MODEL = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
             num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=32000, rms_norm_eps=1e-5,
             max_position_embeddings=8192, num_hidden_layers=16, dtype="bfloat16", hidden_act="silu",
             tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, initializer_range=0.04)  # fmt: skip


def fill(model):
    """Give a model weights of which every request has tokens of its own; those that vLLM makes up are nearly 0."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1) if weight.dim() < 2 else weight.normal_(0, weight.shape[-1] ** -0.5)


def index_on_gpu():
    """LMCache without its kernels: all that copies is torch's."""
    from lmcache.v1.gpu_connector import gpu_connectors

    made, real = [], gpu_connectors.GPUConnectorInterface.initialize_kvcaches_ptr

    def initialize(connector, **given):
        made[:] = [connector]
        real(connector, **given)

    gpu_connectors.GPUConnectorInterface.initialize_kvcaches_ptr = initialize
    connect.by_indexing(lambda: made[0].kvcaches)


def chosen_for(kind, args):
    """The setting of a connector; what it needs is prepared. None: no connector."""
    os.environ.update(LMCACHE_LOCAL_CPU="True", LMCACHE_MAX_LOCAL_CPU_SIZE=str(args.host), LMCACHE_CHUNK_SIZE="256",
                      LMCACHE_LOG_LEVEL="WARNING", LMCACHE_TRACK_USAGE="false", PYTHONHASHSEED="0")  # fmt: skip
    chosen = KINDS[kind]
    if kind in ("offloading", "simple"):
        chosen["kv_connector_extra_config"]["cpu_bytes_to_use"] = int(args.host * 2**30)
    if args.tiny and chosen:
        if kind == "lmcache":
            connect.import_lmcache()
        connect.prepare(chosen)
    elif kind == "lmcache":
        import lmcache

        lmcache.device_ops.ensure_native()
        if "lmcache.cuda_ops" not in sys.modules:  # they do not fit this release of torch
            index_on_gpu()
    return chosen


def engine(kind, folder, args):
    """In a process of its own: serve, and print one line of JSON."""
    import torch

    chosen = chosen_for(kind, args)
    from vllm import LLM, SamplingParams

    llm = LLM(folder, load_format="auto" if args.tiny else "dummy", skip_tokenizer_init=True, seed=0, max_num_seqs=64,
              max_model_len=args.tokens + 64, kv_cache_memory_bytes=int(args.kv * 2**30), max_num_batched_tokens=8192,
              enforce_eager=not args.graphs, enable_prefix_caching=True, kv_transfer_config=chosen,
              dtype="float32" if args.tiny else "bfloat16")  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    if not args.tiny:
        fill(core.model_executor.driver_worker.worker.model_runner.get_model())
    draw, told = random.Random(0), dict(store=[], load=[], hits=[], tokens=[])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)

    def serve(prompts):
        begin = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        told["tokens"] += [list(a.outputs[0].token_ids) for a in answers]
        tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        return tokens / seconds, sum(a.num_cached_tokens or 0 for a in answers)

    drawn = [[[draw.randrange(3, 900) for _ in range(args.tokens)] for _ in range(args.prompts)]
             for _ in range(args.rounds + 1)]  # fmt: skip
    for name in ("store", "load"):
        for prompts in drawn:
            rate, hits = serve([dict(prompt_token_ids=prompt) for prompt in prompts])
            told[name].append(rate)
            told["hits"] += [hits] * (name == "load")
            end = time.monotonic() + 20
            while core.scheduler.has_requests():  # until no copy names a block
                core.step_fn()
                assert time.monotonic() < end, "copies do not end"
    told.update(device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
                kernels="lmcache.cuda_ops" in sys.modules)  # fmt: skip
    print("RESULT " + json.dumps(told), flush=True)


def run(kind, vmem, folder, args, seconds):
    """One engine: what it told, or the last line of its log."""
    environment = dict(environment_of(vmem, write(Path(folder, "plugin")) if needed() else None, args.layout),
                       VLLM_ENABLE_V1_MULTIPROCESSING="0")  # fmt: skip
    command = [sys.executable, __file__, "--engine", folder, kind]
    for name in ("rounds", "prompts", "tokens", "kv", "host"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--tiny"] * args.tiny + ["--graphs"] * args.graphs
    log = Path(args.logs, f"rates-{kind}-{'vmem' if vmem else 'own'}.log")
    with log.open("a") as file:
        try:
            ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True,
                                 timeout=seconds)  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:.0f} s"
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1][7:]) if lines else (log.read_text().strip().splitlines() or ["no word"])[-1][:300]


def say(kind, ran):
    """Print one line about a connector. ran: what its engines told, {with vMem or not: [..]}."""
    line = dict(kind=kind, device=ran[True][0]["device"], turns=len(ran[True]))
    if kind == "lmcache":
        line["kernels"] = all(told["kernels"] for several in ran.values() for told in several)
    for name in ("store", "load"):
        own, on = (statistics.median(rate for told in ran[vmem] for rate in told[name][1:]) for vmem in (False, True))
        line[name] = dict(own=round(own), vmem=round(on), ratio=round(on / own, 3))
        line[name]["all"] = [[round(rate) for told in ran[vmem] for rate in told[name][1:]] for vmem in (False, True)]
    tokens = [told["tokens"] for several in ran.values() for told in several]
    equal = sum(all(t[i] == tokens[0][i] for t in tokens) for i in range(len(tokens[0])))
    line["again"] = {}
    for vmem, name in ((False, "own"), (True, "vmem")):
        halves = [(t["tokens"][: len(t["tokens"]) // 2], t["tokens"][len(t["tokens"]) // 2 :]) for t in ran[vmem]]
        line["again"][name] = min(sum(a == b for a, b in zip(*two)) for two in halves)
    line.update(hits={"vmem" if vmem else "own": ran[vmem][0]["hits"] for vmem in ran}, equal=equal,
                answers=len(tokens[0]), distinct=len({tuple(t) for t in tokens[0]}))  # fmt: skip
    print(json.dumps(line), flush=True)


def compare(kinds, folder, args):
    """Print lines about connectors until `args.seconds` have passed. Returns how many could not be compared."""
    ran, failed, begin, longest = {kind: {False: [], True: []} for kind in kinds}, set(), time.monotonic(), 0.0
    for turn in range(args.turns):
        for kind in kinds:
            for vmem in (False, True) if turn % 2 == 0 else (True, False):
                now, left = time.monotonic(), args.seconds - (time.monotonic() - begin)
                if kind in failed or left < longest:
                    continue
                told = run(kind, vmem, folder, args, left)
                longest = max(longest, time.monotonic() - now)
                if isinstance(told, str):
                    print(json.dumps(dict(kind=kind, failed="vMem" if vmem else "own", why=told)), flush=True)
                    failed.add(kind)
                else:
                    ran[kind][vmem].append(told)
            if kind not in failed and len(ran[kind][True]) == len(ran[kind][False]) == turn + 1:
                say(kind, ran[kind])
    return sum(not ran[kind][True] or not ran[kind][False] for kind in kinds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help=", ".join(KINDS))
    parser.add_argument("--engine", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and all that only a GPU can do replaced")
    parser.add_argument("--graphs", action="store_true", help="compile the model, and capture CUDA graphs")
    parser.add_argument("--layout", default="auto", choices=("auto", "vllm"), help="VMEM_VLLM_LAYOUT")
    parser.add_argument("--turns", type=int, default=2, help="of each engine")
    parser.add_argument("--rounds", type=int, default=3, help="of an engine, after the first, which does not count")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--kv", type=float, default=6, help="GiB of KV cache; a round of prompts has 4")
    parser.add_argument("--host", type=float, default=24, help="GiB of host memory")
    parser.add_argument("--seconds", type=float, default=280, help="in all: no engine begins that may not be done")
    parser.add_argument("--logs", default=tempfile.gettempdir())
    args = parser.parse_args()
    if args.engine:
        code = 1
        try:
            code = engine(args.kinds[0], args.engine, args) or 0
        except Exception:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)  # LMCache's threads would not end
    with tempfile.TemporaryDirectory() as folder:
        if args.tiny:
            import models  # which imports torch

            models.write("llama", Path(folder))
        else:
            Path(folder, "config.json").write_text(json.dumps(MODEL))
        return compare(args.kinds or ["lmcache", "offloading"], folder, args)


if __name__ == "__main__":
    sys.exit(main())
