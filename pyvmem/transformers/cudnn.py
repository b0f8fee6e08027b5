"""cuDNN's attention behind torch's scaled_dot_product_attention, which plans every new length anew.

A plan costs tens of milliseconds, so a decode step whose rows grow by one costs more for it than for everything else.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal

import torch

_lock = threading.Lock()
_users = 0


def keep_off(owner: object) -> weakref.finalize[..., Any] | Literal[False]:
    """Keep cuDNN's attention switched off in this process for as long as `owner` lives, or until the call of what this
    returns. False where other code has switched it off already."""
    global _users
    with _lock:
        if not _users and not torch.backends.cuda.cudnn_sdp_enabled():
            return False
        _users += 1
        torch.backends.cuda.enable_cudnn_sdp(False)
    return weakref.finalize(owner, _let_go)


def _let_go() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            torch.backends.cuda.enable_cudnn_sdp(True)
