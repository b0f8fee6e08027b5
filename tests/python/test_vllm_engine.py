"""pyvmem.vllm without vLLM: layouts, settings, patches, what is refused, the worker's engine, and metrics."""

import dataclasses
import functools
import importlib
import inspect
import os
import re
import resource
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from vllm_standins import BlockPool, Gpu

from pyvmem.kv import KVCache, TensorSpec
from pyvmem.vllm import layout, metrics, patches, plugin, refuse, settings
from pyvmem.vllm.scheduler import PoolKeeper

TOKENS, PAGE, MOST = 8, 64 << 10, 96  # tokens of a block, and of a request at most
ROW = PAGE // TOKENS


# ---- layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["token", "block", "layer"])
def test_every_layer_has_bytes_of_its_own_and_slots_are_whole_blocks(kind):
    shape = layout.Layout(kind, layers=3, row=64, tokens=16)
    flat = torch.zeros(shape.tensors, 4 * 16 * shape.tensor_row, dtype=torch.int8)
    for layer in range(3):
        raw = flat[layer if shape.tensors > 1 else 0]
        view = layout.view(raw, shape, layer, torch.bfloat16, (4, 2, 16, 16), (0, 2, 1, 3))
        assert view.shape == (4, 2, 16, 16)
        assert (view == 0).all()
        view += layer + 1
        if kind != "block":  # tokens of successive blocks are a constant stride apart
            assert view.stride(0) == 16 * view.stride(2)
    assert shape.slot_tokens(100) % 16 == 0


def test_a_kernel_may_have_smaller_blocks_where_tokens_are_evenly_spaced():
    shape = layout.Layout("token", layers=2, row=64, tokens=32)
    flat = torch.zeros(4 * 32 * shape.tensor_row, dtype=torch.int8)
    whole = layout.view(flat, shape, 1, torch.bfloat16, (4, 2, 32, 16), (0, 2, 1, 3))
    halves = layout.view(flat, shape, 1, torch.bfloat16, (8, 2, 16, 16), (0, 2, 1, 3))
    whole.copy_(torch.arange(whole.numel()).view(whole.shape))
    assert (halves.transpose(1, 2).reshape(-1) == whole.transpose(1, 2).reshape(-1)).all()
    with pytest.raises(ValueError, match="16 tokens, vLLM's 32"):
        layout.view(flat, layout.Layout("block", 2, 64, 32), 1, torch.bfloat16, (8, 2, 16, 16), (0, 2, 1, 3))


@pytest.mark.parametrize("layers, row, base, tokens", [(32, 4096, 16, 16), (4, 2048, 16, 16), (2, 512, 16, 64),
                                                       (28, 2048, 16, 16), (1, 64, 16, 1024)])  # fmt: skip
def test_blocks_grow_to_whole_pages(layers, row, base, tokens):
    assert layout.block_tokens("token", layers, row, base) == tokens
    assert tokens * layers * row % PAGE == 0


# ---- settings, versions, refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name, text", [("VMEM_VLLM", "yes"), ("VMEM_VLLM_CACHE_TOKENS", "-1"),
                                        ("VMEM_VLLM_CACHE_TOKENS", "16k"), ("VMEM_VLLM_LAYOUT", "rows"),
                                        ("VMEM_VLLM_ATTENTION", "1")])  # fmt: skip
def test_a_wrong_setting_is_named(name, text):
    with pytest.raises(ValueError, match=f"{name}={text}"):
        settings.read({"VMEM_VLLM": "1", name: text})


@pytest.mark.parametrize("name", ["", "_FORCE", "_CACHE_TOKENS", "_SPARE_SLOTS", "_WAIT", "_LAYOUT", "_ATTENTION"])
@pytest.mark.parametrize("text", ["1\n2", "9" * 5000])
def test_a_wrong_setting_is_named_in_one_short_line(name, text):
    with pytest.raises(ValueError, match=f"^VMEM_VLLM{name}=(1 2|9+[.]{{3}}) must be ") as caught:
        settings.read({"VMEM_VLLM": "1", f"VMEM_VLLM{name}": text})
    assert len(str(caught.value)) < 150


