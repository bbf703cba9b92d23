// The threads of one parallel region and what they share to split loops: item counters and a barrier. It does what an
// orphaned `omp for schedule(dynamic, 1)` does, in a quarter of the time (a decode step has some 300 loops of
// microseconds), and waits as it is told: a short spin, then sleep, so that a busy machine is not kept busier.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace legato {

struct Team {
    explicit Team(int threads) : own(static_cast<std::size_t>(threads)) {}

    struct alignas(64) Counter {
        std::int64_t next = 0;
    };
    // Loop k takes items from counter k % 2, of the team or of one thread's range; the other is reset meanwhile.
    std::array<Counter, 2> shared;
    std::vector<std::array<Counter, 2>> own;
    alignas(64) std::int32_t arrived = 0;
    alignas(64) std::int32_t phase = 0;  // barriers passed
    std::int32_t sleepers = 0;
};

// One thread's part in a team.
struct TeamMember {
    Team* team;
    std::int32_t thread;
    std::int32_t threads;
    std::int64_t loop;
    std::int32_t phase;
};

// The calling thread's membership, or null outside a TeamScope.
TeamMember* current_member();

// Joins a team; every thread of the parallel region constructs one.
class TeamScope {
  public:
    explicit TeamScope(Team& team);
    ~TeamScope();
    TeamScope(const TeamScope&) = delete;
    TeamScope& operator=(const TeamScope&) = delete;

  private:
    TeamMember member_;
};

// Sleeps until `phase` is no longer `seen`; wakes those who sleep.
void team_sleep(Team& team, std::int32_t seen);
void team_wake(Team& team);

}  // namespace legato
