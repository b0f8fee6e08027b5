"""Weights that engines of vLLM's read in common, on host memory: who loads them, who takes them, what outlives whom.

One child at a time makes an engine. The owner of the weights is a process of its own, which stays in between.
"""

import contextlib
import json
import os
import signal
import time
import types

import engines
import models
import pytest
from test_sleep import POOL, Llm, environ as sleeping, imported, own  # noqa: F401


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def write(name):
        if not (root / name).exists():
            engines.in_child(lambda: str(models.write(name, root / name)), vmem=False)
        return root / name

    return write


@pytest.fixture
def environ():
    """Weights outlive an engine for longer than any start takes, and end with the test."""
    made = sleeping(VMEM_VLLM_COMMON="600")
    yield made
    with contextlib.suppress(OSError):  # no engine has begun one
        os.kill(linked(made["VMEM_VLLM_POOL"]).owner, signal.SIGKILL)


def linked(pool):
    from pyvmem.kv.view import view_folder
    from pyvmem.sleep.link import Link

    link = Link(str(view_folder() / f"{pool}.pool"), "", 30)
    link._open()
    return link


def state():
    """What the owner of this process's pool has."""
    link = linked(os.environ["VMEM_VLLM_POOL"])
    told = link.ask("state")[0]
    link.close()
    return told


def told_by(made):
    weights = made.weights
    return dict(tokens=made.tokens(), common=weights.is_common, alone=weights.lease.stats().bytes, state=state())


def serve(folder, **options):
    return told_by(Llm(folder, **options))


