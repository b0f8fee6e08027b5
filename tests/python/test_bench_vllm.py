"""``pyvmem bench vllm``: its workloads. The engines need a GPU and vLLM."""

import json
import types

import pytest

from pyvmem.bench import vllm, vllm_engine


def arguments(**changes):
    return types.SimpleNamespace(**{**dict(
        bench="vllm", model="tiny", kv_memory=1 << 30, max_model_len=2048, max_num_seqs=16, turns=1,
        prefix_caching=False, eager=True, tensor_parallel=1, load=None, trace=None, requests=None, mooncake=None,
    ), **changes})  # fmt: skip


def test_workloads_fit_the_engine_and_repeat():
    names = ["equal", "equal-hot", "hot", "decode", "decode-long"]
    for name, load in vllm.loads(arguments(requests=20, load=names)).items():
        made = vllm_engine.requests_of(load)
        assert made == vllm_engine.requests_of(load), name
        assert all(len(prompt) + output <= 2048 for prompt, output in made), name
        assert vllm_engine.requests_of(dict(load, seed=99)) != made, name


def test_hot_prompts_begin_alike():
    load = vllm.loads(arguments(requests=60, load=["hot"]))["hot"]
    starts = [tuple(prompt[:128]) for prompt, _ in vllm_engine.requests_of(load)]
    assert len(set(starts)) < len(starts)


def test_mooncakes_hash_ids_are_the_prompts_blocks(tmp_path):
    rows = [dict(timestamp=0, input_length=1100, output_length=5, hash_ids=[1, 2, 3]),
            dict(timestamp=1, input_length=900, output_length=7, hash_ids=[1, 2])]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    load = vllm.loads(arguments(mooncake=str(path), load=["mooncake"]))["mooncake"]
    (first, five), (second, seven) = vllm_engine.requests_of(load)
    assert (len(first), five, len(second), seven) == (1100, 5, 900, 7)
    assert first[:900] == second
    assert first[512:1024] != first[:512]


def test_an_unknown_workload_is_named():
    with pytest.raises(ValueError, match="--load azure: one of"):
        vllm.loads(arguments(load=["azure"]))


def test_bench_all_leaves_vllm_out():
    assert vllm.run(types.SimpleNamespace(args=arguments(bench="all"))) == []


@pytest.mark.parametrize("shape", vllm_engine.SHAPES)
def test_shapes_are_configurations(tmp_path, shape):
    vllm_engine.write_config(tmp_path, shape, 4096)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
    assert config["hidden_size"] and config["architectures"]
