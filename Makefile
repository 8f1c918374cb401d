# Everything is installed into a virtual environment of the project's own.
PYTHON ?= python3
VENV   ?= .venv
# Any requirements of pip's, for example builds for CPU. Two that fit each other: "===" takes no
# build such as 2.13.0+cpu, which torchvision's from PyPI does not fit.
TORCH  ?= torch===2.13.0 torchvision==0.28.0
# One that torch 2.4 has wheels for: 3.8 to 3.12.
PYTHON_OLDEST ?= $(PYTHON)
BIN    := $(VENV)/bin
# What `make image` builds on (container/Dockerfile has a default), and what it is to be called.
BASE_IMAGE ?=
TAG        ?= sagemaker-torch-launcher
BUILD_FLAGS ?=

.PHONY: demo failure data docs image bundle dist test test-fast test-cluster matrix test-systems \
	test-bundle sdks simulate test-without-containers test-compat test-frameworks frameworks check format \
	bench clean

# What runs is not the source tree but the wheel, which is built and installed anew whenever its
# sources have changed. One file for each set of requirements marks that these are installed, too.
SOURCES := setup.cfg pyproject.toml MANIFEST.in README.md LICENSE sm_launch.py \
	$(shell find launcher launcher_tools smddp -name "*.py")
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' launcher/__init__.py)
SDIST := dist/sagemaker_torch_launcher-$(VERSION).tar.gz
WHEEL := dist/sagemaker_torch_launcher-$(VERSION)-py3-none-any.whl
INSTALLED := $(VENV)/installed-wheel
WITH_TORCH := $(VENV)/installed-$(shell echo '$(TORCH)' | tr -cs 'a-z0-9.\n' -)
WITH_FRAMEWORKS := $(WITH_TORCH)-and-frameworks
TO_TEST := $(VENV)/installed-to-test

$(BIN)/pip:
	$(PYTHON) -m venv --clear $(VENV)

$(BIN)/pyproject-build: | $(BIN)/pip
	$(BIN)/pip install --quiet "build>=1.3"

# The wheel is built from the sdist, and so of what that has in it alone.
$(WHEEL): $(SOURCES) | $(BIN)/pyproject-build
	@rm -rf *.egg-info
	$(BIN)/pyproject-build -qq
	@rm -rf *.egg-info

# pip leaves what is installed as it is if the new wheel has the same version.
$(INSTALLED): $(WHEEL) | $(BIN)/pip
	$(BIN)/pip install --quiet --force-reinstall --no-deps $(WHEEL)
	@touch "$@"

$(WITH_TORCH): setup.cfg | $(INSTALLED)
	@echo "installing $(TORCH) into $(VENV), which can take minutes ..."
	$(BIN)/pip install --quiet $(foreach word,$(TORCH),"$(word)") "$(WHEEL)[train]"
	@touch "$@"

$(WITH_FRAMEWORKS): setup.cfg | $(INSTALLED)
	@echo "installing $(TORCH) and frameworks into $(VENV), which can take minutes ..."
	$(BIN)/pip install --quiet $(foreach word,$(TORCH),"$(word)") "$(WHEEL)[frameworks]"
	@touch "$@"

$(TO_TEST): setup.cfg | $(INSTALLED)
	$(BIN)/pip install --quiet "$(WHEEL)[test,check,docs]"
	@touch "$@"

# A job of two hosts of two ranks each, on this machine's CPU.
demo: $(WITH_TORCH)
	$(BIN)/python examples/draw_pictures.py runs/pictures
	CUDA_VISIBLE_DEVICES= $(BIN)/sm-launch local --hosts 2 --nproc-per-node 2 --run-dir runs/demo \
		--channel train=runs/pictures/train --channel val=runs/pictures/val -- \
		train_scripts/train_hymenoptera.py --weights none --epochs 5 --batch-size 8 --lr 0.01 \
		--lr-step 3 --image-size 64 --checkpoint-dir ''

# A job of which one rank fails, on one host; README.md shows what it prints. It is to end with 1.
failure: $(WITH_TORCH)
	$(BIN)/sm-launch local --hosts 2 --nproc-per-node 2 --run-dir runs/failure -- \
		examples/loss_is_nan.py; test $$? = 1

# The real ants and bees, for --data data/hymenoptera_data.
data:
	$(PYTHON) examples/fetch_hymenoptera.py data

