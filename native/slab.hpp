// Memory for packed weights. Small matrices share slabs in huge pages: a decode step reads every weight once, and with
// small pages it misses the TLB at each of them (measured: a fifth of the step).
#pragma once

#include <cstddef>
#include <memory>

#include "memory.hpp"

namespace legato {

// A piece of a slab, or a mapping of its own if it is large; 64-byte aligned. The slab lives as long as its pieces.
class SlabPiece {
  public:
    // Throws std::bad_alloc.
    static SlabPiece allocate(std::size_t nbytes);

    std::byte* data() const { return data_; }

  private:
    SlabPiece(std::shared_ptr<PageBuffer> slab, std::byte* data) : slab_(std::move(slab)), data_(data) {}

    std::shared_ptr<PageBuffer> slab_;
    std::byte* data_;
};

}  // namespace legato
