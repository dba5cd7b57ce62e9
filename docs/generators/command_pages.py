"""Sections of all subcommands: what they do, their arguments and defaults, from the parser of the command line."""

import argparse

from bert_jax import cli
from bert_jax.command_line.arguments import Parser, make_parsers

__all__ = ["cli", "commands"]


def commands() -> str:
    """Returns a section for each subcommand."""
    _, parsers = make_parsers()
    return "\n".join(_section(name, parser) for name, parser in parsers.items())


def _section(name: str, parser: Parser) -> str:
    shown = [action for action in parser.actions if action.help is not argparse.SUPPRESS and action.dest != "help"]
    about, _, files = (parser.description or "").partition("\n\n")
    parts = [f"## {name}", _prose(about)]
    if any(action.metavar == "NAME|FILE.py[:ARG]" and action.option_strings for action in shown):
        parts.append("`--config.KEY=VALUE` sets any key of the config, see [all keys](config.md).")
    lines = ["| argument | default | meaning |", "| --- | --- | --- |"]
    for action in shown:
        lines.append(f"| {_name(action)} | {_default(action)} | {_help(parser, action)} |")
    parts.append("\n".join(lines))
    parts.append(f"```text\n{files}\n\n{parser.epilog}\n```")
    return "\n\n".join(parts) + "\n"


def _name(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if action.nargs in ("+", "*"):
        value += " ..."
    if not action.option_strings:
        return f"`{value}`"
    names = ", ".join(action.option_strings)
    return f"`{names}`" if action.nargs == 0 else f"`{names} {value}`".replace("|", "\\|")


def _default(action: argparse.Action) -> str:
    if (action.help or "").endswith(" (required)") or (not action.option_strings and action.nargs != "?"):
        return "required"
    if action.default in (None, "", (), [], argparse.SUPPRESS) or (action.nargs == 0 and not action.default):
        return ""
    text = str(action.default)
    return text if " " in text else f"`{text}`"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return _cell((action.help or "").partition(" (")[0] % {**vars(action), "prog": parser.prog})


def _prose(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("*", "\\*")