image:
	docker build $(BUILD_FLAGS) -f container/Dockerfile -t $(TAG) \
		$(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
		--label org.opencontainers.image.version=$(VERSION) \
		--label org.opencontainers.image.revision=$(shell git rev-parse HEAD 2>/dev/null) .

# The launcher as one file, for a source_dir (docs/bundle.md).
bundle:
	$(PYTHON) bundle/build.py dist/launcher.py

# What pip does not bring, and this machine lacks: one line, before anything is installed.
needs-%:
	@PYTHON=$(PYTHON) sh tests/needs.sh $*

# In more processes than two cores: many tests mostly wait.
test: needs-test $(WITH_TORCH) $(TO_TEST)
	$(BIN)/pytest -n 4 --dist loadgroup

# Jobs in the simulator (tests/simulation), on all cores: JOBS of them from SEED on; or one again,
# PLAN='Plan(...)'; or MISTAKES=1, how soon those are found that can be planted.
JOBS ?= 100000
SEED ?= 0
simulate: $(TO_TEST)
	PYTHONPATH=tests $(BIN)/python -m simulation --jobs $(JOBS) --seed $(SEED) \
		$(if $(PLAN),--replay "$(PLAN)") $(if $(MISTAKES),--mistakes)

# Without the simulator, which `make simulate` runs, too.
test-fast: $(TO_TEST)
	$(BIN)/pytest -m "not torch and not more and not systems" --ignore tests/simulation

# The tests with real containers alone.
test-cluster: needs-test-cluster $(WITH_TORCH) $(TO_TEST)
	$(BIN)/pytest tests/cluster

# Jobs broken in every way, and how long their hosts took to end (docs/faults.md), with the bounds
# of seconds that `make test` is not held to; and the other cases that it leaves out. MATRIX_OF=
# torchrun, toolkit or subprocess shows what becomes of the same jobs without the launcher.
matrix: needs-matrix $(WITH_TORCH) $(TO_TEST)
	$(BIN)/pytest -p no:randomly -m "row or more" $(if $(MATRIX_OF),tests/cluster/test_faults.py)

# The slow cases, above all of the systems in docs/systems.md.
test-systems: needs-test-systems $(WITH_TORCH) $(TO_TEST) sdks
	$(BIN)/pytest -n 4 --dist loadgroup -m systems
	$(MAKE) test-bundle

# The tests of a whole launcher, of the one that `make bundle` makes.
test-bundle: bundle $(WITH_TORCH) $(TO_TEST)
	ONE_FILE=dist/launcher.py $(BIN)/pytest -n 4 --dist loadgroup tests/test_cli.py \
		tests/test_init.py tests/test_local.py tests/test_restarts.py tests/test_run.py \
		tests/test_stops.py tests/test_two_hosts.py

# Two versions of SageMaker's Python SDK, which cannot share an environment.
SDK_V2 := .venv-sdk-v2/sagemaker-2.257.7
SDK_V3 := .venv-sdk-v3/sagemaker-train-1.27.0

sdks:
	@$(MAKE) --no-print-directory -j2 $(SDK_V2) $(SDK_V3)

$(SDK_V2) $(SDK_V3):
	@echo "installing $(@F) into $(@D), which can take minutes ..."
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/pip install --quiet "$$(echo $(@F) | sed 's/-\([0-9.]*\)$$/==\1/')"
	@touch $@

test-without-containers: $(WITH_TORCH) $(TO_TEST)
	$(BIN)/pytest --ignore tests/cluster

# The launcher's tests against the oldest torch that it supports, and the newest that installs.
test-compat:
	$(MAKE) test-without-containers \
		VENV=.venv-oldest PYTHON=$(PYTHON_OLDEST) TORCH="torch===2.4.0 torchvision==0.19.0"
	$(MAKE) test-without-containers VENV=.venv-newest TORCH="torch>=2.14 torchvision>=0.29"

# The tables of docs/options.md, from the code, and the pages as a site, in site/.
docs: $(TO_TEST)
	$(BIN)/python docs/tables.py
	$(BIN)/mkdocs build --strict
	@echo "the site is in site/: open site/index.html"

# Lightning, Hugging Face's, hydra and others under the launcher and under torchrun, with the same
# results. torch.compile needs a C++ compiler.
test-frameworks:
	$(MAKE) frameworks VENV=.venv-frameworks

frameworks: $(WITH_FRAMEWORKS)
	$(BIN)/pytest tests/frameworks

check: $(TO_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TO_TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What a release consists of, made anew.
dist: $(TO_TEST)
	rm -f $(SDIST) $(WHEEL)
	$(MAKE) $(WHEEL)
	$(BIN)/twine check --strict $(SDIST) $(WHEEL)

# What the launcher costs over plain torchrun, what the channel between hosts does, how fast the
# reference training is, and what memory model parallelism saves: a quarter of an hour.
bench: $(WITH_TORCH)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/restart.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-frameworks .venv-sdk-v2 .venv-sdk-v3 .engine build \
		dist runs site *.egg-info
