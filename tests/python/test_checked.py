"""VMEM_CHECK=1: an operation that touches a row which is not backed raises an error that names it.

SPDX-License-Identifier: MIT
"""

import runpy

import pytest

torch = pytest.importorskip("torch")

from pyvmem import checked, virtual_empty  # noqa: E402

SETUP = """
import pytest, torch
from pyvmem import KVCache, attention, virtual_empty

v = virtual_empty((1 << 20, 4096), torch.bfloat16, "cpu")
v.commit(rows=slice(0, 1000))
t = v.tensor
cache = KVCache.for_model(2, 2, 64, slots=4, max_tokens=4096, budget=32 << 20, dtype=torch.float32, backend="host",
                          layout=layout, page_size=65536)
slots = [cache.alloc(slot=0), cache.alloc(slot=1)]  # alloc() leaves one alone that the worker prepares
cache.step([300, 7, 0, 0])
k = cache.keys[1]

def refused(what, row):
    with pytest.raises(IndexError, match=f"row {row} of .*backed"):
        what()
"""

CASES = {
    "a virtual tensor": """
t[:1000].normal_()
t[999, 5] = 1
t[torch.tensor([0, 999])] = 2
t[3:5].sum() + t[:1000, 7].float().mean() + t[-(1 << 20)].sum()
assert t[:1000].view(-1).shape == (1000 * 4096,) and t[5000].shape == (4096,)  # a view touches nothing
refused(lambda: t.__setitem__(5000, 1), 5000)
refused(lambda: t[998:1010].sum(), 1000)
refused(lambda: t[:, 0].sum(), 1000)
refused(lambda: t[torch.tensor([3, 5001])], 5001)
refused(lambda: t.index_select(0, torch.tensor([5002])), 5002)
refused(lambda: t.__setitem__(torch.tensor([-1]), 1), (1 << 20) - 1)
refused(lambda: t[2000].copy_(t[0]), 2000)
refused(lambda: t[0].copy_(t[2000]), 2000)
refused(lambda: print(t[2000]), 2000)
v.decommit(rows=slice(500, 1000))
refused(lambda: t[:600].sum(), "5..")
""",
    "tensors that outlive their owners": """
t = virtual_empty((4096, 1024)).tensor
refused(lambda: t[0].fill_(1), 0)
w = virtual_empty((4096, 1024))
w.commit(rows=slice(0, 64))
t = w.tensor
w.close()
t[:64].fill_(1)
refused(lambda: t[64].fill_(1), 64)
k, values = cache.keys[1], cache.values[1]
cache.close()
k[0, :256].fill_(1)
refused(lambda: k[3, 1024].fill_(1), "1024 of slot 3")
del cache
refused(lambda: values[3].sum(), "0 of slot 3")
readable = virtual_empty((4096, 1024), backdrop=True).tensor
assert readable[2000].sum() == 0
refused(lambda: readable[2000].fill_(1), 2000)
""",
    "copies": """
import copy, io, pickle
w = virtual_empty((64, 1024))
w.commit()
w.tensor.fill_(3)
file = io.BytesIO()
torch.save(w.tensor[:3], file)
file.seek(0)
copies = [copy.deepcopy(w.tensor), copy.deepcopy(w.tensor[5]), torch.load(file)]
for got in (pickle.loads(pickle.dumps(w.tensor)), *copies):
    assert type(got) is torch.Tensor and (got == 3).all()
    got += 1  # of its own
assert (w.tensor == 3).all()
for how in (pickle.dumps, copy.deepcopy):
    refused(lambda: how(t[:2]), 1000)
    with pytest.raises(RuntimeError, match="are backed: use a clone"):
        how(t)
""",
    "a cache": """
for slot, rows in zip(slots, (300, 7)):
    k[slot, :rows].normal_()
    cache.values[1][slot, :rows].normal_()
k[:2, :7].sum()
full = KVCache.for_model(1, 2, 16, slots=2, max_tokens=256, budget=1 << 20, dtype=torch.float32, backend="host")
full.alloc(), full.alloc()  # both
full.step([255, 256])  # the gap between the slots is one row
full.keys[0][:, :255].fill_(1)
full.keys[0][:, :255].transpose(1, 2).sum()
refused(lambda: full.keys[0].sum(), "255 of slot 0")
k[torch.tensor([0, 1]), torch.tensor([299, 6])] = 1.0
batch = attention.Batch(cache, slots, [300, 7])
attention.decode(torch.randn(2, 4, 64), cache, 1, batch, new=(torch.randn(2, 2, 64), torch.randn(2, 2, 64)))
refused(lambda: k[0, :301].sum(), "300 of slot 0")
refused(lambda: k[:2, :8].sum(), "7 of slot 1")
refused(lambda: k[2, 0].fill_(1), "0 of slot 2")
refused(lambda: k.__setitem__((torch.tensor([0, 1]), torch.tensor([299, 7])), 1.0), "7 of slot 1")
refused(lambda: torch.nn.functional.scaled_dot_product_attention(
    torch.randn(1, 2, 1, 64), *(x[1:2, :9].transpose(1, 2) for x in (k, cache.values[1]))), "7 of slot 1")
cache.step([301, 7, 0, 0])
k[0, :301].sum()
""",
}


@pytest.fixture
def on(monkeypatch):
    monkeypatch.setattr(checked, "ON", True)


@pytest.mark.parametrize("layout", ["separate", "fused"])
@pytest.mark.parametrize("case", CASES)
def test_the_row_is_named(case, layout, on):
    exec(SETUP + CASES[case], {"layout": layout})


@pytest.mark.parametrize("attention", ["sdpa", "vmem"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_runs_checked(name, attention, on):
    pytest.importorskip("transformers", minversion="5.0")
    from generations import generate, padding, reference
    from tiny_models import prompts, tiny_model

    from pyvmem.transformers import VMemCache

    model, ids, mask = tiny_model(name), prompts(), padding("left")
    with VMemCache(model, backend="host", name=None) as cache:
        got = generate(model, ids, cache, attention, attention_mask=mask)
        assert got.tolist() == reference(model, ids, attention_mask=mask).tolist()
        assert isinstance(cache.kv.tensors[0], checked.Checked)


@pytest.mark.parametrize("value", ["1", "0", "", None])
def test_nothing_is_checked_unless_it_is_asked_for(value, monkeypatch):
    monkeypatch.delenv("VMEM_CHECK", raising=False) if value is None else monkeypatch.setenv("VMEM_CHECK", value)
    monkeypatch.setattr(checked, "ON", runpy.run_path(checked.__file__)["ON"])  # as an import of now has it
    assert type(virtual_empty(4).tensor) is (checked.Checked if value == "1" else torch.Tensor)
