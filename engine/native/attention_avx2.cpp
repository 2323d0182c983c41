// Paged attention for CPUs with AVX2: prefill and decode with one reduction order per row.
//
// A row (one query token, one head) walks its pages from 0, 64 keys at a time, with an online
// softmax. All sums are of float32. A score is summed over every eighth dim in order and then over
// the eight sums; values are summed over the keys in order. Rows share registers, never sums. So a
// row's bits depend on its query and its keys alone, whatever rows are computed beside it, in prefill
// or decode. Keys behind a row change nothing: every weight of them is 0, and the correction factor
// of a page of them is exactly 1.
//
// Keys and values are widened to float32 as they are read, which gives the even dims and the odd ones
// of 16: queries and sums are kept in that order, too.

#include "attention.h"
#include "vectors.h"

namespace {

constexpr int kRows = 3;       // rows that share registers: 3 x 4 sums, and 3 for keys or values
constexpr int kKeys = 4;       // keys whose scores are summed together
constexpr int kPair = 16;      // dims that are widened together, to even and odd ones
constexpr int kItemRows = 96;  // rows of one item, at most: their queries and sums stay in L2
constexpr float kNone = -INFINITY;
constexpr float kLog2e = 1.44269504089f;

// A query token's head, while its pages are walked.
struct Row {
    const float *q;              // [dim], of each 16 the even ones first
    uint16_t *out;
    int64_t position;
    float most, sum;             // largest score so far, sum of 2^(score - most)
    float *acc;                  // [dim] sum of weights times values, in the order of q
    alignas(32) float weights[kPage];  // of the keys of one page; before that, their scores
};

// 2^x for x <= 0 and -inf, which gives 0.
inline Floats exp2_negative(Floats x) { return exp2_ps(larger(all(-200.0f), x)); }

// The sums of the lanes of four vectors.
inline __m128 sums_of_lanes(const Floats *v) {
    const Floats fourths = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    return _mm_add_ps(_mm256_castps256_ps128(fourths), _mm256_extractf128_ps(fourths, 1));
}

// Scores of R rows with all keys of a page, not scaled.
template <int R>
void score(const Shape &s, Row *rows, const uint16_t *keys) {
    for (int key = 0; key < kPage; key += kKeys, keys += kKeys * s.dim) {
        Floats sums[R][kKeys];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < kKeys; ++i) sums[r][i] = zeros();
        for (int d = 0; d < s.dim; d += kPair)
#pragma GCC unroll 4
            for (int i = 0; i < kKeys; ++i) {
                const EvenAndOdd k = load_even_and_odd(keys + i * s.dim + d);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    sums[r][i] = multiply_add(k.even, load(rows[r].q + d), sums[r][i]);
                    sums[r][i] = multiply_add(k.odd, load(rows[r].q + d + kFloats), sums[r][i]);
                }
            }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) _mm_store_ps(rows[r].weights + key, sums_of_lanes(sums[r]));
    }
}

// Makes scores of the page's keys that `row` does not see -inf.
void hide(const Shape &s, Row &row, int64_t first) {
    const int64_t oldest = s.window ? row.position - s.window + 1 : 0;
    for (int key = 0; key < kPage; ++key)
        if (first + key > row.position || first + key < oldest) row.weights[key] = kNone;
}

// Softmax weights of a row that sees a key of the page, in place of its scores. Returns what corrects
// the sums over earlier pages.
float weigh(const Shape &s, Row &row) {
    Floats top = load(row.weights);
    for (int key = kFloats; key < kPage; key += kFloats) top = larger(top, load(row.weights + key));
    const float most = std::max(row.most, largest_lane(top) * s.scale);
    Floats total = zeros();
    for (int key = 0; key < kPage; key += kFloats) {
        const Floats score = multiply_subtract(load(row.weights + key), all(s.scale), all(most));
        const Floats weight = exp2_negative(score);
        total = add(total, weight);
        store(row.weights + key, weight);
    }
    const float correction = _mm256_cvtss_f32(exp2_negative(all(row.most - most)));
    row.sum = std::fma(row.sum, correction, sum_lanes(total));
    row.most = most;
    return correction;
}

// acc = acc * correction + weights * values of the page's first `count` keys, for R rows.
template <int R>
void accumulate(const Shape &s, Row *rows, const float *correction, const uint16_t *values, int count) {
    constexpr int kPairs = 2;  // of `kPair` dims, together
    for (int d = 0; d < s.dim; d += kPairs * kPair) {
        Floats acc[R][2 * kPairs];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * kPairs; ++i)
                acc[r][i] = multiply(load(rows[r].acc + d + i * kFloats), all(correction[r]));
        const uint16_t *value = values + d;
        for (int key = 0; key < count; ++key, value += s.dim)
#pragma GCC unroll 4
            for (int i = 0; i < kPairs; ++i) {
                const EvenAndOdd v = load_even_and_odd(value + i * kPair);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const Floats weight = all(rows[r].weights[key]);
                    acc[r][2 * i] = multiply_add(v.even, weight, acc[r][2 * i]);
                    acc[r][2 * i + 1] = multiply_add(v.odd, weight, acc[r][2 * i + 1]);
                }
            }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * kPairs; ++i) store(rows[r].acc + d + i * kFloats, acc[r][i]);
    }
}

