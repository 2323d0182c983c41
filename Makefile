.PHONY: install serve test test-all test-slow test-daily test-long test-compat test-clients test-vllm test-kube test-hosts test-pages chaos soak sim \
	loadtest lint format docs protos kube kube-down
VENV := .venv
PACKAGES := cluster decode_worker engine kv_transfer loadtests prefill_worker router simulator
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Many tests start processes that import the same modules: these are compiled once, also where somebody forbids it.
export PYTHONDONTWRITEBYTECODE :=

# Three sizes: `make serve` needs only the smallest. `make install` is everything.
install: $(VENV)/.installed-dev

$(VENV)/.installed-%: pyproject.toml constraints.txt deploy/install.sh
	@deploy/install.sh $(VENV) $*

serve: $(VENV)/.installed-serve
	@exec $(BIN)/diptych serve $(ARGS)

# Three files at a time, as a quiet live cluster leaves most of two cores idle (tests/conftest.py keeps the files that share
# it together). The slow ones overload them: then Ray gives up its start. So they run two at a time where no cluster is
# started, and one at a time where one is: two at a time were no faster (10 minutes), and Ray gave up a start.
PYTEST := $(BIN)/python -m pytest
NO_TESTS := 5# pytest's exit status where ARGS chooses none
test: install build/litellm build/quick-clients
	@$(PYTEST) -n 3 --dist loadfile -m "not slow and not daily and not long" $(ARGS) || [ $$? = $(NO_TESTS) ]

test-all: test test-slow

# SHARE=K/N runs every Nth file, from the Kth: each run of CI takes a third, as all take 24 minutes.
SHARE :=
SLOW_SHARE := $(SHARE:%=--share %)
test-slow: install build/litellm build/quick-clients
	@$(PYTEST) -n 2 --dist loadfile -m "slow and not cluster and not daily and not long" $(SLOW_SHARE) $(ARGS) \
		|| [ $$? = $(NO_TESTS) ]
	@$(PYTEST) -m "slow and cluster and not daily and not long" $(SLOW_SHARE) $(ARGS) || [ $$? = $(NO_TESTS) ]

# On demand, once a day or before a release: further variants of what runs above.
test-daily: install build/litellm build/quick-clients
	@$(PYTEST) -m "daily and not long" $(ARGS) || [ $$? = $(NO_TESTS) ]

# Clients for tests/cluster/test_sdks.py and test_clients.py, which skip without them. litellm wants an older openai than
# ours; the others lack a few packages only. Installed with uv, or with pip where uv does not get through (install.sh).
build/litellm: tests/support/litellm.txt
build/quick-clients: tests/support/quick_clients.txt
build/litellm build/quick-clients: | install
	@rm -rf $@
	-tests/support/install_clients.sh $(BIN) $@ $<
	@[ ! -d $@ ] || touch $@

test-long: install
	$(BIN)/python -m pytest -m long --timeout 3600 --hypothesis-profile default $(ARGS)

# On demand, and not in CI: others' tests and clients, which they fetch below build/ (tests/compat, tests/clients).
test-compat: install
	$(BIN)/python -m tests.compat.run_vllm_tests --write $(ARGS)

# The tests of vLLM as the engine, in the environment of `diptych install-engine vllm`.
VLLM ?= $(HOME)/.cache/diptych/engines/vllm/bin/python
VLLM_TESTS := DIPTYCH_TEST_VLLM_PYTHON=$(VLLM) TRITON_INTERPRET=0
VLLM_LIVE := tests/live/test_faults.py tests/live/test_resume.py tests/live/test_api.py tests/live/test_doctor.py \
	tests/live/test_demo.py tests/live/test_hosted_vllm.py tests/live/test_security.py tests/live/test_scaling.py
test-vllm: install
	[ -x $(VLLM) ] || $(BIN)/diptych install-engine vllm
	$(VLLM) -m pip install -q pytest pytest-timeout hypothesis
	$(VLLM_TESTS) $(VLLM) -m pytest tests/vllm $(ARGS)
	$(VLLM_TESTS) $(VLLM) -m pytest -m "not long" tests/live/test_kill_rounds.py tests/live/test_crash_matrix.py $(ARGS)
	$(VLLM_TESTS) $(PYTEST) -m "cluster and not long" $(VLLM_LIVE) $(ARGS)

# On demand: many seeds of a whole cluster on virtual time, under combined faults (tests/simcluster).
sim: install
	@$(BIN)/python -m tests.simcluster.run $(ARGS)

# On demand, as root: clusters on several hosts, which are namespaces behind a switch of ours (tests/hosts).
test-hosts: install
	$(PYTEST) -s -m "long or not long" tests/hosts $(ARGS)

# On demand: the commands of all pages, typed as they stand (tests/page_commands).
test-pages: install
	$(BIN)/python -m tests.page_commands.run $(ARGS)

# On demand: every fault on a live cluster under load (tests/chaos).
chaos: install
	$(BIN)/python -m tests.chaos.run $(ARGS)

# On demand: an hour of load with a fault a minute.
soak: install
	$(BIN)/python -m tests.chaos.soak $(ARGS)

test-clients: install
	$(BIN)/python -m tests.clients.run --write $(ARGS)

loadtest: $(VENV)/.installed-loadtest
	@mkdir -p build
	$(BIN)/diptych loadtest --laptop --profile ramp --rate 2-128 --duration 120s --html build/loadtest.html \
		--json build/loadtest.json $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml $(PACKAGES:%=-p diptych.%) -m diptych.protos.frames
	$(BIN)/lint-imports --no-logo
	! $(BIN)/vulture 2>&1 | grep -v 'unused variable'
	@$(BIN)/python tests/measures.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, in build/site; a link that leads nowhere ends it (docs/site).
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/site/index.html"

protos: install
	$(BIN)/python -m grpc_tools.protoc -Idiptych/protos=protos --python_out=build/typing \
		--pyi_out=build/typing --grpc_python_out=build/typing protos/*.proto

# On demand, as root on Debian: a Kubernetes in a box, which is built once below build/ (tests/kube). KUBERAY_OPERATOR=FILE
# names the binary of KubeRay's operator, without which the box has no operator.
KUBE_PROGRAMS := build/kube/bin/kube-scheduler build/kube/bin/kubectl
kube: install $(KUBE_PROGRAMS)
	$(BIN)/python -m tests.kube.box up

kube-down: install
	$(BIN)/python -m tests.kube.box down

test-kube: install $(KUBE_PROGRAMS)
	DIPTYCH_KUBE=1 $(PYTEST) tests/kube $(ARGS)

build/kube/bin/kube-scheduler: tests/kube/build_control_plane.sh
	tests/kube/build_control_plane.sh build/kube/source build/kube/bin

build/kube/bin/kubectl: tests/kube/fetch_clients.sh
	tests/kube/fetch_clients.sh $(BIN)/python build/kube/bin
