"""Whole jobs, simulated: the launcher's own loop and state machines on a virtual clock.

What decides is real: launcher/run/supervisor.py, keepers.py and machine.py, and launcher/peers, of
every host. All around them is simulated, and one plan says all that happens: the same plan gives
the same job every time. In the order in which to read:

    plan.py faults.py    what is to happen: size, script, and what goes wrong
    clock.py             virtual time
    job.py               puts a plan into effect
    launcher.py          one host's launcher: the loop on a simulated System (system.py)
    torchrun.py          one host's torchrun, and a program that runs it
    store.py             what makes the ranks' stores
    keeper.py            stubs and keepers
    ranks.py machine.py  ranks, what they have started, and the host that they run on
    network.py           connections between launchers
    watch.py             what is seen of a job: facts, and a trace for people
    facts.py             the register of promises, and what they are judged by
    promises.py promises_of_ranks.py truth.py   what is promised
    strategies.py        how plans are drawn
    search.py __main__.py   many jobs; a counterexample, shrunk, with its trace
    jobs.txt mistakes.txt planting.py   single jobs, and mistakes that the simulator has to find
    real.txt lives.py real_rank.py   the same small jobs with real processes

test_simulation.py runs thousands of jobs, and shows each planted mistake in a job; test_model.py
holds simulated jobs to real ones.
"""
