# make test   environment, install, whole suite       make demo   the main job on a mixed cluster
# make lint   ruff, import contract                   make types  mypy, strict
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two processes: the suite is short, and some tests time whole commands.
WORKERS ?= 2
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_QUIET := --disable-pip-version-check -q
DEMO_OUT ?= out/demo

.PHONY: test demo lint types bench-smoke accuracy calibrate browser install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# A CPU build of torch keeps the download small; the default index serves where that one is out of reach.
	$(BIN)/python -c 'import torch' 2>/dev/null \
	  || $(BIN)/pip install $(PIP_QUIET) --no-deps --retries 1 --timeout 20 --index-url $(TORCH_INDEX) "torch==$$(sed -n 's/^torch==//p' constraints.txt)" \
	  || echo "no CPU build of torch from $(TORCH_INDEX): taking the default index's"
	$(BIN)/pip install $(PIP_QUIET) -c constraints.txt -e ".[dev,runner]"
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS)

demo: $(STAMP)
	$(BIN)/gpumix simulate llama-3.1-70b-mixed-gpumix --out $(DEMO_OUT)
	@echo
	@echo "The report is $(abspath $(DEMO_OUT))/report.html (open it in a browser; it needs no network)."

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

bench-smoke: $(STAMP)
	$(BIN)/python -m benchmarks smoke

# The errors on public measured runs; DATA is a folder of their tables (docs/accuracy.md says which).
accuracy: $(STAMP)
	@test -d "$(DATA)/runs" || { echo "say where the measured tables are: make accuracy DATA=DIR"; exit 2; }
	$(BIN)/python -m benchmarks.accuracy --data "$(DATA)" --folds --doc docs/accuracy.md

# The calibration that ships, fitted anew on the same tables.
calibrate: $(STAMP)
	@test -d "$(DATA)/runs" || { echo "say where the measured tables are: make calibrate DATA=DIR"; exit 2; }
	$(BIN)/gpumix calibrate "$(DATA)/runs" --out hardware_db/calibration/steps.yaml

# A browser for the tests that open the report; they are skipped where there is none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	       && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
	  || echo "no browser, and no root with apt-get to install one: browser tests will be skipped"

clean:
	rm -rf $(VENV) out build dist
