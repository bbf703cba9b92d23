// How one attention call is cut into work items.
#pragma once

#include <vector>

#include "attention.hpp"

namespace legato {

struct AttentionPlan {
    std::vector<AttentionGroup> groups;
    std::vector<AttentionItem> items;

    AttentionWork work() { return {groups.data(), items.data(), static_cast<std::int64_t>(items.size())}; }
};

struct AttentionPlanShape {
    std::int64_t heads;
    std::int64_t kv_heads;
    std::int64_t head_dim;
    std::int64_t window;
    std::int64_t partial_rows;  // partial rows there is room for
    int threads;
};

// Fills `plan` for one step; its vectors keep their memory. No choice made here changes a bit of the result.
void plan_attention(const Step& step, const AttentionPlanShape& shape, AttentionPlan& plan);

}  // namespace legato
