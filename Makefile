# Everything is installed into a virtual environment of the project's own; another TORCH wants another
# VENV.
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

.PHONY: failure demo bundle image docs dist check install test test-fast test-containers \
	test-systems test-slow test-compat test-frameworks test-pages matrix simulate bench nvrx clean

SOURCES := setup.cfg pyproject.toml MANIFEST.in README.md LICENSE sm_launch.py \
	$(shell find launcher launcher_tools smddp -name "*.py")
NAME := sagemaker-torch-launcher
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' launcher/__init__.py)
LAUNCHER := $(BIN)/sm-launch
TORCHRUN := $(BIN)/torchrun
PYTEST := $(BIN)/pytest
MKDOCS := $(BIN)/mkdocs

$(BIN)/pip:
	$(PYTHON) -m venv --clear $(VENV)

# What runs is not the source tree but the wheel, built from the sdist, and so of what that has in it
# alone. pip leaves what is installed as it is if the new wheel has the same version.
$(LAUNCHER): $(SOURCES) | $(BIN)/pip
	$(BIN)/pip install --quiet "build>=1.3" "setuptools>=70.1"
	@rm -rf dist/*.tar.gz dist/*.whl *.egg-info
	$(BIN)/pyproject-build -qq --no-isolation
	@rm -rf *.egg-info
	$(BIN)/pip install --quiet --force-reinstall --no-deps dist/*.whl

# pip may leave a program as old as it is, which make would then install again and again.
$(TORCHRUN): setup.cfg | $(LAUNCHER)
	@echo "installing $(TORCH) into $(VENV), which can take minutes ..."
	$(BIN)/pip install --quiet $(foreach word,$(TORCH),"$(word)") "$(NAME)[train]"
	@touch $@

$(PYTEST): setup.cfg | $(LAUNCHER) $(MKDOCS)
	$(BIN)/pip install --quiet "$(NAME)[test,check]"
	@touch $@

$(MKDOCS): docs/requirements.txt | $(BIN)/pip
	$(BIN)/pip install --quiet --requirement docs/requirements.txt
	@touch $@

# One rank of a two-host job fails; README.md shows what it prints. It should exit with 1.
failure: $(TORCHRUN)
	$(BIN)/sm-launch local --hosts 2 --nproc-per-node 2 --run-dir runs/failure -- \
		examples/loss_is_nan.py; test $$? = 1

# A job of two hosts of two ranks each, on this machine's CPU.
demo: $(TORCHRUN)
	$(BIN)/python examples/draw_pictures.py runs/pictures
	CUDA_VISIBLE_DEVICES= $(BIN)/sm-launch local --hosts 2 --nproc-per-node 2 --run-dir runs/demo \
		--channel train=runs/pictures/train --channel val=runs/pictures/val -- \
		train_scripts/train_hymenoptera.py --weights none --epochs 5 --batch-size 8 --lr 0.01 \
		--lr-step 3 --image-size 64 --checkpoint-dir ''

# The launcher as one file, for a source_dir (docs/guide.md).
bundle:
	$(PYTHON) bundle/build.py dist/launcher.py

image:
	docker build $(BUILD_FLAGS) -f container/Dockerfile -t $(TAG) \
		$(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
		--label org.opencontainers.image.version=$(VERSION) \
		--label org.opencontainers.image.revision=$(shell git rev-parse HEAD 2>/dev/null) .

# The tables and pictures of the pages, from the code, and the pages as a site, in site/.
docs: $(MKDOCS)
	PYTHONPATH=. $(BIN)/python docs/tables.py
	$(BIN)/python docs/pictures.py
	$(MKDOCS) build --strict
	@echo "the site is in site/: open site/index.html"

# What a release consists of, made anew.
dist: $(LAUNCHER)
	rm -rf dist/*.tar.gz dist/*.whl
	$(BIN)/pyproject-build -qq --no-isolation
	@rm -rf *.egg-info

check: $(PYTEST) dist
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/twine check --strict dist/*.tar.gz dist/*.whl

# What pip does not bring, and this machine lacks: one line, before anything is installed.
needs-%:
	@PYTHON=$(PYTHON) sh tests/needs.sh $*

# In more processes than two cores: many tests mostly wait.
test: needs-test $(TORCHRUN) $(PYTEST)
	$(PYTEST) -n 5 --dist loadgroup

# Without simulated jobs and the model of the watch. Half of the tests' time is waiting, so more
# processes than cores; each of them needs 3 s to collect.
test-fast: $(PYTEST)
	$(PYTEST) -n 4 -m "not torch and not more and not systems and not containers" \
		--ignore tests/simulation --ignore tests/test_watch_model.py

# Two versions of SageMaker's Python SDK, which cannot share an environment.
SDK_V2 := .venv-sdk-v2/sagemaker-2.257.7
SDK_V3 := .venv-sdk-v3/sagemaker-train-1.27.0
# What `make bench` compares with, beside what $(VENV) has; with the torch of that.
ACCELERATE := .venv-accelerate/accelerate-1.15.0
NVRX := .venv-nvrx/nvidia-resiliency-ext-0.4.1
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(ACCELERATE) $(NVRX): | $(TORCHRUN)
$(SDK_V2) $(SDK_V3) $(ACCELERATE) $(NVRX):
	@echo "installing $(@F) into $(@D), which can take minutes ..."
	@$(PYTHON) -m venv --clear $(@D)
	@$(if $(filter $@,$(ACCELERATE) $(NVRX)),$(BIN)/python -c '$(SITE)' \
		> "$$($(@D)/bin/python -c '$(SITE)')/torch.pth")
	@$(@D)/bin/pip install --quiet "$$(echo $(@F) | sed 's/-\([0-9.]*\)$$/==\1/')"
	@touch $@

# What all tests of CI need, for `make -j3 install`: pip waits for the network most of the time. One
# after the other it fills $(VENV).
install: $(TORCHRUN) $(PYTEST) $(SDK_V2) $(SDK_V3)
ifeq ($(MAKECMDGOALS),install)
$(MKDOCS): | $(LAUNCHER)
$(TORCHRUN): | $(MKDOCS)
$(PYTEST): | $(TORCHRUN)
endif

# A newer one, which `make bench` takes in if it is there. It wants a newer Debian: root, debootstrap,
# some minutes and 5 GB.
nvrx:
	sh benchmarks/nvrx.sh .venv-nvrx-0.7 "$(firstword $(TORCH))" 0.7.0

# On real containers, and on hosts in network namespaces.
test-containers: needs-test-containers $(TORCHRUN) $(PYTEST) $(SDK_V2) $(SDK_V3)
	$(PYTEST) -n 5 --dist loadgroup -m "containers and not more"

# The slow cases, above all of the systems in docs/systems.md.
test-systems: needs-test-systems $(TORCHRUN) $(PYTEST) $(SDK_V2) $(SDK_V3)
	$(PYTEST) -n 4 --dist loadgroup -m systems

# Both: those in containers mostly wait, those of the systems compute.
test-slow: needs-test-slow $(TORCHRUN) $(PYTEST) $(SDK_V2) $(SDK_V3)
	$(PYTEST) -n 6 --dist loadgroup -m "systems or (containers and not more)"

# `make test` with the oldest torch that the launcher supports, and with the newest that installs.
test-compat:
	$(MAKE) test VENV=.venv-oldest PYTHON=$(PYTHON_OLDEST) TORCH="torch===2.4.0 torchvision==0.19.0"
	$(MAKE) test VENV=.venv-newest TORCH="torch>=2.14 torchvision>=0.29"

# Lightning, Hugging Face's, DeepSpeed, hydra and others: the same results as under torchrun, causes,
# stops and restarts.
FRAMEWORKS := .venv-frameworks
test-frameworks:
	$(MAKE) $(FRAMEWORKS)/bin/sm-launch $(FRAMEWORKS)/bin/torchrun VENV=$(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet "$(NAME)[frameworks]"
	$(FRAMEWORKS)/bin/pytest tests/frameworks

# The page of `sm-launch timeline`, in a browser: Chromium, or Chrome, of this machine.
test-pages: needs-test-pages $(PYTEST)
	$(BIN)/pip install --quiet "$(NAME)[pages]"
	$(PYTEST) tests/browser

# Jobs broken in every way, and how long their hosts took to end (docs/development/hosts.md), with the bounds
# of seconds that `make test` is not held to; and the other cases that it leaves out.
matrix: needs-matrix $(TORCHRUN) $(PYTEST) $(SDK_V2) $(SDK_V3)
	$(BIN)/pytest -p no:randomly -m "row or more"

# Jobs in the simulator (tests/simulation), on all cores: JOBS of them from SEED on; or one again,
# PLAN='Plan(...)'; or MISTAKES=1, how soon those are found that can be planted.
JOBS ?= 100000
SEED ?= 0
simulate: $(PYTEST)
	PYTHONPATH=tests $(BIN)/python -m simulation --jobs $(JOBS) --seed $(SEED) \
		$(if $(PLAN),--replay "$(PLAN)") $(if $(MISTAKES),--mistakes)

# What the launcher itself costs, what it does beside torchrun and others, what looks at ranks and the
# channel between hosts do, how fast the reference training is, and what memory model parallelism
# saves: an hour and a half.
bench: $(TORCHRUN) $(PYTEST) $(ACCELERATE) $(NVRX)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/beside.py
	$(BIN)/python benchmarks/watch.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-frameworks .venv-sdk-v2 .venv-sdk-v3 .venv-accelerate \
		.venv-nvrx .venv-nvrx-0.7 .engine build dist runs site *.egg-info
