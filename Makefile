# Everything a developer does here. `make` alone lists it.

PYTHON ?= python3
PORT ?= 8000
STORE ?= sqlite

# Without a home npm would keep its cache in a folder called "~", here.
ifeq ($(HOME),)
export HOME := $(CURDIR)/build/home
endif

.DEFAULT_GOAL := help
PAGE = examples/page/dist/page.js
CONSOLE = src/perdure/console/page/console.js

.PHONY: help setup demo page test test-all coverage lint format conformance hosts docs dist bench clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/ready ## Make the environment in .venv (demo and test do it by themselves)

demo: .venv/ready $(PAGE) ## Watch calls survive, in the terminal and then on a page (PORT=8000, STORE=postgres for two nodes)
	@.venv/bin/python -m examples.demo --port $(PORT) --store '$(STORE)'

page: $(PAGE) $(CONSOLE) ## Build the browser package, the demo's page and the console's

test: lint ## Check style and types, run the tests
	@scripts/test

test-all: lint ## The same with long tests: outages in real time, failovers of PostgreSQL, soaks
	@PERDURE_TEST_OUTAGES=real PERDURE_TEST_FUZZ=5 PERDURE_TEST_SESSIONS=3000 scripts/test --all
	@PERDURE_TEST_SERVER=stdio scripts/test tests/http

coverage: .venv/ready ## Run all tests and measure how much of the package they reach (slow)
	@scripts/test --coverage

lint: .venv/ready ## Check style and types
	@scripts/lint

format: .venv/ready ## Format the code
	@.venv/bin/ruff check --fix-only --quiet . scripts/setup
	@.venv/bin/ruff format . scripts/setup

conformance: .venv/ready ## Run the official conformance suite for each protocol revision, for tasks, and through the gateway
	@.venv/bin/python -m tests.conformance.conformance

hosts: .venv/ready ## Run real hosts, installed from npm and PyPI (gigabytes), against Perdure; results in docs/clients.md
	@.venv/bin/python -m tests.real_hosts.run; seen=$$?; .venv/bin/python scripts/make_docs.py; exit $$seen

docs: .venv/ready ## Build the documentation as a site; result in build/site
	@scripts/docs

dist: .venv/ready ## Build the wheel, the sdist and the npm package from the last commit, and check them; results in dist
	@.venv/bin/python scripts/dist.py

bench: ## Measure Perdure beside its peers; results in bench/results
	@PYTHON=$(PYTHON) bench/setup.sh
	@.bench-venv/bin/python -m bench.run

clean: ## Remove what was made here
	rm -rf .venv .bench-venv .docs-venv build dist clients/browser/build clients/browser/dist examples/page/dist .coverage .coverage.* .hypothesis .mypy_cache .ruff_cache
	find . -name node_modules -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +

# Made again when what it is made from changes; what is installed already stays.
.venv/ready: pyproject.toml constraints.txt scripts/setup
	@$(PYTHON) scripts/setup
	@touch $@

# The demo's first part needs no page, so a machine that cannot build it goes on without.
$(PAGE): .venv/ready scripts/browser $(wildcard clients/browser/*.json clients/browser/*.mjs clients/browser/src/* examples/page/*.ts)
	@scripts/browser build || echo "browser: the page could not be built, for the reason above; the rest goes on without it" >&2

$(CONSOLE): .venv/ready scripts/browser $(wildcard clients/browser/*.json clients/console/* clients/console/src/*)
	@scripts/browser console && touch $@ || echo "browser: the console's page could not be built, for the reason above; the one of the last commit stays" >&2
