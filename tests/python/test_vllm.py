"""Parts of vLLM on vMem that need no vLLM: settings, the control page, where blocks lie, and their pages."""

import asyncio
import collections
import json
import multiprocessing
import os
import random
import subprocess
import sys
import types

import pytest
import torch
from kv_caches import run_top

from pyvmem import Context, InvalidArgument, KVPool
from pyvmem.blocks import BOARD_WORDS, BlockRange, Blocks
from pyvmem.engine import control, pool_policy, pools
from pyvmem.engine import memory as pages
from pyvmem.engine import settings as engine_settings
from pyvmem.engine.memory import context_on
from pyvmem.engine.settings import Refused
from pyvmem.vllm import http, layout, mixins, open_pool, plugin

PAGE = 64 << 10


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


# ---- settings -------------------------------------------------------------------------------------------------------


def test_settings_are_off_unless_asked_for():
    assert plugin.settings({}) == plugin.settings({})
    assert plugin.settings({"VMEM_VLLM": "0", "VMEM_VLLM_LIMIT": "much"}) == plugin.settings({})


def test_sizes():
    def read(text):
        return plugin.settings({"VMEM_VLLM": "1", "VMEM_VLLM_LIMIT": text}).limit

    assert [read(t) for t in ("4096", "16G", "1.5M", "2 GiB", "3kb")] == [4096, 16 << 30, 3 << 19, 2 << 30, 3072]


@pytest.mark.parametrize(
    "name, text, must",
    [
        ("VMEM_VLLM", "yes", "0 or 1"),
        ("VMEM_VLLM_LIMIT", "-1", "a size in bytes, such as 16G"),
        ("VMEM_VLLM_MIN", "1G2", "a size in bytes, such as 16G"),
        ("VMEM_VLLM_LIMIT", "999999999999T", "at most 1048576T"),
        ("VMEM_VLLM_PRIORITY", "1" * 40, f"a whole number from 0 to {engine_settings.MOST}"),
        ("VMEM_VLLM_PRIORITY", "\u0663", f"a whole number from 0 to {engine_settings.MOST}"),
        ("VMEM_VLLM_LAYOUT", "token", "one of auto, vllm"),
        ("VMEM_VLLM_PAGE_SIZE", "3M", "a power of two, such as 256K"),
        ("VMEM_VLLM_PAGE_SIZE", "0", "a power of two, such as 256K"),
        ("VMEM_VLLM_PAGE_SIZE", "large", "a size in bytes, such as 16G"),
        ("VMEM_VLLM_POOL_SIZE", "0", "at least 1"),
    ],
)
def test_wrong_settings_name_the_variable(name, text, must):
    with pytest.raises(ValueError, match=f"^{name}=.* must be {must}$"):
        plugin.settings({"VMEM_VLLM": "1", name: text})


@pytest.mark.parametrize("given, told", [
    (dict(VMEM_VLLM_MIN="2G", VMEM_VLLM_MAX="1G"), "VMEM_VLLM_MIN=2G must be at most VMEM_VLLM_MAX=1G"),
    (dict(VMEM_VLLM_LIMIT="2G", VMEM_VLLM_MAX="1G"), "VMEM_VLLM_LIMIT=2G must be at most VMEM_VLLM_MAX=1G"),
    (dict(VMEM_VLLM_POOL="a", VMEM_VLLM_MIN="2G", VMEM_VLLM_LIMIT="1G"),
     "VMEM_VLLM_MIN=2G must be at most VMEM_VLLM_LIMIT=1G"),
    (dict(VMEM_VLLM_POOL="a", VMEM_VLLM_MIN="2G", VMEM_VLLM_LIMIT="0"),
     "VMEM_VLLM_MIN=2G must be at most VMEM_VLLM_LIMIT=0"),
    (dict(VMEM_VLLM_POOL_SIZE="2G"), "VMEM_VLLM_POOL_SIZE is set, but VMEM_VLLM_POOL names no pool"),
    (dict(VMEM_VLLM_MIN="2G"), "VMEM_VLLM_MIN is set, but VMEM_VLLM_POOL names no pool"),
    (dict(VMEM_VLLM_PRIORITY="1"), "VMEM_VLLM_PRIORITY is set, but VMEM_VLLM_POOL names no pool"),
    (dict(VMEM_VLLM_POOL="a", VMEM_VLLM_POOL_SIZE="1G", VMEM_VLLM_MIN="2G"),
     "VMEM_VLLM_MIN=2G must be at most VMEM_VLLM_POOL_SIZE=1G"),
])  # fmt: skip
def test_settings_that_contradict_each_other(given, told):
    with pytest.raises(ValueError, match=told):
        plugin.settings(dict(given, VMEM_VLLM="1"))
    fits = dict(VMEM_VLLM_LIMIT="2G", VMEM_VLLM_MAX="2G", VMEM_VLLM_POOL="a", VMEM_VLLM_POOL_SIZE="2G")
    plugin.settings(dict(given, VMEM_VLLM="1", **fits))


def test_a_name_that_is_no_setting_is_not_ignored():
    with pytest.raises(ValueError, match="^VMEM_VLLM_LIMITS is not a setting of vMem's: .* VMEM_VLLM_LIMIT,"):
        plugin.settings({"VMEM_VLLM": "1", "VMEM_VLLM_LIMITS": "16G"})
    plugin.settings({"VMEM_VLLM": "0", "VMEM_VLLM_LIMITS": "16G"})


@pytest.mark.parametrize(
    "name, meant",
    [("VMEM_LIMIT", "VMEM_VLLM_LIMIT"), ("VMEM_VLLMLIMIT", "VMEM_VLLM_LIMIT"), ("VMEM_VLM_POOL", "VMEM_VLLM_POOL")],
)
def test_a_name_that_is_nearly_a_setting_is_not_ignored(name, meant):
    with pytest.raises(ValueError, match=f"^{name} is not a setting of vMem's: {meant} may be meant$"):
        plugin.settings({"VMEM_VLLM": "1", name: "16G"})
    others = ("VMEM_BACKEND", "VMEM_DEBUG", "VMEM_CHECK", "VMEM_SGLANG", "VMEM_SGLANG_POOL_SIZE")
    assert plugin.settings(dict.fromkeys(others, "1") | {"VMEM_VLLM": "1"}).on


# ---- the plugin -----------------------------------------------------------------------------------------------------


def test_the_plugin_is_silent_unless_asked_for(monkeypatch):
    monkeypatch.delenv("VMEM_VLLM", raising=False)
    assert plugin.platform() is None


@pytest.mark.parametrize("on", ["0", "1"])
def test_names_that_mean_nothing_are_worth_one_line(monkeypatch, caplog, on):
    for name in ("VMEM_CHECK", "VMEM_BACKEND", "VMEM_SGLANG_POOL", "VMEM_TEST_BACKENDS"):
        monkeypatch.setenv(name, "host")
    monkeypatch.setenv("VMEM_VLLM", on)
    plugin.platform()
    assert not caplog.records
    monkeypatch.setenv("VMEM_MEMORY", "16G")
    plugin.platform()
    monkeypatch.setenv("VMEM_DEBUG", "1")
    plugin.platform()
    assert [r.getMessage() for r in caplog.records] == [
        "vMem has no setting of this name: VMEM_MEMORY",
        "vMem has no setting of these names: VMEM_DEBUG, VMEM_MEMORY",
    ]


@pytest.mark.parametrize("middleware", [http.Limits, http.Serve])
def test_a_server_that_loads_no_plugin_of_vmems_does_not_start(monkeypatch, middleware):
    """As with VLLM_PLUGINS=other: its middleware is then the only part of vMem that vLLM loads."""
    chosen = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=chosen))
    monkeypatch.setenv("VMEM_VLLM", "0")
    middleware(None)
    monkeypatch.setenv("VMEM_VLLM", "1")
    with pytest.raises(Refused, match="VMEM_VLLM=1: .* add vmem to VLLM_PLUGINS if that is set"):
        middleware(None)


@pytest.mark.parametrize(
    "words, port",
    [
        ("vllm serve m --port 9001", 9001),
        ("vllm serve m --port=9001 --port2 5", 9001),
        ("vllm serve m", 8000),
        ("python -m vllm.entrypoints.openai.api_server", 8000),
        ("ray serve m", 0),  # the command of another
        ("vllm bench m", 0),
        ("vllm serve m --port 123456", 8000),
    ],
)
def test_the_port_of_the_server_that_started_an_engine(monkeypatch, words, port):
    pytest.importorskip("torch")
    from pyvmem.vllm import scheduler

    with subprocess.Popen(["sh", "-c", "echo; read end", *words.split()], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as server:  # fmt: skip
        server.stdout.readline()  # its command line is its own
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: server)
        assert scheduler._port_of_server() == port
        server.stdin.close()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    assert scheduler._port_of_server() == 0


