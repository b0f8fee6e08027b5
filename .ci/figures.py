"""Makes the figures of docs/results that one GPU can give, those that tell most first: `make figures`.

T="step vmm" chooses some. Each ends in its own time, and the next one runs whatever became of it. What they print is in
build/figures. VLLM_TRACE names a CSV file of request lengths for the workload "azure".

SPDX-License-Identifier: MIT
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "figures"
PYVMEM = [sys.executable, "-m", "pyvmem"]
BENCH = [sys.executable, "-m", "benchmarks"]


def figures() -> list[tuple[str, int, list[str]]]:
    """(name, seconds at most, command), in the order in which they run."""
    lease = [*BENCH, "lease", "--page-size", "2M", "--backend"]
    growth = [*BENCH, "growth", "--backend", "stock", "--grow", "1G"]
    no_training = ["--part", "park", "--part", "block", "--part", "new"]
    return [
        ("lease-stock", 60, [*lease, "stock", *no_training]),
        ("lease-cuda", 60, [*lease, "cuda", *no_training]),
        ("lease-train", 180, [*lease, "stock", "--part", "train", "--steps", "100"]),
        ("lease-train-cuda", 120, [*lease, "cuda", "--part", "train"]),
        ("sums", 60, [*BENCH, "sums", "--backend", "stock"]),
        ("growth-copies", 120, [*growth, "--copies", "none", "engine", *(f"kernel:{n}" for n in (2, 4, 8, 16))]),
        ("lease-saver", 60, [*lease, "stock", "--part", "saver"]),
        *(with_vllm() if importlib.util.find_spec("vllm") else ()),
        *(with_sglang() if importlib.util.find_spec("sglang") else ()),
        ("selftest-stock", 300, [*PYVMEM, "doctor", "--selftest", "--backend", "stock"]),
        ("step", 240, [*BENCH, "step", "--quick"]),
        ("vmm", 120, [*BENCH, "vmm", "--quick"]),
        ("share", 180, [*BENCH, "share", "--quick"]),
        ("tests", 600, ["make", "test-gpu", "JOBS=6"]),
    ]


def with_vllm() -> list[tuple[str, int, list[str]]]:
    """The figures that need vLLM. A GPU of 80 GB has room for half of the 8B shape's layers, twice."""
    import torch

    small = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 100 << 30
    trace = os.environ.get("VLLM_TRACE")
    vllm = [*BENCH, "vllm", "--prefix-caching", "--turns"]
    half = ["--model", "llama-3-8b:16", "--kv-memory"]
    llama = [*half, "17G"] if small else ["--kv-memory", "34G"]
    loads = ["--load", "azure:512", "--trace", trace] if trace else []
    loads += ["--load", "decode", "--load", "decode-short", "--load", "idle:300"]
    some = ["--kv-memory", "17G", "--load", "decode", "--load", "hot:300"]
    # The cost to vLLM itself of a layout with blocks outermost.
    outermost = ["env", "VLLM_KV_CACHE_LAYOUT=BLNHC", *vllm, "4", *llama, "--load", "decode", "--load", "decode-short"]
    pauses = [*vllm, "5", "--max-model-len", "65536", "--kv-memory", "9G" if small else "20G", "--load", "pauses"]
    two = [*vllm, "2", "--tensor-parallel", "2", *half, "8G", *loads]
    # With all that it caches, as vMem and vLLM do.
    kvcached = "kvcached:ENABLE_KVCACHED=true,KVCACHED_AUTOPATCH=1,KVCACHED_MAX_CACHED_TOKENS=-1"
    beside_kvcached = [*vllm, "3", "--warm-up", "4", "--beside", kvcached, *half, "13G", *loads, "--load", "hot:300"]
    lengths = ["--trace", trace] if trace else []
    several = [*BENCH[:-1], "benchmarks.models", *lengths, "--out", str(OUT / "models.jsonl"), "--way"]
    models = [(f"models-{way}", 600, [*several, way]) for way in ("vmem", "swap", "static", "kvcached")]
    nothing = [*vllm, "5", *llama, "--load", "hot-from-nothing:300", "--load", "idle:400", "--load", "hot:300"]
    bursts = [*several, "vmem", "--models", "3", "--at-once", "3", "--max-model-len", "8192", "--part", "bursts",
              "--turns", "8", "--burst", "16", "--burst-prompt", "2000", "--eager"]  # fmt: skip
    room = [*bursts, "--way", "static", "--size", "66G", "--fit", "3"]
    wake = [*several, "vmem", "--models", "3", "--size", "46G", "--at-once", "3", "--part", "alternate", "--turns", "4",
            "--option=--kv-offloading-size", "--option=8", "--seconds", "110"]  # fmt: skip
    graphs = '--option=--compilation-config={"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'
    zipf = [*several, "vmem", "--models", "5", "--size", "70G", "--at-once", "5", "--part", "zipf", "--duration", "60"]
    rl = [*BENCH[:-1], "benchmarks.rl", "--out", str(OUT / "rl.jsonl"), "--part"]
    copies, rates = [sys.executable, "tests/vllm/copies.py"], [sys.executable, "tests/vllm/rates.py"]
    serve = [sys.executable, "tests/vllm/serve.py"]
    serve_on_two = [
        ("vllm-serve-experts", 400, [*serve, "mixtral", "--data-parallel", "2", "--expert-parallel"]),
        ("vllm-serve-tensor-parallel", 400, [*serve, "llama", "--tensor-parallel", "2"]),
    ]
    # It knows the memory of CUDA's own calls only.
    sanitizer = ["env", "VMEM_BACKEND=cuda", "compute-sanitizer", "--report-api-errors", "no", "--target-processes",
                 "all", sys.executable, "tests/vllm/gpu.py", "llama", "qwen3", "deepseek", "gemma3", "--jobs", "4",
                 "--requests", "8", "--kv-mib", "512"]  # fmt: skip
    return [
        ("common", 330, copies),
        ("models-wake-graphs", 300, [*wake, graphs]),
        ("models-wake", 300, [*wake, "--eager"]),
        ("prefixes", 300, [*copies, "--prefixes"]),
        ("standby", 300, [*copies, "--standby"]),
        ("models-zipf-graphs", 300, [*zipf, graphs]),
        ("models-zipf", 300, [*zipf, "--eager"]),
        ("connectors", 300, [*rates, "offloading", "none", "lmcache", "--logs", str(OUT)]),
        *([("rl-most", 1200, [*rl, "most"]), ("rl", 700, [*rl, "step"])] if importlib.util.find_spec("trl") else ()),
        ("vllm", 600, [*vllm, "4", *llama, *loads]),
        ("vllm-blocks-outermost", 600, outermost),
        ("vllm-pauses", 900, pauses),
        ("vllm-from-nothing", 600, nothing),
        ("bursts-room", 300, room),
        ("bursts-pool", 300, [*bursts, "--size", "54G", "--idle", "0"]),
        *models,
        ("vllm-windows", 400, [*vllm, "4", "--model", "gemma-3-4b", *some]),
        *([("vllm-two-gpus", 600, two)] if torch.cuda.device_count() > 1 else ()),
        *([("vllm-kvcached", 700, beside_kvcached)] if importlib.util.find_spec("kvcached") else ()),
        ("vllm-latent", 400, [*vllm, "2", "--model", "deepseek-v2-lite", *some]),
        ("vllm-attack", 420, [sys.executable, "tests/vllm/attack.py", "--minutes", "3"]),
        ("vllm-serve", 400, [*serve, "llama"]),
        *(serve_on_two if torch.cuda.device_count() > 1 else ()),
        *([("vllm-sanitizer", 600, sanitizer)] if shutil.which("compute-sanitizer") else ()),
    ]