def test_spaces_around_a_setting_do_not_count():
    spaced = dict(VMEM_VLLM=" 1", VMEM_VLLM_WAIT=" 5 ", VMEM_VLLM_LAYOUT="layer\n", VMEM_VLLM_CACHE_TOKENS=" ")
    assert settings.read(spaced) == settings.Settings(on=True, wait_seconds=5, layout="layer")


def test_unset_means_off():
    assert not settings.read({}).on
    assert settings.read({"VMEM_VLLM": "0", "VMEM_VLLM_CACHE_TOKENS": "16k"}) == settings.Settings()
    assert settings.read({"VMEM_VLLM": "1", "VMEM_VLLM_CACHE_TOKENS": "0"}).cache_tokens == 0


def test_an_unknown_version_is_refused_with_a_way_to_insist():
    with pytest.raises(patches.UnknownVersion, match="vLLM 9.9 must be 0.26.0; VMEM_VLLM_FORCE=1 tries it"):
        patches.install("9.9")


def test_builds_of_a_checked_version_for_other_cudas_are_that_version(monkeypatch):
    monkeypatch.setattr(patches, "PATCHES", ())
    patches.install(patches.CHECKED[0] + "+cu129")
    with pytest.raises(patches.UnknownVersion, match="vLLM 9.9[+]cu129 must be"):
        patches.install("9.9+cu129")


def test_the_extra_installs_a_checked_version():
    project = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert re.findall(r"vllm==([\w.*]+)", project) == [*patches.CHECKED]


def test_replacing_again_changes_nothing(monkeypatch):
    def decorated(function):
        return functools.wraps(function)(lambda *args: function(*args))

    module = types.ModuleType("decorated")
    module.shutdown = decorated(lambda self: None)
    monkeypatch.setitem(sys.modules, "decorated", module)
    monkeypatch.setattr(patches, "PATCHES", (patches.Patch("decorated", "shutdown", "shutdown", ("self",)),))
    patches.install(patches.CHECKED[0])
    replaced = module.shutdown
    patches.install(patches.CHECKED[0])
    assert module.shutdown is replaced
    assert replaced.vmem


def test_a_function_with_other_parameters_is_refused_before_any_is_replaced(monkeypatch):
    module = types.ModuleType("changed")
    module.shutdown, module.sleep = shutdown, sleep = lambda self: None, lambda self, level, tags: None
    monkeypatch.setitem(sys.modules, "changed", module)
    list_ = (("shutdown", ("self",)), ("sleep", ("self", "level")))
    monkeypatch.setattr(patches, "PATCHES", [patches.Patch("changed", name, name, takes) for name, takes in list_])
    with pytest.raises(
        patches.UnknownVersion, match=r"vLLM 9.9's changed.sleep takes \('self', 'level', 'tags'\), not"
    ):
        patches.install("9.9", force=True)
    assert module.shutdown is shutdown and module.sleep is sleep


def test_the_plugin_does_nothing_unless_it_is_switched_on(monkeypatch):
    monkeypatch.delenv("VMEM_VLLM", raising=False)
    monkeypatch.setenv("VMEM_VLLM_LAYOUT", "wrong")  # of no interest then
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it would fail
    plugin.register()


@pytest.mark.parametrize("before, after", [(None, "VMEM_"), ("MY_, OUR_", "MY_,OUR_,VMEM_"), ("VMEM_", "VMEM_")])
def test_vllm_copies_the_settings_to_its_workers_under_ray(before, after):
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    environ = {} if before is None else {name: before}
    plugin._copy_to_ray(environ)
    assert environ == {name: after}


