"""Values of TOML, JSON and Python into frozen dataclasses; presets; references to environments."""

import tomllib
from dataclasses import dataclass, field
from typing import Literal

import gymnasium as gym
import pytest

from shoal import algorithms
from shoal.errors import ConfigError
from shoal.experiment.config import EnvsConfig, Names, default_plan
from shoal.experiment.parse import parse_options, parse_train
from shoal.experiment.prepare import plan_from_json, plan_to_json, prepare
from shoal.experiment.presets import load_preset, parse_preset, preset_names
from shoal.experiment.references import EnvRef, check_trust, import_path, modules_of
from shoal.experiment.values import json_values, keys, with_values


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-3
    sizes: tuple[int, ...] = (64,)
    kind: Literal["a", "b"] = "a"
    pairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    actors: int | Literal["auto"] = "auto"
    limit: int | None = None
    on: bool = True


def test_dotted_and_nested_keys():
    """Dotted and nested keys reach the same field."""
    assert with_values(Outer(), {"inner.lr": 2}, "") == with_values(Outer(), {"inner": {"lr": 2.0}}, "")
    assert with_values(Outer(), {"inner.sizes": [3, 4]}, "").inner.sizes == (3, 4)
    assert with_values(Outer(), {"actors": 3, "limit": 1e3, "on": False}, "") == Outer(actors=3, limit=1000, on=False)
    assert with_values(Outer(), {"inner": {"pairs": {"observation": "pixels", "size": 7}}}, "").inner.pairs == (
        "observation='pixels'", "size=7")


@pytest.mark.parametrize(("values", "words"), [
    ({"inner.lrr": 1}, ["'inner.lrr'", "did you mean lr?"]),
    ({"actor": 1}, ["'actor'", "did you mean actors?"]),
    ({"actors": "two"}, ["actors='two'", "a whole number", "'auto'"]),
    ({"actors": 2.5}, ["actors=2.5", "a whole number"]),
    ({"inner.lr": "fast"}, ["inner.lr='fast'", "a number"]),
    ({"inner": {"kind": "c"}}, ["inner.kind='c'", "'a' or 'b'"]),
    ({"on": 1}, ["on=1", "true or false"]),
    ({"inner.sizes": 64}, ["inner.sizes=64", "one or more values"]),
])
def test_what_does_not_fit_is_named(values, words):
    with pytest.raises(ConfigError) as caught:
        with_values(Outer(), values, "")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("words", [["--limit", "none"], ["--limit=none"], ["--limit", "None"], ["--on", "--limit=none"]])
def test_none_may_be_spelt_small(words):
    assert parse_options(Outer, Outer(limit=5), words, "shoal").limit is None
    with pytest.raises(ConfigError, match=r"inner\.kind"):
        parse_options(Outer, Outer(), ["--limit", "none", "--inner.kind", "none"], "shoal")


def test_keys_and_plain_values():
    assert list(keys(Outer())) == ["inner.lr", "inner.sizes", "inner.kind", "inner.pairs", "actors", "limit", "on"]
    assert json_values(Outer())["inner"]["sizes"] == [64]


def test_env_arguments():
    """Arguments of environments are literals where they look like one."""
    pairs = EnvsConfig(kwargs=("observation=pixels", "size=7", "wind=(1, 2)", "name='7'", "on=True"))
    assert pairs.arguments() == {"observation": "pixels", "size": 7, "wind": (1, 2), "name": "7", "on": True}
    with pytest.raises(ConfigError, match="name=value"):
        EnvsConfig(kwargs=("pixels",)).validate()


# ---------------------------------------------------------------------------------------------- presets
@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "shoal/Catch-v0", "ALE/Pong-v5"])
def test_every_preset_is_valid(name, env):
    """Every preset is valid for every environment it speaks of."""
    preset = load_preset(name)
    plan = default_plan(Names(preset.algorithm, preset.architecture, name), EnvRef(env), preset)
    plan.validate()
    assert preset.title and preset.status


def test_the_environment_s_values_win():
    text = """
        title = "t"
        algorithm = "ppo"
        architecture = "synchronous"
        status = "s"
        [paper]
        algorithm.lr = 1e-3
        [tuned]
        actors = 2
        [env."ALE/*".paper]
        algorithm.lr = 5e-4
    """
    preset = parse_preset("x", tomllib.loads(text))
    assert preset.values("CartPole-v1") == {"algorithm.lr": 1e-3, "actors": 2}
    assert preset.values("ALE/Pong-v5")["algorithm.lr"] == 5e-4
    assert {override.source for override in preset.overrides} == {"paper", "tuned"}


@pytest.mark.parametrize("wrong", ['title = "t"', '[guessed]\nactors = 2'])
def test_preset_without_its_words_is_refused(wrong):
    whole = 'title = "t"\nalgorithm = "ppo"\narchitecture = "synchronous"\nstatus = "s"\n'
    with pytest.raises(ConfigError):
        parse_preset("x", tomllib.loads(wrong if wrong.startswith("title") else whole + wrong))


