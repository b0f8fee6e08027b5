"""vLLM's whole engine in a forked child of a process that has imported vLLM: seconds instead of a minute."""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback

MOST = 1024


def prompts_of(n=24, longest=500):
    draw = random.Random(0).randrange
    prefixes = [[draw(3, 990) for _ in range(300)] for _ in range(3)]
    made = []
    for i in range(n):
        prompt = [draw(3, 990) for _ in range(draw(5, longest))]
        made.append((prefixes[i % 3] + prompt)[: MOST - 60] if i % 2 else prompt)
    return [{"prompt_token_ids": p} for p in made]


def heard(prompts):
    """The prompts as those of a decoder, each with a sound of two seconds for the encoder."""
    import numpy as np

    draw = np.random.default_rng(0)
    sounds = [draw.standard_normal(32_000, dtype=np.float32) for _ in prompts]
    return [dict(encoder_prompt=dict(prompt="", multi_modal_data=dict(audio=(sound, 16_000))), decoder_prompt=prompt)
            for prompt, sound in zip(prompts, sounds)]  # fmt: skip


class Child:
    """A forked process with VMEM_VLLM set or not, which calls `function`."""

    def __init__(self, function, *args, vmem, seconds=600, environ=(), **kwargs):
        import ends  # not where this file is a program

        read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            ends.fork_ends_with_parent()
            signal.alarm(seconds)
            os.environ.update(environ, VMEM_VLLM="1" if vmem else "0", VLLM_ENABLE_V1_MULTIPROCESSING="0")
            try:
                told = dict(result=function(*args, **kwargs))
            except BaseException:
                told = dict(error=traceback.format_exc())
            with os.fdopen(write, "w") as file:
                json.dump(told, file)
            os._exit(0)
        os.close(write)
        self._read, self._ended = read, False

    def result(self):
        """The child's result. An error in the child is raised here, as text."""
        with os.fdopen(self._read) as file:
            text = file.read()
        status = self._wait()
        told = json.loads(text) if text else dict(error=f"the engine's process ended with status {status}")
        if "error" in told:
            raise RuntimeError(told["error"])
        return told["result"]

    def kill(self):
        """End it, if it has not ended."""
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def _wait(self):
        _, status = os.waitpid(self.pid, 0)
        self._ended = True
        return status


def in_child(function, *args, **kwargs):
    """The result of `function` in a `Child`."""
    return Child(function, *args, **kwargs).result()


class Told(Child):
    """An engine that serves all prompts each time it is told to. serve: in the place of `serve_when_told`."""

    def __init__(self, folder, environ, serve=None, **options):
        go, self._go = os.pipe()
        self._done, done = os.pipe()
        super().__init__(serve or serve_when_told, folder, (go, self._go, self._done, done), options, vmem=True,
                         environ=environ)  # fmt: skip
        os.close(go)
        os.close(done)
        self.wait()

    def go(self):
        os.write(self._go, b".")

    def wait(self):
        assert os.read(self._done, 1) == b".", "the engine's process has ended"

    def ended(self):
        """It has no more to do: what it tells."""
        os.write(self._go, b"x")  # a later engine's process has the pipe, too, so closing it would not do
        return self.result()

    def page(self):
        return page_of(self.pid)


def serve_when_told(folder, pipes, options):
    from vllm import SamplingParams

    go, others_go, others_done, done = pipes
    os.close(others_go)
    os.close(others_done)
    llm, prompts, tokens, cached = make(folder, **options), prompts_of(), [], []
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    os.write(done, b".")
    while os.read(go, 1) == b".":
        answers = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([list(a.outputs[0].token_ids) for a in answers])
        cached.append(sum(a.num_cached_tokens or 0 for a in answers))
        os.write(done, b".")
    return dict(tokens=tokens, cached=cached, **idle_state(llm, page_of(os.getpid())))


def page_of(pid):
    from pyvmem.engine import control

    return next(page for engine, page in control.engines() if engine.pid == pid)


def make(folder, **options):
    from vllm import LLM

    return LLM(str(folder), **dict(dict(
        max_model_len=MOST, max_num_seqs=8, enforce_eager=True, enable_prefix_caching=True, max_num_batched_tokens=512,
        seed=0, dtype="float32", kv_cache_memory_bytes=256 << 20), **options))  # fmt: skip


def own_page():
    from pyvmem.engine import control

    found = control.engines()
    found = [e for e in found if e[0].pid == os.getpid()] or found  # beside another engine of the test
    return max(found, key=lambda e: e[1][control.STARTED]) if found else None