def test_weights_of_another_process_are_refused_in_a_pool(monkeypatch):
    ipc = config(load_config=types.SimpleNamespace(load_format="ipc_cache"))
    monkeypatch.setenv("VMEM_VLLM", "1")
    plugin.check_config(ipc)
    monkeypatch.setenv("VMEM_VLLM_POOL", "gpu0")
    monkeypatch.setenv("VMEM_VLLM_WEIGHTS", "1")
    plugin.check_config(config(load_config=types.SimpleNamespace(load_format="auto")))
    with pytest.raises(Refused, match="VMEM_VLLM_WEIGHTS=1 .* --load-format ipc_cache .*unset VMEM_VLLM_WEIGHTS"):
        plugin.check_config(ipc)


def test_ray_serve_llms_own_ingress_is_refused_for_models_that_sleep(monkeypatch):
    for name, value in (("", "1"), ("_POOL", "p"), ("_POOL_SIZE", "1G")):
        monkeypatch.setenv(f"VMEM_VLLM{name}", value)
    monkeypatch.setitem(sys.modules, plugin.RAY_LLM, types.ModuleType("engine"))
    plugin.check_config(config())  # its weights are not in the pool, so it never sleeps for others
    monkeypatch.setenv("VMEM_VLLM_WEIGHTS", "1")
    with pytest.raises(ValueError, match="a sleeping model would wait for ever; start the servers by"):
        plugin.check_config(config())
    monkeypatch.setenv(plugin.RAY_DIRECT, "1")
    plugin.check_config(config())


@pytest.mark.parametrize("name", ["VMEM_VLLM_POOL", "VMEM_VLM", "VMEM_LIMIT", "VMEM_VLLMLIMIT"])
@pytest.mark.parametrize("value, warns", [(None, True), ("", True), ("0", False)])
def test_settings_without_the_switch_are_worth_a_line(monkeypatch, caplog, name, value, warns):
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VMEM_VLLM", value or "")
    if value is None:
        monkeypatch.delenv("VMEM_VLLM")
    plugin.platform()
    said = [r.getMessage() for r in caplog.records]
    assert said == [f"{name} has no effect, because VMEM_VLLM is not 1: vLLM runs without vMem"] * warns


def test_the_plugin_names_the_platform_and_has_settings_copied(monkeypatch):
    monkeypatch.setenv("VMEM_VLLM", "1")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "MINE_")
    assert plugin.platform() == "pyvmem.vllm.platform.Platform" == plugin.platform()
    assert os.environ["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] == "MINE_,VMEM_"


def test_with_a_wrong_setting_vllm_does_not_start_with_its_own_cache(monkeypatch):
    """The platform raises it, as an exception that a program which embeds vLLM can catch."""
    monkeypatch.setenv("VMEM_VLLM", "maybe")
    assert plugin.platform() == "pyvmem.vllm.platform.Platform"


def test_names_of_classes_carry_the_engine():
    name = mixins.name_of("Worker", "abc", "vllm.v1.worker.gpu_worker.Worker")
    assert name == "pyvmem.vllm.mixins.Worker__abc__vllm__v1__worker__gpu_worker__Worker"
    assert mixins.engine_of(name) == "abc" and mixins.engine_of("vllm.v1.worker.gpu_worker.Worker") is None
    for wrong in ("__main__.Worker", "a._b.C", "a.b__c.D"):
        with pytest.raises(ValueError, match="it must not contain __, nor begin or end with _"):
            mixins.name_of("Worker", "abc", wrong)


@pytest.fixture
def mixed_in():
    """A worker with the mixin, whose base class and memory write down what they are told."""
    told = []

    def write(what):
        return lambda *args: told.append((what, *args))

    names = ("sleep", "discard", "wake_up")
    base = type("Base", (), {name: (lambda self, *args, n=name: told.append((n, *args))) for name in names})
    made = type("Worker", (mixins.WorkerMixin, base), {})()

    def wake(weights, blocks):
        told.append(("pages come", weights, blocks))
        return True

    made._vmem = types.SimpleNamespace(falls_asleep=write("sleep begins"), sleep=write("pages go"),
                                       drop=write("blocks go"), wake=wake, weights=None)  # fmt: skip
    return made, told


def test_sleep_and_discard_give_up_the_kv_cache(mixed_in):
    made, told = mixed_in
    made.sleep(1)
    made.wake_up(["weights"])
    made.wake_up(["kv_cache"])
    made.discard(("weights",))
    made.discard(("kv_cache",))
    assert told == [("sleep begins",), ("sleep", 1), ("pages go", 1), ("pages come", True, False),
                    ("wake_up", ["weights"]), ("pages come", False, True), ("wake_up", ["kv_cache"]),
                    ("discard", ("weights",)), ("discard", ("kv_cache",)), ("blocks go",)]  # fmt: skip


def test_only_a_wake_for_a_server_does_not_wait_for_the_copies_of_the_weights(mixed_in):
    """vLLM waits for the device in `wake_up`, and in other calls, by a method of the worker."""
    made, told = mixed_in
    base = type(made).__mro__[2]
    base.wake_up = lambda self, tags: self.synchronize_device()
    base.synchronize_device = lambda self: told.append("waits")
    made._vmem.try_to_wake, made._vmem.sleep_again = lambda: None, lambda: None

    def waits(call):
        told.clear()
        call()
        return "waits" in told

    assert waits(made.wake_up) and made.vmem_wake() and not waits(made.wake_up)
    assert waits(made.wake_up) and waits(made.synchronize_device)
    assert made.vmem_wake() and waits(made.synchronize_device) and not waits(made.wake_up)
    made.vmem_wake()
    made.vmem_sleep_again()
    assert waits(made.wake_up)
    made._vmem.try_to_wake = lambda: MemoryError("none")
    assert not made.vmem_wake() and waits(made.wake_up)


@pytest.mark.parametrize("pooled", [True, False])
def test_memory_for_activations_stays_when_vllm_empties_torchs_cache_at_a_wake(mixed_in, monkeypatch, pooled):
    """To free it, the driver would also wait for the copies of the weights. vLLM's own weights may need the memory."""
    made, told = mixed_in
    made._vmem.weights = object() if pooled else None
    emptied = []

    def fails(self, tags):
        torch.accelerator.empty_cache()
        torch.cuda.empty_cache()
        raise RuntimeError("vLLM cannot wake")

    for module in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(module, "empty_cache", lambda: emptied.append("emptied"))
    type(made).__mro__[2].wake_up = fails
    with pytest.raises(RuntimeError, match="cannot wake"):
        made.wake_up()
    assert len(emptied) == (0 if pooled else 2)
    emptied.clear()
    torch.accelerator.empty_cache()
    torch.cuda.empty_cache()
    assert len(emptied) == 2


def test_a_neighbour_that_grows_during_a_sleep_ends_no_engine_of_a_pool(mixed_in, monkeypatch):
    """vLLM asserts that the device has no less free memory after a sleep than before."""
    made, told = mixed_in

    def fails(self, level):
        raise AssertionError("Memory usage increased after sleeping.")

    monkeypatch.setattr(type(made).__mro__[2], "sleep", fails)
    with pytest.raises(AssertionError):
        made.sleep(1)
    monkeypatch.setenv("VMEM_VLLM", "1")
    monkeypatch.setenv("VMEM_VLLM_POOL", "gpu0")
    told.clear()
    made.sleep(1)
    assert told == [("sleep begins",), ("pages go", 1)]


@pytest.mark.parametrize("sampled", ["in the same call", "by the worker", "elsewhere"])
def test_a_step_ends_when_its_drafts_have_been_made(sampled):
    told, own = [], "own" if sampled == "in the same call" else None

    class Base:
        def execute_model(self, step):
            told.append(f"runs {step}")
            return own

        def sample_tokens(self, grammar):
            told.append("samples")
            return grammar

    made = type("Worker", (mixins.WorkerMixin, Base), {})()
    made._vmem = types.SimpleNamespace(begin=lambda step: step, end=lambda step: told.append(f"ended {step}"))
    assert made.execute_model(1) == own
    if sampled == "by the worker":
        assert made.sample_tokens("g") == "g"
    assert made.execute_model(2) == own
    then = {"in the same call": ["ended 1", "runs 2", "ended 2"], "by the worker": ["samples", "ended 1", "runs 2"],
            "elsewhere": ["ended 1", "runs 2"]}  # fmt: skip
    assert told == ["runs 1", *then[sampled]]


def test_a_worker_without_memory_for_its_blocks_does_not_wake_by_half(mixed_in):
    made, told = mixed_in
    made._vmem.wake = lambda *parts: (_ for _ in ()).throw(MemoryError("none"))
    with pytest.raises(MemoryError):
        made.wake_up(None)
    assert told == []
    made._vmem.wake = lambda *parts: False  # another worker says it
    made.wake_up(None)
    assert told == []


def test_a_wake_in_vain_is_answered_and_not_raised(worker, mixed_in, monkeypatch):
    """vLLM logs the traceback of an error in each of its processes, and for each attempt."""
    import asyncio

    from pyvmem import OutOfMemory
    from pyvmem.sleep.pages import ServerPages
    from pyvmem.vllm import http

    made, told = mixed_in
    asked = []

    class Client:
        async def collective_rpc(self, method):
            asked.append((method, getattr(made, method)()))

        async def wake_up(self):
            asked.append(("wake_up", made.wake_up()))

    state, serve = types.SimpleNamespace(engine_client=Client()), object.__new__(http.Serve)
    page = worker.page
    serve.pages = ServerPages(lambda: 0, 0, lambda: ("", 0))
    serve.pages.mine, page[control.RANKS_USED] = [page], 1
    worker._backs = True

    def back(ids, wait):
        if not worker._backs:
            raise OutOfMemory(12, "no room")

    monkeypatch.setattr(worker, "_back", back)
    made._vmem = worker
    worker.sleep()
    worker._backs = False
    asyncio.run(serve.wake(state))
    assert asked == [("vmem_wake", False)] and page.asleep and serve.pages.is_wake_in_vain()
    worker._backs = True
    asyncio.run(serve.wake(state))
    assert [method for method, _ in asked] == ["vmem_wake", "vmem_wake", "wake_up"]
    assert asked[1][1] and not page.asleep and not serve.pages.is_wake_in_vain()
    asyncio.run(serve.sleep_again(state))
    assert page.asleep


@pytest.mark.parametrize(
    "path, ranks, moe, adapters, queued",
    [
        ("/v1/completions", 1, True, None, True),
        ("/v1/completions", 2, False, None, True),
        ("/v1/completions", 2, True, None, False),  # a rank that has not resumed would not hear of it
        ("/v1/completions", 1, False, object(), False),  # one may be loaded into a model that sleeps on
        ("/pause", 1, False, None, False),
        ("/v1/responses", 1, False, None, False),  # may go on when its answer has ended, so that nobody counts it
    ],
)
def test_requests_come_to_vllm_while_it_wakes_where_it_only_queues_them(path, ranks, moe, adapters, queued):
    serve, made = object.__new__(http.Serve), config(parallel_config__data_parallel_size=ranks)
    made.model_config.is_moe, made.lora_config = moe, adapters
    state = types.SimpleNamespace(engine_client=types.SimpleNamespace(vllm_config=made))
    assert serve.queues(state, path) == queued


def config(**changes):
    parallel = types.SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                                     tensor_parallel_size=1, pipeline_parallel_size=1,
                                     distributed_executor_backend="mp", enable_elastic_ep=False)  # fmt: skip
    attention = types.SimpleNamespace(hisparse_config=None)
    model = types.SimpleNamespace(is_hybrid=False, is_attention_free=False, enable_sleep_mode=False)
    made = types.SimpleNamespace(parallel_config=parallel, attention_config=attention, kv_transfer_config=None,
                                 cache_config=None, model_config=model,
                                 device_config=types.SimpleNamespace(device_type="cuda"))  # fmt: skip
    for path, value in changes.items():
        *owners, last = path.split("__")
        owner = made
        for name in owners:
            owner = getattr(owner, name)
        setattr(owner, last, value)
    return made


