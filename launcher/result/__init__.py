"""How a job ends: which failure is the cause, and the words for it."""
