"""vLLM itself on host memory, with and without vMem: equal tokens, limits that move, what an idle engine holds."""

import json
import os
import threading
import time
import uuid
from functools import partial

import engines
import models
import offload
import pytest

KEEP = 128 << 20  # of spare blocks and the null block, as pyvmem.vllm.budget.KEEP


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def write(name):
        others = {"eagle": models.write_eagle, "adapter": models.write_lora, "whisper": models.write_whisper}
        made = others.get(name) or partial(models.write, name)
        engines.in_child(lambda: str(made(root / name)), vmem=False)  # no threads of torch's here
        return root / name

    return write


@pytest.fixture(scope="session", autouse=True)
def imported():
    """vLLM is imported once, with the plugin on; children that switch it off run vLLM itself."""
    os.environ["VMEM_VLLM"] = "1"
    os.environ["VMEM_VLLM_PAGE_SIZE"] = "64K"  # bytes are counted to the block
    import vllm.v1.engine.core  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401
    from vllm.platforms import current_platform

    assert type(current_platform).__module__ == "pyvmem.vllm.platform"


_plain = {}


def plain(folder, turns=2, **options):
    """What vLLM itself gives: the same for all tests that ask for the same. Of one turn, it is how two begin."""
    asked = json.dumps([folder, options], default=str, sort_keys=True)
    if asked not in _plain or len(_plain[asked]) < turns * len(engines.prompts_of()):
        made = engines.in_child(engines.serve, folder, vmem=False, turns=max(turns, 2), **options)
        assert len({tuple(t) for t in made["tokens"]}) > 12  # random weights must say something
        _plain[asked] = made["tokens"]
    return _plain[asked][: turns * len(engines.prompts_of())]


def both(folder, limits=(), **options):
    return plain(folder, **options), engines.in_child(engines.serve, folder, vmem=True, limits=limits, **options)


def check_idle(on, whole=True):
    """whole: whether a layer's part of a block is whole pages, so that no two blocks share one."""
    block, idle, reset = on["idle"]["block_bytes"], on["idle"], on["reset"]
    assert on["reset_done"] and idle["used"] == reset["used"] == 0 and reset["cached"] == 0
    for state in (idle, reset):  # to the block, and the null block
        assert state["spare"] + block <= KEEP
        backed = state["cached"] + state["spare"] + block
        assert backed <= state["resident"] <= backed * (1 if whole else 2)


# vLLM's CPU kernels give a request without an adapter the last of the slots for adapters, so that one stays empty.
ADAPTERS = dict(enable_lora=True, max_lora_rank=8, max_loras=2)
N_GRAMS = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
CASES = {
    "llama": dict(),
    "qwen3": dict(),
    "gemma3": dict(),
    "no prefix cache": dict(model="llama", options=dict(enable_prefix_caching=False)),
    "n-grams": dict(model="llama", drafts=N_GRAMS),
    "adapters": dict(model="llama", options=ADAPTERS),
    "n-grams and adapters": dict(model="llama", options=ADAPTERS, drafts=N_GRAMS),
    "eagle": dict(model="llama", drafts=dict(method="eagle", model="eagle", num_speculative_tokens=3)),
    "draft model": dict(model="llama", drafts=dict(method="draft_model", model="llama", num_speculative_tokens=3)),
    "mtp": dict(model="mimo", drafts=dict(method="mtp", num_speculative_tokens=2)),
    "encoder and decoder": dict(model="whisper", sounds=True,
                                options=dict(max_num_batched_tokens=1024, enable_prefix_caching=False)),
}  # fmt: skip


def chosen_of(model, case):
    """The folder of a case's model, and what `serve` takes."""
    chosen = dict(case)
    drafts = chosen.pop("drafts", None)
    if drafts:
        named = dict(drafts, model=str(model(drafts["model"]))) if "model" in drafts else drafts
        chosen["options"] = dict(chosen.get("options", ()), speculative_config=named)
    if chosen.get("options", {}).get("enable_lora"):
        chosen["lora"] = model("adapter")
    return model(chosen.pop("model")), chosen


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_vllms_while_limits_move(model, case):
    folder, chosen = chosen_of(model, dict(dict(model=case), **CASES[case]))
    own, on = both(folder, limits=(1, 2, 4, 20), **chosen)
    differ = sum(a != b for a, b in zip(own, on["tokens"], strict=True))
    # vLLM 0.32 gives other answers to such requests that it preempts, without vMem, too.
    assert differ <= (on["preempted"] if case == "encoder and decoder" else 0)
    assert on["idle"]["step_maps"] == 0
    check_idle(on)


