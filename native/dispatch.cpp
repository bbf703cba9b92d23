#include "dispatch.hpp"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace legato {

namespace portable {
const Kernels& kernels();
}
#if LEGATO_HAVE_AVX2
namespace avx2 {
const Kernels& kernels();
}
#endif
#if LEGATO_HAVE_AVX512
namespace avx512 {
const Kernels& kernels();
}
#endif
#if LEGATO_HAVE_AVX512BF16
namespace avx512bf16 {
const Kernels& kernels();
}
#endif
#if LEGATO_HAVE_AMX
namespace amx {
const Kernels& kernels();
}
#endif

namespace {

struct Candidate {
    const char* name;
    bool (*supported)();
    const Kernels& (*kernels)();
};

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

// AMX's registers are large, so Linux lends them only to processes that ask (arch_prctl, kernel 5.16).
bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!has_avx512() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
    if ((d >> 22 & 1) == 0 || (d >> 24 & 1) == 0 || (d >> 25 & 1) == 0) return false;  // AMX-BF16, -TILE, -INT8
    constexpr long kRequestPermission = 0x1023;                                        // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;                                                     // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// Plainest first.
const Candidate kCandidates[] = {
    {"portable", [] { return true; }, portable::kernels},
#if LEGATO_HAVE_AVX2
    {"avx2", has_avx2, avx2::kernels},
#endif
#if LEGATO_HAVE_AVX512
    {"avx512", has_avx512, avx512::kernels},
#endif
#if LEGATO_HAVE_AVX512BF16
    {"avx512bf16", [] { return has_avx512() && __builtin_cpu_supports("avx512bf16") != 0; }, avx512bf16::kernels},
#endif
#if LEGATO_HAVE_AMX
    {"amx", has_amx, amx::kernels},
#endif
};

const Kernels& find(const std::string& name, const char* source) {
    std::string names;
    for (const Candidate& candidate : kCandidates) {
        if (!candidate.supported()) continue;
        if (name == candidate.name) return candidate.kernels();
        names += (names.empty() ? "" : ", ") + std::string(candidate.name);
    }
    throw std::invalid_argument(std::string(source) + " \"" + name +
                                "\" is not available on this CPU; available: " + names);
}

std::atomic<const Kernels*> g_active{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Candidate& candidate : kCandidates)
        if (candidate.supported()) names.emplace_back(candidate.name);
    return names;
}

const Kernels& active_kernels() {
    const Kernels* active = g_active.load(std::memory_order_acquire);
    if (active == nullptr) {
        const char* wanted = std::getenv("LEGATO_ISA");
        active =
            wanted != nullptr && *wanted != '\0' ? &find(wanted, "LEGATO_ISA") : &find(available_isas().back(), "ISA");
        g_active.store(active, std::memory_order_release);
    }
    return *active;
}

void set_active_isa(const std::string& name) { g_active.store(&find(name, "ISA"), std::memory_order_release); }

}  // namespace legato
