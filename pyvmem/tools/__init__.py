"""The command ``pyvmem``: its subcommands (`cli`), ``doctor``, ``top`` and ``models``.

SPDX-License-Identifier: MIT
"""
