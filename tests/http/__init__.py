# ruff: noqa: A005 - tests mirror the source
