"""vLLM on vMem sleeps and wakes: the cases of test_vllm_answers.py that need the GPU for themselves.

vLLM requires that the device's free memory grows while it falls asleep, so no other process may take any meanwhile.

SPDX-License-Identifier: MIT
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import test_vllm_answers as answers  # noqa: E402

pytestmark = answers.pytestmark


@pytest.mark.parametrize("case", [c for c in answers.ALONE if not answers.asked() or c in answers.asked()])
def test_the_tokens_are_vllms_with_the_gpu_for_itself(tmp_path_factory, case):
    folder = answers.logs(tmp_path_factory)
    found = []
    for vmem in (0, 1):
        found += [answers.Child(vmem, case, [case], folder).read().get(case, dict(error="the process ended"))]
    answers.compare(case, *found)
