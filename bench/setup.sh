#!/bin/sh
# Make the benchmark's own environment, so that no rival's package meets the ones we develop with.
set -eu
cd "$(dirname "$0")/.."
test -x .bench-venv/bin/python || "${PYTHON:-python3}" -m venv .bench-venv
.bench-venv/bin/python -m pip install --quiet -r bench/requirements.txt -e '.[postgres]'
