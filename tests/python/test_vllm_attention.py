"""Which layers get attention by slots, and in which steps it runs, with stand-ins for vLLM's modules.

tests/python/gpu/test_vllm_answers.py asks vLLM itself.

SPDX-License-Identifier: MIT
"""

import collections
import enum
import importlib
import logging
import sys
import types

import pytest
import torch

DEFAULTS = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=False,
                has_sink=False, use_mm_prefix=False, attn_type="decoder", has_sliding_window=False,
                use_non_causal=False, use_batch_invariant=False)  # fmt: skip
Asked = collections.namedtuple("Asked", DEFAULTS, defaults=DEFAULTS.values())
FEATURES = dict(has_sink="supports_sink", use_mm_prefix="supports_mm_prefix", use_non_causal="supports_non_causal",
                use_batch_invariant="supports_batch_invariance")  # fmt: skip
VALUES = ("head_size", "kv_cache_dtype", "attn_type")
PLACES = torch.tensor([3])
GraphMode = enum.Enum("GraphMode", "NONE PIECEWISE FULL")


class FlashAttentionBackend:
    """vLLM's class, as far as `SlotsBackend` changes what it supports."""

    @classmethod
    def supports_head_size(cls, head_size):
        return head_size % 8 == 0

    @classmethod
    def validate_configuration(cls, device_capability, **asked):
        wrong = [name for name, supports in FEATURES.items() if asked[name] and not getattr(cls, supports)()]
        wrong += [name for name in VALUES if not getattr(cls, f"supports_{name}")(asked[name])]
        return [f"{name} not supported" for name in wrong]


class FlashAttentionImpl:
    def __init__(self, alibi_slopes=None, sinks=None, window=-1, kv_sharing_target_layer_name=None):
        self.alibi_slopes, self.sinks, self.sliding_window = alibi_slopes, sinks, (window, 0)
        self.scale, self.logits_soft_cap, self.num_kv_heads = 1.0, 0.0, 2
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.stored = []

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales):
        return "FlashAttention"

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        self.stored.append(slot_mapping)


class FlashAttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.rswa_window = getattr(vllm_config, "rswa_window", None)

    def build(self, common_prefix_len, common_attn_metadata, fast_build):
        return types.SimpleNamespace(seq_lens=torch.zeros(1), fast=fast_build, num_actual_tokens=1, block_table=None,
                                     slot_mapping=PLACES)  # fmt: skip


class Work:
    def __init__(self, most, device, kv_heads, window):
        self.window = window

    def plan(self, lengths):
        pass


def config(**changes):
    graphs = types.SimpleNamespace(mixed_mode=lambda: changes.get("mixed", GraphMode.PIECEWISE))
    return types.SimpleNamespace(
        attention_config=types.SimpleNamespace(flash_attn_version=changes.get("flash_attn_version")),
        compilation_config=types.SimpleNamespace(cudagraph_mode=graphs),
    )


@pytest.fixture
def vllm(monkeypatch):
    """vLLM as far as `pyvmem.vllm.attention`, `module`, sees it. ran: arguments of each call of attention by slots."""
    state = types.SimpleNamespace(version=3, config=config(), layers={}, ran=[])
    contents = {
        "vllm": {},
        "vllm.config": dict(CUDAGraphMode=GraphMode, get_current_vllm_config=lambda: state.config,
                            get_layers_from_vllm_config=lambda *_: state.layers),
        "vllm.model_executor.layers.attention": dict(Attention=object),
        "vllm.model_executor.layers.attention.attention": dict(get_attention_context=lambda name: (name,)),
        "vllm.platforms": dict(current_platform=types.SimpleNamespace(get_device_capability=lambda: (9, 0))),
        "vllm.v1.attention.backend": dict(AttentionCGSupport=types.SimpleNamespace(UNIFORM_BATCH=2)),
        "vllm.v1.attention.backends.fa_utils": dict(get_flash_attn_version=lambda head_size: state.version),
        "vllm.v1.attention.backends.flash_attn": dict(
            FlashAttentionBackend=FlashAttentionBackend, FlashAttentionImpl=FlashAttentionImpl,
            FlashAttentionMetadataBuilder=FlashAttentionMetadataBuilder),
        "pyvmem.vllm.slots": dict(LEAST=32, Work=Work, decode=lambda *given: state.ran.append(given)),  # needs Triton
    }  # fmt: skip
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "pyvmem.vllm.attention", raising=False)
    state.module = importlib.import_module("pyvmem.vllm.attention")
    monkeypatch.setenv("VMEM_VLLM", "1")
    importlib.import_module("pyvmem.vllm.worker")._say.cache_clear()
    yield state
    sys.modules.pop("pyvmem.vllm.attention", None)


def chosen(backend=None, vllms=FlashAttentionBackend, **asked):
    worker = importlib.import_module("pyvmem.vllm.worker")
    return worker.attention_backend(lambda *_: vllms, backend, Asked(**asked), 8).__name__


def test_where_vllm_would_choose_flash_attention_3_attention_is_by_slots(vllm, caplog):
    caplog.set_level(logging.INFO)
    assert chosen() == chosen(has_sliding_window=True) == chosen(head_size=96) == "SlotsBackend"
    assert len(caplog.records) == 1
    assert "VMEM_VLLM_ATTENTION=table" in caplog.records[0].message


@pytest.mark.parametrize("changes", [
    dict(kv_cache_dtype="fp8"), dict(has_sink=True), dict(use_mm_prefix=True), dict(attn_type="encoder"),
    dict(use_non_causal=True), dict(use_batch_invariant=True), dict(head_size=512),
])  # fmt: skip
def test_what_slots_do_not_support_keeps_vllms_choice(vllm, changes, caplog):
    caplog.set_level(logging.INFO)
    assert chosen(**changes) == "FlashAttentionBackend"
    (record,) = caplog.records
    assert next(iter(changes)) in record.message


