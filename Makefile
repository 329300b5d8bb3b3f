# Everything runs in .venv, made here; the system's Python is never touched.
# Stamps (.venv/.*, build/*.stamp) make a second run quick: nothing is redone unless its inputs changed.

PYTHON ?= python3
ifeq ($(origin CC),default)
CC := gcc
endif
CLANG ?= clang
FUZZ_SECONDS ?= 60
DECODER_SECONDS ?= 10
KILLS ?= 10000
IMAGES ?= 5000
TSAN_ROUNDS ?= 30
WORKERS ?= 3
LOGSTORE_BUILD ?= release
export LOGSTORE_BUILD
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet
SAY := @printf '%-7s %s\n'

CORE_C := $(sort $(wildcard native/core/*.c))
CORE_H := $(sort $(wildcard native/core/*.h))
BINDING_C := $(sort $(wildcard native/python/*.c))
BINDING_H := $(sort $(wildcard native/python/*.h))
FUZZERS := $(patsubst native/tests/fuzz_%.c,%,$(sort $(wildcard native/tests/fuzz_*.c)))
PYTHON_DIRS := $(wildcard logstore benchmarks docs examples tests spark_connector native/tests setup.py)
TYPED_DIRS := $(wildcard logstore benchmarks spark_connector/pyspark_logstore)

.PHONY: help campaigns demo test crash kill powercut tsan asan bench docs lint lint-python lint-c core-test fuzz build clean distclean java FORCE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@echo 'make demo       append, scan, crash, recover: the engine at work, in a minute'
	@echo 'make test       the C core under ASan+UBSan, then pytest (PYTEST_ARGS="-k writer", WORKERS=3)'
	@echo 'make campaigns  the campaigns in full and the slow tests: hours (CAMPAIGN=ci: 15 minutes)'
	@echo 'make bench      the benchmarks beside their peers (ARGS="--help")'
	@echo 'make docs       docs/reference.md from the docstrings, and the site in build/site'
	@echo 'make lint       ruff, mypy, stubtest, gcc -Werror'
	@echo 'make crash      crash every protocol at every call, CRASH_STATES=1000000'
	@echo 'make core-test  only the C core, no Python'
	@echo 'make asan       pytest on an extension built with ASan+UBSan'
	@echo 'make fuzz       libFuzzer on the C core, FUZZ_SECONDS=60 each (clang), and the Python decoders'
	@echo 'make kill       kill -9 of a writer under load, KILLS=10000 times, checked by a ledger'
	@echo 'make powercut   power cuts on a real ext4 by block replay, IMAGES=5000 (root)'
	@echo 'make tsan       threads on the C core under ThreadSanitizer, TSAN_ROUNDS=30'
	@echo 'make build      the extension in place (LOGSTORE_BUILD=release|debug|asan|tsan)'
	@echo 'make clean      what make made, except .venv; make distclean takes that too'

# ---- the environment ------------------------------------------------------------------------

# A moved or copied checkout, or a removed interpreter, leaves a .venv that points elsewhere:
# .where remembers the place, and a stale environment is made anew.
VENV_FRESH := $(shell test "`cat $(VENV)/.where 2>/dev/null`" = "$(CURDIR)" \
	&& $(PY) -c 'import pip' 2>/dev/null && echo yes)

$(VENV)/.where: $(if $(VENV_FRESH),,FORCE)
	$(SAY) venv 'making $(VENV)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo '        $(PYTHON) is missing or older than 3.11: make PYTHON=python3.12 ...'; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@printf '%s\n' "$(CURDIR)" > $@

# The editable install: dependencies, extras, and logstore importable from anywhere in .venv.
$(VENV)/.test: $(VENV)/.where pyproject.toml
	$(SAY) pip 'installing logstore-engine[test], editable'
	@$(PIP) install -e '.[test]'
	@touch $@

$(VENV)/.bench: $(VENV)/.where pyproject.toml
	$(SAY) pip 'installing logstore-engine[bench], editable'
	@$(PIP) install 'setuptools>=77' -e '.[bench]'
	@touch $@

$(VENV)/.demo: $(VENV)/.where pyproject.toml
	$(SAY) pip 'installing logstore-engine[arrow,cli,spark], editable'
	@$(PIP) install 'setuptools>=77' -e '.[arrow,cli,spark]'
	@touch $@

$(VENV)/.docs: $(VENV)/.where pyproject.toml
	$(SAY) pip 'installing logstore-engine[docs], editable'
	@$(PIP) install 'setuptools>=77' -e '.[docs]'
	@touch $@

# ---- the extension --------------------------------------------------------------------------

# One stamp per kind of build and per environment; making one kind takes the others' stamps away,
# since all of them write the same file.
EXT := build/ext-$(LOGSTORE_BUILD).stamp

$(EXT): setup.py $(CORE_C) $(CORE_H) $(BINDING_C) $(BINDING_H) $(VENV)/.where
	$(SAY) build 'logstore._native ($(LOGSTORE_BUILD))'
	@mkdir -p build && rm -f build/ext-*.stamp
	@$(PY) setup.py --quiet build_ext --inplace --force --build-temp build/ext-$(LOGSTORE_BUILD)
	@printf '%s\n' '$(SOURCES_NOW)' > build/sources.list
	@touch $@

# A list of sources that changed (one added, one removed) is a change too, which no timestamp shows.
SOURCES_NOW := $(CORE_C) $(CORE_H) $(BINDING_C) $(BINDING_H)
SOURCES_THEN := $(shell cat build/sources.list 2>/dev/null)
ifneq ($(strip $(SOURCES_NOW)),$(strip $(SOURCES_THEN)))
$(EXT): FORCE
endif
# ... and so is a missing .so.
ifeq ($(wildcard logstore/_native*.so),)
$(EXT): FORCE
endif

build: $(VENV)/.test $(EXT)
	@:

# ---- demo, test, bench ----------------------------------------------------------------------

demo: $(VENV)/.demo $(EXT)
	@$(PY) examples/demo.py $(ARGS)

test: build java core-test
	@$(MAKE) --no-print-directory tsan TSAN_ROUNDS=3
	$(SAY) pytest '$(or $(PYTEST_ARGS),tests, by $(WORKERS) workers)'
	@$(PY) -m pytest --durations=10 \
		$(or $(PYTEST_ARGS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)

# The sanitizer must be there before the interpreter allocates; leaks of the interpreter are not ours.
asan:
	@$(MAKE) --no-print-directory build LOGSTORE_BUILD=asan
	$(SAY) asan 'pytest $(or $(PYTEST_ARGS),tests)'
	@LD_PRELOAD=`$(CC) -print-file-name=libasan.so` PYTHONMALLOC=malloc \
		ASAN_OPTIONS=detect_leaks=0 $(PY) -m pytest $(PYTEST_ARGS)

kill: build
	$(SAY) kill '$(KILLS) times, in two lanes'
	@$(PY) -m tests.crash.kill_campaign --kills $(KILLS) --lanes 2

powercut: build
	$(SAY) cut 'the power of an ext4, $(IMAGES) times (root)'
	@unshare -m $(PY) -m tests.crash.power_cut --images $(IMAGES)

# Tests that repeat one question many times.  CAMPAIGN=full also runs the slow tests; CAMPAIGN=ci
# is what .ci/run asks for.  A campaign uses both cores by itself, so there is one worker.
CAMPAIGN ?= full
campaigns: build java
	$(SAY) pytest 'the campaigns, LOGSTORE_CAMPAIGN=$(CAMPAIGN)'
	@LOGSTORE_CAMPAIGN=$(CAMPAIGN) $(PY) -m pytest --durations=10 \
		-m '$(if $(filter full,$(CAMPAIGN)),campaign or slow,campaign)' $(PYTEST_ARGS)

bench: $(VENV)/.bench $(EXT)
	@$(PY) -m benchmarks --plots build/plots $(ARGS)

# Every protocol, crashed at every call: CRASH_STATES distinct states, with progress.
CRASH_STATES ?= 1000000
crash: build
	@$(PY) -m tests.crash.crash_campaign --states $(CRASH_STATES)

# The interop tests let Kafka's own classes read our files: that takes a JVM, and Maven to fetch them.
# $(call apt,packages): install if we may; the caller looks again and says what is missing.
apt = [ "`id -u`" = 0 ] && command -v apt-get >/dev/null && { \
	printf '%-7s %s\n' apt "installing $(1)"; \
	{ timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y -qq --no-install-recommends $(1); } </dev/null >/dev/null 2>&1; }
has_java = [ "`java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p'`" -ge 17 ] 2>/dev/null
has_mvn = command -v mvn >/dev/null
has_kcat = command -v kcat >/dev/null  # a client of the wire tests; they are skipped without it
# Debian keeps clang's sanitizer and fuzzer runtimes in a package of their own: only a link tells.
has_fuzzer = echo 'int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }' \
	| $(CLANG) -fsanitize=fuzzer,address,undefined -x c - -o build/has_fuzzer 2>/dev/null

java:
	@[ -e build/java.stamp ] || { mkdir -p build; \
	$(has_java) || { $(call apt,openjdk-17-jre-headless); }; \
	$(has_mvn) || { $(call apt,maven); }; \
	$(has_kcat) || { $(call apt,kcat); }; \
	if $(has_java) && $(has_mvn); then touch build/java.stamp; \
	else printf '%-7s %s\n' java 'no Java 17+ with Maven here: the interop tests will be skipped'; fi; }

# ---- the C core, alone ----------------------------------------------------------------------

WARN := -Wall -Wextra -Wshadow -Wconversion -Werror
CORE_FLAGS := -std=c11 -g -O1 -fno-omit-frame-pointer $(WARN) -pthread \
	-fsanitize=address,undefined -fno-sanitize-recover=undefined -Inative/core
CORE_O := $(CORE_C:native/core/%.c=build/core/%.o)
REPLAYS := $(FUZZERS:%=build/core/replay_%)
CORE_TESTS := $(patsubst native/tests/%.c,build/core/%,$(sort $(wildcard native/tests/test_*.c)))

core-test: $(CORE_TESTS) $(REPLAYS)
	$(SAY) core 'asserts, and the fuzz corpus once, under ASan+UBSan'
	@for test in $(CORE_TESTS); do $$test || exit 1; done
	@for target in $(FUZZERS); do \
		build/core/replay_$$target native/tests/corpus/$$target || exit 1; done

build/core/test_%: build/core/tests/test_%.o $(CORE_O)
	@$(CC) $(CORE_FLAGS) $^ -o $@

build/core/replay_%: build/core/tests/fuzz_%.o build/core/tests/replay_driver.o $(CORE_O)
	@$(CC) $(CORE_FLAGS) $^ -o $@

build/core/%.o: native/core/%.c $(CORE_H) Makefile
	@mkdir -p $(@D)
	@$(CC) $(CORE_FLAGS) -c $< -o $@

build/core/tests/%.o: native/tests/%.c $(CORE_H) $(wildcard native/tests/*.h) Makefile
	@mkdir -p $(@D)
	@$(CC) $(CORE_FLAGS) -c $< -o $@

# A compiler without the sanitizer says so, and nothing else is skipped.
tsan:
	@mkdir -p build/tsan; \
	if echo 'int main(void) { return 0; }' | $(CC) -fsanitize=thread -x c - -o build/tsan/can 2>/dev/null \
		&& build/tsan/can; then \
		printf '%-7s %s\n' tsan '$(TSAN_ROUNDS) rounds of threads on the core'; \
		$(CC) -std=c11 -g -O1 -fsanitize=thread -Inative/core -pthread $(CORE_C) \
			native/tests/threads.c -o build/tsan/threads && build/tsan/threads $(TSAN_ROUNDS); \
	else printf '%-7s %s\n' tsan '$(CC) has no ThreadSanitizer that runs here: skipped'; fi

.SECONDARY:

# New inputs go to build/fuzz/corpus; an input that crashes stays as build/fuzz/<target>-crash-*.
fuzz: build
	@mkdir -p build; \
	$(has_fuzzer) || { $(call apt,clang); }; \
	$(has_fuzzer) || { $(call apt,libclang-rt-$$($(CLANG) -dumpversion | cut -d. -f1)-dev); }; \
	$(has_fuzzer) || { \
		echo 'fuzz    clang with libFuzzer is missing and cannot be installed here'; exit 1; }
	@mkdir -p build/fuzz; total=0; \
	for target in $(FUZZERS); do \
		mkdir -p build/fuzz/corpus/$$target; \
		$(CLANG) -std=c11 -g -O1 -Inative/core -pthread \
			-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
			$(CORE_C) native/tests/fuzz_$$target.c -o build/fuzz/$$target || exit 1; \
		build/fuzz/$$target -max_total_time=$(FUZZ_SECONDS) -verbosity=0 -print_final_stats=1 \
			-artifact_prefix=build/fuzz/$$target- \
			build/fuzz/corpus/$$target native/tests/corpus/$$target \
			> build/fuzz/$$target.log 2>&1 || { tail -n 60 build/fuzz/$$target.log; exit 1; }; \
		runs=`sed -n 's/^stat::number_of_executed_units: *//p' build/fuzz/$$target.log`; \
		total=$$((total + runs)); \
		printf '%-7s %-13s %12d executions in %d s\n' fuzz $$target $$runs $(FUZZ_SECONDS); \
	done; \
	printf '%-7s %-13s %12d executions, no finding\n' fuzz 'all targets' $$total
	@$(PY) -m tests.crash.decoder_fuzz --seconds $(DECODER_SECONDS)

# ---- lint -----------------------------------------------------------------------------------

lint: lint-python lint-c

# With the peers of the benchmarks installed: mypy reads their types.
lint-python: build $(VENV)/.bench
	$(SAY) ruff 'check, format --check'
	@$(PY) -m ruff check --quiet $(PYTHON_DIRS)
	@$(PY) -m ruff format --check --quiet $(PYTHON_DIRS) \
		|| { echo '        these differ: ruff format --diff'; \
		     $(PY) -m ruff format --check $(PYTHON_DIRS); exit 1; }
	$(SAY) mypy '--strict $(TYPED_DIRS)'
	@$(PY) -m mypy --strict --no-error-summary $(TYPED_DIRS)
	$(SAY) stubs 'logstore/_native.pyi against the module'
	@$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml logstore._native > build/stubtest.log 2>&1 \
		|| { cat build/stubtest.log; exit 1; }

# -O2, since gcc sees some faults (uninitialised, out of bounds) only while it optimises.
lint-c: $(VENV)/.where
	$(SAY) gcc '-Werror native/core native/python'
	@include=`$(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))'`; \
	for file in $(CORE_C) $(BINDING_C); do \
		$(CC) -std=c11 -O2 $(WARN) -fPIC -Inative/core -Inative/python -isystem "$$include" \
			-c $$file -o /dev/null || exit 1; done

# ---- clean ----------------------------------------------------------------------------------

clean:
	$(SAY) clean 'build products and caches'
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -f logstore/_native*.so
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)
