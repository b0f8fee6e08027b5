"""KV connectors on CPUs: vLLM's own and LMCache's, all of it theirs but for what only a GPU can do."""

import collections
import contextlib
import os
import random
import sys
import time
import types

import engines

CHUNK = 128  # LMCache's chunk of tokens: a block of vLLM's on CPUs
COUNTS = collections.Counter()  # blocks that were copied, and how many of them had no memory
OFFLOADING = "OffloadingConnector"
ABORTED = 5  # every such request is aborted


def chosen(name, folder=None, **more):
    """vLLM's setting of a connector."""
    if name == "ExampleConnector":
        more = dict(more, shared_storage_path=str(folder))
    if name == "SimpleCPUOffloadConnector":
        more = dict(dict(cpu_bytes_to_use=1 << 30), **more)
    return dict(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=more)


def multi(*several):
    return dict(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=dict(connectors=several))


def watch():
    """Have every copy count the blocks without memory that it names. Returns what says which have it; None: all."""
    if os.environ["VMEM_VLLM"] != "1":
        return lambda: None
    from pyvmem.vllm.worker import WorkerMemory

    made, real = [], WorkerMemory.start

    def start(self, config):
        real(self, config)
        made.append(self)

    WorkerMemory.start = start
    return lambda: set(made[-1].blocks.backed().tolist())


def count(kind, blocks, backed):
    blocks = set(blocks)
    COUNTS[kind] += len(blocks)
    here = backed()
    if here is not None:
        COUNTS["unbacked"] += len(blocks - here)


# ---- vLLM's SimpleCPUOffloadConnector -------------------------------------------------------------------------------


class Late:
    """In the place of its DmaCopyBackend: copies that are carried out some steps later."""

    late = 0.7

    def __init__(self):
        self.draw, self.waiting = random.Random(3), collections.deque()

    def init(self, gpu_caches, cpu_caches, *_):
        self.pairs = [(gpu_caches[name], cpu_caches[name]) for name in gpu_caches]

    def launch_copy(self, src, dst, is_store, event_idx, events_list, wait_event=None):
        event = LateEvent(self, src, dst, is_store)
        self.waiting.append(event)
        events_list.append((event_idx, event))

    def shutdown(self):
        self.waiting.clear()


class LateEvent:
    """What vLLM asks whether a copy has ended."""

    backed = staticmethod(lambda: None)

    def __init__(self, backend, src, dst, is_store):
        self.backend, self.src, self.dst, self.is_store, self.done = backend, src, dst, is_store, False

    def query(self):
        if not self.done and self.backend.draw.random() > self.backend.late:
            self.synchronize()
        return self.done

    def synchronize(self):
        if not self.done:
            self.done = True
            self.backend.waiting.remove(self)
            count("stored" if self.is_store else "loaded", self.src if self.is_store else self.dst, self.backed)
            for gpu, cpu in self.backend.pairs:
                if self.is_store:
                    cpu[self.dst] = gpu[self.src]
                else:
                    gpu[self.dst] = cpu[self.src]


class Stream:
    """In the place of a CUDA stream."""

    @staticmethod
    def priority_range():
        return 0, 0

    def __init__(self, *_, **__):
        pass

    def synchronize(self):
        pass

    def wait_stream(self, _):
        pass

    def record(self, *_):
        pass


class Torch:
    """torch, with streams that do nothing."""

    Event = Stream
    cuda = types.SimpleNamespace(Stream=Stream, current_stream=Stream)

    def __getattr__(self, name):
        import torch

        return getattr(torch, name)


def simple_on_cpu(backed):
    from vllm.v1.simple_kv_offload import worker

    worker.torch, worker.DmaCopyBackend, worker.PIN_MEMORY = Torch(), Late, False
    LateEvent.backed = staticmethod(backed)


# ---- LMCache --------------------------------------------------------------------------------------------------------


def import_lmcache():
    """Import it, where vLLM computes on CPUs: it then looks at all modules, and fails at those of numba's."""
    import vllm.triton_utils.dispatcher as dispatcher

    def attributes(value):
        found = vars(value)
        return found if hasattr(found, "get") and not callable(found) else {}

    dispatcher.vars = attributes
    import lmcache.integration.vllm.vllm_v1_adapter  # noqa: F401


