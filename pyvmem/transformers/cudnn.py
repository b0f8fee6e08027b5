"""Switches off cuDNN's attention in torch's scaled_dot_product_attention, because it makes a plan for every new length.

A plan takes tens of milliseconds. In decode, where the rows grow by one in each step, it takes longer than all else.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal

import torch

_lock = threading.Lock()
_users = 0


def switch_off(owner: object) -> weakref.finalize[..., Any] | Literal[False]:
    """Switch cuDNN's attention off in this process while `owner` lives, or until the returned function is called.

    Returns False if other code has already switched it off.
    """
    global _users
    with _lock:
        if not _users and not torch.backends.cuda.cudnn_sdp_enabled():
            return False
        _users += 1
        torch.backends.cuda.enable_cudnn_sdp(False)
    return weakref.finalize(owner, _switch_on)


def _switch_on() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            torch.backends.cuda.enable_cudnn_sdp(True)
