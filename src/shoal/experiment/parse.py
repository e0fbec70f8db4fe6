"""The command line's arguments -> a Plan. tyro reads the values; its error boxes become one sentence here."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from shoal.errors import ConfigError
from shoal.experiment.config import Experiment, Names, Plan, check_ray, default_plan, experiment_type, offline_data
from shoal.experiment.presets import Preset, load_preset, preset_names
from shoal.experiment.references import EnvRef
from shoal.experiment.sizing import check_cores
from shoal.experiment.suggestions import closest, translated
from shoal.experiment.values import keys, words
from shoal.options import Options, flag

__all__ = ["is_option", "parse_command", "parse_options", "parse_train", "split_positionals", "take_option"]

T = TypeVar("T")
Kind = TypeVar("Kind", bound=Options)
USAGE = "shoal train PRESET ENV"
OFFLINE_USAGE = "shoal train PRESET DATA [--env ENV]"
CONFIG_USAGE = "shoal train --config FILE"
NUMBER = re.compile(r"-[\d.]")


def is_option(token: str) -> bool:
    return token.startswith("-") and not NUMBER.match(token)


@dataclass
class ChosenNames:
    """What stands before the options: which preset or pair, and which environment."""

    algorithm: str | None
    architecture: str | None
    positionals: list[str]
    rest: list[str]


def choose_names(arguments: Sequence[str]) -> ChosenNames:
    """Take --algorithm A and --architecture B (names without a dot) and the positionals out of the arguments."""
    chosen: dict[str, str] = {}
    tokens = list(arguments)
    for name in ("--algorithm", "--architecture"):
        value = take_option(tokens, name)
        if value is not None:
            chosen[name] = value
    positionals, rest = split_positionals(tokens, 1 if chosen else 2)
    return ChosenNames(chosen.get("--algorithm"), chosen.get("--architecture"), positionals, rest)


def take_option(tokens: list[str], name: str, what: str = "a name; `shoal list` shows them") -> str | None:
    """Take an option and its value out of the tokens; None where it is not there."""
    for i, token in enumerate(tokens):
        if token == name:
            if i + 1 == len(tokens) or is_option(tokens[i + 1]):
                raise ConfigError(f"{name} needs {what}")
            value = tokens[i + 1]
            del tokens[i : i + 2]
            return value
        if token.startswith(f"{name}="):
            del tokens[i]
            return token.partition("=")[2]
    return None


def split_positionals(tokens: Sequence[str], wanted: int) -> tuple[list[str], list[str]]:
    """Those before the first option; then, while some are missing, those after an option that has a value already."""
    positionals: list[str] = []
    rest: list[str] = []
    full = True  # whether the last option has its value
    for token in tokens:
        if is_option(token):
            rest.append(token)
            full = "=" in token or bool(re.match(r"--(\w+\.)?no-", token))
        elif not rest or (full and len(positionals) < wanted):
            positionals.append(token)
        else:
            rest.append(token)
            full = True
    return positionals, rest


def parse_train(arguments: Sequence[str]) -> Plan:
    """`PRESET ENV [options]`, `PRESET DATA [--env ENV] [options]`, `--algorithm A --architecture B ENV [options]` or `--config FILE
    [options]`, with or without --trust."""
    return replace(_parse([token for token in arguments if token != "--trust"]), trust="--trust" in arguments)


def _parse(tokens: list[str]) -> Plan:
    path = take_option(tokens, "--config", "the name of a TOML file")
    if path is not None:
        return _parse_with_file(path, tokens)
    choice = choose_names(tokens)
    names, word, preset = _what(choice)
    env, usage = EnvRef.named(word), USAGE
    given: dict[str, Any] = {}
    if preset is not None and preset.offline and not any(token.partition("=")[0] == "--demos" for token in choice.rest):
        simulator, usage = take_option(choice.rest, "--env"), OFFLINE_USAGE
        env, given = offline_data(word, None if simulator is None else EnvRef.named(simulator))
    plan = default_plan(names, env, preset, given, measure=False)  # for the options' defaults
    wished: Experiment[Any, Any] = parse_options(experiment_type(plan), plan.experiment, choice.rest, usage)
    check_ray(wished)
    check_cores(wished)
    sized = default_plan(names, env, preset, given, wished=wished)
    if sized.experiment == plan.experiment:
        return replace(sized, experiment=wished)
    return replace(sized, experiment=parse_options(experiment_type(sized), sized.experiment, choice.rest, usage))


def _parse_with_file(path: str, tokens: list[str]) -> Plan:
    """What a file says, and options over it."""
    from shoal.experiment.config_file import read_config

    choice = choose_names(tokens)
    if choice.algorithm or choice.architecture or choice.positionals:
        given = choice.positionals[:1] or [choice.algorithm or choice.architecture or ""]
        raise ConfigError(f"--config {path} says what to train; leave {given[0]!r} out, or change it in the file")
    plan = read_config(path).plan()
    experiment = parse_options(experiment_type(plan), plan.experiment, choice.rest, CONFIG_USAGE)
    check_ray(experiment)
    check_cores(experiment)
    return replace(plan, experiment=experiment)


def _what(choice: ChosenNames) -> tuple[Names, str, Preset | None]:
    given, there = choice.positionals, ", ".join(preset_names())
    if choice.algorithm or choice.architecture:
        if not (choice.algorithm and choice.architecture):
            one, other = ("--algorithm", "--architecture") if choice.algorithm else ("--architecture", "--algorithm")
            value = choice.algorithm or choice.architecture
            raise ConfigError(f"{one} {value} needs {other} beside it; `shoal list` shows what fits")
        if len(given) > 1:
            raise ConfigError(f"{' '.join(given)}: give a preset, or --algorithm and --architecture, not both; "
                              "only the environment stands alone then")
        if not given:
            raise ConfigError("which environment? Add its id, such as CartPole-v1")
        return Names(choice.algorithm, choice.architecture), given[0], None
    if not given:
        raise ConfigError(f"which preset and which environment? Such as: shoal train impala CartPole-v1 ({there})")
    preset = load_preset(given[0])
    if len(given) == 1 and preset.offline:
        raise ConfigError(f"which recording? Add its folder: shoal train {given[0]} DATA [--env ENV]; make one with `shoal data "
                          "record SOURCE ENV --out DATA`")
    if len(given) == 1:
        raise ConfigError(f"which environment? Add its id: shoal train {given[0]} CartPole-v1")
    if len(given) > 2:
        raise ConfigError(f"{given[2]!r} is one word too many: give PRESET and ENV, then --options")
    return Names(preset.algorithm, preset.architecture, preset.name), given[1], preset


def parse_command(kind: type[Kind], arguments: Sequence[str], wanted: int, usage: str) -> tuple[list[str], Kind]:
    """The words of a command, of which it wants this many, and its options, validated."""
    if any(token in ("-h", "--help") for token in arguments):
        parse_options(kind, kind(), ["--help"], usage)
    positionals, rest = split_positionals(arguments, wanted)
    options = parse_options(kind, kind(), rest, usage)
    options.validate()
    return positionals, options


def parse_options(kind: Any, default: T, arguments: Sequence[str], usage: str) -> T:
    """The values in `arguments`, over `default`. -h prints every option and exits with 0."""
    import tyro

    if any(token in ("-h", "--help") for token in arguments):
        tyro.cli(kind, default=default, args=["--help"], prog=usage)
    known = {_loose(option): option for option in _options(default)}
    known |= {_loose(_no_first(option)): option for option in known.values() if ".no_" in option}
    tokens = [_spelled(token, known, usage) if is_option(token) else token for token in arguments]
    if tokens and not is_option(tokens[0]):
        raise ConfigError(f"{tokens[0]!r} is one word too many; {usage} [--options]")
    result = _quietly(kind, default, tokens)
    if result is not None:
        return result
    groups = _groups(tokens)
    for at, group in enumerate(groups):
        if _quietly(kind, default, group) is None:
            groups[at] = [_none(token) for token in group]
            if groups[at] == group or _quietly(kind, default, groups[at]) is None:
                raise ConfigError(_complaint(default, group))
    result = _quietly(kind, default, [token for group in groups for token in group])
    if result is not None:
        return result
    raise ConfigError(f"{' '.join(tokens)} cannot be understood; see {usage} --help")


def _none(token: str) -> str:
    """None, also where it is spelt none."""
    name, equals, value = token.rpartition("=")
    return f"{name}{equals}None" if value.lower() == "none" else token


def _quietly(kind: Any, default: T, tokens: Sequence[str]) -> T | None:
    import tyro

    quiet = io.StringIO()
    try:
        with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
            parsed: T = tyro.cli(kind, default=default, args=list(tokens))
            return parsed
    except SystemExit:
        return None


def _options(default: Any) -> list[str]:
    options = []
    for key in keys(default):
        options.append(f"--{key}")
        if isinstance(_value(default, key), bool):
            section, _, name = key.rpartition(".")
            options.append(f"--{section}.no_{name}" if section else f"--no_{name}")
    return options


def _no_first(option: str) -> str:
    """--no-eval.enabled for --eval.no-enabled: both are understood."""
    section, _, name = option.removeprefix("--").rpartition(".no_")
    return f"--no_{section}.{name}"


def _value(default: Any, key: str) -> Any:
    for part in key.split("."):
        default = getattr(default, part)
    return default


def _loose(option: str) -> str:
    return ".".join(part.strip("_-").replace("_", "-") for part in option.split("."))


def _spelled(token: str, known: dict[str, str], usage: str) -> str:
    """The option as tyro spells it (any mixture of - and _ will do); a sentence where there is none."""
    name, equals, value = token.partition("=")
    option = known.get(_loose(name))
    if option is None:
        flags = [f"--{loose}" for loose in known]
        raise ConfigError(f"there is no option {name}{_nearest(name, flags) or f'; see `{usage} --help`'}")
    return option.replace("_", "-").rstrip("-") + ("_" if option.endswith("_") else "") + equals + value


def _nearest(name: str, flags: list[str]) -> str:
    """The nearest option, if one is near; the last part counts where a section is missing or wrong: --lr for --algorithm.lr."""
    last = _loose(name).removeprefix("--").rpartition(".")[2]
    if ours := translated(last, (known.removeprefix("--").replace("-", "_") for known in flags)):
        return f"; did you mean {flag(ours)}?"
    same = [known for known in flags if known.rpartition(".")[2] == f"--{last}".rpartition("--")[2]]
    if same:
        return f"; did you mean {same[0]}?"
    hint = closest(_loose(name), [known.removeprefix("--") for known in flags], "", prefix="--")
    return hint if hint.startswith("; did you mean") else ""


def _groups(tokens: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for token in tokens:
        if is_option(token):
            groups.append([token])
        else:
            groups[-1].append(token)
    return groups


def _complaint(default: Any, group: list[str]) -> str:
    """What is wrong with one option and its values."""
    name, equals, value = group[0].partition("=")
    values = [value] if equals else group[1:]
    key = next((key for key in keys(default) if _loose(key) == _loose(name)), None)
    if key is None:
        return f"{' '.join(group)} is not possible: {name} takes no value"
    section, _, last = key.rpartition(".")
    holder = _value(default, section) if section else default
    hint = get_type_hints(type(holder)).get(last) if is_dataclass(holder) else None
    if not values:
        return f"{flag(key)} needs a value: give {words(hint)}"
    shown = "takes no value: write it alone, or with no- before its name" if hint is bool else f"give {words(hint)}"
    return f"{flag(key)} {' '.join(values)} is not possible: {shown}"
