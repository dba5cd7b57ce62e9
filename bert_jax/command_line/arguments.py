"""Makes the parsers of the `bert-jax` command from its functions.

A parameter is an option of its name, with its type and default; a positional-only one has no name on the command line.
A parameter that is a dataclass of options stands for its fields, and a config for `--config` and `--config.KEY=VALUE`.
The docstring has the help: first line, `Reads:`, `Writes:`, `Args:`, `Examples:`.
"""

import argparse
import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from bert_jax import __version__, config_listing
from bert_jax.errors import InputError
from bert_jax.sections import CheckedOptions, Section, check_kind, flatten, nearest


@dataclass(frozen=True)
class Option:
    """Annotates a parameter: the name of its value in the help, and the help of a type that several commands take."""

    metavar: str
    help: str = ""


Folder = Annotated[str, Option("DIR")]
File = Annotated[str, Option("FILE")]
Checkpoint = Annotated[
    str,
    Option(
        "CHECKPOINT",
        "a workdir, a checkpoints/STEP folder, or the output of import; or what import reads: a folder of "
        "transformers, such as the output of export, or a TensorFlow checkpoint",
    ),
]
FileOrCheckpoint = Annotated[str, Option("FILE|CHECKPOINT")]
_PATHS = ("GLOB", "FILE", "DIR", "DIR|FILE", "DIR|PREFIX", "CHECKPOINT", "FILE|CHECKPOINT", "RUN")
"""Metavars of paths, which shells complete and no call may leave empty."""

COMMANDS: dict[str, Callable[..., Any]] = {}
"""The function of each command."""
_PYTHON_ALONE = ("stop", "bars", "beam_options")
"""Parameters that are no options: signals and progress, and the words after `--`."""

P = ParamSpec("P")
T = TypeVar("T")


