"""Sleep and wake on vLLM itself, on host memory: what is kept, what a neighbour takes, and vLLM's own tokens."""

import os
import uuid

import engines
import models
import pytest
from neighbour import Neighbour


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def write(name):
        make = models.write_lora if name == "adapter" else lambda folder: models.write(name, folder)
        engines.in_child(lambda: str(make(root / name)), vmem=False)
        return root / name

    return write


@pytest.fixture(scope="session", autouse=True)
def imported():
    os.environ["VMEM_VLLM"] = "1"
    import vllm.v1.engine.core  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401


POOL = 256 << 20


def environ(sleep="keep", weights="1", **more):
    return dict(VMEM_VLLM_POOL=uuid.uuid4().hex[:12], VMEM_VLLM_POOL_SIZE=str(POOL), VMEM_VLLM_SLEEP=sleep,
                VMEM_VLLM_WEIGHTS=weights, VMEM_VLLM_PAGE_SIZE="64K", **more)  # fmt: skip


def plain_linear():
    """Have linear layers read their weights where they are: oneDNN's packed copies would hide them from vMem."""
    import vllm._custom_ops as ops

    ops._supports_onednn = False


class Llm:
    def __init__(self, folder, **options):
        from vllm import SamplingParams

        plain_linear()
        self.llm = engines.make(folder, **options)
        self.prompts = engines.prompts_of(12, 200)
        self.params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def tokens(self):
        answers = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        self.cached = sum(a.num_cached_tokens or 0 for a in answers)
        return [list(a.outputs[0].token_ids) for a in answers]

    @property
    def worker(self):
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    @property
    def weights(self):
        return self.worker._vmem.weights


def own(folder, **options):
    return Llm(folder, **options).tokens()


def nap(folder, takes, options=None, level=1):
    """Sleep and wake three times; before each wake a neighbour takes this much. All that was seen."""
    from pyvmem.engine import control

    made, told = Llm(folder, **(options or {})), dict(naps=[])
    _, page = engines.own_page()
    told["first"], neighbour = made.tokens(), Neighbour() if takes else None
    for _ in range(3):
        made.tokens()
        warm = made.cached
        made.llm.sleep(level)
        seen = dict(warm=warm, asleep=bool(page.asleep), cached=page[control.CACHED], weights=page[control.WEIGHTS],
                    held=made.weights.held if made.weights else 0)  # fmt: skip
        if neighbour:
            neighbour.take(takes)
            seen["taken"] = made.weights.held if made.weights else 0
            neighbour.give()
        made.llm.wake_up()
        if level == 2:
            made.llm.collective_rpc("reload_weights")
        assert not page.asleep
        seen["tokens"] = made.tokens()
        seen["found"] = made.cached
        told["naps"].append(seen)
    return told


def check(told, expected):
    assert told["first"] == expected
    for one in told["naps"]:
        assert one["asleep"] and one["tokens"] == expected
    return told["naps"]


def test_asleep_the_prefix_cache_and_the_weights_stay_while_nobody_asks(model):
    folder = model("llama")
    expected = engines.in_child(own, folder, vmem=False)
    for one in check(engines.in_child(nap, folder, 0, vmem=True, environ=environ()), expected):
        assert one["found"] == one["warm"] > 0  # as if it had not slept
        assert one["held"] == one["weights"] > 8 << 20  # all layers


def test_what_a_neighbour_takes_comes_back_and_gives_vllms_tokens(model):
    folder = model("llama")
    expected = engines.in_child(own, folder, vmem=False)
    for one in check(engines.in_child(nap, folder, POOL - (4 << 20), vmem=True, environ=environ()), expected):
        assert one["taken"] < one["weights"] and one["held"] == one["weights"]
        assert one["found"] < one["warm"]


