"""`sm-launch doctor`: what the launcher sees on this host, and whether a job would run.

look*.py gather facts (facts.py); judge*.py turn them into findings; report.py shows these.
"""
