"""Types of command-line arguments that name a file.

SPDX-License-Identifier: MIT
"""

import argparse
import os


def input_file(text: str) -> str:
    """A file that can be read."""
    try:
        open(text, "rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return text


def output_file(text: str) -> str:
    """A file that can be written or created. It is not opened yet."""
    folder = os.path.dirname(text) or "."
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{text}: the folder {folder} does not exist")
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return text