def by_indexing(caches, backed=lambda: None):
    """Have LMCache copy by torch's indexing, in the place of its kernel. caches: what gives the layers of vLLM's cache.

    LMCache 0.5 has such a function itself, which does not know that vLLM keeps a head's key and value in one row.
    """
    import lmcache
    import torch
    from lmcache.lmcache_native import EngineKVFormat, TransferDirection

    to_host, heads_first = int(TransferDirection.D2H), int(EngineKVFormat.NL_X_NB_NH_BS_CS)

    def transfer(kv, _, slots, device, size, direction, form, block_size=0, head_size=0, block_stride_elems=0,
                 skip_prefix_n_tokens=0):  # fmt: skip
        """Copy kv [2, layers, tokens, heads * size] from the slots of vLLM's blocks, whose rows are key and value."""
        slots = slots.to(torch.long)
        real = slots >= 0
        real[:skip_prefix_n_tokens] = False
        block, token, real = slots[real] // block_size, slots[real] % block_size, real.to(kv.device)
        store = int(direction) == to_host
        count("stored" if store else "loaded", block.tolist(), backed)
        for layer, cache in enumerate(caches()):
            if int(form) == heads_first:
                cache = cache.transpose(1, 2)  # now [block, token, head, key and value]
            half = cache.shape[-1] // 2
            if store:
                rows = cache[block, token]
                rows = torch.stack([rows[..., :half].flatten(1), rows[..., half:].flatten(1)])
                kv[:, layer, real] = rows.to(kv.device)
            else:
                parts = [kv[side, layer, real].to(cache.device).unflatten(1, (-1, half)) for side in (0, 1)]
                cache[block, token] = torch.cat(parts, -1)

    lmcache.device_ops.multi_layer_kv_transfer = transfer


def lmcache_on_cpu(backed):
    """LMCache has no connector for CPUs: the one for CUDA, with torch's indexing in the place of its kernel."""
    os.environ.update(LMCACHE_CHUNK_SIZE=str(CHUNK), LMCACHE_LOCAL_CPU="True", LMCACHE_MAX_LOCAL_CPU_SIZE="0.25",
                      LMCACHE_SAVE_DECODE_CACHE="True", LMCACHE_SAVE_UNFULL_CHUNK="False")  # fmt: skip
    import lmcache.v1.gpu_connector as public
    import lmcache.v1.gpu_connector.gpu_connectors as connectors
    import torch

    torch.cuda.Stream = Stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: Stream()
    made = []

    class OnCpu(connectors.VLLMPagedMemGPUConnectorV2):
        def _initialize_pointers(self, kv_caches):
            if not hasattr(self, "engine_kv_format"):
                self.engine_kv_format, kv_caches = connectors.normalize_kv_and_discover_format(
                    kv_caches, connectors.EngineType.VLLM, layout_hints=self.layout_hints)  # fmt: skip
                form = self.engine_kv_format
                self.device = kv_caches[0].device
                self.num_blocks = connectors.get_num_blocks(kv_caches, form)
                self.block_size = connectors.get_block_size(kv_caches, form)
                self.page_buffer_size = self.num_blocks * self.block_size
                self.head_size = connectors.get_head_size(kv_caches, form)
                self.block_stride_elems = 0
            return None

    def create(config, metadata, engine, layout_hints=None):
        made.append(OnCpu.from_metadata(metadata, False, torch.device("cpu"), layout_hints=layout_hints))
        return made[-1]

    by_indexing(lambda: made[-1].kvcaches, backed)
    public.CreateGPUConnector = create
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("lmcache") and hasattr(module, "CreateGPUConnector"):
            module.CreateGPUConnector = create


# ---- an engine that serves ------------------------------------------------------------------------------------------


def names_of(connector):
    """The connectors of a setting, those of a MultiConnector in its place."""
    several = connector["kv_connector_extra_config"].get("connectors")
    return [name for child in several for name in names_of(child)] if several else [connector["kv_connector"]]