def transfer(name, module=None, buffer="cuda", **more):
    return dict(kv_transfer_config=types.SimpleNamespace(
        kv_connector=name, kv_connector_extra_config=more, kv_connector_module_path=module,
        kv_buffer_device=buffer))  # fmt: skip


def multi(*names, **more):
    return transfer("MultiConnector", connectors=[dict(kv_connector=name, **more) for name in names])


CHUNKS = dict(kv_connector_extra_config=dict(blocks_per_chunk=2))
OFFLOADED = dict(cache_config=types.SimpleNamespace(kv_offloading_size=1, kv_offloading_backend="native"))
EXTERNAL = dict(parallel_config__distributed_executor_backend="external_launcher")


@pytest.mark.parametrize(
    "changes, says",
    [
        (transfer("HF3FSKVConnector"), "HF3FSKVConnector: it reads .*; choose another"),
        (transfer("MyConnector"), "MyConnector: it has not been tried"),
        (transfer("MyConnector", module="mine"), "MyConnector of mine is not vLLM's own"),
        (transfer("ExampleConnector", module="mine"), "ExampleConnector of mine is not vLLM's own"),
        (transfer("NixlConnector", module="mine"), "NixlConnector of mine is not vLLM's own"),
        (dict(OFFLOADED, **transfer(None, module="mine")), "OffloadingConnector of mine is not vLLM's own"),
        (dict(OFFLOADED, **transfer("ExampleConnector", spec_name="Mine")), "OffloadingConnector with spec_name"),
        (transfer("MultiConnector", connectors=["MyConnector"]), "MyConnector: it has not been tried"),
        (transfer("MultiConnector", connectors="ExampleConnector"), "MultiConnector: it has not been tried"),
        (multi("MyConnector", kv_connector_extra_config="none"), "MyConnector: it has not been tried"),
        (transfer("OffloadingConnector", blocks_per_chunk=2), "OffloadingConnector with blocks_per_chunk"),
        (multi("OffloadingConnector", **CHUNKS), "OffloadingConnector with blocks_per_chunk"),
        (multi("OffloadingConnector", "OffloadingConnector"), "two OffloadingConnectors"),
        (multi("ExampleConnector", "DecodeBenchConnector"), "DecodeBenchConnector: it fills"),
        (transfer("LMCacheConnectorV1", **{"lmcache.enable_pd": True}), "LMCacheConnectorV1 with enable_pd"),
        (dict(transfer("ExampleConnector"), model_config__is_hybrid=True), "Mamba's states"),
        (
            dict(transfer("NixlConnector"), model_config__enable_sleep_mode=True),
            "NixlConnector registers KV memory.* --enable-sleep-mode",
        ),
        (dict(parallel_config__decode_context_parallel_size=2), "context parallelism"),
        (dict(attention_config__hisparse_config=1), "HiSparse"),
        (dict(parallel_config__enable_elastic_ep=True), "--enable-elastic-ep"),
        (dict(EXTERNAL, parallel_config__tensor_parallel_size=2), "external launcher .* --tensor-parallel-size"),
        (dict(EXTERNAL, parallel_config__pipeline_parallel_size=2), "external launcher .* --pipeline-parallel-size"),
    ],
)
def test_refusals_say_what_to_do(changes, says):
    for fine in ({}, EXTERNAL, dict(parallel_config__tensor_parallel_size=2), OFFLOADED, transfer(None)):
        plugin.check_config(config(**fine))
    with pytest.raises(Refused, match=f"^VMEM_VLLM=1: .*{says}.*unset VMEM_VLLM.$"):
        plugin.check_config(config(**changes))


def cached(tokens, **more):
    fine = dict(user_specified_block_size=False, prefix_match_unit=None, kv_cache_dtype_skip_layers=[],
                kv_offloading_size=None, kv_offloading_backend="native", num_gpu_blocks_override=None,
                prefix_cache_retention_interval=0)  # fmt: skip
    return types.SimpleNamespace(block_size=tokens, **{**fine, **more})


@pytest.mark.parametrize(
    "tokens, changes, chosen",
    [
        (16, {}, 64),
        (32, {}, 64),
        (48, {}, 48),  # 64 is no multiple
        (128, {}, 128),
        (16, dict(cache_config=cached(16, kv_offloading_size=1)), 64),
        (16, transfer("OffloadingConnector"), 64),
        (16, transfer("LMCacheConnectorV1"), 16),
        (16, multi("OffloadingConnector", "ExampleConnector"), 16),
        (16, dict(cache_config=cached(16, user_specified_block_size=True)), 16),
        (16, dict(cache_config=cached(16, prefix_match_unit=16)), 16),
        (16, dict(cache_config=cached(16, kv_cache_dtype_skip_layers=["0"])), 16),
        (16, dict(cache_config=cached(16, num_gpu_blocks_override=1000)), 16),
        (16, dict(cache_config=cached(16, prefix_cache_retention_interval=1040)), 16),
        (16, dict(model_config__is_hybrid=True), 16),
        (16, dict(model_config__is_attention_free=True), 16),
        (16, dict(device_config__device_type="cpu"), 16),
        (16, dict(kv_events_config=types.SimpleNamespace(enable_kv_cache_events=True)), 16),
        (16, dict(kv_events_config=types.SimpleNamespace(enable_kv_cache_events=False)), 64),
    ],
)
def test_blocks_are_larger_in_a_pool_unless_somebody_chose_or_counts_them(monkeypatch, tokens, changes, chosen):
    made = config(**{**dict(cache_config=cached(tokens), kv_events_config=None), **changes})
    monkeypatch.setenv("VMEM_VLLM", "1")
    assert plugin.tokens_of_block(made) == tokens
    monkeypatch.setenv("VMEM_VLLM_POOL", "gpu")
    monkeypatch.setenv("VMEM_VLLM_POOL_SIZE", "8G")
    assert plugin.tokens_of_block(made) == chosen


