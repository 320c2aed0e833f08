"""Each algorithm again, as a plain loop over workers in one process: what the distributed runs must agree with."""
