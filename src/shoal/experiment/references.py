"""Import paths (module:name) of environments, networks, algorithms and architectures: how a run records them, how it finds them
again, and what it may import then.

A run directory is data, but resuming a run imports the modules that it names. Modules of the installed environment are
imported as they are; others only after the user said --trust.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.envs.pettingzoo_module import PETTINGZOO
from shoal.envs.recorded_env import RecordedEnv
from shoal.errors import ConfigError
from shoal.offline.space_json import space_from_json, space_to_json

if TYPE_CHECKING:
    from shoal.offline import RecordingInfo

__all__ = ["EnvRef", "check_trust", "find", "import_path", "modules_of", "outside"]


def import_path(thing: Any) -> str | None:
    """module:qualname of a class or function that another process can import; None for lambdas, closures, notebooks."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    try:
        return f"{module}:{name}" if find(f"{module}:{name}") is thing else None
    except ConfigError:
        return None


def find(path: str) -> Any:
    """The thing behind module:qualname."""
    module, _, name = path.partition(":")
    try:
        thing: Any = import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be imported: {error}; run from the folder that has it, or install its package") from None
    except Exception as error:  # the module itself is broken
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return thing


@dataclass(frozen=True)
class EnvRef:
    """An environment: an id, a gymnasium.Env class, a callable, or one that is known from recordings alone."""

    target: Any

    @classmethod
    def named(cls, word: str) -> EnvRef:
        """What a word on the command line or in a suite names: an id, gymnasium's module:Env-v0, or module:callable."""
        module, colon, name = word.rpartition(":")
        try:
            thing = attrgetter(name)(import_module(module)) if colon else None
        except (ImportError, AttributeError, ValueError):
            thing = None  # making it says what is wrong
        except Exception as error:  # of the module itself
            raise ConfigError(f"{word}: {module} cannot be imported: {type(error).__name__}: {error}") from error
        return cls(thing if callable(thing) else word)

    @classmethod
    def given(cls, env: Any) -> EnvRef:
        """What Python code gives: a name as on the command line, a class, or a callable."""
        return cls.named(env) if isinstance(env, str) else cls(env)

    @classmethod
    def recorded(cls, info: RecordingInfo, path: str) -> EnvRef:
        """That of a recording, where there is no simulator."""
        return cls(RecordedEnv(info.env or Path(path).name, info.observation_space, info.action_space, info.mask_size))

    @property
    def simulated(self) -> bool:
        """Whether it can be made."""
        return not isinstance(self.target, RecordedEnv)

    @property
    def name(self) -> str:
        """For people, folders and presets."""
        if isinstance(self.target, str):
            return self.target
        if isinstance(self.target, RecordedEnv):
            return self.target.name
        name = str(getattr(self.target, "__qualname__", type(self.target).__name__))
        return name.rpartition(".")[2].strip("<>")

    def record(self) -> dict[str, Any]:
        """For config.json."""
        if isinstance(self.target, str):
            return {"name": self.name, "id": self.target}
        if isinstance(self.target, RecordedEnv):
            return {"name": self.name, "recorded": {"observation_space": space_to_json(self.target.observation_space),
                                                    "action_space": space_to_json(self.target.action_space),
                                                    "mask_size": self.target.mask_size}}
        return {"name": self.name, "import": import_path(self.target)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], given: Any = None) -> EnvRef:
        """The environment of a run, or the one that was given for it."""
        if given is not None:
            return cls(given)
        if "id" in record:
            return cls(record["id"])
        if "recorded" in record:
            spaces = record["recorded"]
            return cls(RecordedEnv(record["name"], space_from_json(spaces["observation_space"]),
                                   space_from_json(spaces["action_space"]), spaces["mask_size"]))
        if record.get("import"):
            return cls(find(record["import"]))
        raise ConfigError(f"the environment {record.get('name')} of this run was made in a script or notebook and "
                          "cannot be imported; pass it again in Python: shoal.resume(run, env=...)")


def modules_of(config: Mapping[str, Any]) -> list[str]:
    """The top-level modules that a run's config.json names, other than shoal's own choices."""
    env = config.get("env", {})
    names = [env.get("id"), *(config.get(section, {}).get("name") for section in ("algorithm", "architecture"))]
    paths = [env.get("import"), config.get("net", {}).get("module"), *(name for name in names if name and ":" in name)]
    sources = [config.get("policies", ""), *(pair.partition("=")[2] for pair in config.get("fixed", ()))]
    paths += [path for path in sources if ":" in path and not Path(path.partition(":")[0]).exists()]
    paths = [path.removeprefix(PETTINGZOO) for path in paths if path and not path.startswith("?")]
    return sorted({path.partition(":")[0].partition(".")[0] for path in paths})


def check_trust(modules: Sequence[str], trust: bool) -> list[str]:
    """One line per module that will be imported; refuses those outside the installed environment without `trust`."""
    lines = []
    for module in modules:
        spec = importlib.util.find_spec(module)  # a top-level name: nothing is imported by looking
        if spec is None:
            raise ConfigError(f"this run needs the module {module}, which cannot be found; install it, "
                              "or run from the folder that has it")
        places = [spec.origin, *(spec.submodule_search_locations or ())]
        place = next((p for p in places if p), "?")
        if not trust and module not in sys.stdlib_module_names and not _installed(place):
            raise ConfigError(f"this run imports the module {module} from {place}, which is outside the installed "
                              "environment; look at it and add --trust if you trust it")
        lines.append(f"imports {module} from {place}")
    return lines


def outside(modules: Sequence[str]) -> bool:
    """Whether one of them is not in the installed environment."""
    try:
        check_trust(modules, trust=False)
    except ConfigError:
        return True
    return False


def _installed(place: str) -> bool:
    roots = {sysconfig.get_paths()[key] for key in ("purelib", "platlib")} | {str(Path(__file__).parents[1])}
    return any(Path(place).resolve().is_relative_to(Path(root).resolve()) for root in roots)