def prepare(connector):
    """Make the connectors of a setting work on CPUs, in this process."""
    backed, names = watch(), names_of(connector)
    if "SimpleCPUOffloadConnector" in names:
        simple_on_cpu(backed)
    if "LMCacheConnectorV1" in names:
        lmcache_on_cpu(backed)
    if OFFLOADING in names:
        import offload

        return offload.copy_on_the_host()
    return []


def drive(llm, prompts, params, each):
    """Serve prompts step by step, calling each(number of the step, the unfinished requests). Returns their tokens."""
    engine, tokens = llm.llm_engine, {}
    live = [f"r{i}" for i in range(len(prompts))]
    for name, prompt in zip(list(live), prompts):
        engine.add_request(name, prompt, params)
    for step in range(6000):
        if not engine.has_unfinished_requests():
            return [tokens.get(f"r{i}") for i in range(len(prompts))]
        each(step, live)
        for answer in engine.step():
            if answer.finished:
                live.remove(answer.request_id)
                tokens[answer.request_id] = list(answer.outputs[0].token_ids)
    raise AssertionError(f"requests wait for ever: {live}")


class Events:
    """What happens to an engine at steps of its own: aborts, resets of the prefix cache, and lends of everything."""

    def __init__(self, llm, aborts, resets, lends):
        self.llm, self.aborts, self.resets, self.lends = llm, aborts, resets, lends
        self.page = engines.own_page()[1] if os.environ["VMEM_VLLM"] == "1" else None
        self.lent = 0

    def __call__(self, step, live):
        if self.aborts and step % 11 == 7:
            for name in [name for name in live if int(name[1:]) % ABORTED == 4][:1]:
                self.llm.llm_engine.abort_request([name])
                live.remove(name)
        if self.resets and step % 23 == 11:
            self.llm.llm_engine.reset_prefix_cache(reset_running_requests=False)
        if self.page is not None and self.lends:
            self.lend(step)

    def lend(self, step):
        from pyvmem.engine import control

        if self.page[control.LEND] and self.page[control.LENT]:
            self.page[control.LEND] = 0
            self.lent += 1
        elif step in (8, 30, 60):
            self.page[control.LEND] = 1


def serve(folder, connector, limits=(), turns=3, aborts=False, resets=False, lends=False, options=(), prompts=14):
    """Serve the same prompts `turns` times, and reset the device's prefix cache each time, so that prefixes are loaded.

    Returns all tokens, what the copies counted, and what the idle engine holds.
    """
    from vllm import SamplingParams

    copies = prepare(connector)
    llm = engines.make(folder, kv_transfer_config=connector, **dict(options))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    events, tokens = Events(llm, aborts, resets, lends), []
    with engines.limits_move(limits) as vmem:
        for _ in range(turns):
            tokens += drive(llm, engines.prompts_of(prompts, 250), params, events)
            engines.settle(llm)
            assert llm.reset_prefix_cache()
    told = dict(COUNTS, **(copies[0].counts if copies else {}))
    told.update(tokens=tokens, lent=events.lent)
    if vmem:
        told.update(engines.idle_state(llm, vmem[1]))
    return told


