# Builds train_gpt with whatever this machine has.
#
#   make                 ./train_gpt, after a table of what was found and what that turns on
#   make test            builds and runs every test; the last line is "N passed, N failed, N skipped"
#   make bench           builds the benchmarks, dev/bench_*.c, into build/release/
#   make ptxas           says which CUDA kernels keep registers in memory; fails where one does that should not
#   make build/release/libflash_mma.so    the GPU attention kernels alone, for dev/bench_attention.py
#   make fuzz            builds the fuzz targets, tests/fuzz/fuzz_*.c, with clang (FUZZ_CC) into build/fuzz/;
#                        where clang has libFuzzer, `make test` runs each for ten seconds (FUZZ_SECONDS)
#   make clean
#
# Switches (make NAME=0 leaves a part out; NAME=1 stops where the part is missing):
#   ONEDNN, CBLAS        the matrix library of the CPU: oneDNN, else OpenBLAS (on macOS Accelerate),
#                        else loops of our own
#   OPENMP               all cores instead of one
#   CUDA, NCCL, MPI      GPUs, several GPUs, several processes
# and DEBUG=1 (for a debugger), SANITIZE=1 (address and undefined-behaviour checks), WERROR=1 (a warning is
# an error), V=1 (commands are shown whole), CC=clang, CFLAGS=... (added to ours). What the distribution must
# have installed: dev/setup.

.DELETE_ON_ERROR:
.SUFFIXES:
all:

ONEDNN ?= auto
CBLAS ?= auto
OPENMP ?= auto
CUDA ?= auto
NCCL ?= auto
MPI ?= auto
DEBUG ?= 0
SANITIZE ?= 0
WERROR ?= 0

SYSTEM := $(shell uname -s)
MACHINE := $(shell uname -m)
# The variant of `make fuzz`, which asks for it with FUZZ=1; no switch for people.
FUZZ ?= 0
FUZZ_CC ?= clang
VARIANT := $(firstword $(if $(filter 1,$(FUZZ)),fuzz) $(if $(filter 1,$(SANITIZE)),sanitize) \
    $(if $(filter 1,$(DEBUG)),debug) release)
BUILD := build/$(VARIANT)

# ---- flags ----------------------------------------------------------------------------------------------
# -O3                  turns the plain loops of the *_simd.c files into vector instructions.
# -ffp-contract=fast   a * b + c in one instruction where the target has one: twice the speed of the inner
#                      loops. The result of a program on a machine stays the same from run to run.
# -fno-math-errno      sqrtf is an instruction instead of a call, as nobody reads errno after it.
# -fno-trapping-math   a comparison may be computed for both outcomes, as nobody reads the exception flags.
# Not -ffast-math: it lets the compiler assume that nothing is NaN, and sums change their order with it.
# Not -march=native: the program runs on other machines than the one that built it; where instructions
# matter, the choice is made at run time (simd.h).
# -fopenmp-simd        without OpenMP, its loop hints still count and its other pragmas raise no warning.
NUMERICS := -ffp-contract=fast -fno-math-errno -fno-trapping-math
OPTIMISE_release := -O3
OPTIMISE_debug := -Og
OPTIMISE_sanitize := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
OPTIMISE_fuzz := $(OPTIMISE_sanitize) -fsanitize=fuzzer-no-link
WARNINGS := -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion $(if $(filter 1,$(WERROR)),-Werror)
# The parts that are found below add to these.
FLAGS := -g -fopenmp-simd $(OPTIMISE_$(VARIANT)) $(NUMERICS)
DEFINES := -D_GNU_SOURCE
INCLUDES :=
LIBS :=

# ---- what is here ---------------------------------------------------------------------------------------
# $(call links,FLAGS,HEADER): "yes" where a program that includes HEADER compiles and links with FLAGS (and the
# user's: MACHINE=aarch64 CC=aarch64-linux-gnu-gcc CFLAGS=-I... LDFLAGS='-L... -static' is a cross-build).
links = $(shell mkdir -p build && printf '\043include <%s>\nint main(void) { return 0; }\n' '$(2)' | \
    $(CC) -x c -o build/probe.$$$$ - $(CFLAGS) $(LDFLAGS) $(1) >/dev/null 2>&1 && echo yes; \
    rm -rf build/probe.$$$$*)
