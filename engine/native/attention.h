// What the paged attentions without tiles share: what they are called with, and how it becomes work.
#pragma once

#include "team.h"

#include <algorithm>
#include <cstdint>
#include <vector>

constexpr int kPage = 64;  // keys of a page, which is a block of the KV cache

struct Shape {
    const uint16_t *q, *k, *v;
    uint16_t *out;
    int64_t q_row, out_row;      // elements between query tokens
    int64_t block, head;         // elements between KV blocks, KV heads
    const int64_t *table;        // block tables of all spans, one after the other
    int heads, kv_heads, dim, window;
    float scale;                 // of scores, in units of log 2
};

// `count` query tokens from `row` on, at the positions from `start` on, with the block table `table`,
// for `heads` KV heads from `head` on.
struct Item {
    int64_t row, start;
    const int64_t *table;
    int count, head, heads;
};

constexpr int kItemRowsMinimum = 96;
constexpr int kThreadItems = 4;  // items of a thread, at least, where that leaves enough rows

// Cuts all spans into items of at most `rows_limit` rows (tokens times their heads), and calls `work`
// with each of them on one of the threads.
// Spans: (first row of the step, rows, first position, offset of its block table) each.
template <class Work>
void for_each_item(const Shape &s, const int64_t *spans, int64_t count, int threads, int rows_limit,
                   Work work) {
    const int sharers = team_size(threads);
    int64_t rows_of_all = 0;
    for (int64_t i = 0; i < count; ++i) rows_of_all += spans[4 * i + 1] * s.heads;
    const int64_t item_rows = std::clamp<int64_t>(rows_of_all / (kThreadItems * sharers),
                                                  kItemRowsMinimum, rows_limit);
    const int64_t tokens = std::max<int64_t>(item_rows * s.kv_heads / s.heads, 1);
    std::vector<Item> items;
    // a short span's item has several heads, as many as leave work for all threads
    const int parts =
        sharers > 1 ? (int)std::clamp<int64_t>(kThreadItems * sharers / count, 1, s.kv_heads) : 1;
    const int short_span_heads = (s.kv_heads + parts - 1) / parts;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t *span = spans + 4 * i;
        const bool is_short = span[1] * s.heads / s.kv_heads <= kItemRowsMinimum;
        const int step = is_short ? short_span_heads : 1;
        for (int64_t t = 0; t < span[1]; t += tokens)
            for (int h = 0; h < s.kv_heads; h += step) {
                const int rows = (int)std::min<int64_t>(tokens, span[1] - t);
                items.push_back({span[0] + t, span[2] + t, s.table + span[3], rows, h,
                                 std::min(step, s.kv_heads - h)});
            }
    }
    // from the end: a chunk's last tokens have the most keys, and nobody shall wait for them alone
    const int64_t all = items.size();
    share_out(all, threads, [&](int64_t i) { work(items[all - 1 - i]); });
}
