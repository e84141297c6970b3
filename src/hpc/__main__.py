"""`python -m hpc` is the same as the command `hpc`."""

from hpc.cli import main

if __name__ == "__main__":
    main()
