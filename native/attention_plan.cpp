#include "attention_plan.hpp"

#include <algorithm>
#include <tuple>

namespace legato {

namespace {

// A group with up to this many rows is cut at its splits in any case.
constexpr std::int64_t kSplitRows = 4;
// One with more is cut if fewer than so many of its size would make up a thread's share of the step: a few large items
// cannot be shared out evenly (5 rows at position 8,000 on two threads: one has two of three items).
constexpr std::int64_t kItemsAThread = 8;

// Rows of a sequence one group takes: as many as amortise widening a tile, fewer if threads would stand idle.
std::int64_t group_rows(const Step& step, const AttentionPlanShape& shape) {
    const std::int64_t heads = shape.heads / shape.kv_heads;
    std::int64_t query_rows = attention_block_rows(shape.head_dim);
    while (query_rows > 24 && step.rows * shape.heads < 3 * query_rows * shape.threads) query_rows /= 2;
    return std::max<std::int64_t>(1, query_rows / heads);
}

std::int64_t cost_of(const AttentionGroup& group) { return static_cast<std::int64_t>(group.rows) * group.splits; }

// Rows of partial results that a group needs if it is cut at its splits.
std::int64_t partial_rows(const AttentionGroup& group, std::int64_t heads) {
    return static_cast<std::int64_t>(group.splits) * group.rows * heads;
}

// Cuts the groups that are too large to be shared out evenly, all of them or, without room for all, none: some large
// items left over would be worse. Returns the partial rows that are taken.
std::int64_t cut_large(const AttentionPlanShape& shape, std::int64_t total, AttentionPlan& plan) {
    const auto is_large = [&](const AttentionGroup& group) {
        return group.rows > kSplitRows && group.splits > 1 && cost_of(group) * shape.threads * kItemsAThread > total;
    };
    const std::int64_t heads = shape.heads / shape.kv_heads;
    std::int64_t needed = 0;
    for (const AttentionGroup& group : plan.groups) needed += is_large(group) ? partial_rows(group, heads) : 0;
    if (shape.threads == 1 || needed > shape.partial_rows) return 0;
    std::int64_t partial = 0;
    for (AttentionGroup& group : plan.groups) {
        if (!is_large(group)) continue;
        group.partial = static_cast<std::int32_t>(partial);
        partial += partial_rows(group, heads);
    }
    return partial;
}

}  // namespace

void plan_attention(const Step& step, const AttentionPlanShape& shape, AttentionPlan& plan) {
    plan.groups.clear();
    plan.items.clear();
    const std::int64_t heads = shape.heads / shape.kv_heads;
    const std::int64_t most_rows = group_rows(step, shape);
    for (std::int64_t s = 0; s < step.sequences; ++s) {
        for (std::int64_t row = step.row_starts[s]; row < step.row_starts[s + 1]; row += most_rows) {
            const std::int64_t rows = std::min<std::int64_t>(most_rows, step.row_starts[s + 1] - row);
            const std::int64_t first =
                shape.window > 0 ? std::max<std::int64_t>(0, step.positions[row] - shape.window + 1) : 0;
            const std::int64_t first_split = first / kSplitKeys;
            const std::int64_t splits = step.positions[row + rows - 1] / kSplitKeys + 1 - first_split;
            for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
                plan.groups.push_back({.sequence = static_cast<std::int32_t>(s),
                                       .row = static_cast<std::int32_t>(row),
                                       .rows = static_cast<std::int32_t>(rows),
                                       .kv_head = static_cast<std::int32_t>(head),
                                       .first_split = static_cast<std::int32_t>(first_split),
                                       .splits = static_cast<std::int32_t>(splits),
                                       .partial = -1,
                                       .pending = static_cast<std::int32_t>(splits)});
            }
        }
    }
    // The costliest sequence first; within it, one head after the other, so that a head's keys and values stay in the
    // cache, and late rows, which see the most keys, before early ones. What comes last, and may leave threads idle, is
    // short.
    std::vector<std::int64_t> costs(static_cast<std::size_t>(step.sequences));
    std::int64_t total = 0;
    for (const AttentionGroup& group : plan.groups) {
        costs[static_cast<std::size_t>(group.sequence)] += cost_of(group);
        total += cost_of(group);
    }
    std::sort(plan.groups.begin(), plan.groups.end(), [&](const AttentionGroup& a, const AttentionGroup& b) {
        const std::int64_t a_cost = costs[static_cast<std::size_t>(a.sequence)];
        const std::int64_t b_cost = costs[static_cast<std::size_t>(b.sequence)];
        return std::tuple(-a_cost, a.sequence, a.kv_head, -a.row) < std::tuple(-b_cost, b.sequence, b.kv_head, -b.row);
    });

    std::int64_t partial = cut_large(shape, total, plan);
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
        AttentionGroup& group = plan.groups[g];
        const auto index = static_cast<std::int32_t>(g);
        const std::int64_t needed = partial_rows(group, heads);
        if (group.splits > 1 && group.rows <= kSplitRows && partial + needed <= shape.partial_rows) {
            group.partial = static_cast<std::int32_t>(partial);
            partial += needed;
        }
        if (group.partial < 0) plan.items.push_back({index, -1});
        for (std::int32_t split = 0; group.partial >= 0 && split < group.splits; ++split)
            plan.items.push_back({index, split});
    }
}

}  // namespace legato
