"""`python -m kvctl`."""

from kvctl.cli import main

if __name__ == "__main__":
    main()