def check(told, expected, **state):
    assert told["tokens"] == expected and told["common"] and told["alone"] == 0
    assert len(told["state"]) == 1
    found = told["state"][0]
    assert dict(found, **state) == found and found["held"] == found["bytes"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2moe"])
def test_the_second_engine_takes_what_the_first_has_loaded(model, environ, name):
    folder = model(name)
    expected = engines.in_child(own, folder, vmem=False)
    first = engines.in_child(serve, folder, vmem=True, environ=environ)
    check(first, expected, engines=1)
    second = engines.in_child(serve, folder, vmem=True, environ=environ, max_num_seqs=4)  # another setting
    check(second, expected, engines=1, model=first["state"][0]["model"])  # which the first process has loaded


def kill_owner(weights):
    """Kill the owner, and wait until its engine can know, or has another one."""
    link, owner = weights._link, weights._link.owner
    os.kill(owner, signal.SIGKILL)
    while not link.gone and link.owner == owner:
        time.sleep(0.01)


def lives(folder):
    """Everything that happens to common weights, in one engine. Its owner dies twice."""
    from neighbour import Neighbour

    made, neighbour, told = Llm(folder), Neighbour(), []

    def note():
        told.append(told_by(made))

    note()
    made.llm.sleep(1)
    made.llm.wake_up()
    note()
    made.llm.sleep(1)
    neighbour.take(POOL - (4 << 20))
    gone = state()[0]["held"]
    neighbour.give()
    made.llm.wake_up()  # copies them back
    note()
    kill_owner(made.weights)  # awake
    made.weights.copy_again()
    note()
    made.llm.sleep(1)
    kill_owner(made.weights)  # asleep
    made.llm.wake_up()
    note()
    made.llm.collective_rpc("reload_weights")  # writes: a copy of its own
    last = dict(tokens=made.tokens(), common=made.weights.is_common, alone=made.weights.lease.stats().bytes)
    made.llm.sleep(1)
    made.llm.wake_up()
    return dict(told=told, gone=gone, last=last, end=made.tokens())


def test_they_sleep_lose_their_owner_and_are_written(model, environ):
    folder = model("llama")
    expected = engines.in_child(own, folder, vmem=False)
    check(engines.in_child(serve, folder, vmem=True, environ=environ), expected, engines=1)
    told = engines.in_child(lives, folder, vmem=True, environ=environ)
    for one in told["told"]:
        check(one, expected, engines=1, awake=1)
    assert told["gone"] == 0
    assert told["last"]["tokens"] == told["end"] == expected
    assert not told["last"]["common"] and told["last"]["alone"] > 0


def serve_and_die(folder, told, turns):
    """Serve so often, and die by SIGKILL once what was computed is saved. The owner dies in between."""
    made = Llm(folder)
    found = [dict(tokens=made.tokens(), cached=made.cached) for _ in range(turns)]
    kill_owner(made.weights)
    made.weights.copy_again()
    prefixes, end = made.worker._vmem.prefixes, time.monotonic() + 60
    while prefixes._pending:  # its thread saves them beside this one
        assert time.monotonic() < end
        time.sleep(0.01)
    told.write_text(json.dumps(dict(turns=found, saved=len(prefixes.file.saved()), key=prefixes._key)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_engine_serves_prompts_that_one_had_computed_which_was_killed(model, environ, tmp_path):
    folder, environ = model("llama"), dict(environ, VMEM_VLLM_PREFIXES="64M")
    expected = engines.in_child(own, folder, vmem=False)
    told = []
    for turns in (2, 1, 1):
        with pytest.raises(RuntimeError, match="status 9"):
            engines.in_child(serve_and_die, folder, tmp_path / "told", turns, vmem=True, environ=environ)
        told.append(json.loads((tmp_path / "told").read_text()))
    first, *others = told
    assert first["turns"][0]["cached"] < first["turns"][1]["cached"]
    assert [turn["tokens"] for one in told for turn in one["turns"]] == [expected] * 4
    for other in others:
        assert other["key"] == first["key"] and other["saved"] >= first["saved"] > 0
        assert other["turns"][0]["cached"] == first["turns"][1]["cached"]  # all that can be


def alone(folder, **options):
    made = Llm(folder, **options)
    told = dict(tokens=made.tokens(), common=made.weights.is_common, alone=made.weights.lease.stats().bytes)
    made.llm.sleep(1)
    made.llm.wake_up()
    return dict(told, again=made.tokens())


@pytest.mark.parametrize("name, options", [("qwen2moe", dict(enable_expert_parallel=True)),
                                           ("llama", dict(enable_lora=True, max_lora_rank=8))])  # fmt: skip
def test_an_engine_whose_weights_cannot_be_in_common_has_its_own(model, environ, name, options):
    folder = model(name)
    expected = engines.in_child(own, folder, vmem=False, **options)
    told = engines.in_child(alone, folder, vmem=True, environ=environ, **options)
    assert not told["common"] and told["alone"] > 0
    assert told["tokens"] == told["again"] == expected


def test_weights_of_vllms_daemon_are_refused(model, environ):
    with pytest.raises(RuntimeError, match=r"VMEM_VLLM_WEIGHTS=1 .* --load-format ipc_cache"):
        engines.in_child(own, model("llama"), vmem=True, environ=environ, load_format="ipc_cache")


def config(folder, **more):
    made = types.SimpleNamespace(
        model_config=types.SimpleNamespace(model=str(folder), revision=None, quantization=None),
        load_config=types.SimpleNamespace(load_format="auto", model_loader_extra_config={}, download_dir=None,
                                          device=None),
        parallel_config=types.SimpleNamespace(enable_eplb=False, enable_expert_parallel=False),
        speculative_config=None, lora_config=None, weight_transfer_config=None,
    )  # fmt: skip
    for name, value in more.items():
        at, _, field = name.rpartition("__")
        setattr(getattr(made, at) if at else made, field, value)
    return types.SimpleNamespace(vllm_config=made)


REFUSED = [
    (dict(model_config__quantization="awq_marlin"), "repack"),
    (dict(load_config__load_format="ipc_cache"), "ipc_cache"),
    (dict(load_config__load_format="dummy"), "dummy"),
    (dict(parallel_config__enable_eplb=True), "eplb"),
    (dict(parallel_config__enable_expert_parallel=True), "expert"),
    (dict(lora_config=1), "lora"),
    (dict(speculative_config=1), "draft"),
    (dict(weight_transfer_config=1), "trainer"),
]


@pytest.mark.parametrize("setting, part", REFUSED)
def test_what_changes_or_repacks_weights_is_not_in_common(tmp_path, setting, part):
    from pyvmem.sleep.image import Different
    from pyvmem.vllm.common import key_of

    with pytest.raises(Different, match=part):
        key_of(config(tmp_path, **setting))