@pytest.mark.parametrize("environment, text", [
    ({}, "pyvmem: VMEM_VLLM=1: vLLM 9.9 must be 0.26.0"),
    ({"VMEM_VLLM_FORCE": "1"}, "pyvmem: VMEM_VLLM=1: vLLM 9.9 lacks a function that vMem replaces"),
    ({"VMEM_VLLM_CACHE_TOKENS": "many"}, "pyvmem: VMEM_VLLM_CACHE_TOKENS=many"),
    ({"broken": "1"}, "pyvmem: VMEM_VLLM=1 failed in vLLM's plugin: OSError: no library"),
])  # fmt: skip
def test_what_is_asked_for_and_cannot_be_ends_vllm_with_one_line(monkeypatch, environment, text):
    for name, value in {"VMEM_VLLM": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    fake = types.ModuleType("vllm")
    fake.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "vllm", fake)
    if "broken" in environment:
        monkeypatch.setattr(patches, "install", lambda *_: (_ for _ in ()).throw(OSError("no\nlibrary")))
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda p: p.name)
def test_a_replacement_takes_what_vllm_gives_it_by_position_or_by_name(patch, monkeypatch):
    worker = importlib.import_module("pyvmem.vllm.worker")
    given = {name: object() for name in patch.parameters}
    takes = inspect.signature(getattr(worker, patch.by))
    takes.bind("original", *given.values())
    of = [given.pop("self")] if "self" in given else []
    takes.bind("original", *of, **given)  # by vLLM's names
    lines = [f"def original({', '.join(patch.parameters)}):", f"    return [{', '.join(patch.parameters)}]"]
    scope = {}
    exec("\n".join(lines), scope)
    replaced = patches._replacement(scope["original"], lambda original, *args, **named: original(*args, **named))
    assert replaced(*of, **given) == replaced(*of, *given.values()) == [*of, *given.values()]


class Backend:
    """FlashAttention's description of its KV cache."""

    @staticmethod
    def get_kv_cache_shape(blocks, tokens, heads, size, cache_dtype_str="auto"):
        return (blocks, heads, tokens, 2 * size)

    @staticmethod
    def get_kv_cache_stride_order():
        return (0, 2, 1, 3)


def start_engine(monkeypatch, layers=3, blocks=40, caching=True, **environment):
    """A worker's engine on the host backend, as `initialize_kv_cache` makes it; and its layers' views."""
    worker = importlib.import_module("pyvmem.vllm.worker")
    for name, text in {"VMEM_VLLM": "1", "VMEM_BACKEND": "host", **environment}.items():
        monkeypatch.setenv(name, text)
    spec = types.SimpleNamespace(block_size=16, page_size_bytes=16 * 4096, dtype=torch.float16, num_kv_heads=2,
                                 head_size=512)  # fmt: skip
    names = [f"layer{i}" for i in range(layers)]
    config = types.SimpleNamespace(
        num_blocks=blocks, kv_cache_tensors=[types.SimpleNamespace(shared_by=[n]) for n in names],
        kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec, layer_names=names)],
    )  # fmt: skip
    vllm_config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_seqs=4), num_speculative_tokens=0,
        model_config=types.SimpleNamespace(max_model_len=100),
        cache_config=types.SimpleNamespace(enable_prefix_caching=caching),
    )  # fmt: skip
    engine = worker.Engine(config, vllm_config, torch.device("cpu"), settings.read())
    monkeypatch.setattr(worker, "_current", engine)
    raw = worker.allocate_kv_cache(None, config, {}, "cpu")
    group = types.SimpleNamespace(kv_cache_spec=spec, kv_cache_group_id=0, backend=Backend,
                                  layer_names=[*names, "sharing"])  # fmt: skip
    views = worker.reshape_kv_cache(None, [group], raw, "auto", [16], {"sharing": names[0]}, config)
    assert views["sharing"] is views[names[0]]
    return engine, [views[n] for n in names]


