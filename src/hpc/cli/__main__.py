"""`python -m hpc.cli` is `hpc`."""

from hpc.cli import main

main()
