"""Measurements that developers run; `shoal bench` is what users run (docs/benchmark.md). Run them from the repository's root.

    learner_limit.py      a V-trace learner on a GPU: the bare loop, and the learner inside a whole program
    q_learner_limit.py    the learners of dqn and r2d2
    device_limit.py       the device architecture: acting alone, and the whole update
    gpu_pong.py           whole programs on Pong and their limits, in turns
    gpu_switches.py       each switch of --gpu, on and off
    synthetic.py          what these five share: work made of random frames; work_rate.py, how fast a piece of work is
    means.py              each means of going faster, with and without it
    startup.py            seconds to the first step, memory of actors
    feed.py               how well a replay table feeds its learner
    table_memory.py       memory and time of compressed replay tables
    race.py               seconds of training to a return, shoal beside SB3
    replay_targets.py     the targets of the replay buffers, from the results of `shoal bench replay`
    peer_settings.py      a few settings of each peer
    suite_parts.py        what `shoal bench` takes from here:
      peers/              other libraries, for `peer = ...` in a suite
      replay_buffers/     replay buffers alone, for `workload = ...`
      composed_limit/     how fast the cores could be, for `limit = true`
      kills.py            processes killed on the way, for `kill = ...`
      html_report.py      report.html, with model_curve.py (what the model of `shoal plan` predicts)
    results.py            files in docs/results, and parts of pages
    performance_page.py, quick_table.py, scaling_page.py    write the tables of docs/performance.md, benchmark.md, scaling.md
    metrics_page.py       writes docs/metrics.md from what roles and algorithms declare (make docs)
"""