@pytest.mark.parametrize("kind, tensors", [("block", 1), ("token", 1), ("layer", 3)])
def test_an_engine_backs_what_its_layers_write(monkeypatch, kind, tensors):
    engine, views = start_engine(monkeypatch, VMEM_VLLM_LAYOUT=kind)
    gpu = Gpu()
    engine.requests._fences = gpu
    assert (len(engine.cache.specs), engine.cache.page_size) == (tensors, PAGE)
    engine.requests.begin_step()
    table = engine.requests.start(0, [5, 6], 0)
    engine.requests.back()
    for layer, view in enumerate(views):
        for place in range(2):  # of the request's blocks; the table goes on
            view[table[place]] = 10 * layer + place
    engine.requests.begin_step()
    again = engine.requests.start(1, [5, 6, 7], 32)
    engine.requests.back()
    for layer, view in enumerate(views):
        for place in range(2):
            assert (view[again[place]] == 10 * layer + place).all()
    assert engine.cache.stats().attached_pages == 2 * 3 * (16 * 4096) // PAGE
    gpu.wait(gpu.marked)
    engine.close()


def test_an_engine_may_have_what_the_limit_and_the_device_leave(monkeypatch):
    engine, _ = start_engine(monkeypatch, caching=False)
    memory = importlib.import_module("pyvmem.vllm.memory")

    def sees(blocks):
        while engine.allowed_blocks() != blocks:  # a look of the engine's thread may have begun before
            engine.look()

    sees(40)
    engine.cache.set_budget(25 * 3 * 65536)
    sees(25)
    monkeypatch.setattr(memory, "MARGIN", 2**60)
    sees(0)  # nothing is held, and the device has nothing to spare
    engine.requests._fences = Gpu()
    engine.close()
    engine.requests.tend()


class Runner:
    """vLLM's runner, as far as `initialize_kv_cache` looks at it."""

    def __init__(self, vllm_config):
        self.vllm_config, self.device = vllm_config, torch.device("cpu")
        self.req_states, self.block_tables = types.SimpleNamespace(), types.SimpleNamespace()


def test_a_process_has_one_engine_until_its_runner_is_gone(monkeypatch):
    worker = importlib.import_module("pyvmem.vllm.worker")
    configs = []
    made = worker.Engine
    monkeypatch.setattr(worker, "Engine", lambda *given: configs.append(given) or made(*given))
    engine, _ = start_engine(monkeypatch)
    engine.requests._fences = Gpu()
    engine.close()
    (config, vllm_config, *_), = configs  # fmt: skip
    monkeypatch.setattr(refuse, "kv_cache", lambda _: None)
    runner = Runner(vllm_config)
    worker.initialize_kv_cache(lambda *_: None, runner, config)
    first = worker.current()
    first.requests._fences = Gpu()
    with pytest.raises(refuse.Refused, match="has an engine already; shut it down"):
        worker.initialize_kv_cache(lambda *_: None, Runner(vllm_config), config)
    assert worker.current() is first
    del runner
    worker.initialize_kv_cache(lambda *_: None, kept := Runner(vllm_config), config)
    assert first.closed
    assert worker.current() is kept.req_states.vmem
    kept.req_states.vmem.requests._fences = Gpu()
    kept.req_states.vmem.close()


def test_settings_beyond_the_addresses_are_refused_in_vllms_words(monkeypatch):
    with pytest.raises(refuse.Refused, match="65536.*: lower --max-num-seqs, --max-model-len or VMEM_VLLM_SPARE"):
        start_engine(monkeypatch, VMEM_VLLM_SPARE_SLOTS="1000000")


