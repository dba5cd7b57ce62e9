"""Sections of all subcommands: what they do, their arguments and defaults, from the parser of the command line."""

import argparse
import contextlib
from unittest import mock

from bert_jax import cli


def read_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, with words for the defaults that depend on the machine."""
    found: list[argparse.ArgumentParser] = []
    with (
        mock.patch("os.cpu_count", return_value="number of CPU cores"),
        mock.patch.object(argparse.ArgumentParser, "print_help", lambda self, file=None: found.append(self)),
        contextlib.suppress(SystemExit),
    ):
        cli.parse(["--help"])
    return found[0]


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of the subcommands, by name. argparse lists arguments in no public attribute."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def commands() -> str:
    """Returns a section for each subcommand."""
    return "\n".join(_section(name, parser) for name, parser in subcommands(read_parser()).items())


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS and action.dest != "help"]
    parts = [f"## {name}", _prose(parser.description or "")]
    if parser.get_default("overridable"):
        parts.append("`--config.KEY=VALUE` sets any key of the config, see [all keys](config.md).")
    lines = ["| argument | default | meaning |", "| --- | --- | --- |"]
    for action in shown:
        lines.append(f"| {_name(action)} | {_default(action)} | {_help(parser, action)} |")
    parts.append("\n".join(lines))
    if parser.epilog and parser.epilog is not argparse.SUPPRESS:
        parts.append(f"```text\n{parser.epilog.strip()}\n```")
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
    if action.required:
        return "required"
    if action.default in (None, (), [], argparse.SUPPRESS) or (action.nargs == 0 and not action.default):
        return ""
    text = str(action.default)
    return text if " " in text else f"`{text}`"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return _cell((action.help or "") % {**vars(action), "prog": parser.prog})


def _prose(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("*", "\\*")
