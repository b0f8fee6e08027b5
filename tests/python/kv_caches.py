"""Small KV caches, and requests in them, for tests.

SPDX-License-Identifier: MIT
"""

import dataclasses
import io
from argparse import ArgumentParser

import torch

import pyvmem
from pyvmem.kv.cache import KVCache, Spare
from pyvmem.tools import top

PAGE_TOKENS = 128


_SPARE = {field.name for field in dataclasses.fields(Spare)}


def grouped(options):
    """The options of a cache, of which those of `Spare` are given by their names alone."""
    spare = {name: value for name, value in options.items() if name in _SPARE}
    return {name: value for name, value in options.items() if name not in _SPARE} | {"spare": Spare(**spare)}


def make(backend, pages=1024, **options):
    """A cache of 4 tensors with `PAGE_TOKENS` tokens to the backend's smallest page."""
    page = min(pyvmem.core.default_context(backend).page_sizes)
    options = {"slots": 4, "max_tokens": 2000, "budget": pages * page, "dtype": torch.float16, "check": True,
               "name": None, "backend": backend, **options}  # fmt: skip
    return KVCache.for_model(2, 4, page // PAGE_TOKENS // 8, **grouped(options))


def view_dim(cache):
    return cache.specs[0].shape[-1]


def start(cache, tokens, slot=None):
    """A request of `tokens` tokens, in this slot if one is named; returns (slot, lengths)."""
    slot = cache.alloc(tokens, slot=slot)
    values = [0] * cache.slots
    values[slot] = tokens
    assert cache.step(values)
    return slot, values


class Event:
    """Stands for a torch.cuda.Event."""

    come = False

    def query(self):
        return self.come


def run_top(*words):
    """The output of `pyvmem top` with these arguments."""
    parser = ArgumentParser()
    top.arguments(parser)
    out = io.StringIO()
    assert top.top(parser.parse_args(words), out) == 0
    return out.getvalue()