def serve(folder, options=None, limits=(), lora=None, out=24, turns=2, sounds=False):
    """Serve all prompts `turns` times, the second time from the prefix cache, while the limit moves.

    limits : multiples of what one request needs. sounds: whether the model hears some
    """
    from vllm import SamplingParams

    llm = make(folder, **(options or {}))
    prompts, params = prompts_of(), SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
    prompts = heard(prompts) if sounds else prompts
    adapters = None
    if lora:
        from vllm.lora.request import LoRARequest

        adapters = [LoRARequest("adapter", 1, str(lora)) if i % 3 == 0 else None for i in range(len(prompts))]
    tokens = []
    with limits_move(limits) as vmem:
        for _ in range(turns):
            answers = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            tokens += [list(a.outputs[0].token_ids) for a in answers]
        settle(llm)
    told = dict(tokens=tokens, cached=sum(a.num_cached_tokens or 0 for a in answers))
    if vmem:
        from pyvmem.engine import control

        told.update(idle_state(llm, vmem[1]), core=vmem[0].pid, here=os.getpid(), preempted=vmem[1][control.PREEMPTED])
    return told


def settle(llm):
    """Have an engine in this process do what is left without requests, as one in a process of its own does."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    while core is not None and core.scheduler.has_requests():
        core.step_fn()


@contextlib.contextmanager
def limits_move(limits):
    """Meanwhile the limit of this process's engine moves: multiples of what one request needs. Gives (engine, page)."""
    vmem, stop = own_page() if os.environ["VMEM_VLLM"] == "1" else None, threading.Event()
    if not vmem or not limits:
        yield vmem
        return
    from pyvmem.engine import control

    def move():
        draw = random.Random(1)
        while not stop.wait(0.05):
            vmem[1][control.LIMIT] = int(draw.choice(limits) * vmem[0].least)

    vmem[1][control.LIMIT] = int(limits[0] * vmem[0].least)
    mover = threading.Thread(target=move)
    mover.start()
    try:
        yield vmem
    finally:
        stop.set()
        mover.join()


def converse(folder, limits=(), sessions=5, inputs=4, out=8):
    """Streaming sessions beside other prompts: a session's next input comes when the last one is answered."""
    from vllm import SamplingParams

    llm, draw, tokens, left = make(folder), random.Random(1), {}, {}
    engine, core = llm.llm_engine, llm.llm_engine.engine_core
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)

    def ask(name, prompt, resumable=False):
        core.add_request(engine.input_processor.process_inputs(
            name, prompt, params, supported_tasks=engine.get_supported_tasks(), resumable=resumable))  # fmt: skip
        tokens.setdefault(name, [])

    for i in range(sessions):
        left[f"s{i}"] = [[draw.randrange(3, 990) for _ in range(draw.randrange(3, 120))] for _ in range(inputs)]
    with limits_move(limits) as vmem:
        for turn in range(inputs):
            for name, prompts in left.items():
                ask(name, dict(prompt_token_ids=prompts[turn]), True)
            for i, prompt in enumerate(prompts_of(4)):
                ask(f"r{turn}-{i}", prompt)
            while any(len(said) < out * (turn + 1 if name in left else 1) for name, said in tokens.items()):
                for answer in core.get_output().outputs:
                    tokens[answer.request_id] += answer.new_token_ids
            time.sleep(0.5 * (turn % 2))  # long enough to count as idle
        for name in left:
            ask(name, dict(prompt_token_ids=[0]))  # there are no more
        core.get_output()
    told = dict(tokens=list(tokens.values()))
    if vmem:
        told.update(idle_state(llm, vmem[1]))
    return told


def lend_while_drafts_are_made(folder, options):
    """Serve all prompts. Twice, everything is lent after a step's model has run, and before its drafts are made."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from pyvmem.engine import control

    real, steps = GPUModelRunner.propose_draft_token_ids, []

    def propose(self, *args, **kwargs):
        steps.append(len(steps))
        if steps[-1] in (4, 12):
            page, end = own_page()[1], time.monotonic() + 60
            page[control.LEND] = 1
            while not page[control.LENT] and time.monotonic() < end:
                time.sleep(0.01)
            end = time.monotonic() + 0.3  # in which the worker must not give up what drafts use
            while page[control.RING_DONE] < page[control.POSITION] and time.monotonic() < end:
                time.sleep(0.01)
            page[control.LEND] = 0
        return real(self, *args, **kwargs)

    GPUModelRunner.propose_draft_token_ids = propose
    return dict(serve(folder, options, turns=1), drafted=len(steps))


def idle_state(llm, page):
    """The bytes that the engine holds when it is idle, and after its prefix cache was reset."""
    import dataclasses

    from pyvmem.engine import control

    page[control.LIMIT] = control.NO_LIMIT

    def look():
        before, still = None, 0
        for _ in range(100):  # until it holds still for longer than it takes to count as idle
            time.sleep(0.1)
            now = dataclasses.asdict(control.Engine.of("", 0, page))
            done = now["used"] == 0 and page[control.RING_DONE] == page[control.POSITION]
            still = still + 1 if now == before and done else 0
            if still == 5:
                break
            before = now
        return now

    idle = look()
    reset = llm.reset_prefix_cache()
    return dict(idle=idle, reset=look(), reset_done=bool(reset))


if __name__ == "__main__":  # in processes that vLLM starts by itself
    print("RESULT " + json.dumps(serve(sys.argv[1], json.loads(sys.argv[2]), (1, 2, 4, 20))), flush=True)
