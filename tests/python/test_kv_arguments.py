"""Arguments of a KV cache: options, lengths and numbers; what is wrong is named.

SPDX-License-Identifier: MIT
"""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest
import torch
from kv_caches import grouped, make, start

import pyvmem
from pyvmem import KVCacheOptions
from pyvmem.kv.cache import KVCache, Spare, model_specs
from pyvmem.kv.prefix import PrefixCache

SMALL = {"slots": 4, "max_tokens": 100, "budget": 64 << 20}


def test_options_as_an_object_and_by_name(backend):
    options = KVCacheOptions(backend=backend, name=None, tile_rows=8, lazy=True)
    with KVCache.for_model(1, 2, 64, **SMALL, options=options) as cache:
        assert cache.options == options
        assert (cache.tile_rows, cache.options.lazy, cache.context.backend) == (8, True, backend)
    with KVCache.for_model(1, 2, 64, **SMALL, options=options, tile_rows=16) as cache:  # a name goes before the object
        assert cache.options == dataclasses.replace(options, tile_rows=16)
        assert cache.tile_rows == 16


def test_options_can_be_copied_and_read_back():
    options = KVCacheOptions(name="a", spare=Spare(defer=False, ahead_tokens=7))
    assert pickle.loads(pickle.dumps(options)) == copy.copy(options) == options
    with pytest.raises(TypeError, match="argument 'defer'"):
        KVCacheOptions(defer=False)
    with pytest.raises(TypeError, match="overlap must be True or False, not 'no'"):
        Spare(overlap="no")


def test_wrong_options_are_named(backend):
    for wrong, name in (
        ({"tile_row": 1}, "unknown KVCache option tile_row: the options are backend, "),
        ({"options": {"tile_rows": 1}}, "options must be KVCacheOptions"),
        ({"spare": {"overlap": False}}, "spare must be a Spare, not {'overlap': False}"),
        ({"overlap": False}, r"overlap is an option of Spare: use spare=Spare\(overlap=...\)"),
        ({"context": backend}, "context must be a Context"),
        ({"name": 3}, "name must be a string"),
    ):
        with pytest.raises(TypeError, match=name):
            KVCache.for_model(1, 2, 64, **SMALL, **wrong)


@pytest.mark.parametrize("option, value, said", [
    ("tile_rows", 0, "tile_rows 0 must be at least 1"),  # a multiple of every kernel's tile
    ("steps_in_flight", 0, "steps_in_flight 0 must be at least 1"),
    ("steps_in_flight", 17, "steps_in_flight 17 is over 16"),
    ("spare", Spare(reclaim_percent=51), "reclaim_percent 51 is over 50"),
    ("pool_min", 65 << 20, f"pool_min {65 << 20} is over budget, {64 << 20}"),
])  # fmt: skip
def test_options_outside_their_limits_are_named(option, value, said):
    with pyvmem.KVPool(128 << 20) as pool, pytest.raises(pyvmem.InvalidArgument, match=said):
        KVCache.for_model(1, 2, 64, **SMALL, backend="host", **({"pool": pool} if option == "pool_min" else {}),
                          **{option: value})  # fmt: skip


def test_a_backend_that_is_not_the_contexts_is_refused():
    with pyvmem.Context("host") as context:
        with pytest.raises(ValueError, match="backend 'cuda' is not the context's, 'host'"):
            KVCache.for_model(1, 2, 64, **SMALL, context=context, backend="cuda")
        KVCache.for_model(1, 2, 64, **SMALL, context=context, backend="host", name=None).close()


def test_numbers_of_blocks_are_named_as_in_python():
    with KVCache.for_model(1, 2, 64, **SMALL, backend="host", name=None) as cache:
        with pytest.raises(pyvmem.InvalidArgument, match="^block_tokens 101 is not between 1 and max_tokens, 100"):
            PrefixCache(cache, 101)


def test_a_cache_says_what_it_is():
    with KVCache.for_model(1, 2, 64, **SMALL, backend="host", name=None) as cache:
        assert repr(cache) == "<pyvmem.KVCache 4 slots of 100 tokens on host>"
    assert repr(cache) == "<pyvmem.KVCache 4 slots of 100 tokens on host, closed>"


def test_every_option_is_documented():
    for options in (KVCacheOptions, Spare):
        text = inspect.getdoc(options)
        for field in dataclasses.fields(options):
            assert f"\n{field.name} :" in text or f", {field.name} :" in text or f"\n{field.name}, " in text, field.name


