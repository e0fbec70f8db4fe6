"""Writing a recording as a Minari dataset, by minari itself: it reads what it wrote."""

from __future__ import annotations

import re
import warnings
from typing import Any

import gymnasium as gym
import numpy as np

from shoal.errors import ConfigError
from shoal.files import check_room
from shoal.offline.minari import LOG_PROB, minari_root
from shoal.offline.recorded_episodes import Demos, Episode

__all__ = ["check_new_minari", "write_minari"]

MINARI_ROOM = 1 << 14  # bytes of an episode beside its arrays; HDF5 ends the process where the disk is full


def check_new_minari(name: str) -> None:
    """Raise a ConfigError unless a dataset with this id can be written."""
    try:
        import minari  # noqa: F401
    except ImportError:
        raise ConfigError("writing a Minari dataset needs minari: pip install 'minari[hdf5]'") from None
    if not re.fullmatch(r"(?:[\w-]+/)*[\w-]+-v\d+", name):
        raise ConfigError(f"{name} is not the id of a Minari dataset; write it like my/dataset-v0")
    if (minari_root() / name).exists():
        raise ConfigError(f"there is a Minari dataset {name} already; give another id, or remove it with `minari delete {name}`")


def write_minari(demos: Demos, name: str) -> None:
    """A dataset with this id, where Minari keeps its own (MINARI_DATASETS_PATH)."""
    check_new_minari(name)
    import minari
    from minari.data_collector import EpisodeBuffer

    info = demos.info
    if info.mask_size:
        raise ConfigError("a Minari dataset has no room for action masks, which this recording has; convert it to a folder")
    episodes = list(demos.episodes())
    buffers = [EpisodeBuffer(id=number, observations=_listed(one.observation), actions=list(one.action),
                             rewards=one.reward.tolist(), terminations=one.terminated.tolist(), truncations=one.truncated.tolist(),
                             infos=_likely(one))
               for number, one in enumerate(episodes)]
    registered = info.env is not None and info.env in gym.registry and not info.kwargs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for an environment to evaluate in, an author and a link
        try:
            minari_root().mkdir(parents=True, exist_ok=True)
            check_room(minari_root(), MINARI_ROOM * len(episodes) + 2 * sum(one.nbytes for one in episodes))
            minari.create_dataset_from_buffers(name, buffers, env=info.env if registered else None, jpeg_encoding=False,
                                               algorithm_name=str(info.made[-1].get("source", "")) if info.made else None,
                                               observation_space=info.observation_space, action_space=info.action_space,
                                               data_format="hdf5", description="recorded by shoal")
        except OSError as error:
            raise ConfigError(f"minari cannot write {name} in {minari_root()}: {error.strerror or error}") from None
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"minari cannot write {name}: {error}; ids look like my/dataset-v0") from None


def _likely(episode: Episode) -> dict[str, Any] | None:
    """How likely actions were, as infos of steps: the first, which is that of a reset, has none."""
    if episode.log_prob is None:
        return None
    return {LOG_PROB: [np.float32(np.nan), *episode.log_prob]}


def _listed(tree: Any) -> Any:
    """As Minari collects observations: a list of steps, or a dictionary of them."""
    if isinstance(tree, dict):
        return {key: _listed(part) for key, part in tree.items()}
    return list(np.asarray(tree))
