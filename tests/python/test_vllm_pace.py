"""How long a device still computes: `pyvmem.vllm.waiting.Pace`, which needs no vLLM.

SPDX-License-Identifier: MIT
"""

from pyvmem.vllm.waiting import Pace


def test_nothing_is_known_at_first_and_nothing_is_left_while_no_step_is_in_flight():
    pace = Pace(512)
    assert pace.left(0.0) == 0
    pace.begin(1, 1000, 0.0)
    assert pace.left(0.0) == 0
    pace.end(1, 0.5)
    assert pace.left(0.5) == 0


def test_the_least_time_counts_of_steps_of_the_same_size():
    pace = Pace(512)
    for step, seconds in enumerate((0.04, 0.02, 0.03), 1):
        pace.begin(step, 1000, 10.0 * step)
        pace.end(step, 10.0 * step + seconds)
    pace.begin(4, 800, 50.0)
    assert abs(pace.left(50.0) - 0.016) < 1e-9
    assert abs(pace.left(50.01) - 0.006) < 1e-9
    assert pace.left(51.0) == 0


def test_steps_in_flight_follow_each_other():
    pace = Pace(512)
    pace.begin(1, 1000, 0.0)
    pace.begin(2, 1000, 0.001)
    pace.end(1, 0.02)
    pace.end(2, 0.04)  # it began when the first had ended
    pace.begin(3, 1000, 1.0)
    pace.begin(4, 1000, 1.0)
    assert abs(pace.left(1.0) - 0.04) < 1e-9


def test_small_steps_and_sizes_that_were_not_seen_promise_little():
    pace = Pace(512)
    pace.begin(1, 8000, 0.0)
    pace.end(1, 0.2)
    pace.begin(2, 600, 1.0)  # a small step takes longer for each token
    assert abs(pace.left(1.0) - 600 * 0.2 / 8000) < 1e-9
    pace.end(2, 1.03)
    pace.begin(3, 100, 2.0)
    assert pace.left(2.0) == 0


def test_answers_that_never_came_are_forgotten():
    pace = Pace(512)
    pace.begin(1, 1000, 0.0)
    pace.begin(2, 1000, 0.0)
    pace.end(2, 0.05)
    assert pace.left(0.05) == 0
