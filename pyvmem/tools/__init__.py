"""The command ``pyvmem``: its subcommands (`cli`), ``doctor``, ``top`` and ``models``.

It calls `pyvmem.kv`, `pyvmem.engine`, `pyvmem.sleep` and the self-test, and nothing calls it. Begin with `cli`.

SPDX-License-Identifier: MIT
"""