def test_addresses_that_the_process_may_not_have_are_refused_in_vllms_words(monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="utf-8") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 30), limits[1]))
    try:  # a slot of 4 MiB
        with pytest.raises(refuse.Refused, match="addresses.*: lower --max-num-seqs, --max-model-len or VMEM_VLLM_SP"):
            start_engine(monkeypatch, VMEM_VLLM_SPARE_SLOTS="4000")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_memory_of_the_cpu_is_refused_for_a_gpu():
    refuse.backend("host", "cpu")
    refuse.backend("stock", "cuda")
    with pytest.raises(refuse.Refused, match="VMEM_BACKEND=host"):
        refuse.backend("host", "cuda")


def test_shutting_down_gives_everything_back_in_a_process_that_lives_on(monkeypatch):
    worker = importlib.import_module("pyvmem.vllm.worker")
    engine, _ = start_engine(monkeypatch)
    engine.requests._fences = Gpu()
    calls = []
    runner = types.SimpleNamespace(req_states=types.SimpleNamespace(vmem=engine))
    worker.shutdown(calls.append, runner)
    assert calls == [runner]
    assert worker.current() is None
    with pytest.raises(ValueError, match="closed"):
        engine.cache.stats()
    worker.shutdown(calls.append, runner)  # again
    worker.shutdown(calls.append, types.SimpleNamespace())  # of an engine that never had a KV cache


def test_a_failure_of_the_background_thread_is_logged_once_and_it_goes_on(monkeypatch, caplog):
    engine, _ = start_engine(monkeypatch)
    engine.requests._fences = Gpu()
    looks = threading.Semaphore(0)
    monkeypatch.setattr(engine, "look", lambda: looks.release() or 1 / 0)
    for _ in range(4):
        assert looks.acquire(timeout=900)
    assert [r.message for r in caplog.records] == ["vMem: the background thread failed and goes on"]
    engine.close()


def configuration(**changes):
    parallel = types.SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1,
                                     prefill_context_parallel_size=1)  # fmt: skip
    made = types.SimpleNamespace(
        parallel_config=parallel, cache_config=types.SimpleNamespace(cache_dtype="auto"), kv_transfer_config=None,
        use_v2_model_runner=True, scheduler_config=types.SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=types.SimpleNamespace(enable_return_routed_experts=False, use_mla=False, is_hybrid=False,
                                           hf_text_config=types.SimpleNamespace(layer_types=["full_attention"] * 2)),
    )  # fmt: skip
    for path, value in changes.items():
        *owner, name = path.split("__")
        setattr(getattr(made, owner[0]) if owner else made, name, value)
    return made


class FullAttentionSpec:
    page_size_padded = None


class MambaSpec:
    pass


MIXED = types.SimpleNamespace(layer_types=["sliding_attention", "full_attention", "sliding_attention"])


def kv_config(groups=1, spec=FullAttentionSpec, shared=1):
    return types.SimpleNamespace(
        kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec()) for _ in range(groups)],
        kv_cache_tensors=[types.SimpleNamespace(shared_by=["layer"] * shared, block_stride=0)],
    )


