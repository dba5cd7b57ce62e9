"""Printing of a command's result on stdout, and of the commands that usually follow on stderr."""

import argparse
import json
import logging
from collections.abc import Mapping
from typing import Any

from bert_jax.command_line.next_steps import NEXT_STEPS

log = logging.getLogger(__name__)


def print_result(options: argparse.Namespace, values: Mapping[str, Any], text: str) -> None:
    """Prints a result on stdout, as one JSON object with `--json`."""
    print(json.dumps(values, indent=2, ensure_ascii=False) if options.json else text)


def suggest(options: argparse.Namespace, name: str = "") -> None:
    """Logs the commands that usually follow, unless programs read the output."""
    if not options.json:
        for command in NEXT_STEPS[name or options.command](options):
            log.info("Next: %s", command)
