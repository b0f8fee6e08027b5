"""Admission: a scheduler's questions about waiting requests, before they have slots.

SPDX-License-Identifier: MIT
"""

import array
import errno
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pyvmem._checks import elements, shown, uint
from pyvmem._ffi import ffi, lib
from pyvmem.errors import _check, structure
from pyvmem.kv.base import KVBase
from pyvmem.kv.types import GroupInfo

if TYPE_CHECKING:
    from pyvmem.kv.hashes import BlockHashes, Hash

# A waiting request: the tokens of its first step; or these, and how many of them a prefix provides, or its hashes.
Request = SupportsIndex | tuple[SupportsIndex, "SupportsIndex | Sequence[Hash]"]

_GROUP = tuple(field.name for field in fields(GroupInfo))[3:]
_REQUEST = np.dtype([("tokens", np.uint32), ("prefix", np.uint32), ("hashes", np.uintp), ("n", np.uint64)])


def _raw(requests: Iterable[Request], hashes: "BlockHashes | None") -> tuple[npt.NDArray[Any], list[Any]]:
    """The requests as C structures, and the objects that these point to."""
    if type(requests) is list:
        try:
            sizes = array.array("I", requests)
        except (OverflowError, TypeError):
            pass
        else:
            raw = np.zeros(len(sizes), _REQUEST)
            raw["tokens"] = sizes
            return raw, []
    given = elements("requests", requests)
    raw, kept = np.zeros(len(given), _REQUEST), []
    for i, request in enumerate(given):
        tokens, prefix = request if isinstance(request, tuple) and len(request) == 2 else (request, 0)
        if isinstance(prefix, Sequence) and not isinstance(prefix, str | bytes):
            if hashes is None:
                raise ValueError(f"requests[{i}] has hashes, but the cache has none: create BlockHashes for it first")
            length = uint(f"requests[{i}].tokens", tokens, 32)
            data, n = hashes._raw(prefix)
            n -= n > 0 and n * hashes.tokens == length  # the last token remains, as in BlockHashes.alloc
            kept.append(data)
            raw[i] = (length, 0, int(ffi.cast("uintptr_t", data)), n)
            continue
        if not hasattr(tokens, "__index__") or not hasattr(prefix, "__index__"):
            wanted = "must be a number of tokens, (tokens, prefix_tokens) or (tokens, hashes)"
            raise TypeError(f"requests[{i}] {wanted}, not {shown(request)}")
        number = uint(f"requests[{i}].prefix_tokens", prefix, 32)
        raw[i] = (uint(f"requests[{i}].tokens", tokens, 32), number, 0, 0)
    return raw, kept


class KVAdmission(KVBase):
    """The questions that a scheduler asks."""

    def fit(self, requests: Iterable[Request]) -> int:
        """Return how many of these new requests, in this order, would find a slot and memory; changes nothing.

        The answer is exact: that many can be allocated, begin with their prefixes, and take part in the next step
        together with all growth that is staged, unless others take the memory before (see `KVCache.check`). The next
        request would not fit: `shortage` says why, and `missing_pages` how much it lacks. New requests must leave the
        watermark free (`set_watermark`).

        Parameters
        ----------
        requests : sequence of int, (int, int) or (int, hashes)
            Tokens of the first step, at least 1; or these, and how many of them a prefix or named blocks provide; or
            the hashes of the blocks that a request begins with as far as they are known (`kv_hashes.BlockHashes`). As
            in `BlockHashes.alloc`, the last token always remains to be computed.
        """
        raw, _kept = _raw(requests, self._hashes)
        fit = ffi.new("size_t *")
        data = ffi.cast("struct vmem_kv_request *", raw.ctypes.data)
        rc = lib.pv_kv_fit(self._ready(), data if len(raw) else ffi.NULL, len(raw), fit)
        if rc == -errno.ENOSPC:
            self.missing_pages = 0
        else:
            self._answer(rc)
        return int(fit[0])

    def room(self, slot: SupportsIndex | None = None) -> int:
        """Return the most tokens the slot could have in the next step if it alone took part.

        0: there is no memory for a step to the length that it has. None: a new request, which must leave the watermark
        free.
        """
        tokens = ffi.new("uint32_t *")
        _check(lib.vmem_kv_room(self._ready(), -1 if slot is None else uint("slot", slot, 31), tokens))
        return int(tokens[0])

    def set_watermark(self, bytes: SupportsIndex = 0, *, percent: SupportsIndex = 0) -> None:
        """Set the memory that new requests leave free for running ones: `bytes` or `percent` of the budget, if more.

        `fit` and `room` take it into account; `step` and the growth of running requests do not. While no request is
        active, a new one may use everything. vLLM has the same watermark.
        """
        _check(lib.vmem_kv_set_watermark(self._use(), uint("bytes", bytes), uint("percent", percent, 32)))

    def groups(self) -> list[GroupInfo]:
        """Return a `GroupInfo` for each group of tensors with the same row size, window and max_tokens."""
        raw, kv = structure("vmem_kv_group_info"), self._use()
        layout: Any = structure("vmem_kv_layout")
        members: dict[int, list[int]] = {}
        for i in range(len(self.specs)):
            _check(lib.vmem_kv_get_layout(kv, i, layout))
            members.setdefault(layout.group, []).append(i)
        found = []
        for number, tensors in sorted(members.items()):
            _check(lib.vmem_kv_get_group(kv, number, raw))
            numbers = {name: int(getattr(raw, name)) for name in _GROUP}
            found.append(GroupInfo(tuple(tensors), self.page_size, self.tile_rows, **numbers))
        return found