def serve_in_one_piece(*args, **kwargs):
    from pyvmem.vllm import layout

    layout.preferred = lambda names, worker: ["BLHNC"]  # as on a GPU; CPU_ATTN can read it, but does not say so
    return engines.serve(*args, **kwargs)


def test_tokens_are_vllms_where_blocks_are_moved_apart(model):
    own = plain(model("five layers"))
    on = engines.in_child(serve_in_one_piece, model("five layers"), vmem=True, limits=(1, 2, 4, 20))
    assert on["idle"]["block_bytes"] == 5 * 128 * 1024 + 512
    assert on["tokens"] == own
    assert on["reset_done"] and on["reset"]["cached"] == on["reset"]["used"] == 0


def test_what_drafts_use_stays_until_they_are_made(model):
    folder, chosen = chosen_of(model, CASES["eagle"])
    own = plain(folder, turns=1, **chosen)
    on = engines.in_child(engines.lend_while_drafts_are_made, folder, vmem=True, **chosen)
    assert on["drafted"] > 13 and on["tokens"] == own
    check_idle(on)


def test_streaming_sessions_have_vllms_tokens_while_limits_move(model):
    own = engines.in_child(engines.converse, model("llama"), vmem=False)
    on = engines.in_child(engines.converse, model("llama"), vmem=True, limits=(1, 2, 4, 20))
    assert len({tuple(t) for t in own["tokens"]}) == 5 + 4
    assert on["tokens"] == own["tokens"]
    assert on["idle"]["step_maps"] == 0
    check_idle(on)


# Where vLLM's own tokens depend on which requests share a step, only equal steps give equal tokens.
BFLOAT16 = dict(options=dict(dtype="bfloat16"))  # on some CPUs, vLLM's kernels for experts take no float32
ALIKE = {
    "deepseek": {},  # without experts, as the others have them: in float32 it takes a third
    "qwen2moe": BFLOAT16,
    "mixtral": BFLOAT16,
    "gptoss": BFLOAT16,
    "next": BFLOAT16,
}


@pytest.mark.parametrize("case", ALIKE)
def test_tokens_are_vllms_without_a_limit(model, case):
    own, on = both(model(case), **ALIKE[case])
    assert on["tokens"] == own
    assert on["idle"]["step_maps"] == 0
    check_idle(on, whole=case != "deepseek")


def test_tokens_are_vllms_with_blocks_of_the_size_that_vmem_chooses(model, monkeypatch):
    from pyvmem.vllm import plugin

    monkeypatch.setattr(plugin, "tokens_of_block", lambda config: 2 * config.cache_config.block_size)
    own, on = both(model("llama"), limits=(1, 2, 4, 20))
    assert on["tokens"] == own and 0 < on["cached"] and on["cached"] % 256 == 0  # vLLM's own are of 128 on a CPU


@pytest.mark.parametrize("limits", [(), (1, 2, 4, 20)])
def test_tokens_are_vllms_where_requests_begin_with_the_blocks_that_are_there(model, monkeypatch, limits):
    from pyvmem.vllm import demand

    monkeypatch.setattr(demand, "CHUNK", 64)
    own, on = both(model("llama"), limits=limits)
    assert on["tokens"] == own
    assert on["idle"]["step_maps"] == 0


def test_a_seeded_fault_changes_tokens(model, monkeypatch):
    """The comparison sees it if blocks lose their contents: here every block that leaves was still in use."""
    from pyvmem.vllm.budget import VllmBudget

    real = VllmBudget.take_orders

    def take(self):
        gone, ahead, order = real(self)
        used = [b.block_id for b in self.pool.blocks[1:] if b.ref_cnt and b.block_id not in self.packing]
        return gone + used[: self.step % 7 == 0], ahead, order

    own = plain(model("llama"))
    monkeypatch.setattr(VllmBudget, "take_orders", take)
    try:
        on = engines.in_child(engines.serve, model("llama"), vmem=True)
    except RuntimeError as error:
        assert "status" in str(error)  # an address faulted
    else:
        assert on["tokens"] != own


def serve_and_offload(folder, options, limits=(), one_piece=False):
    """Serve all prompts three times, where the device keeps few prefixes and the host all of them."""
    from pyvmem.vllm import layout

    if one_piece:  # as on a GPU; CPU_ATTN can read it, but does not say so
        layout.preferred = lambda names, worker: layout.order([*names, "BLHNC"], [1], copied=True)
    copies = offload.copy_on_the_host()
    told = engines.serve(folder, dict(options, kv_offloading_size=1), limits=limits, turns=3)
    return dict(told, regions=len(copies[0].tensors), **copies[0].counts)