@pytest.mark.parametrize("name", ["ExampleConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1"])
def test_connectors_that_copy_blocks_are_taken(name):
    for chosen in (transfer(name), multi(name, "OffloadingConnector")):
        plugin.check_config(config(**chosen))
        assert plugin.registrar(config(**chosen)) == ""


@pytest.mark.parametrize("name", ["NixlConnector", "MooncakeConnector", "MooncakeStoreConnector", "LMCacheMPConnector"])
@pytest.mark.parametrize("setting", ["LIMIT=1G", "MAX=1G", "WEIGHTS=1", "SLEEP=keep"])
def test_an_engine_whose_kv_memory_is_registered_has_no_limits(monkeypatch, name, setting):
    for chosen in (transfer(name), multi("ExampleConnector", name)):
        plugin.check_config(config(**chosen))
        assert plugin.registrar(config(**chosen)) == name
    setting, value = setting.split("=")
    monkeypatch.setenv(f"VMEM_VLLM_{setting}", value)
    monkeypatch.setenv("VMEM_VLLM", "1")
    if setting in ("WEIGHTS", "SLEEP"):
        monkeypatch.setenv("VMEM_VLLM_POOL", "p")
        setting = "POOL"
    with pytest.raises(Refused, match=f"{name} registers KV memory, which then stays; unset VMEM_VLLM_{setting} "):
        plugin.check_config(config(**transfer(name)))


def test_buffers_of_the_host_are_registered_in_the_place_of_kv_memory():
    staged = transfer("NixlConnector", buffer="cpu")
    assert plugin.registrar(config(**staged)) == ""
    assert plugin.registrar(config(**staged, device_config__device_type="cpu")) == "NixlConnector"


@pytest.mark.parametrize("text", ["enable_blending: true", "enable_blending : True # so", "enable_blending: 1",
                                  '"enable_blending": yes', "{enable_blending: true}"])  # fmt: skip
def test_settings_in_lmcaches_file_are_read(monkeypatch, tmp_path, text):
    pytest.importorskip("yaml")
    file = tmp_path / "lmcache.yaml"
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    for fine in ("enable_blending: false", "# enable_blending: true", "", "[]", "{", "\x00", None):
        if fine is not None:
            file.write_text(fine)
        else:
            file.unlink()
        plugin.check_config(config(**transfer("LMCacheConnectorV1")))
    file.write_text(text)
    with pytest.raises(Refused, match="LMCacheConnectorV1 with enable_blending"):
        plugin.check_config(config(**transfer("LMCacheConnectorV1")))


@pytest.mark.parametrize(
    "key, works, value",
    [
        ("use_layerwise", False, True),
        ("gds_path", None, "/mnt/nvme"),
        ("nixl_buffer_device", "cpu", "cuda:0"),
        ("storage_plugins", [], ["mine"]),
        ("remote_config_url", "", "http://there"),
    ],
)
def test_lmcache_is_refused_unless_each_copy_ends_within_its_step(monkeypatch, tmp_path, key, works, value):
    pytest.importorskip("yaml")
    file = tmp_path / "lmcache.yaml"
    for given, fits in ((works, True), (value, False)):
        text = ",".join(given) if isinstance(given, list) else given or ""
        ways = [transfer("LMCacheConnectorV1", **{f"lmcache.{key}": given}), transfer("LMCacheConnectorV1")]
        for i, chosen in enumerate((*ways, ways[1])):
            monkeypatch.setenv(f"LMCACHE_{key.upper()}", str(text) if i == 1 else "")
            monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file) if i == 2 else "")
            file.write_text(json.dumps({key: given}))
            if fits:
                plugin.check_config(config(**chosen))
            else:
                with pytest.raises(Refused, match=f"LMCacheConnectorV1 with {key} may copy a block after it has left"):
                    plugin.check_config(config(**chosen))


# ---- the control page -----------------------------------------------------------------------------------------------


def test_all_processes_of_an_engine_get_one_page():
    pages = [control.open_page("abc", 0) for _ in range(2)]
    pages[0][control.LIMIT] = 5
    assert pages[1][control.LIMIT] == 5 and pages[1].shared
    assert control.open_page("abc", 1)[control.LIMIT] == control.NO_LIMIT
    pages[0].unlink()
    assert pages[1][control.LIMIT] == 5  # who has it keeps it
    assert control.open_page("abc", 0)[control.LIMIT] == control.NO_LIMIT


def test_the_ring_wraps_and_is_never_overrun():
    page, draw = control.open_page("abc", 0), random.Random(2)
    sent, got = collections.deque(), [[], []]
    refused = pushed = 0
    for step in range(400):
        ids = [1 + draw.randrange(1 << 20) for _ in range(draw.randrange(1, 4096))]
        if page.push(step, ids, 2):
            sent.append((step, ids))
            pushed += len(ids)
        else:
            refused += 1
        for rank in range(2):
            if draw.random() < 0.3:
                got[rank] += page.pull(rank, page[control.POSITION], 1 << 21)
    for rank in range(2):
        got[rank] += page.pull(rank, page[control.POSITION], 1 << 21)
    assert got[0] == got[1] == list(sent)
    assert refused and pushed > 5 * control.RING


def test_a_record_that_was_not_done_stays():
    page = control.open_page("abc", 0)
    page.push(1, [7], 1)
    page.push(2, [8], 1)
    for step, _ in page.pull(0, page[control.POSITION], 1 << 21):
        if step == 2:
            break
    assert list(page.pull(0, page[control.POSITION], 1 << 21)) == [(2, [8])]


def test_answers_are_of_one_order():
    page = control.open_page("abc", 0)
    boards = page.boards(3)
    boards[0, 8 + 3], boards[1, 8 + 3] = 2 * 3, 2 * 3 + 1
    assert [page.answer(3, rank) for rank in range(3)] == [0, 1, -1]
    assert [page.answer(3 + control.ANSWERS, rank) for rank in range(3)] == [-1, -1, -1]


def test_the_board_is_that_of_libvmem():
    board, context = control.open_page("abc", 0).boards(control.RANKS)[2], Context("host")
    blocks = Blocks(context.reserve(4 * PAGE), [BlockRange(0, PAGE, PAGE)], 4, board=board)
    assert len(board) == BOARD_WORDS
    blocks.order([1, 2])
    blocks.flush()
    assert board[control.DONE] == 1 and board[control.HELD] == board[control.MOST_HELD] == 2 * PAGE
    assert [control.open_page("abc", 0).answer(1, rank) for rank in range(3)] == [-1, -1, 0]
    blocks.close()


def _claimed(name):
    control.claim(control.open_page(name, 0))


def test_pages_of_dead_engines_are_swept(folder):
    page = control.open_page("alive", 0)
    control.claim(page)
    page[control.PID] = 2**31 - 1  # in another container
    process = multiprocessing.get_context("spawn").Process(target=_claimed, args=("dead",))
    process.start()
    process.join()
    assert os.path.lexists(control.path_of("dead", 0))
    assert [e.name for e, _ in control.engines()] == ["alive"]
    control.sweep()
    assert not os.path.lexists(control.path_of("dead", 0)) and control.path_of("alive", 0).exists()


def test_who_opens_a_page_sweeps_those_of_the_dead(folder):
    """A worker does so before it loads, and the scheduler of a start that fails never comes."""
    process = multiprocessing.get_context("spawn").Process(target=control.open_page, args=("died", 0))
    process.start()
    process.join()
    page = control.open_page("starts", 0)
    assert not control.path_of("died", 0).exists() and control.path_of("starts", 0).exists() and page.shared


def test_pages_of_engines_that_died_at_their_start_are_swept(folder):
    worker = control.open_page("starts", 0)  # ahead of the scheduler
    process = multiprocessing.get_context("spawn").Process(target=control.open_page, args=("died", 0))
    process.start()
    process.join()
    assert os.path.lexists(control.path_of("died", 0))
    control.sweep()
    assert not os.path.lexists(control.path_of("died", 0)) and control.path_of("starts", 0).exists()
    worker[control.LEND] = 1
    scheduler = control.open_page("starts", 0)
    assert scheduler[control.LEND]
    del worker
    control.sweep()
    assert control.path_of("starts", 0).exists()
    del scheduler
    control.sweep()
    assert not os.path.lexists(control.path_of("starts", 0))


