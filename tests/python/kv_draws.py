"""How the rules of a random model choose, where a background thread may change what there is to choose from.

SPDX-License-Identifier: MIT
"""

import functools

from hypothesis import strategies as st


class Numbers:
    """The arguments that a rule draws: all at once, since the background thread may change the choice."""

    def __init__(self, numbers):
        self.numbers, self.used = numbers, 0

    def __repr__(self):
        return f"Numbers({self.numbers})"

    def next(self):
        self.used += 1
        return self.numbers[self.used - 1]


NUMBERS = st.lists(st.integers(0, 2**16), min_size=7, max_size=7).map(Numbers)


def when(condition):
    """The rule does nothing otherwise. A precondition would be an answer to hypothesis, which expects equal ones."""

    def decorate(function):
        @functools.wraps(function)
        def guarded(self, **arguments):
            if condition(self):
                function(self, **arguments)

        return guarded

    return decorate


def pick(data, options):
    """One of the options, by a number that was drawn before anything was known of them."""
    return options[data.next() % len(options)]