# $(call part,SWITCH,FLAGS,HEADER): the same, unless the switch is 0; where it is 1, missing is an error.
part = $(if $(filter-out 0,$($(1))),$(or $(call links,$(2),$(3)),$(if $(filter 1,$($(1))),$(error $(1)=1: \
    $(3) with "$(strip $(2))" does not compile and link; install it (dev/setup) or leave $(1)=1 out))))

ifneq ($(MAKECMDGOALS),clean)

# zlib and jansson are no choice: without them there is no .gz, no checksum and no JSON.
ifeq ($(SYSTEM),Darwin)
BREW := $(shell brew --prefix 2>/dev/null)
INCLUDES += $(if $(BREW),-I$(BREW)/include)
LIBS += $(if $(BREW),-L$(BREW)/lib)
endif
HAVE_ZLIB := $(call links,$(INCLUDES) $(LIBS) -lz,zlib.h)
HAVE_JANSSON := $(call links,$(INCLUDES) $(LIBS) -ljansson,jansson.h)
ifneq ($(HAVE_ZLIB)$(HAVE_JANSSON),yesyes)
$(error $(if $(shell command -v $(CC)),$(if $(HAVE_ZLIB),,zlib )$(if $(HAVE_JANSSON),,jansson ),the compiler $(CC) )not \
    found; run dev/setup (Debian: apt install build-essential zlib1g-dev libjansson-dev))
endif
LIBS += -lz -ljansson

# OpenMP: gcc and clang on Linux; Apple's clang takes Homebrew's libomp in this way only.
OPENMP_FLAGS := $(if $(filter Darwin,$(SYSTEM)),-Xpreprocessor -fopenmp -I$(BREW)/opt/libomp/include,-fopenmp)
OPENMP_LIBS := $(if $(filter Darwin,$(SYSTEM)),-L$(BREW)/opt/libomp/lib -lomp)
HAVE_OPENMP := $(call part,OPENMP,$(OPENMP_FLAGS) $(OPENMP_LIBS),omp.h)
ifeq ($(HAVE_OPENMP),yes)
FLAGS += $(OPENMP_FLAGS)
LIBS += $(OPENMP_LIBS)
OPENMP_SAYS := yes: all cores
else
OPENMP_SAYS := no: one core
endif

# The matrix library. oneDNN's fast product is for x86-64; elsewhere its plain one is slower than our loops.
ifeq ($(ONEDNN)$(filter x86_64 amd64,$(MACHINE)),auto)
ONEDNN := 0
endif
HAVE_ONEDNN := $(call part,ONEDNN,-ldnnl,oneapi/dnnl/dnnl.h)
MATMUL_SAYS := loops of our own
ifeq ($(HAVE_ONEDNN),yes)
DEFINES += -DUSE_ONEDNN
LIBS += -ldnnl
MATMUL_SAYS := oneDNN
else ifeq ($(SYSTEM)$(filter 0,$(CBLAS)),Darwin)
DEFINES += -DUSE_CBLAS -DACCELERATE_NEW_LAPACK
LIBS += -framework Accelerate
MATMUL_SAYS := Accelerate
else ifeq ($(call part,CBLAS,-lopenblas,cblas.h),yes)
DEFINES += -DUSE_CBLAS -DUSE_OPENBLAS
LIBS += -lopenblas
MATMUL_SAYS := OpenBLAS
endif

