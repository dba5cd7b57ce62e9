"""Makes the parsers of the `bert-jax` command from its functions.

A parameter is an option of its name, with its default; a positional-only one has no name on the command line. Its value
is a text, which the function converts. A parameter that is a dataclass of options stands for its fields, and a config
for `--config` and `--config.KEY=VALUE`. The docstrings have the help: what a command does, `Args:`, `Examples:`.
"""

import argparse
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import shtab

from bert_jax import __version__, config_listing
from bert_jax.errors import InputError
from bert_jax.sections import Must, Section, checked, flatten, kinds, nearest

PATH = Must("the name of a file or folder", bool)
# Types with the name of the value in the help; shells complete the paths.
Folder = Annotated[str, "DIR", PATH]
File = Annotated[str, "FILE", PATH]
FileOrFolder = Annotated[str, "DIR|FILE", PATH]
Checkpoint = Annotated[str, "CHECKPOINT", PATH]

_CONFIG = "NAME|FILE.py[:ARG]"

COMMANDS: dict[str, Callable[..., Any]] = {}
"""The function of each command."""
_PYTHON_ALONE = ("stop", "bars", "beam_options")
"""Parameters that are no options: signals and progress, and the words after `--`."""

F = TypeVar("F", bound=Callable[..., Any])


def command(function: F) -> F:
    """Makes a public function a command, such as `fill_mask` of "fill-mask".

    Each call, from Python or from the command line, is checked here: InputError for an empty path, and for a
    value of another type, as `checked` converts it. A text stands for a sequence of one, and a path
    may be a `Path`. Errors name parameters and config keys as Python does; `in_options` gives them the names of the
    command line.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call_checked(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options)
        for name in [name for name in call.arguments if name not in _PYTHON_ALONE]:
            parameter = signature.parameters[name]
            value = checked(name, parameter.annotation, call.arguments[name], parameter.default)
            call.arguments[name] = value
            if value == () and parameter.default is parameter.empty:
                raise InputError(f"{name}: expected at least one")
        return function(*call.args, **call.kwargs)

    COMMANDS[function.__name__.strip("_").replace("_", "-")] = call_checked
    return cast(F, call_checked)


def _flags(kind: Any) -> dict[str, Any]:
    """Returns the keywords of `add_argument` for a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _flags(inner[0]) | ({"metavar": inner[1]} if isinstance(inner[1], str) else {})
    if NoneType in inner:
        return _flags(inner[0])
    if origin is Sequence:
        return {**_flags(inner[0]), "nargs": "+"}
    return {"choices": inner} if origin is Literal else {"action": "store_true"} if kind is bool else {}


def _item(kind: Any) -> Any:
    """Returns the type of the items of a sequence, and of a value that may be None."""
    return _item(get_args(kind)[0]) if get_origin(kind) is Sequence or NoneType in get_args(kind) else kind


def _section(parameter: inspect.Parameter) -> type[Section] | None:
    """Returns the class of a parameter that is a config or a dataclass of options; it may be None."""
    options = (parameter.annotation, *get_args(parameter.annotation))
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)), None)


def _helps(about: Any) -> dict[str, str]:
    """Returns the helps in the `Args:` of the docstring of a function, or of those of a class and its bases."""
    texts = [inspect.cleandoc(one.__doc__ or "") for one in getattr(about, "__mro__", [about])]
    parts = "\n".join(text.partition("\nArgs:\n")[2] for text in texts)
    found = re.findall(r"^  (\w+): (.+(?:\n    .+)*)", parts, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _options(function: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, str]]:
    """Yields the parameters of the command line, with their helps; those of a dataclass of options are its fields."""
    for name, parameter in inspect.signature(function).parameters.items():
        kind = _section(parameter)
        if kind and name != "config":
            shown, named = _helps(kind), parameter.replace(kind=parameter.KEYWORD_ONLY)
            for field in fields(kind):
                if field.name in shown:
                    own = named.replace(name=field.name, annotation=kinds(kind)[field.name], default=field.default)
                    yield own, shown[field.name]
        elif name not in _PYTHON_ALONE:
            annotation = Annotated[str, _CONFIG] if kind else parameter.annotation
            yield parameter.replace(annotation=annotation), _helps(function)[name]