def test_an_engine_in_another_container_is_not_of_this_server(folder):
    page = engine("elsewhere")
    assert [e.name for e, _ in http.engines()] == ["elsewhere"]
    page[control.STARTED] += 1  # there, another process has the number of one here
    assert [e.name for e, _ in control.engines()] == ["elsewhere"] and http.engines() == []


def test_an_engine_does_not_begin_with_the_page_of_one_that_died():
    process = multiprocessing.get_context("spawn").Process(target=_claimed, args=("again",))
    process.start()
    process.join()
    assert os.path.lexists(control.path_of("again", 0))
    page = control.open_page("again", 0)
    assert page.shared and page[control.PID] == 0


@pytest.mark.parametrize("name, its", [("ApiServer_1", "the parent's"), ("Process-1", "its own")])
def test_a_server_is_not_all_that_its_parent_has_started(name, its):
    fork = multiprocessing.get_context("fork")
    servers = fork.SimpleQueue()
    child = fork.Process(target=lambda: servers.put(http.server()), name=name)
    child.start()
    assert servers.get() == (os.getpid() if its == "the parent's" else child.pid)
    child.join()


def test_files_that_are_no_pages_are_left_out(folder):
    page = control.open_page("alive", 0)
    control.claim(page)
    path = page.path
    (path.parent / "short-0.engine").write_bytes(b"short")
    (path.parent / "zero-0.engine").write_bytes(bytes(control.WORDS * 8))
    control.sweep()
    assert [e.name for e, _ in control.engines()] == ["alive"]


def test_without_a_folder_the_page_is_private(monkeypatch):
    monkeypatch.setattr(control, "view_folder", lambda: None)
    page = control.open_page("abc", 0)
    assert not page.shared and page[control.LIMIT] == control.NO_LIMIT
    page.unlink()


def engine(name="abc", **words):
    page = control.open_page(name, 0)
    control.claim(page)
    for word, value in {"BLOCKS": 100, "BLOCK_BYTES": 1 << 20, "LEAST": 10, "RANKS_USED": 1, **words}.items():
        page[getattr(control, word)] = value
    return page


def test_top_shows_engines_and_sets_their_limits():
    page, other = engine(USED=3, CACHED=5, PREEMPTED=7), engine("def")
    row = next(line for line in run_top("--once").splitlines() if "abc-0" in line)
    assert row.split() == [str(os.getpid()), "abc-0", "-", "serves", "10", "0", "3", "5", "0", "7", "0"]
    row = next(line for line in run_top("--once", "--limit", "abc=60%").splitlines() if "abc-0" in line)
    assert row.split()[4] == "60"
    assert page[control.LIMIT] == 60 << 20 and other[control.LIMIT] == control.NO_LIMIT
    run_top("--once", "--limit", f"{os.getpid()}=4M")  # counts as its least
    assert page[control.LIMIT] == other[control.LIMIT] == 4 << 20
    with pytest.raises(ValueError, match="120% must lie between 0 and 100 %"):
        run_top("--once", "--limit", "abc=120%")
    with pytest.raises(ValueError, match="--limit abc=99999999T: limit [0-9]+ must be 0 to 4611686018427387903"):
        run_top("--once", "--limit", "abc=99999999T")
    with pytest.raises(ValueError, match="no engine or model has the name 'xyz'"):
        run_top("--once", "--limit", "xyz=1G")
    page[control.MIN] = 30 << 20
    with pytest.raises(ValueError, match=f"--limit abc=20M: min {30 << 20} is over limit {20 << 20}"):
        run_top("--once", "--limit", "def=50M", "--limit", "abc=20M")
    assert page[control.LIMIT] == other[control.LIMIT] == 4 << 20


def test_top_shows_models_and_their_ports_and_finds_engines_by_them():
    page, other = engine(USED=3), engine("def")
    control.serves(page, "/models/Llama-3-8B", 8001)
    control.serves(other, "qwen", 8002)
    row = next(line for line in run_top("--once").splitlines() if "abc-0" in line)
    assert row.split()[1:6] == ["abc-0", "Llama-3-8B", "-", "8001", "serves"]
    run_top("--once", "--limit", "Llama-3-8B=50M")
    run_top("--once", "--limit", "qwen=30M")
    assert (page[control.LIMIT], other[control.LIMIT]) == (50 << 20, 30 << 20)
    run_top("--once", "--limit", "/models/Llama-3-8B=40M")
    assert (page[control.LIMIT], other[control.LIMIT]) == (40 << 20, 30 << 20)


# ---- steps of a worker ----------------------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch):
    """The memory of a worker with 10 blocks of a page, `run` to run a step there, and `backed` for what steps back."""
    torch = pytest.importorskip("torch")
    from pyvmem.vllm.orders import StepOrders
    from pyvmem.vllm.worker import WorkerMemory

    monkeypatch.setenv("VMEM_VLLM", "1")
    monkeypatch.setenv("VMEM_VLLM_PAGE_SIZE", str(PAGE))

    class Memory(WorkerMemory):
        def _fence(self):
            self.fences.append(self._blocks.fence())
            return self.fences[-1]

        def run(self, number, named=(), gone=(), ahead=(), order=0):
            output = types.SimpleNamespace(
                scheduled_new_reqs=[types.SimpleNamespace(block_ids=[list(named)])] if named else [],
                scheduled_cached_reqs=types.SimpleNamespace(new_block_ids=[None]), new_block_ids_to_zero=None,
                kv_cache_block_copies=None, vmem=StepOrders(number, 0, list(gone), list(ahead), order))  # fmt: skip
            self.backed = []
            self.begin(output)
            self.end(output)
            return self.backed

    page = control.open_page("abc", 0)
    memory = Memory(page, 0)
    memory.page, memory.fences = page, []
    config = kv_config((1, PAGE, PAGE, PAGE, 0), size=10 * PAGE)
    memory.expect(config)
    memory.flat = memory.allocate(10 * PAGE, torch.device("cpu"))
    memory.start(config)
    back = memory.blocks.back
    memory.blocks.back = lambda ids, **more: memory.backed.extend(ids) or back(ids, **more)
    yield memory
    memory.close()


def test_a_rank_without_requests_keeps_the_null_block_and_waits_for_its_fences(worker):
    """With data parallelism and experts, vLLM runs batches without requests, which read the null block, beside kernels
    that still read the blocks of requests that have ended."""
    flat, blocks = worker.flat, worker.blocks
    assert worker._tensor.resident_bytes == PAGE
    flat[:PAGE].fill_(7)
    worker.run(1, range(1, 10))
    worker.run(2, gone=range(1, 10))
    blocks.flush()
    assert worker._tensor.resident_bytes == 10 * PAGE
    flat[PAGE:] = 5  # kernels of the first step still run
    blocks.passed(worker.fences[-1])
    blocks.flush()
    assert worker._tensor.resident_bytes == PAGE
    assert (flat[:PAGE] == 7).all()
    worker.sleep()
    assert worker._tensor.resident_bytes == PAGE
    assert (flat[:PAGE] == 7).all()


def test_a_worker_sleeps_on_whose_activations_have_no_room(worker, monkeypatch):
    import torch

    from pyvmem import Context, KVPool, OutOfMemory
    from pyvmem.sleep import activations

    taken = []

    def take(self, seconds, lacks):
        if not taken:
            lacks(5)
            error = OutOfMemory(12, "no room")
            error.missing = 5
            raise error

    monkeypatch.setattr(activations.Activations, "take", take)
    monkeypatch.setattr(activations.Activations, "drop", lambda self: taken.append("dropped"))
    with KVPool(40 << 20, name="of-the-test") as pool:
        monkeypatch.setattr(worker, "pool", lambda device: pool)
        context = Context("host")
        monkeypatch.setattr(worker, "context", lambda device: context)
        with worker.claim(torch.device("cpu"), 0):
            worker.weights.adopt([torch.nn.Linear(512, 512)])
        worker.run(1)
        worker.page[control.RANKS_USED] = 1
        worker.falls_asleep()
        worker.sleep(2)
        with pytest.raises(OutOfMemory, match="no room"):
            worker.wake()
        assert worker.weights.parked and taken == ["dropped"]
        assert worker.page.cells[control.SHORT] == 5
        assert worker.wake()
        assert not worker.weights.parked and worker.page.cells[control.SHORT] == 0
        worker.close()


def test_two_engines_with_one_configuration_are_refused(worker):
    from pyvmem.vllm.worker import WorkerMemory

    with pytest.raises(Refused, match="make a VllmConfig for each"):
        WorkerMemory(control.open_page("abc", 0), 0)
    WorkerMemory(control.open_page("abc", 0), 1)
    worker.close()
    WorkerMemory(control.open_page("abc", 0), 0)


