#include "team.hpp"

#include <omp.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#else
#include <sched.h>
#endif

namespace legato {

namespace {
thread_local TeamMember* t_member = nullptr;
}

TeamMember* current_member() { return t_member; }

TeamScope::TeamScope(Team& team) : member_{&team, omp_get_thread_num(), omp_get_num_threads(), 0, 0} {
    t_member = &member_;
}

TeamScope::~TeamScope() { t_member = nullptr; }

#if defined(__linux__)

void team_sleep(Team& team, std::int32_t seen) {
    // The count is raised before the phase is looked at, and the phase is moved before the count is looked at (both
    // sequentially consistent), so either the sleeper sees the new phase or the waker sees the sleeper.
    __atomic_add_fetch(&team.sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team.phase, __ATOMIC_SEQ_CST) == seen)
        syscall(SYS_futex, &team.phase, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    __atomic_sub_fetch(&team.sleepers, 1, __ATOMIC_SEQ_CST);
}

void team_wake(Team& team) {
    if (__atomic_load_n(&team.sleepers, __ATOMIC_SEQ_CST) != 0)
        syscall(SYS_futex, &team.phase, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#else

void team_sleep(Team& team, std::int32_t seen) {
    while (__atomic_load_n(&team.phase, __ATOMIC_ACQUIRE) == seen) sched_yield();
}

void team_wake(Team&) {}

#endif

}  // namespace legato
