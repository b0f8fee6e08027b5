"""vLLM on vMem: a block of vLLM's has memory only while a request or the prefix cache uses it. See docs/vllm.md.

vLLM finds `plugin.platform` by its entry point group ``vllm.platform_plugins``, and ``VMEM_VLLM=1`` in the environment
enables it. No function of vLLM's is replaced; `check` knows what vMem relies on in the supported releases.

SPDX-License-Identifier: MIT
"""
