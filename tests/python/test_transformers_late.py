"""VMemCache whose kernels run long after Python has gone on: over the fake driver, and on a GPU.

SPDX-License-Identifier: MIT
"""

import contextlib
import gc

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from conftest import BACKENDS  # noqa: E402
from late import MS, Kernels, Launches, fake_driver, tensors_of_the_fake_driver  # noqa: E402
from logits import difference, run, stock  # noqa: E402
from tiny_models import MODELS, tiny_model  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem.transformers import VMemCache  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SEVERAL = [name for name in MODELS if name != "gemma4_shared"]


class Passes:
    """Passes of a model, with lags before them; over the fake driver, with kernels that have not begun at their end."""

    def __init__(self, backend, monkeypatch):
        self.backend = backend
        self.device = "cpu" if fake_driver() else "cuda"
        self.kernels = Kernels(backend)
        self.mode = contextlib.nullcontext()
        if self.kernels.fake:
            self.mode = Launches(self.kernels, tensors_of_the_fake_driver(monkeypatch))

    def begin(self, *_):
        if self.device == "cuda":
            torch.cuda._sleep(30 * MS)
        else:
            self.kernels.end()  # those of the pass before

    def logits(self, model, cache, attention, side):
        handle = model.register_forward_pre_hook(self.begin)
        try:
            with self.mode:
                return run(model, cache, attention, side, device=self.device)
        finally:
            handle.remove()


# On the host, kernels have ended when torch returns.
@pytest.fixture(params=[name for name in BACKENDS if name != "host"])
def passes(request, monkeypatch):
    backend = request.param
    if not fake_driver() and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    passes = Passes(backend, monkeypatch)
    yield passes
    passes.kernels.close()


def theirs(model, side, device):
    return run(model, transformers.DynamicCache(config=model.config), stock(model), side, device=device)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("attention", ["vmem", "stock"])
@pytest.mark.parametrize("name", ["gemma4_shared", "gemma3", "qwen3_next"])
def test_logits_of_late_passes(passes, name, attention, side):
    """Gemma 4 moves its rows in the first pass, while layers that share rows read them where they were."""
    model = tiny_model(name, device=passes.device)
    want = theirs(model, side, passes.device)
    for end in ("dropped", "closed"):
        cache = VMemCache(model, backend=passes.backend, budget=256 << 20, max_tokens=64)
        got = passes.logits(model, cache, attention if attention == "vmem" else stock(model), side)
        passes.begin() if passes.device == "cuda" else None
        if end == "closed":
            cache.close()
        del cache
        gc.collect()
        passes.kernels.end()
        assert difference(got, want) < 1e-4


@pytest.mark.parametrize("name", SEVERAL)
def test_logits_of_late_passes_of_every_family(passes, name):
    model = tiny_model(name, device=passes.device)
    cache = VMemCache(model, backend=passes.backend, budget=256 << 20, max_tokens=64)
    got = passes.logits(model, cache, "vmem", "left")
    del cache
    gc.collect()
    passes.kernels.end()
    assert difference(got, theirs(model, "left", passes.device)) < 1e-4


def test_a_cache_that_is_collected_while_a_graph_is_captured(passes, monkeypatch):
    model = tiny_model("llama", device=passes.device)
    cache = VMemCache(model, backend=passes.backend, budget=256 << 20, max_tokens=64)
    passes.logits(model, cache, "sdpa", "none")
    late = passes.kernels
    if passes.device == "cuda":
        torch.cuda.synchronize()  # what it launched must not be captured
    late.read(cache.kv.tensors[0][0, :8])
    with late.capture(monkeypatch):
        del cache
        gc.collect()
    late.end()


@pytest.mark.parametrize("call", ["reset", "crop", "offload", "batch_select_indices"])
def test_a_call_that_gives_rows_up_says_that_it_cannot_while_a_graph_is_captured(passes, monkeypatch, call):
    if passes.device == "cuda":
        pytest.skip("a call that raises ends the capture")
    model = tiny_model("llama", device=passes.device)
    cache = VMemCache(model, backend=passes.backend, budget=256 << 20, max_tokens=64)
    passes.logits(model, cache, "sdpa", "none")
    before = cache.rows._lengths.copy()
    arguments = {"crop": (-2,), "batch_select_indices": (torch.tensor([1, 0]),)}.get(call, ())
    with passes.kernels.capture(monkeypatch), pytest.raises(pyvmem.VmemError, match="a CUDA graph is being captured"):
        getattr(cache, call)(*arguments)
    assert (cache.rows._lengths == before).all()
    getattr(cache, call)(*arguments)
