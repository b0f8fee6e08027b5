"""vLLM on vMem: its block table becomes the GPU's page table. See docs/vllm.md.

vLLM finds `plugin.register` by its entry point group ``vllm.general_plugins``; ``VMEM_VLLM=1`` in the environment
switches it on. `patches` is the only list of what is replaced in vLLM, and of the versions it was checked with.

SPDX-License-Identifier: MIT
"""
