"""One decode step of a whole MoE layer, built from the public functions: what `hpc demo --model` runs and checks."""
