"""What pages behind vLLM's blocks hold, for models of every kind (`memory`)."""

import memory
import pytest


@pytest.mark.parametrize("tokens", memory.LENGTHS)
@pytest.mark.parametrize("model", memory.models())
def test_pages_hold_at_most_two_more_than_vllms_blocks(model, tokens):
    need, own, chosen, small, large, apart, page, layout = memory.sizes_of(memory.models()[model], tokens)
    assert layout == "BLNHC"
    assert need <= own <= small <= own + 2 * memory.SMALL
    assert own <= chosen <= own + 2 * page
    assert chosen == own or page == memory.SMALL  # larger pages are never shared
    assert chosen <= large <= apart
