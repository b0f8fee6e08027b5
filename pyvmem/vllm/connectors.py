"""Which of vLLM's KV connectors run on vMem, and how: by their names and their settings.

A connector may copy blocks that come and go if each access to a block lies between two events that the scheduler sees:
the block leaves the queue of free blocks, and its last reference is dropped once the access is known to have ended. And
it may remember addresses only. Those that register KV memory with a network card, or export it to another process, need
memory that stays: their engines keep vLLM's own.

It is read while vLLM is imported, so it imports neither torch nor vLLM.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

OFFLOADING, SIMPLE, LMCACHE = "OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1"
MULTI = "MultiConnector"
EXAMPLE = "ExampleConnector"
NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
# They store each block in the step that takes it: if that computes a part of the block, the rest is never stored. By
# vLLM's code, its own chunks of a prompt do the same.
WHOLE_PROMPTS = (EXAMPLE, *NIXL)
COPY = (OFFLOADING, SIMPLE, LMCACHE, EXAMPLE)
REGISTER = (*NIXL, "MooncakeConnector", "MooncakeStoreConnector", "MoRIIOConnector", "LMCacheMPConnector")
OTHERS = {
    "HF3FSKVConnector": "it reads blocks in a thread after their requests were preempted",
    "DecodeBenchConnector": "it fills the whole KV cache",
    "HiSparseConnector": "it keeps blocks in host memory, which vMem does not follow",
}
LMCACHE_MODULES = (None, "lmcache.integration.vllm.lmcache_connector_v1")
# Settings of LMCache's with which copies may go on when the step that began them has ended. It waits for copies to host
# memory alone, and the last two settings bring what is not known here.
LMCACHE_OFF = ("use_layerwise", "enable_blending", "enable_pd", "enable_xpyd", "gds_path", "nixl_buffer_device",
               "storage_plugins", "remote_config_url")  # fmt: skip
_OFF = ("", "0", "false", "no", "off", "none", "null", "[]", "cpu")


class Connector:
    """One connector of a configuration.

    Attributes
    ----------
    name : str
        Its class.
    more : mapping
        Its own settings, vLLM's ``kv_connector_extra_config``.
    """

    def __init__(self, name: str, more: Mapping[str, Any], module: str | None = None, buffer: str = "") -> None:
        self.name, self.more, self._module, self._buffer = name, more, module, buffer

    def registers(self, device: str) -> bool:
        """Return whether it needs memory that stays. device: vLLM's name of the kind of device, such as ``"cuda"``."""
        staged = self.name in NIXL and device != "cpu" and self._buffer == "cpu"
        return self.name in REGISTER and self._module is None and not staged

    def refusal(self) -> str | None:
        """Why it cannot run on vMem, and what to do; None if it can."""
        dynamic = self.name == f"{LMCACHE}Dynamic"
        if self._module not in (LMCACHE_MODULES if dynamic else (None,)):
            return f"{self.name} of {self._module} is not vLLM's own, and may read unbacked addresses; choose another"
        if self.name in (LMCACHE, f"{LMCACHE}Dynamic"):
            chosen = next(filter(self._lmcache, LMCACHE_OFF), None)
            return f"{self.name} with {chosen} may copy a block after it has left; unset {chosen}" if chosen else None
        if self.name == OFFLOADING:
            # If a window has passed the first blocks of a chunk, vLLM stores the others.
            beyond = [key for key in ("spec_name", "blocks_per_chunk", "block_size") if key in self.more]
            return f"OffloadingConnector with {beyond[0]} does not copy single blocks; unset it" if beyond else None
        if self.name in (*COPY, *REGISTER):
            return None
        why = OTHERS.get(self.name, "it has not been tried, and may read unbacked addresses")
        return f"{self.name}: {why}; choose another connector"

    def _lmcache(self, key: str) -> bool:
        """Return whether a setting of LMCache's is on: in vLLM's configuration, the environment or LMCache's file."""
        values = [self.more.get(f"lmcache.{key}"), os.environ.get(f"LMCACHE_{key.upper()}")]
        file = self.more.get("lmcache.config_file") or os.environ.get("LMCACHE_CONFIG_FILE")
        if file:
            import yaml  # which vLLM needs, too

            try:
                with open(file, encoding="utf-8") as text:
                    read = yaml.safe_load(text)
            except (OSError, ValueError, yaml.YAMLError):
                read = None  # LMCache says so
            values.append(read.get(key) if isinstance(read, dict) else None)
        return any(str(value).strip().lower() not in _OFF for value in values)


def of(vllm_config: Any) -> list[Connector]:
    """The connectors of a configuration, those within a MultiConnector in its place."""
    given, cache = getattr(vllm_config, "kv_transfer_config", None), getattr(vllm_config, "cache_config", None)
    name = getattr(given, "kv_connector", None)
    if cache is not None and cache.kv_offloading_size is not None:  # vLLM then gives the setting another name
        simple = os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") != "0"
        backends = {"native": SIMPLE if simple else OFFLOADING, "lmcache": "LMCacheMPConnector"}
        name = backends.get(cache.kv_offloading_backend, str(cache.kv_offloading_backend))
    if name is None:
        return []
    return list(_within(name, getattr(given, "kv_connector_extra_config", None),
                        getattr(given, "kv_connector_module_path", None),
                        getattr(given, "kv_buffer_device", "")))  # fmt: skip


def _within(name: str, more: Any, module: str | None, buffer: str) -> Iterator[Connector]:
    more = more if isinstance(more, Mapping) else {}  # vLLM itself refuses what is none
    children = more.get("connectors") if name == MULTI and module is None else None
    if not isinstance(children, (list, tuple)):
        yield Connector(name, more, module, buffer)
        return
    for given in children:
        child = given if isinstance(given, Mapping) else {"kv_connector": given}
        yield from _within(str(child.get("kv_connector")), child.get("kv_connector_extra_config"),
                           child.get("kv_connector_module_path"), child.get("kv_buffer_device", ""))  # fmt: skip


def flat(connector: Any) -> Iterator[Any]:
    """vLLM's objects: the connectors within a MultiConnector, or else the connector; none for None."""
    if connector is not None:
        children = getattr(connector, "sub_connectors", None)
        if children is None:
            yield connector
        for child in children or ():
            yield from flat(child)