# CUDA: nvcc and at least one .cu file. The libraries are linked only then.
CUDA_SOURCES := $(wildcard *.cu model/*.cu attention/*.cu)
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA_FOUND := $(if $(filter-out 0,$(CUDA)),$(NVCC))
ifeq ($(CUDA)$(CUDA_FOUND),1)
$(error CUDA=1: nvcc not found; put it into PATH, say NVCC=..., or leave CUDA=1 out)
endif
ifeq ($(CUDA),0)
CUDA_SAYS := left out: runs on the CPU
else ifeq ($(CUDA_FOUND),)
CUDA_SAYS := not found: runs on the CPU
else
CUDA_VERSION := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
ifeq ($(CUDA_SOURCES),)
CUDA_SAYS := toolkit $(CUDA_VERSION) found, but this version has no CUDA sources: runs on the CPU
else
USE_CUDA := yes
# The GPUs of this machine, of those that the program takes (8.0 and later) and this toolkit knows; where there
# are others or none (a build machine), the usual ones too, and PTX for the rest. 9.0 is built as sm_90a, since
# only that has the Hopper instructions.
GPUS := $(sort $(filter-out 5% 6% 7%,$(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
    2>/dev/null | grep -x '[0-9.]*'))))
KNOWN_GPUS := $(filter $(GPUS),$(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code)))
OTHER_GPUS := $(or $(filter-out $(KNOWN_GPUS),$(GPUS)),$(if $(GPUS),,any))
CUBINS := $(patsubst 90,90a,$(sort $(KNOWN_GPUS) $(if $(OTHER_GPUS),80 89 90)))
CUDA_ARCH := $(foreach cc,$(CUBINS),-gencode arch=compute_$(cc),code=sm_$(cc)) \
    $(if $(OTHER_GPUS),$(foreach cc,80 90,-gencode arch=compute_$(cc),code=compute_$(cc)))
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
DEFINES += -DUSE_CUDA
INCLUDES += -isystem $(CUDA_HOME)/include
LIBS += -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcublasLt -lcublas -lcudart -lstdc++
CUDA_SAYS := toolkit $(CUDA_VERSION): runs on GPUs (compiled for $(addprefix sm_,$(CUBINS)))
endif
endif

NCCL_SAYS := no: one GPU a run
ifeq ($(USE_CUDA),yes)
ifeq ($(call part,NCCL,$(INCLUDES) $(LIBS) -lnccl,nccl.h),yes)
DEFINES += -DUSE_NCCL
LIBS += -lnccl
NCCL_SAYS := yes: several GPUs
endif
else
NCCL_SAYS := not used: no GPU code in this build
endif

# MPI: the compiler wrapper of Open MPI and MPICH alike answers -show with the command that it would run.
MPICC ?= mpicc
MPI_COMMAND := $(if $(filter-out 0,$(MPI)),$(shell $(MPICC) -show 2>/dev/null))
MPI_INCLUDES := $(filter -I% -D%,$(MPI_COMMAND))
MPI_LIBS := $(filter -L% -l% -Wl%,$(MPI_COMMAND))
MPI_SOURCES := $(shell grep -l USE_MPI *.c model/*.c 2>/dev/null)
HAVE_MPI := $(if $(MPI_COMMAND)$(filter 1,$(MPI)),$(call part,MPI,$(MPI_INCLUDES) $(MPI_LIBS),mpi.h))
MPI_SAYS := $(if $(filter 0,$(MPI)),left out,not found): one process
ifeq ($(HAVE_MPI),yes)
ifeq ($(MPI_SOURCES),)
MPI_SAYS := found, but this version has no MPI code: one process
else
DEFINES += -DUSE_MPI
INCLUDES += $(patsubst -I%,-isystem %,$(MPI_INCLUDES))
LIBS += $(MPI_LIBS)
MPI_SAYS := yes: several processes (mpirun)
endif
endif

LIBS += -lm

# C++ beside C: with it the GPU attention kernels are compiled for the CPU as well, for their tests.
HAVE_CXX := $(shell printf '\043include <type_traits>\n' | $(CC) -x c++ -std=c++17 -fsyntax-only - >/dev/null 2>&1 && \
    echo yes)

# libFuzzer is looked for only where it is wanted: linking with it takes its time.
ifneq ($(filter test,$(MAKECMDGOALS)),)
HAVE_LIBFUZZER := $(shell mkdir -p build && printf 'int LLVMFuzzerTestOneInput(void) { return 0; }\n' | \
    $(FUZZ_CC) -x c -o build/probe.fuzz - -fsanitize=fuzzer,address >/dev/null 2>&1 && echo yes; \
    rm -f build/probe.fuzz)
endif

$(info train_gpt, $(VARIANT) build)
$(info $()  compiler   $(shell $(CC) --version 2>/dev/null | head -n 1))
$(info $()  OpenMP     $(OPENMP_SAYS))
$(info $()  matrices   $(MATMUL_SAYS))
$(info $()  zlib       yes: .gz text, checksums)
$(info $()  jansson    yes: JSON)
$(info $()  CUDA       $(CUDA_SAYS))
$(info $()  NCCL       $(NCCL_SAYS))
$(info $()  MPI        $(MPI_SAYS))
$(info )

endif # not only `clean`

# ---- objects --------------------------------------------------------------------------------------------
SOURCES := $(wildcard *.c model/*.c attention/*.c data/*.c tokenizer/*.c)
# The program's own files (app.h); every other one is in the library.
PROGRAM_SOURCES := train_gpt.c say.c settings.c start.c training.c modes.c
# A *_simd.c file is compiled once for each level of simd.h. On x86-64: SSE2, x86-64-v3, x86-64-v4.
SIMD_SOURCES := $(filter %_simd.c,$(SOURCES))
SIMD_LEVELS := plain $(if $(filter x86_64 amd64,$(MACHINE)),avx2 avx512)
SIMD_FLAGS_avx2 := -march=x86-64-v3
SIMD_FLAGS_avx512 := -march=x86-64-v4 -mprefer-vector-width=512

OBJECTS := $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(PROGRAM_SOURCES) $(SIMD_SOURCES),$(SOURCES))) \
    $(foreach level,$(SIMD_LEVELS),$(SIMD_SOURCES:%.c=$(BUILD)/%_$(level).o)) \
    $(if $(USE_CUDA),$(CUDA_SOURCES:%=$(BUILD)/%.o))
PROGRAM_OBJECTS := $(PROGRAM_SOURCES:%.c=$(BUILD)/%.o)
TESTS := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/test_*.c))
SCRIPTS := $(wildcard tests/test_*.sh)
# The attention kernels on an emulated GPU, one of 9.0 and one that is older.
EMULATED := $(if $(HAVE_CXX),$(addprefix $(BUILD)/tests/emulated/,emulated.o flash_80.o flash_90.o))
PEERS := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/peers/*.c))
BENCHES := $(patsubst dev/%.c,$(BUILD)/%,$(wildcard dev/bench_*.c))
FUZZERS := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/fuzz/fuzz_*.c))
# For the systems that it knows; elsewhere the test says that it is skipped.
CRASH_SHIM := $(if $(filter Linux-x86_64 Linux-aarch64,$(SYSTEM)-$(MACHINE)),$(BUILD)/tests/crash_shim.so)
# The program with faults planted into it, where the linker can put them in front of its functions.
FAULTY := $(if $(filter Linux,$(SYSTEM)),$(BUILD)/tests/faulty_train_gpt)
PROGRAM := $(BUILD)/train_gpt
LIBRARY := $(BUILD)/libtrain_gpt.a # every object but the program's own, for tests and benchmarks

COMPILE = $(CC) -std=c17 $(WARNINGS) $(FLAGS) $(DEFINES) $(INCLUDES) $(CFLAGS)
LINK = $(CC) $(FLAGS) $(CFLAGS) $(LDFLAGS)
COMPILE_CUDA = $(NVCC) -std=c++17 -O3 -g -lineinfo $(CUDA_ARCH) $(DEFINES) $(INCLUDES) -Xcompiler=-Wall,-Wextra \
    $(if $(filter 1,$(WERROR)),-Werror all-warnings)

# $(call short,WHAT,OF): a command is told by a short line in its place; V=1 shows it whole.
short = $(if $(filter 1,$(V)),,@printf '  %-8s %s\n' '$(1)' '$(2)'; )

# Written anew only when a command changes; everything depends on it, so a switch rebuilds what it touches.
$(BUILD)/commands: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(COMPILE) | $(COMPILE_CUDA) | $(LINK) $(LIBS)' > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:

$(BUILD)/%.o: %.c $(BUILD)/commands Makefile
	@mkdir -p $(@D)
	$(call short,compile,$<)$(COMPILE) -MMD -MP -c $< -o $@

define SIMD_RULE
$$(BUILD)/%_simd_$(1).o: %_simd.c $$(BUILD)/commands Makefile
	@mkdir -p $$(@D)
	$$(call short,compile,$$< for $(1))$$(COMPILE) -DSIMD_LEVEL=$(1) $$(SIMD_FLAGS_$(1)) -MMD -MP -c $$< -o $$@
endef
$(foreach level,$(SIMD_LEVELS),$(eval $(call SIMD_RULE,$(level))))

# What ptxas says of each kernel's registers and memory stays beside the object, for `make ptxas`.
PTXAS_LINES := ^ptxas info|^ +[0-9]+ bytes stack frame
$(BUILD)/%.cu.o: %.cu $(BUILD)/commands Makefile
	@mkdir -p $(@D)
	$(call short,nvcc,$<)$(COMPILE_CUDA) -Xptxas -v -MMD -MP -MF $(@:.o=.d) -c $< -o $@ 2>$(@:.o=.ptxas); \
	status=$$?; grep -Ev '$(PTXAS_LINES)' $(@:.o=.ptxas) >&2; exit $$status

# From scratch each time: `ar` would keep the object of a source that is gone.
$(LIBRARY): $(OBJECTS)
	@rm -f $@
	$(call short,collect,$@)ar rcs $@ $^

$(PROGRAM): $(PROGRAM_OBJECTS) $(LIBRARY)
	$(call short,link,$@)$(LINK) $^ $(LIBS) -o $@

# It switches stacks millions of times; what it checks are the kernels.
$(BUILD)/tests/emulated/emulated.o: INCLUDES := -Itests/emulated -fno-sanitize=all
$(BUILD)/tests/emulated/flash_%.o: tests/emulated/flash.cu $(BUILD)/commands Makefile
	@mkdir -p $(@D)
	$(call short,compile,$< for sm_$*)$(CC) -x c++ -std=c++17 -Wall -Wextra -Wno-unknown-pragmas -Wno-pass-failed \
	    $(FLAGS) -D_GNU_SOURCE -Itests/emulated -D__CUDACC__ -D__CUDA_ARCH__=$*0 $(if $(filter release,$(VARIANT)),-O2) \
	    -fno-exceptions -fno-rtti $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/tests/test_flash_cuda: $(EMULATED)
$(BUILD)/tests/test_emulated: $(BUILD)/tests/emulated/emulated.o
$(BUILD)/tests/test_flash_cuda.o: DEFINES += $(if $(EMULATED),-DUSE_EMULATED)

$(TESTS) $(PEERS): $(BUILD)/%: $(BUILD)/%.o $(LIBRARY)
	$(call short,link,$@)$(LINK) $(filter %.o,$^) $(LIBRARY) $(LIBS) -o $@

$(BENCHES): $(BUILD)/%: $(BUILD)/dev/%.o $(BUILD)/dev/profile_ops.o $(LIBRARY)
	$(call short,link,$@)$(LINK) $^ $(LIBS) -o $@

$(FUZZERS): $(BUILD)/%: $(BUILD)/%.o $(LIBRARY)
	$(call short,link,$@)$(LINK) -fsanitize=fuzzer $^ $(LIBS) -o $@

# Goes into a program that is already there, so that it has the flags of none.
$(BUILD)/tests/crash_shim.so: tests/crash_shim.c $(BUILD)/commands Makefile
	@mkdir -p $(@D)
	$(call short,compile,$<)$(CC) -std=c17 $(WARNINGS) -O2 -g -D_GNU_SOURCE -fPIC -shared $< -o $@

$(BUILD)/tests/faulty_train_gpt: $(PROGRAM_OBJECTS) $(BUILD)/tests/fault_ops.o $(LIBRARY)
	$(call short,link,$@)$(LINK) $^ $(LIBS) -Wl,--wrap=ops_cpu,--wrap=bpe_trainer_train -o $@

# The attention kernels as a shared library, from sources of their own: the other objects are not made to be
# moved. The CUDA runtime is linked into it, so that it can be loaded into any program.
$(BUILD)/libflash_mma.so: dev/flash_mma.cu attention/flash_cuda.cu cuda_stream.cu common.c attention/attention.h \
    cuda_stream.h common.h $(BUILD)/commands Makefile
	$(call short,compile,common.c)$(COMPILE) -fPIC -c common.c -o $(BUILD)/common_shared.o
	$(call short,nvcc,$@)$(COMPILE_CUDA) -Xcompiler=-fPIC -shared $(filter %.cu,$^) $(BUILD)/common_shared.o -lcublasLt -lz -o $@

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---- what one asks for ----------------------------------------------------------------------------------
.PHONY: all test bench ptxas fuzz fuzzers clean FORCE
.SECONDARY:

# ./train_gpt is the program of the variant that was built last.
all: $(PROGRAM)
	@cmp -s $(PROGRAM) train_gpt || cp $(PROGRAM) train_gpt

test: $(TESTS) $(PEERS) $(PROGRAM) $(CRASH_SHIM) $(FAULTY) $(if $(HAVE_LIBFUZZER),fuzz)
	@tests/run "$(PROGRAM)" $(TESTS) $(SCRIPTS)

bench: $(BENCHES)

ptxas: $(filter %.cu.o,$(OBJECTS))
	@tests/ptxas $(^:.o=.ptxas)

# A build of its own: one thread, no libraries for speed, clang whatever CC is.
fuzz:
	+$(MAKE) FUZZ=1 CC=$(FUZZ_CC) OPENMP=0 ONEDNN=0 CBLAS=0 CUDA=0 MPI=0 fuzzers

fuzzers: $(FUZZERS)

clean:
	rm -rf build train_gpt