def test_unknown_preset_suggests_the_nearest():
    with pytest.raises(ConfigError, match="no preset 'impalla'; did you mean impala"):
        load_preset("impalla")


def test_atari_evaluates_twenty_episodes():
    preset = load_preset("impala")
    names = Names(preset.algorithm, preset.architecture, "impala")
    assert default_plan(names, EnvRef("ALE/Pong-v5"), preset).experiment.eval.episodes == 20
    assert default_plan(names, EnvRef("CartPole-v1"), preset).experiment.eval.episodes == 100


# ---------------------------------------------------------------------------------------------- fit, json, references
def test_algorithm_and_data_path(monkeypatch):
    """An algorithm that cannot learn from the data path is refused."""
    from shoal.architectures.actor_learner import ActorLearner
    from shoal.learning import Delivery, Tolerance

    plan = default_plan(Names("a2c", "actor_learner"), EnvRef("CartPole-v1"), None)
    replay = Delivery(Tolerance.REPLAY, "replayed data are of any age")
    monkeypatch.setattr(ActorLearner, "delivers", lambda self, config: replay)
    with pytest.raises(ConfigError) as caught:
        plan.validate()
    for word in ("--algorithm a2c", "--architecture actor_learner", "any replay", "of any age", "vtrace"):
        assert word in str(caught.value)


@pytest.mark.parametrize("algorithm", list(algorithms.ALGORITHMS))
def test_config_json_round_trip(algorithm):
    import json

    overrides = {"actors": 3, "net": {"hidden": (8, 8)}, "envs.kwargs": ["size=3"], "until_return": 1}
    plan = default_plan(Names(algorithm, "actor_learner", "mine"), EnvRef("CartPole-v1"), None, overrides)
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))), "config.json")
    assert again == plan


class Own(gym.Env):
    """An environment that can be imported."""


def test_recorded_environments():
    """Environments are recorded by name where they can be found again."""
    assert EnvRef("CartPole-v1").record() == {"name": "CartPole-v1", "id": "CartPole-v1"}
    record = EnvRef(Own).record()
    assert record == {"name": "Own", "import": f"{__name__}:Own"}
    assert EnvRef.from_record(record).target is Own
    lost = EnvRef(lambda: None).record()
    assert lost["import"] is None
    with pytest.raises(ConfigError, match=r"env=\.\.\."):
        EnvRef.from_record(lost)
    assert EnvRef.from_record(lost, given=Own).target is Own


def test_words_for_environments(tmp_path, monkeypatch):
    """A word names an id or something to import."""
    (tmp_path / "mysim.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gym.register('Registered-v0', entry_point=CartPoleEnv, max_episode_steps=9)\n"
        "class Own(CartPoleEnv): pass\n"
        "class Many:\n    make = Own\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert EnvRef.named("CartPole-v1").target == "CartPole-v1"
    assert EnvRef.named("mysim:Own").record() == {"name": "Own", "import": "mysim:Own"}
    assert EnvRef.named("mysim:Many.make").name == "Own"
    assert EnvRef.named("mysim:Registered-v0").target == "mysim:Registered-v0"  # gymnasium's way to say it
    assert parse_train(["impala", "mysim:Own"]).env.name == "Own"
    assert prepare(parse_train(["impala", "mysim:Registered-v0"])).spec.max_episode_steps == 9
    with pytest.raises(ConfigError, match=r"unknown environment 'mysim:Oven' .*; give .* module:callable"):
        prepare(parse_train(["impala", "mysim:Oven"]))
    (tmp_path / "broken.py").write_text("import gymnasium\n1 / 0\n")
    with pytest.raises(ConfigError, match="broken:Own: broken cannot be imported: ZeroDivisionError: division by zero"):
        parse_train(["impala", "broken:Own"])
    assert EnvRef.named(":x").target == ":x"
    with pytest.raises(ConfigError, match="No module named 'yoursim'"):
        prepare(parse_train(["impala", "yoursim:Own"]))
    assert import_path(gym.Env) == "gymnasium.core:Env"


def test_modules_that_need_trust(tmp_path, monkeypatch):
    """Modules outside the installed environment need trust."""
    (tmp_path / "strange_nets.py").write_text("raise RuntimeError('imported without trust')")
    monkeypatch.syspath_prepend(tmp_path)
    config = {"env": {"name": "E", "import": "gymnasium.core:Env"}, "net": {"module": "strange_nets:Net"}}
    modules = modules_of(config)
    assert modules == ["gymnasium", "strange_nets"]
    with pytest.raises(ConfigError, match=r"strange_nets.*--trust"):
        check_trust(modules, trust=False)
    assert len(check_trust(modules, trust=True)) == 2  # looking does not import
    with pytest.raises(ConfigError, match="cannot be found"):
        check_trust(["no_such_module_anywhere"], trust=True)
    assert modules_of({"env": {"id": "shoal/Catch-v0"}, "net": {"module": None}}) == []
    assert modules_of({"env": {"id": "pkg.sub:Env-v0"}}) == ["pkg"]
