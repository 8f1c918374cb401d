"""How a job ends: which failure is the cause, and the words for it.

causes.py has all failures, their exit codes and their text; raised.py the words for exceptions;
failure.py writes the file.
"""
