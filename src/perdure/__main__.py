"""`python -m perdure`."""

from perdure.command import main

if __name__ == "__main__":
    main()