def _config(command: str) -> type[Section] | None:
    """Returns the class of the config that a command takes."""
    parameter = inspect.signature(COMMANDS[command]).parameters.get("config")
    return _section(parameter) if parameter else None


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a command, with its name as `command`, and `overrides` and `beam_options`.

    `overrides` are (key, text) pairs of the config, from `--config.KEY=VALUE`. `beam_options` are the words after `--`
    of `prepare`. The home folder stands for "~" in `--NAME=~/...`, which a shell replaces only at the start of a word.

    Raises SystemExit, with the reason in one line on stderr, for an argument that the command does not accept.
    """
    name, home = words[0] if words else "", os.path.expanduser("~")
    parser, parsers = make_parsers(name if name in COMMANDS else None)
    if name and not name.startswith("-") and name not in COMMANDS:
        parser.error(f"{name}: unknown command{nearest(name, COMMANDS)}")
    words = [re.sub(r"^(--[\w.]+=)~(?=/|$)", lambda found: found[1] + home, word) for word in words]
    for at in reversed(range(1, len(words))):  # `--layers -1,-2`, which argparse takes for an option
        if re.match(r"-\d", words[at]) and re.fullmatch(r"--\w+", words[at - 1]):
            words[at - 1 : at + 1] = [f"{words[at - 1]}={words[at]}"]
    end = words.index("--") if name == "prepare" and "--" in words else len(words)
    keys = [word for word in words[:end] if word.startswith("--config.") and name in COMMANDS and _config(name)]
    options, unknown = parser.parse_known_args([word for word in words[:end] if word not in keys])
    sub = parsers.get(name, parser)
    known = [option for action in sub.actions for option in action.option_strings]
    for word in unknown:
        sub.error(f"{word}: unknown argument{nearest(word.partition('=')[0], known)}")
    for word in keys:
        if "=" not in word:
            sub.error(f"{word}: expected {word}=VALUE")
    overrides = [tuple(key.removeprefix("--config.").split("=", 1)) for key in keys]
    return argparse.Namespace(**vars(options), overrides=overrides, beam_options=words[end + 1 :])


def call(options: argparse.Namespace, **more: Any) -> Any:
    """Calls the function of a parsed command. Raises as the function does, and as `load_config`."""
    function, values = COMMANDS[options.command], {**vars(options), **more}
    arguments: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = _section(parameter)
        if parameter.default is parameter.empty and values[name] is None:
            raise InputError(f"{name}: required")
        if kind and name == "config":
            from bert_jax.config import load_config

            values[name] = load_config(options.config, options.overrides, kind=kind)
        elif kind:
            values[name] = kind(**{field: values[field] for field in _helps(kind)})
        if parameter.kind is parameter.POSITIONAL_ONLY:
            arguments.append(values[name])
        elif name in values:
            more[name] = values[name]
    return function(*arguments, **more)


def in_options(message: str, options: argparse.Namespace) -> str:
    """Returns a message that names parameters and config keys, such as `seq_len=7: ...`, with the names of options."""
    shown = [option for option, _ in _options(COMMANDS[options.command]) if option.kind is not option.POSITIONAL_ONLY]
    names = {option.name.strip("_"): f"--{option.name.strip('_')}" for option in shown}
    if config := _config(options.command):
        keys = [*(key for key, _ in options.overrides), *(key for key, _ in flatten(config()))]
        names = {**{key: f"--config.{key}" for key in keys}, **names}
    names_in_message = r"(?<![\w./-])([a-z_][\w.]*?)(?:_|\.\d+)?(?==)|^([a-z_][\w.]*)(?=: )"
    return re.sub(names_in_message, lambda m: names.get(m[1] or m[2], m[0]), message)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, without the usage."""

    @property
    def actions(self) -> list[argparse.Action]:
        """Options and positional arguments, which argparse lists in no public attribute."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def make_parsers(only: str | None = None) -> tuple[Parser, Mapping[str, Parser]]:
    """Returns the parser of the whole command line, and those of the commands by name; with `only`, one has options."""
    parser = Parser(
        prog="bert-jax", description="BERT pre-training in JAX and Flax; see bert-jax COMMAND --help.",
        epilog="exit status: 0 done, 1 failed, 2 wrong input, 75 saved",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        about, _, rest = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
        sub = commands.add_parser(
            name, help=" ".join(about.partition("\n\n")[0].split()), description=about,
            epilog=re.sub("\n   +", " ", rest[rest.index("Examples:") :]),
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip
        for parameter, text in _options(function) if only in (None, name) else ():
            _add(sub, parameter, text)
        sub.add_argument("--quiet", action="store_true", help="show only errors on stderr; results are printed")
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser, commands.choices


def _add(parser: Parser, parameter: inspect.Parameter, help: str) -> None:
    """Adds an option, or an argument without a name. `call` checks the options that are required."""
    flags, default = {"default": parameter.default, **_flags(parameter.annotation)}, parameter.default
    name = f"--{parameter.name.strip('_')}"
    if default is parameter.empty:
        flags["default"], shown = None, " (required)"
    else:
        shown = f" (default: {default})" if default not in (None, False, "", ()) else ""
    if parameter.kind is not parameter.POSITIONAL_ONLY:
        flags["dest"] = parameter.name
    else:
        name, shown = parameter.name, ""
        flags |= {} if default is parameter.empty else {"nargs": "?"}
    action: Any = parser.add_argument(name, help=(help + shown).replace("%", "%%"), **flags)
    if flags.get("metavar") == _CONFIG:
        action.complete = shtab.cmd(f"echo {' '.join(config_listing.config_files())}")
    elif PATH in get_args(_item(parameter.annotation)):
        action.complete = shtab.FILE
