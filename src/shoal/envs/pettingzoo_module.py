"""pettingzoo:MODULE as the name of an environment: the module's parallel_env() where it has one, else its env().

    pettingzoo:mpe2.simple_spread_v3                     all agents act at once
    pettingzoo:pettingzoo.classic.connect_four_v3        AEC: agents take turns, and are stepped one after the other
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from shoal.errors import ConfigError

__all__ = ["PETTINGZOO", "pettingzoo_maker"]

PETTINGZOO = "pettingzoo:"


def pettingzoo_maker(name: str) -> Callable[..., Any]:
    """The function that makes the environment of this name."""
    module = name.removeprefix(PETTINGZOO)
    try:
        with warnings.catch_warnings():  # 1.27 wants make(id), which other versions and packages do not have
            warnings.simplefilter("ignore", DeprecationWarning)
            found = import_module(module)
    except (ImportError, ValueError) as error:
        missing = getattr(error, "name", None) or module
        if missing.partition(".")[0] != module.partition(".")[0]:  # what the environment needs: chess, rlcard, ...
            raise ConfigError(f"{name}: {module} needs {missing}, which is not installed: pip install {missing.partition('.')[0]} "
                              "(for all of PettingZoo's classics: pip install 'pettingzoo[classic]')") from None
        raise ConfigError(f"{name}: {module} cannot be imported: {error}; install it (pip install 'shoal[pettingzoo]'), and name a "
                          "module like pettingzoo.classic.tictactoe_v3 or mpe2.simple_spread_v3") from None
    except Exception as error:  # of the module itself: PettingZoo's MPE only raises that it has moved
        raise ConfigError(f"{name}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    for maker in ("parallel_env", "env"):
        if callable(getattr(found, maker, None)):
            made: Callable[..., Any] = getattr(found, maker)
            return made
    raise ConfigError(f"{name}: {module} has neither parallel_env() nor env(); name a module like pettingzoo.classic.tictactoe_v3")
