"""`shoal tune`: a population of one is a plain run; copies take over everything, are done again if cut short, and can be traced."""

from dataclasses import replace

import numpy as np
import pytest

import shoal
from shoal import cli
from shoal.experiment.checkpoints import TensorFiles, read_meta
from shoal.experiment.parse import parse_train
from shoal.experiment.rundir import RunDir
from shoal.tuning import study as study_module
from shoal.tuning.checks import budget, checked, member_options
from shoal.tuning.member_run import value_words
from shoal.tuning.report import table
from shoal.tuning.searches import until_env_steps
from shoal.tuning.study import Member, Study, StudySettings
from tests.experiment.toys import Fatal, Gift

SMALL = {"runtime": "inline", "console.mode": "none", "tensorboard": False, "eval.episodes": 5, "algorithm.unroll": 8}
SETTINGS = StudySettings("a2c", "shoal/Catch-v0", {"algorithm.lr": "loguniform(0.0001, 0.01)"}, 2, 300, 600)


def learner(run):
    newest = RunDir(run).checkpoints().newest()
    return TensorFiles().load(newest / "trainer-0.safetensors")


def trained(path, seed, lr):
    return shoal.train("a2c", "shoal/Catch-v0", run_dir=str(path), seed=seed, max_env_steps=300, policy="last",
                       **{**SMALL, "algorithm.lr": lr})


@pytest.fixture
def study(tmp_path):
    """Two members that have trained for an interval."""
    study = Study.create(tmp_path / "study", SETTINGS)
    for number, lr in enumerate((1e-3, 5e-3)):
        trained(study.run(number).path, number, lr)
        study.log("start", number, values={"algorithm.lr": lr})
        member = study.save(study.measured(Member(number, {"algorithm.lr": lr}, ancestor=number)))
        study.log("slice", number, values=member.values, env_steps=member.env_steps, fitness=member.fitness)
    return study


def test_copy_keeps_the_values(study):
    """A copy takes over everything but the values."""
    child, parent = study.members()
    assert child.fitness is not None and child.episodes == 5 and child.env_steps >= 300
    before = learner(study.run(0).path)
    after = study.finish_copy(study.begin_copy(child, parent, {"algorithm.lr": 5e-3 * 1.2}))
    copied, source = learner(study.run(0).path), learner(study.run(1).path)
    assert set(copied) == set(source) and all(np.array_equal(copied[name], source[name]) for name in source)
    assert not np.array_equal(copied["learn/params"], before["learn/params"]) and source["learn/adam.m"].any()
    assert after.values == {"algorithm.lr": 5e-3 * 1.2} and after.fitness is None and after.ancestor == 1 and not after.copying
    run = shoal.resume(study.run(0).path, max_env_steps=600)
    assert run.prepared.plan.experiment.algorithm.lr == 5e-3 * 1.2  # the copied optimiser does not undo it
    member = study.save(study.measured(after))
    study.log("slice", 0, values=member.values, env_steps=member.env_steps, fitness=member.fitness)
    schedule = study.schedule(0)
    assert [(row["member"], row["values"]["algorithm.lr"]) for row in schedule] == [(1, 5e-3), (0, 5e-3 * 1.2)]
    assert "1 of 2 ancestors are left" in table(study) and study.best.directory.parent.name == "members"


def test_a_study_in_words(study):
    best = max(member.fitness for member in study.members())
    assert repr(study) == f"<Study {study.path}: a2c on shoal/Catch-v0, population search, 2 members, best fitness {best:,.6g}>"
    (study.path / "study.json").write_text("{")
    assert repr(study) == f"<Study {study.path}, which cannot be read>"


