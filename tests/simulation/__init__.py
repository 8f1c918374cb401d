"""Whole jobs, simulated: the launcher's own state machines on a virtual clock.

What decides is real: launcher/run/host.py with both state machines of every host. All around them
is simulated, and one plan says all that happens: the same plan gives the same job every time.
In the order in which to read:

    plan.py              what is to happen: size, script, faults
    clock.py             virtual time
    job.py               puts a plan into effect
    launcher.py          one host's launcher: events in, actions out (effects.py carries them out)
    torchrun.py          one host's torchrun (store.py: where they meet; pipe.py: what it says)
    runner.py            a program that runs torchrun, where one does
    starting.py          how a process that torchrun starts becomes a rank
    ranks.py machine.py  ranks, what they have started, and the host that they run on
    network.py           connections between launchers (strangers.py: who else connects)
    watch.py             what is seen of a job: facts, and a trace for people
    facts.py             the register of promises, and what they are judged by
    promises.py promises_of_ranks.py truth.py   what is promised, in the words of the pages
    strategies.py        how plans are drawn
    search.py __main__.py   many jobs; a counterexample, shrunk, with its trace
    rows.py              the tables of how-it-works.md, and which of their rows jobs take
    planting.py mistakes*.py   mistakes that the simulator has to find
    lives.py real_launcher.py real_rank.py   the same small jobs with real processes

test_simulation.py runs 10,000 jobs and finds every planted mistake; test_model.py holds simulated
jobs to real ones.
"""