@pytest.mark.parametrize(
    "changes, config, text",
    [
        ({"kv_transfer_config": object()}, {}, "KV connectors.*--kv-transfer-config and --kv-offloading-size"),
        ({"parallel_config__pipeline_parallel_size": 2}, {}, "pipeline parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, {}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, {}, "context parallelism"),
        ({"use_v2_model_runner": False}, {}, "model runner V2"),
        ({"speculative_config": types.SimpleNamespace(method="ngram"), "use_v2_model_runner": False}, {}, "n-grams"),
        ({"model_config__enable_return_routed_experts": True}, {}, "routed experts"),
        ({"model_config__use_mla": True}, {}, "MLA"),
        ({"model_config__is_hybrid": True}, {}, "Mamba"),
        ({"model_config__hf_text_config": MIXED}, {}, r"several kinds \(full_attention, sliding_attention\)"),
        ({"cache_config__cache_dtype": "int4_per_token_head"}, {}, "int4_per_token_head"),
        ({}, {"groups": 2}, "2 groups"),
        ({}, {"spec": MambaSpec}, "MambaSpec"),
        ({}, {"shared": 2}, "share a KV tensor"),
    ],
)
def test_what_cannot_work_is_refused_with_one_line(changes, config, text):
    with pytest.raises(refuse.Refused, match=text) as caught:
        refuse.settings(configuration(**changes))
        refuse.kv_cache(kv_config(**config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [
    {},
    {"model_config__hf_text_config": MIXED, "model_config__disable_sliding_window": True},
    {"model_config__hf_text_config": MIXED, "scheduler_config__disable_hybrid_kv_cache_manager": True},
    {"model_config__hf_text_config": object()},
    {"speculative_config": types.SimpleNamespace(method="eagle")},
])  # fmt: skip
def test_what_can_work_is_not_refused(changes):
    refuse.settings(configuration(**changes))
    refuse.kv_cache(kv_config())


def test_settings_are_refused_by_the_process_that_the_user_started():
    worker = importlib.import_module("pyvmem.vllm.worker")
    good, bad = configuration(), configuration(use_v2_model_runner=False)
    assert worker.create_engine_config(lambda args, usage, headless: good, "args", "usage", headless=False) is good
    with pytest.raises(refuse.Refused, match="model runner V2"):
        worker.create_engine_config(lambda args: bad, "args")


def test_settings_are_refused_before_a_runner_is_made():
    worker = importlib.import_module("pyvmem.vllm.worker")
    made = []
    with pytest.raises(refuse.Refused, match="model runner V2"):
        worker.init_device(made.append, types.SimpleNamespace(vllm_config=configuration(use_v2_model_runner=False)))
    assert not made
    worker.init_device(made.append, types.SimpleNamespace(vllm_config=configuration()))
    assert len(made) == 1


@dataclasses.dataclass(frozen=True)
class Spec:
    """The fields of vLLM's specs that are looked at."""

    block_size: int = 16
    sliding_window: int | None = None

    @property
    def page_size_bytes(self):
        return self.block_size * 2048


def specs_of(monkeypatch, *windows):
    """What `get_kv_cache_spec` makes of layers with these windows, None for full attention."""
    worker = importlib.import_module("pyvmem.vllm.worker")
    full, window = (type(n, (Spec,), {}) for n in ("FullAttentionSpec", "SlidingWindowSpec"))
    interface = types.ModuleType("vllm.v1.kv_cache_interface")
    interface.FullAttentionSpec = full
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", interface)
    monkeypatch.setenv("VMEM_VLLM", "1")
    made = {f"layer{i}": window(sliding_window=w) if w else full() for i, w in enumerate(windows)}
    return list(worker.get_kv_cache_spec(lambda runner: made, None).values())


@pytest.mark.parametrize("windows", [(None, None), (128, 128)])
def test_layers_with_one_window_keep_their_blocks_and_are_one_group(monkeypatch, windows):
    specs = specs_of(monkeypatch, *windows)
    assert {type(s).__name__ for s in specs} == {"FullAttentionSpec"}
    assert [s.sliding_window for s in specs] == list(windows)
    assert {s.page_size_bytes * len(specs) % PAGE for s in specs} == {0}


@pytest.mark.parametrize("windows", [(None, 128), (128, 256)])
def test_layers_with_several_windows_stay_several_groups(monkeypatch, windows):
    assert "SlidingWindowSpec" in {type(s).__name__ for s in specs_of(monkeypatch, *windows)}


def test_the_pool_keeper_holds_back_no_more_than_one_request_needs():
    keeper = PoolKeeper(BlockPool(50), least=10, allowed=lambda: 3)
    keeper.before_schedule()
    assert keeper.held_back == 50 - 11


def test_an_idle_scheduler_keeps_to_the_cap_though_its_workers_are_processes_of_their_own():
    worker = importlib.import_module("pyvmem.vllm.worker")
    pool = BlockPool(50)
    keeper = pool.vmem = PoolKeeper(pool, cap=3)
    blocks = pool.get_new_blocks(10)
    for block in blocks:
        pool.cache(block, block.block_id)
    keeper.before_schedule()  # the next look is due in a while
    worker.free_blocks(BlockPool.free_blocks, pool, blocks)
    scheduler = types.SimpleNamespace(kv_cache_manager=types.SimpleNamespace(block_pool=pool),
                                      has_unfinished_requests=lambda: False)  # fmt: skip
    assert worker.update_from_output(lambda *_: "outputs", scheduler, None, None) == "outputs"
    assert len(pool.cached) == 3
    assert len(keeper.take_forgotten()) == 7  # the step that says which requests have ended takes them along


# ---- metrics ----------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def small_cache(name):
    return KVCache([TensorSpec("kv", (ROW,), torch.uint8)], 2, 64, 8 * PAGE, backend="host", page_size=PAGE, name=name)


def test_metrics_are_of_this_servers_caches(runtime):
    with small_cache("vllm") as cache, small_cache("another"):
        (view,) = metrics.own_views()
        assert view.stats["budget_pages"] == cache.stats().budget_pages == 8
        assert metrics.own_views(2**30) == []
        assert len(metrics.own_views(os.getppid())) == 1


def test_workers_limits_reach_a_scheduler_in_another_process(runtime):
    worker = importlib.import_module("pyvmem.vllm.worker")
    spec = types.SimpleNamespace(page_size_bytes=PAGE)
    config = types.SimpleNamespace(num_blocks=100, kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec)],
                                   kv_cache_tensors=[None, None])  # fmt: skip
    assert worker.allowed_blocks(config) is None
    with small_cache("vllm"), small_cache("vllm") as second:  # of 8 pages each
        assert worker.allowed_blocks(config) == 4
        second.set_budget(6 * PAGE)
        assert worker.allowed_blocks(config) == 3
        config.num_blocks = 2
        assert worker.allowed_blocks(config) == 2