def command(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a public function a command, such as `fill_mask` of "fill-mask".

    Each call, from Python or from the command line, is checked here: InputError for a path that is empty or cannot be
    opened, and for a value of another type or not among the choices of a `Literal`. A text stands for a sequence of
    one, and a path may be a `Path`. Errors name parameters and config keys as Python does; `in_options` gives them the
    names of the command line.
    """
    signature, kinds = inspect.signature(function), get_type_hints(function, include_extras=True)

    @functools.wraps(function)
    def checked(*arguments: P.args, **options: P.kwargs) -> T:
        call = signature.bind(*arguments, **options)
        for name, value in call.arguments.items():
            flags, kind = _flags(kinds[name]), _class(kinds[name])
            if issubclass(kind, Section):
                check_kind(value, kind)
            elif "nargs" in flags:
                values = (value,) if isinstance(value, (str, os.PathLike)) else value
                call.arguments[name] = tuple(_checked(name, one, flags) for one in values)
                if not values and signature.parameters[name].default is inspect.Parameter.empty:
                    raise InputError(f"{name}: expected at least one")
            elif value is not None:
                call.arguments[name] = _checked(name, value, flags)
        return function(*call.args, **call.kwargs)

    COMMANDS[function.__name__.strip("_").replace("_", "-")] = checked
    return checked


def _checked(name: str, value: Any, flags: Mapping[str, Any]) -> Any:
    """Returns the value of a parameter, and the text of a `Path`. Raises InputError as `command` says."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    expected, numbers = flags.get("type"), {int: Integral, float: Real}
    if expected in (str, *numbers) and not isinstance(value, numbers.get(expected, expected)):
        raise InputError(f"{name}={value!r:.60}: expected {expected.__name__}, got {type(value).__name__}")
    if flags.get("metavar") in _PATHS:
        _check_path(name, value)
    if value not in flags.get("choices", (value,)):
        raise InputError(f"{name}={value}: expected one of {', '.join(flags['choices'])}")
    return value


def _check_path(name: str, path: str) -> None:
    from bert_jax.files import remote

    try:
        remote.parse_path(path)
    except InputError as error:
        raise InputError(f"{name.strip('_')}: {error}") from error


def _flags(kind: Any) -> dict[str, Any]:
    """Returns the keywords of `add_argument` for a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        about: Option = inner[1]
        return {**_flags(inner[0]), "metavar": about.metavar, **({"help": about.help} if about.help else {})}
    if NoneType in inner:
        return _flags(inner[0])
    if origin is Literal:
        return {"choices": inner}
    if origin is Sequence or (inner and issubclass(origin, Sequence)):
        return {**_flags(inner[0]), "nargs": "+"}
    return {"action": "store_true"} if kind is bool else {"type": kind}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a command, with its name as `command`, and `overrides` and `beam_options`.

    `overrides` are (key, text) pairs of the config, from `--config.KEY=VALUE`. `beam_options`
    are the words after `--` of `prepare`.

    Raises SystemExit, with the reason in one line on stderr, for an argument that the command does not accept.
    """
    name = words[0] if words else ""
    parser, parsers = make_parsers(name if name in COMMANDS else None)
    if name not in COMMANDS:
        if name and not name.startswith("-"):
            parser.error(f"{name}: unknown command{nearest(name, COMMANDS)}")
        return parser.parse_args(words)
    sub = parsers[name]
    end = words.index("--") if "--" in words else len(words)
    accepted, overrides = [name], []
    for word in words[1:end]:
        option, equals, value = word.partition("=")
        if option.startswith("--config.") and sub.config:
            if not equals:
                sub.error(f"{option}: expected {option}=VALUE")
            overrides.append((option.removeprefix("--config."), value))
        elif accepted[-1] in sub.options and re.match(r"-\d", word):
            accepted[-1] += f"={word}"  # argparse takes `-1,-2` for an option, and not for a value
        elif option.startswith("--") and " " not in word and option not in sub.options:
            sub.error(f"{word}: unknown option{nearest(option, sub.options)}")  # before those that are missing
        else:
            accepted.append(word)
    after = words[end + 1 :] if name == "prepare" else ()
    options, unknown = parser.parse_known_args(accepted if after else [*accepted, *words[end:]])
    if unknown:
        sub.error(f"unrecognized arguments: {' '.join(unknown)}")
    return argparse.Namespace(**vars(options), overrides=overrides, beam_options=after)


def call(options: argparse.Namespace, **more: Any) -> Any:
    """Calls the function of a parsed command. Raises as the function does, and as `load_config`."""
    function = COMMANDS[options.command]
    arguments: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind = _class(get_type_hints(function, include_extras=True)[name])
        if issubclass(kind, Section) and options.config is not None:
            from bert_jax.config import load_config

            value: Any = load_config(options.config, options.overrides, kind=kind)
        elif issubclass(kind, CheckedOptions):
            value = kind(**{field.name: getattr(options, field.name) for field in _shown(kind)})
        elif name in more or not hasattr(options, name):
            continue
        else:
            value = getattr(options, name)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            arguments.append(value)
        else:
            more[name] = value
    return function(*arguments, **more)


def takes(name: str, parameter: str) -> bool:
    """Returns whether the function of a command has a parameter."""
    return parameter in inspect.signature(COMMANDS[name]).parameters


def in_options(message: str, options: argparse.Namespace) -> str:
    """Returns a message that names parameters and config keys, such as `seq_len=7: ...`, with the names of options."""
    _, parsers = make_parsers(options.command)
    parser = parsers[options.command]
    names = {option.removeprefix("--"): option for option in parser.options}
    if parser.config:
        keys = [*(key for key, _ in options.overrides), *(key for key, _ in flatten(parser.config()))]
        names = {**{key: f"--config.{key}" for key in keys}, **names}
    return re.sub(r"(?<![\w./-])[a-z_][\w.]*(?==)|^[a-z_][\w.]*(?=: )", lambda m: names.get(m[0], m[0]), message)


def complete(shell: str) -> str:
    """Returns the script that completes commands, options, paths and names of configs in a shell."""
    import shtab

    parser, parsers = make_parsers()
    for sub in parsers.values():
        for action in sub.actions:
            if action.dest == "config":
                action.complete = shtab.cmd(f"echo {' '.join(config_listing.summaries(sub.lists))}")  # type: ignore
            elif action.metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds defaults to the help of options, and keeps the lines of the epilog."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shows_nothing = action.default in (None, False, "", ()) or action.required
        return action.help if shows_nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, without the usage."""

    config: type[Section] | None = None
    """The type of the config that `--config` names."""
    lists = ""
    """The command, a key of `config_listing.KINDS`, whose configs it takes; "" for all."""

    @property
    def options(self) -> list[str]:
        """The options that the parser knows. argparse lists them in no public attribute."""
        return list(self._option_string_actions)

    @property
    def actions(self) -> list[argparse.Action]:
        """Options and positional arguments."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def make_parsers(only: str | None = None) -> tuple[Parser, Mapping[str, Parser]]:
    """Returns the parser of the whole command line, and those of the commands by name; with `only`, one has options."""
    parser = Parser(
        prog="bert-jax", description="BERT pre-training in JAX and Flax.", formatter_class=_HelpFormatter,
        epilog="bert-jax COMMAND --help has options and examples\n"
        "exit status: 0 done, 1 failed, 2 wrong input, 75 saved",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        text = inspect.getdoc(function) or ""
        summary = " ".join(text.partition("\n\n")[0].split())
        sub = commands.add_parser(
            name, help=summary, description=summary, formatter_class=_HelpFormatter, allow_abbrev=False
        )
        if only in (None, name):
            _add_options(sub, function, text)
    return parser, commands.choices


def _add_options(parser: Parser, function: Callable[..., Any], text: str) -> None:
    kinds = get_type_hints(function, include_extras=True)
    helps = dict(re.findall(r"^  (\w+): (.+(?:\n    .+)*)", text.partition("\nArgs:\n")[2], re.MULTILINE))
    for name, parameter in inspect.signature(function).parameters.items():
        flags, kind = _flags(kinds[name]), _class(kinds[name])
        if name in _PYTHON_ALONE:
            continue
        if issubclass(kind, CheckedOptions):
            for field in _shown(kind):
                limits = {key: field.metadata[key] for key in ("choices", "metavar") if key in field.metadata}
                _add(parser, f"--{field.name}", field.metadata["help"], field.default, _flags(field.type) | limits)
            continue
        if issubclass(kind, Section):
            parser.config, flags = kind, {"metavar": "NAME|FILE.py[:ARG]"}
            own = {name for name, of in config_listing.CONFIG_TYPES.items() if of is kind}
            parser.lists = next(iter(own), "")
        is_named = parameter.kind is not parameter.POSITIONAL_ONLY
        _add(
            parser, f"--{name.strip('_')}" if is_named else name, flags.pop("help", "") or helps[name],
            parameter.default, {**flags, **({"dest": name} if is_named else {})},
        )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="show only errors on stderr; results are printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.epilog = "\n".join(_epilog(parser, text))


def _add(parser: Parser, option: str, help: str, default: Any, flags: dict[str, Any]) -> None:
    """Adds an option, or an argument without a name; it is required without a default."""
    is_required = default is inspect.Parameter.empty
    if option.startswith("--"):
        flags["required"] = is_required
    elif not is_required and "nargs" not in flags:
        flags["nargs"] = "?"
    if not is_required and flags.get("action") != "store_true":
        flags["default"] = default
    parser.add_argument(option, help=" ".join(help.split()).replace("%", "%%"), **flags)


def _class(kind: Any) -> type:
    """Returns the class of a type that may be None."""
    kind = next((one for one in get_args(kind) if one is not NoneType), kind) if NoneType in get_args(kind) else kind
    return kind if isinstance(kind, type) and not get_args(kind) else object


def _shown(kind: type[CheckedOptions]) -> list[dataclasses.Field[Any]]:
    """Returns the fields of a dataclass of options that have a help."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]  # type: ignore[arg-type]


def _epilog(parser: Parser, text: str) -> Iterator[str]:
    for name, about in re.findall(r"^(Reads|Writes): (.+(?:\n(?!\n|\w+:).+)*)", text, re.MULTILINE):
        yield f"{name.lower()}: {' '.join(about.split())}"
    if parser.lists:
        yield "configs: bert-jax configs; keys, values and comments of one: bert-jax configs NAME"
    yield from ("", "examples:")
    for example in re.findall(r"^  (bert-jax .+(?:\n    .+)*)", text, re.MULTILINE):
        yield f"  {' '.join(example.split())}"
