# Developer entry points; `make serve` and `make test` are all a newcomer needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

native: ## build the kernels in place (editable development)
	$(BIN)/cmake -S . -B build -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) >/dev/null
	$(BIN)/cmake --build build -j$(JOBS)
	cp build/_native*.so src/legato/.native.tmp && mv src/legato/.native.tmp src/legato/$$(basename build/_native*.so)
.PHONY: native
