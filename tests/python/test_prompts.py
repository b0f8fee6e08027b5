"""What prompts begin with alike."""

import itertools
import random

from pyvmem.engine.prompts import Prompts


def test_each_prompt_begins_as_far_like_one_before_it_as_comparing_all_of_them_says():
    draw = random.Random(1).choice
    for _ in range(200):
        prompts, before = Prompts(), []
        for _ in range(12):
            tokens = [draw("ab") for _ in range(draw(range(9)))]
            hashes = list(itertools.accumulate(tokens))
            assert prompts.add(hashes) == max((sum(a == b for a, b in zip(hashes, o)) for o in before), default=0)
            before.append(hashes)