@pytest.mark.parametrize("name, one_piece", [("llama", False), ("gemma3", False), ("llama", True)])
def test_prefixes_come_back_from_host_memory_while_limits_move(model, name, one_piece):
    options = dict(kv_cache_memory_bytes=24 << 20)
    own = plain(model(name), turns=3, options=options)
    on = engines.in_child(serve_and_offload, model(name), options, vmem=True, limits=(1, 2, 4, 20), one_piece=one_piece)
    assert on["regions"] == 1 or not one_piece  # each is a copy for every block
    assert on["loaded"] > 30 and on["stored"] > 30  # blocks of 128 tokens
    assert on["tokens"] == own
    assert on["idle"]["step_maps"] == 0
    check_idle(on)


def refusal(folder, **options):
    try:
        engines.make(folder, **options)
    except Exception as error:
        return str(error)
    return "not refused"


NIXL = dict(kv_connector="NixlConnector", kv_role="kv_both")
CHUNKS = dict(kv_connector="OffloadingConnector", kv_role="kv_both",
              kv_connector_extra_config=dict(cpu_bytes_to_use=1 << 30, blocks_per_chunk=2))  # fmt: skip


@pytest.mark.parametrize(
    "options, environ, says",
    [
        (dict(kv_transfer_config=dict(kv_connector="DecodeBenchConnector", kv_role="kv_both")), {}, "it fills"),
        (dict(kv_transfer_config=CHUNKS), {}, "OffloadingConnector with blocks_per_chunk"),
        (dict(kv_transfer_config=NIXL), dict(VMEM_VLLM_LIMIT="1G"), "NixlConnector registers KV memory"),
        ({}, dict(VMEM_VLLM_LIMIT="much"), "VMEM_VLLM_LIMIT=much must be a size in bytes"),
    ],
)
def test_what_cannot_work_is_refused_with_one_line(model, options, environ, says):
    told = engines.in_child(refusal, model("llama"), vmem=True, environ=environ, **options)
    assert told.startswith("pyvmem: VMEM_VLLM") and says in told and "\n" not in told


# ---- engines that lend each other memory ----------------------------------------------------------------------------

POOL = 40 << 20  # one engine of them can use 23 at a time


class Watch(threading.Thread):
    """Looks what each of several engines holds."""

    def __init__(self, pages):
        super().__init__(daemon=True)
        self.pages, self.stop, self.together = pages, threading.Event(), 0
        self.most = [0] * len(pages)
        self.start()

    def held(self):
        from pyvmem.engine import control

        return [int(page.boards(1)[0, control.HELD]) for page in self.pages]

    def run(self):
        while not self.stop.wait(0.001):
            held = self.held()
            self.most = [max(pair) for pair in zip(self.most, held)]
            self.together = max(self.together, sum(held))

    def most_since(self):
        """The most that each held since the last call."""
        most, self.most = self.most, self.held()
        return most


@pytest.fixture
def told():
    """Starts a `Told`. Those that have not ended with the test are killed."""
    made = []

    def start(*args, **options):
        made.append(engines.Told(*args, **options))
        return made[-1]

    yield start
    for engine in made:
        engine.kill()


@pytest.fixture
def pool(model, told):
    """Two engines in a pool of `POOL` bytes: (engines, their pages, a `Watch`)."""
    made = []

    def start(**environ):
        name = f"test-{uuid.uuid4().hex[:8]}"
        common = dict(VMEM_VLLM_POOL=name, VMEM_VLLM_POOL_SIZE=str(POOL), **environ)
        both = [told(model("llama"), common) for _ in range(2)]
        pages = [engine.page() for engine in both]
        made.append(Watch(pages))
        return both, pages, made[-1]

    yield start
    for watch in made:
        watch.stop.set()


