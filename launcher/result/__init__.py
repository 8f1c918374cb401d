"""How a job ends: the failures, how well each explains the end, and the words for it.

causes.py has all failures, their exit codes and their text, with the words for exceptions;
failure.py writes the file. The coordinator (peers/) chooses the cause.
"""
