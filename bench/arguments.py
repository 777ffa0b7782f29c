# SPDX-License-Identifier: Apache-2.0
"""Types of arguments that the scripts here share."""

import argparse
import re


def counting_number(text):
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f'"{text}"; accepted: 1 or more')
    return int(text)