@pytest.mark.parametrize("kind", ["list", "tuple", "int32", "int64", "torch32", "torch64"])
def test_lengths_of_every_kind(backend, kind):
    with make(backend) as cache:
        slot = cache.alloc()
        values = [0] * 4
        values[slot] = 50
        given = {
            "list": list,
            "tuple": tuple,
            "int32": lambda v: np.array(v, np.int32),
            "int64": lambda v: np.array(v, np.int64),
            "torch32": lambda v: torch.tensor(v, dtype=torch.int32),
            "torch64": torch.tensor,
        }[kind](values)
        assert cache.step(given)
        assert cache.slot(slot).tokens == 50


def test_wrong_arguments_are_named(backend):
    with make(backend) as cache:
        slot, values = start(cache, 10)
        with pytest.raises(ValueError, match="max_tokens"):
            cache.step([2001 if s == slot else 0 for s in range(4)])
        with pytest.raises(ValueError, match="elements|shape"):
            cache.step([1])
        with pytest.raises(TypeError, match="integers"):
            cache.step(np.zeros(4))
        # Numbers that no 32-bit integer holds must not become others on the way.
        for kind in (list, np.array, torch.tensor):
            with pytest.raises(ValueError, match=r"lengths\[2\] 4294967297"):
                cache.step(kind([0, 0, (1 << 32) + 1, 0]))
        for wrong in (1.5, "x", None):
            with pytest.raises(TypeError, match=r"lengths\[1\]"):
                cache.step([0, wrong, 0, 0])
        with pytest.raises(ValueError, match="free"):
            cache.step([1] * 4)
        with pytest.raises(ValueError, match="slot 9"):
            cache.free(9)
        with pytest.raises(ValueError, match="free"):
            cache.free((slot + 1) % 4)
        with pytest.raises(ValueError, match="not swapped"):
            cache.swap_in(slot)
        with pytest.raises(ValueError, match="newly allocated"):
            cache.attach(slot, cache.share(slot, 5))
    with pytest.raises(ValueError, match="closed"):
        cache.step([0] * 4)
    with pytest.raises(ValueError, match="page_size"):
        make(backend, page_size=4096)
    with pytest.raises(ValueError, match="layout"):
        model_specs(1, 1, 1, torch.float16, "sideways")
    for layers in (0, 1 << 40):
        with pytest.raises(ValueError, match="layers"):
            model_specs(layers, 1, 1, torch.float16)
    with pytest.raises(ValueError, match="shape"):
        model_specs(1, 0, 1, torch.float16)
    with pytest.raises(TypeError, match="dtype"):
        model_specs(1, 1, 1, "half")
    # Numpy's small integers would wrap.
    assert model_specs(1, np.uint8(4), np.uint8(65), torch.float16)[0].row_bytes == 520


@pytest.mark.parametrize(
    "name",
    ["slots", "max_tokens", "budget", "tile_rows", "window", "ahead_tokens", "ahead_min", "eager_tokens",
     "reclaim_percent"],
)  # fmt: skip
def test_a_cache_of_wrong_numbers(backend, name):
    good = {"slots": 4, "max_tokens": 100, "budget": 64 << 20, "backend": backend, "name": None}
    for value in (-1, 1 << 64):
        with pytest.raises(ValueError, match=name):
            KVCache.for_model(1, 2, 64, **grouped({**good, name: value}))
    with pytest.raises(TypeError, match=name):
        KVCache.for_model(1, 2, 64, **grouped({**good, name: 1.5}))


def test_calls_with_wrong_numbers_name_the_argument(backend):
    with make(backend) as cache:
        start(cache, 10)
        calls = {
            "slot": (cache.free, cache.slot, cache.swap_out, lambda x: cache.truncate(x, 0),
                     lambda x: cache.share(x, 1), lambda x: cache.attach(x, [])),
            "tokens": (cache.alloc, lambda x: cache.truncate(0, x), lambda x: cache.share(0, x)),
            "first": (lambda x: cache.share(0, 1, x),),
            "most": (lambda x: cache.attach(0, [], x),),
            "bytes": (cache.set_budget, cache.reclaim),
            "tensor": (cache.layout, cache.flat),
            "after": (lambda x: cache.free(0, after=x), lambda x: cache.truncate(0, 5, after=x)),
            "step": (cache.retire,),
            "pages": (PrefixCache(cache).evict,),
        }  # fmt: skip
        for name, each in calls.items():
            for call in each:
                for value in (-1, 1 << 64):
                    with pytest.raises(ValueError, match=name):
                        call(value)
                for value in (1.5, "1", torch.tensor(1.5), True):
                    with pytest.raises(TypeError, match=f"{name} must be an integer"):
                        call(value)
        for wrong in (5, None, np.array(5)):
            with pytest.raises(TypeError, match="slots must be a sequence, not"):
                cache.tokens(wrong)
        assert cache.stats().active_slots == 1
