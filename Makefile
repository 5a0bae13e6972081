# Two commands matter: `make serve` and `make test`. `make help` lists the rest.

HOST ?= 127.0.0.1
PORT ?= 8000
# A file, a folder or a hub name; by default the model that scripts/fetch_default_model.py fetches.
MODEL ?=
CARGO ?= cargo
PYTHON ?= python3

TARGET := $(or $(CARGO_TARGET_DIR),target)
BINARY := $(TARGET)/release/inflight
VENV := $(TARGET)/venv
FETCH_MODEL := $(PYTHON) scripts/fetch_default_model.py
FETCH_NVRTC := $(PYTHON) scripts/fetch_nvrtc.py

.PHONY: help serve build test test-rust test-end-to-end lint
.DEFAULT_GOAL := help

help:
	@echo "make serve   build, fetch the default model if it is missing, serve it on $(HOST):$(PORT)"
	@echo "             (HOST=, PORT=, MODEL= choose others)"
	@echo "make test    all tests: Rust, and end to end with the openai client"
	@echo "make lint    rustfmt, clippy, cargo xtask tidy"
	@echo "make build   target/release/inflight"

build:
	$(CARGO) build --release --locked -p inflight-cli

serve: build
	@set -e; \
	model='$(MODEL)'; \
	test -n "$$model" || model=$$($(FETCH_MODEL)); \
	url="http://$(HOST):$(PORT)/v1/chat/completions"; \
	echo "Once the server is ready, in another terminal:"; \
	echo; \
	echo "  curl -N $$url -H 'Content-Type: application/json' -d \\"; \
	echo "    '{\"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}]," \
		"\"stream\": true}'"; \
	echo; \
	exec $(BINARY) serve "$$model" --host $(HOST) --port $(PORT)

test: test-rust test-end-to-end

# Ignored tests are those that need the default model, or NVRTC to compile every kernel (which needs
# no GPU). Doc tests run apart, because `--include-ignored` would also run the examples that are
# marked as not runnable.
test-rust:
	set -e; model=$$($(FETCH_MODEL)); export INFLIGHT_TEST_MODEL="$$model"; \
	nvrtc=$$($(FETCH_NVRTC)); export INFLIGHT_TEST_NVRTC="$$nvrtc"; \
	$(CARGO) test --locked --workspace --lib --bins --tests -- --include-ignored
	$(CARGO) test --locked --workspace --doc
	$(CARGO) test --locked -p inflight-engine --features shuttle --test protocol

test-end-to-end: build $(VENV)/made
	set -e; model=$$($(FETCH_MODEL)); export INFLIGHT_TEST_MODEL="$$model"; \
	INFLIGHT_BINARY='$(abspath $(BINARY))' $(VENV)/bin/python -B -m pytest -p no:cacheprovider tests

$(VENV)/made: tests/requirements.txt scripts/make_test_venv.py
	$(PYTHON) scripts/make_test_venv.py $(VENV)
	@touch $@

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) xtask tidy
