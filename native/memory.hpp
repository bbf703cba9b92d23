// A block of zeroed memory straight from the operating system: page-aligned, touched lazily, in huge pages where
// offered.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace legato {

class PageBuffer {
  public:
    PageBuffer() = default;
    explicit PageBuffer(std::size_t nbytes) : nbytes_(nbytes) {
        if (nbytes == 0) return;
        void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(data, nbytes, MADV_HUGEPAGE);
#endif
        data_ = static_cast<std::byte*>(data);
    }
    PageBuffer(PageBuffer&& other) noexcept { swap(other); }
    PageBuffer& operator=(PageBuffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~PageBuffer() {
        if (data_ != nullptr) munmap(data_, nbytes_);
    }

    // Has the system provide every page now instead of at its first use. Only before anything is written.
    void touch() {
        constexpr std::size_t page = 4096;
        for (std::size_t at = 0; at < nbytes_; at += page) *const_cast<volatile std::byte*>(data_ + at) = std::byte{0};
    }

    std::byte* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

  private:
    void swap(PageBuffer& other) noexcept {
        std::byte* data = data_;
        data_ = other.data_;
        other.data_ = data;
        const std::size_t nbytes = nbytes_;
        nbytes_ = other.nbytes_;
        other.nbytes_ = nbytes;
    }

    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
};

}  // namespace legato
