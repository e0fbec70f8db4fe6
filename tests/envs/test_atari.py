"""The Atari protocol: one object, the same numbers from both back-ends, and from plain ALE with the preprocessing written here.

envpool brings 960 MB (MuJoCo's assets), so the tests do not install it. They use it where it can be imported, or from an
environment of its own: python3.11 -m venv .peers/envpool && .peers/envpool/bin/pip install -c constraints.txt envpool ale-py
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from shoal import envs
from shoal.envs.atari_protocol import AtariProtocol
from shoal.envs.interface import split_seed
from shoal.errors import ConfigError
from tests.envs.atari_playback import play
from tests.tree import ROOT, tree_environment

POOL = ROOT / ".peers" / "envpool" / "bin" / "python"
ORDERS = [
    {"game": "ALE/Pong-v5", "seed": 3, "steps": 150, "options": {"noop_max": 1}},
    {"game": "ALE/Breakout-v5", "seed": 4, "steps": 400, "options": {"noop_max": 1, "life_loss": "discount"}},
    {"game": "ALE/Breakout-v5", "seed": 5, "steps": 120, "options": {
        "noop_max": 1, "repeat_action_probability": 0.0, "stack_num": 2, "max_num_frames_per_episode": 200,
        "reward_clipping": True}},
]


def test_protocol_checks():
    protocol, others = AtariProtocol.of("ALE/Pong-v5", {"game": "pong", "frameskip": 4}, {"num_threads": 2, "stack_num": 1})
    assert protocol == AtariProtocol(stack_num=1) and others == {"num_threads": 2} and protocol.max_episode_steps == 27_000
    for wrong, words in (({"frameskip": 0}, "frameskip=0"), ({"repeat_action_probability": 2.0}, "give 0 to 1"),
                         ({"life_loss": "die"}, "ignore or discount"),
                         ({"max_num_frames_per_episode": 10}, "multiple of frameskip"),
                         ({"colour": True}, "no option 'colour'"), ({"episodic_life": True}, "life_loss=discount"),
                         ({"grayscale": False}, "grey")):
        with pytest.raises(ConfigError, match=words):
            AtariProtocol.of("ALE/Pong-v5", {}, wrong)


def test_protocol_reaches_both():
    """Every field reaches both, under whatever name; what shoal does itself is switched off in both."""
    usual = AtariProtocol()
    others = {"frameskip": 2, "repeat_action_probability": 0.1, "noop_max": 7, "use_fire_reset": False, "img_height": 42,
              "img_width": 42, "stack_num": 2, "max_num_frames_per_episode": 400, "full_action_space": True}
    for name, value in others.items():
        changed = replace(usual, **{name: value})
        assert changed.ale() != usual.ale() and changed.envpool() != usual.envpool(), name
    assert set(others) | {"life_loss", "reward_clipping"} == set(AtariProtocol.__dataclass_fields__)
    assert replace(usual, reward_clipping=True).reward_clip == 1.0 and not usual.ale()["reward_clipping"]


# ---------------------------------------------------------------------------------------------- plain ALE
def area(size: int, into: int) -> np.ndarray:
    """[into, size]: how much of each old pixel lies in each new one."""
    edges = np.arange(into + 1) * size / into
    old = np.arange(size)
    overlap = np.minimum(edges[1:, None], old + 1) - np.maximum(edges[:-1, None], old)
    return np.clip(overlap, 0, None) * into / size


class Plain:
    """One game through ale_py.ALEInterface, with the protocol written out: what both back-ends should be doing."""

    def __init__(self, rom: str, protocol: AtariProtocol, seed: int) -> None:
        from ale_py import Action, ALEInterface, roms

        self.ale, self.protocol, self.fire = ALEInterface(), protocol, Action.FIRE
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", protocol.repeat_action_probability)
        self.ale.loadROM(roms.get_rom_path(rom))
        self.actions = self.ale.getMinimalActionSet()
        self.rows, self.columns = area(210, protocol.img_height), area(160, protocol.img_width)

    def small(self, frame: np.ndarray) -> np.ndarray:
        return self.rows @ frame.astype(np.float64) @ self.columns.T

    def begin(self) -> np.ndarray:
        self.ale.reset_game()
        self.ale.act(self.fire)
        black = np.zeros((self.protocol.img_height, self.protocol.img_width))
        self.stack = deque([black] * self.protocol.stack_num, self.protocol.stack_num)
        self.stack.append(self.small(self.ale.getScreenGrayscale()))
        self.frames, self.lives = 0, self.ale.lives()
        return np.stack(self.stack)

    def step(self, index: int) -> tuple[np.ndarray, float, float, bool]:
        reward, seen = 0.0, []
        for _ in range(self.protocol.frameskip):
            reward += self.ale.act(self.actions[index])
            self.frames += 1
            seen.append(self.ale.getScreenGrayscale())
            if self.ale.game_over():
                break
        self.stack.append(self.small(np.maximum.reduce(seen[-2:])))
        over = self.ale.game_over()
        lost = self.ale.lives() < self.lives and self.protocol.life_loss == "discount"
        self.lives = self.ale.lives()
        return np.stack(self.stack), reward, float(not (over or lost)), over


@pytest.mark.atari
@pytest.mark.parametrize(("game", "rom", "sticky"), [("ALE/Pong-v5", "pong", 0.25), ("ALE/Breakout-v5", "breakout", 0.0),
                                                      ("ALE/Breakout-v5", "breakout", 0.25)])
def test_ale_is_plain_ale(game, rom, sticky):
    """The same actions: rewards, lives and ends equal, observations but for one grey level of rounding."""
    pytest.importorskip("ale_py")
    options = {"noop_max": 1, "repeat_action_probability": sticky, "life_loss": "discount"}
    env = envs.make(game, 1, **options)
    step = env.reset(seed=9)
    plain = Plain(rom, AtariProtocol(**options), int(split_seed(9, 1)[0]) % (2**31 - 1))
    seen = plain.begin()
    assert np.abs(step.observation[0] - seen).max() < 1.01
    actions, ends, zeros, rewards = np.random.default_rng(9).integers(env.action_space.n, size=300), 0, 0, 0
    for turn, action in enumerate(actions):
        step = env.step(np.array([action]))
        seen, reward, discount, over = plain.step(int(action))
        assert (step.reward[0], step.discount[0], step.last[0]) == (reward, discount, over), turn
        seen = plain.begin() if over else seen
        assert np.abs(step.observation[0] - seen).max() < 1.01, turn
        ends, zeros, rewards = ends + over, zeros + (discount == 0), rewards + (reward != 0)
    assert rewards and (rom == "pong" or (ends and zeros > ends))


# ---------------------------------------------------------------------------------------------- envpool
def through_envpool(orders: list[dict]) -> list[list]:
    if importlib.util.find_spec("envpool"):
        python = sys.executable
    elif POOL.exists():
        python = str(POOL)
    else:
        pytest.skip("envpool is not installed: pip install 'shoal[envpool]', or see the top of this file")
    done = subprocess.run([python, "-m", "tests.envs.atari_playback", json.dumps(orders)], capture_output=True,
                          text=True, check=False, env=tree_environment(), timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.atari
def test_ale_equals_envpool():
    """Byte for byte, with sticky actions, over the ends of games, with lost lives, clipped rewards and truncation."""
    pytest.importorskip("ale_py")
    theirs = through_envpool([{**order, "backend": "envpool"} for order in ORDERS])
    for order, found in zip(ORDERS, theirs, strict=True):
        assert play({**order, "backend": "ale"}) == found, order
    firsts = [sum(row[0] == "first" for row in found) for found in theirs]
    assert firsts[1] > 1 and firsts[2] > 1, "no game ended: the test shows less than it says"