def test_copy_cut_short_is_redone(study, monkeypatch):
    child, parent = study.members()
    begun = study.begin_copy(child, parent, {"algorithm.lr": 2e-3})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(study_module, "set_values", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        study.finish_copy(begun)
    again = Study.open(study.path)
    (half, _) = again.members()
    assert half.copying["parent"] == 1 and half.values == child.values
    done = again.finish_copy(half)
    assert done.values == {"algorithm.lr": 2e-3} and again.run(0).config()["algorithm"]["lr"] == 2e-3
    assert [row["event"] for row in again.lineage()].count("copy") == 1


def test_a_population_of_one_is_a_plain_run(tmp_path):
    study = shoal.tune("a2c", "shoal/Catch-v0", vary={"algorithm.lr": shoal.loguniform(1e-4, 1e-2)}, population=1, seed=3,
                       every_env_steps=100, max_env_steps=300, study=tmp_path / "study", **SMALL)
    (member,) = study.members()
    trained(tmp_path / "plain", 3, member.values["algorithm.lr"])
    mine, plain = learner(study.run(0).path), learner(tmp_path / "plain")
    assert all(np.array_equal(mine[name], plain[name]) for name in plain)
    assert member.stopped_by == "env_steps" and study.best.policy is not None


def test_schedule_of_a_copy_in_the_middle_of_a_slice(study):
    """What the parent had trained since its last interval is a part of the child's schedule, with the parent's values."""
    shoal.resume(study.run(1).path, max_env_steps=450)  # its slice is under way
    child, parent = study.members()
    taken = study.run(1).checkpoints().newest()
    study.finish_copy(study.begin_copy(child, parent, {"algorithm.lr": 6e-3}))
    study.log("slice", 1, values=parent.values, env_steps=700, fitness=1.0)  # later: not a part of it
    study.log("slice", 0, values={"algorithm.lr": 6e-3}, env_steps=900, fitness=1.0)
    schedule = [(row["member"], row["env_steps"], row["values"]["algorithm.lr"]) for row in study.schedule(0)]
    steps = read_meta(taken)["env_steps"]
    assert 450 <= steps < 700 and schedule == [(1, parent.env_steps, 5e-3), (1, steps, 5e-3), (0, 900, 6e-3)]


@pytest.mark.parametrize(("words", "reason"), [
    (["--vary", "algorithm.lr=loguniform(1,0.1)"], "below the second"), (["--vary", "algorithm.speed=uniform(0,1)"], "speed"),
    (["--vary", "algorithm.lr=uniform(-1.0,1.0)"], "lr is -1.0"), ([], "nothing is varied"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--max-env-steps", "50"], "less than one interval"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--exploit", "luck"], "invalid choice"),
    (["--vary", "algorithm.lr"], "--vary algorithm.lr has no range"), (["--vary", "seed=choice(1,2)"], "seed is not possible"),
    (["--vary", "net.hidden=choice(8,16)"], "the weights of another network"),
    (["--vary", "algorithm.optimiser=choice('adam','rmsprop')"], "with adam cannot take over the state of one with rmsprop"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--population", "1000000000"], "from 1 to 10,000"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--run-dir", "x"], "give --study FOLDER"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--until-return", "nan"], "give a finite number"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--search", "random", "--exploit", "t_test"], "means nothing to --search random"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--search", "grid", "--population", "5"], "the grid has 3 points"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--search", "halving", "--reduction", "1"], "from 2 to 1,000"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--search", "luck"], "invalid choice"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--max-seconds", "5"], "give --max-env-steps"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--max-learner-steps=5"], "give --max-env-steps"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--until", "eval_return>1"], "give --until-return"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--no-eval.enabled"], "nothing to compare members by"),
    (["--vary", "algorithm.lr=uniform(0.1,1.0)", "--seed", str(2**53 - 1)], "--seed 9.0072e+15 is not possible"),
])
def test_what_makes_no_sense_is_refused(words, reason, tmp_path, capsys):
    given = ["tune", "a2c", "shoal/Catch-v0", "--study", str(tmp_path / "study"), "--every-env-steps", "100"]
    assert cli.main([*given, *([] if "--max-env-steps" in words else ["--max-env-steps", "1000"]), *words]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "study").exists()


@pytest.mark.parametrize(("search", "every", "most", "until_return", "found"), [
    ("population", None, None, None, (20_000, 200_000)), ("population", None, 50_000, None, (5_000, 50_000)),
    ("halving", 1_000, None, None, (1_000, 10_000)), ("random", None, None, None, (200_000, 200_000)),
    ("population", None, None, 475.0, (20_000, 10**9)), ("grid", None, 300, 475.0, (300, 300)),
])
def test_a_budget_that_is_not_given(search, every, most, until_return, found):
    assert budget(search, every, most, until_return) == found


def test_tables_outlive_an_interval():
    def options(preset, *given, intervals=True):
        return member_options(preset, "shoal/Catch-v0", given, intervals)

    assert options("dqn") == ("--runtime", "inline", "--replay.checkpoint") and options("a2c") == ("--runtime", "inline")
    assert options("dqn", "--no-replay.checkpoint", "--runtime", "local") == ("--no-replay.checkpoint", "--runtime", "local")
    assert options("dqn", intervals=False) == ("--runtime", "inline")  # there is no second interval


