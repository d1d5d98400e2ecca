"""Runs a script with every warning an error, as `python -W error SCRIPT` does."""

import runpy
import sys
import warnings

if __name__ == "__main__":
    warnings.simplefilter("error")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