def test_a_step_backs_what_it_does_not_know_to_be_backed(worker):
    blocks = worker.blocks

    def leave():
        blocks.passed(worker.fences[-1])
        blocks.flush()

    assert worker.run(1, [1, 2]) == [1, 2]
    assert worker.run(2, [2, 1]) == []
    worker.run(3, ahead=[[3, 4], [5]], order=1)
    blocks.flush()
    assert worker.run(4, [5, 3, 1]) == []
    worker.run(5, gone=[1, 3])
    leave()
    assert worker.run(6, [4, 3]) == [3]
    assert worker.run(7, [3, 1]) == [1]
    assert sorted(blocks.backed()) == [0, 1, 2, 3, 4, 5]
    worker.sleep()
    assert sorted(blocks.backed()) == [0]
    worker.page.push(7, [2], 1)
    worker._ring(worker.page[control.POSITION])
    assert worker.run(8, [2, 6]) == [1, 3, 4, 5, 2, 6]  # it wakes first
    assert sorted(blocks.backed()) == [0, 1, 2, 3, 4, 5, 6]


def test_orders_that_are_refused_or_cut_are_not_known_to_be_backed(worker):
    blocks = worker.blocks
    worker.run(1)
    context = worker.context(worker.flat.device)
    context.set_budget(PAGE)
    worker.run(2, ahead=[[1, 2]], order=1)
    blocks.flush()
    context.set_budget(0)
    assert worker.run(3, [2]) == [2]
    worker.run(4, ahead=[[3, 4]], order=2)
    see, worker._see_answers = worker._see_answers, lambda: None  # it comes late
    worker.run(5, gone=[4])
    blocks.passed(worker.fences[-1])
    blocks.flush()
    worker._see_answers = see
    assert worker.run(6, [3, 4]) == [4]
    assert sorted(blocks.backed()) == [0, 2, 3, 4]


# ---- where blocks lie -----------------------------------------------------------------------------------------------


def kv_config(*tensors, blocks=10, size=None, tokens=16, alignment=None):
    """tensors: (layers, bytes of a layer's part, layer_stride, block_stride, offset)"""
    groups, made = [], []
    for i, (layers, part, layer_stride, block_stride, offset) in enumerate(tensors):
        names = [f"{i}.{layer}" for layer in range(layers)]
        spec = types.SimpleNamespace(page_size_bytes=part, block_size=tokens, block_stride_alignment=alignment)
        groups.append(types.SimpleNamespace(layer_names=names, kv_cache_spec=spec))
        made.append(types.SimpleNamespace(size=size, layers=names, layer_stride=layer_stride, offset=offset,
                                          block_stride=block_stride))  # fmt: skip
    return types.SimpleNamespace(kv_cache_tensors=made, kv_cache_groups=groups, num_blocks=blocks)


LAYOUTS = {
    "layers outermost": [(4, 40 << 10, 10 * (40 << 10), 40 << 10, 0)],
    "blocks outermost": [(4, 40 << 10, 40 << 10, 4 * (40 << 10), 0)],
    "groups that overlay": [(2, PAGE, 10 * PAGE, PAGE, 0), (2, PAGE, 10 * PAGE, PAGE, 0)],
    "groups of several sizes": [(2, 3000, 3000, 10000, 0), (1, 4000, 4000, 10000, 6000)],
}