def soon(what, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_two_engines_lend_each_other_memory(model, pool):
    from pyvmem.engine import control

    own = plain(model("llama"), turns=1)
    both, pages, watch = pool()
    for one, other in ((0, 1), (1, 0), (0, 1)):  # the prefixes that one has cached go to the other
        watch.most_since()
        both[one].go()
        both[one].wait()
        assert watch.most_since()[one] > 0.7 * POOL
    for engine in both:
        engine.go()
    soon(lambda: all(page[control.USED] for page in pages))
    for page in pages:  # everything, with requests running, and back
        page[control.LEND] = 1
        soon(lambda p=page: p[control.LENT] and p.boards(1)[0, control.HELD] == p[control.NULL])
        page[control.LEND] = 0
    for engine in both:
        engine.wait()
    told = [engine.ended() for engine in both]
    watch.stop.set()
    assert watch.together <= POOL
    for each in told:
        assert each["tokens"] == [own] * len(each["tokens"])
        assert each["idle"]["step_maps"] == 0
    assert [len(each["tokens"]) for each in told] == [3, 2]


def test_a_minimum_is_not_lent_and_a_higher_priority_gets_more(model, pool):
    from pyvmem.engine import control

    both, pages, watch = pool()
    least = pages[0][control.LEAST] * pages[0][control.BLOCK_BYTES]
    pages[0][control.MIN] = least + (1 << 20)
    pages[1][control.PRIORITY] = 1
    both[0].go()
    both[0].wait()
    assert watch.held()[0] > 0.7 * POOL  # cached
    both[1].go()
    soon(lambda: watch.held()[1] > POOL / 2)
    both[0].go()
    for engine in both:
        engine.wait()
    assert watch.held()[0] >= least
    assert watch.most_since()[1] <= POOL - pages[0][control.MIN]
    for engine in both:
        engine.ended()
    watch.stop.set()
    assert watch.together <= POOL


def borrow(tokens):
    """A neighbour of the engines, such as a trainer: it takes memory for `tokens` rows of 1 KiB, and gives it back."""
    from pyvmem import Context, KVCache
    from pyvmem.vllm import open_pool

    with Context("host") as context, open_pool(context) as pool, KVCache.for_model(
        2, 2, 64, 1, tokens, POOL, pool=pool, context=context, name=None
    ) as cache:  # fmt: skip
        cache.alloc(tokens)
        end = time.monotonic() + 60
        while not cache.step([tokens]):  # refused: the engine's worker has not seen yet that requests have ended
            assert pool.wait(cache, 60) != "refused" or time.monotonic() < end, cache.shortage
        return cache.stats().held_pages * cache.page_size, sum(member.has for member in pool.members())


def test_a_neighbour_borrows_what_no_request_needs(model, told):
    """The engine is idle meanwhile. It gives up the least recently used prefixes, and keeps the others."""
    from pyvmem.engine import control

    own = plain(model("llama"), turns=1)
    common = dict(VMEM_VLLM_POOL=f"test-{uuid.uuid4().hex[:8]}", VMEM_VLLM_POOL_SIZE=str(POOL))
    engine = told(model("llama"), common)
    page = engine.page()
    for _ in range(2):
        engine.go()
        engine.wait()
    cached = page[control.CACHED]
    held, together = engines.in_child(borrow, POOL // 2 >> 10, vmem=True, environ=common)
    assert held >= POOL // 2 and together <= POOL
    assert 0 < page[control.CACHED] < cached
    for _ in range(2):
        engine.go()
        engine.wait()
    ended = engine.ended()
    shared, whole, lent, again = ended["cached"]  # tokens that vLLM says it found: in a turn, the prompts share some
    assert shared < lent < whole == again
    assert ended["tokens"] == [own] * 4 and ended["idle"]["step_maps"] == 0


def in_turn(folder):
    """What is left of engines that ended in one process, one after the other."""
    import gc
    import weakref

    from pyvmem.engine import control
    from pyvmem.vllm import platform

    left = []
    for _ in range(2):
        llm = engines.make(folder)
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        left += [weakref.ref(one) for one in (worker, worker._vmem, core.scheduler, core.scheduler._vmem)]
        assert any("memfd:vmem" in line for line in open("/proc/self/maps"))
        del llm, core, worker
        gc.collect()
    return dict(
        objects=[type(one()).__name__ for one in left if one() is not None],
        pages=len(control.engines()),
        threads=[t.name for t in threading.enumerate() if t.name.startswith("vmem")],
        memory=[line for line in open("/proc/self/maps") if "memfd:vmem" in line],
        files=[f for f in os.listdir("/proc/self/fd") if "vmem" in link(f"/proc/self/fd/{f}")],
        checked=platform._release.cache_info().misses,
    )  # fmt: skip


def link(path):
    """Where a link leads; "" if it has gone."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def test_engines_that_ended_leave_nothing_in_their_process(model):
    told = engines.in_child(in_turn, model("llama"), vmem=True)
    assert told.pop("checked") == 1  # vLLM's sources, once for both
    assert not any(told.values()), told
