"""`report`, `configs` and `completion`."""

import argparse
import json

from bert_jax import config_listing
from bert_jax.command_line.arguments import completion
from bert_jax.command_line.command_results import print_result


def run_report(options: argparse.Namespace) -> None:
    """Runs `bert-jax report`."""
    from bert_jax.tracking.report import write_report

    results = write_report(options.workdir, options.output)
    print_result(options, {"output": options.output, "workdirs": options.workdir, "results": results}, options.output)


def run_configs(options: argparse.Namespace) -> None:
    """Runs `bert-jax configs`."""
    if options.config is None:
        found = config_listing.summaries()
        width = max(map(len, found))
        print_result(options, found, "\n".join(f"{name:<{width}}  {text}" for name, text in found.items()))
        return
    from bert_jax.config import load_config
    from bert_jax.sections import flatten

    kind = config_listing.kind_of(options.config)
    config = load_config(options.config, options.overrides, kind=config_listing.CONFIG_TYPES[kind])
    comments, values = config_listing.key_comments(type(config)), dict(flatten(config))
    if options.json:
        keys = {key: {"value": value, "comment": comments.get(key, "")} for key, value in values.items()}
        print(json.dumps({"config": options.config, "keys": keys}, indent=2, ensure_ascii=False, default=vars))
        return
    lines = [
        f"{key} = {value!r}" + (f"  # {comments[key]}" if key in comments else "") for key, value in values.items()
    ]
    print("\n".join([*config_listing.docstring(options.config).split("\n"), "", *lines]))


def run_completion(options: argparse.Namespace) -> None:
    """Runs `bert-jax completion`."""
    print(completion(options.shell))
