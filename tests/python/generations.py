"""``generate()`` with a cache of ours, and with transformers' own; fixtures for tests that do.

SPDX-License-Identifier: MIT
"""

import warnings

import pytest
import torch
import transformers
from logits import padding  # noqa: F401

import pyvmem
from pyvmem.transformers import VMemCache


@pytest.fixture(autouse=True, name="one_thread")
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="make")
def make_cache(backend, device):
    """make(model, **options): a VMemCache that verifies its books, closed at the end."""
    made = []

    def cache(model, **options):
        made.append(VMemCache(model, **{"backend": backend, "check": True, "name": None, **options}))
        return made[-1]

    yield cache
    for c in made:
        c.close()


def generate(model, ids, cache, attention="sdpa", new=12, **options):
    model.set_attn_implementation(attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)


def reference(model, ids, new=12, **options):
    attention = "eager" if model.config.model_type in ("gemma2", "gpt_oss") else "sdpa"
    return generate(model, ids, transformers.DynamicCache(config=model.config), attention, new, **options)


@pytest.fixture(name="small_pages")
def pages_of_64_kib(backend):
    """Skips where the smallest page is 2 MiB, which holds all rows of a small model."""
    if min(pyvmem.core.default_context(backend).page_sizes) > 65536:
        pytest.skip(f"{backend} has no pages of 64 KiB")
