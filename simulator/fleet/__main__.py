"""`python -m simulator.fleet`."""

from simulator.fleet.cli import main

if __name__ == "__main__":
    main()