def test_metrics_of_one_of_several_api_servers_are_those_of_the_server(runtime, monkeypatch):
    found = []
    monkeypatch.setattr(metrics, "own_views", lambda pid: found.append(pid) or [])
    core = types.ModuleType("prometheus_client.core")
    core.CounterMetricFamily = core.GaugeMetricFamily = None
    monkeypatch.setitem(sys.modules, "prometheus_client", types.ModuleType("prometheus_client"))
    monkeypatch.setitem(sys.modules, "prometheus_client.core", core)
    metrics.Collector().collect()
    monkeypatch.setattr("multiprocessing.parent_process", lambda: types.SimpleNamespace(pid=7))
    metrics.Collector().collect()
    assert found == [os.getpid(), 7]


def test_every_registry_that_vllm_serves_has_the_collector_once(runtime, monkeypatch):
    worker = importlib.import_module("pyvmem.vllm.worker")
    client = types.ModuleType("prometheus_client")
    client.REGISTRY = types.SimpleNamespace(collectors=[])
    another = types.SimpleNamespace(collectors=[])
    for registry in (client.REGISTRY, another):
        registry.register = registry.collectors.append
    monkeypatch.setitem(sys.modules, "prometheus_client", client)
    metrics.register()
    for registry in (client.REGISTRY, another, another):
        assert worker.get_prometheus_registry(lambda: registry) is registry
        assert [type(c) for c in registry.collectors] == [metrics.Collector]


def test_metrics_come_with_vllms_own(runtime):
    core = pytest.importorskip("prometheus_client")
    registry = core.CollectorRegistry()
    registry.register(metrics.Collector())
    with small_cache("vllm"):
        labels = {"pid": str(os.getpid()), "device": "host:0"}
        assert registry.get_sample_value("vllm:vmem_kv_budget_pages", labels) == 8
        assert registry.get_sample_value("vllm:vmem_kv_steps_total", labels) == 0
    assert registry.get_sample_value("vllm:vmem_kv_budget_pages", labels) is None
