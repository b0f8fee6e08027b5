"""Decode steps of generate() as CUDA graphs: the same tokens, from fewer launches.

SPDX-License-Identifier: MIT
"""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from generations import generate, make_cache, padding, pages_of_64_kib, reference, single_thread  # noqa: E402, F401
from tiny_models import prompts, tiny_model  # noqa: E402

import pyvmem  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Recorder:
    """Stands for a CUDA graph where there is none: runs the captured function again, with the same arguments."""

    def __init__(self, device):
        pass

    def capture(self, function):
        self._function = function
        self._output = function()
        return self._output

    def replay(self):
        new = self._function()
        with torch.inference_mode():  # a graph writes to memory, whatever mode it was captured in
            self._output.logits.copy_(new.logits)


def graphs(model, device):
    from decode_graphs import DecodeGraphs

    return DecodeGraphs(model) if device == "cuda" else DecodeGraphs(model, Recorder)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3"])
def test_captured_steps_give_the_same_tokens(name, side, make, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # sdpa alone takes float32, and is not captured
    model, mask = tiny_model(name, device=device, dtype=dtype), padding(side).to(device)
    with graphs(model, device) as captured:
        cache = make(model, max_tokens=200)
        for seed in range(2):  # the second call runs from what the first has captured
            ids = prompts(seed=seed, device=device)
            got = generate(model, ids, cache, "vmem", attention_mask=mask)
            cache.reset()
            assert (captured.captured, captured.replayed) == (1, 10 + 11 * seed), captured.refused
            with_plain = generate(model, ids, make(model), "sdpa", attention_mask=mask)
            assert captured.replayed == 10 + 11 * seed and captured.refused
            assert got.tolist() == with_plain.tolist()
    assert "forward" not in vars(model)


def test_captured_steps_follow_beams_lengths_and_new_caches(make, device, monkeypatch):
    import decode_graphs as module

    monkeypatch.setattr(module, "_LEAST", 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, ids = tiny_model("llama", device=device, dtype=dtype), prompts(2, device=device)
    # Beams in bfloat16 nearly tie: with DynamicCache, transformers' eager and sdpa attention choose different ones.
    plain = generate(model, ids, make(model), "vmem", new=24, num_beams=3)
    want = plain if device == "cuda" else reference(model, ids, new=24, num_beams=3)
    with graphs(model, device) as captured:
        for _ in range(2):
            got = generate(model, ids, make(model), "vmem", new=24, num_beams=3)
            assert got.tolist() == want.tolist()
        assert captured.captured >= 3  # up to 16, up to 32 and up to 64 rows, of two caches
        assert captured.replayed > 40


def test_steps_that_cannot_be_captured_run_as_before(make, device):
    model, ids = tiny_model("qwen3_next", device=device), prompts(device=device)
    with graphs(model, device) as captured:
        got = generate(model, ids, make(model), "vmem")
        assert captured.replayed == 0 and captured.refused == "layers that are not attention"
        with pytest.raises(ValueError, match="already runs its forward passes"):
            graphs(model, device)
    captured.close()
    assert got.tolist() == reference(model, ids).tolist()


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "deepseek_v3"])
def test_a_step_that_reads_rows_as_one_tensor_is_not_captured(name, make, device):
    """A graph would read as many rows in all later steps: sinks, chunks and latents, which no kernel takes."""
    model, ids = tiny_model(name, device=device), prompts(device=device)
    with graphs(model, device) as captured:
        got = generate(model, ids, make(model, max_tokens=200), "vmem")
        assert (captured.captured, captured.replayed) == (0, 0)
        why = "layer: K " if name == "deepseek_v3" else "the model's step could not be captured: "
        assert captured.refused.startswith(why)
    assert got.tolist() == reference(model, ids).tolist()


def test_the_kernel_of_a_captured_step_is_chosen_with_the_soft_cap(make, device, monkeypatch):
    asked, best = [], pyvmem.attention.best
    monkeypatch.setattr(pyvmem.attention, "best", lambda *a, **k: asked.append(k["softcap"]) or best(*a, **k))
    model, ids = tiny_model("gemma2", device=device), prompts(device=device)
    with graphs(model, device) as captured:
        got = generate(model, ids, make(model, max_tokens=200), "vmem")
        assert asked[0] == model.config.attn_logit_softcapping > 0
        assert captured.captured == (device == "cuda"), captured.refused  # on a CPU, no kernel takes it
    assert got.tolist() == reference(model, ids).tolist()


def test_out_of_memory_in_a_captured_step(make, device, backend, small_pages):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = tiny_model("llama", device=device, dtype=dtype, max_position_embeddings=8192)
    page = min(pyvmem.Context(backend).page_sizes)
    cache = make(model, budget=4 * page)
    model.set_attn_implementation("vmem")
    with graphs(model, device) as captured:
        rows = page // (2 * 16 * dtype.itemsize)
        tokens = prompts(1, rows - 3, device=device)
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=cache)
            for _ in range(3):
                model(input_ids=tokens[:, :1], past_key_values=cache)
            with pytest.raises(pyvmem.OutOfMemory):
                model(input_ids=tokens[:, :1], past_key_values=cache)
            assert captured.replayed == 2 and cache.get_seq_length() == rows