// One page for R rows of ascending positions, each of which sees a key of it.
template <int R>
void page(const Shape &s, Row *rows, const uint16_t *keys, const uint16_t *values, int64_t first) {
    score<R>(s, rows, keys);
    float correction[R];
    for (int r = 0; r < R; ++r) {
        const bool sees_all = rows[r].position >= first + kPage - 1 &&
                              !(s.window && first <= rows[r].position - s.window);
        if (!sees_all) hide(s, rows[r], first);
        correction[r] = weigh(s, rows[r]);
    }
    // keys behind the last row have no weight, and their values may be no numbers
    const int count = (int)std::min<int64_t>(kPage, rows[R - 1].position - first + 1);
    accumulate<R>(s, rows, correction, values, count);
}

// One page for up to kRows rows of ascending positions, less those at both ends that see no key.
void any_page(const Shape &s, Row *rows, int count, const uint16_t *keys, const uint16_t *values,
              int64_t first) {
    while (count && first > rows[0].position) ++rows, --count;
    while (count && s.window && first + kPage - 1 <= rows[count - 1].position - s.window) --count;
    switch (count) {
        case 1: return page<1>(s, rows, keys, values, first);
        case 2: return page<2>(s, rows, keys, values, first);
        case 3: return page<3>(s, rows, keys, values, first);
    }
}

void finish(const Shape &s, const Row &row) {
    const Floats inverse = all(1.0f / row.sum);
    for (int d = 0; d < s.dim; d += kPair)
        store_even_and_odd(row.out + d, multiply(load(row.acc + d), inverse),
                           multiply(load(row.acc + d + kFloats), inverse));
}

// The heads of a page lie one after the other, so they are walked in that order.
void work(const Shape &s, const Item &item) {
    thread_local std::vector<float> queries, acc;
    thread_local std::vector<Row> rows;
    const int group = s.heads / s.kv_heads, total = item.count * group;
    queries.resize((size_t)item.heads * total * s.dim);
    acc.assign((size_t)item.heads * total * s.dim, 0.0f);
    rows.resize(item.heads * total);
    for (int i = 0; i < item.heads * total; ++i) {
        const int head = item.head + i / total, of_head = i % total;
        const int64_t token = item.row + of_head / group;
        const int64_t column = (int64_t)(head * group + of_head % group) * s.dim;
        const uint16_t *from = s.q + token * s.q_row + column;
        float *q = queries.data() + (size_t)i * s.dim;
        for (int d = 0; d < s.dim; d += kPair) {
            const EvenAndOdd pair = load_even_and_odd(from + d);
            store(q + d, pair.even);
            store(q + d + kFloats, pair.odd);
        }
        Row &row = rows[i];
        row.q = q;
        row.out = s.out + token * s.out_row + column;
        row.position = item.start + of_head / group;
        row.most = kNone;
        row.sum = 0.0f;
        row.acc = acc.data() + (size_t)i * s.dim;
    }
    const int64_t oldest = s.window ? std::max<int64_t>(item.start - s.window + 1, 0) : 0;
    const int64_t last = (item.start + item.count - 1) / kPage;
    for (int64_t p = oldest / kPage; p <= last; ++p)
        for (int h = 0; h < item.heads; ++h) {
            const int64_t base = item.table[p] * s.block + (item.head + h) * s.head;
            for (int r = 0; r < total; r += kRows)
                any_page(s, &rows[h * total + r], std::min(kRows, total - r), s.k + base, s.v + base,
                         p * kPage);
        }
    for (const Row &row : rows) finish(s, row);
}

}  // namespace

// Spans: (first row of the step, rows, first position, offset of its block table) each.
extern "C" void attention_avx2(const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out,
                               int64_t q_row, int64_t out_row, int64_t block, int64_t head,
                               const int64_t *spans, int64_t count, const int64_t *table, int heads,
                               int kv_heads, int dim, int window, float scale, int threads) {
    const Shape s{q, k, v, out, q_row, out_row, block, head, table,
                  heads, kv_heads, dim, window, scale * kLog2e};
    for_each_item(s, spans, count, threads, kItemRows, [&](const Item &item) { work(s, item); });
}
