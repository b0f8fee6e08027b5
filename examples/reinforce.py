"""The training step of rollout.py: REINFORCE over micro-batches.

SPDX-License-Identifier: MIT
"""

import torch

MICRO_BATCH = 4  # sequences that are trained on at once: activations grow with it, and not with all sequences


def train(policy, optimizer, sequences, advantages):
    """One step of REINFORCE, whose gradients add up over micro-batches."""
    total = 0.0
    for some, advantage in zip(sequences.split(MICRO_BATCH), advantages.split(MICRO_BATCH)):
        logits = policy(some[:, :-1], use_cache=False).logits
        chosen = torch.log_softmax(logits.float(), -1).gather(-1, some[:, 1:, None])[..., 0]
        loss = -(advantage[:, None] * chosen).mean() * (len(some) / len(sequences))
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total
