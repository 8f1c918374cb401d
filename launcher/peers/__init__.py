"""All hosts of the job: who is here, what must agree, and how the job ends."""
