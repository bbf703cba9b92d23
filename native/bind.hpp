// One function a file of bindings. Arrays are C-contiguous and on the CPU; a wrong dtype is a TypeError, a wrong shape
// or value a ValueError. Heavy calls run without the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>

namespace legato {

namespace nb = nanobind;

template <class T, std::size_t Dims>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

// A new NumPy array of this shape over `data`, kept alive by `owner`.
template <class T>
nb::ndarray<nb::numpy, T> numpy_view(T* data, std::initializer_list<std::size_t> shape, nb::handle owner) {
    return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

// A new, uninitialised NumPy array.
template <class T>
nb::ndarray<nb::numpy, T> numpy_empty(std::initializer_list<std::size_t> shape) {
    std::size_t size = 1;
    for (const std::size_t extent : shape) size *= extent;
    T* data = new T[size];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

void bind_dispatch(nb::module_& m);
void bind_matrix(nb::module_& m);
void bind_kv(nb::module_& m);
void bind_program(nb::module_& m);
void bind_bench(nb::module_& m);

}  // namespace legato