@pytest.mark.parametrize("changes", [dict(version=2), dict(version=4), dict(config=config(mixed=GraphMode.FULL)),
                                     dict(config=config(flash_attn_version=3))])  # fmt: skip
def test_what_was_not_checked_or_was_asked_for_otherwise_keeps_vllms_choice(vllm, changes):
    vars(vllm).update(changes)
    assert chosen() == "FlashAttentionBackend"


def test_the_users_choice_stands(vllm, monkeypatch):
    assert chosen(backend="FLASH_ATTN") == "FlashAttentionBackend"
    assert chosen(vllms=type("FlashInfer", (), {})) == "FlashInfer"
    monkeypatch.setenv("VMEM_VLLM_ATTENTION", "table")
    assert chosen() == "FlashAttentionBackend"


def built(vllm, *impls, requests=40, new=1, **changes):
    """The metadata of a step of so many requests with so many new tokens each."""
    vllm.layers = {str(i): types.SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
    vllm_config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(max_num_seqs=64), **changes)
    builder = vllm.module.SlotsBuilder(None, [*vllm.layers], vllm_config, torch.device("cpu"))
    return builder.build(0, types.SimpleNamespace(max_query_len=new, num_reqs=requests))


def forward(impl, metadata, *scales):
    rows = torch.zeros(1, 2)
    return impl.forward(None, rows, rows, rows, None, metadata, rows, *scales)


def test_decode_steps_of_many_requests_run_by_slots_and_others_as_in_vllm(vllm):
    impl = vllm.module.SlotsImpl(window=99)
    metadata = built(vllm, impl)
    assert metadata.fast  # FlashAttention's schedule is not needed
    assert forward(impl, metadata) != "FlashAttention"
    assert vllm.ran[0][5].window == 100
    for requests, new in ((31, 1), (40, 2), (65, 1)):
        metadata = built(vllm, impl, requests=requests, new=new)
        assert not metadata.fast
        assert forward(impl, metadata) == "FlashAttention"
    assert forward(impl, None) == forward(impl, built(vllm, impl), torch.ones(1)) == "FlashAttention"
    assert len(vllm.ran) == 1


@pytest.mark.parametrize("given, changes", [(dict(alibi_slopes=[1.0]), {}), (dict(sinks=[1.0]), {}),
                                            ({}, dict(rswa_window=128))])  # fmt: skip
def test_layers_with_what_only_the_constructor_knows_run_as_in_vllm(vllm, given, changes):
    impl = vllm.module.SlotsImpl(**given)
    metadata = built(vllm, impl, **changes)
    assert not metadata.fast
    assert forward(impl, metadata) == "FlashAttention"
    assert vllm.ran == []


def test_each_layer_of_a_group_has_its_own_kernel(vllm):
    plain, window, alibi = (vllm.module.SlotsImpl(**given) for given in ({}, dict(window=99), dict(alibi_slopes=[1.0])))
    metadata = built(vllm, plain, window, alibi)
    for impl, ran in ((plain, 0), (window, 100)):
        forward(impl, metadata)
        assert vllm.ran.pop()[5].window == ran
    assert forward(alibi, metadata) == "FlashAttention"


def step(impl, metadata, *scales):
    """What vLLM does in a step for a layer: its context, here the layer's name, is the metadata."""
    rows = torch.zeros(1, 2)
    layer = types.SimpleNamespace(layer_name=metadata)
    impl.do_kv_cache_update(layer, rows, rows, None, PLACES)
    return impl.forward(layer, rows, rows, rows, None, metadata, rows, *scales)


def test_fused_attention_stores_the_new_rows_in_steps_by_slots_alone(vllm, monkeypatch):
    monkeypatch.setenv("VMEM_VLLM_ATTENTION", "fused")
    assert chosen() == "SlotsBackend"
    impl = vllm.module.SlotsImpl()
    step(impl, built(vllm, impl))
    assert impl.stored == []
    (key, value, places), fused = vllm.ran.pop()[8:]
    assert key.shape == value.shape == (1, 2) and places is PLACES and fused
    for metadata in (built(vllm, impl, requests=31), None):  # as in vLLM, and a step without attention
        assert step(impl, metadata) == "FlashAttention"
    assert len(impl.stored) == 2
    step(impl, built(vllm, impl), torch.ones(1))  # the kernel cannot quantize its result
    assert len(impl.stored) == 3 and vllm.ran == []


@pytest.mark.parametrize("given", [dict(alibi_slopes=[1.0]), dict(sinks=[1.0])])
def test_layers_that_are_not_by_slots_store_their_rows(vllm, monkeypatch, given):
    monkeypatch.setenv("VMEM_VLLM_ATTENTION", "fused")
    plain, other = vllm.module.SlotsImpl(), vllm.module.SlotsImpl(**given)
    assert step(other, built(vllm, plain, other)) == "FlashAttention"
    assert len(other.stored) == 1


def test_a_layer_that_shares_anothers_rows_stores_none(vllm, monkeypatch):
    monkeypatch.setenv("VMEM_VLLM_ATTENTION", "fused")
    impl = vllm.module.SlotsImpl(kv_sharing_target_layer_name="0")
    forward(impl, built(vllm, impl))  # vLLM does not call for an update
    assert vllm.ran.pop()[8:] == (None, True)


def test_without_fused_attention_vllm_stores_the_rows(vllm):
    impl = vllm.module.SlotsImpl()
    step(impl, built(vllm, impl))
    assert len(impl.stored) == 1 and vllm.ran.pop()[8:] == (None, False)