def pages_of(ranges, block):
    for r in ranges:
        for layer in range(r.layers):
            at = r.offset + layer * r.layer_stride + block * r.stride
            yield from range(at // PAGE, (at + r.bytes - 1) // PAGE + 1)


@pytest.mark.parametrize("case", LAYOUTS)
def test_pages_of_blocks(case):
    about = kv_config(*LAYOUTS[case], size=1 << 30)
    ranges = layout.ranges_of(about)
    for ids in ([0], [3, 7], list(range(10))):
        found = {p for b in ids for p in pages_of(ranges, b)}
        want = set()
        for layers, part, layer_stride, block_stride, offset in LAYOUTS[case]:
            for layer in range(layers):
                for b in ids:
                    at = offset + layer * layer_stride + b * block_stride
                    want |= set(range(at // PAGE, (at + part - 1) // PAGE + 1))
        assert found == want


@pytest.mark.parametrize("row, layers, padding", [
    (4 << 10, 5, 512), (4 << 10, 40, 512), (512, 80, 512), (1152, 40, 1152), (4 << 10, 32, 0), (4 << 10, 4, 0),
    (512, 5, 0)])  # fmt: skip
def test_blocks_do_not_all_begin_in_one_stack_of_memory(row, layers, padding):
    part = 16 * row
    config = kv_config((layers, part, part, layers * part, 0), size=10 * layers * part)
    layout.spread(config)
    (one,) = layout.ranges_of(config)
    assert one.stride == layers * part + padding
    assert (one.bytes, one.offset) == (layers * part, 0)
    assert layout.bytes_of(config) == config.num_blocks * one.stride
    end = one.offset + (one.layers - 1) * one.layer_stride + (config.num_blocks - 1) * one.stride + one.bytes
    assert end <= layout.bytes_of(config)


def test_only_blocks_in_one_piece_are_moved_apart():
    apart, together = (5, 64 << 10, 640 << 10, 64 << 10, 0), (5, 64 << 10, 64 << 10, 320 << 10, 0)
    uneven = (40, 24 * 1024, 24 << 10, 960 << 10, 0)  # 1,024 rows of 24 bytes
    state = kv_config(together, size=3200 << 10, tokens=6301)
    layout.spread(state)
    assert layout.ranges_of(state)[0].stride == (320 << 10) + 512
    for config in (kv_config(apart, size=3200 << 10), kv_config(together, size=3200 << 10, alignment=64 << 10),
                   kv_config(uneven, size=9600 << 10, tokens=1024)):  # fmt: skip
        before = layout.ranges_of(config), layout.bytes_of(config)
        layout.spread(config)
        assert (layout.ranges_of(config), layout.bytes_of(config)) == before


SIZES = (64 << 10, 128 << 10, 256 << 10, 2 << 20)


def test_blocks_take_the_pages_under_them_once():
    page = 64 << 10
    in_pairs = [BlockRange(0, page // 2, page // 2)]
    assert [pages.bytes_under(b, in_pairs, page) for b in ([], [0], [2, 3], [1, 2], range(8))] == [
        0, page, page, 2 * page, 4 * page]  # fmt: skip
    askew = [BlockRange(page // 4, page, page, 2, 10 * page)]  # each block lies in two pages of each layer
    assert [pages.bytes_under(b, askew, page) for b in ([3], [3, 4], [3, 5])] == [4 * page, 6 * page, 8 * page]


@pytest.mark.parametrize("part, page", [(64 << 10, 64 << 10), (2 << 20, 2 << 20), (320 << 10, 64 << 10),
                                        (1280 << 10, 256 << 10), (40 << 10, 64 << 10)])  # fmt: skip
def test_where_layers_are_apart_pages_are_as_large_as_no_two_blocks_share(part, page):
    layers_outermost = layout.ranges_of(kv_config((2, part, 10 * part, part, 0)))
    assert pages.page_size(layers_outermost, SIZES) == page
    askew = layout.ranges_of(kv_config((2, part, 10 * part, part, 1 << 10)))
    assert pages.page_size(askew, SIZES) == 64 << 10


@pytest.mark.parametrize("part", [24 << 10, 64 << 10, 1 << 20, 2 << 20, 4288 << 10])
def test_blocks_in_one_piece_have_pages_of_2_mib(part):
    one = layout.ranges_of(kv_config((4, part // 4, part // 4, part, 0)))
    padded = layout.ranges_of(kv_config((2, part // 4, part // 3, part, 0)))
    half, eighth = (2, part // 4, part // 4, part, 0), (1, part // 8, part // 8, part, part // 2)
    several = layout.ranges_of(kv_config(half, eighth))
    for ranges in (one, padded, several):
        assert pages.page_size(ranges, SIZES) == 2 << 20
        assert pages.page_size(ranges, SIZES[:2]) == 128 << 10
        assert pages.page_size(ranges, (4 << 20,)) == 4 << 20


def test_a_backend_of_the_gpu_is_refused_where_vllm_runs_on_the_cpu(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("VMEM_BACKEND", "stock")
    with pytest.raises(Refused, match="^VMEM_BACKEND=stock: the engine runs on the CPU here.* unset it$"):
        context_on(torch.device("cpu"), plugin.settings())
    monkeypatch.setenv("VMEM_BACKEND", "host")
    context_on(torch.device("cpu"), plugin.settings()).close()
    with pytest.raises(Refused, match="^VMEM_BACKEND=host has memory of the CPU only"):
        context_on(torch.device("cuda"), plugin.settings())


def test_a_page_size_that_the_backend_does_not_have_is_refused(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("VMEM_VLLM", "1")
    monkeypatch.setenv("VMEM_VLLM_PAGE_SIZE", "512K")
    with pytest.raises(Refused, match="VMEM_VLLM_PAGE_SIZE=524288: pages of backend host have 65536, "):
        context_on(torch.device("cpu"), plugin.settings())
    monkeypatch.setenv("VMEM_VLLM_PAGE_SIZE", "256K")
    context_on(torch.device("cpu"), plugin.settings()).close()


def test_tensors_in_host_memory_are_left_out():
    about = kv_config((1, PAGE, PAGE, PAGE, 0), (1, PAGE, PAGE, PAGE, 0))
    about.kv_cache_tensors[1].host_resident = True
    about.kv_cache_tensors[1].offset = 999
    assert [r.offset for r in layout.ranges_of(about)] == [0]


def test_layouts():
    names = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
    assert layout.order(names, [PAGE, PAGE]) == ["BLHNC", "BLNHC", "LBHNC", "LBNHC"]
    assert layout.order(names, [PAGE + 8192] * 4) == ["BLHNC", "BLNHC", "LBHNC", "LBNHC"]
    assert layout.order(names, [PAGE + 8192, 8192]) == names
    assert layout.order(["LBHNC"], [8192]) == ["LBHNC"]


def test_blocks_that_a_connector_copies_are_in_one_piece():
    """vLLM takes the connector's own choice, layers outermost, if the worker names it at all."""
    assert layout.order(["LBHNC", "BLHNC", "BLNHC"], [PAGE, PAGE], copied=True) == ["BLHNC", "BLNHC"]
    assert layout.order(["LBHNC", "LBNHC"], [PAGE, PAGE], copied=True) == ["LBHNC", "LBNHC"]
    assert layout.order(["LBHNC", "BLHNC"], [PAGE, 8192], copied=True) == ["LBHNC", "BLHNC"]


# ---- HTTP -----------------------------------------------------------------------------------------------------------


def ask(method, body=b"", path="/vmem/limit", whole=True):
    async def passed_on(scope, receive, send):
        await send({"passed": scope["path"]})

    messages = [{"type": "http.request", "body": body, "more_body": not whole}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "root_path": "/api",  # vllm serve --root-path /api
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    asyncio.run(http.Limits(passed_on)(scope, receive, send))
    return (sent[0]["status"], json.loads(sent[1]["body"])) if len(sent) == 2 else sent[0] if sent else None


def test_limits_over_http():
    page = engine(POOL=5)
    assert ask("GET", path="/health") == {"passed": "/health"}
    assert ask("GET", path="/api/vmem/limit") == ask("GET")
    status, told = ask("GET")
    assert status == 200 and [e["name"] for e in told["engines"]] == ["abc"] and told["engines"][0]["limit"] is None
    status, told = ask("POST", json.dumps(dict(limit=40 << 20, min=1 << 20, max=60 << 20, priority=2)).encode())
    assert status == 200 and told["engines"][0]["limit"] == page[control.LIMIT] == 40 << 20
    assert (page[control.MIN], page[control.MAX], page[control.PRIORITY]) == (1 << 20, 60 << 20, 2)
    assert ask("POST", b'{"limit": null, "lend": true}')[0] == 200
    assert page[control.LIMIT] == control.NO_LIMIT and page[control.LEND] == 1


@pytest.mark.parametrize(
    "body, says",
    [
        (b"{", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"pages": 1}', "unknown setting pages"),
        (b'{"limits": 1}', "unknown setting limits"),
        (b'{"limit": "16G"}', "limit '16G' must be a whole number"),
        (b'{"limit": true}', "limit True must be a whole number"),
        (b'{"lend": 1}', "lend 1 must be true or false"),
        (b'{"min": -1}', "min -1 must be 0 to"),
        (b'{"limit": 5, "min": 9, "max": 8}', "min 9 is over max 8"),
        (b'{"limit": 5, "min": 9}', "min 9 needs a pool"),
        (b'{"limit": 5, "priority": 1}', "priority 1 needs a pool"),
        (b'{"rank": 7, "limit": 5}', "rank 7 is not here"),
        (b'{"rank": false, "limit": 5}', "rank false is not here"),
        (b'{"limit": 1%s}' % (b"0" * 900), "must be 0 to"),
        (b'{"rank": 1%s}' % (b"0" * 900), "is not here"),
        (b'{"%s": 1}' % (b"a" * 900), "unknown setting aaa"),
        (b" " * (1 << 17), "may have 65536 bytes"),
    ],
)
def test_wrong_settings_over_http_change_nothing(body, says):
    page = engine()
    status, told = ask("POST", body)
    assert status == 400 and says in told["error"] and len(told["error"]) < 200
    assert page[control.LIMIT] == control.NO_LIMIT and page[control.MIN] == page[control.MAX] == 0
    assert ask("DELETE")[0] == 405


def test_settings_over_http_change_all_ranks_or_none():
    first, second = engine(), engine("def", MIN=9)
    status, told = ask("POST", b'{"limit": 5, "max": 8}')
    assert status == 400 and "min 9 is over max 8" in told["error"]
    assert first[control.MAX] == 0 and first[control.LIMIT] == second[control.LIMIT] == control.NO_LIMIT


def test_a_minimum_over_http_fits_the_pool():
    page = engine(POOL=5, POOL_BYTES=8)
    status, told = ask("POST", b'{"min": 9}')
    assert status == 400 and "would be 9, over its 8 bytes" in told["error"]
    assert ask("POST", b'{"min": 8}')[0] == 200 and page[control.MIN] == 8


def test_the_minimums_of_all_members_fit_their_pool(folder):
    number = pools.number_of("gpu-0")
    mine = engine(POOL=5, POOL_OF=number, POOL_BYTES=64 << 20, MIN=30 << 20)
    other = engine("def", POOL=5, POOL_OF=number, POOL_BYTES=64 << 20, MIN=20 << 20)
    engine("ghi", POOL=5, POOL_OF=number + 1, POOL_BYTES=64 << 20, MIN=60 << 20)  # of another GPU

    def change(size, *pages):
        control.change(*(pages or [mine]), min=int(size * (1 << 20)))

    change(44)
    with pytest.raises(ValueError, match="min 47185920: .* would be 68157440, over its 67108864 bytes"):
        change(45)
    assert mine[control.MIN] == 44 << 20
    change(32, mine, other)
    with pytest.raises(ValueError, match="over its"):
        change(33, mine, other)
    with Context("host") as context, KVPool(64 << 20, name="gpu-0") as pool:
        blocks = [Blocks(context.reserve(PAGE), [BlockRange(0, PAGE, PAGE)], 1) for _ in range(2)]
        blocks[0].join(pool, name="trainer", min=16 << 20)
        blocks[1].join(pool, name=f"{pools.ENGINE}7", min=32 << 20)  # its page counts
        other[control.MIN] = 16 << 20
        change(32)
        with pytest.raises(ValueError, match="would be 67633152"):
            change(32.5)
        other[control.MIN] = 64 << 20
        change(8)  # less always may be
        for each in blocks:
            each.close()


def test_a_client_that_goes_away_within_its_body_changes_nothing():
    page = engine()
    assert ask("POST", b'{"limit": 5}', whole=False) is None
    assert page[control.LIMIT] == control.NO_LIMIT


def test_a_server_that_is_not_on_vmem_says_so(folder):
    assert ask("GET") == (200, {"engines": []})
    status, told = ask("POST", b'{"limit": 5}')
    assert status == 400 and "VLLM_PLUGINS, where it is set, must include vmem" in told["error"]


# ---- leases ---------------------------------------------------------------------------------------------------------


def test_the_name_of_a_pool():
    def read(text):
        return plugin.settings({"VMEM_VLLM": "1", "VMEM_VLLM_POOL": text, "VMEM_VLLM_POOL_SIZE": "2G"})

    assert (read("gpu-0").pool, read("gpu-0").pool_size) == ("gpu-0", 2 << 30)
    for wrong in ("../x", ".x", "a b", "x" * 61):
        with pytest.raises(ValueError, match="VMEM_VLLM_POOL=.* must be at most 60 letters"):
            read(wrong)
    assert pools.number_of("gpu-0") != pools.number_of("gpu-1") and pools.number_of("") == 0


def test_a_pool_is_opened_by_its_name_for_each_gpu(monkeypatch, folder):
    on_gpu = types.SimpleNamespace(backend="stock", info=lambda: types.SimpleNamespace(device_uuid=bytes(range(16))))
    with Context("host") as context:
        with pytest.raises(ValueError, match="VMEM_VLLM_POOL must name a pool, and VMEM_VLLM must be 1"):
            open_pool(context)
        for name, value in (("", "1"), ("_POOL", "gpu-0")):
            monkeypatch.setenv(f"VMEM_VLLM{name}", value)
        with pytest.raises(InvalidArgument, match="budget 0: there is no pool"):
            open_pool(context)
        monkeypatch.setenv("VMEM_VLLM_POOL_SIZE", "2M")
        with open_pool(context) as first, open_pool(on_gpu) as second, KVPool(name="gpu-0-000102030405") as same:
            assert os.path.basename(first.path) == "gpu-0.pool"
            assert second.path == same.path and same.budget == 2 << 20
        monkeypatch.setenv("VMEM_VLLM", "0")
        with pytest.raises(ValueError, match="VMEM_VLLM must be 1"):
            open_pool(context)


def looking(monkeypatch, *pages):
    """At every call, each engine's view of the others: (behind, full). live: whether all give a sign of life."""
    for interval in ("LOOK", "FIND"):
        monkeypatch.setattr(pool_policy, interval, 0)
    now = [100.0]
    monkeypatch.setattr(pool_policy, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    near = [pool_policy.PoolPeers(page) for page in pages]

    def look(seconds=0.0, live=True, last=0):
        now[0] += seconds
        for _, page in control.engines():
            page[control.BEAT] += live
        for each in near:
            each.look(last)
        return [(each.is_behind, each.is_full) for each in near]

    return near, look


def test_an_engine_yields_to_one_of_its_pool_with_a_higher_priority_that_lacks_memory(monkeypatch):
    mine, other = engine(POOL=5), engine("def", POOL=5, PRIORITY=1)
    near, look = looking(monkeypatch, mine, other)

    def yields():
        look()
        return [each.is_yielding for each in near]

    assert yields() == [False, False]  # it lacks nothing
    other[control.HEAD], mine[control.HEAD], mine[control.GROWS] = 1000, 900, 1
    assert yields() == [True, False]
    other[control.POOL] = 6
    assert yields() == [False, False]
    other[control.POOL], mine[control.PRIORITY] = 5, 1
    assert yields() == [False, False]


def test_engines_of_other_gpus_are_no_neighbours(monkeypatch):
    mine = engine(POOL=5, POOL_OF=50)
    two = engine("def", POOL=5, PRIORITY=1, HEAD=1000, RANKS_USED=2)
    two[control.POOL_OF], two[control.POOL_OF + 1] = 51, 52
    (neighbours,), look = looking(monkeypatch, mine)
    assert look() == [(False, False)] and neighbours.alone
    two[control.POOL_OF + 1] = 50
    look()
    assert neighbours.is_yielding and not neighbours.alone


def test_of_engines_that_lack_memory_one_comes_first(monkeypatch):
    size = dict(POOL=5, POOL_BYTES=60 << 20, BLOCK_BYTES=1 << 20)
    mine, other, idle = engine(**size), engine("def", **size), engine("ghi", **size, CACHED=9)
    near, look = looking(monkeypatch, mine, other)
    mine[control.USED] = other[control.USED] = 35  # the share is 30, and the idle one counts for nothing
    assert look() == [(False, False)] * 2 and near[0].alone and near[1].alone
    other[control.HEAD] = 1000
    assert look() == [(True, False), (False, False)] and not near[0].alone
    mine[control.HEAD] = 900  # its request came before
    assert look() == [(False, False), (True, False)]
    other[control.USED] = 29  # less than its share
    assert look() == [(True, True), (False, False)]
    mine[control.USED] = 20
    assert look() == [(False, False), (True, False)]
    mine[control.USED], mine[control.HEAD], mine[control.GROWS] = 35, 1900, 1  # before any that begins
    assert look() == [(False, True), (True, False)]
    other[control.MIN] = 50 << 20  # it has less than that
    assert look() == [(False, True), (False, False)]
    other[control.CACHED], mine[control.GROWS] = 25, 0
    assert look() == [(True, True), (False, False)]  # a minimum is a share
    idle[control.STARVED], idle[control.HEAD], idle[control.PRIORITY] = 1, 2000, 1
    assert look() == [(True, True)] * 2  # it may need all


def test_an_engine_asks_ahead_for_what_others_have_beyond_what_they_keep_ready(monkeypatch):
    mine, other = engine(POOL=5), engine("def", POOL=5, BLOCK_BYTES=1 << 20, LOW=10, ALLOWED=400, OFFERED=15)
    third = engine("ghi", POOL=5, BLOCK_BYTES=2 << 20, LOW=10, ALLOWED=80, OFFERED=15)
    (neighbours,), look = looking(monkeypatch, mine)

    def surplus():
        look()
        return neighbours.surplus >> 20

    assert pool_policy.ready(10, 400) == 20 and pool_policy.ready(10, 80) == 10
    assert surplus() == 10  # of the third
    other[control.OFFERED] = 50
    assert surplus() == 40
    third[control.WANTED] = 1  # its requests come first
    assert surplus() == 0


def test_of_running_requests_the_oldest_go_on(monkeypatch):
    size = dict(POOL=5, POOL_BYTES=60 << 20, GROWS=1)
    one, two = engine(**size, HEAD=1000, USED=40), engine("def", **size, HEAD=2000, USED=20)
    near, look = looking(monkeypatch, one, two)

    def yields(last):
        look(last=last)
        return [each.is_yielding for each in near]

    assert look() == [(True, True), (False, False)]  # the second has less than its share
    assert yields(2000) == [False, False] and yields(2001) == [True, False]
    two[control.USED] = 30
    assert look() == [(False, False), (True, False)]
    assert yields(900) == yields(1000) == [False, False] and yields(1001) == [False, True]
    two[control.USED], one[control.STARVED] = 20, 1  # its only one may need more than a share
    assert look() == [(False, True), (True, True)] and yields(1001) == [False, True]
    one[control.GROWS] = 0  # it waits
    assert yields(3000) == [True, False]


def test_a_model_that_wakes_comes_first_unless_weights_of_sleeping_models_suffice(monkeypatch):
    mine, wakes, sleeps = engine(POOL=5, HEAD=1000), engine("def", POOL=5), engine("fed", POOL=5)
    _, look = looking(monkeypatch, mine)

    def is_behind():
        for page in (wakes, sleeps):
            page[control.SERVER_BEAT] += 1
        return look()[0][0]

    for page in (wakes, sleeps):
        page.cells[control.ASLEEP] = 1
    assert not is_behind()
    wakes[control.LACKS], wakes.cells[control.GIVES] = 7, 9  # what it has itself is no gain to it
    assert is_behind()
    sleeps.cells[control.GIVES] = 6
    assert is_behind()
    sleeps.cells[control.GIVES] = 7
    assert not is_behind()
    sleeps.cells[control.ASLEEP] = 0
    assert is_behind()


def test_an_engine_that_hangs_is_not_waited_for(monkeypatch):
    mine, other = engine(POOL=5, HEAD=1100), engine("def", POOL=5, HEAD=1000)
    _, look = looking(monkeypatch, mine)
    assert look() == [(True, False)]
    assert look(pool_policy.HANGS / 2, live=False) == [(True, False)]
    assert look(pool_policy.HANGS / 2, live=False) == [(False, False)]
    assert look(60, live=False) == [(False, False)]
    assert look() == [(True, False)]
    other[control.HEAD] = -1000  # it lets others go first
    assert look() == [(False, False)]


def test_an_engine_that_gets_nothing_lets_others_go_first_for_a_while(monkeypatch):
    mine, other = engine(POOL=5, HEAD=1000), engine("def", POOL=5, USED=9, HEAD=1100)
    (near, _), look = looking(monkeypatch, mine, other)

    def passes(seconds, head=1000):
        look(seconds)
        mine[control.HEAD] = -head if near.is_passing else head  # as the scheduler publishes it
        return near.is_passing

    assert not passes(0)
    for patience in (pool_policy.PATIENCE, 2 * pool_policy.PATIENCE):
        assert not passes(patience * 0.9)
        mine[control.SPARE] += 1
        assert not passes(patience) and not passes(patience * 0.9)
        assert passes(patience * 0.2) and look() == [(True, False), (False, False)]
        assert passes(patience * 1.9) and not passes(patience * 0.2)
        assert look() == [(False, False), (True, False)]
    mine[control.HEAD] = 0
    assert not passes(0)
    other[control.HEAD] = 900  # not its turn
    assert not passes(pool_policy.PATIENCE) and not passes(pool_policy.PATIENCE)
    other[control.HEAD] = 1100
    assert not passes(0) and passes(pool_policy.PATIENCE)  # no longer than at first


def test_a_minimum_serves_while_another_engine_may_need_all(monkeypatch):
    size = dict(POOL=5, POOL_BYTES=60 << 20)
    mine, other = engine(**size, MIN=(10 << 20) - 1, SPARE=11), engine("def", **size, HEAD=1000, STARVED=1)
    _, look = looking(monkeypatch, mine, other)
    assert look() == [(True, True), (False, False)]
    mine[control.SPARE] = 10
    assert look() == [(True, False), (False, False)]
