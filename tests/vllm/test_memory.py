"""What pages behind vLLM's blocks hold, for models of every kind (`memory`)."""

import memory
import pytest


@pytest.mark.parametrize("tokens", memory.LENGTHS)
@pytest.mark.parametrize("model", memory.models())
def test_pages_hold_little_more_than_vllms_blocks(model, tokens):
    need, own, chosen, small, large, apart, page, layout = memory.sizes_of(memory.models()[model], tokens)
    assert layout == "BLNHC"
    assert need <= own <= small <= own + 2 * memory.SMALL
    assert own <= chosen <= 1.01 * own + 2 * page  # windows leave blocks that are scattered
    assert page == memory.LARGE  # a block of all layers is one piece
    assert chosen <= large <= apart