def with_sglang() -> list[tuple[str, int, list[str]]]:
    """The figures that need SGLang."""
    import torch

    trace = os.environ.get("VLLM_TRACE")
    lengths = ["--azure", trace] if trace else []
    speed = [sys.executable, "-m", "benchmarks.sglang", "--model", "llama-3-8b:16", *lengths]
    tokens = [sys.executable, "tests/sglang/gpu.py"]
    classes = ["gemma3", "llama-fp8", "gptoss", "qwen3", "mixtral", "llama-hicache"]
    two = [*tokens, "llama-tp2", "qwen3-dp2", "--jobs", "1", "--seconds", "240"]
    return [
        ("sglang", 1200, speed),
        ("sglang-tokens", 900, [*tokens, *classes, "--seconds", "400"]),
        *([("sglang-two-gpus", 500, two)] if torch.cuda.device_count() > 1 else ()),
        *(beside_vllm() if importlib.util.find_spec("vllm") else ()),
    ]


def beside_vllm() -> list[tuple[str, int, list[str]]]:
    """Bursts of a vLLM and an SGLang server that this Python has: with room for both, and in one pool."""
    both = [sys.executable, "-m", "benchmarks.models", "--engines", "vllm,sglang", "--model", "llama-3-8b:8",
            "--max-model-len", "8192", "--part", "bursts", "--turns", "6", "--burst", "32", "--burst-prompt", "4000",
            "--eager", "--awake", "--out", str(OUT / "engines.jsonl"), "--way"]  # fmt: skip
    return [
        ("engines-room", 250, [*both, "static", "--size", "24.4G"]),
        ("engines-pool", 250, [*both, "vmem", "--size", "19.4G"]),
    ]


def main(chosen: list[str]) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    from entry_point import write

    plugin = write(OUT / "plugin")  # vLLM finds pyvmem only where it is installed, or by this
    path = os.pathsep.join([str(plugin), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment, failed = dict(os.environ, PYTHONPATH=path), 0
    for name, seconds, command in figures():
        if chosen and name not in chosen:
            continue
        begin = time.monotonic()
        with open(OUT / f"{name}.txt", "wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
                                       start_new_session=True)  # fmt: skip
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the engines that it has started
                process.wait()
        failed += process.returncode != 0
        print(f"{name}: {time.monotonic() - begin:.0f} s, exit status {process.returncode}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