@pytest.mark.parametrize(
    "sleep, weights, level", [("drop", "0", 1), ("drop", "1", 1), ("keep", "1", 2), ("keep", "0", 1)]
)
def test_levels_and_tags_mean_what_they_mean_in_vllm(model, sleep, weights, level):
    folder = model("llama")
    expected = engines.in_child(own, folder, vmem=False)
    told = engines.in_child(nap, folder, 0, level=level, vmem=True, environ=environ(sleep, weights))
    for one in check(told, expected):
        assert level == 2 or (one["cached"] > 0) == (sleep == "keep")
        assert one["found"] == one["warm"] if sleep == "keep" and level == 1 else one["found"] < one["warm"]


def changes(folder):
    """Weights that change in place, between two naps in which they went."""
    import torch

    made, neighbour, told = Llm(folder), Neighbour(), []
    made.tokens()
    for turn in range(2):
        made.llm.sleep(1)
        neighbour.take(POOL - (4 << 20))
        neighbour.give()
        made.llm.wake_up()
        with torch.no_grad():
            for p in made.worker.model_runner.get_model().parameters():
                p.mul_(1 + 0.05 * (turn + 1))
        made.llm.reset_prefix_cache()
        told.append(made.tokens())
        made.llm.sleep(1)
        neighbour.take(POOL - (4 << 20))
        neighbour.give()
        made.llm.wake_up()
        told.append(made.tokens())
    return told


def test_weights_that_change_in_place_sleep_as_they_are(model):
    a, b, c, d = engines.in_child(changes, model("llama"), vmem=True, environ=environ())
    assert a == b and c == d and a != c


def in_vain(folder):
    """A wake for which the pool has too little memory, and one later."""
    from pyvmem.engine import control

    made, neighbour = Llm(folder), Neighbour()
    _, page = engines.own_page()
    first = made.tokens()
    made.llm.sleep(1)
    neighbour.take(POOL - (4 << 20))
    page[control.PATIENCE] = 50
    errors = []
    for _ in range(2):
        try:
            made.llm.wake_up()
        except Exception as error:
            errors.append(str(error))
    short, asleep, held = page[control.SHORT], page.asleep, made.weights.held
    neighbour.give()
    made.llm.wake_up()
    return dict(errors=errors, short=short, asleep=asleep, held=held, weights=made.weights.bytes, first=first,
                then=made.tokens(), left=page[control.SHORT])  # fmt: skip


def test_a_wake_without_memory_leaves_the_model_asleep_and_says_what_it_waits_for(model):
    told = engines.in_child(in_vain, model("llama"), vmem=True, environ=environ())
    assert len(told["errors"]) == 2 and all("MiB" in e for e in told["errors"])
    assert told["asleep"] and 0 < told["short"] <= told["weights"]
    assert told["then"] == told["first"] and not told["left"]


def resets(folder):
    """The part of a prefix cache that is left after each way of calling for a reset around a sleep."""
    made, told = Llm(folder), {}
    core = made.llm.llm_engine.engine_core.engine_core

    def found(*calls):
        made.tokens()
        made.tokens()
        warm = made.cached
        for call in calls:
            call()
        made.tokens()
        return [warm, made.cached]

    sleep, wake = (lambda: made.llm.sleep(1)), made.llm.wake_up
    reset, resume = made.llm.reset_prefix_cache, core.resume_scheduler
    told["sleep"] = found(sleep, wake)
    told["reset asleep"] = found(sleep, reset, wake)
    told["pause"] = found(lambda: core.pause_scheduler("abort", True), resume)
    told["pause, sleep"] = found(lambda: core.pause_scheduler("abort", True), sleep, wake)
    told["sleep twice"] = found(sleep, wake, sleep, wake)
    told["level 0"] = found(lambda: made.llm.sleep(0), lambda: made.llm.wake_up(["scheduling"]))
    return told


def test_a_reset_of_the_prefix_cache_is_never_lost(model):
    told = engines.in_child(resets, model("llama"), vmem=True, environ=environ())
    for name, (warm, found) in told.items():
        kept = name in ("sleep", "sleep twice", "level 0")
        assert (found == warm) if kept else (found < warm), name
