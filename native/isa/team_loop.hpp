// The work-sharing loop of the kernels: every thread of a team calls it, each item is done once, and nobody leaves
// before all items are done.
#pragma once

#include <array>

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

// The number of this loop. Everybody has left the loop before it, whose counters the next one will use.
LEGATO_INLINE std::int64_t begin_loop(TeamMember& member) {
    const std::int64_t loop = member.loop++;
    const auto reset = [&](std::array<Team::Counter, 2>& counters) {
        __atomic_store_n(&counters[static_cast<std::size_t>((loop + 1) % 2)].next, 0, __ATOMIC_RELAXED);
    };
    if (member.thread == 0) reset(member.team->shared);
    reset(member.team->own[static_cast<std::size_t>(member.thread)]);
    return loop;
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
    const std::int64_t loop = begin_loop(*member);
    std::int64_t& next = member->team->shared[static_cast<std::size_t>(loop % 2)].next;
    for (std::int64_t i = member->thread; i < count;) {
        f(i);
        i = count <= member->threads ? count : member->threads + __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    }
    team_barrier(*member);
}

// The same, but each thread begins with a range of its own, so that what its items read lies in one stretch, and then
// takes from the others' ranges.
template <class F>
LEGATO_INLINE void team_for_ranges(std::int64_t count, F&& f) {
    TeamMember* member = current_member();
    if (member == nullptr || member->threads == 1) return team_for(count, f);
    const auto parity = static_cast<std::size_t>(begin_loop(*member) % 2);
    const std::int64_t threads = member->threads;
    for (std::int64_t i = 0; i < threads; ++i) {
        const std::int64_t owner = (member->thread + i) % threads;
        const std::int64_t begin = count * owner / threads, end = count * (owner + 1) / threads;
        std::int64_t& next = member->team->own[static_cast<std::size_t>(owner)][parity].next;
        while (true) {
            const std::int64_t item = begin + __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (item >= end) break;
            f(item);
        }
    }
    team_barrier(*member);
}

}  // namespace legato::LEGATO_ISA
