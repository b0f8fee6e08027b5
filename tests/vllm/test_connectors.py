"""vLLM's KV connectors beside blocks that come and go: tokens are those of plain vLLM with the same connector."""

import importlib.util
import os
import uuid

import connect
import disaggregate
import engines
import models
import pytest
from connect import chosen, multi


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    engines.in_child(lambda: str(models.write("llama", folder)), vmem=False)
    return folder


@pytest.fixture(scope="session", autouse=True)
def imported():
    os.environ.update(VMEM_VLLM="1", VMEM_VLLM_PAGE_SIZE="64K", PYTHONHASHSEED="0", LMCACHE_LOG_LEVEL="ERROR",
                      LMCACHE_TRACK_USAGE="false")  # fmt: skip
    import vllm.v1.engine.core  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401

    if HAS["lmcache"]:
        connect.import_lmcache()


HAS = {name: importlib.util.find_spec(name) is not None for name in ("lmcache", "nixl")}


def needs(package):
    """Skip a test without a package, of which the installer has said that the registry does not give it."""
    if package and not HAS[package]:
        pytest.skip(f"{package} is not installed")


SIMPLE, LMCACHE = chosen("SimpleCPUOffloadConnector"), chosen("LMCacheConnectorV1")
OFFLOADING = chosen("OffloadingConnector", cpu_bytes_to_use=1 << 30)
CONNECTORS = {
    "simple": SIMPLE,
    "lmcache": LMCACHE,
    "simple and lmcache": multi(SIMPLE, LMCACHE),
    "lmcache and offloading": multi(LMCACHE, OFFLOADING),
}
EVENTS = {
    "limits": dict(limits=(1, 2, 4, 20)),
    "few blocks, aborts, resets": dict(aborts=True, resets=True, limits=(1, 1.5),
                                       options=dict(num_gpu_blocks_override=24, max_model_len=600)),
    "lends": dict(lends=True),
}  # fmt: skip


def own_and_on(folder, connector, **more):
    own = engines.in_child(connect.serve, folder, connector, vmem=False, seconds=200, **dict(more, limits=()))
    on = engines.in_child(connect.serve, folder, connector, vmem=True, seconds=200, **more)
    return own, on


@pytest.mark.parametrize(
    "name, events", [*((name, "limits") for name in CONNECTORS), *(("lmcache", e) for e in list(EVENTS)[1:])]
)
def test_tokens_are_vllms_with_the_same_connector(model, name, events):
    needs("lmcache" if "lmcache" in name else None)
    own, on = own_and_on(model, CONNECTORS[name], **EVENTS[events])
    alike = [a == b for a, b in zip(own["tokens"], on["tokens"], strict=True) if a is not None and b is not None]
    assert all(alike) and len(alike) >= (28 if "aborts" in events else 42)
    assert on["loaded"] > 10 and on["stored"] > 10 and not on.get("unbacked")
    assert on["idle"]["step_maps"] == 0 and on["reset_done"]
    assert bool(on["lent"]) == (events == "lends")


@pytest.fixture(scope="session")
def expected(model):
    return engines.in_child(connect.serve_once, model, vmem=False)


N_GRAMS = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
FUZZED = {
    "lmcache": (LMCACHE, {}),
    "lmcache, weights in a pool": (LMCACHE, {}),
    "lmcache and offloading": (CONNECTORS["lmcache and offloading"], {}),
    "simple, with drafts": (SIMPLE, dict(speculative_config=N_GRAMS)),
}


@pytest.mark.parametrize("seed", range(int(os.environ.get("VMEM_TEST_SEEDS", "1"))))
@pytest.mark.parametrize("name", FUZZED)
def test_whatever_happens_tokens_are_vllms(model, expected, name, seed):
    needs("lmcache" if "lmcache" in name else None)
    connector, more = FUZZED[name]
    options, environ = dict(num_gpu_blocks_override=32, max_model_len=600, **more), {}
    if "pool" in name:
        environ = dict(VMEM_VLLM_POOL=f"test-{uuid.uuid4().hex[:8]}", VMEM_VLLM_POOL_SIZE=str(256 << 20),
                       VMEM_VLLM_WEIGHTS="1")  # fmt: skip
    did = engines.in_child(connect.fuzz, model, connector, expected, seed, 400, options, vmem=True, seconds=300,
                           environ=environ)  # fmt: skip
    assert did["answers"] > 40 and did["loaded"] > 5 and did["slept"] and not did.get("unbacked"), did
    assert did["idle"]["step_maps"] == did["idle"]["used"] == 0


@pytest.mark.parametrize("events", ["limits", "lends"])
def test_whole_prompts_come_back_from_files(model, tmp_path, events):
    """ExampleConnector stores no more of a prompt than its first step computes; vMem makes that step no smaller."""
    whole = dict(max_num_batched_tokens=4096, enable_prefix_caching=False)
    own, on = [engines.in_child(connect.serve, model, chosen("ExampleConnector", tmp_path / str(vmem)), vmem=vmem,
                                seconds=200, options=whole, **(EVENTS[events] if vmem else {}))
               for vmem in (False, True)]  # fmt: skip
    assert on["tokens"] == own["tokens"] and len(list((tmp_path / "True").iterdir())) > 5
    assert on["idle"]["step_maps"] == 0 and bool(on["lent"]) == (events == "lends")


def test_members_of_a_pool_load_what_they_have_lent(model):
    needs("lmcache")
    own = engines.in_child(engines.serve, model, turns=1, vmem=False)["tokens"]
    pool = dict(VMEM_VLLM_POOL=f"test-{uuid.uuid4().hex[:8]}", VMEM_VLLM_POOL_SIZE=str(40 << 20))
    both = [engines.Told(model, pool, connect.serve_when_told, kv_transfer_config=LMCACHE) for _ in range(2)]
    try:
        for one in (0, 1, 0):
            both[one].go()
            both[one].wait()
        for engine in both:
            engine.go()
        told = [engine.ended() for engine in both if engine.wait() is None]
    finally:
        for engine in both:
            engine.kill()
    for each in told:
        assert each["tokens"] == [own] * len(each["tokens"]) and each["idle"]["step_maps"] == 0
        assert each["loaded"] > 10 and each["stored"] > 10 and not each.get("unbacked")


# ---- prefill and decode apart ---------------------------------------------------------------------------------------

MOVES = dict(limits=(1, 2, 4, 20), turns=2)


def equal(decoded, expected):
    """How many answers are those of plain vLLM."""
    return sum(tokens == expected[int(name.split("-")[1])] for name, tokens in decoded["tokens"].items())


def test_rows_go_from_one_engine_to_another_while_both_limits_move(model, expected):
    """By NIXL over TCP, from buffers in host memory, as on a GPU with kv_buffer_device=cpu."""
    needs("nixl")
    with disaggregate.apart(model, MOVES, MOVES) as (first, second):
        decoded, prefilled = second.result(), first.result()
    assert equal(decoded, expected) == 2 * len(expected)
    for each, did in ((prefilled, "stored"), (decoded, "loaded")):
        assert each[did] > 10 and not each.get("unbacked") and each["idle"]["used"] == 0


def test_the_other_engine_is_killed_while_its_rows_are_loaded(model, expected):
    needs("nixl")
    with disaggregate.apart(model, dict(MOVES, dies=True), MOVES) as (_, second):
        decoded = second.result()
    assert equal(decoded, expected) == 2 * len(expected)
    assert not decoded.get("unbacked") and decoded["idle"]["used"] == 0