def test_ranges_of_options():
    """A range has the kind of numbers that its option takes; names are those of config.json."""
    def varied(search, **vary):
        given = dict.fromkeys(("every_env_steps", "max_env_steps", "until_return", "population", "exploit", "resample", "points",
                               "reduction", "workers", "cluster"))
        names = {name.replace("__", "."): text for name, text in vary.items()}
        return checked("ppo", "shoal/Catch-v0", names, (), search=search, seed=0, **given).vary

    found = varied("population", algorithm__entropy="uniform(0, 1)", algorithm__epochs="uniform(1, 8)")
    assert found == {"algorithm.entropy": "uniform(0.0, 1.0)", "algorithm.epochs": "uniform(1, 8)"}
    assert varied("random", net__hidden="uniform(8, 16)") == {"net.hidden": "uniform(8, 16)"}
    assert list(varied("population", **{"algorithm.lr-final": "loguniform(1e-5, 1e-4)"})) == ["algorithm.lr_final"]


def test_values_in_sections():
    """As `shoal.train` takes them."""
    words = value_words({"algorithm": {"gamma": 0.9, "lr_final": None}, "envs": {"kwargs": {"observation": "pixels"}},
                         "actors": 2})
    assert words == ["--algorithm.gamma", "0.9", "--algorithm.lr-final", "None", "--envs.kwargs", "observation='pixels'",
                     "--actors", "2"]
    experiment = parse_train(["ppo", "shoal/Catch-v0", *words]).experiment
    assert (experiment.algorithm.gamma, experiment.algorithm.lr_final, experiment.actors) == (0.9, None, 2)
    assert experiment.envs.arguments() == {"observation": "pixels"}


def test_an_environment_that_is_not_there(tmp_path, capsys):
    words = ["--vary", "algorithm.lr=uniform(0.1,1.0)", "--every-env-steps", "10", "--max-env-steps", "20"]
    assert cli.main(["tune", "a2c", "Nosuch-v0", "--study", str(tmp_path / "study"), *words]) == 2
    assert "unknown environment 'Nosuch-v0'" in capsys.readouterr().err and not (tmp_path / "study").exists()


def test_folder_without_a_study(tmp_path, capsys):
    """A study is opened only where there is one."""
    assert cli.main(["tune", "show", str(tmp_path)]) == 2 and "has no study" in capsys.readouterr().err
    Study.create(tmp_path / "study", replace(SETTINGS, options=("--runtime", "inline")))
    assert cli.main(["tune", "show", str(tmp_path / "study")]) == 0
    assert Study.open(tmp_path / "study").settings.options == ("--runtime", "inline")
    with pytest.raises(shoal.ConfigError, match="not empty"):
        Study.create(tmp_path / "study", SETTINGS)


def test_grid_search_and_its_report(tmp_path, capsys):
    """A member for each point of the grid; the table and the page show all of them, and the page needs no network."""
    words = ["--search", "grid", "--points", "1", "--vary", "algorithm.lr=loguniform(0.001,0.01)", "--vary",
             "net.activation=choice('tanh','relu')", "--max-env-steps", "100", "--no-tensorboard", "--eval.episodes", "2"]
    assert cli.main(["tune", "a2c", "shoal/Catch-v0", "--study", str(tmp_path / "study"), *words]) == 0
    study = Study.open(tmp_path / "study")
    middle = pytest.approx(0.001 * 10**0.5)
    assert [tuple(one.values.values()) for one in study.members()] == [(middle, "tanh"), (middle, "relu")]
    assert all(one.fitness is not None and one.env_steps >= 100 for one in study.members())
    assert [study.run(k).config()["net"]["activation"] for k in (0, 1)] == ["tanh", "relu"]
    assert str(tmp_path / "study" / "report.html") in capsys.readouterr().out
    page = (tmp_path / "study" / "report.html").read_text()
    assert "0 = tanh, 1 = relu" in page and page.count("<circle") >= 2 * 4 and "http" not in page and "<script" not in page


def test_a_class_of_a_module(tmp_path, capsys):
    """Members import it, in every interval; resuming a study asks before it imports."""
    study = shoal.tune("a2c", Gift, vary={"algorithm.lr": shoal.loguniform(1e-4, 1e-2)}, population=2, every_env_steps=64,
                       max_env_steps=128, workers=2, study=tmp_path / "study", **SMALL)
    assert study.settings.env == "tests.experiment.toys:Gift"
    assert repr(study) == (f"<Study {study.path}: a2c on tests.experiment.toys:Gift, population search, 2 members, "
                           "best fitness 2>")
    assert all(member.env_steps >= 128 and not member.failures for member in study.members())
    assert study.best.policy.act(np.zeros(study.best.prepared.raw_spaces()[0].shape, np.float32)) in (5, 6)
    assert cli.main(["tune", "resume", str(study.path)]) == 2 and "add --trust if you trust it" in capsys.readouterr().err
    assert cli.main(["tune", "resume", str(study.path), "--trust"]) == 0 and "imports tests from" in capsys.readouterr().out
    with pytest.raises(shoal.ConfigError, match="--trust"):
        _ = Study.open(study.path).best
    assert Study.open(study.path, trust=True).best.summary["env"] == "Gift"


