"""A recording by its path, and whether it is one of this environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.envs.stream import EnvSpec
from shoal.errors import ConfigError
from shoal.offline.episodes import About, Demos, plain
from shoal.offline.folder import META, Folder
from shoal.offline.minari import MinariDataset, is_minari
from shoal.offline.spaces import difference

__all__ = ["check_fit", "open_demos"]


def open_demos(path: str | Path) -> Demos:
    """A folder that `shoal data record` has made, or the folder of a Minari dataset."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"there are no demonstrations at {path}: it does not exist; make some with "
                          "`shoal data record SOURCE ENV --out PATH`")
    demos: Demos
    if (path / META).is_file():
        demos = Folder(path)
    elif is_minari(path):
        demos = MinariDataset(path)
    else:
        raise ConfigError(f"{path} holds no demonstrations: it has neither {META} (of `shoal data record`) nor data/metadata.json "
                          "(of Minari); give the folder of a recording")
    if not demos.about.episodes:
        raise ConfigError(f"{path} holds no episodes; record some with `shoal data record SOURCE ENV --out {path} --append`")
    return demos


def check_fit(about: About, path: str, spec: EnvSpec, env: str, kwargs: Mapping[str, Any], foreign: bool = False) -> None:
    """Raise a ConfigError where a recording cannot be learned from in this environment; `foreign`: another one's will do."""
    for name, own, theirs in (("observations", about.observation_space, spec.observation_space),
                              ("actions", about.action_space, spec.action_space)):
        if found := difference(own, theirs):
            raise ConfigError(f"--demos {path} does not fit {env}: its {name} are not those of the environment ({found}); record "
                              "demonstrations of this environment")
    wanted = spec.mask_size if spec.has_action_mask else 0
    if about.mask_size != wanted:
        has = "has action masks, which it has not" if about.mask_size else "has none of its action masks"
        raise ConfigError(f"--demos {path} does not fit {env}: the recording {has}; record demonstrations of this environment")
    same = about.env in (None, env) and (about.kwargs is None or plain(about.kwargs) == plain(kwargs))
    if not same and not foreign:
        raise ConfigError(f"--demos {path} was recorded in {_words(about.env, about.kwargs)}, and this run is in "
                          f"{_words(env, kwargs)}; record demonstrations of this environment, or say --foreign-demos if they mean "
                          "the same in both")


def _words(env: str | None, kwargs: Mapping[str, Any] | None) -> str:
    inside = ", ".join(f"{name}={value!r}" for name, value in (kwargs or {}).items())
    return f"{env} ({inside})" if inside else str(env)
