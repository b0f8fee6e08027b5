"""The bytes of pages behind vLLM's blocks, for models of every kind (`memory`)."""

import memory
import pytest


SPREAD = ("Llama-3-70B, one of 8 GPUs", "Gemma-3-27B")  # layout.spread adds 512 bytes to their blocks


@pytest.mark.parametrize("tokens", memory.LENGTHS)
@pytest.mark.parametrize("model", memory.models())
def test_pages_hold_little_more_than_vllms_blocks(model, tokens):
    need, own, chosen, small, large, apart, page, layout = memory.sizes_of(memory.models()[model], tokens)
    assert layout == "BLNHC"
    most = 1.001 * own if model in SPREAD else own
    assert need <= own <= small <= most + 2 * memory.SMALL
    assert own <= chosen <= 1.01 * most + 2 * page  # windows leave blocks that are scattered
    assert page == memory.LARGE  # a block of all layers is one piece
    assert chosen <= large <= apart
