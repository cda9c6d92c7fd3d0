"""`python -m tokenmill` is the command line."""

from tokenmill.cli.app import main

if __name__ == "__main__":
    main()