def serve_once(folder):
    """The tokens that vLLM gives to ten prompts without a connector."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return drive(engines.make(folder), engines.prompts_of(10, 250), params, lambda step, live: None)


class Fuzz:
    """Random requests, limits, lends, aborts, resets and sleeps; every token is compared with plain vLLM's.

    expected: of each prompt of `engines.prompts_of`, the tokens that plain vLLM gives without a connector.
    """

    CHANCES = dict(ask=0.3, limit=0.1, lend=0.02, abort=0.03, reset=0.03, preempt=0.02, sleep=0.015)

    def __init__(self, folder, connector, expected, seed, options):
        from pyvmem.engine import control

        prepare(connector)
        self.llm, self.neighbour = engines.make(folder, kv_transfer_config=connector, **options), None
        if os.environ.get("VMEM_VLLM_POOL"):
            from neighbour import Neighbour

            self.neighbour = Neighbour()
        self.expected, self.draw, self.did = expected, random.Random(seed), collections.Counter()
        self.prompts, self.live, self.engine = engines.prompts_of(len(expected), 250), {}, self.llm.llm_engine
        self.page, self.control = engines.own_page()[1], control
        self.least = self.page[control.LEAST] * self.page[control.BLOCK_BYTES]
        # There, vLLM 0.32 itself fails an assertion, if it then loads the prefix of a request that was preempted so.
        self.chances = {
            k: v for k, v in self.CHANCES.items() if k != "preempt" or OFFLOADING not in names_of(connector)
        }

    def run(self, steps):
        for _ in range(steps):
            for what, chance in self.chances.items():
                if self.draw.random() < chance:
                    getattr(self, what)()
            if self.draw.random() < 0.1:
                self.page[self.control.LEND] = 0
            self.step()
        self.drain()
        return dict(self.did, **COUNTS, **engines.idle_state(self.llm, self.page))

    def drain(self):
        """Serve to the end, while the limit moves."""
        self.page[self.control.LEND], end = 0, time.monotonic() + 120
        while self.live:
            if self.draw.random() < self.CHANCES["limit"]:
                self.limit()
            self.step()
            assert time.monotonic() < end, f"requests wait for ever: {self.live}"
        engines.settle(self.llm)

    def step(self):
        for answer in self.engine.step():
            if answer.finished and (prompt := self.live.pop(answer.request_id, None)) is not None:
                tokens = list(answer.outputs[0].token_ids)
                assert tokens == self.expected[prompt][: len(tokens)], (answer.request_id, prompt, dict(self.did))
                self.did["answers"] += 1

    def ask(self):
        from vllm import SamplingParams

        if len(self.live) < 12:
            self.did["asked"] += 1
            name, prompt = f"f{self.did['asked']}", self.draw.randrange(len(self.prompts))
            params = SamplingParams(temperature=0, max_tokens=self.draw.randrange(1, 17), ignore_eos=True)
            self.engine.add_request(name, self.prompts[prompt], params)
            self.live[name] = prompt

    def limit(self):
        self.page[self.control.LIMIT] = int(self.least * self.draw.choice([1, 1, 1.3, 2, 4, 20]))
        self.did["limits"] += 1

    def lend(self):
        self.page[self.control.LEND] = 1
        self.did["lends"] += 1

    def abort(self):
        if self.live:
            name = self.draw.choice(sorted(self.live))
            self.engine.abort_request([name])
            self.live.pop(name)
            self.did["aborted"] += 1

    def reset(self):
        self.did["reset"] += bool(self.llm.reset_prefix_cache())

    def preempt(self):
        with contextlib.suppress(RuntimeError):  # vLLM raises it if blocks are pinned or being loaded
            self.did["preempted"] += bool(self.llm.reset_prefix_cache(reset_running_requests=True))

    def sleep(self):
        """Have requests end, or keep them, and sleep. In a pool, a neighbour takes what a model that sleeps has."""
        keep = self.draw.random() < 0.5
        if keep:
            self.page[self.control.LEND] = 0
            self.llm.sleep(0, mode="keep")
            while self.engine.engine_core.engine_core.scheduler.has_requests():  # while blocks are loaded
                self.step()
        else:
            self.drain()
        self.llm.sleep(1, mode="keep" if keep else "abort")
        if self.neighbour is not None:
            self.neighbour.take(self.neighbour.pool.budget - (8 << 20))
            self.neighbour.give()
        self.llm.wake_up()
        self.did["slept"] += 1


def fuzz(folder, connector, expected, seed, steps, options):
    """What a `Fuzz` did."""
    return Fuzz(folder, connector, expected, seed, options).run(steps)


def serve_when_told(folder, pipes, options):
    """As `engines.serve_when_told`, with a connector. What its copies counted is told, too."""
    prepare(options["kv_transfer_config"])
    told = engines.serve_when_told(folder, pipes, options)
    return dict(told, **COUNTS)
