// The work-sharing loop of the kernels: every thread of a team calls it, each item is done once, and nobody leaves
// before all items are done.
#pragma once

#include "isa/simd.hpp"
#include "team.hpp"

namespace legato::LEGATO_ISA {

// About 50 us on a recent x86 (a pause takes some 40 ns there, a few ns on older ones).
constexpr int kSpins = 1200;

LEGATO_INLINE void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

LEGATO_INLINE void team_barrier(TeamMember& member) {
    Team& team = *member.team;
    const std::int32_t seen = member.phase++;
    if (__atomic_add_fetch(&team.arrived, 1, __ATOMIC_ACQ_REL) == member.threads) {
        team.arrived = 0;
        __atomic_store_n(&team.phase, seen + 1, __ATOMIC_SEQ_CST);
        team_wake(team);
        return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
        if (__atomic_load_n(&team.phase, __ATOMIC_ACQUIRE) != seen) return;
        pause_briefly();
    }
    team_sleep(team, seen);
}

// Calls f(0) ... f(count - 1), each once, by whichever thread is free; the first items go to the threads in order.
template <class F>
LEGATO_INLINE void team_for(std::int64_t count, F&& f) {
    TeamMember* member = current_member();
    if (member == nullptr) {  // a parallel region without a team: one operation on its own
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t i = 0; i < count; ++i) f(i);
        return;
    }
    if (member->threads == 1) {
        for (std::int64_t i = 0; i < count; ++i) f(i);
        return;
    }
    Team& team = *member->team;
    const std::int64_t loop = member->loop++;
    std::int64_t& next = team.counters[loop % 2].next;
    // Everybody has left the loop before this one, whose counter the next one will use.
    if (member->thread == 0) __atomic_store_n(&team.counters[(loop + 1) % 2].next, 0, __ATOMIC_RELAXED);
    for (std::int64_t i = member->thread; i < count;) {
        f(i);
        i = count <= member->threads ? count : member->threads + __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    }
    team_barrier(*member);
}

}  // namespace legato::LEGATO_ISA