@pytest.mark.parametrize("env", [lambda: Gift(), Gift(), 3])
def test_what_members_cannot_import(env, tmp_path):
    with pytest.raises(shoal.ConfigError, match=r"is not possible: members are programs of their own, .* a file such as my_env.py"):
        shoal.tune("a2c", env, vary={"algorithm.lr": shoal.uniform(0.1, 1)}, study=tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_halving_gives_the_best_more(tmp_path):
    study = shoal.tune("a2c", "shoal/Catch-v0", vary={"algorithm.lr": shoal.loguniform(1e-4, 1e-2)}, search="halving", population=2,
                       reduction=2, every_env_steps=64, max_env_steps=128, workers=2, study=tmp_path / "study", **SMALL)
    worse, better = sorted(study.members(), key=lambda one: len(one.rungs))
    assert [len(worse.rungs), len(better.rungs)] == [1, 2] and better.rungs[0] >= worse.rungs[0]
    assert worse.env_steps < better.env_steps >= 128 and better.rungs[-1] == better.fitness


def test_a_member_that_fails(tmp_path, capsys):
    """A learning rate that overflows costs one member, not the study; it copies one that has not failed."""
    words = ["--population", "3", "--vary", "algorithm.lr=choice(0.001,1e37)", "--every-env-steps", "1500", "--max-env-steps",
             "3000", "--algorithm.unroll", "5", "--no-tensorboard", "--eval.episodes", "2", "--seed", "4", "--workers", "2"]
    assert cli.main(["tune", "a2c", "shoal/Catch-v0", "--study", str(tmp_path / "study"), *words]) == 0
    rows, printed = Study.open(tmp_path / "study").lineage(), capsys.readouterr()
    (bad,) = (row["member"] for row in rows if row["event"] == "start" and row["values"]["algorithm.lr"] > 1)
    assert f"member {bad} failed (algorithm.lr=1e+37), and the others continue" in printed.out + printed.err
    assert bad in {row["member"] for row in rows if row["event"] == "copy"}
    others = [one for one in Study.open(tmp_path / "study").members() if one.number != bad]
    assert all(one.env_steps >= 3000 for one in others if not one.failed) and not all(one.failed for one in others)


def test_nobody_is_left(tmp_path, capsys):
    words = ["--search", "random", "--population", "2", "--vary", "algorithm.lr=uniform(1e36,1e37)", "--max-env-steps", "4000",
             "--algorithm.unroll", "5"]
    given = ["tune", "a2c", "shoal/Catch-v0", "--study", str(tmp_path / "study"), "--no-tensorboard", *words]
    assert cli.main(given) == 3 and "and so did all others" in capsys.readouterr().err
    assert cli.main(["tune", "show", str(tmp_path / "study")]) == 0 and "failed" in capsys.readouterr().out


def test_a_member_that_ends_its_own_process(tmp_path):
    """It is not begun again for ever."""
    with pytest.raises(shoal.RoleFailed, match=r"so did all others: its process died 5 times after 0 env steps \(exit code 9\)"):
        shoal.tune("a2c", Fatal, vary={"algorithm.lr": shoal.loguniform(1e-4, 1e-2)}, population=2, every_env_steps=64,
                   max_env_steps=128, workers=2, study=tmp_path / "study", **SMALL)
    assert all(member.failed for member in Study.open(tmp_path / "study").members())


def test_member_killed_before_its_record(study):
    """A slice that is over but not written down can be finished."""
    (child, _) = study.members()
    for settings in (SETTINGS, replace(SETTINGS, search="halving"), replace(SETTINGS, population=1)):
        assert until_env_steps(settings, child, 600) == 601
    assert until_env_steps(SETTINGS, child, 200) == 500


def test_resume_after_the_return(study, capsys):
    """A study whose return was reached has ended: nobody trains on."""
    study.save(replace(study.members()[1], stopped_by="return"))
    before = [member.env_steps for member in study.members()]
    assert cli.main(["tune", "resume", str(study.path)]) == 0
    assert [member.env_steps for member in study.members()] == before and "2 members" in capsys.readouterr().out
