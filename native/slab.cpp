#include "slab.hpp"

#include <cstdint>
#include <mutex>

namespace legato {
namespace {

constexpr std::size_t huge_page = 2u << 20;
constexpr std::size_t slab_nbytes = 32u << 20;  // address space; pages that are not touched take no memory

std::byte* aligned_to_huge_page(std::byte* at) {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    return at + (huge_page - address % huge_page) % huge_page;
}

// The slab that is being filled. Pieces keep it alive; the allocator itself does not.
struct Filling {
    std::mutex lock;
    std::weak_ptr<PageBuffer> slab;
    std::byte* next = nullptr;
    std::byte* end = nullptr;
};

Filling& filling() {
    static Filling state;
    return state;
}

}  // namespace

SlabPiece SlabPiece::allocate(std::size_t nbytes) {
    const std::size_t size = (nbytes + 63) / 64 * 64;
    if (size > slab_nbytes / 4) {
        auto own = std::make_shared<PageBuffer>(size + huge_page);
        return {own, aligned_to_huge_page(own->data())};
    }
    Filling& state = filling();
    const std::lock_guard<std::mutex> guard(state.lock);
    std::shared_ptr<PageBuffer> slab = state.slab.lock();
    if (slab == nullptr || state.next + size > state.end) {
        slab = std::make_shared<PageBuffer>(slab_nbytes + huge_page);
        state.slab = slab;
        state.next = aligned_to_huge_page(slab->data());
        state.end = state.next + slab_nbytes;
    }
    std::byte* data = state.next;
    state.next += size;
    return {slab, data};
}

}  // namespace legato
