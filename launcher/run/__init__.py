"""This host's share of the job: its torchrun and ranks, from start to end.

In the launcher's process: supervisor.py is the loop; keepers.py has the connections to keepers;
torchrun.py starts torchrun, and copies its stderr; machine.py decides, with state.py, ranks.py
(failures, reactions to a stop), events.py; summary.py has the log's lines about ends. In a rank's
processes: stub.py is what torchrun starts; keeper.py starts and ends the script, with lines.py,
output.py and bars.py; rank.py runs the script, and says why it failed, with clues.py. store.py is a
process of the first host.

    launcher               supervisor.py
     └─ torchrun           torchrun.py starts it
         └─ stub           stub.py, one for each rank
             └─ keeper     keeper.py, a fork of the stub or of warm/warm.py
                 └─ script rank.py, which becomes the script; watch/in_rank.py is a thread of it
"""
